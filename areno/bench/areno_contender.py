"""Run the benchmark's work with areno's engine, in the way a Trainer does.

`ArenoContender` starts an engine and does rollouts, training steps and scoring. `run_areno` collects all figures for
one kind of work.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from areno.bench.arguments import Settings
from areno.bench.device import memory_watched
from areno.bench.recording import StepRecording
from areno.bench.timing import PhaseTimes, log_progress, measure
from areno.bench.work import Workload, rows_of_outputs
from areno.config.fp8 import FP8Config
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig
from areno.config.run import EngineConfig
from areno.config.teacher import SAMPLED, Divergence
from areno.cost.flops import TokenCost
from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.errors import ConfigError, Problem
from areno.layers.config import AdapterSpec
from areno.loss_fns import distillation_loss_fn, gspo_loss_fn
from areno.models.adapter_shapes import linear_shapes
from areno.models.config import TransformerConfig
from areno.models.registry import load_config
from areno.specs.engine import EngineSpec
from areno.specs.role import LoraSpec, RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.trainers.rows import prompt_masks, token_rows, trained, trained_mask
from areno.types import GenerationRequest, SamplingParams, TrainSequence


def adapters_of(settings: Settings, config: TransformerConfig) -> AdapterSpec | None:
    """Return LoRA adapters on the chosen linear layers, by default all. None without `--lora-rank`."""
    if settings.lora_rank is None:
        return None
    known = tuple(linear_shapes(config))
    targets = known if settings.target_modules is None else tuple(settings.target_modules)
    if unknown := [name for name in targets if name not in known]:
        raise ConfigError([Problem("--target-modules", f"has {unknown[0]}; the model has {', '.join(known)}")])
    return AdapterSpec(settings.lora_rank, 2.0 * settings.lora_rank, targets)


def _fp8_of(settings: Settings) -> FP8Config | None:
    if settings.fp8 is None:
        return None
    if settings.fp8 == "int8":
        return FP8Config(mode="int8")
    return FP8Config(dgrad=settings.fp8 in ("dgrad", "both"), wgrad=settings.fp8 in ("wgrad", "both"))


class ArenoContender:
    """areno as one of the compared libraries. Close its `engine` at the end."""

    name = "areno"

    def __init__(self, settings: Settings, folder: str, random_init: bool, workers: str = "auto"):
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
                    fp8_kv=settings.kv_cache_dtype == "fp8",
                    offload=settings.offload,
                    fp8=_fp8_of(settings),
                    lora=None if adapters is None else LoraSpec(adapters=adapters, base=folder),
                ),
                tokenizer_path=settings.tokenizer or "",
                devices=settings.devices,
                engine=EngineConfig.of(settings, device="auto"),
                dtype=settings.dtype,
                mb_spec=MicroBatchSpec(max_tokens_per_mb=settings.tokens_per_mb),
                share_prefixes=settings.share_prefixes,
                routing_replay=settings.routing_replay,
            ),
            workers,
        )
        self._divergence: Divergence | None = None
        if (loss_type := settings.teacher) is not None:
            in_training = loss_type != SAMPLED
            self._divergence = Divergence(loss_type) if in_training else None  # type: ignore[arg-type]
            teacher = RoleSpec(path=folder, random_init=random_init, key="--teacher", in_training=in_training)
            self.engine.ensure_roles({"teacher": teacher})
        self.start_s = time.perf_counter() - self._created
        self.vocab_size = self.engine.info.vocab_size
        if settings.routing_replay and self.engine.info.routes is None:
            self.engine.close()
            raise ConfigError([Problem("--routing-replay", f"is for models with experts; {settings.shape} has none")])
        self.cache_tokens = 0

    def time_first_tokens(self) -> dict[str, float]:
        """Run two short rollouts. Return seconds, all measured from the moment at which the engine begins to start.

        `start_s` is when the engine has started, `first_token_s` when every sample has one token, and `second_token_s`
        when every sample of the second rollout has two tokens.
        """
        work, out = self._settings.work, {"start_s": self.start_s}
        for name, max_new in (("first_token_s", 1), ("second_token_s", 2)):
            self.rollout(work.with_max_new_tokens(max_new), work.random_prompts(self.vocab_size, -2))
            out[name] = time.perf_counter() - self._created
        return out

    def begin_rollout(self, max_running: int, max_len: int, **decoder: Any) -> RequestLimits:
        """Begin a rollout. Speculation is off by default, since drafts from earlier repeats would make it too fast."""
        settings = DecoderConfig.of(self._settings, **{"speculation": "off", **decoder})
        max_len = min(max_len, self.engine.info.context_len)
        return self.engine.begin_rollout(RolloutSpec(max_running=max_running, max_len=max_len, decoder=settings))

    def rollout(self, work: Workload, prompts: list[list[int]], **params: Any) -> list[TrainSequence]:
        n_running = self._settings.at_once or self._settings.work.n_rows
        self.cache_tokens = self.begin_rollout(n_running, max(self._settings.work.row_lens)).cache_tokens
        outputs = self.engine.generate(requests(work, prompts, **params))
        self.engine.end_rollout()
        return rows_of_outputs(prompts, outputs)

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Run GSPO updates on rows as if they had just been sampled: earlier `old_logprobs` are dropped.

        With `--teacher`, the loss of distillation is added. For its sampled form, the `teacher_logprobs` of the rows
        are computed first.
        """
        for item in rows:
            item.old_logprobs = None
        spec, settings = self.engine.spec.mb_spec, self._settings
        update = UpdateSpec(
            spec, settings.updates, seed=1, old_logprobs=settings.old_logprobs, divergence=self._divergence
        )
        loss_fn = partial(gspo_loss_fn, clip_eps=3e-4)
        if settings.teacher == SAMPLED:
            scores = self.engine.logprobs("teacher", token_rows(rows), prompt_masks=prompt_masks(rows))
            for item, of_row in zip(rows, scores, strict=True):
                item.teacher_logprobs = of_row
        if settings.teacher is not None:
            loss_fn = partial(distillation_loss_fn, policy_loss_fn=loss_fn, sampled=settings.teacher == SAMPLED)
        stats = self.engine.train(rows, loss_fn, update)
        self.engine.synchronize()
        return stats

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[np.ndarray]:
        return self.engine.logprobs("actor", token_rows(rows), routes=[item.routes for item in rows])


def requests(work: Workload, prompts: list[list[int]], **params: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=index,
            prompt=prompt,
            n_samples=work.n_samples,
            seed=index,
            params=SamplingParams(**{"max_new_tokens": new_len, "ignore_eos": True, **params}),
        )
        for index, (prompt, new_len) in enumerate(zip(prompts, work.new_lens, strict=True))
    ]


Profile = Callable[[ArenoContender, PhaseTimes], dict[str, float]]
"""A function that repeats the timed phases and returns figures about them, in the process of the engine."""


def run_areno(
    settings: Settings, model: tuple[str, bool], cost: TokenCost, profile: Profile | None = None
) -> dict[str, Any]:
    log_progress(f"areno: starting {settings.shape} on {settings.device}")
    with memory_watched(settings.device, on=profile is None) as device_peak:
        ours = ArenoContender(settings, *model, "auto" if profile is None else "inline")
        with ours.engine:
            figures: dict[str, Any] = ours.time_first_tokens() if settings.rolls_out else {"start_s": ours.start_s}
            ours.engine.peak_memory_gib()  # resets the peak
            with tempfile.TemporaryDirectory() as folder:
                recording = StepRecording(ours.engine, Path(folder)) if settings.record else None
                timed = measure(ours, settings.kind, settings.work, settings.repeats, recording=recording)
                if recording is not None:
                    recording.close()
                    figures |= {"record_written_s": statistics.median(recording.written_s)}
                    figures |= {"record_mib": recording.record_bytes / 2**20}
            figures |= timed.phase_figures(settings.work)
            peak = max([ours.engine.peak_memory_gib(), *(stats["memory_gib"] for stats in timed.stats)])
            kv_gib = ours.cache_tokens * cost.kv_bytes / 2**30
            figures |= {"peak_memory_gib": peak, "kv_cache_gib": kv_gib, "peak_apart_from_kv_gib": peak - kv_gib}
            if settings.share_prefixes != "off" and timed.stats:
                figures["computed_share"] = timed.stats[-1]["computed_tokens"] / timed.stats[-1]["row_tokens"]
            if settings.kind == "step":
                names = ["logp_abs_diff_mean", "logp_abs_diff_max", "clip_frac", "ratio_std"]
                for name in names + ["distill_loss"] * (settings.teacher is not None):
                    figures[name] = statistics.median(stats[name] for stats in timed.stats)
            elif settings.kind == "rollout":
                figures |= _agreement(timed.rows, ours.logprobs(timed.rows))
            figures |= {
                "attention": ours.engine.info.attn_backend,
                "tp_sums": ours.engine.info.tp_sums,
                "repeats_s": timed.seconds,
            }
            if profile is not None:
                figures |= profile(ours, timed)
    return figures | device_peak


def _agreement(rows: Sequence[TrainSequence], scored: Sequence[np.ndarray]) -> dict[str, float]:
    """Return mean and maximum of |logprob of the rollout - logprob of scoring| over the sampled tokens."""
    rescored = [scores[trained_mask(item)] for item, scores in zip(rows, scored, strict=True)]
    differences = np.abs(np.concatenate(trained(rows, "logprobs")) - np.concatenate(rescored))
    return {"logp_abs_diff_mean": float(differences.mean()), "logp_abs_diff_max": float(differences.max())}
