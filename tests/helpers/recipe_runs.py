"""Runs of recipes by their command lines, and what they have recorded."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib import import_module
from pathlib import Path

from areno.launch.command import run
from areno.tracking.reader import RunReader
from tests.helpers import warm_python

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).parents[1] / "tokenizers/tiny"


def train(recipe: str, folder: Path, *arguments: str) -> Path:
    """Run a recipe in this process, as `python -m areno.recipes.<recipe>` would; the folder of the run."""
    module = import_module(f"areno.recipes.{recipe}")
    fixed = [f"cluster.fileroot={folder}", "experiment_name=e", "trial_name=t", "engine.device=cpu"]
    code = run(module.ALGORITHM, f"python -m {module.__name__}", [*arguments, *fixed])
    assert code == 0
    return folder / "e" / "t"


def graded_reward(folder: Path) -> str:
    """A setting of reward.fn under which nearly any two completions differ, so that every group has a gradient."""
    file = folder / "graded.py"
    file.write_text(
        "def reward_fn(record):\n"
        "    return sum(c in 'aeiou' for c in record.completion) / max(len(record.completion), 1)\n",
        encoding="utf-8",
    )
    return f"reward.fn={file}"


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Step -> scalars."""
    return RunReader(run_dir).steps()


def series(run_dir: Path, name: str) -> list[float]:
    """The values of one scalar, by step."""
    return [scalars[name] for _, scalars in sorted(metrics(run_dir).items()) if name in scalars]


def without_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics that have to be the same whenever the same run is made again."""
    clock = re.compile(r"time|tokens_per_second|memory")
    return {
        step: {name: value for name, value in scalars.items() if not clock.search(name)}
        for step, scalars in metrics(run_dir).items()
    }


def rollouts(run_dir: Path, step: int) -> list[dict]:
    """The samples of a step, as rollout.dump_to_file wrote them."""
    return RunReader(run_dir).samples(step)


def command(recipe: str, cwd: Path, *arguments: str) -> tuple[str, float]:
    """`python -m areno.recipes.<recipe>` from another folder: what it says, and the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = warm_python.commands().run(["-m", f"areno.recipes.{recipe}", *arguments], cwd, environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr, time.perf_counter() - started
