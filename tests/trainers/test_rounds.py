"""Rounds of dynamic sampling that overlap: they draw the samples of rounds that wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.engine.engine import Engine
from areno.errors import ArenoError
from areno.trainers import dynamic_sampling, rollout
from tests.helpers.policy_runs import Played, play
from tests.helpers.reward_functions import odd_length

LONG = [
    "gconfig.max_new_tokens=60",
    "gconfig.temperature=3.0",
    "gconfig.n_samples=2",
    "rollout.dynamic_sampling=true",
    "engine.exact=true",
    "reward.workers=1",
]


def rows_of(run: Played) -> list[list[tuple[list[int], list[float], float]]]:
    return [
        [(np.asarray(row.tokens).tolist(), np.asarray(row.logprobs).tolist(), row.reward) for row in rows]
        for rows in run.rows
    ]


@pytest.mark.slow
def test_rounds_that_overlap_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_early, open_now = [], [0]
    submit, received = Engine.submit, Engine._with_callers_ids

    def spied_submit(self: Engine, requests: Any) -> None:
        requests = list(requests)
        begun_early.append(open_now[0] > 0)
        open_now[0] += sum(request.n_samples for request in requests)
        submit(self, requests)

    def spied_received(self: Engine, by_rank: Any) -> Any:
        outputs = received(self, by_rank)
        open_now[0] -= len(outputs)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(dynamic_sampling, "DECISION_STEPS", 2)  # the answers are short
        patch.setattr(Engine, "submit", spied_submit)
        patch.setattr(Engine, "_with_callers_ids", spied_received)
        together = play("grpo", tmp_path / "together", *LONG, reward_fn=odd_length)
    assert any(begun_early)
    monkeypatch.setattr(rollout, "can_overlap", lambda setup: False)
    apart = play("grpo", tmp_path / "apart", *LONG, reward_fn=odd_length)
    assert max(apart.series("rollout/sampling_rounds")) > 1
    assert rows_of(together) == rows_of(apart)
    for name in ("rollout/sampling_rounds", "rollout/dropped_groups", "rollout/rewards_mean", "train/policy_loss"):
        assert together.series(name) == apart.series(name)


@pytest.mark.slow
def test_prompts_that_need_a_larger_cache_wait(tmp_path: Path) -> None:
    """The second round has prompts that do not fit the cache of the first."""
    rows = [{"prompt": "1+2=" if k < 4 else "+".join(["12"] * 40) + "=", "solutions": ["3"]} for k in range(8)]
    settings = [*LONG, "train_dataset.shuffle=false", "train_dataset.max_length=200"]
    settings += ["total_train_steps=1"]
    run = play("grpo", tmp_path / "run", *settings, reward_fn=odd_length, train_dataset=rows)
    assert run.series("rollout/sampling_rounds")[0] > 1
    lengths = {sample["prompt_tokens"] for sample in run.samples(1)}
    assert max(lengths) + 60 > 128 > min(lengths) + 60


@pytest.mark.slow
def test_rewards_that_fail_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ArenoError, match="no reward could be computed for any"):
        play("grpo", tmp_path / "run", *LONG, reward_fn=lambda record: None)
