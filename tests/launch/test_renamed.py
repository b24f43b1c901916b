"""A setting that has got another name: files, command lines and runs with the earlier name are read as before."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

from areno.api import algorithms
from areno.config.datasets import ValidDatasetConfig, ValidSetConfig
from areno.errors import ConfigError
from areno.launch import command, compose
from areno.recipes.gspo import ALGORITHM, GSPOActorConfig, GSPOConfig
from areno.report.tables import compare_tables
from areno.run.resume import changed_settings
from areno.schema import build
from areno.schema.build import earlier_names, with_current_names
from areno.schema.fields import Section, setting
from areno.tracking.reader import RunReader
from tests.helpers.played import TASK, Main, Played, load, problems_of, task_folder


@dataclass(kw_only=True)
class Sets(ValidSetConfig):
    most: int | None = setting(None, help="most", renamed_from="limit")


@dataclass(kw_only=True)
class Valid(ValidDatasetConfig):
    most: int | None = setting(None, help="most", renamed_from="limit")
    sets: dict[str, Sets] | None = setting(None, help="sets")  # type: ignore[assignment]


@dataclass(kw_only=True)
class Before(GSPOConfig):
    """The configuration of an earlier version."""

    valid_dataset: Valid | None = setting(None, help="data")

    @dataclass(kw_only=True)
    class Actor(GSPOActorConfig):
        warmth: float = setting(1.0, help="warmth")

    @dataclass(kw_only=True)
    class Notes(Section):
        size: int = setting(1, help="size")

    actor: Actor = setting(help="actor")
    notes: Notes = setting(factory=Notes, help="notes")


@dataclass(kw_only=True)
class Now(GSPOConfig):
    """The configuration of today: a setting, a section, and a setting that has moved have other names."""

    @dataclass(kw_only=True)
    class Actor(GSPOActorConfig):
        heat: float = setting(1.0, help="heat", renamed_from=("warmth", "glow"))

    @dataclass(kw_only=True)
    class Remarks(Section):
        text: str = setting("-", help="text")

    valid_dataset: Valid | None = setting(None, help="data")
    actor: Actor = setting(help="actor")
    remarks: Remarks = setting(factory=Remarks, help="remarks", renamed_from="remark")
    n_remarks: int = setting(1, help="number", renamed_from=("notes.size", "n_notes"))


OF_POLICY = {"actor.enable_tree_training": "actor.share_prefixes", "rollout.agent": "agent"}


@pytest.fixture
def work(tmp_path, monkeypatch, caplog):
    build._warn_of_name.cache_clear()
    caplog.set_level(logging.WARNING, "areno.schema")
    return task_folder(tmp_path, monkeypatch)


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "areno.schema"]


def test_earlier_names():
    assert earlier_names(Now) == {
        "valid_dataset.limit": "valid_dataset.most",
        "valid_dataset.sets.*.limit": "valid_dataset.sets.*.most",
        "actor.warmth": "actor.heat",
        "actor.glow": "actor.heat",
        **OF_POLICY,
        "remark": "remarks",
        "notes.size": "n_remarks",
        "n_notes": "n_remarks",
    }
    assert earlier_names(GSPOConfig) == OF_POLICY


def test_a_mapping_gets_the_names_of_today(work, caplog):
    sets = {"a": {"limit": 1}, "b": {"most": 2}, "c": None}
    data = {"actor": {"warmth": 2, "path": "x"}, "valid_dataset": {"sets": sets}, "remark": {"text": "x"}, "seed": 3}
    assert with_current_names(Now, data) == {
        "actor": {"heat": 2, "path": "x"},
        "valid_dataset": {"sets": {"a": {"most": 1}, "b": {"most": 2}, "c": None}},
        "remarks": {"text": "x"},
        "seed": 3,
    }
    assert data["actor"] == {"warmth": 2, "path": "x"}  # not changed itself
    again = {"actor": {"path": "x"}, "notes": 5}
    assert with_current_names(Now, again) is again
    assert with_current_names(Now, {"warmth": 1, "path": "x"}, section="actor") == {"heat": 1, "path": "x"}
    assert with_current_names(Now, {"notes": {"size": 4, "text": "y"}}) == {"notes": {"text": "y"}, "n_remarks": 4}
    assert warnings(caplog)[:2] == [
        "actor.warmth is now called actor.heat; the earlier name is still read",
        "valid_dataset.sets.a.limit is now called valid_dataset.sets.a.most; the earlier name is still read",
    ]


@pytest.mark.slow
def test_files_and_command_lines(work, caplog):
    (work / "my/old.yaml").write_text(TASK.replace("model}", "model, warmth: 2}"))
    assert load(name="old", cls=Now).actor.heat == 2
    assert load(name="old", cls=Now).actor.heat == 2
    assert warnings(caplog) == ["actor.warmth is now called actor.heat; the earlier name is still read"]
    assert load("actor.warmth=3", name="old", cls=Now).actor.heat == 3
    assert load("actor.heat=4", name="old", cls=Now).actor.heat == 4
    assert load("notes.size=5", "+remark.text=x", cls=Now).n_remarks == 5
    assert load("~actor.warmth", name="old", cls=Now).actor.heat == 1
    (work / "my/actor").mkdir()
    (work / "my/actor/glowing.yaml").write_text("path: model\nglow: 6\n")
    assert load("actor=glowing", cls=Now).actor.heat == 6
    (work / "my/variant").mkdir()
    (work / "my/variant/hot.yaml").write_text("# @package _global_\nactor: {glow: 7}\n")
    assert load("variant=hot", cls=Now).actor.heat == 7
    assert len(warnings(caplog)) == 4


def test_both_names_at_once(work):
    message = "is the earlier name of actor.heat, and both are given; leave actor.warmth out"
    for overrides in (["actor.warmth=3", "actor.heat=3"], ["actor.heat=1", "actor.warmth=3"]):
        assert problems_of(*overrides, cls=Now) == [f"actor.warmth: {message}"]
    (work / "my/both.yaml").write_text(TASK.replace("model}", "model, heat: 1, warmth: 2}"))
    assert problems_of(name="both", cls=Now) == [f"actor.warmth: {message}"]
    data = {"experiment_name": "x", "actor": {"path": "m", "heat": 1, "warmth": 2}, "train_dataset": {"path": "r"}}
    with pytest.raises(ConfigError, match=f"^actor.warmth: {message}"):
        build.build(Now, data | {"reward": {"fn": "math"}})
    assert "actor.cold: unknown key" in problems_of("actor.cold=3", cls=Now)[0]


def train(cls, main, *arguments):
    algorithm = Played(name="gspo", config=cls, loop=ALGORITHM.loop, default="small", main=main)
    try:
        return command.run(algorithm, "python -m areno.recipes.gspo", arguments)
    except SystemExit as end:
        return end.code


@pytest.mark.slow
def test_a_run_of_an_earlier_version(work, caplog, monkeypatch, capsys):
    """It goes on with --resume, also with a change; its settings are compared and evaluated under today's names."""
    start = ["--config-dir=my", "--config-name=small", "actor.warmth=2", "actor.adv_norm=null", "trial_name=t"]
    assert train(Before, Main(), *start, "notes.size=3") == 0
    folder = work / "outputs/test/t"
    stored = RunReader(folder).config
    assert (stored["actor"]["warmth"], "heat" in stored["actor"]) == (2, False)

    assert changed_settings(Now, stored, {**stored, "actor": {**stored["actor"], "warmth": 3.0}})[0].key == "actor.heat"
    monkeypatch.setattr(algorithms, "algorithm_entry_points", dict)
    monkeypatch.setitem(
        algorithms.registered,
        "gspo",
        Played(name="gspo", config=Now, loop=ALGORITHM.loop, default="small", main=Main()),
    )
    config = compose.load(Now, "config", ["engine.device=cpu"], folder)  # as `areno evaluate` and `areno replay` do
    assert (config.actor.heat, config.n_remarks) == (2, 3)

    main = Main()
    assert train(Now, main, "--resume", str(folder)) == 0
    assert train(Now, main, "--resume", str(folder), "actor.glow=4") == 0
    assert [config.actor.heat for config, _ in main.calls] == [2, 4]
    assert RunReader(folder).config["actor"]["heat"] == 4
    assert "actor.warmth is now called actor.heat; the earlier name is still read" in warnings(caplog)

    assert train(Before, Main(), *start[:-1], "trial_name=u") == 0
    [settings, *_] = compare_tables([folder, work / "outputs/test/u"])
    keys = {*settings.columns[0].cells}
    assert "actor.heat" in keys
    assert not keys & {"actor.warmth", "notes.size"}
