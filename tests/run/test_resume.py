"""A run that was stopped goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areno import DPOTrainer, SFTTrainer
from areno.config.run import ClusterConfig, RecoverConfig
from areno.engine import engine as engine_module
from areno.engine.engine import Engine
from areno.errors import ConfigError, WorkerLost
from areno.launch.compose import load
from areno.recipes.dpo import DPOConfig
from areno.recipes.sft import SFTConfig
from areno.run.checkpoints import Saver
from areno.run.resume import print_next_commands
from areno.run.run import Run
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, killed_after, killed_at, log, lost_in, states, stopped_sft, whole

SLOW = pytest.mark.slow
OFTEN = ["recover.freq_steps=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory with the rows of SFT."""
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows("sft", tmp_path)
    return tmp_path


@pytest.fixture
def expected(tmp_path_factory):
    return whole("sft", tmp_path_factory)


def check(expected, trial="t"):
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of("sft", trial))) == []


@pytest.fixture
def stopped_after(tmp_path_factory):
    """(step, *settings): puts a run here that was killed after a step."""
    return lambda step, *settings: stopped_sft(step, tmp_path_factory, *settings)


# Where it stopped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 6))])
def test_after_any_step(step, expected, stopped_after):
    """Steps 2 and 6 are the last of an epoch."""
    stopped_after(step)
    assert go("sft", *OFTEN) == 0
    assert f"going on after step {step}; {7 - step} steps are left" in log()
    check(expected)


def test_before_it_had_a_state(expected):
    with killed_at(Run, "end_step", lambda run, stats: run.step == 5):
        go("sft", "recover.freq_epochs=null")
    assert states() == []
    assert len(list(Path().glob("outputs/*/t/checkpoints/step-*"))) == 1
    assert go("sft") == 0
    assert "ended before it had a state; it begins again" in log()
    check(expected)


def test_before_it_had_begun(expected):
    with killed_at(Saver, "lock_folder"):
        go("sft", *OFTEN)
    assert go("sft", *OFTEN) == 0
    check(expected)


def test_while_its_folder_was_made(expected):
    from areno.tracking import run_folder

    with killed_at(run_folder, "atomic_write_text", lambda path, text: path.name == "config.yaml"):
        go("sft", *OFTEN)
    assert go("sft", *OFTEN) == 0
    check(expected)


@pytest.mark.slow
def test_after_the_last_step_and_after_the_end(expected, capsys):
    with killed_at(Run, "finish"):
        go("sft", *OFTEN)
    assert go("sft", *OFTEN) == 0
    check(expected)
    capsys.readouterr()
    assert go("sft", *OFTEN) == 0
    assert "outputs/quickstart_base/t is finished: its 7 steps are done, with the result" in capsys.readouterr().out
    assert go("sft", resume=folder_of("sft")) == 0
    assert "is finished" in capsys.readouterr().out
    check(expected)


def test_changes_that_cannot_be_written_down(stopped_after, capsys):
    stopped_after(2)
    (folder_of("sft") / ".tmp-versions.json").mkdir()
    capsys.readouterr()
    assert go("sft", *OFTEN, "total_train_steps=9") == 2
    assert f"error: cluster.fileroot: cannot write to {folder_of('sft')}: Is a directory\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "short", "longer"),
    [
        ("sft", ["total_train_steps=2"], "total_train_steps=4"),
        pytest.param("sft", ["total_train_epochs=1", "total_train_steps=90"], "total_train_epochs=2", marks=SLOW),
        pytest.param("sft", ["total_train_n_seqs=16"], "total_train_n_seqs=32", marks=SLOW),
        pytest.param("gspo", ["total_train_n_tokens=200"], "total_train_n_tokens=400", marks=SLOW),
        ("dpo", ["evaluator.patience=1", "evaluator.min_delta=5"], "evaluator.patience=2"),
    ],
)
def test_what_lets_a_finished_run_go_on(recipe, short, longer, folder, capsys, monkeypatch):
    kill_runs.write_rows(recipe, folder)
    assert go(recipe, *short) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        print_next_commands("command", folder_of(recipe))
    assert (
        f"train on:     command --resume outputs/{folder_of(recipe).parent.name}/t {longer}\n"
        in capsys.readouterr().err
    )
    assert go(recipe, *short) == 0
    assert f"--resume outputs/{folder_of(recipe).parent.name}/t {longer}\n" in capsys.readouterr().out
    assert go(recipe, longer, resume=folder_of(recipe)) == 0
    said = capsys.readouterr().err
    assert f"{longer.partition('=')[0]} " in said
    assert re.search(r"going on after step \d; [1-9] steps are left", said)


def test_between_the_last_state_and_the_word_that_it_is_finished(expected):
    with killed_at(Run, "record_result"):
        go("sft", *OFTEN)
    assert go("sft", *OFTEN) == 0
    assert "going on after step 7; 0 steps are left" in log()
    assert RunReader(folder_of("sft")).status() == "completed"
    check(expected)


@pytest.mark.slow
def test_a_longer_run_is_the_run_that_would_have_been_as_long(tmp_path_factory):
    longer = "total_train_steps=9"
    assert go("sft", *OFTEN) == 0
    before = RunReader(folder_of("sft")).records()
    assert go("sft", *OFTEN, longer) == 0
    assert "changed: total_train_steps 7 -> 9 (where the run ends," in log()
    assert RunReader(folder_of("sft")).records()[: len(before)] == before
    assert RunReader(folder_of("sft")).config["total_train_steps"] == 9
    left = kill_runs.left_by(folder_of("sft"))
    expected = whole("sft", tmp_path_factory, longer)
    # The checkpoint at the end of the shorter one stays.
    assert {name.split("/")[1] for name in kill_runs.differences(expected, left)} == {"step-000007"}


def test_a_run_that_is_past_its_new_end_says_so(stopped_after):
    stopped_after(5)
    assert go("sft", *OFTEN, "total_train_steps=4") == 0
    assert "going on after step 5; 0 steps are left" in log()
    assert "done: 5 steps" in log()


# How it goes on ------------------------------------------------------------------------------------------------------


def test_by_its_folder_also_when_that_has_been_moved(expected, folder, stopped_after):
    stopped_after(3)
    shutil.copytree("outputs/quickstart_base/t", "there")
    shutil.rmtree("outputs")
    assert go("sft", resume="there") == 0
    assert kill_runs.differences(expected, kill_runs.left_by(folder / "there")) == []


def test_changes_are_listed_and_stay(capsys, stopped_after):
    stopped_after(3)
    settings = ["actor.optimizer.lr=1e-4", "saver.freq_steps=2", "actor.mb_spec.max_tokens_per_mb=64"]
    assert go("sft", *settings, resume=folder_of("sft")) == 0
    assert "changed: actor.optimizer.lr 0.001 -> 0.0001 (from here on)" in log()
    assert "changed: actor.mb_spec.max_tokens_per_mb null -> 64 (speed and memory change" in log()
    run = RunReader(folder_of("sft"))
    assert run.config["actor"]["optimizer"]["lr"] == 1e-4
    assert run.overrides[-3:] == settings
    rates = run.series("train/lr")
    assert rates.steps == [1, 2, 3, 4, 5, 6, 7]
    assert rates.values[3] == pytest.approx(rates.values[2] / 10 * 4 / 3, rel=1e-4)  # still in the warm-up
    assert sorted(run.checkpoints()) == [3, 4, 6, 7]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "actor.optimizer.lr=1e-4",
            "actor.optimizer.lr: differs from the run in {} .*resume it: --resume {} a",
        ),
        ("seed=2", r"seed: the run in {} cannot be resumed with another value \(seed 1 -> 2\); start a new run"),
        ("train_dataset.batch_size=4", "train_dataset.batch_size: the run in {} cannot be resumed with another value"),
        ("actor.optimizer.type=adam_8bit", "actor.optimizer.type: the run in {} cannot be resumed with another value"),
    ],
)
def test_another_run_of_that_name(setting, message, capsys, stopped_after):
    stopped_after(3)
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert go("sft", *OFTEN, setting) == 2
    assert re.search(message.format(*[folder_of("sft")] * 2), capsys.readouterr().err)
    assert sorted(Path().rglob("*")) == before
    if "cannot" in message:
        assert go("sft", setting, resume=folder_of("sft")) == 2


def test_another_recipe(capsys, stopped_after):
    stopped_after(3)
    assert go("gspo", resume=folder_of("sft")) == 2
    assert "is a run of sft, not of gspo" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["off", "resume"])
def test_modes(how, capsys, stopped_after):
    setting = f"recover.mode={how}"
    code = go("sft", setting)
    if how == "off":
        assert code == 0
        assert not list(Path().glob("outputs/*/t/state"))
        assert go("sft", setting) == 2
        assert "trial_name: " in capsys.readouterr().err
        assert go("sft", resume=folder_of("sft")) == 2
        assert "has no state to resume from: it was started with recover.mode=off, or " in capsys.readouterr().err
    else:
        assert code == 2
        assert "recover.mode: is resume, but" in capsys.readouterr().err
        stopped_after(2)
        assert go("sft", *OFTEN, setting) == 0


def test_names_that_are_no_run(capsys, folder, stopped_after):
    (folder / "other").mkdir()
    for name, message in {
        "nowhere": "there is no folder",
        "other": "is not the folder of a run: it has no config.yaml",
    }.items():
        assert go("sft", resume=name) == 2
        assert f"error: --resume: {message}" in capsys.readouterr().err.replace(f"{folder / name} ", "")
    stopped_after(2)
    capsys.readouterr()
    assert go("sft", resume=folder_of("sft") / "state/step-000002") == 2
    assert f"it has no config.yaml; {folder_of('sft')} is one" in capsys.readouterr().err


def test_a_run_without_a_name_is_new_and_tells_of_the_last_one(capsys, stopped_after):
    stopped_after(2)
    capsys.readouterr()
    assert go("sft", "trial_name=null", "total_train_steps=1") == 0
    told = "outputs/quickstart_base/t is not finished; to resume it: python -m areno.recipes.sft --resume outputs/"
    assert told in capsys.readouterr().out
    assert go("sft", "trial_name=null", "recover.mode=resume") == 2
    assert "trial_name is null, so a new run would begin" in capsys.readouterr().err


# What it was made of -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("change", ["rows", "model"])
def test_another_content_under_the_same_name(change, folder, capsys):
    from areno.files.paths import find_file

    shutil.copytree(find_file("examples/quickstart/model"), "model")
    setting = "actor.path=model"
    with killed_after(3):
        go("sft", *OFTEN, setting)
    shutil.copytree("model", "moved")
    if change == "rows":
        rows = (folder / "rows.jsonl").read_text().splitlines()
        (folder / "rows.jsonl").write_text("\n".join([*rows[1:], rows[0]]))
    else:
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    capsys.readouterr()
    assert go("sft", *OFTEN, setting) == 2
    key = {"rows": "train_dataset", "model": "actor.path"}[change]
    said = capsys.readouterr().err
    assert f"{key}: is not what the run in {folder_of('sft')} began with" in said
    assert "to resume it" not in said
    assert states() == ["step-000002", "step-000003"]
    if change == "model":
        assert go("sft", "actor.path=moved", resume=folder_of("sft")) == 0


# Other ways to start it ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("named", ["trial", "folder"])
def test_a_script_goes_on_as_well(named, folder):
    rows = [{"prompt": f"{a}+9=", "response": str(a + 9)} for a in range(11, 31)]

    def trainer(where, lr=1e-3):
        config = load(SFTConfig, "quickstart_base", [*kill_runs.arguments("sft")[1:], f"actor.optimizer.lr={lr}"])
        config = replace(
            config, cluster=ClusterConfig(fileroot=str(folder / where)), recover=RecoverConfig(freq_steps=1)
        )
        run_dir = None if named == "trial" else folder / where
        return SFTTrainer(config, run_dir=run_dir, train_dataset=rows)

    with trainer("whole") as whole_run:
        expected = whole_run.fit()
    with killed_after(4), trainer("killed") as first:
        first.fit()
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.lr: differs from the run in"):
        trainer("killed", lr=1e-4)
    with trainer("killed") as second:
        assert second.fit() == expected
    whole_dir, killed_dir = whole_run.run.folder, second.run.folder
    assert killed_dir == first.run.folder
    assert kill_runs.differences(kill_runs.left_by(whole_dir), kill_runs.left_by(killed_dir)) == []
    with trainer("killed") as again:
        assert again.evaluate() == {}
        assert again.fit() == expected, "a run that is finished has its result"
        assert again.run.step == 7


def test_an_evaluation_of_a_script_is_of_the_state(folder):
    kill_runs.write_rows("dpo", folder)
    config = load(DPOConfig, "quickstart_dpo", kill_runs.arguments("dpo")[1:])
    with killed_after(4), DPOTrainer(config) as first:
        first.fit()
    with DPOTrainer(config) as second:
        measured = second.evaluate()
    assert measured["accuracy"] == first.run.progress.history["eval_accuracy"][-1]
    assert measured["loss"] == first.run.progress.history["eval_loss"][-1]


@pytest.mark.slow
def test_a_sweep_goes_on(capsys, tmp_path_factory):
    sweep = [*OFTEN, "-m", "actor.optimizer.lr=1e-3,2e-3,3e-3"]

    def is_second(run, stats):
        run.recovery.writer.poll(wait=True)
        return "/1" in str(run.folder)[-2:] and run.step == 4

    with killed_at(Run, "end_step", is_second):
        go("sft", *sweep)
    capsys.readouterr()
    assert go("sft", *sweep) == 0
    said = capsys.readouterr()
    assert "t/0 is finished: its 7 steps are done, with the result" in said.out
    assert said.err.count("going on after step 3; 4 steps are left") == 1
    results = re.findall(r"^  [ *]  (\d)  .*  (\S+)$", said.out, re.M)
    assert sorted(number for number, _ in results) == ["0", "1", "2"]
    folder = folder_of("sft", "t/1")
    assert (
        kill_runs.differences(whole("sft", tmp_path_factory, "actor.optimizer.lr=2e-3"), kill_runs.left_by(folder))
        == []
    )
    assert go("sft", *OFTEN, "-m", "actor.optimizer.lr=1e-3,2e-3") == 2
    assert "holds another sweep (" in capsys.readouterr().err
    assert go("sft", resume=folder.parent) == 2
    assert "holds a sweep: start it again with the same command and its trial_name" in capsys.readouterr().err
    assert go("sft", *sweep) == 0
    assert re.findall(r"^  [ *]  (\d)  .*  (\S+)$", capsys.readouterr().out, re.M) == results


@pytest.mark.slow
def test_a_sweep_without_a_name_goes_on_under_that_of_its_folder(capsys, folder):
    sweep = [*OFTEN, "-m", "trial_name=null", "total_train_steps=2", "actor.optimizer.lr=1e-3,2e-3"]

    def is_second(run, stats):
        run.recovery.writer.poll(wait=True)
        return run.folder.name == "1" and run.step == 2

    with killed_at(Run, "end_step", is_second):
        go("sft", *sweep)
    [name] = [path.name for path in Path("outputs/quickstart_base").iterdir()]
    capsys.readouterr()
    assert go("sft", "trial_name=null", "total_train_steps=1") == 0
    told = f"outputs/quickstart_base/{name} is not finished; to resume it: the same command with trial_name={name}"
    assert told in capsys.readouterr().out
    assert go("sft", *sweep, f"trial_name={name}") == 0
    said = capsys.readouterr()
    assert f"{name}/0 is finished" in said.out
    assert "going on after step 1; 1 steps are left" in said.err


# A lost worker -------------------------------------------------------------------------------------------------------


LOST = [("sft", "train", (1, 5)), ("sft", "train", (4, 5, 9)), ("sft", "save_state", (2,)), ("dpo", "train", (3,))]
LOST += [("dpo", "logprobs", (1,)), ("ppo", "train", (4,)), ("ppo", "values", (2,)), ("gspo", "generate", (1, 2))]
LOST += [("gspo", "advance", (3, 9))]


@pytest.mark.parametrize(
    ("recipe", "name", "calls"),
    [
        ("sft", "train", (5,)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LOST),
    ],
)
def test_a_lost_worker_is_started_again(recipe, name, calls, folder, monkeypatch, tmp_path_factory, capsys):
    kill_runs.write_rows(recipe, folder)
    lost_in(monkeypatch, name, *calls)
    # Which samples share a step of another process follows the clock, and with it the last digits, unless exact.
    exact = ["engine.exact=true"] if recipe == "gspo" else []
    assert go(recipe, *OFTEN, *exact, "engine.workers=spawn") == 0
    dropped = folder_of(recipe) / "logs/dropped.log"  # such as the words of a restart after an older state
    lines = log() + (dropped.read_text() if dropped.exists() else "")
    assert f"({len(calls)} of recover.retries=3)" in log()
    assert lines.count("starting the workers again") == lines.count("was killed by SIGKILL") == len(calls)
    since = re.split("going on after step|it begins again", capsys.readouterr().err)[-1]
    assert "could not be written" not in since, "states of before are forgotten"
    assert kill_runs.differences(whole(recipe, tmp_path_factory, *exact), kill_runs.left_by(folder_of(recipe))) == []


def test_workers_that_are_lost_too_often(monkeypatch, capsys):
    lost_in(monkeypatch, "train", 2, 3)
    assert go("sft", *OFTEN, "engine.workers=spawn", "recover.retries=1") == 1
    said = capsys.readouterr().err
    assert said.count("starting the workers again (1 of recover.retries=1)") == 1
    assert re.search(r"error: worker 0 .* by SIGKILL.* once before, and recover\.retries is 1, so the run ends", said)


def test_workers_that_are_lost_while_they_start_again(monkeypatch, expected):
    raises_at(monkeypatch, Engine, "train", 5)
    raises_at(monkeypatch, engine_module, "start_workers", 2)  # the restart
    assert go("sft", *OFTEN) == 0
    assert "(2 of recover.retries=3)" in log()
    check(expected)


def raises_at(monkeypatch, place, name, number):
    function, calls = getattr(place, name), []

    def raising(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise WorkerLost("worker 0 was lost")
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, raising)
