"""Training of families whose experts have more than matrices: all that is trained moves, and states go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areno.engine.engine import Engine
from areno.loss_fns.grpo import grpo_loss_fn
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import REQUESTS, ROWS, apart, engine_of
from tests.helpers.tiny_engine import rollout, saved_tensors, scored, train_rows

NEVER_TRAINED = "mlp.gate.e_score_correction_bias"  # of GLM; gpt-oss trains its biases and sinks


def rows_with_routes(engine: Engine) -> list[Any]:
    outputs = rollout(engine, REQUESTS)
    rows = train_rows(outputs, REQUESTS)
    samples = [sample for item in REQUESTS for sample in outputs[item.request_id]]
    return [replace(row, routes=sample.routes) for row, sample in zip(rows, samples, strict=True)]


@pytest.mark.parametrize(("case", "least_entropy"), [("glm4-experts", 0.5), ("gpt-oss-experts", 0.3)])
def test_training_moves_what_it_should_and_goes_on_from_a_state(
    case: str, least_entropy: float, tmp_path: Path
) -> None:
    """With and without the experts of the rollout, it agrees with the rollout."""
    random_model(case, tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    with engine_of(tmp_path, None, routing_replay=True) as engine:
        for _ in range(2):
            stats = engine.train(rows_with_routes(engine), grpo_loss_fn)
            assert stats["logp_abs_diff_max"] < 1e-4
            assert stats["router_changed"] == 0.0
            assert least_entropy < stats["router_entropy"] < 1.0
        assert engine.train(train_rows(rollout(engine, REQUESTS), REQUESTS), grpo_loss_fn)["logp_abs_diff_max"] < 1e-4
        expected = scored(engine, "actor", ROWS)
        engine.save(str(tmp_path / "saved"))
        engine.save_state(tmp_path / "state")
        assert engine.is_state_written(wait=True)
    after = saved_tensors(tmp_path / "saved")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == name.endswith(NEVER_TRAINED), name
    with engine_of(tmp_path, None) as other:
        other.load_state(tmp_path / "state")
        assert scored(other, "actor", ROWS) == expected


@pytest.mark.parametrize("case", ["glm4-tied-experts", "gpt-oss-experts", "gpt-oss-tied-experts"])
def test_exact(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    with engine_of(tmp_path, None, exact=True) as engine:
        for _ in range(2):
            rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
            assert engine.train(rows, grpo_loss_fn)["logp_abs_diff_max"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["glm4-experts", "gpt-oss-experts"])
def test_a_state_of_two_ranks_goes_on_with_one(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    found = []
    with engine_of(tmp_path, None) as one:
        rows = train_rows(rollout(one, REQUESTS), REQUESTS)
    for settings in ({"devices": 2, "tp_size": 2}, {}):
        with engine_of(tmp_path, None, **settings) as engine:
            engine.train(rows, grpo_loss_fn)
            if settings:
                engine.save_state(tmp_path / "state")
                assert engine.is_state_written(wait=True)
            found.append(scored(engine, "actor", ROWS))
    assert apart(*found) < 1e-3
    with engine_of(tmp_path, None) as again:
        again.load_state(tmp_path / "state")
        assert apart(scored(again, "actor", ROWS), found[0]) < 1e-4
