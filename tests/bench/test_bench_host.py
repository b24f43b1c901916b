"""python -m areno.bench host."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from areno.bench import host
from areno.bench.__main__ import main
from areno.engine.decoder.decoder import Decoder
from areno.types import GenerationOutput

TINY = "host --shape tiny --device cpu --repeats 1"


def test_a_step_takes_time_for_each_number_of_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ROWS", (8, 64))
    step, clock = Decoder.step, SimpleNamespace(now=0.0)

    def timed_step(decoder: Decoder) -> list[GenerationOutput]:
        clock.now += 100e-6 + 2e-6 * decoder.stats.running  # a busy machine would time it otherwise
        return step(decoder)

    monkeypatch.setattr(Decoder, "step", timed_step)
    monkeypatch.setattr(host, "time", SimpleNamespace(process_time=lambda: clock.now))
    assert main([*TINY.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [8, 64]
    assert 0 < found["step_us"][0] < found["step_us"][1]
    assert found["step_us"] == pytest.approx([116, 228])
    assert found["us_per_row"] == pytest.approx((found["step_us"][1] - found["step_us"][0]) / 56)


def test_the_page_names_the_growth(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROWS", (8, 16))
    assert main(TINY.split()) == 0
    page = capsys.readouterr().out
    assert "16 rows" in page
    assert "us per row" in page
