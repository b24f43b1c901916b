"""Which trackers a run has, and that each of them gets everything."""

from __future__ import annotations

import json

import pytest

from areno.config.datasets import DatasetConfig
from areno.config.experiments import PolicyExperimentConfig
from areno.config.models import PolicyConfig
from areno.config.run import RolloutConfig
from areno.errors import ArenoError, ConfigError
from areno.recipes.sft import SFTConfig
from areno.tracking.recorder import open_trackers
from areno.tracking.tracker import Tracker, Trackers


class Recording(Tracker):
    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def log(self, step, scalars):
        self.calls.append(("log", step, scalars))

    def samples(self, step, samples):
        self.calls.append(("samples", step, samples))

    def finish(self):
        self.calls.append("finish")
        if self.fails:
            raise ArenoError("the disk is full")


def test_every_tracker_gets_everything():
    first, second = Recording(fails=True), Recording()
    trackers = Trackers([first, second])
    trackers.log(1, {"train/loss": 1.0})
    trackers.samples(1, [])
    with pytest.raises(ArenoError, match="disk is full"):
        trackers.finish()
    assert first.calls == second.calls == [("log", 1, {"train/loss": 1.0}), ("samples", 1, []), "finish"]


def settings(**more):
    return {
        "experiment_name": "e",
        "actor": PolicyConfig(path="model"),
        "train_dataset": DatasetConfig(path="rows.jsonl"),
        **more,
    }


def files(folder):
    return sorted(path.relative_to(folder).as_posix().split(".")[0] for path in folder.rglob("*") if path.is_file())


def test_trackers_of_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "many")
    trackers = open_trackers(SFTConfig(**settings()), tmp_path)
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    assert files(tmp_path) == ["logs/metrics", "tensorboard/events"]
    assert json.loads((tmp_path / "logs/metrics.jsonl").read_text())["train/loss"] == 1.0


def test_trackers_of_samples(tmp_path, monkeypatch):
    config = PolicyExperimentConfig(**settings(rollout=RolloutConfig(dump_to_file=True)))
    trackers = open_trackers(config, tmp_path)
    trackers.samples(3, [])
    trackers.finish()
    assert files(tmp_path / "rollouts") == ["3"]
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "many")  # known before the first rollout, not after it
    with pytest.raises(ConfigError, match="ARENO_LOG_COMPLETIONS is 'many'"):
        open_trackers(config, tmp_path)
