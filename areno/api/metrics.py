"""The scalars of a step: rollout/*, train/*, eval/* and time/*, from samples, training rows and phases."""

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

from areno import heartbeat
from areno.config.experiments import pass_sizes
from areno.data.loader import BatchLoader
from areno.errors import EngineError
from areno.tracking.scalar_files import Jsonl, TensorBoard
from areno.tracking.tracker import Tracker, Trackers
from areno.types import PromptBatch, PromptItem, ScoredSample, TrainSequence


class Stopwatch:
    """Measures the phases of a step in seconds, for the time/* metrics. An inner phase counts as the outer one."""

    def __init__(self, before_phase: Callable[[str], object] = lambda name: None) -> None:
        self._before_phase = before_phase
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._running = ""
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Start a new step."""
        self.seconds, self._began = {}, time.perf_counter()

    def close_step(self) -> None:
        """Count the time outside of all phases as the phase `other`."""
        self.seconds["other"] = max(0.0, time.perf_counter() - self._began - self.total)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase. Its work must make progress, see areno.heartbeat."""
        heartbeat.beat()
        if not self._lock.acquire(blocking=False):
            raise EngineError(
                f"another thread is in the phase {self._running!r} of this trainer; "
                "call a trainer from one thread at a time, and wait for a call before the next"
            )
        try:
            if self._running:
                yield
                return
            self._before_phase(name)
            self._running, started = name, time.perf_counter()
            try:
                with heartbeat.working(name):
                    yield
            finally:
                self._running = ""
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        finally:
            self._lock.release()

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())


_RIGHT = 1.0 - 1e-6
_PARTS = "reward/"


def rollout_metrics(
    samples: Sequence[ScoredSample],
    advantages: Sequence[float] | np.ndarray,
    *,
    skipped_long: int = 0,
    total_skipped_long: int | None = None,
) -> dict[str, float]:
    """Return the rollout/* scalars of one step. Lengths are in tokens.

    A scalar without a value, such as the mean of no rewards, is left out.

    Args:
        samples: All samples of the step.
        advantages: One for each sample. Rewards and advantages count only for samples that have a reward.
        skipped_long: Too long rows that were skipped in this step.
        total_skipped_long: The same since the start of the run.
    """
    stats = _agent_stats(samples)
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
    stats |= _part_stats(samples)
    stats["skipped_long"] = skipped_long
    if total_skipped_long is not None:
        stats["total_skipped_long"] = total_skipped_long
    return with_prefix("rollout", stats)


def evaluation_metrics(samples: Sequence[ScoredSample], n_samples: int) -> dict[str, float]:
    """Return the metrics of one evaluation set, without a prefix.

    With several samples of a prompt, pass@k and avg@n_samples are included: means over the prompts, where a sample
    passes as in `accuracy`. Samples without a reward do not count. A prompt with fewer than k counted samples has no
    pass@k.

    Args:
        samples: All samples of the set.
        n_samples: Samples of each prompt.
    """
    metrics = rollout_metrics(samples, np.zeros(len(samples)))
    names = ("rewards_mean", "accuracy", "response_len_mean", "truncated", "num_sequences")
    found = {name: metrics[f"rollout/{name}"] for name in names if f"rollout/{name}" in metrics}
    parts = {name.removeprefix("rollout/"): value for name, value in metrics.items()}
    found |= {name: value for name, value in parts.items() if name.startswith(_PARTS) and not name.endswith("_std")}
    if n_samples == 1:
        return found
    counts = [(len(group), sum(value >= _RIGHT for value in group)) for group in rewards_by_group(samples).values()]
    for k in pass_sizes(n_samples):
        if estimates := [pass_at_k(n, c, k) for n, c in counts if n >= k]:
            found[f"pass@{k}"] = float(np.mean(estimates))
    if counts:
        found[f"avg@{n_samples}"] = float(np.mean([c / n for n, c in counts]))
    return found


def rewards_by_group(samples: Sequence[ScoredSample]) -> dict[int, list[float]]:
    """Return the rewards of each group, over the samples that have one."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.outcome.value is not None:
            rewards.setdefault(sample.group, []).append(sample.outcome.value)
    return rewards


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k samples passes (arXiv 2107.03374).

    Args:
        n: Number of samples, at least k.
        c: Number of samples that passed.
        k: Number of attempts.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _part_stats(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Return mean and spread of each part of the rewards, over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.outcome.parts.items():
            found.setdefault(f"{_PARTS}{name}", []).append(value)
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return means | {f"{name}_std": float(np.std(values)) for name, values in found.items()}


def _agent_stats(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Return statistics of the agents of a step. Empty for single completions."""
    found = [sample.trajectory for sample in samples if sample.trajectory is not None]
    failed = Counter(sample.outcome.status for sample in samples if not sample.is_done)
    if not found and not failed:
        return {}
    return {
        "agent_errors": failed["agent_error"],
        "agent_timeouts": failed["agent_timeout"],
        "agent_filtered": failed["agent_filtered"],
        "agent_turns_mean": float(np.mean([len(one.turns) for one in found])) if found else 0.0,
        "agent_rows_mean": float(np.mean([len(one.rows) for one in found])) if found else 0.0,
        "tool_calls_mean": float(np.mean([len(one.tool_calls) for one in found])) if found else 0.0,
    }


def row_metrics(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Return the rollout/* scalars that follow from training rows. Empty without log-probabilities of a rollout.

    The prompt of a row ends before its first trained token. The response is all trained tokens, and the advantage of a
    row is their mean.
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
    """Return the statistics of samples.

    Args:
        lengths: Lengths of the samples in tokens, by name.
        logprobs: Log-probabilities of the tokens of each response.
        rewards: Rewards of the samples that have one.
        advantages: Advantages of these samples.
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
        stats |= {"rewards_max": np.max(rewards), "rewards_min": np.min(rewards), "accuracy": accuracy(rewards)}
    if n_tokens := sum(lengths["response_len"]):
        stats["logprobs_mean"] = np.concatenate(logprobs).sum() / n_tokens
    return stats


def accuracy(rewards: Sequence[float] | np.ndarray) -> float:
    """Return the share of rewards of at least 1.0, which stand for a right answer. NaN without rewards."""
    return float(np.mean(np.asarray(rewards) >= _RIGHT)) if len(rewards) else math.nan


def step_times(clock: Stopwatch) -> dict[str, float]:
    """Return the seconds of a step that belong to its training statistics."""
    return {
        "step_rollout_time_s": clock.seconds.get("rollout", 0.0),
        "step_train_time_s": clock.seconds.get("train", 0.0),
        "step_e2e_time_s": clock.total,
    }


def step_scalars(stats: Mapping[str, float], clock: Stopwatch) -> dict[str, float]:
    """Return the train/* and time/* scalars of a step."""
    return with_prefix("train", stats) | with_prefix("time", {**clock.seconds, "step": clock.total})


def with_prefix(prefix: str, stats: Mapping[str, float]) -> dict[str, float]:
    """Return statistics under a prefix: `{"loss": 1.0}` under "train" is `{"train/loss": 1.0}`."""
    return {f"{prefix}/{name}": float(value) for name, value in stats.items()}


class MetricsRecorder(Trackers):
    """Writes the scalars of steps to files, for scripts that have no run. Use as a context manager, or call close().

    `Trainer(metrics_log_dir=...)` records its own steps with one. The files appear with the first scalars.

    Args:
        path: folder of TensorBoard event files. None: none are written.
        jsonl: file with one JSON line for each call of `record`. None: none is written.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        files: list[Tracker] = [] if path is None else [TensorBoard(path)]
        super().__init__(files if jsonl is None else [*files, Jsonl(jsonl)])

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write scalars of a step.

        Args:
            step: number of the step. A step may come in several calls.
            scalars: value by name, <namespace>/<name>: rollout/*, train/*, eval/* or time/*.

        Raises:
            ArenoError: the files cannot be written. The message names the setting.
        """
        self.log(step, scalars)

    def close(self) -> None:
        """Close the files. Further calls do nothing."""
        self.finish()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StepLog:
    """Records the steps of a script. A step is a round in which no model is trained twice; steps count from 1."""

    def __init__(self, clock: Stopwatch):
        self.clock = clock  # of the phases since the policy was last trained
        self.recorder: MetricsRecorder | None = None  # None: nothing is written
        self._step = 1
        self._trained: set[str] = set()  # models trained in it
        self._skipped: tuple[int, int] | None = None  # prompts passed over: since the policy was last trained, in all

    def counting_skipped(self, loader: BatchLoader[PromptItem]) -> Iterator[PromptBatch]:
        """Yield the batches once, and count skipped rows."""
        counted = 0
        for batch in loader.batches():
            counted += self._count_skipped(loader.total_skipped_long - counted)
            yield batch
        self._count_skipped(loader.total_skipped_long - counted)

    def _count_skipped(self, n: int) -> int:
        now, total = self._skipped or (0, 0)
        self._skipped = now + n, total + n
        return n

    def trained(self, role: str, rows: Sequence[TrainSequence], stats: Mapping[str, float]) -> dict[str, float]:
        """Record the statistics of a training call, and return them with those of the step."""
        if role in self._trained:
            self._trained.clear()
            self._step += 1
        self._trained.add(role)
        stats = dict(stats)
        if role != "actor":
            scalars = {f"train/{role}_{name}": value for name, value in stats.items()}
        else:
            stats |= step_times(self.clock)
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
