"""docs/plots.py draws what a run wrote."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from areno.api.metrics import MetricsRecorder

SCRIPT = Path(__file__).parents[1] / "docs/plots.py"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def draw(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_image_of_two_seeds(tmp_path):
    for seed in (1, 2):
        with MetricsRecorder(None, tmp_path / f"s{seed}/logs/metrics.jsonl") as recorder:
            for step in range(1, 6):
                recorder.record(step, {"rollout/rewards_mean": step * seed / 10})
                recorder.record(step, {"train/loss": -1.0})
    image = tmp_path / "images/reward.png"
    done = draw(image, "Two seeds", f"reward={tmp_path}/s*", f"loss={tmp_path}/s1@train/loss")
    assert done.returncode == 0, done.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    assert 2_000 < image.stat().st_size < 60_000


def test_run_that_is_not_there(tmp_path):
    done = draw(tmp_path / "x.png", "None", f"reward={tmp_path}/nothing")
    assert done.returncode == 2
    assert "there is no run" in done.stderr
