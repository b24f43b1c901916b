"""Samples to training rows."""

from __future__ import annotations

import numpy as np
import pytest

from areno.api.rows import policy_rows, replace_logprobs, sample_advantages
from areno.api.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample
from areno.config.model_roles import NormConfig
from areno.engine.types import TrainSequence


def sample(item: PromptItem, reward: float | None, tokens: list[int]) -> ScoredSample:
    status = "timeout" if reward is None else "ok"
    return ScoredSample(
        item=item,
        sequence=RolloutSequence(resp_tokens=tokens, resp_logprobs=[-0.5 * t for t in tokens]),
        completion="",
        outcome=RewardOutcome(reward, status),  # type: ignore[arg-type]
    )


def test_groups_are_the_samples_of_a_prompt_even_of_a_row_drawn_twice() -> None:
    one, same_row = (PromptItem(prompt="a", text="a", tokens=[1, 2], index=7) for _ in range(2))
    samples = [sample(one, 0.0, [3]), sample(one, 1.0, [4]), sample(same_row, 1.0, [5]), sample(same_row, 1.0, [6])]
    np.testing.assert_allclose(sample_advantages(samples, NormConfig()), [-1, 1, 0, 0], atol=1e-5)


def test_a_sample_without_a_reward_is_left_out() -> None:
    item = PromptItem(prompt="a", text="a", tokens=[1, 2])
    samples = [sample(item, 1.0, [3]), sample(item, None, [4, 4]), sample(item, 0.0, [5, 6])]
    advantages = sample_advantages(samples, NormConfig())
    np.testing.assert_allclose(advantages, [1, 0, -1], atol=1e-5)
    rows = policy_rows(samples, advantages, eos_token_id=9)
    assert [row.tokens for row in rows] == [[1, 2, 3], [1, 2, 5, 6]]
    assert rows[1].prompt_mask == [True, True, False, False]
    assert rows[1].logprobs == [0.0, 0.0, -2.5, -3.0]
    assert rows[1].advantages == pytest.approx([0.0, 0.0, -1.0, -1.0], abs=1e-5)
    assert rows[0].reward == 1.0


def test_replaced_logprobs_keep_the_prompt_at_zero_and_tell_the_difference() -> None:
    row = TrainSequence(tokens=[1, 2, 3], prompt_mask=[True, False, False], logprobs=[0.0, -1.0, -2.0])
    told = replace_logprobs([row], [[0.0, -1.5, -1.75]])
    assert row.logprobs == [0.0, -1.5, -1.75]
    assert told == pytest.approx({"logp_diff_mean": 0.125, "logp_abs_diff_mean": 0.375, "logp_abs_diff_max": 0.5})
    row = TrainSequence(tokens=[1, 2], prompt_mask=[True, False], logprobs=[0.0, -1.0])
    replace_logprobs([row], [[-9.0, -1.0]])
    assert row.logprobs == [0.0, -1.0]
