"""Engines with models of several families: ranks, exact log-probabilities, and the optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.engine.spec import UpdateSpec
from areno.loss_fns.gspo import gspo_loss_fn
from tests.helpers.family_cases import random_model
from tests.helpers.tiny_engine import request, rollout, scored, spec, train_rows

REQUESTS = [request(0, n_samples=3, length=20), request(1, length=40), request(2, n_samples=2)]


def step(engine: Engine) -> tuple[list[list[int]], list[list[float]], list[list[float]], dict[str, float]]:
    """Rows, their log-probabilities in rollout and in training, and what an update says of itself."""
    rows = train_rows(rollout(engine, REQUESTS), REQUESTS)
    tokens = [list(row.tokens) for row in rows]
    sampled = [list(row.logprobs)[list(row.prompt_mask).index(False) :] for row in rows]
    trained = [line[-len(new) :] for line, new in zip(scored(engine, "actor", tokens), sampled, strict=True)]
    stats = engine.train(rows, gspo_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=90)))
    return tokens, sampled, trained, stats


def compare(folder: Path, **layout: Any) -> None:
    with Engine(spec(folder, random_init=False), "inline") as one:
        expected = step(one)
    with Engine(spec(folder, 2, random_init=False, **layout)) as several:
        found = step(several)
    assert found[0] == expected[0]
    for ours, wanted in zip((*found[1], *found[2]), (*expected[1], *expected[1]), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)
    for name in ("loss", "grad_norm"):
        assert found[3][name] == pytest.approx(expected[3][name], rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("gemma3", {"tp_size": 2}),
        ("olmo3", {"tp_size": 2}),
        ("qwen3.5", {"tp_size": 2}),
        ("qwen3.5-tied", {"zero_stage": 2}),
        ("gemma3", {"cp_size": 2}),
    ],
)
def test_two_ranks_are_one(case: str, layout: dict[str, Any], tmp_path: Path) -> None:
    random_model(case, tmp_path)
    compare(tmp_path, **layout)


@pytest.mark.parametrize("case", ["gemma3", "olmo3", "glm4", "mistral-window"])
def test_exact_log_probabilities(case: str, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    with Engine(spec(tmp_path, random_init=False, exact=True), "inline") as engine:
        _, sampled, trained, _ = step(engine)
    assert sampled == trained
