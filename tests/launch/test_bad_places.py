"""Disks and memory that do not suffice, and failures of our own: what a user is told, and what is left of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_runs import fails, files, run, write
from tests.helpers.processes import children


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, and leave areno's log as it was."""
    monkeypatch.chdir(tmp_path)


# Disks ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """No file can grow beyond this, as if the disk were full then."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_for_a_checkpoint(capsys):
    with files_up_to(500_000):
        assert run("saver.path=checkpoints") == 1
    error = capsys.readouterr().err
    assert re.search(r"\nerror: cannot write the model to checkpoints.*saver.path\n$", error)
    assert "Traceback" not in error
    assert files("checkpoints") == []


@pytest.mark.slow
def test_checkpoints_of_another_run(capsys):
    assert run("total_train_steps=1", "trial_name=one", "saver.path=checkpoints") == 0
    before, mine = files(), {name: Path("checkpoints", name).stat().st_mtime_ns for name in files("checkpoints")}
    assert run("trial_name=two", "saver.path=checkpoints") == 2
    expected = (
        f"error: saver.path: checkpoints holds the checkpoints of the run in {Path('out/quickstart/one').absolute()};"
    )
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)
    assert files() == before
    assert {name: Path("checkpoints", name).stat().st_mtime_ns for name in files("checkpoints")} == mine


@pytest.mark.parametrize("key", ["actor.path", "tokenizer_path", "train_dataset.loader", "reward.fn"])
@pytest.mark.parametrize("path", [f"./{300 * 'a'}.py", "~nobody-has-this-name/x.py"])
def test_paths_that_cannot_be(capsys, key, path):
    fails(capsys, re.escape(path[2:]), 1 if key in ("actor.path", "tokenizer_path") else 2, f"{key}={path}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_bytes", "settings", "message"),
    [
        (
            30_000,
            ["stats_logger.tensorboard.path=tb"],
            "(cluster.fileroot: .*metrics.jsonl|stats_logger.tensorboard.path: .*) cannot be written",
        ),
        (1_000, [], "cluster.fileroot: cannot write to .*quickstart"),
        (
            7_000,
            ["rollout.dump_to_file=true", "gconfig.n_samples=40"],
            "rollout.dump_to_file: .*1.jsonl cannot be writ",
        ),
    ],
)
def test_no_room_for_logs(capsys, n_bytes, settings, message):
    with files_up_to(n_bytes):
        assert run("total_train_steps=20", *settings) in (1, 2)
    error = capsys.readouterr().err
    assert re.search(f"(^|\n)error: {message}.*\n$", error), error
    assert "Traceback" not in error
    for lines in Path("out").rglob("*.jsonl"):
        assert [json.loads(line) for line in lines.read_text().splitlines()], "whole lines only"
    assert not [name for name in files() if "step-" in name or name.endswith(".tmp")] if Path("out").exists() else True


def test_no_room_for_events_or_log_lines(tmp_path, caplog):
    from areno.api.metrics import MetricsRecorder
    from areno.errors import ArenoError
    from areno.tracking.run_log import RunLog

    recorder = MetricsRecorder(tmp_path / "tb")
    recorder.record(1, {"train/loss": 1.0})
    [events] = (tmp_path / "tb").iterdir()
    size = events.stat().st_size
    with RunLog(tmp_path / "run.log"), files_up_to(size + 1):
        with pytest.raises(ArenoError, match=r"stats_logger\.tensorboard\.path: .*cannot be written"):
            recorder.record(2, {"train/loss": 1.0})
        for _ in range(50):
            logging.getLogger("areno").info("a line")
    assert events.stat().st_size == size
    assert caplog.text.count("run.log cannot be written any more") == 1
    recorder.close()


@pytest.mark.parametrize(
    ("key", "code", "where"),
    [
        ("cluster.fileroot", 2, "cannot make"),
        ("saver.path", 1, "cannot be written"),
        ("stats_logger.tensorboard.path", 1, "cannot be written"),
    ],
)
def test_folders_that_cannot_be_made(capsys, key, code, where):
    write("file", "no folder")
    fails(capsys, f"{key}: .*file.*{where}|{key}: {where} .*file", code, f"{key}=file/x")


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "keys"),
    [
        ("areno.engine.roles.build_model", ["engine.tp_size", "actor.dtype", "actor.path"]),
        ("areno.engine.train.backend.FlatParameters", ["engine.tp_size", "actor.dtype"]),
        ("areno.engine.decoder.runner.KVCache", ["rollout.mem_fraction", "rollout.max_kv_tokens"]),
        (
            "areno.engine.decoder.runner.Runner.launch",
            ["rollout.max_prefill_tokens", "rollout.max_concurrent_rollouts"],
        ),
        ("areno.engine.train.passes.selected_logprobs", ["actor.mb_spec"]),  # training has freed the KV cache
    ],
    ids=["load", "optimizer", "KV cache", "decode", "train"],
)
def test_out_of_device_memory(capsys, monkeypatch, place, keys):
    import torch

    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(place, exhausted)
    assert run() == 1
    error = capsys.readouterr().err
    assert re.search("\nerror: out of device memory .*\n$|^error: out of device memory .*\n$", error), error
    assert [key for key in keys if key not in error] == []


# Failures of our own --------------------------------------------------------------------------------------------------


def test_what_nobody_foresaw_has_its_traceback(capsys, monkeypatch):
    monkeypatch.setattr("areno.trainers.turn_credit.outcome_advantages", lambda *args: 1 / 0)
    before = children()
    assert run() == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("ZeroDivisionError: division by zero\n")
    assert set(children()) <= set(before)


def test_debugging_shows_where_an_error_came_from(capsys, monkeypatch):
    monkeypatch.setenv("ARENO_DEBUG", "1")
    assert run("actor.path=/no/where") == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "CheckpointError: /no/where does not exist" in error
