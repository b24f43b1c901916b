"""Descriptions of a run and its engine that are logged when it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.config.fp8 import SIZE_MULTIPLE, FP8Config
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.loader import BatchLoader
from areno.data.mixed_loader import MixedLoader
from areno.engine.engine import Engine
from areno.environments.package import LazyRows
from areno.models.fp8_layers import emulated_linears, n_quantized_parameters, names_in_checkpoint
from areno.models.registry import load_config
from areno.plan.plan import TrainerPlan, advice_on_rounding
from areno.specs.role import LoraSpec, RoleSpec
from areno.tracking.run_log import IN_FULL

logger = logging.getLogger("areno")

_LOOKED_AT = 1000  # rows
_NAMED = 8  # layers


def startup_facts(
    config: ExperimentConfig, plan: TrainerPlan, roles: Mapping[str, RoleSpec], loader: BatchLoader[Any] | MixedLoader
) -> dict[str, str]:
    """Describe a run in one line each: its "model", training "rows", and "layout" over devices."""
    spec, n_devices = plan.spec, len(plan.spec.devices)
    others = [f"{name} ({'the same' if of.path == spec.actor.path else of.path})" for name, of in roles.items()]
    lora = f" (LoRA of rank {spec.actor.adapters.rank})" if spec.actor.adapters else ""
    step = f"{loader.batch_size} a step"
    if isinstance(config, PolicyExperimentConfig):
        step += f", {config.gconfig.n_samples} samples of each"
    layout = ", ".join(spec.devices) if n_devices < 3 else f"{n_devices} devices"
    if spec.n_nodes > 1:
        layout += f" on {spec.n_nodes} nodes"
    if spec.layout.is_sharded:
        copies, over = spec.layout.dp_size, f"over {len(spec.layout.replica_ranks(0))} devices"
        layout += f": one copy {over}" if copies == 1 else f": {copies} copies {over} each"
    if spec.layout.cp_size > 1:
        layout += f", {spec.layout.cp_size} copies to a row"
    return {
        "model": " + ".join([config.actor.path + lora, *others]),
        "rows": " + ".join(f"{part.n_rows:,} of {part.name}" for part in loader.parts.values()) + f", {step}",
        "layout": f"{layout}, {spec.dtype}",
    }


def log_model(engine: Engine) -> None:
    from areno.kernels.attention import BACKENDS  # imports torch

    info, lora = engine.info, engine.spec.actor.lora
    active = f" ({info.cost.active_params / 1e6:,.1f}M active)" if info.cost.experts is not None else ""
    sums = f", sums of {len(engine.spec.layout.replica_ranks(0))} ranks by {info.tp_sums}" if info.tp_sums else ""
    logger.info(
        "model: %.1fM parameters%s, %s on %s, attention by %s%s",
        info.n_params / 1e6,
        active,
        info.dtype,
        ", ".join(map(str, engine.spec.addresses)),
        BACKENDS[info.attn_backend],
        sums,
    )
    if engine.spec.engine.attn_backend == "flash" and info.attn_backend != "flash":
        logger.warning(
            "engine.attn_backend is flash, which needs a GPU of compute capability 8.0 or more; native runs instead"
        )
    if engine.spec.actor.fp8 is not None:
        _log_fp8(engine, engine.spec.actor.fp8)
    if engine.spec.actor.fp8_kv:
        logger.info("keys and values: rounded to FP8 (e4m3, a scale for each token and head), and cached in it")
        if engine.spec.actor.optimizer is not None and not engine.spec.engine.exact:
            logger.warning(
                "rollout.kv_cache_dtype=fp8 without engine.exact: where rollout and training differ by rounding, keys "
                "and values may round to different codes, so log-probabilities differ more; %s",
                advice_on_rounding(engine.spec),
            )
    if lora is not None:
        share = info.n_adapter_params / info.n_params
        logger.info(
            "adapters: %.2fM parameters (%.2g %%), LoRA of rank %d on %s%s",
            info.n_adapter_params / 1e6,
            100 * share,
            lora.adapters.rank,
            ", ".join(lora.adapters.targets),
            _adapter_origin(lora),
        )
    if engine.spec.share_prefixes != "off" and info.sharing.when == "off":
        logger.info("prefixes of rows are not shared in training, because the model has recurrent states")
    _log_memory(engine)


def _log_fp8(engine: Engine, fp8: FP8Config) -> None:
    """Log which linear layers compute in FP8, how much memory their codes take, and which products are emulated."""
    spec, info = engine.spec, engine.info
    config = load_config(spec.actor.path, spec.actor.head)
    within, left_out = names_in_checkpoint(config, fp8)
    logger.info(
        "%s: %d of %d linear layers (%s), %.1f MiB of codes on each device%s",
        "FP8" if fp8.rounds_inputs else "int8",
        len(within),
        len(within) + len(left_out),
        "e4m3, a scale for each token and output" if fp8.rounds_inputs else "weights alone, a scale for each output",
        n_quantized_parameters(config, fp8, spec.layout) / 2**20,
        f"; in {info.dtype}: {_first_names(left_out)}" if left_out else "",
    )
    if not fp8.rounds_inputs:
        return
    if not spec.devices[0].startswith("cuda"):
        logger.info("FP8 products are emulated on a CPU, which is slow")
    elif info.dtype != "bfloat16":
        logger.warning("FP8 products of all layers are emulated, which is slow, because weights are in %s", info.dtype)
    elif emulated := emulated_linears(config, fp8, spec.layout):
        logger.warning(
            "FP8 products of %s are emulated, which is slow, because sizes are no multiples of %d",
            _first_names([f"{name} ({o} x {i})" for name, (o, i) in emulated.items()]),
            SIZE_MULTIPLE,
        )


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _adapter_origin(lora: LoraSpec) -> str:
    if not lora.init_from:
        return ""
    base = lora.trained_on or "a model that is not named"
    return f", from {lora.init_from} (whose rank, alpha and modules count, not the settings), trained on {base}"


def _log_memory(engine: Engine) -> None:
    """Log one line with the computed memory of the models. Write a table by device to logs/run.log only."""
    short, table = engine.memory_table()
    logger.info("%s", short)
    for line in table.splitlines():
        logger.info("%s", line, extra=IN_FULL)


@contextmanager
def log_memory_after(engine: Engine) -> Iterator[None]:
    """Log the computed memory of an engine's models after the `with` block, if the block has changed it."""
    before = engine.memory_table()
    yield
    if engine.memory_table() != before:
        _log_memory(engine)


def describe_missing_answers(loader: BatchLoader[Any] | MixedLoader) -> str:
    """Return "" if any of the first 1000 training rows has solutions, else a text such as "no row of a.jsonl"."""
    without = []
    for part in loader.parts.values():
        count = 1 if isinstance(part.rows, LazyRows) else min(part.n_rows, _LOOKED_AT)
        if any(part.rows[index].get("solutions") is not None for index in range(count)):
            return ""
        without.append(
            f"no row of {part.name}" if count == part.n_rows else f"none of the first {count} of {part.name}"
        )
    return " and ".join(without)
