"""What a report of problems says: every cause once, and all of them at the same time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from areno.api import Algorithm, get_algorithm
from areno.errors import CheckpointError, ConfigError, DataError, all_of
from areno.launch import command
from areno.launch.compose import load
from areno.recipes.gspo import ALGORITHM, GSPOConfig


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems(*overrides: str, name: str = "quickstart", config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(GSPOConfig, name, list(overrides), config_dir)
    return [str(problem) for problem in caught.value.problems]


def test_an_interpolation_that_fails_is_one_problem() -> None:
    assert problems("actor.path=${nowhere.x}") == ["actor.path: Interpolation key 'nowhere.x' not found"]
    assert problems("gconfig.n_samples=${nowhere}", "actor.ppo_n_minibatches=3") == [
        "gconfig.n_samples: Interpolation key 'nowhere' not found"
    ]
    found = problems("seed=${oc.env:NOT_SET}", "reward.fn=${reward.path}", "reward.path=${reward.fn}")
    assert [text.split(":")[0] for text in found] == ["seed", "reward.fn", "reward.path"]


def test_what_follows_from_a_missing_value_is_not_a_problem_of_its_own(tmp_path: Path) -> None:
    text = "defaults: [recipe, _self_]\nexperiment_name: e\nreward: {fn: math}\ntrain_dataset: {path: rows.jsonl}\n"
    (tmp_path / "open.yaml").write_text(text + "actor:\n  path: ???\ntokenizer_path: ${actor.path}\n")
    missing = ["actor.path: missing (Hugging Face model folder or hub id)"]
    assert problems(name="open", config_dir=tmp_path) == missing


def test_a_task_for_another_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(get_algorithm("sft"), "sft", ["--config-name=gsm8k"]) == 2
    first, second, *_ = capsys.readouterr().err.split("\n  ")[1:]
    assert first == "--config-name: gsm8k is for grpo, gspo, ppo and online_dpo, not for sft"
    assert second == "eval_gconfig: unknown key; it is a setting of distill, grpo, gspo, online_dpo and ppo"
    assert command.run(get_algorithm("gspo"), "gspo", ["--config-name=chat"]) == 2
    assert "--config-name: chat is for sft, not for gspo\n" in capsys.readouterr().err
    assert command.run(get_algorithm("gspo"), "gspo", ["sed=1"]) == 2
    assert "--config-name" not in capsys.readouterr().err
    assert command.run(get_algorithm("gspo"), "gspo", ["--help"]) == 0
    assert re.search(r"\n  chat +\[sft\] Supervised", capsys.readouterr().out)


def test_empty_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--config-name", "--config-dir"):
        assert command.run(get_algorithm("gspo"), "gspo", [f"{option}="]) == 2
        assert capsys.readouterr().err == f"error: {option}: is empty; a name is expected\n"


@dataclass(frozen=True, kw_only=True)
class Exits(Algorithm):
    """GSPO's configuration, and a loop that ends the process, as a loss of one's own could."""

    def run(self, config: GSPOConfig, run_dir: Path) -> float:
        raise SystemExit(0)


def test_a_run_that_calls_exit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.run(Exits(name="exits", config=GSPOConfig, loop=ALGORITHM.loop), "exits", [])
    assert caught.value.code == 1
    assert re.fullmatch(r"error: the run was ended by SystemExit: 0 \(test_reports.py:\d+\)\n", capsys.readouterr().err)
    assert not Path("outputs").exists()


def test_several_steps_fail_together() -> None:
    def fails(error: Exception) -> object:
        raise error

    assert all_of(lambda: 1, lambda: 2) == [1, 2]
    one = DataError("a")
    with pytest.raises(DataError) as caught:
        all_of(lambda: 1, lambda: fails(one))
    assert caught.value is one
    with pytest.raises(CheckpointError, match=r"2 problems.*\n  a\n  b"):
        all_of(lambda: fails(CheckpointError("a")), lambda: fails(CheckpointError("b")))
    with pytest.raises(ConfigError, match=r"2 problems.*\n  a\n  b"):
        all_of(lambda: fails(one), lambda: fails(CheckpointError("b")))
