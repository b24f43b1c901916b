"""Functions that compute the metrics rollout/*, train/*, eval/* and time/*, and classes that time and record steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areno import heartbeat, trace
from areno.agents.conversations import KINDS
from areno.config.experiments import pass_at_k_values
from areno.data.loader import BatchLoader
from areno.errors import EngineError
from areno.tracking.accuracy import RIGHT, has_reward_above_one
from areno.tracking.scalar_files import Jsonl, TensorBoard
from areno.tracking.tracker import Tracker, Trackers
from areno.types import PromptBatch, PromptItem, ScoredSample, TrainSequence


class Stopwatch:
    """Measures the phases of a training step, such as "rollout" and "train", in seconds, for the time/* metrics.

    A phase inside another phase is not measured separately. Its time counts for the outer phase. `before_phase` and
    `after_phase` are called with the name of each outer phase, `after_phase` only if the phase raised no exception.
    `began` is the time of the last `reset`, by time.perf_counter.
    """

    def __init__(
        self,
        before_phase: Callable[[str], object] = lambda name: None,
        after_phase: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._before_phase, self._after_phase = before_phase, after_phase
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()
        self._running = ""
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Start a new step, with no time in any phase."""
        self.seconds, self.began = {}, time.perf_counter()

    def close_step(self) -> None:
        """Record the time since `reset` that was spent outside all phases, as the phase `other`."""
        self.seconds["other"] = max(0.0, time.perf_counter() - self.began - self.total_seconds)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a `with` block as a phase of the step. Repeated blocks of the same name add up.

        Long work inside the block must call heartbeat.beat regularly, because a watchdog reports a block without a beat
        as a hang. Raises EngineError if another thread is in a phase.
        """
        heartbeat.beat()
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                f"another thread is in the phase {self._running!r} of this trainer; "
                "call a trainer from one thread at a time, and wait for a call before the next"
            )
        try:
            if self._running:
                with contextlib.nullcontext() if name == self._running else trace.span(trace.DRIVER, name):
                    yield
                return
            self._before_phase(name)
            self._running, started = name, time.perf_counter()
            try:
                with heartbeat.working(name), trace.span(trace.DRIVER, name):
                    yield
            finally:
                self._running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self._after_phase(name)
        finally:
            self._lock.release()

    @property
    def total_seconds(self) -> float:
        """Sum of the seconds of all phases since `reset`."""
        return sum(self.seconds.values())


_PARTS = "reward/"


def rollout_metrics(
    samples: Sequence[ScoredSample],
    advantages: Sequence[float] | np.ndarray,
    *,
    skipped_long: int = 0,
    total_skipped_long: int | None = None,
) -> dict[str, float]:
    """Compute the rollout/* metrics of one step. Lengths are in tokens.

    A metric without a value, such as the mean reward if no sample has a reward, is left out. `advantages` has one value
    per sample; the values of samples without a reward do not count. `skipped_long` and `total_skipped_long` are the
    numbers of dataset rows that were too long, in this step and since the start of the run.
    """
    stats = _agent_metrics(samples)
    done = np.array([sample.is_done for sample in samples], dtype=bool)
    samples, advantages = list(itertools.compress(samples, done)), np.asarray(advantages)[done]
    prompts = [len(sample.item.tokens) for sample in samples]
    responses = [sample.sequence.n_tokens for sample in samples]
    scored = np.array([sample.outcome.value is not None for sample in samples], dtype=bool)
    stats |= _sample_stats(
        {"seq_len": [sample.n_tokens for sample in samples], "prompt_len": prompts, "response_len": responses},
        logprobs=[vars(sample.sequence)["resp_logprobs"] for sample in samples],  # as arrays, if they came so
        rewards=[sample.outcome.value for sample in samples if sample.outcome.value is not None],
        advantages=advantages.astype(np.float64)[scored],
    )
    if samples:
        stats |= {
            "truncated": float(np.mean([sample.sequence.finish_reason == "length" for sample in samples])),
            "reward_timeouts": sum(sample.outcome.status == "timeout" for sample in samples),
            "reward_errors": sum(sample.outcome.status in ("error", "not_finite") for sample in samples),
            "reward_not_finite": sum(sample.outcome.status == "not_finite" for sample in samples),
        }
    stats |= _reward_part_metrics(samples)
    stats["skipped_long"] = skipped_long
    if total_skipped_long is not None:
        stats["total_skipped_long"] = total_skipped_long
    return with_prefix("rollout", stats)


def evaluation_metrics(samples: Sequence[ScoredSample], n_samples: int) -> dict[str, float]:
    """Compute the metrics of one evaluation set. Their names have no prefix such as eval/.

    With several samples per prompt, pass@k and avg@n_samples are included, each a mean over the prompts. A sample
    passes if its reward is at least 1.0. Samples without a reward do not count. A prompt with fewer than k counted
    samples has no pass@k. If a reward is above 1.0, there is no accuracy, pass@k or avg@n_samples.
    """
    metrics = rollout_metrics(samples, np.zeros(len(samples)))
    names = ("rewards_mean", "accuracy", "response_len_mean", "truncated", "num_sequences")
    metrics = {name.removeprefix("rollout/"): value for name, value in metrics.items()}
    found = {name: metrics[name] for name in names if name in metrics}
    found |= {name: value for name, value in metrics.items() if name.startswith(_PARTS) and not name.endswith("_std")}
    if n_samples == 1 or "accuracy" not in found:
        return found
    counts = [(len(group), sum(value >= RIGHT for value in group)) for group in rewards_by_group(samples).values()]
    for k in pass_at_k_values(n_samples):
        if estimates := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
            found[f"pass@{k}"] = float(np.mean(estimates))
    if counts:
        found[f"avg@{n_samples}"] = float(np.mean([c / n for n, c in counts]))
    return found


def rewards_by_group(samples: Sequence[ScoredSample]) -> dict[int, list[float]]:
    """Return group number -> rewards of its samples. A group without any reward is absent."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.outcome.value is not None:
            rewards.setdefault(sample.group, []).append(sample.outcome.value)
    return rewards


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of k samples passes (arXiv 2107.03374).

    c of n drawn samples have passed. n is at least k.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _reward_part_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.outcome.parts.items():
            found.setdefault(f"{_PARTS}{name}", []).append(value)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return means | {f"{name}_std": float(np.std(values)) for name, values in found.items()}


_COUNTED = ("edited", "restored", "repeated", "not_forced", "refused")  # counts of SampleSession


def _agent_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Return the number of failed agents and the mean numbers of turns, rows and tool calls. Empty without agents."""
    found = [sample.trajectory for sample in samples if sample.trajectory is not None]
    failed = Counter(sample.outcome.status for sample in samples if not sample.is_done)
    if not found and not failed:
        return {}
    recorded = [one for one in found if one.requests]
    counted = sum((Counter(one.requests) for one in recorded), Counter[str]())
    kinds = sum((Counter(one.conversations) for one in recorded), Counter[str]())
    return {
        **{f"agent_{name}": float(counted[name]) for name in _COUNTED if recorded},
        **{f"agent_{kind}_rows_mean": kinds[kind] / len(recorded) for kind in KINDS if recorded},
        "agent_errors": failed["agent_error"],
        "agent_timeouts": failed["agent_timeout"],
        "agent_filtered": failed["agent_filtered"],
        "agent_over_budget": sum(sample.over_budget for sample in samples),
        "agent_turns_mean": float(np.mean([len(one.turns) for one in found])) if found else 0.0,
        "agent_rows_mean": float(np.mean([len(one.rows) for one in found])) if found else 0.0,
        "tool_calls_mean": float(np.mean([len(one.tool_calls) for one in found])) if found else 0.0,
    }


def row_metrics(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Compute rollout/* metrics from training rows, for scripts that have no scored samples.

    The prompt of a row is the tokens before its first trained token. The response is all trained tokens, and the
    advantage of a row is the mean over its trained tokens. Empty if a row has no `logprobs`.
    """
    if any(row.logprobs is None for row in rows):
        return {}
    masks = [~np.asarray(row.prompt_mask, dtype=bool) for row in rows]  # trained tokens
    pairs = list(zip(rows, masks, strict=True))
    told = [pair for pair in pairs if pair[0].advantages is not None and pair[1].any()]
    prompts = [mask.argmax() if mask.any() else len(mask) for mask in masks]
    stats = _sample_stats(
        {"seq_len": [len(mask) for mask in masks], "prompt_len": prompts, "response_len": [*map(np.sum, masks)]},
        logprobs=[np.asarray(row.logprobs)[mask] for row, mask in pairs],
        rewards=[row.reward for row in rows],
        advantages=[float(np.asarray(row.advantages)[mask].mean()) for row, mask in told],
    )
    return with_prefix("rollout", stats)


def _sample_stats(
    lengths: Mapping[str, Any], *, logprobs: Sequence[Any], rewards: Sequence[float], advantages: Any
) -> dict[str, float]:
    """Compute the rollout statistics that can be computed from scored samples and from training rows alike.

    `lengths` has, by name, the number of tokens of each sample. `rewards` and `advantages` are those of samples with a
    reward.
    """
    stats: dict[str, float] = {"num_sequences": len(logprobs)}
    if not logprobs:
        return stats
    stats |= {f"{name}_mean": np.mean(values) for name, values in lengths.items()}
    for name, given in (("rewards", rewards), ("advantages", advantages)):
        if len(given):
            values = np.asarray(given, dtype=np.float64)
            stats |= {f"{name}_mean": values.mean(), f"{name}_std": values.std()}
    if len(rewards):
        stats |= {"rewards_max": np.max(rewards), "rewards_min": np.min(rewards)}
        if not has_reward_above_one(rewards):
            stats["accuracy"] = accuracy(rewards)
    if n_tokens := sum(lengths["response_len"]):
        stats["logprobs_mean"] = np.concatenate(logprobs).sum() / n_tokens
    return stats


def accuracy(rewards: Sequence[float] | np.ndarray) -> float:
    """Return the share of rewards that are at least 1.0 (a right answer), or NaN if there are no rewards."""
    return float(np.mean(np.asarray(rewards) >= RIGHT)) if len(rewards) else math.nan


def step_time_metrics(clock: Stopwatch) -> dict[str, float]:
    """Return the seconds of rollout, training and the whole step, as entries of the train/* statistics."""
    return {
        "step_rollout_time_s": clock.seconds.get("rollout", 0.0),
        "step_train_time_s": clock.seconds.get("train", 0.0),
        "step_e2e_time_s": clock.total_seconds,
    }


def step_scalars(stats: Mapping[str, float], clock: Stopwatch) -> dict[str, float]:
    """Return the train/* and time/* metrics of a step from its training statistics and its stopwatch."""
    return with_prefix("train", stats) | with_prefix("time", {**clock.seconds, "step": clock.total_seconds})


def with_prefix(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    """Put a prefix before the names of statistics: {"loss": 1.0} becomes {"train/loss": 1.0}."""
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


class MetricsRecorder(Trackers):
    """Writes metrics to files, for scripts that have no run folder. Use it as a context manager, or call close().

    `Trainer(metrics_log_dir=...)` records its own steps with a MetricsRecorder. The files are created when the first
    metrics are recorded.

    Args:
        path: Folder for TensorBoard event files. None writes no event files.
        jsonl: File that gets one JSON line for each call of `record`. None writes no JSON lines.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        files: list[Tracker] = [] if path is None else [TensorBoard(path)]
        super().__init__(files if jsonl is None else [*files, Jsonl(jsonl)])

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write values by name, with a prefix such as train/. Several calls may record metrics of the same step."""
        self.log(step, scalars)

    def close(self) -> None:
        """Close the files. Further calls do nothing."""
        self.finish()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StepLog:
    """Records the metrics of a script's training calls, grouped into steps that count from 1.

    Each model is trained at most once in a step. When a model is trained again, a new step begins. The stopwatch is
    reset each time the actor has been trained.
    """

    def __init__(self, clock: Stopwatch):
        self.clock = clock  # measures the phases since the actor was last trained
        self.recorder: MetricsRecorder | None = None  # None: nothing is written
        self._step = 1
        self._trained: set[str] = set()  # models trained in the current step
        self._skipped: tuple[int, int] | None = None  # skipped prompts: (since the actor was last trained, in total)

    def count_skipped_rows(self, loader: BatchLoader[PromptItem]) -> Iterator[PromptBatch]:
        """Yield the prompt batches of one epoch, and count the rows that the loader skips because they are too long.

        The counts become the metrics rollout/skipped_long and rollout/total_skipped_long of the actor's next training
        call.
        """
        counted = 0
        for batch in loader.batches():
            counted += self._count_skipped(loader.total_skipped_long - counted)
            yield batch
        self._count_skipped(loader.total_skipped_long - counted)

    def _count_skipped(self, n: int) -> int:
        now, total = self._skipped or (0, 0)
        self._skipped = now + n, total + n
        return n

    def record_training_call(
        self, role: str, rows: Sequence[TrainSequence], stats: Mapping[str, float]
    ) -> dict[str, float]:
        """Record the statistics of a training call as metrics of the current step, and return a copy of them.

        For the actor, this also records the times of the step and metrics of the rows, adds the times to the copy, and
        resets the stopwatch.
        """
        if role in self._trained:
            self._trained.clear()
            self._step += 1
        self._trained.add(role)
        stats = dict(stats)
        if role != "actor":
            scalars = {f"train/{role}_{name}": value for name, value in stats.items()}
        else:
            stats |= step_time_metrics(self.clock)
            scalars = step_scalars(stats, self.clock)
            self.clock.reset()
            if self.recorder is not None:
                scalars |= row_metrics(rows) | self._skipped_scalars()
        if self.recorder is not None:
            self.recorder.record(self._step, scalars)
        return stats

    def _skipped_scalars(self) -> dict[str, float]:
        if self._skipped is None:
            return {}
        now, total = self._skipped
        self._skipped = 0, total
        return {"rollout/skipped_long": float(now), "rollout/total_skipped_long": float(total)}
