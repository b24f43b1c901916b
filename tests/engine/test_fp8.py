"""Linear layers in FP8: rollout and training compute one quantized function of the weights that checkpoints hold."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from areno.bench.work import model_folder as shape_folder
from areno.config.fp8 import FP8Config
from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.cost.memory import model_bytes
from areno.engine.engine import Engine
from areno.kernels.fp8 import round_rows
from areno.kernels.fp8.int8 import Int8Matrix
from areno.layers.attention import PackedAttend
from areno.layers.config import AdapterSpec
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.adapters import add_adapters
from areno.models.fp8_layers import n_quantized_parameters
from areno.models.quantization import quantize_linears, quantized_buffers, quantized_linears
from areno.models.registry import build_model, load_config
from areno.models.weights import load_weights
from areno.plan.startup_log import log_model
from areno.specs.role import LoraSpec, RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.trainers.rows import token_rows
from areno.types import TrainSequence
from tests.helpers.processes import worker_of
from tests.helpers.resumed import go, log, stopped_sft
from tests.helpers.tiny_engine import (
    folder_with_weights,
    model_folder,
    request,
    rollout,
    saved_tensors,
    spec,
    tokens_of,
    train_rows,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STORED = [*(f"self_attn.{name}" for name in ALL[:4]), *(f"mlp.{name}" for name in ALL[4:])]
ADAPTERS = LoraSpec(adapters=AdapterSpec(4, 8.0, ALL))
UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=300))
FP8 = FP8Config()
REQUESTS = [request(index, n_samples=1 + index % 3, length=4 + 9 * index) for index in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def scores(engine: Engine, rows: list[TrainSequence], role: str = "actor") -> list[Any]:
    return engine.logprobs(role, token_rows(rows), SamplingConfig())


def largest(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


WHAT: dict[str, dict[str, Any]] = {"products": {"fp8": FP8}, "keys": {"fp8_kv": True}}
WHAT["both"] = WHAT["products"] | WHAT["keys"]
LAYOUTS = {"one": {}, "tp": {"devices": 2, "tp_size": 2}, "cp": {"devices": 2, "cp_size": 2}}
CASES = [
    pytest.param(
        WHAT[what] | LAYOUTS[layout] | ({"lora": ADAPTERS} if adapters else {}),
        id=f"{what}, {layout}{', adapters' * adapters}",
        marks=[pytest.mark.slow] * (layout != "one" or what == "keys"),
    )
    for what, layout, adapters in itertools.product(WHAT, LAYOUTS, (False, True))
]
INT8 = {"fp8": FP8Config(mode="int8"), "lora": ADAPTERS}
MORE: dict[str, dict[str, Any]] = {f"int8, {layout}": INT8 | options for layout, options in LAYOUTS.items()}
MORE |= {"int8, bf16": INT8 | {"dtype": "bfloat16"}, "int8, keys": INT8 | WHAT["keys"]}
MORE |= {"wgrad": {"fp8": FP8Config(dgrad=False, wgrad=True)}, "bf16": WHAT["both"] | {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    "options", [*CASES, *(pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in MORE.items())]
)
def test_exact_rollout_and_training_have_the_same_bits(folder: Path, options: dict[str, Any]) -> None:
    """Before and after an update, whose difference ends the run."""
    with Engine(spec(folder, exact=True, **options), "spawn" if "devices" in options else "inline") as engine:
        for _ in range(2):
            rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
            before = scores(engine, rows)
            for row, computed in zip(rows, before, strict=True):
                sampled = ~np.asarray(row.prompt_mask)
                assert np.array_equal(np.asarray(row.logprobs, dtype=np.float32)[sampled], computed[sampled])
            assert engine.train(rows, grpo_loss_fn, UPDATE)["logp_abs_diff_max"] == 0.0
            assert largest(scores(engine, rows), before) > 1e-3


@pytest.mark.parametrize("exclude", [[], ["o_proj", "layers.1.mlp"]])
def test_the_function_is_that_of_rounded_inputs_and_weights(exclude: list[str], tmp_path: Path) -> None:
    import transformers

    fp8 = FP8Config(exclude_modules=exclude)
    path = str(folder_with_weights(tmp_path))
    model = build_model(load_config(path), dtype=torch.float32, device="cpu")
    load_weights(model, path)
    quantize_linears(model, fp8)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.arange(2, 50)
    plain = theirs(tokens[None]).logits[0]
    n_rounded = 0
    for name, module in theirs.model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in exclude):
            module.weight.data = round_rows(module.weight.data)
            module.register_forward_pre_hook(lambda _, given: round_rows(given[0]))
            n_rounded += module.weight.numel()
    assert n_quantized_parameters(model.config, fp8) == n_rounded
    assert sum(module.weight.numel() for module in quantized_linears(model)) == n_rounded
    starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
    attend = PackedAttend(starts, len(tokens), "sdpa")
    with torch.no_grad():
        logits = model.logits(model(tokens, torch.arange(len(tokens)), attend))
    expected = theirs(tokens[None]).logits[0]
    assert (logits - expected).abs().max() < 0.01 * (plain - expected).abs().max()


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    config = load_config(shape_folder("qwen3-0.6b", tmp_path)[0])
    ends = FP8Config(first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert n_quantized_parameters(config, ends) == 25 / 28 * n_quantized_parameters(config, FP8)


def test_a_run_says_which_layers_are_in_fp8(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp8 = FP8Config(exclude_modules=["layers.0", "o_proj"])
    with Engine(spec(folder, fp8=fp8), "inline") as engine, caplog.at_level(logging.INFO, "areno"):
        log_model(engine)
        codes = [module.quantized for module in quantized_linears(worker_of(engine).actor)]
        n_bytes = sum(each.codes_OI.nbytes for each in codes if each is not None)
    left_out = [f"layers.0.{name}" for name in STORED] + ["layers.1.self_attn.o_proj"]
    assert (
        f"FP8: 6 of 14 linear layers (e4m3, a scale for each token and output), {n_bytes / 2**20:.1f} MiB of codes on "
        f"each device; in float32: {', '.join(left_out)}"
    ) in caplog.messages
    assert "FP8 products are emulated on a CPU, which is slow" in caplog.messages


@pytest.mark.parametrize(
    ("sizes", "dtype", "told"),
    [
        ({}, "bfloat16", None),
        ({}, "float32", "of all layers are emulated, which is slow, because weights are in float32"),
        (
            {"intermediate_size": 40},
            "bfloat16",
            "of layers.0.mlp.down (32 x 40), layers.1.mlp.down (32 x 40) are emula",
        ),
    ],
)
def test_layers_that_a_gpu_emulates_are_warned_of(
    sizes: dict[str, int], dtype: str, told: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = spec(model_folder(tmp_path, **sizes), ["cuda:0"], fp8=FP8, exact=True)
    info = SimpleNamespace(
        cost=SimpleNamespace(experts=None), tp_sums="", n_params=1, dtype=dtype, attn_backend="fixed_order"
    )
    engine: Any = SimpleNamespace(info=info, spec=replace(given, share_prefixes="off"), memory_table=lambda: ("", ""))
    log_model(engine)
    assert [told in text for text in caplog.messages] == [True] * (told is not None)


def test_checkpoints_are_those_of_a_model_without_fp8(folder: Path, tmp_path: Path) -> None:
    """Of the same weights; and a state continues with the same bits."""
    with Engine(spec(folder, fp8=FP8), "inline") as engine, Engine(spec(folder), "inline") as plain:
        rows = train_rows(rollout(engine))
        engine.train(rows, grpo_loss_fn, UPDATE)
        engine.save(str(tmp_path / "fp8"))
        engine.save_state(tmp_path / "state")
        engine.is_state_written(wait=True)
        plain.load_state(tmp_path / "state")
        plain.save(str(tmp_path / "plain"))
        assert largest(scores(plain, rows), scores(engine, rows)) > 1e-2
        with Engine(spec(folder, fp8=FP8), "inline") as resumed:
            resumed.load_state(tmp_path / "state")
            assert largest(scores(resumed, rows), scores(engine, rows)) == 0.0
            for each in (engine, resumed):
                each.train(rows, grpo_loss_fn, UPDATE)
            assert largest(scores(resumed, rows), scores(engine, rows)) == 0.0
            assert tokens_of(rollout(resumed)) == tokens_of(rollout(engine))
    saved, expected = saved_tensors(tmp_path / "fp8"), saved_tensors(tmp_path / "plain")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def test_the_reference_is_the_actor_before_training(folder: Path) -> None:
    with Engine(spec(folder, fp8=FP8), "inline") as engine:
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), key="ref.path", fp8=FP8)})
        rows = train_rows(rollout(engine))
        before = scores(engine, rows)
        assert largest(scores(engine, rows, "ref"), before) == 0.0
        engine.train(rows, grpo_loss_fn, UPDATE)
        assert largest(scores(engine, rows, "ref"), before) == 0.0
        assert largest(scores(engine, rows), before) > 1e-3


def test_codes_rest_in_host_memory_with_their_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the part of the device: what is away has no memory, what returns is what left."""
    monkeypatch.setattr("areno.engine.roles.has_separate_memory", lambda device: True)
    with Engine(spec(folder, fp8=FP8), "inline") as engine:
        ref = RoleSpec(path=str(folder), key="ref.path", fp8=FP8, offload=True)
        engine.ensure_roles({"ref": ref, "adapted": replace(ref, lora=ADAPTERS)})
        rows = train_rows(rollout(engine))
        for role in ("ref", "adapted"):
            buffers = quantized_buffers(worker_of(engine).roles[role].backend.model)
            assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)
            for _ in range(2):
                assert largest(scores(engine, rows, role), scores(engine, rows)) == 0.0


@pytest.mark.parametrize("mode", ["e4m3", "int8"])
def test_frozen_weights_under_adapters_are_in_8_bits_only(mode: Any, folder: Path, tmp_path: Path) -> None:
    """A merged checkpoint is q(W) + B A; the reference is the model without adapters."""
    fp8 = FP8Config(mode=mode)
    with Engine(spec(folder, lora=ADAPTERS, fp8=fp8), "inline") as engine:
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), key="ref.path", fp8=fp8)})
        rows = train_rows(rollout(engine))
        before = scores(engine, rows)
        engine.train(rows, grpo_loss_fn, UPDATE)
        assert largest(scores(engine, rows, "ref"), before) == 0.0
        engine.save(str(tmp_path / "merged"), merge=True)
        engine.save(str(tmp_path / "adapters"))
    with Engine(spec(folder), "inline") as plain:
        plain.save(str(tmp_path / "start"))
    merged, start = saved_tensors(tmp_path / "merged"), saved_tensors(tmp_path / "start")
    of_adapters = saved_tensors(tmp_path / "adapters")
    for name, weight in start.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in of_adapters:
            assert torch.equal(merged[name], weight), name
            continue
        added = 2.0 * of_adapters[f"{module}.lora_B.weight"] @ of_adapters[f"{module}.lora_A.weight"]
        rounded = round_rows(weight) if mode == "e4m3" else Int8Matrix.of(weight).dequantized(weight.dtype)
        torch.testing.assert_close(merged[name], rounded + added, rtol=1e-6, atol=1e-6)
        assert added.abs().max() > 0


@pytest.mark.parametrize(
    ("adapters", "fp8"), [(None, FP8), (ADAPTERS.adapters, FP8), (ADAPTERS.adapters, FP8Config(mode="int8"))]
)
def test_the_plan_knows_the_memory(adapters: AdapterSpec | None, fp8: FP8Config, folder: Path) -> None:
    config = load_config(folder)
    model = build_model(config, dtype=torch.bfloat16, device="cpu")
    quantize_linears(model, fp8, free_weights=adapters is not None)
    if adapters is not None:
        add_adapters(model, adapters)
    held = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters() if parameter.numel())
    held += sum(each.nbytes for each in quantized_buffers(model))
    planned = model_bytes(config, 2, None, adapters=adapters, fp8=fp8).weights
    n_scales = 5 * sum(len(module.weight) for module in quantized_linears(model))
    placeholders = 2 * len(list(quantized_linears(model))) if adapters else 0
    assert held == planned + n_scales + placeholders


@pytest.mark.slow
def test_a_run_that_resumes_with_another_number_of_ranks_warns(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fp8 = "actor.fp8_config.mode=e4m3"
    stopped_sft(2, tmp_path_factory, fp8)
    assert go("sft", fp8, "engine.world_size=2", "engine.tp_size=2") == 0
    assert "engine.tp_size differs from that of the earlier part of the run" in log()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"fp8_kv": True}, {"lora": ADAPTERS}, INT8], ids=["weights", "keys", "adapters", "int8"]
)
def test_bits_on_cuda(options: dict[str, Any], tmp_path: Path) -> None:
    """In bf16, with CUDA graphs and padded products, before and after an update."""
    path, _ = shape_folder("qwen3-0.6b", tmp_path)
    given = spec(path, ["cuda:0"], dtype="bfloat16", exact=True, **{"fp8": FP8, **options})
    requests = [request(i, n_samples=8, length=60 + i, max_new_tokens=70) for i in range(12)]
    with Engine(given, "inline") as engine:
        for _ in range(2):
            engine.begin_rollout(RolloutSpec(max_running=96, max_len=160))
            rows = train_rows(engine.generate(requests), requests)
            engine.end_rollout()
            for row, computed in zip(rows, scores(engine, rows), strict=True):
                sampled = ~np.asarray(row.prompt_mask)
                assert np.array_equal(np.asarray(row.logprobs, dtype=np.float32)[sampled], computed[sampled])
            update = replace(UPDATE, mb_spec=MicroBatchSpec(max_tokens_per_mb=4096))
            assert engine.train(rows, grpo_loss_fn, update)["logp_abs_diff_max"] == 0.0
