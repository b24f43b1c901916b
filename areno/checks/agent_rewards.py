"""Checks of the reward of agents: the user's functions on the episodes of two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from areno.agents.trajectories import AgentItem
from areno.agents.turns_to_rows import reward_record
from areno.checks.inputs.findings import Finding, NotChecked, examples, green, not_checked, red
from areno.checks.inputs.subject import Subject
from areno.checks.steps.two_steps import two_steps
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.scoring.pool import RewardPool
from areno.types import RewardOutcome, RewardRecord, ScoredSample


def rewards_of_episodes(subject: Subject) -> Iterator[Finding]:
    """Score episodes of the small model twice, in other processes and in another order."""
    config = subject.config
    assert isinstance(config, PolicyExperimentConfig)
    if config.reward.fn is None and not any(config.train_dataset.reward_by_source.values()):
        raise NotChecked("no function gives the reward: agents return it")
    if (found := two_steps(subject)) is None:
        return
    samples = [sample for of_step in found.run.samples.values() for sample in of_step if sample.trajectory is not None]
    with pool_of_one(config) as pool:
        records = [_record(subject, sample) for sample in samples if pool.scores(sample.item.source)]
    if not records:
        raise NotChecked("no agent has ended with an episode that a function scores")
    first, seconds = score(config, records)
    again = score(config, records[::-1])[0][::-1]
    n = len(records)
    lost = [outcome for outcome in first if outcome.value is None]
    if lost:
        details = [f"{outcome.status}: {outcome.message.strip().splitlines()[-1]}" for outcome in lost]
        yield red("reward-failures", f"{len(lost)} of {n} episodes have no reward", examples(details))
    else:
        yield green("reward-failures", f"each of {n} episodes has a reward")
    differ = [(one.value, other.value) for one, other in zip(first, again, strict=True) if one.value != other.value]
    if differ:
        text = f"{len(differ)} of {n} episodes get another reward in a second process, in another order"
        yield red("reward-repeatable", text, examples(f"{one} and {other}" for one, other in differ))
    else:
        yield green("reward-repeatable", f"two processes give each of {n} episodes the same reward")
    values = {outcome.value for outcome in first if outcome.value is not None}
    if len(values) > 1:
        yield green("reward-signal", f"rewards go from {min(values):g} to {max(values):g}")
    elif values:
        yield not_checked("reward-signal", f"each episode of the model here gets {values.pop():g}, which may be right")
    yield green("reward-speed", f"{1000 * seconds / n:.2g} ms for an episode")


def _record(subject: Subject, sample: ScoredSample) -> RewardRecord:
    item = sample.item
    assert sample.trajectory is not None
    asked = AgentItem(item.prompt, item.record, item.tokens, messages=item.messages, source=item.source)
    return reward_record(asked, sample.trajectory, subject.tokenizer, item.solutions)


def pool_of_one(config: PolicyExperimentConfig) -> RewardPool:
    section = replace(config.reward, workers=1)
    if section.weights is not None and not any(section.weights):  # the functions are only recorded
        section = replace(section, weights=None)
    return RewardPool(section, sources=config.train_dataset.reward_by_source)


def score(config: PolicyExperimentConfig, records: Sequence[RewardRecord]) -> tuple[list[RewardOutcome], float]:
    """Score records in a process of their own. Return the outcomes and the seconds that it took."""
    with pool_of_one(config) as pool:
        pool.wait_ready()
        started = time.monotonic()
        return pool.compute_outcomes(records), time.monotonic() - started
