"""The rollout of a step that does not wait for its longest samples (rollout.max_head_offpolicyness above 0).

The step samples more prompts than it trains on. When enough groups are whole, it stops the other samples, which
continue in the rollout of the next step (`areno.run.in_flight`). A group is the samples of one prompt.
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
from areno.run.in_flight import Choice, Group
from areno.run.setup import PolicySetup
from areno.tracking.console import RolloutProgress, log_stage
from areno.trainers.score import Scorer
from areno.types import Batch, GenerationOutput, GenerationRequest, PromptItem, ScoredSample


def sample_ahead(setup: PolicySetup, batch: Batch[PromptItem]) -> tuple[list[ScoredSample], dict[str, float]]:
    """Sample until as many groups as the batch has prompts are whole, and score these groups.

    Args:
        setup: Models, data, settings and outputs of the run.
        batch: The prompts of the step. The groups that the step trains on may be those of other prompts.

    Returns:
        (samples of the groups to train on, rollout/* metrics of the staleness).
    """
    run, config = setup.run, setup.config
    in_flight, step = run.progress.in_flight, run.step
    choice = _begin(setup, batch)
    groups = in_flight.groups
    n_recomputed = sum(len(part.tokens) for group in groups for part in group.parked.values())
    with Scorer(setup, [group.item for group in groups], config.gconfig, 0) as scorer:
        with run.clock.phase("rollout"):
            log_stage("rollout_start")
            parked = _sample(setup, groups, choice, scorer)
            in_flight.end(step, choice.taken, parked)
            log_stage("rollout_end")
        with run.clock.phase("reward"):  # waits for the rewards that are still being computed
            samples = scorer.finish()
    return samples, _metrics(setup, samples, n_recomputed)


def _begin(setup: PolicySetup, batch: Batch[PromptItem]) -> Choice:
    """Admit the prompts of the step and the prompts ahead, and begin the choice of the groups of the step."""
    progress, rollout = setup.run.progress, setup.config.rollout
    batches = [batch, *progress.upcoming(rollout.max_head_offpolicyness)]
    n_left = len(batch) + setup.config.prompts_ahead
    for number, each in enumerate(batches, progress.step):
        progress.in_flight.admit(number, each.items[:n_left])
        n_left = max(0, n_left - len(each))
    return progress.in_flight.choose(progress.step, rollout.max_head_offpolicyness, [len(each) for each in batches])


def _sample(
    setup: PolicySetup, groups: Sequence[Group], choice: Choice, scorer: Scorer
) -> list[tuple[Group, GenerationOutput]]:
    """Sample the unfinished samples of the groups until the groups of the step are whole, and score these groups.

    Returns:
        Each stopped sample with its group.
    """
    trainer, run, config = setup.trainer, setup.run, setup.config
    params, places = sampling_params(config.gconfig), {group: place for place, group in enumerate(groups)}
    ids, requests, group_of = itertools.count(), [], {}
    for group in groups:
        seed = request_seed(run.progress.seed_of(group.batch), group.place)
        whole = GenerationRequest(request_id=0, prompt=list(map(int, group.item.tokens)), params=params, seed=seed)
        for request in requests_of_rest(whole, group.unfinished, ids):
            requests.append(request)
            group_of[request.request_id] = group
    history = run.progress.history
    reward = history["reward_mean"][-1] if "reward_mean" in history else None
    copies = trainer.engine.spec.layout.dp_size
    with RolloutProgress("rollout", choice.size, config.gconfig.n_samples, copies, reward) as progress:

        def take(taken: Sequence[Group], stats: list[RolloutStats]) -> int:
            outputs = [numbered(output, places[group]) for group in taken for output in group.outputs]
            progress(outputs, stats)
            scorer.take(outputs)
            run.pulse()
            return choice.missing

        def finished(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> int:
            return take(choice.add((group_of[output.request_id], output) for output in outputs), stats)

        if not take(choice.taken, [RolloutStats()] * copies):
            return []
        with trainer.rollout_session(sampling_params=params, proxy=False):
            parked = trainer.rollout_until(requests, finished)
    return [(group_of[output.request_id], output) for output in parked]


def numbered(output: GenerationOutput, request_id: int) -> GenerationOutput:
    """Return a copy of an output with another request id, which shares the numbers of its tokens."""
    output = copy.copy(output)
    output.request_id = request_id
    return output


def _metrics(setup: PolicySetup, samples: Sequence[ScoredSample], n_recomputed: int) -> dict[str, float]:
    """Return the metrics of the step's staleness.

    Args:
        setup: Models, data, settings and outputs of the run.
        samples: The samples that the step trains on.
        n_recomputed: Number of completion tokens whose keys and values were computed again.
    """
    version = setup.trainer.engine.weights_version
    versions = [np.asarray(vars(sample.sequence)["resp_versions"]) for sample in samples]
    gaps = [version - int(each.min(initial=version)) for each in versions]
    n_tokens = sum(map(len, versions))
    waiting = [part for group in setup.run.progress.in_flight.groups for part in group.parked.values() if part.tokens]
    return {
        "rollout/oldest_gap": max(gaps),
        "rollout/newest_gap": min(gaps),
        "rollout/versions_per_sample": float(np.mean([len(np.unique(each)) for each in versions])),
        "rollout/carried_tokens": sum(int((each < version).sum()) for each in versions) / max(1, n_tokens),
        "rollout/recomputed_tokens": n_recomputed / max(1, n_tokens),
        "rollout/parked_samples": len(waiting),
        "rollout/parked_len_mean": float(np.mean([len(part.tokens) for part in waiting])) if waiting else 0.0,
    }
