"""The rollout of a step: sampling and scoring of prompts, dynamic sampling, metrics and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.api.metrics import evaluation_metrics, rewards_by_group, rollout_metrics
from areno.config.models import KLConfig, PolicyConfig
from areno.config.rollout import GenerationConfig
from areno.data.curriculum import GroupResult
from areno.data.loader import BatchLoader
from areno.data.mixed_loader import MixedLoader
from areno.engine.reports import DraftCounts, RolloutStats
from areno.loss_fns.kl import kl_array
from areno.plan.lr_schedule import n_updates_by_role
from areno.plan.plan import sampling_params
from areno.run.flight_recorder import KeptRollout
from areno.run.setup import PolicySetup
from areno.scoring.pool import no_reward_error
from areno.tracking.accuracy import without_accuracy_metrics
from areno.tracking.console import RolloutProgress, log_stage
from areno.tracking.recorded_samples import samples_from_tree
from areno.trainers.agent_rollout import sample_with_agents
from areno.trainers.dynamic_sampling import (
    can_overlap,
    choose_groups_with_signal,
    has_signal,
    n_groups,
    prompt_requests,
    sample_rounds,
)
from areno.trainers.forward_passes import StepScores
from areno.trainers.partial_rollout import run_dynamic_sampling, sample_ahead
from areno.trainers.reward_sources import Scorer
from areno.trainers.rows import join_rows, n_trained, rows_per_sample, trained
from areno.types import Batch, GenerationOutput, GenerationRequest, PromptItem, ScoredSample, TrainSequence

logger = logging.getLogger("areno")


def log_rollout(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> None:
    run, samples = setup.run, rollout.samples
    run.outputs.watch_ages(setup.trainer.engine.weights_version, max((row.staleness for row in rows), default=0))
    advantages_B = np.zeros(len(samples))
    by_sample = join_rows(rows, rollout.rows_per_kept_sample)
    # Tokens that are not trained have advantage 0. So all tokens are summed, which is faster than trained() and mean().
    advantages_B[rollout.keep] = [
        np.add.reduce(np.asarray(row.advantages)) / max(1, n_trained(row)) for row in by_sample
    ]
    metrics = rollout_metrics(
        samples, advantages_B, skipped_long=rollout.skipped_long, total_skipped_long=rollout.total_skipped_long
    )
    run.progress.record_rewards(reward for group in rewards_by_group(samples).values() for reward in group)
    if not run.progress.counts_right:
        metrics = without_accuracy_metrics(metrics)
    metrics |= reference_kl(setup.config.actor, rows) | draft_metrics(setup.trainer.engine.draft_counts())
    n_tokens = sum(sample.sequence.n_tokens for sample in samples)
    run.progress.count_sampled_tokens(n_tokens)
    metrics["rollout/tokens_per_second"] = n_tokens / run.clock.seconds["rollout"]
    metrics |= group_metrics(samples) | source_metrics(samples, advantages_B)
    if isinstance(setup.loader, MixedLoader):
        setup.loader.learn(group_results(samples, advantages_B))
        metrics |= setup.loader.metrics()
    run.log({**metrics, **rollout.scalars})
    if "rollout/rewards_mean" in metrics:
        run.progress.append_to_history(reward_mean=metrics["rollout/rewards_mean"])


def reference_kl(actor: PolicyConfig, rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Return rollout/ref_kl, the mean KL to the reference over trained tokens, if the KL is subtracted from rewards."""
    if not (isinstance(actor, KLConfig) and actor.kl_reward_coef and rows):
        return {}
    new, ref = (np.concatenate(trained(rows, name)) for name in ("logprobs", "ref_logprobs"))
    return {"rollout/ref_kl": float(np.mean(kl_array(new, ref, actor.kl_estimator)))}


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    return {
        "rollout/drafted_tokens": counts.drafted,
        "rollout/accepted_tokens": counts.accepted,
        "rollout/draft_acceptance": counts.acceptance_rate,
        "rollout/frac_steps_drafted": counts.drafted_step_share,
    }


def group_metrics(samples: Sequence[ScoredSample]) -> dict[str, float]:
    """Return rollout/frac_groups_zero_std, the share of groups with two or more rewards that are all equal.

    The advantages of such a group are 0, so it does not train the policy.
    """
    equal = [min(group) == max(group) for group in rewards_by_group(samples).values() if len(group) > 1]
    return {"rollout/frac_groups_zero_std": float(np.mean(equal))} if equal else {}


_OF_SOURCES = {
    *("num_sequences", "rewards_mean", "rewards_std", "accuracy", "response_len_mean", "truncated", "advantages_std"),
    *("frac_groups_zero_std", "reward_errors", "reward_timeouts", "agent_errors", "agent_timeouts", "agent_turns_mean"),
}


def source_metrics(samples: Sequence[ScoredSample], advantages_B: np.ndarray) -> dict[str, float]:
    """Return the most important rollout/* metrics of each source, as rollout/<source>/*. Empty for one source."""
    found = {}
    for source in sorted({sample.item.source for sample in samples} - {""}):
        indices = [index for index, sample in enumerate(samples) if sample.item.source == source]
        mine = [samples[index] for index in indices]
        metrics = rollout_metrics(mine, advantages_B[indices]) | group_metrics(mine)
        values = {name.removeprefix("rollout/"): value for name, value in metrics.items()}
        found |= {
            f"rollout/{source}/{name}": value
            for name, value in values.items()
            if name in _OF_SOURCES or name.startswith("reward/")
        }
        found[f"rollout/{source}/prompts"] = float(len({sample.group for sample in mine}))
    return found


def group_results(samples: Sequence[ScoredSample], advantages_B: np.ndarray) -> list[GroupResult]:
    """Return what the curriculum learns from each group of a step."""
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(index)
    found = []
    for indices in members.values():
        item = samples[indices[0]].item
        known = [index for index in indices if samples[index].outcome.value is not None]
        rewards = [samples[index].outcome.value or 0.0 for index in known]
        found.append(GroupResult(item.source, item.index, rewards, advantages_B[known].tolist()))
    return found


@contextmanager
def log_samples_at_end(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> Iterator[None]:
    """Log the samples of a step at the end of a `with` block, even if the update inside the block fails.

    The log also has the log-probabilities from before the update, which the update stores in the rows.
    """
    try:
        setup.run.outputs.watch_rewards([sample.outcome for sample in rollout.samples])
        with setup.run.tracer.training(setup.run.step, rollout.samples, rollout.keep.tolist()):
            yield
    finally:
        _log_samples(setup, rollout, rows)


def _log_samples(setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]) -> None:
    for sample, row in zip(rollout.kept_samples, join_rows(rows, rollout.rows_per_kept_sample), strict=True):
        if sample.trajectory is not None:
            sample.advantages = trained([row], "advantages")[0]
            continue
        start = len(sample.item.tokens)
        sample.advantages = np.asarray(row.advantages)[start:]
        if row.old_logprobs is not None:
            sample.train_logprobs = np.asarray(row.old_logprobs)[start:]
    setup.run.log_samples(rollout.samples)


@dataclass
class Rollout:
    """The samples of one step, and the choice of samples to train on. A group is the samples of one prompt."""

    samples: list[ScoredSample]
    keep: np.ndarray  # (B,) bool; a sample without a reward is never kept
    skipped_long: int  # dataset rows of this step that were too long
    total_skipped_long: int
    scores: StepScores
    scalars: Mapping[str, float] = field(default_factory=dict)  # rollout/* metrics of dynamic or stopped sampling

    @property
    def kept_samples(self) -> list[ScoredSample]:
        return [sample for sample, keep in zip(self.samples, self.keep, strict=True) if keep]

    @property
    def rows_per_kept_sample(self) -> list[int]:
        """The number of training rows of each kept sample."""
        return rows_per_sample(self.kept_samples)

    @property
    def groups_of_kept_samples(self) -> list[int]:
        return [sample.group for sample in self.kept_samples]


def rollouts(setup: PolicySetup) -> Iterator[Rollout]:
    """Yield the rollout of each step of the run, and skip the update of steps without a sample to train on."""
    for batch in setup.run.steps():
        rollout = collect_rollout(setup, batch)
        if rollout.kept_samples:
            yield rollout
        else:
            skip_step(setup, rollout)


def skip_step(setup: PolicySetup, rollout: Rollout) -> None:
    log_rollout(setup, rollout, [])
    with log_samples_at_end(setup, rollout, []):
        stats = skip_updates(setup)
    setup.run.end_step(stats)


def skip_updates(setup: PolicySetup) -> dict[str, float]:
    """Count the updates of a step that has no rows as skipped, and return their train/* statistics."""
    run, stats = setup.run, dict[str, float]()
    before, after = (n_updates_by_role(setup.config, n) for n in (run.step - 1, run.step))
    for role in after:
        if n := after[role] - before[role]:
            is_actor = role == "actor"
            with run.clock.phase("train" if is_actor else f"train_{role}"):
                found = setup.trainer.engine.skip_updates(role, n)
            stats |= {name if is_actor else f"{role}_{name}": value for name, value in found.items()}
    return stats


def collect_rollout(setup: PolicySetup, batch: Batch[PromptItem]) -> Rollout:
    """Return the samples of a step with their rewards: new ones or, in a replay, those that were recorded."""
    recorder = setup.run.recorder
    recorded = recorder.recorded_rollout(setup.run.step)
    rollout = _sample_rollout(setup, batch) if recorded is None else _recorded_rollout(setup, recorded)
    recorder.keep_rollout(
        KeptRollout(
            rollout.samples, rollout.keep, rollout.skipped_long, rollout.total_skipped_long, dict(rollout.scalars)
        )
    )
    return rollout


def _recorded_rollout(setup: PolicySetup, record: Mapping[str, Any]) -> Rollout:
    """Restore the rollout of a recorded step, and take from the data what it has taken."""
    with setup.run.clock.phase("rollout"):
        samples = samples_from_tree(record["rollout"], setup.loader.items_at)
    setup.run.progress.move_to(record["progress"])
    given = {name: record["rollout"][name] for name in ("keep", "skipped_long", "total_skipped_long", "scalars")}
    return Rollout(samples=samples, scores=StepScores(setup), **given)


def _sample_rollout(setup: PolicySetup, batch: Batch[PromptItem]) -> Rollout:
    """Sample and score the prompts of a step, and choose the samples to train on.

    With rollout.dynamic_sampling, groups (the samples of one prompt) whose rewards are all equal are dropped, and
    replaced by sampling further prompts, until enough groups remain or rollout.max_sampling_rounds rounds are done.
    With dynamic_bs, dropped groups are not replaced. If no group would remain, the first groups with rewards are kept
    in spite of their equal rewards. `areno.trainers.partial_rollout` describes rollout.prompts_ahead and
    rollout.max_head_offpolicyness.
    """
    config, run, scores = setup.config, setup.run, StepScores(setup)
    if config.replaces_in_flight:
        samples, keep, scalars, batches = run_dynamic_sampling(setup, batch)
        return _make_rollout(samples, keep, batches, scores, scalars)
    if config.prompts_ahead or run.progress.in_flight.groups:  # these may be left from before a change of settings
        samples, keep, scalars = sample_ahead(setup, batch, scores)
        return _make_rollout(samples, keep, [batch], scores, scalars)
    most = config.rollout.max_sampling_rounds if config.replaces_prompts else 1
    if most > 1 and can_overlap(setup):
        samples, batches = sample_rounds(setup, batch, most)
    else:
        # Dynamic sampling decides by the rewards which rows are trained.
        early = None if config.rollout.dynamic_sampling else scores
        samples = sample_and_score(setup, batch.items, config.gconfig, run.progress.seed, scores=early)
        batches = [batch]
        while (
            n_groups(samples, has_signal(samples)) < len(batch)
            and len(batches) < most
            and (more := run.progress.next_batch())
        ):
            seed = run.progress.seed + (len(batches) << 40)
            group = samples[-1].group + 1
            samples += sample_and_score(setup, more.items, config.gconfig, seed, first_group=group)
            batches.append(more)
    keep, scalars = np.ones(len(samples), dtype=bool), {}
    if config.rollout.dynamic_sampling:
        keep, dropped = choose_groups_with_signal(samples, len(batch))
        scalars = {"rollout/sampling_rounds": len(batches), "rollout/dropped_groups": dropped}
    return _make_rollout(samples, keep, batches, scores, scalars)


def _make_rollout(
    samples: list[ScoredSample],
    keep: np.ndarray,
    batches: Sequence[Batch[PromptItem]],
    scores: StepScores,
    scalars: Mapping[str, float],
) -> Rollout:
    keep = keep & [sample.outcome.value is not None for sample in samples]
    skipped_long, total_skipped_long = sum(each.skipped_long for each in batches), batches[-1].total_skipped_long
    return Rollout(samples, keep, skipped_long, total_skipped_long, scores, scalars)


def sample_and_score(
    setup: PolicySetup,
    items: Sequence[PromptItem],
    gconfig: GenerationConfig,
    seed: int,
    title: str = "rollout",
    first_group: int = 0,
    at_once: int | None = None,
    max_running: int | None = None,
    scores: StepScores | None = None,
) -> list[ScoredSample]:
    """Sample `gconfig.n_samples` completions of every prompt, and score them, in the order of the prompts.

    `title` is "rollout" or "eval". At most `at_once` prompts are sampled and at most `max_running` samples are decoded
    at the same time. `scores` are computed while rewards are computed. Groups are numbered from `first_group`.
    """
    trainer, clock = setup.trainer, setup.run.clock
    with Scorer(setup, items, gconfig, first_group) as scorer:
        with clock.phase("rollout"):
            log_stage(f"{title}_start")
            copies, reward = trainer.engine.spec.layout.dp_size, setup.run.progress.last_reward
            progress = RolloutProgress(title, len(items), gconfig.n_samples, copies, reward)

            def report(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> None:
                progress(outputs, stats)
                scorer.score_outputs(outputs)
                setup.run.poll_state_and_interrupts()

            if setup.agents is not None:
                with progress:
                    sample_with_agents(setup, scorer, seed, report, at_once, max_running)
            elif len({item.source for item in items}) > 1:
                _sample_sources(setup, items, seed, report, progress)
            else:
                own = setup.config.gconfig_of(items[0].source, gconfig)
                n_recorded = setup.config.actor.n_recorded_tokens if title == "rollout" else 0
                params, prompts = sampling_params(own, n_recorded), [item.tokens for item in items]
                session = trainer.rollout_session(sampling_params=params, max_running_prompts=max_running, proxy=False)
                with session, progress:
                    trainer.rollout_token_batch(
                        prompts, own.n_samples, params, seed=seed, on_progress=report, at_once=at_once
                    )
            log_stage(f"{title}_end")
        if scores is not None and setup.agents is None and scorer.is_waiting:
            scores.compute_early(scorer.samples)
        with clock.phase("reward"):  # waits for the rewards that are still being computed
            samples = scorer.finish()
    if setup.agents is not None:
        setup.run.tracer.add_sessions(setup.run.step, title, samples)
    return samples


def _sample_sources(
    setup: PolicySetup,
    items: Sequence[PromptItem],
    seed: int,
    report: Callable[[list[GenerationOutput], list[RolloutStats]], None],
    progress: RolloutProgress,
) -> None:
    requests = prompt_requests(setup.config, items, seed)
    n_open = sum(request.n_samples for request in requests)

    def steer(outputs: list[GenerationOutput], stats: list[RolloutStats]) -> tuple[int, list[GenerationRequest]]:
        nonlocal n_open
        n_open -= len(outputs)
        report(outputs, stats)
        return n_open, []

    with setup.trainer.rollout_session(sampling_params=sampling_params(setup.config.gconfig), proxy=False), progress:
        setup.trainer.rollout_until(requests, steer)


def evaluate_policy(
    setup: PolicySetup, name: str, loader: BatchLoader[PromptItem], may_fail: bool = True
) -> dict[str, float]:
    """Sample, score and log a validation set, and return its metrics without the prefix eval/.

    The setting batch_size is the number of prompts that are sampled at the same time; when a prompt is complete, the
    next prompt starts. If no sample has a reward, raise ArenoError, or only warn with `may_fail`.
    """
    gconfig = setup.config.eval_gconfig or setup.config.gconfig
    items = [item for batch in loader.batches() for item in batch.items]
    at_once: int | None = loader.config.batch_size
    are_live = setup.live_agents is not None and setup.live_agents.is_open  # these keep their decoder
    max_running = None if are_live else setup.evaluated_at_once
    if at_once is None and setup.agents is not None:  # an agent's time limit also counts the time that it waits
        at_once = -(-(max_running or setup.config.rows_per_step) // gconfig.n_samples)
    samples = sample_and_score(
        setup, items, gconfig, setup.config.seed, "eval", at_once=at_once, max_running=max_running
    )
    setup.run.tracer.add_samples(f"eval {name} {setup.run.step}", samples)
    setup.run.outputs.trackers.eval_samples(setup.run.step, samples, name)
    if all(sample.outcome.value is None for sample in samples):
        error = no_reward_error([sample.outcome for sample in samples])
        if not may_fail:
            raise error
        logger.warning("evaluation %s: %s", name or "of the validation set", error)
    setup.run.progress.record_rewards(reward for group in rewards_by_group(samples).values() for reward in group)
    return evaluation_metrics(samples, gconfig.n_samples)
