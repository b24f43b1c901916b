"""Functions that make training rows from agents' trajectories, and that compute log-probabilities which rows lack.

A trajectory is the list of model calls and messages that an agent returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.agents.trajectories import AgentItem, LossMaskPolicy
from areno.agents.turns_to_rows import (
    RowBuilder,
    needs_scoring,
    read_trajectories,
    reward_record,
    train_sequences,
    warn_of_temperatures,
)
from areno.api.trainer import Trainer
from areno.config.rollout import SamplingConfig
from areno.errors import DataError
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder
from areno.types import RewardRecord, ScoredSample, TokenRow, TrainSequence, Trajectory


def reward_records(trainer: Trainer, trajectories: Any) -> list[RewardRecord]:
    """Return the record that a reward function receives for each trajectory that an agent has returned.

    Raises DataError if a trajectory is malformed, or was not sampled in a session of `trainer`.
    """
    read = _parse_trajectories(trainer, trajectories, None)
    return [reward_record(item, trajectory, trainer.get_tokenizer()) for item, trajectory in read]


def trajectory_rows(
    trainer: Trainer,
    trajectories: Any,
    advantages: Sequence[float | Sequence[float] | np.ndarray],
    rewards: Sequence[float] | None = None,
    *,
    loss_mask_policy: LossMaskPolicy | None = None,
) -> list[TrainSequence]:
    """Return the training rows of trajectories, for `trainer.train`. Call this outside of a session.

    A trajectory has several rows if the prompt of a turn does not begin with the tokens of the previous turn. A forward
    pass of the actor computes the log-probabilities of trained tokens that the policy did not sample. If rollout and
    training differ in temperature, the pass computes those of all trained tokens. Each advantage is a number, or has
    one for each turn. `loss_mask_policy` None takes the policy of the last session. `rewards` None sets all rewards
    to 0.
    """
    read = _parse_trajectories(trainer, trajectories, loss_mask_policy)
    given = {"advantages": advantages} | ({} if rewards is None else {"rewards": rewards})
    for name, numbers in given.items():
        if len(numbers) != len(read):
            raise DataError(f"there are {len(numbers)} {name} for {len(read)} trajectories; give one for each")
    rows: list[TrainSequence] = []
    version, eos = trainer.engine.weights_version, trainer.get_tokenizer().eos_token_id or 0
    for index, (_, trajectory) in enumerate(read):
        reward = 0.0 if rewards is None else float(rewards[index])
        of_one = train_sequences(trajectory, reward=reward, eos_token_id=eos, weights_version=version)
        n_turns, of_turns = len(trajectory.turn_rewards), np.asarray(advantages[index], dtype=np.float64)
        if of_turns.shape not in ((), (n_turns,)):
            text = f"trajectory {index} has {n_turns} turns, and its advantages have the shape {of_turns.shape}"
            raise DataError(f"{text}; give a number, or one for each turn")
        for row, sampled in zip(of_one, trajectory.rows, strict=True):
            row.advantages = np.where(sampled.trained, np.broadcast_to(of_turns, (n_turns,))[sampled.turns], 0.0)
        rows += of_one
    score_missing_logprobs(trainer, [row for _, trajectory in read for row in trajectory.rows], rows, trainer.sampling)
    return rows


def score_missing_logprobs(
    trainer: Trainer, sampled: Sequence[TokenRow], rows: Sequence[TrainSequence], sampling: SamplingConfig
) -> list[TokenRow]:
    """Compute missing log-probabilities of trained tokens with the actor, and return the rows that were scored.

    A log-probability is missing unless the policy sampled the token at the temperature of training. Other
    log-probabilities stay those of the weights that sampled the token, since importance ratios divide by them.
    """
    indices = [index for index, row in enumerate(sampled) if needs_scoring(row, sampling)]
    if not indices:
        return []
    with trainer.clock.phase("recompute"):
        scored = trainer.score_logprobs("actor", [sampled[index].tokens for index in indices], sampling=sampling)
    for index, logprobs in zip(indices, scored, strict=True):
        row, known = sampled[index], 0.0
        missing = row.trained
        if row.temperature == sampling.logprob_temperature:
            missing, known = row.trained & ~row.sampled, np.asarray(rows[index].logprobs)
        rows[index].logprobs = np.where(missing, logprobs, known)
    return [sampled[index] for index in indices]


def score_agents(
    trainer: Trainer, samples: Sequence[ScoredSample], rows: Sequence[TrainSequence], sampling: SamplingConfig
) -> None:
    """Compute the log-probabilities that the rows of agents lack, and warn if agents sampled at another temperature."""
    sampled = [row for sample in samples if sample.trajectory is not None for row in sample.trajectory.rows]
    waits = not any(row.staleness for row in rows)
    warn_of_temperatures(score_missing_logprobs(trainer, sampled, rows, sampling), sampling, waits)


def _parse_trajectories(
    trainer: Trainer, trajectories: Any, policy: LossMaskPolicy | None
) -> list[tuple[AgentItem, Trajectory]]:
    tokenizer = trainer.get_tokenizer()
    conversations = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template))
    policy, info = policy or trainer.loss_mask_policy, trainer.engine.info
    builder = RowBuilder(conversations, policy, info.vocab_size, context=info.context_len)
    return read_trajectories(trajectories, builder)
