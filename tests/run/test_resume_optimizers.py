"""A run with an optimizer other than AdamW goes on from a state to the bit, on one rank and where ranks divide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kill_runs
from tests.helpers.resumed import folder_of, go, log, stopped_sft, whole

DIVIDED = ("engine.world_size=2", "engine.zero_stage=2", "engine.deterministic=true")


@pytest.mark.parametrize(
    "kind", ["muon", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adam_bf16", "sgd"))]
)
@pytest.mark.parametrize("layout", [(), pytest.param(DIVIDED, marks=pytest.mark.slow)], ids=["one", "divided"])
def test_a_stopped_run_is_the_run_that_would_have_been(
    kind: str,
    layout: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Weights, states of the optimizer and metrics: all files that the two runs leave have the same bytes."""
    monkeypatch.chdir(tmp_path)
    settings = (f"actor.optimizer.type={kind}", "actor.optimizer.weight_decay=0.1", *layout)
    stopped_sft(3, tmp_path_factory, *settings)
    assert go("sft", "recover.freq_steps=1", *settings) == 0
    assert "going on after step 3; 4 steps are left" in log()
    expected = whole("sft", tmp_path_factory, *settings)
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of("sft"))) == []
