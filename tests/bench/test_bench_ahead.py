"""python -m areno.bench ahead."""

from __future__ import annotations

import json

import pytest

from areno.bench.__main__ import main

TINY = (
    "ahead --shape tiny --device cpu --prompts 2 --samples 3 --prompt-len 8 --new-tokens 30 --mean-tokens 9 --ahead 2"
)


def test_both_modes_are_timed_over_the_same_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--repeats", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["waits"]["tokens_per_second"] > 0
    assert found["ratio"] == pytest.approx(
        found["ahead"]["tokens_per_second"] / found["waits"]["tokens_per_second"], rel=1e-9
    )
    assert 0 < found["recomputed"] < 2
    assert found["age"] in (1, 2, 3, 4)
    assert 4 < found["mean_tokens"] < 14


def test_the_page_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--repeats", "1", "--at-once", "3"]) == 0
    said = capsys.readouterr().out
    assert "steps that wait" in said
    assert "2 prompts ahead" in said
    assert "computed again" in said
