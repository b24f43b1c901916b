"""Rollouts with agents, and the training rows made from their trajectories.

An agent is user code that calls the model through the HTTP endpoint of a rollout session. A trajectory is the list of
model calls and messages that the agent returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from areno.agents.pool import AgentOutcome, AgentPool
from areno.agents.rows import (
    RowBuilder,
    needs_scoring,
    read_trajectories,
    reward_record,
    train_sequences,
)
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, BadTrajectory, LossMaskPolicy
from areno.api.trainer import Trainer
from areno.config.rollout import GenerationConfig, SamplingConfig
from areno.engine.requests import OnProgress
from areno.errors import ArenoError, DataError, Problem
from areno.plan.plan import sampling_params
from areno.run.setup import PolicySetup
from areno.server.conversations import Conversations
from areno.server.parsers import parser_for_template
from areno.tracking.run_log import IN_FULL
from areno.types import (
    Batch,
    PromptItem,
    RewardOutcome,
    RewardRecord,
    RolloutSequence,
    ScoredSample,
    TokenRow,
    TrainSequence,
    Trajectory,
)


def reward_records(trainer: Trainer, trajectories: Any) -> list[RewardRecord]:
    """Return the record that a reward function receives for each trajectory.

    Args:
        trainer: The Trainer whose rollout session the agents used.
        trajectories: An AgentTrajectory or AgentTrajectoryTurn that an agent has returned, or a list of them.

    Returns:
        The records, in the order of the trajectories.

    Raises:
        DataError: A trajectory is malformed, or was not sampled in a session of `trainer`.
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
    """Return the training rows of trajectories, for `trainer.train`. Call this outside of a session.

    A trajectory has several rows if a turn does not continue the tokens of the previous turn. The actor computes the
    log-probabilities of a row by a forward pass if the rollout gives no usable ones: the row has trained tokens that
    the policy did not sample, or the temperature of the rollout differs from that of training.

    Args:
        trainer: The Trainer whose rollout session the agents used.
        trajectories: An AgentTrajectory or AgentTrajectoryTurn that an agent has returned, or a list of them.
        advantages: Advantage of each trajectory.
        rewards: Reward of each trajectory. None uses 0 for all.
        loss_mask_policy: Setting that selects which tokens are trained. None uses the setting of the last session.

    Returns:
        The rows of all trajectories, in the order of the trajectories, with advantages set.

    Raises:
        DataError: A trajectory is malformed, or was not sampled in a session of `trainer`, or the numbers of
            trajectories, advantages and rewards differ.
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
    score_missing(trainer, [row for _, trajectory in read for row in trajectory.rows], rows, trainer.sampling)
    return rows


def score_missing(
    trainer: Trainer, sampled: Sequence[TokenRow], rows: Sequence[TrainSequence], sampling: SamplingConfig
) -> list[TokenRow]:
    """Compute the log-probabilities of rows that have trained tokens without a usable log-probability.

    A log-probability is usable only if the policy sampled the token with the settings that training assumes.

    Args:
        trainer: The Trainer whose actor computes the log-probabilities.
        sampled: Rows of agents' trajectories.
        rows: The training rows made from `sampled`, in the same order. The function sets the `logprobs` of the rows
            that it scores.
        sampling: Sampling settings that training assumes.

    Returns:
        The rows of `sampled` that were scored. Empty if no row lacks log-probabilities.
    """
    places = [place for place, row in enumerate(sampled) if needs_scoring(row, sampling)]
    if not places:
        return []
    with trainer.clock.phase("recompute"):
        scored = trainer.score_logprobs("actor", [sampled[place].tokens for place in places], sampling=sampling)
    for place, logprobs in zip(places, scored, strict=True):
        rows[place].logprobs = np.where(sampled[place].trained, logprobs, 0.0)
    return [sampled[place] for place in places]


def _read(trainer: Trainer, trajectories: Any, policy: LossMaskPolicy | None) -> list[tuple[AgentItem, Trajectory]]:
    tokenizer = trainer.get_tokenizer()
    conversations = Conversations(tokenizer, parser_for_template(tokenizer.chat_template))
    policy, info = policy or trainer.loss_mask_policy, trainer.engine.info
    builder = RowBuilder(conversations, policy, info.vocab_size, context=info.context_len)
    return read_trajectories(trajectories, builder)


logger = logging.getLogger("areno")

_PREVIEW = 200  # characters of a prompt in a log line
_POLL_S = 0.4  # how often to look for lost workers
_LOGGED_FAILURES = 3


def sample_with_agents(
    setup: PolicySetup,
    agents: AgentPool,
    items: Sequence[PromptItem],
    gconfig: GenerationConfig,
    seed: int,
    on_progress: OnProgress,
    first_group: int,
    take: Callable[[Mapping[int, tuple[ScoredSample, RewardRecord | None]]], object],
    at_once: int | None = None,
) -> None:
    """Run the agents of all prompts, and pass each sample to `take` when its agent ends.

    Args:
        setup: Models, data, settings and outputs of the run.
        agents: The agent processes.
        items: The prompts.
        gconfig: Sampling settings. gconfig.n_samples agents run for each prompt.
        seed: Seed of the agents' requests.
        on_progress: Called with (finished outputs, rollout statistics) while agents run. The list of outputs is always
            empty.
        first_group: Number that identifies the samples of the first prompt. The following prompts get consecutive
            numbers.
        take: Called when an agent ends, with {index of the sample in the rollout: (sample, record for reward
            functions)}. The record is None if the agent failed.
        at_once: Number of prompts whose agents run at the same time. None runs all.

    Raises:
        ArenoError: No agent returned a trajectory that can be trained on.
    """
    trainer, config, polled = setup.trainer, setup.config, 0.0
    batch = AgentBatch.from_prompt_batch(Batch(items=list(items)), gconfig.n_samples)
    most = config.rollout.max_concurrent_rollouts or config.rows_per_step
    text = "agentic rollout batch prompts=%d n_samples=%d expected_requests=%d max_running_prompts=%d"
    logger.info(text, len(items), gconfig.n_samples, len(batch), most, extra=IN_FULL)
    policy = LossMaskPolicy(tool_results=config.agent.train_tool_results)

    def watch(n_done: int) -> None:
        nonlocal polled
        if time.monotonic() - polled > _POLL_S:  # not for each outcome, since a poll waits for the workers
            trainer.engine.poll(0.0)  # raises if a worker is lost; agents would only see failing requests
            polled = time.monotonic()
        on_progress([], trainer.engine.rollout_stats())

    with trainer.rollout_session(
        sampling_params=sampling_params(gconfig), loss_mask_policy=policy, timeout_s=config.agent.timeout_s, seed=seed
    ) as session:
        context = AgentContext(session.get_base_url(), session.api_key, session.proxy.session, config.agent.timeout_s)
        info = trainer.engine.info
        conversations = session.proxy.server.chat.conversations
        rows = RowBuilder(conversations, policy, info.vocab_size, context.session, info.context_len)
        every, size = list(batch), (at_once or len(items)) * gconfig.n_samples
        found: dict[int, ScoredSample] = {}
        agents.output.begin_step()

        def done(first: int, place: int, outcome: AgentOutcome) -> None:
            item = every[first + place]
            group = first_group + item.prompt_index
            sample, record = _sample(setup, items[item.prompt_index], item, outcome, rows, group)
            sample.spans += [] if outcome.span is None else [("agent", *outcome.span)]
            found[first + place] = sample
            take({first + place: (sample, record)})

        for first in range(0, len(every), size):
            session.proxy.prefetch(every[first : first + size])
            agents.run(every[first : first + size], context, watch, partial(done, first))
    _report([found[place] for place in sorted(found)])


def _sample(
    setup: PolicySetup,
    item: PromptItem,
    agent_item: AgentItem,
    outcome: AgentOutcome,
    rows: RowBuilder,
    group: int,
) -> tuple[ScoredSample, RewardRecord | None]:
    """Convert the outcome of an agent to (sample, record for reward functions).

    The record is None if the agent failed. `group` is the number that identifies the samples of the prompt.
    """

    def failed(status: Any, message: str) -> tuple[ScoredSample, None]:
        nothing = RolloutSequence(resp_tokens=[], resp_logprobs=[])
        verdict = RewardOutcome(None, status, message)
        return ScoredSample(item=item, sequence=nothing, completion="", outcome=verdict, group=group), None

    if outcome.status == "filtered":
        logger.warning("agentic trajectory filtered: %s; prompt=%r", outcome.message, item.prompt[:_PREVIEW])
    if outcome.turns is None:
        return failed(f"agent_{outcome.status}", outcome.message)
    try:
        trajectory = rows.trajectory(outcome.turns)
    except BadTrajectory as error:
        return failed("agent_error", str(error))
    record = reward_record(agent_item, trajectory, setup.tokenizer, item.solutions)
    versions = np.concatenate([row.versions[row.sampled] for row in trajectory.rows])
    sequence = RolloutSequence(
        resp_tokens=record.tokens,
        resp_logprobs=record.logprobs,
        finish_reason="length" if trajectory.turns[-1]["finish_reason"] == "length" else "stop",
        resp_versions=versions.tolist(),
    )
    # The prompt of the sample is the one that the agent sent to the model.
    asked = replace(item, tokens=record.prompt_tokens, text=setup.tokenizer.decode(record.prompt_tokens))
    text = record.completion if setup.config.gconfig.skip_special_tokens else record.rendered_completion
    waiting = RewardOutcome(0.0)
    sample = ScoredSample(
        item=asked, sequence=sequence, completion=text, outcome=waiting, group=group, trajectory=trajectory
    )
    return sample, record


def _report(samples: Sequence[ScoredSample]) -> None:
    """Log how many samples, tokens and tool calls a rollout has, and the first failures.

    Raises ArenoError if all samples failed.
    """
    done = [sample.trajectory for sample in samples if sample.trajectory is not None]
    logger.info(
        "agentic train batch built samples=%d tokens=%d messages=%d tool_calls=%d tool_results=%d",
        len(done),
        sum(len(row) for one in done for row in one.rows),
        sum(len(one.messages) for one in done),
        sum(len(one.tool_calls) for one in done),
        sum(len(one.tool_results) for one in done),
        extra=IN_FULL,
    )
    failed = [sample for sample in samples if not sample.is_done]
    for sample in [sample for sample in failed if sample.outcome.status != "agent_filtered"][:_LOGGED_FAILURES]:
        outcome = sample.outcome
        logger.warning("%s: %s; prompt=%r", outcome.status, outcome.message, sample.item.prompt[:_PREVIEW])
    if failed and not done:
        first = failed[0].outcome
        text = f"none of the {len(failed)} trajectories can be trained on; the first: {first.message}"
        key = "gconfig.max_tokens" if first.status == "agent_filtered" else "agent.fn"
        raise ArenoError(Problem(key, text))
