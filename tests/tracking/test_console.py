"""The console lines of a run, the progress display, and samples in logs and dumps."""

from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import contextmanager

import pytest

from areno.errors import ConfigError
from areno.tracking import console
from areno.tracking import console as display
from areno.tracking.run_log import RunLog
from areno.tracking.samples import SampleLog
from tests.helpers.samples import samples


@contextmanager
def run_log(path=None, shown=None):
    """A run's log where no host program listens. pytest itself does, and looks for that when a test starts."""
    logger = logging.getLogger("areno")
    logger.propagate = False
    try:
        with RunLog(path, console=shown):
            yield
    finally:
        logger.propagate = True


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines(capsys, tmp_path):
    with run_log(tmp_path / "logs/run.log"):
        console.log_epoch(3, "start")
        console.log_stage("rollout_start")
        tracker = console.Console(["rollout/rewards_mean", "train/lr", "train/explained_variance"], lambda: 60)
        tracker.log(3, {"rollout/seq_len_mean": 9.0, "rollout/rewards_mean": 0.125, "rollout/logprobs_mean": -0.5})
        times = {"time/rollout": 213.929721, "time/train": 17.327612, "time/reward": 0.1, "time/step": 231.297132}
        tracker.log(3, {"train/lr": 1e-06, "train/loss": 0.0, **times})
        tracker.log(3, {"eval/accuracy": 0.5, "eval/rewards_mean": 0.25, "eval/num_sequences": 8.0})
        tracker.finish()
        logging.getLogger("areno.data").warning("careful")
        lines = capsys.readouterr().err.splitlines()
        assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
            "epoch=3 stage=epoch_start",
            "role=policy stage=rollout_start",
            "metric=reward_mean value=0.125000",
            "metric=rollout_logprob_mean value=-0.500000",
            "train_stats={'loss': 0.0, 'lr': 1e-06}",
            "time rollout=213.929721 train=17.327612 total=231.297132",
            "step=3/60 reward_mean=0.125 lr=1e-06 seconds=231.30",
            "metric=eval_accuracy value=0.500000",
            "metric=eval_rewards_mean value=0.250000",
            "warning: careful",
        ]
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
        assert (tmp_path / "logs/run.log").read_text().splitlines() == lines


def test_lines_of_several_validation_sets(capsys):
    """The accuracy or loss of each, and every metric of their mean."""
    with run_log(shown="lines"):
        of_sets = {"eval/gsm8k/accuracy": 0.4, "eval/gsm8k/rewards_mean": 0.4, "eval/gsm8k/num_sequences": 8.0}
        console.Console().log(3, {"eval/accuracy": 0.5, "eval/rewards_mean": 0.5, **of_sets, "eval/chat/loss": 2.0})
        assert [line[9:] for line in capsys.readouterr().err.splitlines()] == [
            "metric=eval_accuracy value=0.500000",
            "metric=eval_rewards_mean value=0.500000",
            "metric=eval_gsm8k_accuracy value=0.400000",
            "metric=eval_chat_loss value=2.000000",
        ]


def test_progress_lines_are_rare_without_a_terminal(capsys, monkeypatch, tmp_path):
    with run_log(tmp_path / "logs/run.log"):
        now = [100.0]
        monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
        with display.Progress("rollout", total=32, interval_s=10.0) as progress:
            for second in range(25):
                now[0] = 100.0 + second
                progress.update(second, tokens=50 * second, reward=0.5 if second > 15 else None)
        lines = [line[9:] for line in capsys.readouterr().err.splitlines()]
        assert lines == [
            "rollout progress: prompts=10/32 tokens_per_second=50.0",
            "rollout progress: prompts=20/32 tokens_per_second=50.0 reward_mean=0.500000",
        ]


def test_progress_bar_on_a_terminal(monkeypatch, tmp_path):
    with run_log(tmp_path / "logs/run.log"):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")
        with display.Progress("rollout", total=4) as progress:
            progress.update(2, tokens=100, reward=0.25)
            console.Console().log(1, {"rollout/rewards_mean": 1.0})
            progress.update(4, tokens=200, reward=0.75)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
        assert "4/4" in shown
        assert "reward 0.750" in shown
        assert "tok/s" in shown
        assert "metric=reward_mean value=1.000000" in shown
        assert sys.stderr is screen


def test_completions_in_the_log(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="areno")
    monkeypatch.delenv("ARENO_LOG_COMPLETIONS", raising=False)
    SampleLog().samples(3, samples())
    assert caplog.text == ""
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "5")
    SampleLog().samples(3, samples())
    assert [record.message.split(" finish")[0] for record in caplog.records] == [
        "completion step=3 sample=0 reward=1",
        "completion step=3 sample=1 reward=timeout",
    ]
    assert "reward=1 finish_reason=stop tokens=2\n  prompt: <2+2?>\n  completion: four\\n4" in caplog.records[0].message
    assert len(caplog.records[1].message) < 1300
    assert "5000 characters" in caplog.records[1].message
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", "many")
    with pytest.raises(ConfigError, match="ARENO_LOG_COMPLETIONS is 'many'"):
        SampleLog()
