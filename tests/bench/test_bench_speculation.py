"""python -m areno.bench speculation."""

from __future__ import annotations

import json

import pytest

from areno.bench.__main__ import main

TINY = "speculation --shape tiny --device cpu --samples 4 --prompt-len 8 --repeats 1"


@pytest.mark.slow
def test_samples_are_the_same_with_and_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--new-tokens", "24", "--batches", "3", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["batches"]
    assert [each["rows"] for each in found] == [3, 8]  # whole prompts of 4 samples
    for each in found:
        assert each["same"] == 1
        assert each["ratio"] == pytest.approx(each["on"] / each["off"], rel=1e-9)
        assert each["acceptance"] == each["accepted"] / max(1, each["drafted"])
        assert 0 <= each["draft_steps"] <= each["steps"]
        assert each["steps"] > 0


@pytest.mark.slow
def test_conversations_share_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt of a second turn contains the first answer."""
    assert main([*TINY.split(), "--new-tokens", "12", "--batches", "2", "--turns", "2"]) == 0
    said = capsys.readouterr().out
    assert "steps with drafts" in said
    assert "equal with and without drafts: 100.0 %" in said


def test_prompts_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model examples/quickstart/model --config quickstart --set gconfig.max_new_tokens=6 --batches 10"
    assert main(["speculation", "--device", "cpu", "--repeats", "1", *options.split(), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["batches"]
    assert found["same"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "gconfig.n_samples=2"], "--set: changes settings of --config, which is missing"),
        (["--new-tokens", "4000", "--batches", "2", "--turns", "9"], "--turns: makes conversations of"),
        (["--seeds", "2"], "--seeds: is for trl"),
        (["--prompts", "2"], "--prompts: is for other works"),
        (["--uniform", "2", "5"], "--uniform: is for other works"),
        (["--config", "quickstart"], "--samples: does not go with --config"),
    ],
)
def test_wrong_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--batches", "4"], ["--turns", "3"]])
def test_other_works_have_no_batches_and_turns(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "--shape", "tiny", "--device", "cpu", *options]) == 2
    assert f"{options[0]}: is for speculation, not for rollout" in capsys.readouterr().err
