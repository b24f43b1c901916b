"""What a script makes of the trajectories that its agents return: records for rewards, rows with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.agents.rows import RowBuilder, needs_scoring, read_trajectories, reward_record, train_sequences
from areno.agents.trajectories import AgentItem, LossMaskPolicy
from areno.api.trainer import Trainer
from areno.errors import DataError
from areno.server.conversations import Conversations
from areno.server.parsers import parser_for_template
from areno.types import RewardRecord, TokenRow, TrainSequence, Trajectory


def reward_records(trainer: Trainer, trajectories: Any) -> list[RewardRecord]:
    """What a reward function is given for each trajectory that an agent has returned.

    Raises DataError for what is no trajectory of a session of the trainer.
    """
    read = _read(trainer, trajectories, None)
    return [reward_record(item, trajectory, trainer.get_tokenizer()) for item, trajectory in read]


def trajectory_rows(
    trainer: Trainer,
    trajectories: Any,
    advantages: Sequence[float],
    rewards: Sequence[float] | None = None,
    *,
    loss_mask_policy: LossMaskPolicy | None = None,
) -> list[TrainSequence]:
    """The rows of all trajectories, for `trainer.train`. To be called outside of a session.

    advantages, rewards: one for each trajectory; without rewards these are 0. A trajectory has several rows where a
    turn did not go on from the tokens of the one before. loss_mask_policy: None is that of the last session. Trained
    tokens that the policy did not sample, or not at the temperature of training, get its log-probabilities. Raises
    DataError as reward_records does.
    """
    read = _read(trainer, trajectories, loss_mask_policy)
    given = {"advantages": advantages} | ({} if rewards is None else {"rewards": rewards})
    for name, numbers in given.items():
        if len(numbers) != len(read):
            raise DataError(f"there are {len(numbers)} {name} for {len(read)} trajectories; give one for each")
    rows: list[TrainSequence] = []
    version, eos = trainer.engine.weights_version, trainer.get_tokenizer().eos_token_id or 0
    for index, (_, trajectory) in enumerate(read):
        reward = 0.0 if rewards is None else float(rewards[index])
        of_one = train_sequences(trajectory, reward=reward, eos_token_id=eos, weights_version=version)
        for row, sampled in zip(of_one, trajectory.rows, strict=True):
            row.advantages = np.where(sampled.trained, float(advantages[index]), 0.0)
        rows += of_one
    score_missing(trainer, [row for _, trajectory in read for row in trajectory.rows], rows, trainer.temperature)
    return rows


def score_missing(
    trainer: Trainer, sampled: Sequence[TokenRow], rows: Sequence[TrainSequence], temperature: float
) -> set[float | None]:
    """Give trained tokens that the policy did not sample as it is trained its log-probabilities of them.

    rows: those of `sampled`. Returns the other temperatures that they were sampled at.
    """
    places = [place for place, row in enumerate(sampled) if needs_scoring(row, temperature)]
    if not places:
        return set()
    with trainer.clock.phase("recompute"):
        scored = trainer.score_logprobs("actor", [sampled[place].tokens for place in places], temperature)
    for place, logprobs in zip(places, scored, strict=True):
        rows[place].logprobs = np.where(sampled[place].trained, logprobs, 0.0)
    return {sampled[place].temperature for place in places} - {temperature}


def _read(trainer: Trainer, trajectories: Any, policy: LossMaskPolicy | None) -> list[tuple[AgentItem, Trajectory]]:
    tokenizer = trainer.get_tokenizer()
    conversations = Conversations(tokenizer, parser_for_template(tokenizer.chat_template))
    policy, info = policy or trainer.loss_mask_policy, trainer.engine.info
    builder = RowBuilder(conversations, policy, info.vocab_size, context=info.context_len)
    return read_trajectories(trajectories, builder)
