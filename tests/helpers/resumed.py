"""Runs in this process that are stopped at a chosen place and go on, and what they should have left."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from areno.engine.engine import Engine
from areno.launch import command
from areno.run.recovery import Recovery
from areno.run.run import Run
from tests import kill_runs
from tests.helpers.processes import worker_pids

_wholes: dict[tuple[str, ...], dict[str, Any]] = {}
_stopped: dict[tuple[str, ...], Path] = {}


def go(recipe: str, *settings: str, resume: Path | str | None = None) -> int:
    """Start a small run of a recipe in the working directory, or go on with one; the exit code."""
    algorithm = import_module(f"areno.recipes.{recipe}").ALGORITHM
    how = kill_runs.arguments(recipe) if resume is None else ["--resume", str(resume)]
    try:
        return command.run(algorithm, f"python -m areno.recipes.{recipe}", [*how, *settings])
    except SystemExit as end:
        return int(end.code or 0)


def folder_of(recipe: str, trial: str = "t") -> Path:
    """Of the run that `go` has started."""
    [config] = Path().glob(f"outputs/*/{trial}/config.yaml")
    return config.parent.absolute()


def whole(recipe: str, tmp_path_factory: pytest.TempPathFactory, *settings: str) -> dict[str, Any]:
    """What a run leaves that nothing stops. Made once for each command line."""
    key = (recipe, *settings)
    if key not in _wholes:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("whole"))
            kill_runs.write_rows(recipe, Path())
            assert go(recipe, *settings) == 0
            _wholes[key] = kill_runs.left_by(folder_of(recipe))
    return _wholes[key]


def stopped_sft(step: int, tmp_path_factory: pytest.TempPathFactory, *settings: str) -> None:
    """Put a run into the working directory that was killed after a step. It is made once, and copied."""
    key = (str(step), *settings)
    if key not in _stopped:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("stopped"))
            kill_runs.write_rows("sft", Path())
            with killed_after(step):
                go("sft", "recover.freq_steps=1", *settings)
            assert states()[-1] == f"step-{step:06d}"
            _stopped[key] = Path().absolute()
    shutil.copytree(_stopped[key], ".", symlinks=True, dirs_exist_ok=True)


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_at(place: Any, name: str, when: Callable[..., bool] = lambda *args, **kwargs: True) -> Iterator[None]:
    """The run ends at the call of a method, and leaves nothing more than a killed one does.

    when: whether to end, given the arguments of the call.
    """
    method = getattr(place, name)

    def kill(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Killed
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recovery, "write_at_interrupt", lambda self, step: None)
        patch.setattr(place, name, kill)
        with pytest.raises(Killed):
            yield


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """The run ends when it has finished a step, and with it its state."""

    def when(run: Run, stats: Any) -> bool:
        run.recovery.writer.poll(wait=True)
        return run.step == step + 1

    with killed_at(Run, "end_step", when):
        yield


def lost_in(patch: pytest.MonkeyPatch, name: str, *calls: int) -> None:
    """Kill the worker process at these calls of a method of Engine."""
    method, made = getattr(Engine, name), []

    def killing(engine: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if len(made) in calls:
            os.kill(worker_pids(engine)[0], signal.SIGKILL)
        return method(engine, *args, **kwargs)

    patch.setattr(Engine, name, killing)


def states() -> list[str]:
    """The names of the states in the working directory's run."""
    return sorted(path.name for path in Path().glob("outputs/*/*/state/*step-*"))


def log() -> str:
    """The log of the working directory's run."""
    [path] = Path().glob("outputs/*/t/logs/run.log")
    return path.read_text(encoding="utf-8")
