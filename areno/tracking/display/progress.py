"""The progress of a rollout or of scoring: log lines, and a bar on a terminal that has no live display."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TypeVar

from areno.engine.spec import RolloutStats
from areno.tracking.run_log import IN_FULL, console
from areno.types import GenerationOutput

logger = logging.getLogger("areno")
under_way: list[Progress] = []
"""Those that are entered, from the outside in. A live display looks at them."""
Self = TypeVar("Self", bound="Progress")  # typing has it from Python 3.11 on


class Progress:
    """Shows what is done, tokens per second and the mean reward. Use it as a context manager.

    With the console `full` on a terminal it is a bar that disappears at the end. Without a terminal it is a log line at
    most every `interval_s` seconds.
    """

    done = tokens = 0
    reward: float | None = None

    def __init__(self, title: str, total: int, interval_s: float = 10.0, unit: str = "prompts"):
        self.title, self.total, self.interval_s, self.unit = title, total, interval_s, unit
        self._bar: Any = None

    def __enter__(self: Self) -> Self:
        self._started = self._said_at = time.monotonic()
        under_way.append(self)
        if console() == "full" and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            done, elapsed = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
            columns = "{task.description}", progress.BarColumn(), done, "{task.fields[state]}", elapsed
            self._bar = progress.Progress(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._bar.add_task(self.title, total=self.total, state="")
        return self

    def update(self, done: int, tokens: int = 0, reward: float | None = None) -> None:
        """done, tokens: totals so far. reward: the mean so far, if one is known."""
        self.done, self.tokens, self.reward = done, tokens, reward
        now, rate = time.monotonic(), self.rate
        if self._bar is not None:
            shown = f"{rate:,.0f} tok/s" + ("" if reward is None else f"  reward {reward:.3f}")
            self._bar.update(self._bar.task_ids[0], completed=done, state=shown)
        elif now - self._said_at >= self.interval_s:
            self._said_at = now
            text = f"{self.title} progress: {self.unit}={done}/{self.total} tokens_per_second={rate:.1f}"
            logger.info(text + ("" if reward is None else f" reward_mean={reward:.6f}"), extra=IN_FULL)

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.tokens / max(time.monotonic() - self._started, 1e-9)

    def __exit__(self, *exc: object) -> None:
        under_way.remove(self)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class RolloutProgress(Progress):
    """The progress of one rollout, with log lines for each data-parallel rank. reward: the mean of the previous one."""

    def __init__(
        self,
        title: str,
        total: int,
        n_samples: int,
        dp_size: int,
        reward: float | None = None,
        interval_s: float = 10.0,
    ):
        super().__init__(title, total, interval_s)
        self.n_samples, self.dp_size, self.reward = n_samples, dp_size, reward
        self._samples = 0
        self._since = time.monotonic()
        self._before = [RolloutStats()] * dp_size

    def __call__(self, outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
        self._samples += len(outputs)
        self.update(self._samples // self.n_samples, sum(rank.generated_tokens for rank in stats), self.reward)
        now = time.monotonic()
        if now - self._since < self.interval_s:
            return
        for rank, (new, old) in enumerate(zip(stats, self._before, strict=True)):
            text = "rollout decode progress: dp=%d/%d active=%d cuda_graph=%s tokens_per_second=%.1f"
            rate = (new.generated_tokens - old.generated_tokens) / (now - self._since)
            by_graph = new.graph_replays > old.graph_replays
            logger.info(text, rank, self.dp_size, new.running, by_graph, rate, extra=IN_FULL)
        self._before, self._since = list(stats), now
