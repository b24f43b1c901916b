"""Samples to training rows: rewards, advantages with and without a critic, and the proximal policy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from areno.config.norms import NormConfig
from areno.config.ratio import RejectionSamplingConfig
from areno.errors import ConfigError, DataError
from areno.recipes.grpo import GRPOActorConfig
from areno.recipes.ppo import PPOActorConfig
from areno.trainers.dynamic_sampling import first_groups, has_signal, n_groups
from areno.trainers.off_policy_correction import correct_rows
from areno.trainers.rows import (
    critic_advantages,
    outcome_advantages,
    policy_rows,
    sample_rewards,
    set_trained,
    token_rewards,
    trained,
)
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TrainSequence


def sample(
    item: PromptItem, reward: float | None, tokens: list[int], finish: str = "stop", group: int = 0
) -> ScoredSample:
    status = "timeout" if reward is None else "ok"
    return ScoredSample(
        item=item,
        sequence=RolloutSequence(resp_tokens=tokens, resp_logprobs=[-0.5 * t for t in tokens], finish_reason=finish),  # type: ignore[arg-type]
        completion="",
        outcome=RewardOutcome(reward, status),  # type: ignore[arg-type]
        group=group,
    )


def prompt() -> PromptItem:
    return PromptItem(prompt="a", text="a", tokens=[1, 2], index=7)


def actor(**settings) -> GRPOActorConfig:
    return GRPOActorConfig(path="model", **settings)


def row(logprobs: list[float], reward: float = 0.0, mask: list[bool] | None = None, **fields) -> TrainSequence:
    mask = [i == 0 for i in range(len(logprobs))] if mask is None else mask
    return TrainSequence(tokens=[1] * len(logprobs), prompt_mask=mask, logprobs=logprobs, reward=reward, **fields)


def test_groups_have_a_number_also_those_of_a_prompt_that_is_sampled_twice() -> None:
    drawn = prompt()
    samples = [sample(drawn, 0.0, [3]), sample(drawn, 1.0, [4])]
    samples += [sample(drawn, 1.0, [5], group=1), sample(drawn, 1.0, [6], group=1)]
    rows = policy_rows(samples, sample_rewards(samples, actor(), 8), eos_token_id=9)
    advantages = outcome_advantages(rows, [sample.group for sample in samples], actor())
    np.testing.assert_allclose(np.concatenate(advantages), [-1, 1, 0, 0], atol=1e-5)


def test_rows_hold_prompt_and_response_aligned() -> None:
    samples = [sample(prompt(), 1.0, [5, 6])]
    [made] = policy_rows(samples, [0.25], eos_token_id=9)
    np.testing.assert_array_equal(made.tokens, [1, 2, 5, 6])
    np.testing.assert_array_equal(made.prompt_mask, [True, True, False, False])
    np.testing.assert_array_equal(made.logprobs, [0.0, 0.0, -2.5, -3.0])
    assert made.reward == 0.25
    set_trained([made], "advantages", [np.array([2.0, 3.0])])
    np.testing.assert_array_equal(made.advantages, [0.0, 0.0, 2.0, 3.0])
    np.testing.assert_array_equal(trained([made], "logprobs")[0], [-2.5, -3.0])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "advantages: a NoneType for 1 rows"),
        ([], "advantages: 0 arrays for 1 rows; a list with an array for each row"),
        ([[1.0]], r"advantages of row 0 have shape \(1,\); one number for each of its 2 trained tokens"),
        ([1.0], r"advantages of row 0 have shape \(\)"),
    ],
)
def test_as_many_values_as_trained_tokens(arrays, message):
    """One number for a whole row, too, would be taken for each of its tokens without a word."""
    row = TrainSequence(tokens=[1, 2, 3], prompt_mask=[True, False, False])
    with pytest.raises(DataError, match=message):
        set_trained([row], "advantages", arrays)


def test_truncated_samples_are_left_out_of_training_but_not_of_the_group() -> None:
    item = prompt()
    samples = [sample(item, 1.0, [3, 4]), sample(item, 0.0, [5, 6], finish="length")]
    rows = policy_rows(samples, [1.0, 0.0], eos_token_id=9, drop_truncated=True)
    assert list(rows[1].prompt_mask) == [True] * 4
    kept, dropped = outcome_advantages(rows, [0, 0], actor())
    np.testing.assert_allclose(kept, [1, 1], atol=1e-5)  # without the other it would be 0
    assert dropped.size == 0


def test_dynamic_sampling_keeps_groups_whose_rewards_differ() -> None:
    rewards = [(0.0, 1.0), (1.0, 1.0), (None, 1.0), (None, 1.0, 2.0)]
    samples = [sample(prompt(), r, [3], group=group) for group, of_group in enumerate(rewards) for r in of_group]
    signal = has_signal(samples)
    assert {s.group for s, kept in zip(samples, signal, strict=True) if kept} == {0, 3}
    assert (n_groups(samples), n_groups(samples, signal)) == (4, 2)
    np.testing.assert_array_equal(np.flatnonzero(first_groups(samples, signal, 1)), [0, 1])


def test_rewards_are_shaped_in_the_order_of_the_settings() -> None:
    """Overlong penalty, then (r + bias) * scaling, then the clip, then the norm."""
    item = prompt()
    samples = [sample(item, 1.0, [3] * 10), sample(item, 1.0, [3] * 4), sample(item, 9.0, [3] * 4)]
    settings = {
        "overlong_reward_penalty": True,
        "overlong_tokens": 4,
        "overlong_penalty_factor": 2.0,
        "reward_bias": 1.0,
        "reward_scaling": 0.5,
        "reward_clip": 3.0,
    }
    # 10 tokens of at most 10: the whole penalty of 2; 4 tokens are 6 below the limit: none.
    expected = [(1.0 - 2.0 + 1.0) * 0.5, (1.0 + 1.0) * 0.5, 3.0]
    np.testing.assert_allclose(sample_rewards(samples, actor(**settings), 10), expected)
    norm = NormConfig(mean_level="batch", std_level=None)
    normed = sample_rewards(samples, actor(**settings, reward_norm=norm), 10)
    np.testing.assert_allclose(normed, np.array(expected) - np.mean(expected))


def test_settings_that_make_a_reward_too_large_are_named() -> None:
    samples = [sample(prompt(), 0.0, [3]), sample(prompt(), 20.0, [3])]
    expected = "actor.reward_scaling: the reward 20 becomes 2e+39, more than float32 holds; lower it, or actor.reward_b"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        sample_rewards(samples, actor(reward_scaling=1e38), 8)
    np.testing.assert_allclose(sample_rewards(samples, actor(reward_scaling=1e38, reward_clip=5.0), 8), [0.0, 5.0])


def test_kl_in_the_reward_with_a_group_is_rloo_on_what_the_row_earns() -> None:
    config = actor(
        kl_ctl=0.5,
        use_kl_in_reward=True,
        kl_estimator="k1",
        adv_norm=NormConfig(mean_level="group", mean_leave1out=True, std_level=None),
    )
    rows = [
        row([0.0, -1.0, -2.0], reward=1.0, ref_logprobs=[9.0, -1.5, -1.0]),
        row([0.0, -1.0], reward=0.0, ref_logprobs=[9.0, -1.25]),
    ]
    # k1 = log pi - log ref: 0.5 and -1.0; 0.25
    earned = [1.0 - 0.5 * (0.5 - 1.0), 0.0 - 0.5 * 0.25]
    first, second = outcome_advantages(rows, [0, 0], config)
    np.testing.assert_allclose(first, [earned[0] - earned[1]] * 2)
    np.testing.assert_allclose(second, [earned[1] - earned[0]])


def test_kl_in_the_reward_without_a_group_is_a_sum_of_what_follows_normalised_over_tokens() -> None:
    config = actor(
        kl_ctl=0.5,
        use_kl_in_reward=True,
        kl_estimator="k1",
        adv_norm=NormConfig(mean_level="batch", std_level="batch", eps=1e-9),
    )
    rows = [
        row([0.0, -1.0, -2.0], reward=1.0, ref_logprobs=[9.0, -1.5, -1.0]),
        row([0.0, -1.0], reward=0.0, ref_logprobs=[9.0, -1.25]),
    ]
    r = [[-0.25, 0.5 + 1.0], [-0.125]]
    returns = [r[0][0] + r[0][1], r[0][1], r[1][0]]
    mean = sum(returns) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in returns) / 3)
    np.testing.assert_allclose(
        np.concatenate(outcome_advantages(rows, [0, 1], config)), [(x - mean) / std for x in returns], rtol=1e-6
    )
    assert [part.tolist() for part in token_rewards(rows, config)] == r


def test_gae_reaches_across_tool_spans_and_is_whitened_over_the_batch() -> None:
    config = PPOActorConfig(path="model", kl_ctl=0.0, discount=0.9, gae_lambda=0.8)
    mask = [True, False, True, True, False]  # a tool's answer between two trained tokens
    rows = [
        row([0.0] * 5, reward=1.0, mask=mask, values=[9.0, 0.2, 9.0, 9.0, 0.4]),
        row([0.0] * 2, reward=0.0, values=[9.0, 0.1]),
    ]
    delta = [0.9 * 0.4 - 0.2, 1.0 - 0.4]
    raw = [delta[0] + 0.9 * 0.8 * delta[1], delta[1], -0.1]
    advantages, returns = critic_advantages(rows, [0, 1], config)
    np.testing.assert_allclose(np.concatenate(returns), [raw[0] + 0.2, raw[1] + 0.4, 0.0], atol=1e-12)
    mean = sum(raw) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 3)
    np.testing.assert_allclose(np.concatenate(advantages), [(x - mean) / (std + 1e-6) for x in raw])
    plain, _ = critic_advantages(
        rows, [0, 1], PPOActorConfig(path="m", adv_norm=None, kl_ctl=0.0, discount=0.9, gae_lambda=0.8)
    )
    np.testing.assert_allclose(np.concatenate(plain), raw)


def test_lambda_by_length_and_of_the_critic() -> None:
    """VAPO sec. 4.2, as sums over later tokens: the policy's lambda grows with the row, the critic's is 1."""
    config = PPOActorConfig(
        path="m", adv_norm=None, kl_ctl=0.0, discount=0.9, length_lambda=0.3, critic_lambda=1.0, gae_lambda=0.95
    )
    rows = [
        row([0.0] * 6, reward=1.0, values=[9.0, 0.2, 0.4, 0.1, 0.3, 0.5]),
        row([0.0] * 3, reward=-1.0, values=[9.0, 0.1, 0.7]),
    ]
    advantages, returns = critic_advantages(rows, [0, 1], config)
    for one, found, targets in zip(rows, advantages, returns, strict=True):
        values = list(one.values[1:])  # type: ignore[index]
        n, after = len(values), [*values[1:], 0.0]
        deltas = [(one.reward if t == n - 1 else 0.0) + 0.9 * after[t] - values[t] for t in range(n)]
        decay = max(0.0, 1 - 1 / (0.3 * n))
        expected = [sum((0.9 * decay) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(found, expected, atol=1e-12)
        wanted = [sum(0.9 ** (u - t) * deltas[u] for u in range(t, n)) + values[t] for t in range(n)]
        np.testing.assert_allclose(targets, wanted, atol=1e-12)
    assert advantages[1][0] != 0


def test_settings_of_lambda_that_contradict() -> None:
    with pytest.raises(ConfigError, match=r"gae_lambda: is 0\.9, but length_lambda sets lambda"):
        PPOActorConfig(path="m", length_lambda=0.05, gae_lambda=0.9)


@pytest.mark.parametrize("levels", [("batch", "batch"), ("group", "group"), ("group", "batch")])
@pytest.mark.parametrize("has_signal", [False, True])
def test_the_rounding_of_a_kl_is_not_made_a_signal(levels: tuple[str, str], has_signal: bool) -> None:
    """Rewards that are all equal leave only the KL, here of policies that are equal but for rounding."""
    norm = NormConfig(mean_level=levels[0], std_level=levels[1])  # type: ignore[arg-type]
    norm.std_unbiased, norm.eps = True, 1e-8
    config = actor(kl_ctl=0.1, use_kl_in_reward=True, kl_estimator="k1", adv_norm=norm)
    rows = [
        row(
            [0.0, -1.0, -2.0],
            reward=float(has_signal and index == 0),
            ref_logprobs=[0.0, -1.0 + noise, -2.0 - noise / 2],
        )
        for index, noise in enumerate([1e-3, -2e-3, 3e-3, -1e-3])
    ]
    largest = max(np.abs(part).max() for part in outcome_advantages(rows, [0, 0, 1, 1], config))
    assert largest > 0.5 if has_signal else 0 < largest < 1e-3
    assert outcome_advantages([], [], config) == []


def test_only_weights_need_a_scoring_pass_before_the_update() -> None:
    assert not actor().needs_proximal_logprobs
    assert not actor(recompute_logprob=False).needs_proximal_logprobs
    assert not actor(use_decoupled_loss=True, prox_logp_method="loglinear").needs_proximal_logprobs
    assert actor(use_decoupled_loss=True).needs_proximal_logprobs
    assert actor(m2_threshold=0.04).needs_proximal_logprobs


def test_the_decoupled_loss_weighs_tokens_and_masks_those_rejected() -> None:
    limits = RejectionSamplingConfig(level="token", action="mask", upper=2.0)
    made = row([0.0, -1.0, -2.0, -1.0])
    told = correct_rows([made], [[0.0, -0.5, 0.0, -1.0]], actor(use_decoupled_loss=True, rejection_sampling=limits))
    np.testing.assert_array_equal(made.logprobs, [0.0, -1.0, -2.0, -1.0])
    np.testing.assert_array_equal(made.prompt_mask, [True, False, True, False])  # e^2 is more than 2
    assert made.weights == pytest.approx([0.0, math.exp(0.5), 0.0, 1.0])
    assert told["rejected_frac"] == pytest.approx(1 / 3)
    made = row([0.0, -1.0, -2.0])
    correct_rows([made], [[0.0, -0.5, 0.0]], actor(use_decoupled_loss=True))
    np.testing.assert_array_equal(made.prompt_mask, [True, False, False])
    assert made.weights == pytest.approx([0.0, math.exp(0.5), math.exp(2.0)])


@pytest.mark.parametrize("recompute", [True, False])
def test_m2po_takes_the_weight_of_the_farthest_tokens_and_keeps_the_ratio_to_the_sampling_policy(recompute) -> None:
    """The paper's ratio is to the policy that sampled: the loss's to the one before the update, times the weight."""
    made = row([0.0, -1.0, -2.0], advantages=[0.0, 1.0, 1.0])
    told = correct_rows([made], [[0.0, -0.9, 0.0]], actor(m2_threshold=0.04, recompute_logprob=recompute))
    np.testing.assert_array_equal(made.logprobs, [0.0, -1.0, -2.0])
    np.testing.assert_allclose(made.weights, [0.0, math.exp(0.1) if recompute else 1.0, 0.0])
    np.testing.assert_array_equal(made.prompt_mask, [True, False, False])
    assert told["m2_masked_frac"] == 0.5


def test_the_error_of_the_interpolation_is_told() -> None:
    made = row([0.0, -1.0, -2.0], staleness=3)
    told = correct_rows([made], [[0.0, -0.5, -1.0]], actor(use_decoupled_loss=True, prox_logp_method="metrics"))
    assert told["prox_approx_abs_diff_mean"] == pytest.approx((0.5 + 1.0) / 2 / 4)
