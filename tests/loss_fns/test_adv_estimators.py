"""Each estimator of advantages against its paper's formula written as plain loops in float64."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from areno.checks.formulas.advantage_formulas import real as real_formula
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.loss_fns import DataPack, grpo_loss_fn
from areno.loss_fns.adv_estimators import GDPO, OTB, REAL, MaxRL
from areno.loss_fns.advantages import shape_rewards
from areno.recipes.grpo import GRPOConfig
from areno.recipes.gspo import GSPOConfig

NAN = float("nan")


def batch(seed):
    """Rewards, groups in any order and parts; some rewards are unknown, some parts missing, some groups equal."""
    rng = random.Random(seed)
    groups = [group for group in range(5) for _ in range(rng.choice([1, 3, 4]))]
    rng.shuffle(groups)
    rewards, parts = [], []
    for group in groups:
        found = {"a": float(rng.random() < 0.4), "b": rng.random()} if group else {"a": 0.0, "b": 0.5}
        if rng.random() < 0.2:
            del found[rng.choice(["a", "b"])]
        unknown = rng.random() < 0.1
        rewards.append(NAN if unknown else sum(found.values()))
        parts.append({} if unknown else found)
    return rewards, groups, parts


def test_maxrl():
    for seed in range(30):
        rewards, groups, parts = batch(seed)
        expected = []
        for reward, group in zip(rewards, groups, strict=True):
            of_group = [r for r, g in zip(rewards, groups, strict=True) if g == group and r == r]
            if reward != reward:
                expected.append(0.0)
            elif len(of_group) == 1:
                expected.append(reward)
            else:
                mean = sum(of_group) / len(of_group)
                expected.append((reward - mean) / mean if mean else 0.0)
        found = MaxRL().advantages(np.array(rewards), groups, parts)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_maxrl_at_the_edges():
    zero = MaxRL().advantages(np.zeros(3), [1, 1, 1], [])
    equal = MaxRL().advantages(np.full(3, 0.1), [1, 1, 1], [])
    assert not zero.any()
    assert not equal.any()  # exactly, though the mean of three times 0.1 is not 0.1
    with pytest.raises(ConfigError, match=r"actor\.adv_estimator: is maxrl.*a reward is -0\.5.*actor\.reward_bias"):
        MaxRL().advantages(np.array([1.0, -0.5]), [1, 1], [])


def normalized(values, eps):
    """Of known values; an unknown one is None and stays so. Equal values are 0."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return [None if value is None else 0.0 for value in values]
    mean = sum(known) / len(known)
    std = (sum((value - mean) ** 2 for value in known) / len(known)) ** 0.5
    return [None if value is None else (value - mean) / (std + eps) for value in values]


@pytest.mark.parametrize(("weights", "eps"), [(None, 1e-6), ({"a": 2.0, "b": -0.5}, 1e-2), ({"b": 1.0}, 1e-4)])
def test_gdpo(weights, eps):
    for seed in range(30):
        rewards, groups, parts = batch(seed)
        sums = [None] * len(rewards)
        for name, weight in (weights or {"a": 1.0, "b": 1.0}).items():
            for group in set(groups):
                members = [index for index, of in enumerate(groups) if of == group]
                for index, value in zip(members, normalized([parts[i].get(name) for i in members], eps), strict=True):
                    if value is not None:
                        sums[index] = (sums[index] or 0.0) + weight * value
        expected = [value or 0.0 for value in normalized(sums, eps)]
        found = GDPO(weights=weights, eps=eps).advantages(np.array(rewards), groups, parts)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_gdpo_of_one_part_is_grpo_up_to_the_scale_of_the_batch():
    from areno.loss_fns import group_advantages

    rewards, groups = [1.0, 0.0, 0.0, 0.3, 0.2, 0.1], [0, 0, 0, 1, 1, 1]
    one = GDPO(eps=1e-9).advantages(np.array(rewards), groups, [{"a": value} for value in rewards])
    np.testing.assert_allclose(one, group_advantages(rewards, groups, eps=1e-9), atol=1e-6)


def test_errors_of_gdpo():
    rewards = np.array([1.0, 0.5])
    with pytest.raises(ConfigError, match=r"actor\.adv_estimator: is gdpo, but the rewards of this step have no parts"):
        GDPO().advantages(rewards, [0, 0], [{}, {}])
    with pytest.raises(ConfigError, match=r"actor\.gdpo\.weights: names b, which no reward.*the parts are a, c"):
        GDPO(weights={"b": 1.0}).advantages(rewards, [0, 0], [{"a": 1.0}, {"c": 1.0}])
    assert not GDPO().advantages(np.array([NAN, NAN]), [0, 0], [{}, {}]).any()


def test_a_part_that_a_step_lacks_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """A rare part, or one of another source. It is named once."""
    rewards, parts = np.array([1.0, 0.5]), [{"answer": 1.0}, {"answer": 0.0}]
    for _ in range(2):
        found = GDPO(weights={"answer": 1.0, "rare": 2.0}).advantages(rewards, [0, 0], parts)
        assert found == pytest.approx([1.0, -1.0], abs=1e-5)
    expected = "actor.gdpo.weights names rare, which no reward of this step has; the parts are answer"
    assert [record.getMessage() for record in caplog.records] == [expected]


OVERLONG = ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=4", "actor.overlong_penalty_factor=0.8"]


@pytest.mark.parametrize("recipe", [GRPOConfig, GSPOConfig])
@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (["variant=maxrl", "actor.adv_norm.std_level=null"], ["actor.adv_norm: is set, but adv_estimator=maxrl"]),
        (["variant=maxrl", "actor.adv_norm=null"], ["actor.adv_norm: is set"]),
        (["variant=maxrl", "+actor.reward_norm.mean_level=batch"], ["actor.reward_norm: makes negative rewards"]),
        (
            ["variant=maxrl", *OVERLONG, "actor.reward_bias=0.5", "+actor.reward_norm.mean_level=batch"],
            [
                "actor.reward_norm: makes negative rewards",
                "actor.overlong_reward_penalty: is true, which makes the reward of long wrong answers negative, and "
                "actor.adv_estimator is maxrl; leave it out, or raise actor.reward_bias to at least 0.8 "
                "(actor.overlong_penalty_factor)",
            ],
        ),
        (
            ["variant=maxrl", "actor.reward_scaling=-1.0"],
            ["actor.reward_scaling: is -1, which makes positive rewards negative, and actor.adv_estimator is maxrl"],
        ),
        (["variant=maxrl", "actor.gdpo.eps=0.1"], ["set actor.adv_estimator to gdpo"]),
        (
            ["variant=gdpo", "actor.reward_clip=1.0", "actor.reward_bias=1.0"],
            ["actor.reward_bias: is 1.0, but with actor.adv_estimator=gdpo", "actor.reward_clip: is 1.0"],
        ),
        (["variant=gdpo", "rollout.dynamic_sampling=true"], ["rollout.dynamic_sampling: drops groups whose sums"]),
        (["variant=gdpo", "gconfig.n_samples=1"], ["gconfig.n_samples: is 1; a group advantage"]),
        (["variant=gdpo", "reward.path=folder"], ["actor.gdpo.weights: is null"]),
        (
            ["variant=maxrl", "ref=default", "actor.kl_ctl=0.1", "actor.use_kl_in_reward=true"],
            ["actor.use_kl_in_reward: is true, but actor.adv_estimator takes one reward"],
        ),
        (
            ["variant=maxrl", "agent.fn=agent.py", "agent.turn_credit=return", "agent.export_style=individual"],
            ["agent.turn_credit: is return, but actor.adv_estimator"],
        ),
    ],
)
def test_settings_that_an_estimator_cannot_honour(recipe, settings, problems):
    with pytest.raises(ConfigError) as raised:
        load(recipe, "quickstart", settings)
    for problem in problems:
        assert problem in str(raised.value)


def test_settings_that_an_estimator_honours():
    assert load(GRPOConfig, "quickstart", ["variant=maxrl", "gconfig.n_samples=1"]).actor.adv_estimator == "maxrl"
    assert (
        load(GSPOConfig, "quickstart", ["variant=maxrl", "actor.overlong_tokens=null"]).actor.adv_estimator == "maxrl"
    )


@pytest.mark.parametrize(
    "settings", [[*OVERLONG, "actor.reward_bias=0.8"], ["actor.reward_scaling=-1.0", "actor.reward_bias=-1.0"]]
)
def test_maxrl_takes_what_keeps_rewards_positive(settings):
    """A penalty below the shift, and a cost of 0 to 1 that becomes a reward of 1 to 0."""
    actor = load(GRPOConfig, "quickstart", ["variant=maxrl", *settings]).actor
    penalty = np.array([0.0, -0.8 if actor.overlong_reward_penalty else 0.0])
    rewards = np.array([1.0, 0.0]) + penalty
    assert (shape_rewards(rewards, actor.reward_bias, actor.reward_scaling) >= 0).all()


def test_otb():
    for seed in range(20):
        rng, (rewards, groups, _) = np.random.default_rng(seed), batch(seed)
        terms = [rng.uniform(0, 1.5, rng.integers(0, 6)) for _ in rewards]
        found = OTB().token_advantages(np.array(rewards), groups, terms)
        for i, row in enumerate(found):
            for t, advantage in enumerate(row):
                pairs = [
                    (sum(terms[j][: t + 1]), rewards[j])
                    for j in range(len(rewards))
                    if groups[j] == groups[i] and len(terms[j]) > t and rewards[j] == rewards[j]
                ]
                if rewards[i] == rewards[i]:
                    baseline = sum(w * r for w, r in pairs) / sum(w for w, _ in pairs)
                    assert advantage == pytest.approx(rewards[i] - baseline, abs=1e-9)
                else:
                    assert advantage == 0


def test_otb_at_the_edges():
    """Equal rewards have no advantage, and the baseline of certain tokens is the mean."""
    equal = OTB().token_advantages(np.full(3, 0.1), [1, 1, 1], [np.array([0.3, 0.1])] * 2 + [np.array([0.7])])
    assert not np.concatenate(equal).any()
    certain = OTB().token_advantages(np.array([1.0, 0.0]), [1, 1], [np.zeros(2)] * 2)
    np.testing.assert_allclose(certain, [[0.5, 0.5], [-0.5, -0.5]], atol=1e-12)
    with pytest.raises(ConfigError, match=r"is otb, with an advantage for each token; use the recipe grpo"):
        load(GSPOConfig, "quickstart", ["actor.adv_estimator=otb"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["variant=real", "actor.reduction=token_mean"], "reduction: is token_mean, but actor.adv_estimator is real"),
        (["variant=real", "actor.gradient_accumulation_steps=2"], "set actor.ppo_n_minibatches instead"),
        (["variant=real", "actor.recompute_logprob=false"], "recompute_logprob: is false, but actor.adv_estimator is"),
        (
            ["variant=real", "actor.importance_sampling_level=sequence"],
            "level: is sequence, but surrogate=reinforce has",
        ),
        (
            ["variant=real", "actor.ppo_n_minibatches=8", "train_dataset.batch_size=4"],
            "ppo_n_minibatches: is 8, but actor.adv_estimator is real, whose updates have whole groups, and a step "
            "has 4 (train_dataset.batch_size); lower it",
        ),
        (["actor.adv_estimator=real"], "is real, whose loss has no ratio; use the recipe grpo with variant=real"),
    ],
)
def test_settings_that_real_cannot_honour(settings, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        load(GRPOConfig, "quickstart", settings)


def test_real_has_the_gradient_of_the_papers_loss():
    """The loss of a step by autograd in float64, against grpo_loss_fn with the advantages of the estimator."""
    rng, n = np.random.default_rng(5), 24
    groups = np.repeat(range(6), 4).tolist()
    rng.shuffle(groups)
    rewards = rng.integers(0, 2, n).astype(float)
    rewards[np.array(groups) == 2] = 1.0
    lengths = rng.integers(1, 6, n)
    rows_T = torch.tensor(np.repeat(range(n), lengths))
    old_T = torch.tensor(rng.normal(-1, 0.3, lengths.sum()))
    for tau, size in ((0.5, 0.0), (0.5, 2.0), (0.01, 5.0)):
        new_T = (old_T + torch.tensor(rng.normal(0, size, len(old_T)))).requires_grad_()
        wanted = []
        for group in range(6):
            of_sign = {1: [torch.zeros((), dtype=torch.float64)], -1: [torch.zeros((), dtype=torch.float64)]}
            own = [i for i in range(n) if groups[i] == group]
            mean = sum(rewards[i] for i in own) / len(own)
            for i in own:
                sign = 1 if rewards[i] > mean else -1
                of_sign[sign].append(-sign * (new_T - old_T)[rows_T == i].mean() / tau)
            if len(of_sign[1]) > 1 and len(of_sign[-1]) > 1:
                wanted += [torch.stack(of_sign[1]).logsumexp(0) + torch.stack(of_sign[-1]).logsumexp(0)]
        [expected] = torch.autograd.grad(torch.stack(wanted).sum() / 6, new_T)
        moved = [float((new_T - old_T).detach()[rows_T == i].mean()) for i in range(n)]
        estimator = REAL(tau=tau)
        found = estimator.current_advantages(rewards, groups, np.array(moved))
        if not size:
            np.testing.assert_allclose(estimator.advantages(rewards, groups, []), found, atol=1e-12)
        pack = DataPack(
            tokens=torch.zeros(len(old_T), dtype=torch.int64),
            row_of_token=rows_T,
            loss_mask=torch.ones(len(old_T), dtype=torch.bool),
            n_rows=n,
            step_tokens=len(old_T),
            step_rows=n,
            old_logprobs=old_T,
            advantages=torch.tensor(found)[rows_T],
        )
        [gradient] = torch.autograd.grad(grpo_loss_fn(pack, new_T, surrogate="reinforce")[0], new_T)
        assert (gradient - expected).abs().max() < 1e-12
    assert not REAL().advantages(np.array([NAN, 1.0, NAN]), [0, 0, 0], []).any()


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3], [0.1 + 0.2, 0.3, 0.3], [5e-17, 0.0]])
def test_rewards_that_differ_by_rounding_have_no_gradient_in_real(rewards):
    groups = [0] * len(rewards)
    assert not REAL().advantages(np.array(rewards), groups, []).any()
    assert real_formula(rewards, groups, 0.5) == [0.0] * len(rewards)
    apart = [1.0, 1.0 - 1e-6]
    assert REAL().advantages(np.array(apart), [0, 0], []) == pytest.approx(real_formula(apart, [0, 0], 0.5))
