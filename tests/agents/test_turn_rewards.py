"""Training with a reward and an advantage for each turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areno.errors import ArenoError
from tests.helpers.agent_runs import AGENTS, run


def rewarded(folder: Path, rewards: str) -> Path:
    file = folder / "rewarded.py"
    file.write_text(
        f"import runpy\nwork = runpy.run_path({str(AGENTS / 'compacting.py')!r})['run_agent']\n"
        f"async def run_agent(ctx, batch):\n    await work(ctx, batch)\n    return {rewards}\n"
    )
    return file


@pytest.mark.slow
def test_turns_have_their_own_credit(tmp_path: Path) -> None:
    """Two turns, twice a summary with two turns after it, and a sub-agent's two, which are parts of the last."""
    agent = f"agent.fn={rewarded(tmp_path, '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]')}"
    settings = [
        "agent.turn_credit=return",
        "agent.turn_discount=0.5",
        "actor.adv_norm=null",
        "reward.fn=null",
        "reward.workers=null",
    ]
    settings += ["total_train_steps=1", "gconfig.max_tokens=1000"]
    played = run(tmp_path, "compacting.py", agent, *settings, recipe="grpo")
    trees = set()  # a summary that is too short to be recognised makes the turns after it those of a sub-agent
    for row in played.rows[0]:
        trained = ~np.asarray(row.prompt_mask)
        assert row.turns is not None
        assert row.turn_rewards is not None
        rewards = row.turn_rewards.tolist()
        returns = [sum(0.5 ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
        expected = np.array(returns)[row.turns[trained]]
        np.testing.assert_allclose(np.asarray(row.advantages)[trained], expected, rtol=1e-12)
        trees.add(tuple(rewards))
    assert {sum(rewards) for rewards in trees} == {45.0}
    assert (0, 1, 2, 3, 4, 5, 6, 7 + 8 + 9) in trees


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[1.0]", "it has 1 turn_rewards for 10 turns"),
        ("[float('nan')] * 10", "the reward of turn 0: nan; a reward is"),
    ],
)
def test_wrong_rewards_of_turns_fail_their_sample(tmp_path: Path, rewards: str, message: str) -> None:
    agent = f"agent.fn={rewarded(tmp_path, rewards)}"
    with pytest.raises(ArenoError, match=message):
        run(
            tmp_path,
            "compacting.py",
            agent,
            "reward.fn=null",
            "reward.workers=null",
            "total_train_steps=1",
            "gconfig.max_tokens=1000",
        )


@pytest.mark.slow
def test_a_critic_has_a_target_for_each_turn(tmp_path: Path) -> None:
    settings = ["critic.warmup_steps=0", "ref=null", "actor.kl_ctl=0", "agent.turn_credit=gae", "total_train_steps=1"]
    played = run(tmp_path, "two_turns.py", *settings, recipe="ppo", task="quickstart_ppo")
    for row in played.critic_rows[0]:
        trained = ~np.asarray(row.prompt_mask)
        for turn in (0, 1):
            assert len(set(np.asarray(row.returns)[trained & (row.turns == turn)])) == 1
