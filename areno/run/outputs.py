"""The outputs of a run: its console, log file, trackers and warnings.

The training loop passes the scalars of each step to `RunOutputs.log`. checkpoints.py writes checkpoints, and
recovery.py writes training states.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from areno.config.experiments import ExperimentConfig
from areno.config.models import PolicyConfig
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.errors import ArenoError, EngineError, Key, Problem
from areno.run.progress import RunProgress
from areno.tracking.console import log_start
from areno.tracking.display.display import Display, chosen_console, start_panel_facts
from areno.tracking.recorder import open_trackers
from areno.tracking.run_folder import METRICS, RunFiles, overrides_of
from areno.tracking.run_log import RunLog
from areno.tracking.telling_samples import telling_samples
from areno.tracking.tracker import Tracker
from areno.tracking.training_warnings import (
    TrainingWarning,
    TrainingWarnings,
    aged_samples_warning,
    nothing_trained_warning,
    skipped_update_warning,
    unrewarded_step_warning,
)
from areno.types import RewardOutcome, ScoredSample

logger = logging.getLogger("areno")

_MAX_CHARS = 160  # of the settings in the line at the start


@dataclass(frozen=True, kw_only=True)
class RunTexts:
    """Names and texts that describe a run in its outputs."""

    headline: Sequence[str] = ()  # scalars in the console line of each step
    reward: str = ""  # names of the reward functions and the reward model; "" without rewards
    unanswered: str = ""  # such as "no row of train.jsonl"; "" if rows have the field `solutions`
    facts: Mapping[str, str] = field(default_factory=dict)  # printed at the start of the run
    token_text: Callable[[int], str] = str
    is_untrained: Callable[[Path], bool] = lambda folder: False  # whether a checkpoint has the first weights


class RunOutputs(AbstractContextManager["RunOutputs"]):
    """The trackers, the live display and the warnings of a run. Leaving the context finishes the trackers."""

    def __init__(
        self,
        config: ExperimentConfig,
        folder: Path,
        log: RunLog,
        progress: RunProgress,
        texts: RunTexts,
        trackers: Sequence[Tracker] = (),
    ):
        self.config, self.folder, self._progress, self._texts = config, folder, progress, texts
        is_live = chosen_console(config.stats_logger.console) == "live"
        self.display = Display(folder, log, self._total_steps, self._elapsed_seconds) if is_live else None
        self.trackers = open_trackers(
            config, folder, texts.headline, self._total_steps, self.display, texts.token_text, trackers
        )
        self.scalars: dict[str, float] = {}
        needs_rewards = not isinstance(config, PolicyExperimentConfig) or config.needs_rewards
        self._divergence = TrainingWarnings(texts.reward, texts.unanswered, needs_rewards)
        actor = config.actor
        if isinstance(actor, RatioConfig):
            remedy = "actor.prox_logp_method=recompute" if actor.recompute_logprob else "actor.recompute_logprob=true"
            self._divergence.ratio = (actor.rollout_clip_range, actor.ratio_level, remedy)
        self._n_skipped = 0  # consecutive steps whose update was skipped because of a value that is not finite
        self._n_applied = 0  # steps whose update was applied
        self._has_gradient = False  # whether a gradient of the actor was not 0
        self._unrewarded = 0, "", ""  # consecutive steps without a reward; setting and reason of the last failure
        self._versions: list[int] = []  # of the weights with which the latest steps began
        self._samples: Sequence[ScoredSample] = ()  # of the step, once its update has ended
        self._due: list[TrainingWarning] = []  # warnings that are not given yet
        self._unscored = 0, 0, ""  # samples of the run without a reward, all samples; setting of the last failure

    def __exit__(self, *exc: object) -> None:
        self.trackers.finish()

    def _total_steps(self) -> int:
        return self._progress.total_steps

    def _elapsed_seconds(self) -> float:
        return self._progress.elapsed_seconds

    def print_start(self, files: RunFiles) -> None:
        """Print facts and settings at the start of the run. Does nothing without facts."""
        if not self._texts.facts:
            return
        facts = {"run": os.path.relpath(self.folder), **self._texts.facts}
        facts |= {"steps": str(self._progress.total_steps), "metrics": os.path.relpath(files.events)}
        settings = start_panel_facts(self.config, overrides_of(self.folder))
        log = f"{os.path.relpath(self.folder / 'logs/run.log')}, with all stages (stats_logger.console=full)"
        log_start(facts | {"log": log} | {name: _shorten_settings(of) for name, of in settings.items()})
        if self.display is not None:
            self.display.start(facts | settings)

    def begin_step(self) -> None:
        """Clear `scalars`, and make the metrics file. A failed run that has this file does not remove its folder."""
        self.scalars, self._samples = {}, ()
        (self.folder / METRICS).touch()

    def log(self, scalars: Mapping[str, float]) -> None:
        self.scalars |= scalars
        self.trackers.log(self._progress.step, scalars)

    def log_samples(self, samples: Sequence[ScoredSample]) -> None:
        self._samples = samples
        self.trackers.samples(self._progress.step, samples)

    def warn_of_divergence(self) -> None:
        self._due += self._divergence.new_warnings(self._progress.step, self.scalars)

    def give_warnings(self, can_replay: Callable[[int], bool]) -> None:
        """Log the warnings of the step, each with the samples and commands that explain it.

        `can_replay` says whether a step can be computed again.
        """
        due, self._due = self._due, []
        for warning in due:
            text = self._explain(warning, can_replay(self._progress.step))
            logger.warning("step %d: %s%s", self._progress.step, warning.text, text)

    def _explain(self, warning: TrainingWarning, can_replay: bool) -> str:
        step, run = self._progress.step, shlex.quote(os.path.relpath(self.folder))
        text = "" if warning.since is None else f". It began in step {warning.since}"
        chosen = telling_samples(warning.kind, self._samples, warning.parts) if self._samples else []
        if numbers := self.trackers.numbers_of(step, chosen):
            *others, last = map(str, numbers)
            text += f". Telling samples: {' and '.join(filter(None, (', '.join(others), last)))}"
            text += f" (areno replay {run} --step {step} --sample {numbers[0]})"
        if can_replay:
            return f"{text}. The step again: areno replay {run} --step {step}"
        return f"{text}. The step cannot be computed again: no record or no earlier state is left (recorder.max_gib)"

    def watch_ages(self, version: int, staleness: int) -> None:
        """Warn of a sample that is older than rollout.max_head_offpolicyness allows.

        `version` is that of the weights with which the step begins to train, and `staleness` how many updates before
        it the oldest trained token was sampled.
        """
        if not isinstance(self.config, PolicyExperimentConfig):
            return
        most = self.config.rollout.max_head_offpolicyness
        self._versions = [*self._versions, version][-2 - most :]
        age = sum(later > version - staleness for later in self._versions)
        self._warn("aged", aged_samples_warning(age, most))

    def _warn(self, kind: str, text: str) -> None:
        if text and self._divergence.add_if_new(kind):
            self._due.append(TrainingWarning(kind, text))

    def watch_update(self, stats: Mapping[str, float], applied: bool) -> None:
        """Count consecutive steps whose updates were skipped because loss or gradient norm was not finite.

        Warns of the first such step of the run, and of the first step without a trained token. Raises EngineError after
        actor.max_skipped_steps consecutive skipped steps.
        """
        broken = [name for name in ("loss", "grad_norm") if not math.isfinite(stats[name])]
        self._n_applied += applied
        self._has_gradient |= stats["grad_norm"] != 0
        self._n_skipped = 0 if applied or not broken else self._n_skipped + 1
        if self._n_skipped == 1:
            self._warn("skipped", skipped_update_warning(broken))
        if not (applied or broken):
            actor = self.config.actor
            masks = isinstance(actor, PolicyConfig) and actor.mask_no_eos_with_zero
            self._warn("nothing trained", nothing_trained_warning(masks))
        if (most := self.config.actor.max_skipped_steps) is not None and self._n_skipped >= most:
            _raise_skipped(f"{self._n_skipped} steps in a row")

    def watch_rewards(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Warn of a step without any reward. Raises ArenoError after actor.max_skipped_steps of them in a row."""
        unscored = [outcome for outcome in outcomes if outcome.value is None]
        n, n_samples, key = self._unscored
        self._unscored = n + len(unscored), n_samples + len(outcomes), unscored[-1].key if unscored else key
        if len(unscored) < len(outcomes):
            self._unrewarded = 0, "", ""
            return
        n, last, most = self._unrewarded[0] + 1, outcomes[-1], self.config.actor.max_skipped_steps
        self._unrewarded = n, last.key, f"{last.status}: {last.message}"
        text = unrewarded_step_warning(most)
        self._due.append(TrainingWarning("unrewarded", text))
        if most is not None and n >= most:
            self._raise_unrewarded("a step" if n == 1 else f"{n} steps in a row")

    def _raise_unrewarded(self, steps: str) -> NoReturn:
        _, key, reason = self._unrewarded
        text = "no reward could be computed for any sample of {} (see {}); the last: {}{}"
        raise ArenoError(Problem(key, text, steps, Key("actor.max_skipped_steps"), reason, self._scoring_command(key)))

    def _scoring_command(self, key: str) -> str:
        """Return advice to run the command that tests reward functions. "" if a script passed the functions."""
        config = self.config
        if key != "reward.fn" or not isinstance(config, PolicyExperimentConfig) or not config.reward.function_names:
            return ""
        functions, folder = shlex.join(config.reward.function_names), os.path.relpath(self.folder)
        return f". Where it fails: areno reward {functions} --data {folder}"

    def warn_of_unscored(self) -> None:
        n, n_samples, key = self._unscored
        if n:
            text = "%d of %d samples of this run have no reward and are not trained%s"
            logger.warning(text, n, n_samples, self._scoring_command(key))

    def closing_note(self, checkpoint: Path | None) -> str:
        """If the last checkpoint has the model's initial weights, warn and return a note. Else return ""."""
        if checkpoint is None or not self._texts.is_untrained(checkpoint):
            return ""
        config, lr = self.config, self.config.actor.optimizer.lr
        why = f"actor.optimizer.lr={lr:g} changes them by less than their data type holds; raise it, or train longer"
        if isinstance(config, CriticExperimentConfig) and self._progress.step <= config.critic.warmup_steps:
            why = f"critic.warmup_steps={config.critic.warmup_steps} took all steps; lower it, or train longer"
        elif lr == 0:
            why = "actor.optimizer.lr is 0"
        elif not self._has_gradient:
            why = "every gradient was 0, as where all samples of a prompt have the same reward; see reward_mean"
        logger.warning("no stored weight differs from the start: %s", why)
        return f"no stored weight differs from the start ({why})"

    def check_learned(self) -> None:
        """Raise an error if no step had a reward, or if updates were skipped and none was ever applied."""
        if self._unrewarded[0] >= self._progress.step > 0:
            self._raise_unrewarded("all steps")
        if self._n_skipped and not self._n_applied:
            _raise_skipped("all steps")  # a checkpoint would look as if the run had learned something

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_skipped": self._n_skipped,
            "n_applied": self._n_applied,
            "has_gradient": self._has_gradient,
            "unrewarded": list(self._unrewarded),
            "unscored": list(self._unscored),
            "versions": list(self._versions),
            "divergence": self._divergence.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._n_skipped, self._n_applied = state["n_skipped"], state["n_applied"]
        self._has_gradient = state.get("has_gradient", True)
        self._unrewarded = tuple(state.get("unrewarded", (0, "", "")))
        self._unscored = tuple(state.get("unscored", (0, 0, "")))
        self._versions = list(state.get("versions", ()))
        self._divergence.load_state_dict(state["divergence"])


def _shorten_settings(settings: str) -> str:
    return textwrap.shorten(settings, _MAX_CHARS, placeholder=" ... (all: config.yaml)")


def _raise_skipped(steps: str) -> NoReturn:
    raise EngineError(
        "the updates of {} were not applied, since loss or gradient was not finite; lower {}, look at the rewards, "
        "or raise {}",
        steps,
        Key("actor.optimizer.lr"),
        Key("actor.max_skipped_steps"),
    )
