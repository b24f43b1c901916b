"""A command line whose training loop is a function of the test, for tests of what comes before the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from areno.api import Algorithm
from areno.errors import ConfigError
from areno.launch import command, compose
from areno.recipes.gspo import ALGORITHM, GSPOConfig
from areno.tracking.run_folder import METRICS

SMALL = ["experiment_name=test", "actor.path=model", "train_dataset.path=rows.jsonl", "reward.fn=math"]
TASK = """\
# A task for tests
defaults:
  - recipe
  - _self_
experiment_name: test
actor: {path: model}
train_dataset: {path: rows.jsonl}
reward: {fn: math}
"""


def task_folder(tmp_path, monkeypatch):
    """Work in this folder, with a folder `my` for --config-dir that holds the task `small`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my/small.yaml").write_text(TASK)
    return tmp_path


@dataclass(frozen=True, kw_only=True)
class Played(Algorithm):
    """GSPO's configuration with a function in place of the loop."""

    main: Callable[[GSPOConfig, Path], float]

    def run(self, config, run_dir):
        return self.main(config, run_dir)


class Main:
    """A loop that remembers its calls, fails on the seeds it is told to, and returns lr * seed."""

    def __init__(self, failures=None, steps=False):
        self.calls, self.steps = [], steps
        self.failures = failures or {}

    def __call__(self, config, run_dir):
        self.calls.append((config, run_dir))
        if config.seed in self.failures:
            raise self.failures[config.seed]
        if self.steps:
            (run_dir / METRICS).parent.mkdir()
            (run_dir / METRICS).write_text("{}\n")
        return config.actor.optimizer.lr * config.seed


def run(main, *arguments, name="small"):
    algorithm = Played(name="gspo", config=GSPOConfig, loop=ALGORITHM.loop, default="small", main=main)
    try:
        return command.run(
            algorithm, "python -m areno.recipes.gspo", ["--config-dir=my", f"--config-name={name}", *arguments]
        )
    except SystemExit as end:
        return end.code


def load(*overrides, name="small", cls=GSPOConfig, sources=False):
    return compose.load(cls, name, list(overrides), Path("my"), sources)


def problems_of(*overrides, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **kwargs)
    return [str(problem) for problem in caught.value.problems]
