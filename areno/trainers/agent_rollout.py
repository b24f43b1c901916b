"""Rollouts with agents: user code that calls the model through the HTTP endpoint of a rollout session."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from areno.agents.proxy import SessionProxy
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, BadTrajectory, LossMaskPolicy, with_rewards
from areno.agents.turns_to_rows import RowBuilder, reward_record
from areno.config.agent import COMPLETION
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import GenerationConfig
from areno.engine.engine import Engine
from areno.engine.reports import RolloutStats
from areno.engine.requests import OnProgress
from areno.plan.plan import sampling_params
from areno.run.agents_across_steps import LiveAgents
from areno.run.group_selection import AgentSample, FirstCompleteGroups, Group
from areno.run.setup import PolicySetup
from areno.scoring.records import record_of_completion
from areno.server.returned_responses import TurnTokens
from areno.server.sample_sessions import SampleSession
from areno.tracking.console import RolloutProgress
from areno.tracking.run_log import IN_FULL
from areno.trainers.reward_sources import Scorer
from areno.trainers.rows import token_arrays
from areno.types import Batch, GenerationOutput, PromptItem, RewardOutcome, RewardRecord, RolloutSequence, ScoredSample

logger = logging.getLogger("areno")

_PREVIEW = 200  # characters of a prompt in a log line
_POLL_S = 0.4  # how often to poll for lost workers
_LOGGED_FAILURES = 3


Take = Callable[[Mapping[int, tuple[ScoredSample, RewardRecord | None]]], object]
"""Receives {index of a sample in the rollout: (sample, record for reward functions)}. A failed agent has no record."""


def sample_with_agents(
    setup: PolicySetup, scorer: Scorer, seed: int, on_progress: OnProgress, at_once: int | None, max_running: int | None
) -> None:
    """Run agents for the prompts of `scorer`, and score each sample when its agent ends.

    At most `at_once` prompts (None: all) are in progress at the same time, and at most `max_running` samples (None: as
    in training) are decoded. Progress is reported by `on_progress([], rollout statistics)`.
    """
    agents, items, gconfig = setup.agents, scorer.items, scorer.gconfig
    assert agents is not None
    every = agent_items(setup.config, items, gconfig)
    _log_begin(setup, len(items), gconfig.n_samples, len(every))
    watch = _AgentWatch(setup.trainer.engine, on_progress)
    with _serve_policy(setup, gconfig, seed, max_running) as server:
        context = partial(begin_agent, setup.config, gconfig, server)
        rows = _row_builder(setup, server)
        size = (at_once or len(items)) * gconfig.n_samples
        found: dict[int, ScoredSample] = {}
        agents.output.begin_step()

        def done(first: int, index: int, outcome: AgentOutcome) -> None:
            item = every[first + index]
            group = scorer.first_group + item.prompt_index
            session = server.end_agent(item)
            sample, record = _scored_agent_sample(setup, items[item.prompt_index], item, outcome, rows, group, session)
            _note_end(sample, outcome, session)
            place = item.prompt_index * gconfig.n_samples + item.sample_index
            found[place] = sample
            scorer.score_samples({place: (sample, record)})

        for first in range(0, len(every), size):
            server.prefetch(every[first : first + size])
            agents.run(every[first : first + size], context, lambda n_done: watch(), partial(done, first))
    _log_rollout([found[index] for index in sorted(found)])


def agent_items(
    config: PolicyExperimentConfig, items: Sequence[PromptItem], gconfig: GenerationConfig
) -> list[AgentItem]:
    found = AgentBatch.from_prompt_batch(Batch(items=list(items)), gconfig.n_samples)
    return [item for item in found if item.sample_index < config.n_samples_of(item.source, gconfig)]


def begin_agent(
    config: PolicyExperimentConfig, gconfig: GenerationConfig, server: SessionProxy, items: Sequence[AgentItem]
) -> AgentContext:
    source = items[0].source
    params = sampling_params(config.gconfig_of(source, gconfig)) if source else None
    return server.begin_agent(items, config.agent_of(source), params)


def _log_begin(setup: PolicySetup, n_prompts: int, n_samples: int, n_items: int) -> None:
    config = setup.config
    most = config.rollout.max_concurrent_rollouts or config.rows_per_step
    text = "agentic rollout batch prompts=%d n_samples=%d expected_requests=%d max_running_prompts=%d"
    logger.info(text, n_prompts, n_samples, n_items, most, extra=IN_FULL)


class _AgentWatch:
    """When called, reports the progress of agents and raises EngineError if a worker is lost."""

    def __init__(self, engine: Engine, on_progress: OnProgress):
        self._engine, self._on_progress, self._polled = engine, on_progress, 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._polled > _POLL_S:  # not for each outcome, since a poll waits for the workers
            self._engine.poll(0.0)  # raises if a worker is lost; agents would only see failing requests
            self._polled = time.monotonic()
        self._on_progress([], self._engine.rollout_stats())


@contextmanager
def _serve_policy(
    setup: PolicySetup, gconfig: GenerationConfig, seed: int, max_running: int | None
) -> Iterator[SessionProxy]:
    """Serve the policy inside the `with` block. Live agents (those that may run across steps) continue meanwhile."""
    if setup.live_agents is not None and setup.live_agents.is_open:
        with setup.live_agents.running(), setup.live_agents.serving(gconfig, seed) as server:
            yield server
        return
    with setup.trainer.rollout_session(
        sampling_params=sampling_params(gconfig),
        loss_mask_policy=_loss_mask_policy(setup),
        max_running_prompts=max_running,
        timeout_s=setup.config.agent.timeout_s,
        seed=seed,
    ) as session:
        yield session.proxy


def _loss_mask_policy(setup: PolicySetup) -> LossMaskPolicy:
    return LossMaskPolicy(tool_results=setup.config.agent.train_tool_results)


def _row_builder(setup: PolicySetup, server: SessionProxy) -> RowBuilder:
    info, agent = setup.trainer.engine.info, setup.config.agent
    return RowBuilder(
        server.server.chat.prompts,
        _loss_mask_policy(setup),
        info.vocab_size,
        server.session,
        info.context_len,
        agent.train_conversations,
        agent.export_style,
    )


def sample_live_agents(setup: PolicySetup, live: LiveAgents, choice: FirstCompleteGroups, take: Take) -> None:
    """Run agents until the groups that a step trains on are complete. The other agents stay in progress.

    `choice` chooses the groups. `take` receives finished samples as soon as it is certain that the step trains on their
    groups.
    """
    run, agents, n_samples = setup.run, setup.agents, setup.config.gconfig.n_samples
    assert agents is not None
    index_of_group, taken = {group: index for index, group in enumerate(choice.groups)}, list[ScoredSample]()
    reward, copies = run.progress.last_reward, setup.trainer.engine.spec.layout.dp_size
    with live.running(), RolloutProgress("rollout", choice.size, n_samples, copies, reward) as progress:

        def report(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
            progress(outputs, stats)
            run.poll_state_and_interrupts()

        watch = _AgentWatch(setup.trainer.engine, report)

        def pass_on(certain: Sequence[tuple[Group, AgentSample]]) -> None:
            found = {}
            for group, sample in certain:
                sample.scored.group = index_of_group[group]
                found[index_of_group[group] * n_samples + sample.sample] = (sample.scored, sample.record)
                taken.append(sample.scored)
            take(found)

        def poll() -> None:
            arrived, live.finished = live.finished, deque()
            pass_on(choice.record_outputs(arrived))
            watch()

        agents.output.begin_step()
        pass_on(choice.known)
        if new := [group for group in choice.groups if group.begun_at is None]:
            _start_agents(setup, live, new)
        poll()
        agents.run_until(lambda: not choice.min_missing_samples, poll)
        unfinished = set(run.progress.in_flight.groups) - set(choice.taken)
        live.stop_other_servers({group.batch for group in unfinished})
    if not setup.config.rollout.max_head_offpolicyness:  # after a run with a limit above 0; no agent is left
        run.during_steps.close()
    _log_rollout(sorted(taken, key=lambda sample: sample.group))


def _start_agents(setup: PolicySetup, live: LiveAgents, groups: Sequence[Group]) -> None:
    progress, n_samples = setup.run.progress, setup.config.gconfig.n_samples
    _log_begin(setup, len(groups), n_samples, sum(group.n_samples for group in groups))
    by_batch: dict[int, list[Group]] = {}
    for group in groups:
        group.begun_at = setup.run.step
        by_batch.setdefault(group.batch, []).append(group)
    for batch, new in by_batch.items():
        server = live.server_for(batch, progress.seed_of(batch))
        rows = _row_builder(setup, server)
        items = agent_items(setup.config, [group.item for group in new], setup.config.gconfig)
        groups_of = [new[item.prompt_index] for item in items]
        for item, group in zip(items, groups_of, strict=True):
            item.prompt_index = group.prompt_index  # as in a step that waits for all samples of its batch
        context = partial(begin_agent, setup.config, setup.config.gconfig, server)
        live.start_agents(server, items, context, partial(_agent_sample, setup, server, items, groups_of, rows))


def _agent_sample(
    setup: PolicySetup,
    server: SessionProxy,
    items: Sequence[AgentItem],
    groups: Sequence[Group],
    rows: RowBuilder,
    index: int,
    outcome: AgentOutcome,
) -> tuple[Group, AgentSample]:
    """Return (group, sample) of the agent of `items[index]`. The agent has ended with `outcome`."""
    item, group, session = items[index], groups[index], server.end_agent(items[index])
    sample, record = _scored_agent_sample(setup, group.item, item, outcome, rows, 0, session)
    _note_end(sample, outcome, session)
    return group, AgentSample(item.sample_index, sample, record)


def _scored_agent_sample(
    setup: PolicySetup,
    item: PromptItem,
    agent_item: AgentItem,
    outcome: AgentOutcome,
    rows: RowBuilder,
    group: int,
    session: SampleSession | None,
) -> tuple[ScoredSample, RewardRecord | None]:
    """Convert an agent's outcome to (sample, record for reward functions). The record is None if the agent failed."""

    def failed_sample(status: Any, message: str) -> tuple[ScoredSample, None]:
        nothing = RolloutSequence(resp_tokens=[], resp_logprobs=[])
        limit = (session.spent if session is not None else "") or "gconfig.max_tokens"
        verdict = RewardOutcome(None, status, message, key=limit if status == "agent_filtered" else "agent.fn")
        return ScoredSample(item=item, sequence=nothing, completion="", outcome=verdict, group=group), None

    if outcome.status == "filtered":
        logger.warning("agentic trajectory filtered: %s; prompt=%r", outcome.message, item.prompt[:_PREVIEW])
    if outcome.status != "ok":
        return failed_sample(f"agent_{outcome.status}", outcome.message)
    try:
        if setup.config.agent_of(item.source).fn == COMPLETION:
            return _completion_sample(setup, item, [] if session is None else session.turns, group)
        if outcome.turns is not None:
            trajectory = rows.build_trajectory(outcome.turns)
        else:
            turns, reported = ([], {}) if session is None else (session.turns, session.rewards)
            given = reported or None if outcome.turn_rewards is None else outcome.turn_rewards
            trajectory = rows.build_trajectory(with_rewards(turns, given))
            trajectory.reward = outcome.reward
            if session is not None:
                trajectory.requests = session.counts
                trajectory.reward = outcome.reward or session.reward
    except BadTrajectory as error:
        return failed_sample("agent_error", str(error))
    record = reward_record(agent_item, trajectory, setup.tokenizer, item.solutions)
    record.program = outcome.program
    versions = np.concatenate([row.versions[row.sampled] for row in trajectory.rows])
    sequence = RolloutSequence(
        resp_tokens=record.tokens,
        resp_logprobs=record.logprobs,
        finish_reason="length" if trajectory.finish_reason == "length" else "stop",
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


def _note_end(sample: ScoredSample, outcome: AgentOutcome, session: SampleSession | None) -> None:
    sample.over_budget = outcome.status == "timeout" or bool(session is not None and session.spent)
    sample.spans += [] if outcome.span is None else [("agent", *outcome.span)]


def _completion_sample(
    setup: PolicySetup, item: PromptItem, turns: Sequence[Mapping[str, Any]], group: int
) -> tuple[ScoredSample, RewardRecord]:
    """Return the sample of a source without an agent, as in a run without agents, and its record."""
    if len(turns) != 1:
        raise BadTrajectory(f"its session has recorded {len(turns)} completions")
    tokens: TurnTokens = turns[0]["tokens"]
    sequence = RolloutSequence(
        resp_tokens=tokens.sampled,
        resp_logprobs=tokens.logprobs,
        finish_reason="length" if turns[0]["finish_reason"] == "length" else "stop",
        resp_versions=tokens.versions,
    )
    text, rendered = (setup.tokenizer.decode(tokens.sampled, skip_special_tokens=skips) for skips in (True, False))
    text = text if setup.config.gconfig.skip_special_tokens else rendered
    arrays, waiting = token_arrays(item.tokens, sequence), RewardOutcome(0.0)
    sample = ScoredSample(item=item, sequence=sequence, completion=text, outcome=waiting, group=group, arrays=arrays)
    progress = setup.run.progress
    record = record_of_completion(item, tokens.sampled, tokens.logprobs, text, rendered, setup.run.step, progress.epoch)
    return sample, record


def _log_rollout(samples: Sequence[ScoredSample]) -> None:
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
