"""Run the benchmark's work with areno's engine, in the way a Trainer does.

`ArenoContender` starts an engine and does rollouts, training steps and scoring. `run_areno` collects all figures for
one kind of work. `run_sampling` times a rollout with each sampling setting against plain sampling at temperature 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from areno.bench.arguments import Settings
from areno.bench.device import memory_watched
from areno.bench.profile import busy_s, idle_share, phase_table, trace
from areno.bench.timing import Timed, log_progress, measure, repeat_name
from areno.bench.work import Work, rows_of_outputs
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig
from areno.config.run import EngineConfig
from areno.config.teacher import SAMPLED, Divergence
from areno.engine.engine import Engine
from areno.engine.requests import RequestLimits
from areno.engine.spec import EngineSpec, LoraSpec, RoleSpec, RolloutSpec, UpdateSpec
from areno.errors import ConfigError, Problem
from areno.layers.config import AdapterSpec
from areno.loss_fns import distillation_loss_fn, gspo_loss_fn
from areno.models.adapter_shapes import linear_shapes
from areno.models.config import TransformerConfig
from areno.models.cost import Cost
from areno.models.registry import load_config
from areno.trainers.rows import prompt_masks, token_rows, trained, trained_mask
from areno.types import GenerationRequest, SamplingParams, TrainSequence


def adapters_of(settings: Settings, config: TransformerConfig) -> AdapterSpec | None:
    """Return the LoRA adapters of the benchmark, which are on all linear layers. None without `--lora-rank`.

    Args:
        settings: The parsed command line.
        config: Configuration of the model.
    """
    if settings.lora_rank is None:
        return None
    return AdapterSpec(settings.lora_rank, 2.0 * settings.lora_rank, tuple(linear_shapes(config)))


def decoder_config(settings: Settings, speculation: Literal["on", "off"] = "off") -> DecoderConfig:
    """Return the settings of the decoder that the command line asks for.

    Args:
        settings: The parsed command line.
        speculation: As rollout.speculation. "off" by default, because drafts would know the samples of repetitions.
    """
    return DecoderConfig(
        max_prefill_tokens=settings.max_prefill_tokens,
        mem_fraction=settings.mem_fraction,
        eager_decode=settings.eager_decode,
        speculation=speculation,
    )


class ArenoContender:
    """areno as one of the compared libraries. Close its `engine` at the end.

    Args:
        settings: The parsed command line.
        folder: Path of the model folder.
        random_init: Whether to draw random weights instead of loading weights.

    Attributes:
        engine: The engine.
        start_s: Seconds that the start of the engine took.
        vocab_size: Number of token ids.
        cache_tokens: Number of tokens that the KV cache had room for in the last rollout.

    Raises:
        ConfigError: `--routing-replay` is set for a model without experts.
    """

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
                    offload=settings.offload,
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
            "inline" if settings.profile else "auto",  # the profiler traces its own process only
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

    def first_tokens(self) -> dict[str, float]:
        """Run two short rollouts right after the start, and return how long the first tokens took.

        Returns:
            Seconds by name, all counted from the beginning of the engine's start. `start_s`: until the engine is
            started. `first_token_s`: until the first rollout has one token for every sample. `second_token_s`: until
            the second rollout, which follows the first, has two tokens for every sample.
        """
        work, out = self._settings.work, {"start_s": self.start_s}
        for name, max_new in (("first_token_s", 1), ("second_token_s", 2)):
            self.rollout(work.with_new_at_most(max_new), work.prompts(self.vocab_size, -2))
            out[name] = time.perf_counter() - self._created
        return out

    def begin_rollout(self, max_running: int, max_len: int) -> RequestLimits:
        """Begin a rollout phase of the engine.

        Args:
            max_running: Largest number of samples in the decode batch.
            max_len: Largest number of tokens of a sequence, prompt and completion together.

        Returns:
            The limits on requests in this phase.
        """
        decoder = decoder_config(self._settings)
        max_len = min(max_len, self.engine.info.context_len)
        return self.engine.begin_rollout(RolloutSpec(max_running=max_running, max_len=max_len, decoder=decoder))

    def rollout(self, work: Work, prompts: list[list[int]], **params: Any) -> list[TrainSequence]:
        """Run one rollout phase, from `begin_rollout` to `end_rollout`.

        Args:
            work: The batch, described by the lengths of its prompts and completions.
            prompts: Token ids of each prompt.
            **params: Further fields of `SamplingParams`.

        Returns:
            A training row for each sample.
        """
        limits = self.begin_rollout(
            self._settings.at_once or self._settings.work.n_rows, max(self._settings.work.row_lens)
        )
        self.cache_tokens = limits.cache_tokens
        outputs = self.engine.generate(requests(work, prompts, **params))
        self.engine.end_rollout()
        return rows_of_outputs(prompts, outputs)

    def train(self, rows: Sequence[TrainSequence]) -> dict[str, float]:
        """Run GSPO updates on rows as if they had just been sampled, and wait until the weights are updated.

        With `--teacher`, the loss of distillation is added. Its sampled form scores the rows with the teacher first.

        Args:
            rows: Training rows, such as those from `rollout`. They are changed: earlier `old_logprobs` are dropped, and
                `--teacher` sets `teacher_logprobs`.

        Returns:
            Statistics of the update.
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
        self.engine.wait()
        return stats

    def logprobs(self, rows: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Return the log-probability of every token in each row under the actor.

        Args:
            rows: Rows to score.
        """
        return self.engine.logprobs("actor", token_rows(rows), routes=[item.routes for item in rows])


def requests(work: Work, prompts: list[list[int]], **params: Any) -> list[GenerationRequest]:
    """Build the requests to the engine for a batch of prompts.

    Args:
        work: The batch, with the number of samples and the number of tokens to generate.
        prompts: Token ids of each prompt.
        **params: Further fields of `SamplingParams`.
    """
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


def run_areno(settings: Settings, folder: str, random_init: bool, cost: Cost) -> dict[str, Any]:
    """Run the work with areno, and return all its figures.

    Args:
        settings: The parsed command line.
        folder: Path of the model folder.
        random_init: Whether to draw random weights instead of loading weights.
        cost: Sizes and FLOPs of the model.

    Returns:
        Figures by name, for `report.record`.
    """
    log_progress(f"areno: starting {settings.shape} on {settings.device}")
    with memory_watched(settings.device, on=not settings.profile) as device_peak:
        ours = ArenoContender(settings, folder, random_init)
        with ours.engine:
            figures: dict[str, Any] = ours.first_tokens() if settings.rolls_out else {"start_s": ours.start_s}
            ours.engine.peak_memory_gib()  # resets the peak
            timed = measure(ours, settings.kind, settings.work, settings.repeats)
            figures |= timed.figures(settings.work)
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
            if settings.profile:
                figures |= _profile(ours, settings, timed, figures)
    return figures | device_peak


def _agreement(rows: Sequence[TrainSequence], scored: Sequence[np.ndarray]) -> dict[str, float]:
    """Return how far the log-probabilities of the rollout are from those of scoring.

    Args:
        rows: Rows with the log-probabilities of the rollout. Prompt tokens are left out.
        scored: For each row, the log-probability of each token as `ArenoContender.logprobs` returns it.

    Returns:
        `logp_abs_diff_mean` and `logp_abs_diff_max`: the mean and the largest absolute difference.
    """
    rescored = [scores[trained_mask(item)] for item, scores in zip(rows, scored, strict=True)]
    differences = np.abs(np.concatenate(trained(rows, "logprobs")) - np.concatenate(rescored))
    return {"logp_abs_diff_mean": float(differences.mean()), "logp_abs_diff_max": float(differences.max())}


def _profile(ours: ArenoContender, settings: Settings, timed: Timed, figures: dict[str, Any]) -> dict[str, float]:
    """Trace each timed phase once, and write the kernel tables to the file that `--profile` names.

    Args:
        ours: The contender whose engine does the work.
        settings: The parsed command line.
        timed: The measured times, which name the phases to trace. The rows of the last repeat are trained on and scored
            again.
        figures: Figures that include the seconds of each phase without the profiler, as "<phase>_s".

    Returns:
        "<phase>_idle_share" -> fraction of the phase in which the device was idle, between 0 and 1.
    """
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
            log_progress(f"tracing {phase}")
            started = time.perf_counter()
            spans = trace(body)
            plain_s = figures[f"{phase}_s"]
            text += phase_table(phase, spans, time.perf_counter() - started, plain_s)
            out[f"{phase}_idle_share"] = idle_share(busy_s(spans), plain_s)
    Path(settings.profile or "").write_text(text, encoding="utf-8")
    log_progress(f"kernels by group are in {settings.profile}")
    return out


_QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # what the model card of Qwen3 recommends


def run_sampling(settings: Settings, folder: str, random_init: bool) -> dict[str, dict[str, float]]:
    """Time a rollout with each of several sampling settings.

    Every repeat runs all settings, so that a change of the device's speed affects all settings alike.

    Args:
        settings: The parsed command line.
        folder: Path of the model folder.
        random_init: Whether to draw random weights instead of loading weights.

    Returns:
        Name of the setting -> its times and speeds, as returned by `speeds`. Speeds are relative to plain sampling.
    """
    work = settings.work
    ours = ArenoContender(settings, folder, random_init)
    kinds = _kinds(work, settings.tokenizer is not None)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with ours.engine:
        for repeat in range(-1, settings.repeats):
            for name, params in kinds.items():
                prompts = work.prompts(ours.vocab_size, repeat)
                started = time.perf_counter()
                ours.rollout(work, prompts, **params)
                taken = time.perf_counter() - started
                log_progress(f"{name}, {repeat_name(repeat, settings.repeats)}: {taken:.3f} s")
                if repeat >= 0:
                    seconds[name].append(taken)
    return speeds(work, seconds, "plain")


def speeds(work: Work, seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Summarize the times of several ways to sample the same batch.

    Args:
        work: The batch, described by the lengths of its prompts and completions.
        seconds: Name of the way -> seconds of each repeat.
        base: Name of the way that the others are compared with.

    Returns:
        Name of the way -> `rollout_s` (median seconds), `tok_s` (generated tokens per second), `relative` (speed
        divided by that of `base`), `fastest_s` and `slowest_s` (seconds).
    """
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        name: {
            "rollout_s": value,
            "tok_s": work.n_new / value,
            "relative": medians[base] / value,
            "fastest_s": min(seconds[name]),
            "slowest_s": max(seconds[name]),
        }
        for name, value in medians.items()
    }


def _kinds(work: Work, has_tokenizer: bool) -> dict[str, dict[str, Any]]:
    """Return name of the setting -> sampling parameters, for each sampling setting to time.

    Args:
        work: The batch, whose longest completion sets `min_new_tokens`.
        has_tokenizer: Whether there is a tokenizer, which the setting with a stop string needs.
    """
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
    """Format the figures of `speeds` as a table.

    Args:
        found: Result of `speeds`.
        title: Heading of the first column.
        base: Name of the way that speeds are relative to, for the heading.
    """
    width = max(map(len, [title, *found]))
    rows = [
        f"{name:<{width}}  {value['rollout_s']:8.3f} s  {value['fastest_s']:8.3f} to {value['slowest_s']:.3f} s"
        f"  {value['tok_s']:10,.0f} tokens/s  {value['relative']:5.2f}"
        for name, value in found.items()
    ]
    heading = f"{title:<{width}}  {'median':>10}  {'of all repeats':>19}  {'':>19}  speed against {base}"
    return "\n".join([heading, *rows])
