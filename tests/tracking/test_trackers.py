"""Which trackers a run has, and that each of them gets everything."""

from __future__ import annotations

import json

import pytest

from areno.config.datasets import DatasetConfig
from areno.config.models import PolicyConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import RolloutConfig
from areno.errors import ArenoError, ConfigError
from areno.recipes.sft import SFTConfig
from areno.tracking.recorder import open_trackers
from areno.tracking.tracker import Tracker, Trackers
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample


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


def test_a_tracker_of_a_script_comes_before_the_display(tmp_path):
    given, display = Recording(), Recording()
    trackers = open_trackers(SFTConfig(**settings()), tmp_path, display=display, given=[given])
    trackers.log(1, {"train/loss": 1.0})
    trackers.finish()
    assert given.calls == display.calls == [("log", 1, {"train/loss": 1.0}), "finish"]


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
    assert files(tmp_path / "rollouts") == ["000003"]
    open_trackers(PolicyExperimentConfig(**settings(rollout=RolloutConfig(dump_n_samples=0))), tmp_path).samples(4, [])
    assert files(tmp_path / "rollouts") == ["000003"]
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "many")  # known before the first rollout, not after it
    with pytest.raises(ConfigError, match="ARENO_LOG_COMPLETIONS is 'many'"):
        open_trackers(config, tmp_path)


def test_tensorboard_has_settings_and_texts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config = PolicyExperimentConfig(**settings(rollout=RolloutConfig(dynamic_sampling=True)))
    trackers = open_trackers(config, tmp_path)
    samples = [scored(group, f"{group}.{number}\n# two") for group in range(5) for number in range(2)]
    samples[2].outcome = RewardOutcome(None, "timeout", "")
    trackers.samples(1, samples)
    trackers.log(1, {"train/loss": 0.5})
    trackers.eval_samples(1, [scored(0, "x" * 5000)], "gsm8k")
    trackers.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    told = HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["experiment_name"].string_value == "e"
    assert told["rollout.dynamic_sampling"].bool_value is True
    assert told["gconfig.n_samples"].number_value == 8
    assert "trial_name" not in told, "null"
    [text] = events.Tensors("samples/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert events.SummaryMetadata("samples/text_summary").plugin_data.plugin_name == "text"
    assert shown.split("\n\n---\n\n")[0] == (
        "**reward 0.5, format 1**\n\nprompt\n\n    2+2?\n\ncompletion\n\n    0.0\n    # two"
    )
    assert [line.strip() for line in shown.splitlines() if ".0" in line or "**" in line] == [
        "**reward 0.5, format 1**",
        "0.0",
        "**reward timeout**",
        "1.0",
        "**reward 0.5, format 1**",
        "2.0",
    ]
    [text] = events.Tensors("eval_samples/gsm8k/text_summary")
    assert text.tensor_proto.string_val[0].endswith(b"x" * 1000 + b"...")
    assert [event.value for event in events.Scalars("train/loss")] == [0.5]


def scored(group, completion):
    item = PromptItem(prompt="2+2?", text="2+2?", tokens=[1])
    sequence = RolloutSequence(resp_tokens=[1], resp_logprobs=[0.0])
    outcome = RewardOutcome(0.5, parts={"format": 1.0})
    return ScoredSample(item=item, sequence=sequence, completion=completion, outcome=outcome, group=group)
