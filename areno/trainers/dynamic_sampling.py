"""Dynamic sampling (DAPO, arXiv 2503.14476): the choice of groups, and a rollout whose rounds overlap.

A group is the samples of one prompt. Groups whose rewards are all equal are dropped. A round samples a batch of
prompts, and a step may need several rounds. A further round begins as soon as the dropped groups show that the step
needs it, while the samples of earlier rounds are still decoded. Overlapping does not change the samples: a dropped
group stays dropped, so the step needs the same rounds whenever they begin.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from areno.api.metrics import rewards_by_group
from areno.api.session import request_seed
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.engine.reports import RolloutStats
from areno.plan.plan import sampling_params
from areno.run.group_selection import DECISION_STEPS
from areno.run.setup import PolicySetup
from areno.tracking.console import RolloutProgress, log_stage
from areno.trainers.reward_sources import Scorer
from areno.types import Batch, GenerationOutput, GenerationRequest, PromptItem, ScoredSample

logger = logging.getLogger("areno")


def choose_groups_with_signal(samples: Sequence[ScoredSample], size: int) -> tuple[np.ndarray, int]:
    """Choose the first `size` groups whose rewards differ.

    Return ((B,) bool mask of their samples, number of other groups). If there are none, choose groups with equal
    rewards, and warn. Groups without any reward are never chosen.
    """
    keep = first_groups(samples, has_signal(samples), size)
    dropped = n_groups(samples) - n_groups(samples, keep)
    if not keep.any():
        keep = first_groups(samples, np.array([sample.outcome.value is not None for sample in samples]), size)
        if keep.any():
            warn_all_equal()
    return keep, dropped


def n_groups(samples: Sequence[ScoredSample], among: np.ndarray | None = None) -> int:
    """Count the groups that have a sample in the (B,) bool mask `among`. None counts all groups."""
    groups = np.array([sample.group for sample in samples])
    return len(np.unique(groups if among is None else groups[among]))


def has_signal(samples: Sequence[ScoredSample]) -> np.ndarray:
    """Return a (B,) bool mask, True for samples of groups whose rewards differ (DAPO, arXiv 2503.14476 eq. 11)."""
    rewards = rewards_by_group(samples)
    return np.array([len(set(rewards.get(sample.group, ()))) > 1 for sample in samples])


def first_groups(samples: Sequence[ScoredSample], among: np.ndarray, n: int) -> np.ndarray:
    """Return a copy of the (B,) bool mask `among` in which only the first `n` groups are still True."""
    groups = np.array([sample.group for sample in samples])
    return among & np.isin(groups, np.unique(groups[among])[:n])


def warn_all_equal() -> None:
    logger.warning("all groups of this step have equal rewards: there is nothing to prefer in them")


def prompt_requests(
    config: PolicyExperimentConfig, items: Sequence[PromptItem], seed: int, first: int = 0
) -> list[GenerationRequest]:
    """Return a request for each prompt, with the sampling settings of its source. Their ids begin at `first`."""
    return [
        GenerationRequest(
            request_id=first + index,
            prompt=list(map(int, item.tokens)),
            n_samples=config.n_samples_of(item.source),
            params=sampling_params(config.gconfig_of(item.source), config.actor.n_recorded_tokens),
            seed=request_seed(seed, index),
        )
        for index, item in enumerate(items)
    ]


def can_overlap(setup: PolicySetup) -> bool:
    """Return whether rewards are known during the rollout, so that rounds can overlap.

    Rewards of a model, such as a judge, are complete only after the rollout, and agents decide themselves when they ask
    for samples.
    """
    return setup.agents is None and not setup.config.reward.has_model and setup.rewards is not None


def sample_rounds(
    setup: PolicySetup, batch: Batch[PromptItem], most: int
) -> tuple[list[ScoredSample], list[Batch[PromptItem]]]:
    """Sample up to `most` rounds of prompts until the rewards differ in enough groups, and score all samples.

    Returns (samples in the order of their prompts, batch of each round). With `engine.deterministic`, the decision for
    a further round does not depend on the clock: the decision waits for the rewards of all groups that were complete at
    the previous decision, and ignores later groups.
    """
    config, run = setup.config, setup.run
    with Scorer(setup, [], config.gconfig, 0) as scorer:
        with run.clock.phase("rollout"):
            log_stage("rollout_start")
            rounds = _RoundScheduler(setup, scorer, batch, most)
            reward, copies = run.progress.last_reward, setup.trainer.engine.spec.layout.dp_size
            with RolloutProgress("rollout", len(batch), config.gconfig.n_samples, copies, reward) as rounds.display:
                params = sampling_params(config.gconfig)
                with setup.trainer.rollout_session(sampling_params=params, proxy=False):
                    setup.trainer.rollout_until(rounds.requests(batch), rounds, DECISION_STEPS)
            log_stage("rollout_end")
        with run.clock.phase("reward"):  # waits for the rewards that are still being computed
            return scorer.finish(), rounds.batches


class _RoundScheduler:
    """A RolloutSteering that decides which rounds a step needs."""

    def __init__(self, setup: PolicySetup, scorer: Scorer, batch: Batch[PromptItem], most: int):
        self._setup, self._scorer, self._size, self._most = setup, scorer, len(batch), most
        self.batches: list[Batch[PromptItem]] = []
        self.display: RolloutProgress
        self._missing: list[int] = []  # unfinished samples of each group
        self._unknown: list[int] = []  # whole groups whose rewards are not known
        self._n_uniform = 0  # groups whose rewards are known to be equal

    def requests(self, batch: Batch[PromptItem]) -> list[GenerationRequest]:
        config = self._setup.config
        seed, first = self._setup.run.progress.seed + (len(self.batches) << 40), len(self._missing)
        self._scorer.add_prompts(batch.items)
        self.batches.append(batch)
        self._missing += [config.n_samples_of(item.source) for item in batch.items]
        return prompt_requests(self._setup.config, batch.items, seed, first)

    def __call__(
        self, outputs: list[GenerationOutput], stats: list[RolloutStats]
    ) -> tuple[int, Sequence[GenerationRequest]]:
        """Score finished samples, and return (number of unfinished samples, requests of further rounds)."""
        self.display(outputs, stats)
        self._scorer.score_outputs(outputs)
        self._setup.run.poll_state_and_interrupts()
        before = len(self._unknown)
        for output in outputs:
            self._missing[output.request_id] -= 1
            if not self._missing[output.request_id]:
                self._unknown.append(output.request_id)
        for group in self._groups_to_compare(before):
            self._unknown.remove(group)
            self._n_uniform += len(set(self._scorer.wait_for_rewards(group))) < 2
        more: list[GenerationRequest] = []
        while len(self._missing) - self._n_uniform < self._size and len(self.batches) < self._most:
            if (batch := self._setup.run.progress.next_batch()) is None:
                break
            more += self.requests(batch)
        return sum(self._missing), more

    def _groups_to_compare(self, before: int) -> list[int]:
        """Return the complete groups whose rewards are to be compared now.

        The first `before` groups of `_unknown` were already complete at the previous call.
        """
        if len(self.batches) >= self._most:
            return []
        if not any(self._missing):  # nothing is left to decode meanwhile
            return list(self._unknown)
        if self._setup.config.engine.deterministic:
            return self._unknown[:before]
        return [group for group in self._unknown if self._scorer.has_rewards_of(group)]
