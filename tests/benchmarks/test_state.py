"""python -m benchmarks state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.helpers.bench_runs import TINY_ROLLOUT
from tests.helpers.tiny_engine import model_folder


@pytest.mark.slow
def test_a_step_with_a_state_is_compared_with_one_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = tmp_path / "states"
    states.mkdir()
    command = (
        f"state --shape {model_folder(tmp_path / 'model', vocab_size=5000)} --folder {states} {TINY_ROLLOUT}".split()
    )
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slowdown"] == pytest.approx(found["state_step_s"] / found["step_s"] - 1)
    assert 12 < found["bytes_per_parameter"] < 14
    assert found["gigabytes"] == pytest.approx(found["written_gb_s"] * found["written_s"])
    assert 0 < found["load_s"] < found["resume_s"]
    assert all(found[name] > 0 for name in ("state_step_s", "resumed_step_s"))
    assert not list(states.iterdir())
