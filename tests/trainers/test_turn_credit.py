"""Credit by turns: each choice and its gradient against loops in float64; one turn, and what agents may leave out."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.agent import AgentConfig, TurnCredit
from areno.config.norms import NormConfig
from areno.errors import ConfigError
from areno.loss_fns import grpo_loss_fn, ppo_loss_fn, value_loss_fn
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.online_dpo import ALGORITHM as ONLINE_DPO
from areno.recipes.ppo import PPOActorConfig, PPOConfig
from areno.schema.build import build
from areno.trainers.policy_only import PolicyOnlyTrainer
from areno.trainers.rows import (
    critic_advantages,
    join_rows,
    outcome_advantages,
    policy_rows,
    rows_per_sample,
    sample_rewards,
    set_advantages,
)
from areno.trainers.turn_credit import policy_advantages, value_advantages
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TokenRow, TrainSequence, Trajectory
from tests.helpers.loss_rows import pack_of, token_weight

ITEM = PromptItem(prompt="a", text="a", tokens=[1])
GROUPS = [0, 0, 0, 1, 1, 1, 2]


def sample(group: int, turns: Sequence[Sequence[int]], given: Sequence[float], outcome: float) -> ScoredSample:
    """A sample whose rows have tokens of the given turns. The first token of a row, and each fifth, is not trained."""
    rows = []
    for of_row in turns:
        trained = np.array([place % 5 > 0 for place in range(len(of_row))])
        rows.append(
            TokenRow(
                tokens=[1] * len(of_row),
                sources=np.zeros(len(of_row), dtype=np.uint8),
                sampled=trained,
                trained=trained,
                logprobs=np.full(len(of_row), -1.0),
                versions=np.zeros(len(of_row), dtype=np.int64),
                temperature=1.0,
                turns=np.array(of_row, dtype=np.int64),
            )
        )
    trajectory = Trajectory(rows=rows, turns=[], turn_rewards=list(given), messages=[], tool_calls=[], tool_results=[])
    return ScoredSample(
        item=ITEM,
        sequence=RolloutSequence(resp_tokens=[1], resp_logprobs=[-1.0]),
        completion="",
        outcome=RewardOutcome(math.fsum([outcome, *given])),
        group=group,
        trajectory=trajectory,
    )


def samples_of(seed: int, most_turns: int = 4) -> list[ScoredSample]:
    """Samples of three groups, with one to four turns in one or several rows, some of them in two rows."""
    rng = random.Random(seed)
    found = []
    for group in GROUPS:
        n = rng.randint(1, most_turns)
        cut = rng.randint(1, n)
        parts = [[turn for turn in of_row for _ in range(rng.randint(3, 7))] for of_row in (range(cut), range(cut, n))]
        if n == 3:
            parts.append([1, 1, 1])  # of a sub-agent that turn 1 has called
        given = [rng.gauss(0, 1) for _ in range(n)]
        found.append(sample(group, [part for part in parts if part], given, rng.choice([0.0, 1.0])))
    return found


def rows_of(samples: Sequence[ScoredSample], actor: Any, seed: int = 0) -> tuple[list[TrainSequence], list[int]]:
    rewards = sample_rewards(samples, actor, 8)
    rows = policy_rows(samples, rewards, 0, reward_scaling=actor.reward_scaling)
    rng = np.random.default_rng(seed)
    for row in rows:
        row.values = rng.normal(size=len(row.tokens))  # type: ignore[arg-type]
    return rows, rows_per_sample(samples)


def returns_by_hand(one: ScoredSample, actor: Any, discount: float) -> list[float]:
    assert one.trajectory is not None
    assert one.outcome.value is not None
    rewards = [actor.reward_scaling * reward for reward in one.trajectory.turn_rewards]
    rewards[-1] = (one.outcome.value + actor.reward_bias) * actor.reward_scaling - sum(rewards[:-1])
    return [sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def normalised_by_hand(samples: Sequence[ScoredSample], actor: Any, discount: float, same_turn: bool) -> Any:
    units = [
        (index, one.group, turn, value)
        for index, one in enumerate(samples)
        for turn, value in enumerate(returns_by_hand(one, actor, discount))
    ]
    found = {}
    for index, group, turn, value in units:

        def peers(level: str | None, group: int = group, turn: int = turn) -> list[float]:
            chosen = [each for each in units if level == "batch" or each[1] == group]
            return [each[3] for each in chosen if level == "batch" or not same_turn or each[2] == turn]

        norm = actor.adv_norm
        if norm is None:
            found[index, turn] = value
            continue
        found[index, turn] = value - statistics.fmean(peers(norm.mean_level))
        if norm.std_level:
            found[index, turn] /= statistics.pstdev(peers(norm.std_level)) + norm.eps
        if any(level and len(set(peers(level))) == 1 for level in (norm.mean_level, norm.std_level)):
            found[index, turn] = 0.0  # equal returns carry no signal
    return found


def packed(rows: Sequence[TrainSequence], **fields: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Rows for a loss in float64, at the policy that sampled them. `fields` names a field of the rows for others."""
    lists = []
    for row in rows:
        logprobs = np.asarray(row.logprobs).tolist()
        values = {name: np.asarray(getattr(row, field)).tolist() for name, field in fields.items()}
        mask = (~np.asarray(row.prompt_mask)).tolist()
        given = {"outputs": logprobs, "old_logprobs": logprobs, "advantages": np.asarray(row.advantages).tolist()}
        others = {name: [0.0] * len(mask) for name in ("ref_logprobs", "entropy", "weights", "values", "returns")}
        lists.append({"mask": mask, "staleness": 0, **others, **given, **values})
    return *pack_of(lists), lists


def grpo(**settings: Any) -> GRPOActorConfig:
    return GRPOActorConfig(path="m", reward_scaling=0.5, reward_bias=0.25, **settings)


@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean"])
@pytest.mark.parametrize(
    ("credit", "norm"),
    [
        ("return", NormConfig()),
        ("return", NormConfig(mean_level="batch", std_level="group")),
        ("return", None),
        ("turn_baseline", NormConfig()),
        ("turn_baseline", NormConfig(std_level=None)),
        ("turn_baseline", NormConfig(std_level="batch")),
    ],
)
def test_the_gradient_is_that_of_a_loop(credit: TurnCredit, norm: NormConfig | None, reduction: Any) -> None:
    actor, agent = grpo(adv_norm=norm), AgentConfig(fn="a.py", turn_credit=credit, turn_discount=0.8)
    for seed in range(5):
        samples = samples_of(seed)
        rows, sizes = rows_of(samples, actor)
        set_advantages(rows, sizes, policy_advantages(join_rows(rows, sizes), GROUPS, actor, agent))
        expected = normalised_by_hand(samples, actor, 0.8, credit == "turn_baseline")
        pack, outputs, lists = packed(rows)
        loss, _ = grpo_loss_fn(pack, outputs, reduction=reduction)
        loss.backward()
        by_hand = []
        of_row = [(index, row) for index, one in enumerate(samples) for row in one.trajectory.rows]  # type: ignore[union-attr]
        for (index, row), each in zip(of_row, lists, strict=True):
            share = token_weight(lists, each, reduction, 1)
            by_hand += [
                -share * expected[index, turn] if trained else 0.0
                for turn, trained in zip(row.turns.tolist(), row.trained.tolist(), strict=True)
            ]
        torch.testing.assert_close(outputs.grad, torch.tensor(by_hand, dtype=torch.float64), atol=1e-9, rtol=1e-9)


def gae_by_hand(one: ScoredSample, actor: Any, agent: AgentConfig, values: Sequence[Any]) -> dict[int, Any]:
    """Turn -> (advantage, return)."""
    assert one.trajectory is not None
    rewards = [actor.reward_scaling * reward for reward in one.trajectory.turn_rewards]
    rewards[-1] = one.outcome.value * actor.reward_scaling - sum(rewards[:-1])  # type: ignore[operator]
    value_of: dict[int, float] = {}
    for row, of_row in zip(one.trajectory.rows, values, strict=True):
        for turn, trained, value in zip(row.turns.tolist(), row.trained, of_row, strict=True):
            if trained:
                value_of.setdefault(turn, value)
    found = {}
    for k in value_of:
        advantage, factor = 0.0, 1.0
        for j in range(k, len(rewards)):
            delta = rewards[j] + agent.turn_discount * value_of.get(j + 1, 0.0) - value_of[j]
            advantage += factor * delta
            factor *= agent.turn_discount * actor.gae_lambda
        found[k] = advantage, advantage + value_of[k]
    return found


@pytest.mark.parametrize("norm", [None, NormConfig(mean_level="batch", std_level="batch")])
def test_the_gradients_of_gae_over_turns_are_those_of_a_loop(norm: NormConfig | None) -> None:
    actor = PPOActorConfig(path="m", kl_ctl=0.0, gae_lambda=0.7, adv_norm=norm, reward_scaling=2.0)
    agent = AgentConfig(fn="a.py", turn_credit="gae", turn_discount=0.9)
    for seed in range(5):
        samples = samples_of(seed)
        rows, sizes = rows_of(samples, actor, seed)
        advantages, returns = value_advantages(join_rows(rows, sizes), GROUPS, actor, agent)
        set_advantages(rows, sizes, advantages)
        set_advantages(rows, sizes, returns, "returns")
        actual, critic, start = [], [], 0
        for one, size in zip(samples, sizes, strict=True):
            assert one.trajectory is not None
            of_turn = gae_by_hand(one, actor, agent, [row.values for row in rows[start : start + size]])
            for row, of_row in zip(one.trajectory.rows, rows[start : start + size], strict=True):
                for turn, trained, value in zip(row.turns.tolist(), row.trained, of_row.values, strict=True):  # type: ignore[arg-type]
                    actual.append(of_turn[turn][0] if trained else None)
                    critic.append(value - of_turn[turn][1] if trained else 0.0)
            start += size
        known = [value for value in actual if value is not None]
        mean, std = (statistics.fmean(known), statistics.pstdev(known) + 1e-6) if norm else (0.0, 1.0)
        by_hand = [0.0 if value is None else -(value - mean) / std / len(known) for value in actual]
        pack, outputs, _ = packed(rows)
        ppo_loss_fn(pack, outputs)[0].backward()
        torch.testing.assert_close(outputs.grad, torch.tensor(by_hand, dtype=torch.float64), atol=1e-9, rtol=1e-9)
        pack, outputs, _ = packed(rows, outputs="values", values="values", returns="returns")
        value_loss_fn(pack, outputs, value_loss_coef=0.5)[0].backward()
        by_hand = [2 * 0.5 * error / len(known) for error in critic]
        torch.testing.assert_close(outputs.grad, torch.tensor(by_hand, dtype=torch.float64), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("credit", ["return", "turn_baseline"])
@pytest.mark.parametrize("norm", [NormConfig(), NormConfig(std_level="batch"), NormConfig(mean_leave1out=True)])
def test_one_turn_is_the_outcome(credit: TurnCredit, norm: NormConfig) -> None:
    """Bit for bit, also of rows that are masked."""
    actor = grpo(adv_norm=norm, reward_clip=0.4)
    agent = AgentConfig(fn="a.py", turn_credit=credit, turn_discount=0.5)
    rows, sizes = rows_of(samples_of(3, most_turns=1), actor)
    rows[1] = replace(rows[1], prompt_mask=np.ones(len(rows[1].tokens), dtype=bool))  # type: ignore[arg-type]
    joined = join_rows(rows, sizes)
    ours, theirs = policy_advantages(joined, GROUPS, actor, agent), outcome_advantages(joined, GROUPS, actor)
    assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]
    assert any(each.any() for each in ours)


def test_one_turn_of_gae_is_the_outcome_without_discount_and_lambda() -> None:
    """The critic's targets of all tokens, and the advantage of the first, are those of tokens with lambda 1."""
    actor = PPOActorConfig(path="m", kl_ctl=0.0, gae_lambda=1.0, adv_norm=None)
    rows, sizes = rows_of(samples_of(3, most_turns=1), actor)
    joined = join_rows(rows, sizes)
    ours = value_advantages(joined, GROUPS, actor, AgentConfig(fn="a.py", turn_credit="gae"))
    theirs = critic_advantages(joined, GROUPS, actor)
    for our, their, targets, their_targets, row in zip(*ours[:1], *theirs[:1], ours[1], theirs[1], joined, strict=True):
        np.testing.assert_allclose(targets, np.full(len(targets), row.reward), atol=1e-12)
        np.testing.assert_allclose(targets, their_targets, atol=1e-12)
        np.testing.assert_allclose(our, np.full(len(our), their[0]), atol=1e-12)


def test_a_turn_without_trained_tokens_gives_its_reward_to_the_turn_before() -> None:
    actor = PPOActorConfig(path="m", kl_ctl=0.0, gae_lambda=1.0, adv_norm=None)
    agent = AgentConfig(fn="a.py", turn_credit="gae", turn_discount=0.5)
    rows, sizes = rows_of([sample(0, [[1, 1, 3, 3]], [1.0, 2.0, 4.0, 8.0, 16.0], 32.0)], actor)
    rows[0].values = [0.0] * 4
    _, [targets] = value_advantages(join_rows(rows, sizes), [0], actor, agent)
    last = 8.0 + 16.0 + 32.0
    np.testing.assert_allclose(targets, [1.0 + 2.0 + 4.0 + 0.5 * last, last, last])


def test_the_summary_gets_what_follows_it() -> None:
    """Turn 1 writes a summary, and turn 2 begins with it in a row of its own, and gets the reward."""
    actor, agent = grpo(adv_norm=None), AgentConfig(fn="a.py", turn_credit="return", turn_discount=0.5)
    rows, sizes = rows_of([sample(0, [[0, 0, 0], [0, 1, 1], [2, 2, 2]], [0.0, 0.0, 0.0], 3.75)], actor)
    [found] = policy_advantages(join_rows(rows, sizes), [0], actor, agent)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 2.0, 2.0]
    assert [np.asarray(row.reward).tolist() for row in rows] == [2.0] * 3


def test_gae_over_tokens_goes_from_row_to_row_too() -> None:
    """Without credit by turns, the summary learns from the rows after it by the critic: one GAE over the sample."""
    actor = PPOActorConfig(path="m", kl_ctl=0.0, gae_lambda=0.5, discount=0.9, adv_norm=None)
    rows, sizes = rows_of([sample(0, [[0, 0, 0], [0, 1, 1], [2, 2, 2]], [0.0] * 3, 1.0)], actor)
    values = [value for row in rows for value in np.asarray(row.values)[1:]]
    [found], _ = value_advantages(join_rows(rows, sizes), [0], actor, AgentConfig(fn="a.py"))
    advantage, after, expected = 0.0, 0.0, list[float]()
    for place in reversed(range(6)):
        advantage = float(place == 5) + 0.9 * after - values[place] + 0.9 * 0.5 * advantage
        after = values[place]
        expected.insert(0, advantage)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def settings_of(kind: Any, actor: dict[str, Any], agent: dict[str, Any]) -> Any:
    return build(
        kind,
        {
            "experiment_name": "a",
            "actor": {"path": "m", **actor},
            "agent": {"fn": "a.py", **agent},
            "train_dataset": {"path": "d"},
        },
    )


@pytest.mark.parametrize(
    ("kind", "actor", "agent", "message"),
    [
        (
            GSPOConfig,
            {},
            {"turn_credit": "return"},
            "agent.turn_credit: is return; here it can be outcome; GSPO averages the",
        ),
        (
            GRPOConfig,
            {},
            {"turn_credit": "gae"},
            "is gae; here it can be outcome or return or turn_baseline; gae needs the critic",
        ),
        (
            PPOConfig,
            {},
            {"turn_credit": "return"},
            "is return; here it can be outcome or gae; the others need the recipe grpo",
        ),
        (ONLINE_DPO.config, {}, {"turn_credit": "return"}, "is return; here it can be outcome"),
        (GRPOConfig, {}, {"turn_discount": 0.5}, "set agent.turn_credit to return or turn_baseline or gae"),
        (
            GRPOConfig,
            {"adv_norm": {"mean_level": "batch"}},
            {"turn_credit": "turn_baseline"},
            "actor.adv_norm.mean_level: is batch, but the baseline of agent.turn_credit=turn_baseline",
        ),
        (GRPOConfig, {"adv_norm": None}, {"turn_credit": "turn_baseline"}, "actor.adv_norm.mean_level: is null"),
        (GRPOConfig, {"reward_norm": {}}, {"turn_credit": "return"}, "actor.reward_norm: normalises the rewards of"),
        (GRPOConfig, {"use_kl_in_reward": True, "kl_ctl": 0.1}, {"turn_credit": "return"}, "actor.use_kl_in_reward: "),
        (PPOConfig, {"discount": 0.9}, {"turn_credit": "gae"}, "actor.discount: is 0.9, but agent.turn_credit is gae"),
        (GRPOConfig, {}, {"fn": None, "turn_credit": "return"}, "so there is no agent"),
        (
            GRPOConfig,
            {},
            {"whole_batch": True, "max_total_completion_tokens": 5},
            "agent.max_total_completion_tokens: is 5, but agent.whole_batch is true, so its samples have no sessions",
        ),
    ],
)
def test_what_does_not_fit_is_named(kind: Any, actor: Any, agent: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(kind, actor, agent)
    assert message in str(caught.value)


def test_gspo_has_credit_by_turns_if_each_is_a_row() -> None:
    agent = {"turn_credit": "return", "export_style": "individual"}
    assert settings_of(GSPOConfig, {}, agent).agent.turn_credit == "return"


def test_an_own_function_for_advantages_has_no_other_credit() -> None:
    config = GRPOConfig.__new__(GRPOConfig)
    vars(config).update(agent=AgentConfig(fn="a.py", turn_credit="return"))
    trainer = PolicyOnlyTrainer.__new__(PolicyOnlyTrainer)
    with pytest.raises(
        ConfigError, match=r"agent\.turn_credit: is return, but the advantages are those of an advantage_fn"
    ):
        PolicyOnlyTrainer.__init__(trainer, config, advantage_fn=lambda *_: [])
