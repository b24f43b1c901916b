"""Compute recorded steps of a run again, from a training state and the records after it.

The unchanged training loop runs in a folder of its own, see `areno.run.replaying`.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.api.algorithms import Algorithm, algorithm_of
from areno.config.experiments import ExperimentConfig
from areno.errors import ArenoError, ConfigError
from areno.run.replaying import Replay, has_failed_before_training, replaying
from areno.run.resume import STATE
from areno.run.states import ENGINE, MANIFEST, RECORD, StateFolder, find_damage
from areno.schema.build import build
from areno.schema.fields import UnusedSetting
from areno.tracking.run_folder import make_run_folder
from areno.tracking.step_records import FOLDER, RecordFolder

_NOT_IN_A_REPLAY = (
    *("valid_dataset", "eval_gconfig", "evaluator", "saver", "recover", "recorder", "stats_logger", "tune"),
    *("perf_tracer", "memory_profiler", "experiment_name", "trial_name", "cluster"),
)


@dataclass(frozen=True)
class Base:
    """A training state from which steps are computed again. Step 0 stands for the models with which the run began."""

    step: int
    folder: Path | None

    def __str__(self) -> str:
        return "the start of the run" if self.folder is None else f"the state of step {self.step}"


class RecordedRun:
    """The records and training states of a run, from which its steps can be computed again."""

    def __init__(self, folder: Path):
        self.path, self.records = folder, RecordFolder(folder / FOLDER)
        self.read = functools.cache(self.records.read)

    def error_of(self, step: int) -> str | None:
        return self.read(step).get("error")

    @property
    def bases(self) -> dict[int, Base]:
        """The usable states by step, in ascending order."""
        found = {0: Base(0, None)}
        for folder in (self.path / FOLDER / "state", self.path / STATE):
            states = StateFolder(folder, keep=1)
            found |= {step: Base(step, states.path_of(step)) for step in states.steps()}
        return {
            step: base for step, base in sorted(found.items()) if base.folder is None or not find_damage(base.folder)
        }

    def replayable(self) -> dict[int, Base]:
        """Return step -> the nearest earlier state from which all steps up to it are recorded, in ascending order."""
        found, base, bases, before = dict[int, Base](), None, self.bases, 0
        for step in self.records.steps():
            base = base if step == before + 1 else None
            if (base := bases.get(step - 1, base)) is not None:
                found[step] = base
            before = step
        return found

    def base_of(self, step: int) -> Base:
        """Return the nearest state before a step. Raises ArenoError if the step cannot be computed again."""
        recorded, found = self.records.steps(), self.replayable()
        if step in found:
            return found[step]
        if not recorded:
            text = "{} has no records: recorder.max_gib was 0, or an earlier version of areno wrote it"
            raise ArenoError(text, self.path)
        can = f"; steps that can be replayed: {ranges_text(list(found))}" if found else ""
        if step not in recorded:
            why = (
                "its record was dropped to keep within recorder.max_gib" if step < max(recorded) else "it has no record"
            )
            raise ArenoError("step {} cannot be replayed: {}{}", step, why, can)
        text = (
            "step {} cannot be replayed: no state is left from which all steps up to it are recorded. Raise {} or {}{}"
        )
        raise ArenoError(text, step, "recorder.max_gib", "recover.keep", can)


def ranges_text(steps: Sequence[int]) -> str:
    """Write ascending numbers as ranges, such as "1 to 3, 7"."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in found)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="areno-replay-") as scratch:
        yield Path(scratch)


def compute_steps(
    recorded: RecordedRun, base: Base, until: int, scratch: Path, device: str, keeps_state: bool = False
) -> tuple[dict[int, dict[str, Any]], Base]:
    """Compute the steps after `base` up to `until`. Return (step -> its record, the last state).

    The settings of each step are those of its record: a run may have been resumed with others. The last state is
    written only if `keeps_state` is True. A step that ended the run with an error may do so again.
    """
    found: dict[int, dict[str, Any]] = {}
    while base.step < until:
        settings, last = recorded.read(base.step + 1)["config"], base.step + 1
        while last < until and recorded.read(last + 1)["config"] == settings:
            last += 1
        saves = frozenset([last] if keeps_state or last < until else [])
        record = recorded.read(last)
        draws = has_failed_before_training(record)
        replay = Replay(until=last, record_of=recorded.read, inputs=record["inputs"], resamples=draws, saves=saves)
        try:
            run_replay(recorded, base, replay, settings, scratch / f"steps-{last}", device)
        except Exception:
            # The step has failed in the run, too. What else ends a replay is an error of the replay.
            if recorded.error_of(last) is None or last not in replay.found:
                raise
        base = saved_state(scratch / f"steps-{last}", last)
        found |= replay.found
    return found, base


def run_replay(
    recorded: RecordedRun, base: Base, replay: Replay, settings: Mapping[str, Any], folder: Path, device: str
) -> None:
    """Run the training loop of a recorded run in `folder`, from a state to the last step of `replay`."""
    algorithm = algorithm_of(recorded.path)
    config = replay_config(algorithm, settings, recorded.read(replay.until)["devices"], folder, device)
    _make_folder(folder, config, base)
    with replaying(replay), algorithm.trainer(config, folder) as trainer:
        trainer.fit()


def saved_state(folder: Path, step: int) -> Base:
    """Return the state that a replay in `folder` has saved, see `Replay.saves`."""
    return Base(step, StateFolder(folder / STATE, keep=1).path_of(step))


def _make_folder(folder: Path, config: ExperimentConfig, base: Base) -> None:
    """Make the folder of a run that resumes from `base`. The weights of the state are linked, and never written to."""
    made = make_run_folder(folder)
    assert made is not None
    made.write_description(config, [])
    if base.folder is None:
        return
    state = StateFolder(folder / STATE, keep=2).path_of(base.step)
    state.mkdir(parents=True)
    (state / ENGINE).symlink_to((base.folder / ENGINE).absolute(), target_is_directory=True)
    for name in (RECORD, MANIFEST):
        shutil.copyfile(base.folder / name, state / name)


def replay_config(
    algorithm: Algorithm, settings: Mapping[str, Any], devices: Sequence[str], folder: Path, device: str
) -> ExperimentConfig:
    """Return the settings of a replay: those of the run, without what it wrote, on as many devices if there are any."""
    data = {name: copy.deepcopy(value) for name, value in settings.items() if name not in _NOT_IN_A_REPLAY}
    data |= {"experiment_name": "replay", "trial_name": folder.name, "cluster": {"fileroot": str(folder.parent)}}
    data["stats_logger"] = {"console": "quiet"}
    if "rollout" in data:
        data["rollout"]["dump_to_file"] = False
    import torch

    engine = data["engine"]
    engine["device"] = device = "cpu" if device == "auto" and devices[0] == "cpu" else device
    on_cuda = device != "cpu" and torch.cuda.is_available()
    there = torch.cuda.device_count() if on_cuda else None  # any number of CPU devices
    engine["world_size"] = len(devices) if there is None else min(len(devices), there)
    if there is None and devices[0] != "cpu":
        engine["world_size"] = engine["tp_size"] * engine["cp_size"]
    while True:
        try:
            return build(algorithm.config, data, sources=False)
        except ConfigError as error:
            unused = [problem for problem in error.problems if isinstance(problem, UnusedSetting)]
            if len(unused) < len(error.problems):
                raise
            for problem in unused:  # such as limits of an evaluation, which a replay leaves out
                *sections, name = problem.key.split(".")
                functools.reduce(lambda section, key: section[key], sections, data).pop(name)
