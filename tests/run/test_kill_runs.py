"""Runs that `python -m tests.kill_runs` makes: killed at random moments, inside of saves, twice in a row."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kill_runs import Kill, Run, check, draw, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Else the clock says which samples share a step of another process, and with it the last digits of an evaluation.
EQUAL = "engine.deterministic=true"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """recipe -> what a run leaves that nobody kills, and the seconds it takes."""
    found = {}

    def of(recipe):
        if recipe not in found:
            found[recipe] = reference(Run(recipe, Path(tmp_path_factory.mktemp("whole"), recipe), [EQUAL]))
        return found[recipe]

    return of


@pytest.mark.parametrize(
    ("recipe", "settings", "kills"),
    [
        ("gspo", ["recover.freq_steps=1"], [Kill("driver", "state")]),
        ("gspo", ["recover.freq_steps=3"], [Kill("worker", 0.9)]),
        ("gspo", ["recover.freq_steps=1"], [Kill("group", 0.85), Kill("driver", "checkpoint")]),
        ("ppo", ["recover.freq_steps=1"], [Kill("group", 0.8)]),
        ("ppo", ["recover.freq_steps=1", "recover.retries=0"], [Kill("worker", "state"), Kill("worker", 0.9)]),
        ("dpo", ["recover.freq_epochs=1"], [Kill("driver", 0.9)]),
        ("dpo", ["recover.freq_steps=1", "recover.keep=1"], [Kill("group", "checkpoint")]),
        ("sft", ["recover.freq_steps=1", "recover.retries=0"], [Kill("worker", "state")]),
        ("sft", ["recover.freq_steps=1"], [Kill("driver", 0.1), Kill("driver", "state")]),
        ("sft", ["recover.freq_epochs=1"], [Kill("worker", "checkpoint")]),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(map(str, value)).replace("recover.", ""),
)
def test_a_killed_run_ends_as_if_nobody_had_killed_it(recipe, settings, kills, expected, tmp_path):
    spawned = any(kill.whom == "worker" for kill in kills)
    run = Run(recipe, tmp_path / "run", [EQUAL, *settings, f"engine.workers={'spawn' if spawned else 'inline'}"])
    check(run, kills, *expected(recipe))


def test_runs_with_samples_in_flight_end_as_if_nobody_had_killed_them(expected, tmp_path):
    rng = random.Random(36)
    whole, seconds = expected("grpo")
    parked = [line["rollout/parked_samples"] for line in whole["metrics"] if "rollout/parked_samples" in line]
    assert sum(parked) > 2
    assert max(line.get("rollout/oldest_gap", 0) for line in whole["metrics"]) >= 1
    assert sum(line.get("rollout/dropped_groups", 0) for line in whole["metrics"]) > 0
    n_hit = 0
    for number in range(4):  # python -m tests.kill_runs --recipes grpo --runs 20
        kills = draw(rng)
        spawned = any(kill.whom == "worker" for kill in kills)
        settings = [EQUAL, "recover.freq_steps=1", f"engine.workers={'spawn' if spawned else 'inline'}"]
        said = check(Run("grpo", tmp_path / str(number), settings), kills, whole, seconds)
        n_hit += not said.startswith("hit 0")
    assert n_hit
