"""What every loop does around its algorithm: count steps, log, record metrics, save, know when to evaluate."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areno.api.batches import BatchLoader
from areno.api.console import Progress, log_epoch, log_metric, log_times, log_train_stats, setup_logging
from areno.api.metrics import MetricsRecorder, with_prefix
from areno.api.saver import Saver, Trigger
from areno.api.types import Batch
from areno.config.experiments import ExperimentConfig
from areno.engine.spec import RolloutStats
from areno.engine.types import GenerationOutput

logger = logging.getLogger("areno")


class Stopwatch:
    """Seconds by phase of one step, as the time/* metrics want them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Run:
    """The bookkeeping of one run in its folder: logs/, tensorboard/, rollouts/, checkpoints/."""

    def __init__(self, config: ExperimentConfig, run_dir: str | Path):
        self.config, self.folder = config, Path(run_dir)
        run_dir = self.folder
        self.saver = Saver(config.saver, run_dir / "checkpoints")
        self.saver.check_writable()
        setup_logging(run_dir / "logs" / "run.log")
        tensorboard = config.stats_logger.tensorboard.path or run_dir / "tensorboard"
        self.recorder = MetricsRecorder(tensorboard, run_dir / "logs" / "metrics.jsonl")
        self.evaluator = Trigger(config.evaluator)
        self._started = time.monotonic()
        self.step = 0  # of the batch under way; counts from 1
        self.evaluated_step: int | None = None
        self._epoch: int | None = None  # under way
        self._epoch_ended = self._ended = False

    def steps(self, loader: BatchLoader[Any]) -> Iterator[tuple[int, Batch[Any]]]:
        """(step, batch) until the run has had its epochs, steps or rows."""
        self._batches = self._through_epochs(loader)
        self._rows_left = self.config.total_train_n_seqs
        while self.step != self.config.total_train_steps and (batch := self.more()) is not None:
            self.step += 1
            yield self.step, batch
            self._epoch_ended = False
        if self._epoch is not None:
            log_epoch(self._epoch, "end")

    def more(self) -> Batch[Any] | None:
        """The next batch, also for a step that needs more than its own; None where the run has had them all."""
        batch = None if self._rows_left is not None and self._rows_left <= 0 else next(self._batches, None)
        if batch is not None and self._rows_left is not None:
            self._rows_left -= len(batch) * self._samples_per_item
        return batch

    def _through_epochs(self, loader: BatchLoader[Any]) -> Generator[Batch[Any], None, None]:
        for epoch in range(self.config.total_train_epochs):
            self._epoch = epoch
            log_epoch(epoch, "start")
            batches = loader.batches()
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)  # known one ahead, so that the last step of an epoch knows that it is
                self._epoch_ended = self._epoch_ended or following is None
                yield batch
                batch = following
            log_epoch(epoch, "end")
            self._epoch = None

    @property
    def _samples_per_item(self) -> int:
        gconfig = getattr(self.config, "gconfig", None)
        return 1 if gconfig is None else gconfig.n_samples

    def log(self, scalars: Mapping[str, float]) -> None:
        """Record scalars named <namespace>/<name> at the current step."""
        self.recorder.record(self.step, scalars)

    def log_step(self, stats: Mapping[str, float], watch: Stopwatch, headline: Mapping[str, float]) -> None:
        """Console lines and metrics at the end of a step. `headline`: what the one-line summary shows."""
        seconds = watch.seconds
        rollout, train = seconds.get("rollout", 0.0), seconds.get("train", 0.0)
        stats = {**stats, "step_rollout_time_s": rollout, "step_train_time_s": train, "step_e2e_time_s": watch.total}
        shown_first = sorted(stats, key=lambda name: name != "loss")
        log_train_stats({name: round(stats[name], 8) for name in shown_first})
        log_times(rollout, train, watch.total)
        total = f"/{self.config.total_train_steps}" if self.config.total_train_steps else ""
        shown = " ".join(f"{name}={value:.4g}" for name, value in headline.items())
        logger.info("step=%d%s %s seconds=%.2f", self.step, total, shown, watch.total)
        self.log({**with_prefix("train", stats), **with_prefix("time", {**seconds, "step": watch.total})})

    def save_if_due(self, write: Callable[[Path], object]) -> None:
        """A checkpoint, if the saver's frequency says so after this step."""
        if self.saver.due(self.step, self._epoch_ended):
            self.saver.save(write, self.step)

    def save_at_end(self, write: Callable[[Path], object]) -> None:
        """The checkpoint of the last step, unless it is there already."""
        if self.saver.saved_step != self.step:
            self.saver.save(write, self.step)

    def evaluation_is_due(self) -> bool:
        """Whether the evaluator's frequency asks for one after this step. To be asked once a step."""
        return self.evaluator.due(self.step, self._epoch_ended)

    def log_evaluation(self, scalars: Mapping[str, float], shown: Sequence[str]) -> None:
        """Record eval/* scalars and say those in `shown`."""
        for name in shown:
            log_metric(f"eval_{name}", scalars[name])
        self.log(with_prefix("eval", scalars))
        self.evaluated_step = self.step

    def log_end(self, **changes: tuple[float, float]) -> None:
        """The run in one line: each named value at its start and at its end."""
        shown = ", ".join(f"{name} {before:.3f} -> {after:.3f}" for name, (before, after) in changes.items())
        seconds = time.monotonic() - self._started
        logger.info("done: %d steps in %.0f s; %s; files in %s", self.step, seconds, shown, self.folder)
        self._ended = True

    def close(self) -> None:
        """Close the metric files. A run that did not come to its end says what is left of it."""
        if self.step and not self._ended:
            saved = self.saver.saved_step
            kept = "no checkpoint was saved" if saved is None else f"the last checkpoint is that of step {saved}"
            logger.warning("stopped in step %d; %s", self.step, kept)
        self.recorder.close()


class RolloutProgress:
    """Follows one rollout: a progress bar or lines for people, decode progress of each data-parallel rank for logs.

    reward: the mean reward of the rollout before this one, shown beside the bar, if there was one.
    """

    def __init__(
        self,
        title: str,
        n_prompts: int,
        n_samples: int,
        dp_size: int,
        reward: float | None = None,
        interval_s: float = 10.0,
    ):
        self.bar = Progress(title, n_prompts, interval_s)
        self.n_samples, self.dp_size, self.reward, self.interval_s = n_samples, dp_size, reward, interval_s
        self._samples = 0
        self._since = time.monotonic()
        self._before = [RolloutStats()] * dp_size

    def __call__(self, outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
        self._samples += len(outputs)
        self.bar.update(self._samples // self.n_samples, sum(rank.generated_tokens for rank in stats), self.reward)
        now = time.monotonic()
        if now - self._since < self.interval_s:
            return
        for rank, (new, old) in enumerate(zip(stats, self._before, strict=True)):
            logger.info(
                "rollout decode progress: dp=%d/%d active=%d cuda_graph=%s tokens_per_second=%.1f",
                rank, self.dp_size, new.running, new.graph_replays > old.graph_replays,
                (new.generated_tokens - old.generated_tokens) / (now - self._since),
            )  # fmt: skip
        self._before, self._since = list(stats), now

    def __enter__(self) -> RolloutProgress:
        self.bar.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.bar.__exit__(*exc)
