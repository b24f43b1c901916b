"""python -m benchmarks driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.helpers.agent_model import TOKENIZER
from tests.helpers.bench_runs import TINY_ROLLOUT
from tests.helpers.tiny_engine import model_folder


@pytest.mark.slow
def test_steps_on_played_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        f"driver --shape {model_folder(tmp_path, vocab_size=5000)} --tokenizer {TOKENIZER} {TINY_ROLLOUT} --copies 1 2"
    )
    # One step beside the first, so that no figure is a median of different steps.
    assert main([*command.split(), "--new-tokens", "30", "--repeats", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["1 copies, 6 samples", "2 copies, 12 samples"]
    for times in found.values():
        phases = [value for name, value in times.items() if name.startswith("time/") and name != "time/step"]
        assert 0.5 * times["time/step"] < sum(phases) <= 1.01 * times["time/step"]  # a busy machine takes the rest
        assert times["time/rollout"] > 30 * 0.0037
        inside = times["time/rollout"] + times["time/train"]
        assert times["outside"] == pytest.approx(times["time/step"] - inside, abs=1e-6)
        assert 0 < times["cpu"] < times["time/step"]
        assert 0 < times["idle"] < times["time/step"]
