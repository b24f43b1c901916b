"""A run that goes on from a step of another run, in a folder of its own (--resume RUN --from-step S)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.api.algorithms import Algorithm
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.durable import remove
from areno.run.recorded_run import Base, RecordedRun, compute_steps, scratch_folder
from areno.run.resume import STATE, shown_path
from areno.run.states import ENGINE, RECORD, StateFolder
from areno.schema.build import build
from areno.tracking.metrics_file import MetricsFile
from areno.tracking.run_folder import METRICS, make_run_folder, overrides_of, recipe_of, script_of

_NAME = "trial_name"


@contextmanager
def branched_run(
    folder: Path, step: int, algorithm: Algorithm, overrides: Sequence[str]
) -> Iterator[tuple[Path, list[str]]]:
    """Make the folder of a run that goes on after `step` of the run in `folder`.

    Yields (new folder, overrides without its name). The new folder is beside the old one, and is named by the override
    trial_name, or <old name>-from-<step>. If the `with` block raises ConfigError before the new run has trained, the
    new folder is removed.
    """
    names = [line.partition("=")[2] for line in overrides if line.lstrip("+").startswith(f"{_NAME}=")]
    new = folder.parent / (names[-1] if names else f"{folder.name}-from-{step}")
    if step < 1:
        raise ConfigError(Problem("--from-step", "is {}; the number of a finished step is expected, from 1 on", step))
    with scratch_folder() as scratch:
        state = _state_after(RecordedRun(folder), step, scratch)
        made = make_run_folder(new)
        assert made is not None
        try:
            settings = _write_state(folder, state, new)
            config = build(algorithm.config, settings, sources=False)
            made.write_description(config, overrides_of(folder), recipe_of(folder), script_of(folder) or None)
        except BaseException:
            remove(new)
            raise
    print(f"{shown_path(new)} goes on after step {step} of {shown_path(folder)}")
    before = (new / METRICS).stat().st_size
    try:
        yield new, [line for line in overrides if not line.lstrip("+").startswith(f"{_NAME}=")]
    except (ConfigError, SystemExit) as error:
        is_refused = isinstance(error, ConfigError) or error.code == 2
        if is_refused and (new / METRICS).stat().st_size == before:
            remove(new)
        raise


def _state_after(recorded: RecordedRun, step: int, scratch: Path) -> Base:
    if (found := recorded.bases.get(step)) is not None:
        return found
    if step in recorded.records.steps() and (failed := recorded.error_of(step)):
        raise ConfigError(Problem("--from-step", "is {}, but this step ended the run with an error ({})", step, failed))
    try:
        base = recorded.base_of(step)
    except ArenoError as error:
        text = "is {}, but there is no state of this step, and it cannot be computed again: {}"
        raise ConfigError(Problem("--from-step", text, step, error)) from error
    return compute_steps(recorded, base, step, scratch, "auto", keeps_state=True)[1]


def _write_state(folder: Path, state: Base, new: Path) -> dict[str, Any]:
    """Copy a state and the metrics up to its step into a new run. Return the settings with which it goes on."""
    assert state.folder is not None
    record = json.loads((state.folder / RECORD).read_text(encoding="utf-8"))
    recorded = RecordedRun(folder)
    settings = recorded.read(state.step)["config"] if state.step in recorded.records.steps() else record["config"]
    settings = {**settings, _NAME: new.name}
    saver = {**record["run"]["saver"], "saved_step": None, "under_way": None}
    saver["ranking"] = {**saver["ranking"], "values": []}  # its checkpoints stay with the other run
    run = {**record["run"], "saver": saver, "todo": []}
    if state.step + 1 in recorded.records.steps():  # after the evaluation of the state's step
        run["evaluator"] = recorded.read(state.step + 1)["progress"]["evaluator"]
    states = StateFolder(new / STATE, keep=1)
    unfinished = states.begin(state.step)
    shutil.copytree(state.folder / ENGINE, unfinished / ENGINE, dirs_exist_ok=True)
    sizes = {Path(METRICS).name: _copy_metrics(folder, new, state.step)}
    states.finish(unfinished, state.step, {**record, "config": settings, "files": sizes, "run": run})
    return settings


def _copy_metrics(folder: Path, new: Path, step: int) -> int:
    """Copy the metrics up to a step. Return the size of the new file."""
    lines = [_line(record) for record in MetricsFile(folder / METRICS).records() if record["step"] <= step]
    (new / METRICS).parent.mkdir(parents=True, exist_ok=True)
    (new / METRICS).write_text("".join(lines), encoding="utf-8")
    return (new / METRICS).stat().st_size


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"
