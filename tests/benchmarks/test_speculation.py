"""python -m benchmarks speculation."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main

TINY = "speculation --shape tiny --device cpu --samples 4 --prompt-len 8 --repeats 1"


@pytest.mark.slow
def test_samples_are_the_same_with_and_without_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--new-tokens", "24", "--batches", "3", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: each["rows"] for name, each in found.items()} == {"3 samples": 3, "6 samples": 8}  # whole prompts
    for each in found.values():
        assert each["same"] == 1
        assert each["ratio"] == pytest.approx(each["on"] / each["off"], rel=1e-9)
        assert each["acceptance"] == each["accepted"] / max(1, each["drafted"])
        assert 0 <= each["draft_steps"] <= each["steps"]
        assert each["steps"] > 0


def test_prompts_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model examples/quickstart/model --config quickstart --set gconfig.max_new_tokens=6 --batches 10"
    assert main(["speculation", "--device", "cpu", "--repeats", "1", *options.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["10 samples"]["same"] == 1
