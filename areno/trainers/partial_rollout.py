"""The rollout of a step that does not wait for its longest samples (rollout.prompts_ahead).

A group is the samples of one prompt. The step samples more prompts than it trains on. When enough groups are complete,
it stops the other samples. They continue in the rollout of the next step, or their prompts are sampled again later
(`areno.run.groups_in_flight`). With dynamic sampling, groups with equal rewards are replaced during the rollout
(`areno.run.group_selection.Admission`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from areno.api.session import request_seed
from areno.engine.reports import RolloutStats
from areno.engine.requests import continuation_requests
from areno.plan.plan import sampling_params
from areno.run.group_selection import DECISION_STEPS, Admission, FirstCompleteGroups, Group, n_tokens
from areno.run.setup import PolicySetup
from areno.tracking.console import RolloutProgress, log_stage
from areno.trainers.agent_rollout import sample_live_agents
from areno.trainers.dynamic_sampling import choose_groups_with_signal, n_groups, warn_all_equal
from areno.trainers.forward_passes import StepScores
from areno.trainers.reward_sources import Scorer
from areno.types import Batch, GenerationOutput, GenerationRequest, PromptItem, ScoredSample


def sample_ahead(
    setup: PolicySetup, batch: Batch[PromptItem], scores: StepScores
) -> tuple[list[ScoredSample], np.ndarray, dict[str, float]]:
    """Sample until as many groups are complete as the batch has prompts, and score these groups.

    Returns (samples of the complete groups, (B,) bool mask of the groups to train on, rollout/* metrics). The step may
    train on prompts of other batches. With rollout.dynamic_sampling, groups whose rewards are all equal are not
    trained. Without dynamic sampling, `scores` are computed while rewards are computed.
    """
    run, config = setup.run, setup.config
    in_flight, step = run.progress.in_flight, run.step
    n_ahead, upcoming, drops = config.prompts_ahead, run.progress.upcoming_batches, config.rollout.dynamic_sampling
    number = run.progress.batches_taken
    choice = in_flight.begin_rollout(step, n_ahead, batch.items, lambda n: [each.items for each in upcoming(n)], number)
    before = [(group, part) for group in choice.groups for part in group.parked.values()]
    with Scorer(setup, [group.item for group in choice.groups], config.gconfig, 0) as scorer:
        with run.clock.phase("rollout"):
            log_stage("rollout_start")
            if setup.live_agents is not None:
                parked = []
                sample_live_agents(setup, setup.live_agents, choice, scorer.score_samples)
            else:
                parked = _sample_and_score(setup, choice, scorer)
            n_thrown_away = in_flight.end_rollout(step, choice, parked)
            log_stage("rollout_end")
        if not drops and scorer.is_waiting and setup.agents is None:
            scores.compute_early(scorer.samples)
        with run.clock.phase("reward"):  # waits for the rewards that are still being computed
            samples = scorer.finish()
    keep, scalars = np.ones(len(samples), dtype=bool), dict[str, float]()
    if drops:
        keep, dropped = choose_groups_with_signal(samples, n_groups(samples))
        scalars = {"rollout/sampling_rounds": int(len(batch) > 0), "rollout/dropped_groups": dropped}
    if setup.live_agents is not None:
        run.tracer.add_sessions(step, "rollout", samples)
        n_recomputed = setup.live_agents.pop_recomputed_tokens()
    else:
        n_recomputed = _n_recomputed(before)
    scalars |= _staleness_metrics(setup, samples, keep, choice.groups, n_recomputed, n_thrown_away)
    return samples, keep, scalars


def _sample_and_score(
    setup: PolicySetup, choice: FirstCompleteGroups, scorer: Scorer
) -> list[tuple[Group, GenerationOutput]]:
    """Sample and score until the groups of the step are complete. Return (group, output) of each stopped sample."""
    trainer, run, config = setup.trainer, setup.run, setup.config
    params, index_of_group = (
        sampling_params(config.gconfig),
        {group: index for index, group in enumerate(choice.groups)},
    )
    requests, group_of = _remaining_requests(setup, choice.groups, itertools.count())
    reward, copies = run.progress.last_reward, trainer.engine.spec.layout.dp_size
    with RolloutProgress("rollout", choice.size, config.gconfig.n_samples, copies, reward) as progress:

        def take(certain: Sequence[tuple[Group, GenerationOutput]], stats: list[RolloutStats]) -> int:
            outputs = [with_request_id(output, index_of_group[group]) for group, output in certain]
            progress(outputs, stats)
            scorer.score_outputs(outputs)
            run.poll_state_and_interrupts()
            return choice.min_missing_samples

        def finished(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> tuple[int, list[GenerationRequest]]:
            return take(choice.record_outputs((group_of[output.request_id], output) for output in outputs), stats), []

        if not take(choice.known, [RolloutStats()] * copies):
            return []
        with trainer.rollout_session(sampling_params=params, proxy=False):
            parked = trainer.rollout_until(requests, finished)
    return [(group_of[output.request_id], output) for output in parked]


def run_dynamic_sampling(
    setup: PolicySetup, batch: Batch[PromptItem]
) -> tuple[list[ScoredSample], np.ndarray, dict[str, float], list[Batch[PromptItem]]]:
    """Sample until the rewards differ in enough groups. Groups with equal rewards are dropped and replaced (DAPO).

    Prompts begin in the order of the data. A group whose rewards differ is trained in this step or, if the step is
    full, in a later step. If the step may take no further batch (rollout.max_sampling_rounds, or the end of the data),
    it may train on fewer groups. If all groups are dropped, the step trains on the first dropped groups that have
    rewards.

    Returns (samples of all groups that are trained or dropped, (B,) bool mask of the groups to train on, rollout/*
    metrics, batches that the step has taken).
    """
    run, config = setup.run, setup.config
    in_flight, step, size = run.progress.in_flight, run.step, config.train_dataset.batch_size
    batches = [batch]

    def next_prompts() -> tuple[int, Sequence[PromptItem]] | None:
        if len(batches) >= config.rollout.max_sampling_rounds or (taken := run.progress.next_batch()) is None:
            return None
        batches.append(taken)
        return run.progress.batches_taken, taken.items

    in_flight.admit(run.progress.batches_taken, batch.items)
    at_once = config.rollout.max_concurrent_rollouts or size * config.gconfig.n_samples
    admission = in_flight.begin_dynamic_sampling(step, size, size + config.prompts_ahead, at_once, next_prompts)
    with Scorer(setup, [], config.gconfig, 0) as scorer:
        with run.clock.phase("rollout"):
            log_stage("rollout_start")
            replacing = _DynamicSamplingScheduler(setup, scorer, admission)
            reward, copies = run.progress.last_reward, setup.trainer.engine.spec.layout.dp_size
            with RolloutProgress("rollout", size, config.gconfig.n_samples, copies, reward) as replacing.display:
                params = sampling_params(config.gconfig)
                with setup.trainer.rollout_session(sampling_params=params, proxy=False):
                    parked = setup.trainer.rollout_until([], replacing, DECISION_STEPS)
            if not admission.taken:
                admission.keep_dropped(replacing.has_reward)
                if admission.taken:
                    warn_all_equal()
            in_flight.end_rollout(step, admission, [(replacing.group_of[each.request_id], each) for each in parked])
            log_stage("rollout_end")
        with run.clock.phase("reward"):  # waits for the rewards that are still being computed
            samples = scorer.finish()
    taken, gone = set(admission.taken), set(admission.groups_no_longer_in_flight)
    samples = [sample for sample in samples if admission.groups[sample.group] in gone]
    keep = np.array([admission.groups[sample.group] in taken for sample in samples])
    scalars = _staleness_metrics(setup, samples, keep, admission.groups, _n_recomputed(replacing.before), 0)
    n_rounds = sum(len(each) > 0 for each in batches)  # the batch of a step is empty after the end of the data
    scalars |= {"rollout/sampling_rounds": n_rounds, "rollout/dropped_groups": len(admission.dropped)}
    return samples, keep, scalars, batches


class _DynamicSamplingScheduler:
    """A RolloutSteering that starts prompts and scores groups during a rollout, as its Admission decides.

    `before` has (group, output before this step) of each sample that continues from an earlier step.
    """

    def __init__(self, setup: PolicySetup, scorer: Scorer, admission: Admission):
        self._setup, self._scorer, self._admission = setup, scorer, admission
        self._places: dict[Group, int] = {}
        self._ids = itertools.count()
        self.display: RolloutProgress
        self.group_of: dict[int, Group] = {}
        self.before: list[tuple[Group, GenerationOutput]] = []

    def __call__(
        self, outputs: list[GenerationOutput], stats: list[RolloutStats]
    ) -> tuple[int, Sequence[GenerationRequest]]:
        """Score finished samples. Return (number of unfinished samples, new requests).

        The number 0 ends the rollout.
        """
        found = [(self.group_of[output.request_id], output) for output in outputs]
        self._score_outputs(found)
        self.display([with_request_id(output, self._places[group]) for group, output in found], stats)
        self._setup.run.poll_state_and_interrupts()
        requests: list[GenerationRequest] = []
        n_open = self._admission.decide(
            found, lambda groups: requests.extend(self._start_groups(groups)), self._is_uniform
        )
        return n_open, requests

    def _is_uniform(self, group: Group) -> bool:
        return len(set(self._scorer.wait_for_rewards(self._places[group]))) < 2

    def has_reward(self, group: Group) -> bool:
        return bool(self._scorer.wait_for_rewards(self._places[group]))

    def _start_groups(self, groups: Sequence[Group]) -> list[GenerationRequest]:
        self._scorer.add_prompts([group.item for group in groups])
        for group in groups:
            self._places[group] = len(self._places)
            self.before += [(group, part) for part in group.parked.values()]
            self._score_outputs((group, output) for output in group.outputs)
        requests, group_of = _remaining_requests(self._setup, groups, self._ids)
        self.group_of |= group_of
        return requests

    def _score_outputs(self, outputs: Iterable[tuple[Group, GenerationOutput]]) -> None:
        self._scorer.score_outputs([with_request_id(output, self._places[group]) for group, output in outputs])


def _remaining_requests(
    setup: PolicySetup, groups: Sequence[Group], ids: Iterator[int]
) -> tuple[list[GenerationRequest], dict[int, Group]]:
    requests, group_of = [], {}
    for group in groups:
        gconfig = setup.config.gconfig_of(group.item.source)
        params = sampling_params(gconfig, setup.config.actor.n_recorded_tokens)
        seed = request_seed(setup.run.progress.seed_of(group.batch), group.prompt_index)
        whole = GenerationRequest(request_id=0, prompt=list(map(int, group.item.tokens)), params=params, seed=seed)
        for request in continuation_requests(whole, group.unfinished_outputs, ids):
            requests.append(request)
            group_of[request.request_id] = group
    return requests, group_of


def with_request_id(output: GenerationOutput, request_id: int) -> GenerationOutput:
    output = copy.copy(output)
    output.request_id = request_id
    return output


def _n_recomputed(before: Iterable[tuple[Group, GenerationOutput]]) -> int:
    """Count the tokens of earlier rollouts whose KV was computed again because their samples continued."""
    return sum(n_tokens(part) for group, part in before if n_tokens(group.latest_output(part.sample)) > n_tokens(part))


def _staleness_metrics(
    setup: PolicySetup,
    samples: Sequence[ScoredSample],
    keep: np.ndarray,
    groups: Sequence[Group],
    n_recomputed: int,
    n_thrown_away: int,
) -> dict[str, float]:
    """Return the metrics of staleness or, with max_head_offpolicyness=0, those of postponed prompts."""
    samples = [sample for sample, is_kept in zip(samples, keep, strict=True) if is_kept]
    version, in_flight = setup.trainer.engine.weights_version, setup.run.progress.in_flight
    versions = [np.asarray(vars(sample.sequence)["resp_versions"]) for sample in samples]
    versions = [each for each in versions if len(each)]  # failed agents have no tokens
    gaps = [version - int(each.min()) for each in versions]
    n_tokens = sum(map(len, versions))
    if not setup.config.rollout.max_head_offpolicyness:
        n_postponed = sum(group.is_postponed for group in in_flight.groups)
        return {
            "rollout/postponed_prompts": n_postponed,
            "rollout/discarded_tokens": n_thrown_away / max(1, n_tokens),
        }
    trained = dict.fromkeys(groups[sample.group] for sample in samples)
    begun = in_flight.stalest_lengths(setup.run.step, trained)
    parked = [len(part.tokens) for group in in_flight.groups for part in group.parked.values() if part.tokens]
    if setup.live_agents is not None:
        parked = setup.live_agents.parked
    return {
        "rollout/oldest_gap": max(gaps, default=0),
        "rollout/newest_gap": min(gaps, default=0),
        "rollout/versions_per_sample": sum(len(np.unique(each)) for each in versions) / max(1, len(versions)),
        "rollout/carried_tokens": sum(int((each < version).sum()) for each in versions) / max(1, n_tokens),
        "rollout/recomputed_tokens": n_recomputed / max(1, n_tokens),
        "rollout/parked_samples": len(parked),
        "rollout/parked_len_mean": float(np.mean(parked)) if parked else 0.0,
        **_length_metrics("trained_len", [sample.sequence.n_tokens for sample in samples]),
        **_length_metrics("begun_len", begun),
    }


def _length_metrics(name: str, lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    found = {"mean": np.mean(lengths), "p90": np.percentile(lengths, 90), "max": np.max(lengths)}
    return {f"rollout/{name}_{which}": float(value) for which, value in found.items()}
