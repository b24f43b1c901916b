"""The comparison of a forecast with the scalars that a run has recorded."""

from __future__ import annotations

from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import hardware_of
from areno.plan.phases import compare_with_recorded, measured_lengths


def config(recipe: str, *settings: str) -> Any:
    task = "quickstart" if recipe in ("grpo", "ppo") else f"quickstart_{recipe}"
    return load(get_algorithm(recipe).config, task, settings)


def test_the_lengths_are_the_means_of_the_recorded_ones():
    policy = config("grpo")
    metrics = {"rollout/seq_len_mean": [30.0, 50.0], "rollout/response_len_mean": [10.0, 12.0]}
    assert measured_lengths(policy, metrics) == (29, 11)
    assert measured_lengths(policy, {}) is None

    dpo = config("dpo")
    n_rows = 2 * dpo.train_dataset.batch_size
    metrics = {"train/tokens_per_second": [100.0 * n_rows, 200.0 * n_rows], "time/train": [0.5, 0.15]}
    assert measured_lengths(dpo, metrics) == (20, 20)  # rows of 50 and of 30 tokens
    assert measured_lengths(dpo, {}) is None


def test_each_phase_is_compared_with_its_own_scalars():
    """The median of the seconds, and the largest peak. A phase that was not recorded is left out."""
    settings = ["ref=default", "actor.kl_ctl=0.1", "actor.path=Qwen/Qwen3-0.6B"]
    found = forecast(config("ppo", *settings), hardware_of("h100-80gb"), 1, 256, 256)
    clocks = ["rollout", "ref", "values", "train_critic", "train"]
    assert [phase.clock for phase in found.phases] == clocks
    metrics = {"time/step": [9.0, 6.0, 7.0]}
    for number, clock in enumerate(clocks, 1):
        metrics |= {f"time/{clock}": [9.0 * number, 1.0 * number, 2.0 * number]}
        metrics |= {f"memory/{clock}": [10.0 + number, 20.0 + number, 3.0]}
    del metrics["memory/ref"]
    compared = compare_with_recorded(found.phases, metrics)
    assert [(each.name, each.seconds[1], each.gib[1]) for each in compared] == [
        ("rollout", 2.0, 21.0),
        ("score critic", 6.0, 23.0),
        ("train critic", 8.0, 24.0),
        ("train actor", 10.0, 25.0),
        ("step", 7.0, 25.0),
    ]
    rollout, step = found.phases[0], compared[-1]
    assert compared[0].seconds[0] == rollout.seconds
    assert compared[0].gib[0] == rollout.peak_memory_bytes / 2**30
    assert step.seconds[0] == pytest.approx(sum(p.seconds for p in found.phases if p.clock != "ref"))
    assert step.gib[0] == pytest.approx(max(p.peak_memory_bytes for p in found.phases if p.clock != "ref") / 2**30)
    assert compare_with_recorded(found.phases, {}) == compare_with_recorded(found.phases, {"time/step": [1.0]}) == []
