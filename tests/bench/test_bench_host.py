"""python -m areno.bench host."""

from __future__ import annotations

import json

import pytest

from areno.bench import host
from areno.bench.__main__ import main

TINY = "host --shape tiny --device cpu --repeats 1"


def test_a_step_takes_time_for_each_number_of_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ROWS", (8, 64))
    assert main([*TINY.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [8, 64]
    assert min(found["step_us"]) > 0  # which of them is longer, a busy machine decides
    assert found["us_per_row"] == pytest.approx((found["step_us"][1] - found["step_us"][0]) / 56)


def test_the_page_names_the_growth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROWS", (8, 16))
    assert main(TINY.split()) == 0
    page = capsys.readouterr().out
    assert "16 rows" in page
    assert "us per row" in page
