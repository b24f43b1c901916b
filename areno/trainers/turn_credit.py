"""Advantages of agents by turns, which agent.turn_credit chooses. The formulas are in areno.loss_fns.advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areno.config.agent import AgentConfig
from areno.config.models import PolicyConfig
from areno.loss_fns.advantages import normalize_tokens, turn_advantages, turn_gae
from areno.trainers.rows import Arrays, critic_advantages, outcome_advantages, trained, trained_mask
from areno.types import TrainSequence


def policy_advantages(
    rows: Sequence[TrainSequence], groups: Sequence[int], actor: PolicyConfig, agent: AgentConfig
) -> Arrays:
    """Return advantages without a critic, one for each trained token of each row."""
    if agent.turn_credit == "outcome":
        return outcome_advantages(rows, groups, actor)
    found = turn_advantages(
        [_turn_rewards(row) for row in rows],
        groups,
        agent.turn_discount,
        same_turn=agent.turn_credit == "turn_baseline",
        norm=None if actor.adv_norm is None else asdict(actor.adv_norm),
    )
    return [advantages_K[_trained_turns(row)] for row, advantages_K in zip(rows, found, strict=True)]


def value_advantages(
    rows: Sequence[TrainSequence], groups: Sequence[int], actor: Any, agent: AgentConfig
) -> tuple[Arrays, Arrays]:
    """Return (advantages, returns) from the critic's values. Only advantages are normalised, over tokens."""
    if agent.turn_credit == "outcome":
        return critic_advantages(rows, groups, actor)
    found = [
        turn_gae(_turn_rewards(row), values, _trained_turns(row), agent.turn_discount, actor.gae_lambda)
        for row, values in zip(rows, trained(rows, "values"), strict=True)
    ]
    advantages, returns = [one for one, _ in found], [other for _, other in found]
    if actor.adv_norm is not None:
        advantages = normalize_tokens(advantages, groups, **asdict(actor.adv_norm))
    return advantages, returns


def _turn_rewards(row: TrainSequence) -> np.ndarray:
    return np.array([row.reward]) if row.turn_rewards is None else row.turn_rewards


def _trained_turns(row: TrainSequence) -> np.ndarray:
    mask = trained_mask(row)
    return np.zeros(np.count_nonzero(mask), dtype=np.int64) if row.turns is None else row.turns[mask]
