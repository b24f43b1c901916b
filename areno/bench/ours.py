"""The work done by areno's engine, as a Trainer drives it.

What each kind of sampling setting costs: the same rollout with it, against plain sampling at temperature 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areno.bench.arguments import Settings, Work, row
from areno.bench.device import memory_watched
from areno.bench.profile import busy_s, idle_share, phase_table, traced
from areno.bench.timing import Timed, measure, repeat_name, tell
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.run import DecoderConfig, EngineConfig
from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.engine.spec import EngineSpec, LoraSpec, RoleSpec, RolloutSpec, UpdateSpec
from areno.errors import ConfigError, Problem
from areno.layers.config import AdapterSpec
from areno.loss_fns import gspo_loss_fn
from areno.models.adapter_shapes import linear_shapes
from areno.models.config import TransformerConfig
from areno.models.cost import Cost
from areno.models.registry import load_config
from areno.types import GenerationRequest, SamplingParams, TrainSequence


def adapters_of(settings: Settings, config: TransformerConfig) -> AdapterSpec | None:
    """On all linear layers, or none at all."""
    if settings.lora_rank is None:
        return None
    return AdapterSpec(settings.lora_rank, 2.0 * settings.lora_rank, tuple(linear_shapes(config)))


class Ours:
    """A contender. Close its engine."""

    name = "areno"

    def __init__(self, settings: Settings, folder: str, random_init: bool):
        self._settings = settings
        self._created = time.perf_counter()
        adapters = adapters_of(settings, load_config(folder))
        self.engine = Engine(
            EngineSpec(
                actor=RoleSpec(
                    path=folder,
                    random_init=random_init,
                    optimizer=OptimizerConfig(lr=1e-6, type=settings.optimizer) if settings.trains else None,
                    gradient_checkpointing=settings.recompute,
                    lora=None if adapters is None else LoraSpec(adapters=adapters, base=folder),
                ),
                tokenizer_path=settings.tokenizer or "",
                devices=settings.devices,
                engine=EngineConfig.of(settings, device="auto"),
                dtype=settings.dtype,
                mb_spec=MicroBatchSpec(max_tokens_per_mb=settings.tokens_per_mb),
                routing_replay=settings.routing_replay,
            ),
            "inline" if settings.profile else "auto",  # a tracer sees its own process only
        )
        self.start_s = time.perf_counter() - self._created
        self.vocab_size = self.engine.info.vocab_size
        if settings.routing_replay and self.engine.info.routes is None:
            self.engine.close()
            raise ConfigError([Problem("--routing-replay", f"is for models with experts; {settings.shape} has none")])
        self.cache_tokens = 0

    def first_tokens(self) -> dict[str, float]:
        """Seconds from the start of the engine to the first token, and to the second: all of the batch at once."""
        work, out = self._settings.work, {"start_s": self.start_s}
        for name, most in (("first_token_s", 1), ("second_token_s", 2)):
            self.rollout(work.with_new_at_most(most), work.prompts(self.vocab_size, -2))
            out[name] = time.perf_counter() - self._created
        return out

    def begin(self, max_running: int, max_len: int) -> RequestLimits:
        """Begin a rollout phase; what it has room for."""
        settings = self._settings
        decoder = DecoderConfig(
            max_prefill_tokens=settings.max_prefill_tokens, mem_fraction=settings.mem_fraction,
            eager_decode=settings.eager_decode,
        )  # fmt: skip
        max_len = min(max_len, self.engine.info.context_len)
        return self.engine.begin_rollout(RolloutSpec(max_running=max_running, max_len=max_len, decoder=decoder))

    def rollout(self, work: Work, prompts: list[list[int]], **params: Any) -> list[TrainSequence]:
        """One rollout phase. params: of SamplingParams, beside those that the work sets."""
        self.cache_tokens = self.begin(self._settings.work.n_rows, max(self._settings.work.row_lens)).cache_tokens
        outputs = self.engine.generate(requests(work, prompts, **params))
        self.engine.end_rollout()
        return [
            replace(row(prompts[request_id], output.tokens, output.logprobs, output.sample), routes=output.routes)
            for request_id, samples in outputs.items()
            for output in samples
        ]

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Update by GSPO on the rows, as if they had just been sampled, and wait for the last weight."""
        fresh = [replace(item, old_logprobs=None) for item in rows]
        spec, settings = self.engine.spec.mb_spec, self._settings
        update = UpdateSpec(spec, settings.updates, seed=1, old_logprobs=settings.old_logprobs)
        stats = self.engine.train(fresh, partial(gspo_loss_fn, clip_eps=3e-4), update)
        self.engine.wait()
        return stats

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[list[float]]:
        """Under the actor."""
        tokens, routes = [item.tokens or [] for item in rows], [item.routes for item in rows]
        return [row.tolist() for row in self.engine.logprobs("actor", tokens, routes=routes)]


def requests(work: Work, prompts: list[list[int]], **params: Any) -> list[GenerationRequest]:
    """Of a work's prompts. params: of SamplingParams, beside those that the work sets."""
    return [
        GenerationRequest(
            request_id=index, prompt=prompt, n_samples=work.n_samples, seed=index,
            params=SamplingParams(**{"max_new_tokens": new_len, "ignore_eos": True, **params}),
        )
        for index, (prompt, new_len) in enumerate(zip(prompts, work.new_lens, strict=True))
    ]  # fmt: skip


def run_ours(settings: Settings, folder: str, random_init: bool, cost: Cost) -> dict[str, Any]:
    """All figures of areno for these settings."""
    tell(f"areno: starting {settings.shape} on {settings.device}")
    with memory_watched(settings.device, on=not settings.profile) as device_peak:
        ours = Ours(settings, folder, random_init)
        with ours.engine:
            figures: dict[str, Any] = ours.first_tokens() if settings.rolls_out else {"start_s": ours.start_s}
            ours.engine.peak_memory_gib()  # what came before is not of this work
            timed = measure(ours, settings.kind, settings.work, settings.repeats)
            figures |= timed.figures(settings.work)
            peak = max([ours.engine.peak_memory_gib(), *(stats["memory_gib"] for stats in timed.stats)])
            kv_gib = ours.cache_tokens * cost.kv_bytes / 2**30
            figures |= {"peak_memory_gib": peak, "kv_cache_gib": kv_gib, "peak_apart_from_kv_gib": peak - kv_gib}
            if settings.kind == "step":
                for name in ("logp_abs_diff_mean", "logp_abs_diff_max", "clip_frac", "ratio_std"):
                    figures[name] = statistics.median(stats[name] for stats in timed.stats)
            elif settings.kind == "rollout":
                figures |= _agreement(timed.rows, ours.logprobs(timed.rows))
            figures |= {
                "attention": ours.engine.info.attn_backend,
                "tp_sums": ours.engine.info.tp_sums,
                "repeats_s": timed.seconds,
            }
            if settings.profile:
                figures |= _profile(ours, settings, timed, figures)
    return figures | device_peak


def _agreement(rows: Sequence[TrainSequence], scored: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the rollout's log-probabilities are from those of scoring, over the sampled tokens."""
    differences = [
        abs(drawn - again)
        for item, again_row in zip(rows, scored, strict=True)
        for is_prompt, drawn, again in zip(item.prompt_mask or [], item.logprobs or [], again_row, strict=True)
        if not is_prompt
    ]
    return {"logp_abs_diff_mean": statistics.fmean(differences), "logp_abs_diff_max": max(differences)}


def _profile(ours: Ours, settings: Settings, timed: Timed, figures: dict[str, Any]) -> dict[str, float]:
    """Trace each phase once more, write the tables, return how idle the device was."""
    prompts = settings.work.prompts(ours.vocab_size, -3)
    bodies: dict[str, Any] = {
        "rollout": lambda: ours.rollout(settings.work, prompts),
        "train": lambda: ours.train(timed.rows),
        "logprob": lambda: ours.logprobs(timed.rows),
    }
    out: dict[str, float] = {}
    text = f"{settings.kind} {settings.shape} {settings.work.name}, {settings.dtype}\n"
    for phase, body in bodies.items():
        if phase in timed.seconds:
            tell(f"tracing {phase}")
            started = time.perf_counter()
            spans = traced(body)
            plain_s = figures[f"{phase}_s"]
            text += phase_table(phase, spans, time.perf_counter() - started, plain_s)
            out[f"{phase}_idle_share"] = idle_share(busy_s(spans), plain_s)
    Path(settings.profile or "").write_text(text, encoding="utf-8")
    tell(f"kernels by group are in {settings.profile}")
    return out


_QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # what the model card of Qwen3 recommends


def run_sampling(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """Name of the setting -> median seconds, tokens per second, and the speed relative to plain sampling.

    The settings take turns, so that a change of the device's speed meets all of them alike.
    """
    work = settings.work
    ours = Ours(settings, folder, random_init)
    kinds = _kinds(work, settings.tokenizer is not None)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with ours.engine:
        for repeat in range(-1, settings.repeats):
            for name, params in kinds.items():
                prompts = work.prompts(ours.vocab_size, repeat)
                started = time.perf_counter()
                ours.rollout(work, prompts, **params)
                taken = time.perf_counter() - started
                tell(f"{name}, {repeat_name(repeat, settings.repeats)}: {taken:.3f} s")
                if repeat >= 0:
                    seconds[name].append(taken)
    return speeds(work, seconds, "plain")


def speeds(work: Work, seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Of each way to do the work: the median of its seconds, tokens per second, and the speed relative to `base`.

    fastest_s, slowest_s: of its repeats.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        name: {
            "rollout_s": value, "tok_s": work.n_new / value, "relative": medians[base] / value,
            "fastest_s": min(seconds[name]), "slowest_s": max(seconds[name]),
        }
        for name, value in medians.items()
    }  # fmt: skip


def _kinds(work: Work, has_tokenizer: bool) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "min_new_tokens": {"min_new_tokens": max(work.new_lens), "ignore_eos": False},
        "frequency_penalty 0.5": {"frequency_penalty": 0.5},
        "top_p 0.95": {"top_p": 0.95},
        "top_k 20": {"top_k": 20},
        "temperature 0.6, top_p 0.95, top_k 20": _QWEN,
    }
    if has_tokenizer:
        kinds["stop string"] = {"stop": ["</answer>"]}
    return kinds


def sampling_page(found: dict[str, dict[str, float]], title: str = "sampling", base: str = "plain") -> str:
    """The table as text. base: the line that the speed of the others is relative to."""
    width = max(map(len, [title, *found]))
    rows = [
        f"{name:<{width}}  {value['rollout_s']:8.3f} s  {value['fastest_s']:8.3f} to {value['slowest_s']:.3f} s"
        f"  {value['tok_s']:10,.0f} tokens/s  {value['relative']:5.2f}"
        for name, value in found.items()
    ]
    heading = f"{title:<{width}}  {'median':>10}  {'of all repeats':>19}  {'':>19}  speed against {base}"
    return "\n".join([heading, *rows])
