"""One run around a training loop: what happens before, between and after its steps.

A `Run` owns a `RunProgress` (steps, batches, history), `RunOutputs` (console, trackers, warnings), a `Recovery`
(states, restarts), a `Saver` (checkpoints) and an `Evaluator`, and calls them in the right order. A training loop reads
as

    @fault_tolerant
    def fit(self):
        for batch in run.steps():
            ...
            run.end_step(stats)
        run.finish({"loss": 1})
        return run.progress.result("eval_loss", "loss")
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from areno import heartbeat, trace
from areno.api.metrics import Stopwatch, step_scalars, step_time_metrics, with_prefix
from areno.config.experiments import ExperimentConfig
from areno.data.loader import BatchLoader
from areno.errors import ArenoError, WorkerLost
from areno.files.durable import atomic_write_text
from areno.files.interrupts import InterruptDelay
from areno.plan.argument_checks import check_folder
from areno.plan.phases import compare_with_recorded, measured_lengths
from areno.run.checkpoints import SavedModels, Saver
from areno.run.evaluator import Evaluator
from areno.run.flight_recorder import FlightRecorder, StepKeeper
from areno.run.outputs import RunOutputs, RunTexts
from areno.run.progress import Name, RunProgress
from areno.run.recovery import Recovery
from areno.run.resume import run_folder_for
from areno.run.tracing import RunTracer
from areno.tracking.accuracy import without_accuracy_metrics
from areno.tracking.console import RESUMED, log_done, log_stopped
from areno.tracking.display.display import chosen_console
from areno.tracking.reader import RunReader
from areno.tracking.run_folder import FORECAST
from areno.tracking.run_log import IN_FULL, RunLog
from areno.tracking.tracker import Tracker
from areno.types import Batch, ScoredSample

logger = logging.getLogger("areno")


class Run:
    """A run: its folder, and everything around the steps of a training loop.

    Opening a run makes its folder, with logs/, tensorboard/, rollouts/, state/ and checkpoints/.

    Args:
        run_dir: Folder of the run. None: the folder of the run `trial_name` if it can be resumed, else a new folder
            under cluster.fileroot.
        texts: Names and texts for the console. None prints nothing about the run at its start.
        trackers: Trackers that a script passes, in addition to those of the settings.
        inputs: Fingerprints of the model and data files, see Recovery.

    Attributes:
        stop: Delays Ctrl-C and SIGTERM until nothing is lost.
        during_steps: Exit stack of resources that stay open across steps, such as agents that live across steps. It is
            closed after the last step, and when a worker is lost or training fails.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: str | Path | None,
        loader: BatchLoader[Any],
        models: SavedModels,
        *,
        evaluator: Evaluator | None = None,
        texts: RunTexts | None = None,
        inputs: Mapping[str, str] = MappingProxyType({}),
        trackers: Sequence[Tracker] = (),
    ):
        if run_dir is not None:
            check_folder("run_dir", run_dir)
        self.config, self._models = config, models
        self.folder = run_folder_for(config, run_dir)
        self.progress = RunProgress(config, loader)
        self.saver = Saver(config.saver, self.folder / "checkpoints", models.checkpoint_written)
        with ExitStack() as stack:
            self.saver.lock_folder(self.folder)
            stack.callback(self.saver.unlock_folder)
            log = RunLog(self.folder / "logs" / "run.log", console=chosen_console(config.stats_logger.console))
            stack.enter_context(log)
            self.recovery = stack.enter_context(Recovery(config, self.folder, models.engine, inputs))
            log.write_buffered()  # Recovery has noted where this session begins in the file
            self.outputs = RunOutputs(config, self.folder, log, self.progress, texts or RunTexts(), trackers)
            stack.enter_context(self.outputs)
            self.tracer = stack.enter_context(RunTracer(config, self.folder, models.engine))
            self._resources = stack.pop_all()
        self.during_steps = ExitStack()
        self.evaluator = evaluator or Evaluator(config, {}, lambda name, loader: {})
        self.stop = (
            InterruptDelay() if self.outputs.display is None else InterruptDelay(self.outputs.display.show_message)
        )
        self.recorder: StepKeeper = self._open_recorder()
        self.clock = Stopwatch(self._before_phase, self._after_phase)
        self._peaks: dict[str, float] = {}  # phase -> peak memory in GiB, since the step began
        self._todo: list[str] = []  # "save" and "evaluate", if they are due after this step and not done
        self._has_begun = self._has_ended = self._stopped_early = False
        self._first = self.state_dict()
        self.outputs.print_start(self.recovery.files)

    def _open_recorder(self) -> StepKeeper:
        recorder = FlightRecorder(self.config.recorder, self.folder, self.recovery.facts)
        self.recovery.states.retire = recorder.pin_state
        return recorder

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def history(self) -> dict[str, list[float]]:
        return self.progress.history

    def steps(self) -> Iterator[Batch[Any]]:
        """Yield the batch of each step, until the run has had its epochs, steps or rows, or stops early.

        A resumed run continues with the step after its training state.
        """
        self.begin()
        if self.saver.was_interrupted(self.step):
            self._todo.insert(0, "save")
        self._save_and_evaluate()
        if self.outputs.display is not None:
            self.outputs.display.begin_training(self.step)
        self.progress.open_batches()
        while not self.evaluator.should_stop_early:
            self.tracer.before_step(self.step + 1)
            self.clock.reset()
            self._peaks = {}
            batch = self.progress.next_step()
            if batch is None:
                break
            self.tracer.begin_step(self.clock.began)
            self.recorder.begin_step()
            self.outputs.begin_step()
            yield batch
        if self.evaluator.should_stop_early and self.step < self.progress.total_steps:
            self._stopped_early = True
            logger.info("early stopping: %s; see evaluator.patience", self.evaluator.describe_early_stop())
        self.progress.log_epoch_end()

    def begin(self) -> None:
        """Begin the run: load its newest training state, if any. A second call has no effect."""
        if self._has_begun:
            return
        self._has_begun = True
        state = self.recovery.load()
        if state is not None:
            self.load_state_dict(state)
            left = max(0, self.progress.total_steps - self.step)
            logger.info("%s %d; %d steps are left", RESUMED, self.step, left)
        elif not self.step and self.config.evaluator.eval_before_train:
            self._todo = ["evaluate"]
        self.recorder.begin_after(self.step)
        if self.recovery.resumes:
            self.outputs.trackers.resume(self.step)
        elif not self.step:
            self.saver.refuse_checkpoints()

    def log(self, scalars: Mapping[str, float]) -> None:
        """Log scalars of the current step, such as "train/loss". saver.best_metric may name one of them."""
        self.outputs.log(scalars)
        self.recorder.keep_metrics(scalars)
        self.saver.record(self.step, scalars)

    def log_skipped(self, batch: Batch[Any]) -> None:
        skipped, total = batch.skipped_long, batch.total_skipped_long
        self.log({"rollout/skipped_long": skipped, "rollout/total_skipped_long": total})
        if batch.total_skipped_ties:
            ties = {"rollout/skipped_ties": batch.skipped_ties, "rollout/total_skipped_ties": batch.total_skipped_ties}
            self.log(ties)

    def end_step(self, stats: Mapping[str, float]) -> None:
        """Log train/* and time/* of the step. Then write a state, save a checkpoint and evaluate, if due.

        If Ctrl-C or SIGTERM arrived during the step, KeyboardInterrupt is raised here, or before a phase of the next
        step.
        """
        self.saver.poll()
        self.clock.close_step()
        self.tracer.end_step(self.step)
        self.log(
            step_scalars({**stats, **step_time_metrics(self.clock)}, self.clock) | with_prefix("memory", self._peaks)
        )
        self.recorder.end_step(self.step, self._position(), self._models.engine)
        self.outputs.warn_of_divergence()
        self.give_warnings()
        step, epoch_ended = self.step, self.progress.epoch_ended
        save = self.saver.due(step, epoch_ended)
        evaluate = self.evaluator.due(step, epoch_ended)
        state = self.recovery.trigger.is_due(step, epoch_ended)
        self._todo = ["save"] if save else []
        if evaluate or (save and self.saver.needs_evaluation):
            self._todo.append("evaluate")
        self._save_and_evaluate(state)

    def log_samples(self, samples: Sequence[ScoredSample]) -> None:
        """Log the samples of a step at the end of its update, and the warnings so far."""
        self.outputs.log_samples(samples)
        self.give_warnings()

    def give_warnings(self) -> None:
        self.outputs.give_warnings(self.recorder.can_replay)

    def _position(self) -> dict[str, Any]:
        return {**self.progress.position(), "evaluator": self.evaluator.state_dict()}

    def _save_and_evaluate(self, state_is_due: bool = False) -> None:
        """Write a training state if it is due, then save a checkpoint and evaluate as `self._todo` says.

        Each finished action is removed from `self._todo` and recorded, so that a resumed run does not repeat it.
        """
        self.recovery.keep_run_state(self.state_dict())
        with trace.span(trace.DRIVER, "state") if state_is_due else nullcontext():
            self.recovery.write(self.step, state_is_due)
        while self._todo:
            self.stop.raise_if_interrupted()
            if self._todo[0] == "save":
                with heartbeat.working("checkpoint"), trace.span(trace.DRIVER, "checkpoint"):
                    self.saver.save(self._models.write_checkpoint, self.step)
            else:
                self.evaluate()
            self._todo.pop(0)
            self.recovery.keep_run_state(self.state_dict())
        self.stop.raise_if_interrupted()

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, log the metrics as eval/* scalars, and append them to the history as eval_*."""
        self.begin()
        with heartbeat.working("evaluation"), trace.span(trace.DRIVER, "evaluation"):
            scalars = self.evaluator.evaluate(self.step)
        if not self.progress.counts_right:
            scalars = without_accuracy_metrics(scalars)
        if scalars:
            self.log(with_prefix("eval", scalars))
            self.progress.append_to_history(**{f"eval_{name}": value for name, value in scalars.items()})
        return scalars

    def finish(self, numbers: Mapping[Name, int]) -> None:
        """Save and evaluate, unless done after the last step. Then write a training state and end the run.

        Logs how the main metrics changed. `numbers`: name in the history -> how many of the last values to average.
        """
        self.during_steps.close()
        self.outputs.check_learned()
        self._todo = ["save"] if not self.saver.has_checkpoint(self.step) else []
        self._todo += ["evaluate"] if self.evaluator.evaluated_step != self.step else []
        self._save_and_evaluate()
        self.saver.wait_for_all()
        self.recovery.keep_run_state(self.state_dict())
        changes = self.progress.describe_changes(numbers)
        if self._stopped_early:
            changes.append(f"stopped early: {self.evaluator.describe_early_stop()}")
        self.recovery.write_now(self.step)
        self._compare_with_forecast()
        self.outputs.warn_of_unscored()
        if note := self.outputs.closing_note(self.saver.newest_checkpoint):
            changes.append(note)
        log_done(self.step, self.progress.elapsed_seconds, ", ".join(changes), self.folder)
        self._has_ended = True
        self.recovery.check_last_state(self.step)

    def _compare_with_forecast(self) -> None:
        """Log predicted and measured time and memory of each phase, and write logs/forecast.json. Does not raise."""
        try:
            metrics = {name: series.values for name, series in RunReader(self.folder).metrics().items()}
            lengths = measured_lengths(self.config, metrics)
            compared = compare_with_recorded(self._models.forecast(*lengths).phases, metrics) if lengths else []
            if compared:
                content = json.dumps([asdict(phase) for phase in compared], indent=1)
                atomic_write_text(self.folder / FORECAST, content + "\n")
        except (ArenoError, OSError) as error:  # such as a damaged logs/metrics.jsonl or a full disk
            logger.info("no forecast to compare the run with: %s", error, extra=IN_FULL)
            return
        for number, phase in enumerate(compared, 1):
            logger.info("predicted / measured: %s", phase, extra=IN_FULL if number < len(compared) else None)

    def record_result(self, result: float) -> None:
        """Record the result of the run on disk. Does nothing unless `finish` has been called."""
        if self._has_ended:
            ended_by = "evaluator.patience" if self._stopped_early else self.progress.ended_by
            self.recovery.record_finished(self.step, result, ended_by)

    def _before_phase(self, name: str) -> None:
        self.poll_state_and_interrupts()
        if name.startswith("train"):
            self.recovery.models_recorded = False

    def _after_phase(self, name: str) -> None:
        peak = self._models.engine().phase_memory_gib()
        self._peaks[name] = max(peak, self._peaks.get(name, 0.0))

    def poll_state_and_interrupts(self) -> None:
        """Complete a state that is being written, if its files are ready. Call this often while the engine works.

        Raises KeyboardInterrupt after Ctrl-C or SIGTERM, unless a model has been trained since the last step.
        """
        self.recovery.poll()
        if self.recovery.models_recorded:
            self.stop.raise_if_interrupted()

    @contextmanager
    def delay_interrupts(self) -> Iterator[None]:
        """Delay Ctrl-C and SIGTERM until nothing is lost. If the block raises, write a training state."""
        with self.stop, heartbeat.working("the run"):
            try:
                yield
            except BaseException as error:
                with suppress(Exception):  # such as a full disk; the state is still to be written
                    self.give_warnings()
                    if isinstance(error, Exception):
                        self.recorder.fail_step(self.step, self._position(), self._models.engine, error)
                if not self._has_ended:
                    self.recovery.write_at_interrupt(self.step)
                raise

    def restart(self, lost: WorkerLost) -> None:
        """Restart the workers. The next call of `steps` continues from the newest state, or from the first step."""
        self.recovery.restart(lost)
        self.load_state_dict(self._first)
        self._has_begun = False

    def close(self) -> None:
        """Close trackers and log. If the run has not finished, first log its step, last checkpoint and last state."""
        if self.step and not self._has_ended:
            log_stopped(self.step, self.saver.saved_step, self.recovery.written_step, self.folder)
        self.recorder.close()
        self._resources.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides weights and optimizers: counters, history and loader positions."""
        return {
            **self.progress.state_dict(),
            **self.outputs.state_dict(),
            "todo": list(self._todo),
            "saver": self.saver.state_dict(),
            "evaluator": self.evaluator.state_dict(),
            "recover": self.recovery.trigger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The next step follows. Call this before `steps`."""
        self.progress.load_state_dict(state)
        self.outputs.load_state_dict(state)
        self._todo = list(state["todo"])
        self.saver.load_state_dict(state["saver"])
        self.evaluator.load_state_dict(state["evaluator"])
        self.recovery.trigger.load_state_dict(state["recover"])


class _LoopWithRun(Protocol):
    @property
    def run(self) -> Run: ...


Loop = TypeVar("Loop", bound=_LoopWithRun)


def fault_tolerant(fit: Callable[[Loop], float]) -> Callable[[Loop], float]:
    """Decorate the `fit` method of a training loop so that the run survives lost workers and can be resumed.

    If a worker is lost, all workers are restarted, up to recover.retries times, and `fit` is called again. If `fit`
    ends with an exception, a training state is written. The return value of `fit` is recorded as the result of the run.
    """

    @functools.wraps(fit)
    def guarded_fit(loop: Loop) -> float:
        run = loop.run
        with run.delay_interrupts():
            lost: WorkerLost | None = None
            while True:
                try:
                    if lost is not None:
                        run.restart(lost)  # another worker may be lost meanwhile
                    with run.during_steps:
                        result = fit(loop)
                    break
                except WorkerLost as error:
                    if not run.recovery.may_restart:
                        run.recovery.give_up(error)
                    lost = error
        run.record_result(result)
        return result

    return guarded_fit
