"""What a command line calls a run and where it puts its files: names in any script, and folders that it cannot have."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from areno.errors import DataError
from areno.tracking.reader import RunReader
from tests.helpers.played import Main, load, problems_of, run, task_folder

SWEEP = ["-m", "seed=1,1"]
OTHER_FOLDERS = ("", "/test", "/test/one/mine", "/test/one/a/b.txt")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working directory with a folder `my` for --config-dir that holds the task `small`."""
    return task_folder(tmp_path, monkeypatch)


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("mine", "how"),
    [
        *((mine, how) for mine in ("/test/one", "/test/one/logs/run.log") for how in ([], SWEEP)),
        *((mine, []) for mine in OTHER_FOLDERS),
        *(pytest.param(mine, SWEEP, marks=pytest.mark.slow) for mine in OTHER_FOLDERS),
    ],
)
def test_a_failed_run_removes_only_what_it_made(work, mine, how):
    place = work / f"out{mine}"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("") if place.suffix else place.mkdir()
    before = everything(work)

    def main(config, run_dir):
        (run_dir / "logs").mkdir(exist_ok=True)
        (run_dir / "logs/run.log").open("a")
        (run_dir / "checkpoints").mkdir()
        raise DataError("row 3 is bad")

    assert run(main, "cluster.fileroot=out", "trial_name=one", *how) == 1
    of_sweep = {
        "out/test",
        "out/test/one",
        *(f"out/test/one/{name}" for name in ("multirun.yaml", "sweep.json", "sweep.csv")),
    }
    sweep = of_sweep if how else set()
    assert set(everything(work)) == {*before, *sweep}


def test_a_failed_run_with_results_keeps_them(work):
    def main(config, run_dir):
        (run_dir / "metrics.jsonl").write_text("{}")
        raise DataError("row 3 is bad")

    assert run(main, "trial_name=one") == 1
    assert "outputs/test/one/config.yaml" in everything(work)


def test_a_run_that_fails_while_its_folder_changes_tells_of_its_own_failure(work, monkeypatch, capsys):
    """An old state may still be on its way out."""
    scan = os.scandir

    def changing(path="."):
        if not isinstance(path, int) and Path(path).name == ".tmp-step-000001":
            os.rmdir(path)
        return scan(path)

    def main(config, run_dir):
        (run_dir / "state/.tmp-step-000001").mkdir(parents=True)
        (run_dir / "state/step-000002").mkdir()
        (run_dir / "state/step-000002/record.json").write_text("{}")
        monkeypatch.setattr(os, "scandir", changing)
        raise DataError("row 3 is bad")

    assert run(main, "trial_name=one") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: row 3 is bad"
    assert "outputs/test/one/config.yaml" in everything(work)


@pytest.mark.parametrize("key", ["trial_name", "experiment_name"])
@pytest.mark.parametrize("name", [300 * "a", 130 * "ä"])
def test_names_too_long_for_a_folder(work, capsys, key, name):
    (work / "outputs/test").mkdir(parents=True)
    assert run(Main(), f"{key}={name}") == 2
    assert capsys.readouterr().err == f"error: {key}: has {len(name.encode())} bytes; a folder name has at most 255\n"
    assert everything(work / "outputs") == ["test"]


@pytest.mark.parametrize("path", [300 * "a", 3000 * "a/"])
def test_output_folders_that_are_too_long(work, capsys, path):
    for key, trial in [("cluster.fileroot", "null"), ("cluster.fileroot", "one"), ("hydra.run.dir", "one")]:
        assert run(Main(), f"{key}={path}", f"trial_name={trial}") == 2
        assert re.fullmatch(r"error: cluster\.fileroot: cannot make .*: File name too long\n", capsys.readouterr().err)
    assert everything(work) == ["my", "my/small.yaml"]


@pytest.mark.parametrize("key", ["cluster.fileroot", "saver.path", "stats_logger.tensorboard.path"])
@pytest.mark.parametrize("path", ["~nobody-has-this-name/x", "", " ", "a\0b"])
def test_paths_that_no_folder_can_have(work, capsys, key, path):
    assert run(Main(), f"{key}='{path}'") == 2
    expected = "(the path of a folder|a text that is not empty|text without null characters) is expected(, or null)?"
    assert re.fullmatch(f"error: {key}: is {re.escape(repr(path))}; {expected}\n", capsys.readouterr().err)
    assert everything(work) == ["my", "my/small.yaml"]


def test_text_that_hydra_would_not_read(work):
    config = load("trial_name=ä", "train_dataset.path=/zürich/a;b.jsonl", "saver.path=/日 本/${seed}/#1")
    assert (config.trial_name, config.train_dataset.path) == ("ä", "/zürich/a;b.jsonl")
    assert config.saver.path == "/日 本/1/#1"
    assert load("gconfig.stop=[ä, b!,c d]", "actor.path=~x").gconfig.stop == ["ä", "b!", "c d"]
    assert load("""trial_name='"ä"'""").trial_name == '"ä"'
    assert load('trial_name="a=b"').trial_name == "a=b"
    hint = """; key=value is expected, or 'key="value"' where the value has one of ,:=()[]{}'"""
    assert problems_of("trial_name=a=b", "trial_name=it's", "word") == [
        f"cannot read 'trial_name=a=b'{hint}",
        f"""cannot read "trial_name=it's"{hint}""",
        "cannot read 'word'; key=value is expected",
    ]
    assert problems_of("trial_name=a\udcff") == ["cannot read 'trial_name=a\\udcff'; it is not UTF-8"]


@pytest.mark.slow
def test_a_run_and_a_sweep_with_names_in_any_script(work):
    main = Main()
    assert run(main, "trial_name=ä;b") == 0
    assert RunReader(work / "outputs/test/ä;b").overrides == ['trial_name="ä;b"']
    assert run(main, "-m", "trial_name=s", "saver.path=é,è") == 0
    assert [config.saver.path for config, _ in main.calls[1:]] == ["é/0", "è/1"]


def test_runs_of_a_sweep_share_no_folder(work):
    main = Main()
    paths = ["saver.path=ck", "stats_logger.tensorboard.path=tb", "saver.push_to_hub=me/model"]
    assert run(main, "-m", "seed=1,2", *paths, "trial_name=s") == 0
    assert [config.saver.push_to_hub for config, _ in main.calls] == ["me/model-0", "me/model-1"]
    assert [config.saver.path for config, _ in main.calls] == ["ck/0", "ck/1"]
    assert [config.stats_logger.tensorboard.path for config, _ in main.calls] == ["tb/0", "tb/1"]
    assert RunReader(work / "outputs/test/s/1").config["saver"]["path"] == "ck/1"
