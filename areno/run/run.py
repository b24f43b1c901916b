"""One run: its step, its clock, its batches, its trackers, and when to save and to evaluate."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from areno import heartbeat
from areno.api.metrics import Stopwatch, step_scalars, step_times, with_prefix
from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.data.loader import BatchLoader
from areno.errors import ArenoError, EngineError, Key, WorkerLost
from areno.files.interrupts import Stop
from areno.plan.arguments import check_folder
from areno.run.checkpoints import Saver
from areno.run.evaluator import Evaluator
from areno.run.resume import RecoverableEngine, Recovery, folder_for
from areno.tracking.console import RESUMED, log_done, log_epoch, log_start, log_stopped
from areno.tracking.display.display import Display, chosen_console, settings_told
from areno.tracking.divergence import Divergence
from areno.tracking.recorder import open_trackers
from areno.tracking.run_folder import overrides_of
from areno.tracking.run_log import RunLog
from areno.tracking.tracker import Tracker
from areno.types import Batch

logger = logging.getLogger("areno")


class Run:
    """Everything a run keeps beside its models. A loop takes its batches from here and reports its steps here.

    run_dir: the run's folder, which gets logs/, tensorboard/, rollouts/, state/ and checkpoints/; None makes a new one
    under cluster.fileroot, or takes that of the trial to go on with. loader: the training batches. save: fills the
    folder of a checkpoint; is_saved: see Saver. evaluator: None where nothing is evaluated. headline: see
    open_trackers. reward, unanswered: see Divergence. engine, inputs: see Recovery. facts: what the console
    says at the start, by name; nothing without any. token_text: see open_trackers. trackers: those of a script.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: str | Path | None,
        loader: BatchLoader[Any],
        *,
        save: Callable[[Path], object],
        is_saved: Callable[[], bool] = lambda: True,
        evaluator: Evaluator | None = None,
        headline: Sequence[str] = (),
        reward: str = "",
        unanswered: str = "",
        engine: Callable[[], RecoverableEngine] | None = None,
        inputs: Mapping[str, str] = MappingProxyType({}),
        facts: Mapping[str, str] = MappingProxyType({}),
        token_text: Callable[[int], str] = str,
        trackers: Sequence[Tracker] = (),
    ):
        if run_dir is not None:
            check_folder("run_dir", run_dir)
        self.config, self.loader, self._save = config, loader, save
        self.folder = folder_for(config, run_dir)
        self.saver = Saver(config.saver, self.folder / "checkpoints", is_saved)
        with ExitStack() as stack:
            self.saver.claim(self.folder)
            stack.callback(self.saver.release)
            console = chosen_console(config.stats_logger.console)
            log = stack.enter_context(RunLog(self.folder / "logs" / "run.log", console=console))
            self.recovery = stack.enter_context(Recovery(config, self.folder, engine, inputs))
            log.write_earlier()  # Recovery has seen where this session begins in the file
            steps, seconds = lambda: self.total_steps, lambda: self._seconds
            self.display = Display(self.folder, log, steps, seconds) if console == "live" else None
            self.trackers = open_trackers(config, self.folder, headline, steps, self.display, token_text, trackers)
            stack.callback(self.trackers.finish)
            self._resources = stack.pop_all()
        self.evaluator = evaluator or Evaluator(config, {}, lambda name, loader: {})
        self.divergence = Divergence(reward, unanswered)
        actor = config.actor
        if isinstance(actor, RatioConfig):
            remedy = "actor.prox_logp_method=recompute" if actor.recompute_logprob else "actor.recompute_logprob=true"
            self.divergence.ratio = (actor.clip_against_rollout, actor.ratio_level, remedy)
        self._scalars: dict[str, float] = {}  # of the step under way
        self.stop = Stop() if self.display is None else Stop(self.display.tell)
        self.clock = Stopwatch(self._before_phase)  # of the step under way
        self.history: dict[str, list[float]] = {}  # the values of a few numbers so far, oldest first; see keep()
        self.step = 0  # the step under way; the first is 1
        self._rows_taken = 0
        self._batches_taken = 0
        self._n_skipped = 0  # steps in a row without an update, since something was not finite
        self._n_applied = 0  # steps with one
        self._epoch: int | None = None  # under way
        self._epoch_ended = self._ended = self._stopped_early = False
        self._has_begun = False  # or gone on
        self._todo: list[str] = []  # of "save" and "evaluate", what is due after this step and not done
        self._last: dict[str, Any] = {}  # the record of the last point that the run can go on from
        self._is_there = True  # the models are as they were at that point
        self._seconds_before = 0.0  # of earlier sessions of this run
        self._started = time.monotonic()
        self._first = self.state_dict()
        self._announce(facts)

    def _announce(self, facts: Mapping[str, str]) -> None:
        if not facts:
            return
        metrics = os.path.relpath(self.recovery.files.events)
        facts = {"run": os.path.relpath(self.folder), **facts, "steps": str(self.total_steps), "metrics": metrics}
        facts |= settings_told(self.config, overrides_of(self.folder))
        log_start(facts)
        if self.display is not None:
            self.display.start(facts)

    @property
    def seed(self) -> int:
        """The seed of what is random in the step under way."""
        return self.config.seed * 1_000_003 + self.step

    @property
    def epoch(self) -> int:
        """The epoch under way; the first is 0."""
        return self._epoch or 0

    def steps(self) -> Iterator[Batch[Any]]:
        """The batch of each step, until the run has had its epochs, steps or rows, or stops early.

        Evaluates before the first step where evaluator.eval_before_train asks for it. Raises as go_on does.
        """
        self.go_on()
        if self.saver.owes(self.step):
            self._todo.insert(0, "save")
        self._settle()
        if self.display is not None:
            self.display.begin(self.step)
        self._batches = self._through_epochs()
        total = self.config.total_train_steps
        while (total is None or self.step < total) and not self.evaluator.is_exhausted:
            self._epoch_ended = False
            self.clock.reset()
            batch = self.next_batch()
            if batch is None:
                break
            self.step += 1
            self._scalars = {}
            yield batch
        if self.evaluator.is_exhausted and self.step < self.total_steps:
            self._stopped_early = True
            logger.info("early stopping: %s; see evaluator.patience", self.evaluator.describe())
        if self._epoch is not None:
            log_epoch(self._epoch, "end")

    def next_batch(self) -> Batch[Any] | None:
        """The next batch, also for a step that needs more than its own. None where the run has had them all."""
        batch = None if self._rows_left is not None and self._rows_left <= 0 else next(self._batches, None)
        if batch is not None:
            self._batches_taken += 1
            self._rows_taken += len(batch) * self._rows_per_item
        return batch

    @property
    def _rows_left(self) -> int | None:
        total = self.config.total_train_n_seqs
        return None if total is None else total - self._rows_taken

    @property
    def _rows_per_item(self) -> int:
        return self.config.gconfig.n_samples if isinstance(self.config, PolicyExperimentConfig) else 1

    @property
    def total_steps(self) -> int:
        """The step at which the run ends, as far as its data is known: rows that are too long can make it fewer."""
        left = self.loader.n_batches(self.config.total_train_epochs) - self._batches_taken
        if self._rows_left is not None:
            left = min(left, -(-self._rows_left // (self.loader.config.batch_size * self._rows_per_item)))
        total, limit = self.step + max(left, 0), self.config.total_train_steps
        return total if limit is None else min(total, limit)

    def _through_epochs(self) -> Generator[Batch[Any], None, None]:
        for batch in self.loader.epochs(self.config.total_train_epochs):
            if self._epoch != batch.epoch:
                if self._epoch is not None:
                    log_epoch(self._epoch, "end")
                self._epoch = batch.epoch
                log_epoch(batch.epoch, "start")
            self._epoch_ended = self._epoch_ended or batch.ends_epoch
            yield batch

    def log(self, scalars: Mapping[str, float]) -> None:
        """Give scalars of the step under way, named <namespace>/<name>, to the trackers."""
        self._scalars |= scalars
        self.trackers.log(self.step, scalars)
        self.saver.note(self.step, scalars)

    def log_skipped(self, batch: Batch[Any]) -> None:
        """Tell the trackers how many rows were too long."""
        skipped, total = batch.skipped_long, batch.total_skipped_long
        self.log({"rollout/skipped_long": skipped, "rollout/total_skipped_long": total})

    def keep(self, **values: float) -> None:
        """Remember the values of this step in `history`."""
        for name, value in values.items():
            self.history.setdefault(name, []).append(float(value))

    def recent(self, name: str, n: int = 1) -> float:
        """The mean of the last `n` values of `history[name]`."""
        return float(np.mean(self.history[name][-n:]))

    def result(self, evaluated: str, trained: str, n: int = 1) -> float:
        """The last value of `evaluated` or, where nothing was evaluated, the mean of the last `n` of `trained`."""
        return self.recent(evaluated) if evaluated in self.history else self.recent(trained, n)

    def end_step(self, stats: Mapping[str, float]) -> None:
        """Log train/* and time/* of the step; then write the state, save and evaluate where that is due.

        Warns of what looks wrong. A KeyboardInterrupt that the run was asked for comes here, if not at the start of a
        phase of the next step.
        """
        self.saver.poll()
        self.clock.close_step()
        self.log(step_scalars({**stats, **step_times(self.clock)}, self.clock))
        for text in self.divergence.look(self._scalars):
            logger.warning("step %d: %s", self.step, text)
        due = {"save": self.saver.due, "evaluate": self.evaluator.due, "state": self.recovery.trigger.due}
        is_due = {name: ask(self.step, self._epoch_ended) for name, ask in due.items()}
        is_due["evaluate"] = is_due["evaluate"] or (is_due["save"] and self.saver.needs_evaluation)
        self._todo = [name for name in ("save", "evaluate") if is_due[name]]
        self._settle(is_due["state"])

    def _settle(self, state_is_due: bool = False) -> None:
        """Save and evaluate as `_todo` says. The state comes first; a run that goes on from it does the rest again."""
        self._remember()
        self.recovery.write(self.step, self._last, state_is_due)
        while self._todo:
            self.stop.check()
            if self._todo[0] == "save":
                with heartbeat.working("checkpoint"):
                    self.saver.save(self._save, self.step)
            else:
                self.evaluate()
            self._todo.pop(0)
            self._remember()
        self.stop.check()

    def _remember(self) -> None:
        """The run can go on from here."""
        self._last = self.recovery.record(self.state_dict())
        self._is_there = True

    def _before_phase(self, name: str) -> None:
        self.pulse()
        if name.startswith("train"):
            self._is_there = False

    def pulse(self) -> None:
        """To be called now and then, where the engine does nothing: a state that is under way gets on.

        Raises the KeyboardInterrupt that the run was asked for, unless models have been trained since the last step.
        """
        self.recovery.poll()
        if self._is_there:
            self.stop.check()

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Around the loop: an interrupt comes where nothing is lost, and whatever ends the loop leaves a state."""
        with self.stop, heartbeat.working("the run"):
            try:
                yield
            except BaseException:
                self._leave_state()
                raise

    def _leave_state(self) -> None:
        step = self._last["run"]["step"] if self._last else 0
        if not self.recovery.is_on or not step:
            return
        try:
            if self._is_there:
                self.recovery.write_now(step, self._last)
            else:
                logger.warning("the models were being trained in step %d, so it is lost", self.step)
                self.recovery.wait()
        except ArenoError as error:  # such as that of a dead worker, which ended the run
            logger.warning("the state of step %d could not be written: %s", step, error)

    @property
    def may_restart(self) -> bool:
        """Whether recover.retries allows that."""
        return self.recovery.may_restart

    def give_up(self, lost: WorkerLost) -> NoReturn:
        """End with the error of lost workers, which says whether recover.retries is used up."""
        self.recovery.give_up(lost)

    def restart(self, lost: WorkerLost) -> None:
        """Start the workers again; the next `steps` goes on from the last state, or begins again without one.

        Raises as Engine.restart does, also a WorkerLost: then call it again.
        """
        self.recovery.restart(lost)
        self.load_state_dict(self._first)
        self._has_begun = False

    def watch_update(self, stats: Mapping[str, float], applied: bool) -> None:
        """Warn, once, of updates of the policy that were skipped since something was not finite.

        applied: whether one of the step's updates was not. EngineError after actor.max_skipped_steps steps in a row
        without one.
        """
        broken = [name for name in ("loss", "grad_norm") if not math.isfinite(stats[name])]
        self._n_applied += applied
        self._n_skipped = 0 if applied or not broken else self._n_skipped + 1
        if self._n_skipped == 1 and self.divergence.is_first("skipped"):
            logger.warning(
                "step %d: the update was skipped, since %s is not finite; the learning rate may be too high "
                "(actor.optimizer.lr), or a reward or advantage too large; train/skipped_steps counts such updates",
                self.step, " and ".join(broken),
            )  # fmt: skip
        if (most := self.config.actor.max_skipped_steps) is not None and self._n_skipped >= most:
            self._refuse_to_go_on(f"{self._n_skipped} steps in a row")

    def _refuse_to_go_on(self, steps: str) -> NoReturn:
        raise EngineError(
            "the updates of {} were not applied, since loss or gradient was not finite; lower {}, look at the rewards, "
            "or raise {}", steps, Key("actor.optimizer.lr"), Key("actor.max_skipped_steps"),
        )  # fmt: skip

    def evaluate(self) -> dict[str, float]:
        """Evaluate now: log eval/* scalars, keep them as eval_*, return them by name. {} where nothing is evaluated."""
        self.go_on()
        with heartbeat.working("evaluation"):
            scalars = self.evaluator.evaluate(self.step)
        if scalars:
            self.log(with_prefix("eval", scalars))
            self.keep(**{f"eval_{name}": value for name, value in scalars.items()})
        return scalars

    def finish(self, told: Mapping[str, int]) -> None:
        """The end of the run: save and evaluate unless that has just been done, and say how the numbers changed.

        told: names in `history`, each with how many last steps its final value is the mean of. Values of evaluations
        are told where there was more than one.
        """
        if self._n_skipped and not self._n_applied:
            self._refuse_to_go_on("all steps")  # nothing was learned: no checkpoint says otherwise
        self._todo = ["save"] if not self.saver.has(self.step) else []
        self._todo += ["evaluate"] if self.evaluator.evaluated_step != self.step else []
        self._settle()
        self.saver.end()
        self._remember()
        changes = [
            f"{name} {values[0]:.3f} -> {self.recent(name, n):.3f}"
            for name, n in told.items()
            if len(values := self.history.get(name, [])) > name.startswith("eval_")
        ]
        if self._stopped_early:
            changes.append(f"stopped early: {self.evaluator.describe()}")
        self.recovery.write_now(self.step, self._last)
        log_done(self.step, self._seconds, ", ".join(changes), self.folder)
        self._ended = True

    def has_result(self, result: float) -> None:
        """Note what the run has come to, where it has ended."""
        if self._ended:
            self.recovery.finished(self.step, result, self._ended_by)

    @property
    def _ended_by(self) -> str:
        """The setting that would have to be larger for more steps."""
        if self._stopped_early:
            return "evaluator.patience"
        if self.step == self.config.total_train_steps:
            return "total_train_steps"
        return "total_train_epochs" if self._rows_left is None or self._rows_left > 0 else "total_train_n_seqs"

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def close(self) -> None:
        """Finish the trackers. A run that did not come to its end says what is left of it."""
        if self.step and not self._ended:
            log_stopped(self.step, self.saver.saved_step, self.recovery.written_step, self.folder)
        self._resources.close()

    def go_on(self) -> None:
        """Begin the run or, once, go on from the state that an earlier session of it has left.

        Raises ConfigError if the folder has checkpoints of another run, CheckpointError if its states cannot be read.
        """
        if self._has_begun:
            return
        self._has_begun = True
        state = self.recovery.load()
        if state is not None:
            self.load_state_dict(state)
            left = max(0, self.total_steps - self.step)
            logger.info("%s %d; %d steps are left", RESUMED, self.step, left)
        elif not self.step and self.config.evaluator.eval_before_train:
            self._todo = ["evaluate"]
        if self.recovery.goes_on:
            self.trackers.resume(self.step)
        elif not self.step:
            self.saver.refuse_checkpoints()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, to be taken after `end_step`: plain numbers, without the weights."""
        return {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "epoch": self._epoch,
            "todo": list(self._todo),
            "rows_taken": self._rows_taken,
            "batches_taken": self._batches_taken,
            "n_skipped": self._n_skipped,
            "n_applied": self._n_applied,
            "saver": self.saver.state_dict(),
            "evaluator": self.evaluator.state_dict(),
            "divergence": self.divergence.state_dict(),
            "recover": self.recovery.trigger.state_dict(),
            "history": {name: list(values) for name, values in self.history.items()},
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the step at which `state_dict` was taken. To be called before `steps`."""
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self._epoch, self._todo = state["epoch"], list(state["todo"])
        self._rows_taken = state["rows_taken"]
        self._batches_taken = state["batches_taken"]
        self._n_skipped, self._n_applied = state["n_skipped"], state["n_applied"]
        self.saver.load_state_dict(state["saver"])
        self.evaluator.load_state_dict(state["evaluator"])
        self.divergence.load_state_dict(state["divergence"])
        self.recovery.trigger.load_state_dict(state["recover"])
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._seconds_before, self._started = state["seconds"], time.monotonic()
