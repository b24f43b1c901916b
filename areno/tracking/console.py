"""The log lines of a run: progress of rollouts and of scoring, events of the loops, and the scalars of each step."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areno.tracking.run_log import IN_FULL, OF_STEP, current_console
from areno.tracking.tracker import Tracker
from areno.types import GenerationOutput

if TYPE_CHECKING:
    from areno.engine.reports import RolloutStats

logger = logging.getLogger("areno")
active_progress: list[Progress] = []
"""The Progress objects whose `with` block is open, outermost first. The live display shows the last."""
Self = TypeVar("Self", bound="Progress")  # typing has it from Python 3.11 on


class Progress:
    """Context manager that shows the progress of generation or scoring, the tokens per second and the mean reward.

    On a terminal with `stats_logger.console=full`, it shows a bar that disappears at the end. Otherwise it writes a log
    line from time to time. `unit` is what `done` and `total` count, such as "prompts".
    """

    done = tokens = 0
    reward: float | None = None

    def __init__(self, title: str, total: int, interval_s: float = 10.0, unit: str = "prompts"):
        self.title, self.total, self.interval_s, self.unit = title, total, interval_s, unit
        self._bar: Any = None

    def __enter__(self: Self) -> Self:
        self._started = self._said_at = time.monotonic()
        active_progress.append(self)
        if current_console() == "full" and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            done, elapsed = progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
            columns = "{task.description}", progress.BarColumn(), done, "{task.fields[state]}", elapsed
            self._bar = progress.Progress(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._bar.add_task(self.title, total=self.total, state="")
        return self

    def update(self, done: int, tokens: int = 0, reward: float | None = None) -> None:
        """Show these totals since the start in the bar. Without a bar, log them at most every `interval_s` seconds."""
        self.done, self.tokens, self.reward = done, tokens, reward
        now, rate = time.monotonic(), self.tokens_per_second
        if self._bar is not None:
            shown = f"{rate:,.0f} tok/s" + ("" if reward is None else f"  reward {reward:.3f}")
            self._bar.update(self._bar.task_ids[0], completed=done, state=shown)
        elif now - self._said_at >= self.interval_s:
            self._said_at = now
            text = f"{self.title} progress: {self.unit}={done}/{self.total} tokens_per_second={rate:.1f}"
            logger.info(text + ("" if reward is None else f" reward_mean={reward:.6f}"), extra=IN_FULL)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self._started, 1e-9)

    def __exit__(self, *exc: object) -> None:
        active_progress.remove(self)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class RolloutProgress(Progress):
    """Shows the progress of one rollout, with a log line for each data-parallel rank.

    Call it with the new outputs of the engine and the statistics of each rank since the start. `reward` is the mean
    reward of the previous rollout, because the current rollout is not scored yet.
    """

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
        from areno.engine.reports import RolloutStats

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


_LABELS = {"rollout/rewards_mean": "reward_mean", "rollout/logprobs_mean": "rollout_logprob_mean"}
# Evaluation metrics without a log line, because they do not measure the quality of the answers.
_WITHOUT_LINE = {"response_len_mean", "truncated", "num_sequences"}
_OF_EACH_SET = {"accuracy", "loss"}  # with several validation sets, only the mean has lines for the other metrics

# The beginnings of lines that report the state of a run. RunReader.status looks for them.
STARTED, RESUMED, DONE, STOPPED = "epoch=", "going on after step", "done: ", "stopped in step "


def log_epoch(epoch: int, stage: str) -> None:
    """Log a line such as `epoch=0 stage=epoch_start`."""
    logger.info("%s%d stage=epoch_%s", STARTED, epoch, stage, extra=IN_FULL)


def log_start(facts: Mapping[str, str]) -> None:
    """Log the facts about a run that starts, name -> text, as one line. The live display shows a panel instead."""
    logger.info("%s", "; ".join(f"{name}: {fact}" for name, fact in facts.items()), extra=OF_STEP)


def log_done(n_steps: int, seconds: float, changes: str, folder: Path) -> None:
    logger.info("%s%d steps in %.0f s; %s; files in %s", DONE, n_steps, seconds, changes, folder, extra=OF_STEP)


def log_stopped(step: int, saved_step: int | None, state_step: int | None, folder: Path) -> None:
    """Log the last line of a run that stopped early, with the command-line argument that resumes it."""
    kept = f"the run can go on after step {state_step}: --resume {folder}"
    if state_step is None:
        last = "no checkpoint" if saved_step is None else f"the last checkpoint is that of step {saved_step}"
        kept = f"there is no state to go on from, and {last}"
    logger.warning("%s%d; %s", STOPPED, step, kept)


def log_stage(stage: str, role: str = "policy") -> None:
    """Log a line such as `role=policy stage=rollout_start`."""
    logger.info("role=%s stage=%s", role, stage, extra=IN_FULL)


class Console(Tracker):
    """Logs the scalars of a run as lines of `name=value`. Those in `headline` are in the summary line of a step."""

    def __init__(self, headline: Sequence[str] = (), total_steps: Callable[[], int] | None = None):
        self._headline = headline
        self._total_steps = total_steps
        self._step: int | None = None
        self._scalars: dict[str, float] = {}  # of the current step so far

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log a line for each kind of scalar that is present.

        metric=reward_mean value=0.125000                    rollout/rewards_mean, rollout/logprobs_mean and eval/*
        train_stats={'loss': 0.0, ...}                       all train/*, the loss first
        time rollout=213.9 train=17.3 total=231.2            the phases in seconds, at the end of the step
        step=3/60 reward_mean=0.5 seconds=231.29             the headline, at the end of the step
        """
        if step != self._step:
            self._step, self._scalars = step, {}
        self._scalars |= scalars
        for name, value in scalars.items():
            metric = name.rpartition("/")[2]
            if name in _LABELS or (name.startswith("eval/") and metric not in _WITHOUT_LINE):
                is_mean = name.count("/") == 1  # eval/gsm8k/accuracy belongs to one of several sets
                shown = OF_STEP if name not in _LABELS and (is_mean or metric in _OF_EACH_SET) else IN_FULL
                logger.info("metric=%s value=%.6f", _LABELS.get(name, name.replace("/", "_")), value, extra=shown)
        stats = {name.removeprefix("train/"): value for name, value in scalars.items() if name.startswith("train/")}
        if stats:
            loss_first = sorted(stats, key=lambda name: name != "loss")
            logger.info("train_stats=%s", {name: round(stats[name], 8) for name in loss_first}, extra=IN_FULL)
        if "time/step" not in scalars:
            return
        total = scalars["time/step"]
        rollout, train = scalars.get("time/rollout", 0.0), scalars.get("time/train", 0.0)
        logger.info("time rollout=%.6f train=%.6f total=%.6f", rollout, train, total, extra=IN_FULL)
        known = (name for name in self._headline if name in self._scalars)
        shown = " ".join(f"{_LABELS.get(name, name.partition('/')[2])}={self._scalars[name]:.4g}" for name in known)
        of = "" if self._total_steps is None else f"/{self._total_steps()}"
        logger.info("step=%d%s %s seconds=%.2f", self._step, of, shown, total, extra=OF_STEP)
