"""python -m benchmarks sampling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.helpers.agent_model import TOKENIZER
from tests.helpers.bench_runs import TINY_ROLLOUT
from tests.helpers.tiny_engine import model_folder


def test_every_setting_is_compared_with_plain_sampling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"sampling --shape {model_folder(tmp_path)} --tokenizer {TOKENIZER} {TINY_ROLLOUT}"
    assert main([*command.split(), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["plain"]["relative"] == 1
    assert {"min_new_tokens", "top_p 0.95", "top_k 20", "frequency_penalty 0.5", "stop string"} < out.keys()
    for figures in out.values():
        assert figures["tok_s"] == pytest.approx(2 * 3 * 5 / figures["rollout_s"])
        assert figures["relative"] == pytest.approx(out["plain"]["rollout_s"] / figures["rollout_s"])
