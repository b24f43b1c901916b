"""Scores of rows that are computed while reward functions still work: the run is the same, and waits less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.trainers.forward_passes import StepScores
from areno.trainers.reward_sources import Scorer
from tests.helpers.policy_runs import Played, other_actor, play
from tests.helpers.reward_functions import slow_length, slow_length_or_none

NAMES = ("train/policy_loss", "train/grad_norm", "rollout/rewards_mean")


def figures(run: Played) -> list[Any]:
    rows = [[(list(row.tokens), row.ref_logprobs, row.values) for row in rows] for rows in run.rows]
    return [*(run.series(name) for name in NAMES), repr(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("reward", [pytest.param(slow_length, marks=pytest.mark.slow), slow_length_or_none])
@pytest.mark.parametrize(
    ("recipe", "settings", "names"),
    [
        ("grpo", ["ref=default", "actor.kl_ctl=0.1", "actor.use_decoupled_loss=true"], {"ref", "proximal"}),
        ("ppo", ["critic.warmup_steps=0"], {"ref", "values"}),
    ],
)
def test_scores_do_not_wait_for_rewards(recipe, settings, names, reward, tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    compute, finish = StepScores._compute, Scorer.finish

    def spied_compute(self: StepScores, name: Any, rows: Any) -> Any:
        order.append(name)
        return compute(self, name, rows)

    def spied_finish(self: Scorer) -> Any:
        order.append("rewards")
        return finish(self)

    monkeypatch.setattr(StepScores, "_compute", spied_compute)
    monkeypatch.setattr(Scorer, "finish", spied_finish)
    if recipe == "grpo":
        settings = [*settings, f"ref.path={other_actor(tmp_path / 'ref')}"]
    settings = [*settings, "reward.workers=1", "total_train_steps=1"]
    early = play(recipe, tmp_path / "early", *settings, reward_fn=reward)
    assert set(order[: order.index("rewards")]) == names
    if reward is slow_length:  # else the rows to train on are others
        assert order[-1] == "rewards"
    monkeypatch.setattr(Scorer, "is_waiting", False)
    late = play(recipe, tmp_path / "late", *settings, reward_fn=reward)
    assert figures(early) == figures(late)
