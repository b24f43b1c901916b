"""The rollout of a step that does not wait for its longest samples (rollout.prompts_ahead).

The step samples more prompts than it trains on. When enough groups are whole, it stops the other samples. They continue
in the rollout of the next step, or their prompts are sampled again later (`areno.run.in_flight`). A group is the
samples of one prompt.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import numpy as np

from areno.api.session import request_seed
from areno.engine.requests import requests_of_rest
from areno.engine.spec import RolloutStats
from areno.plan.plan import sampling_params
from areno.run.in_flight import Choice, Group, n_tokens
from areno.run.setup import PolicySetup
from areno.tracking.console import RolloutProgress, log_stage
from areno.trainers.agents import sample_live_agents
from areno.trainers.score import Scorer
from areno.trainers.scores import StepScores
from areno.types import Batch, GenerationOutput, GenerationRequest, PromptItem, ScoredSample


def sample_ahead(
    setup: PolicySetup, batch: Batch[PromptItem], scores: StepScores
) -> tuple[list[ScoredSample], dict[str, float]]:
    """Sample until as many groups as the batch has prompts are whole, and score these groups.

    Args:
        setup: Models, data, settings and outputs of the run.
        batch: The prompts of the step. The step may train on prompts of other batches instead.
        scores: Scores of the rows to train on, which are computed while rewards are computed.

    Returns:
        (samples of the groups to train on, rollout/* metrics of staleness or of postponed prompts).
    """
    run, config = setup.run, setup.config
    in_flight, step = run.progress.in_flight, run.step
    n_ahead, upcoming = config.prompts_ahead, run.progress.upcoming
    choice = in_flight.begin(step, n_ahead, batch.items, lambda n: [each.items for each in upcoming(n)])
    before = [(group, part) for group in choice.groups for part in group.parked.values()]
    with Scorer(setup, [group.item for group in choice.groups], config.gconfig, 0) as scorer:
        with run.clock.phase("rollout"):
            log_stage("rollout_start")
            if setup.live_agents is not None:
                parked = []
                sample_live_agents(setup, setup.live_agents, choice, scorer.add)
            else:
                parked = _sample(setup, choice, scorer)
            n_thrown_away = in_flight.end(step, choice, parked)
            log_stage("rollout_end")
        if scorer.is_waiting and setup.agents is None:
            scores.compute_early(scorer.samples)
        with run.clock.phase("reward"):  # waits for the rewards that are still being computed
            samples = scorer.finish()
    if setup.live_agents is not None:
        run.tracer.add_sessions(step, "rollout", samples)
        return samples, _metrics(setup, samples, setup.live_agents.take_recomputed(), 0)
    # The samples that have continued, whose keys and values were computed again.
    went_on = [part for group, part in before if n_tokens(group.latest(part.sample)) > n_tokens(part)]
    return samples, _metrics(setup, samples, sum(map(n_tokens, went_on)), n_thrown_away)


def _sample(setup: PolicySetup, choice: Choice, scorer: Scorer) -> list[tuple[Group, GenerationOutput]]:
    """Sample the unfinished samples of the chosen groups until the groups of the step are whole, and score these.

    Returns:
        Each stopped sample with its group.
    """
    trainer, run, config = setup.trainer, setup.run, setup.config
    params, places = sampling_params(config.gconfig), {group: place for place, group in enumerate(choice.groups)}
    ids, requests, group_of = itertools.count(), [], {}
    for group in choice.groups:
        seed = request_seed(run.progress.seed_of(group.batch), group.place)
        whole = GenerationRequest(request_id=0, prompt=list(map(int, group.item.tokens)), params=params, seed=seed)
        for request in requests_of_rest(whole, group.unfinished, ids):
            requests.append(request)
            group_of[request.request_id] = group
    reward, copies = run.progress.last_reward, trainer.engine.spec.layout.dp_size
    with RolloutProgress("rollout", choice.size, config.gconfig.n_samples, copies, reward) as progress:

        def take(certain: Sequence[tuple[Group, GenerationOutput]], stats: list[RolloutStats]) -> int:
            outputs = [numbered(output, places[group]) for group, output in certain]
            progress(outputs, stats)
            scorer.take(outputs)
            run.pulse()
            return choice.missing

        def finished(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> tuple[int, list[GenerationRequest]]:
            return take(choice.add((group_of[output.request_id], output) for output in outputs), stats), []

        if not take(choice.known, [RolloutStats()] * copies):
            return []
        with trainer.rollout_session(sampling_params=params, proxy=False):
            parked = trainer.rollout_until(requests, finished)
    return [(group_of[output.request_id], output) for output in parked]


def numbered(output: GenerationOutput, request_id: int) -> GenerationOutput:
    """Return a copy of an output with another request id, which shares the numbers of its tokens."""
    output = copy.copy(output)
    output.request_id = request_id
    return output


def _metrics(
    setup: PolicySetup, samples: Sequence[ScoredSample], n_recomputed: int, n_thrown_away: int
) -> dict[str, float]:
    """Return the metrics of the step's staleness, or of its postponed prompts.

    Args:
        setup: Models, data, settings and outputs of the run.
        samples: The samples that the step trains on.
        n_recomputed: Number of completion tokens whose keys and values were computed again.
        n_thrown_away: Number of sampled tokens that are thrown away.
    """
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
    parked = [len(part.tokens) for group in in_flight.groups for part in group.parked.values() if part.tokens]
    if setup.live_agents is not None:
        parked = setup.live_agents.parked
    return {
        "rollout/oldest_gap": max(gaps),
        "rollout/newest_gap": min(gaps),
        "rollout/versions_per_sample": float(np.mean([len(np.unique(each)) for each in versions])),
        "rollout/carried_tokens": sum(int((each < version).sum()) for each in versions) / max(1, n_tokens),
        "rollout/recomputed_tokens": n_recomputed / max(1, n_tokens),
        "rollout/parked_samples": len(parked),
        "rollout/parked_len_mean": float(np.mean(parked)) if parked else 0.0,
    }
