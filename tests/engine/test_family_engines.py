"""Engines with models of several families: ranks, exact log-probabilities, and the optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.engine.engine import Engine
from tests.helpers.family_cases import random_model
from tests.helpers.family_engines import step
from tests.helpers.tiny_engine import spec


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
        ("gpt-oss-experts", {"tp_size": 2}),
        ("gpt-oss-experts", {"cp_size": 2}),
        ("gpt-oss-tied-experts", {"zero_stage": 2}),
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
