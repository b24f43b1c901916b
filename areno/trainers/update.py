"""The training half of a step: make training rows, correct rows that another policy sampled, and take optimizer steps.

Every loop trains by calling `update_actor`. `measure_loss` evaluates a loss on validation rows with the same packing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from areno.config.experiments import LossFn
from areno.config.models import MicroBatchSpec
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import SamplingConfig
from areno.config.teacher import Divergence, TeacherConfig
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.gradients import average_steps
from areno.engine.train.micro_batches import divide_steps
from areno.engine.train.packing import StepBatches
from areno.errors import EngineError
from areno.loss_fns.data_pack import DataPack
from areno.run.setup import PolicySetup, Setup
from areno.specs.update import OldLogprobs, UpdateSpec
from areno.tracking.console import log_stage
from areno.trainers.agents import score_agents
from areno.trainers.forward_passes import logprobs_of
from areno.trainers.rollout import Rollout
from areno.trainers.rows import by_source, current_advantages, policy_rows, sample_rewards, set_advantages, token_rows
from areno.types import PromptItem, ScoredSample, TrainSequence


def measure_loss(
    loss_fn: LossFn, rows: Sequence[TrainSequence], logprobs: Sequence[Sequence[float]], *, rows_per_unit: int = 1
) -> dict[str, float]:
    """Compute the loss over all rows as one step, without an update. Return "loss" and the scalar statistics."""
    loss, stats = loss_fn(
        pack_rows(rows, rows_per_unit), torch.cat([torch.tensor(row, dtype=torch.float32) for row in logprobs])
    )
    return {"loss": loss.item(), **{name: value.item() for name, value in stats.items() if value.dim() == 0}}


def pack_rows(rows: Sequence[TrainSequence], rows_per_unit: int = 1) -> DataPack:
    """Pack all rows into one micro-batch on the CPU that stands for a whole optimizer step."""
    vocab_size = 1 + max(max(tokens) for tokens in token_rows(rows))
    whole = UpdateSpec(MicroBatchSpec(mini_bs=len(rows)), rows_per_unit=rows_per_unit)
    ((step,),) = divide_steps(read_rows(rows, vocab_size), whole)
    ((_, pack),) = StepBatches(step, rows_per_unit, torch.device("cpu"))
    return pack


def make_training_rows(setup: PolicySetup, rollout: Rollout) -> list[TrainSequence]:
    """Make the rows of `rollout.kept_samples`, with shaped rewards, `ref_logprobs` and `teacher_logprobs`."""
    config = setup.config
    rewards_B = rewards_by_source(config, rollout.kept_samples)
    eos, version = setup.tokenizer.eos_token_id or 0, setup.trainer.engine.weights_version
    rows = policy_rows(
        rollout.kept_samples,
        rewards_B,
        eos,
        config.actor.mask_no_eos_with_zero,
        version,
        reward_scaling=config.actor.reward_scaling,
    )
    score_agents(setup.trainer, rollout.kept_samples, rows, config.gconfig)
    if config.ref is not None:
        for row, logprobs in zip(rows, rollout.scores.scores_of_rows("ref", rows), strict=True):
            row.ref_logprobs = logprobs
    if config.actor.needs_logit_gradients:
        for row, values in zip(rows, rollout.scores.scores_of_rows("logit_gradient", rows), strict=True):
            row.logit_gradients = values
    if config.teacher is not None and (config.teacher.prompt_key is not None or config.teacher.by is not None):
        samples = [
            sample
            for sample, size in zip(rollout.kept_samples, rollout.rows_per_kept_sample, strict=True)
            for _ in range(size)
        ]
        set_teachers(setup, [sample.item for sample in samples], rows)
        for sample, row in zip(samples, rows, strict=True):
            sample.teacher = row.teacher
    score_teacher(setup, rows, config.teacher)
    return rows


def rewards_by_source(config: PolicyExperimentConfig, samples: Sequence[ScoredSample]) -> list[float]:
    """Return the shaped rewards of samples. Each source has its own limit of length, and is normalised alone."""

    def of_source(indices: Sequence[int]) -> list[float]:
        limit = config.gconfig_of(samples[indices[0]].item.source).max_new_tokens
        return sample_rewards([samples[index] for index in indices], config.actor, limit).tolist()

    return by_source([sample.item.source for sample in samples], of_source)


def set_teachers(setup: PolicySetup, items: Sequence[PromptItem], rows: Sequence[TrainSequence]) -> None:
    """Set the teacher of each row (setting teacher.by) and the prompt that the teacher reads (teacher.prompt_key)."""
    teacher = setup.config.teacher
    for item, row in zip(items, rows, strict=True):
        if teacher is not None and teacher.by is not None:
            row.teacher = teacher.role_of(item.record[teacher.by])
        if item.teacher_tokens is not None:
            row.teacher_prompt = item.teacher_tokens
            row.response_start = row.for_teacher()[1]  # now: a correction may mask trained tokens later


def score_teacher(setup: PolicySetup, rows: Sequence[TrainSequence], teacher: TeacherConfig | None) -> None:
    """If the loss is the sampled form of distillation, set `teacher_logprobs` of rows. Untrained tokens get 0."""
    if teacher is None or teacher.divergence is not None:
        return
    with setup.run.clock.phase("teacher"):
        for role in dict.fromkeys(row.teacher or teacher.role for row in rows):
            of_role = [row for row in rows if (row.teacher or teacher.role) == role]
            read = [row.for_teacher() for row in of_role]
            masks = [np.ones(len(tokens), dtype=bool) for tokens, _ in read]
            for mask, row, (_, first) in zip(masks, of_role, read, strict=True):
                shared = np.asarray(row.prompt_mask, dtype=bool)[first:]
                mask[len(mask) - len(shared) :] = shared
            scored = setup.trainer.score_logprobs(
                role, [tokens for tokens, _ in read], sampling=setup.config.gconfig, prompt_masks=masks
            )
            for row, (tokens, first), logprobs in zip(of_role, read, scored, strict=True):
                found = np.zeros(len(row.tokens))  # type: ignore[arg-type]
                found[first:] = logprobs[len(tokens) - len(found) + first :]
                row.teacher_logprobs = found


def update_actor(
    setup: Setup[Any],
    rows: Sequence[TrainSequence],
    *,
    n_minibatches: int = 1,
    sampling: SamplingConfig | None = None,
    rows_per_unit: int = 1,
    old_logprobs: OldLogprobs = "recompute",
    loss_fn: LossFn | None = None,
    divergence: Divergence | None = None,
    differentiates_entropy: bool = False,
    updates: Iterable[Sequence[TrainSequence]] | None = None,
) -> dict[str, float]:
    """Take `n_minibatches` optimizer steps of the actor, and return train/* statistics without the prefix.

    Log-probabilities are computed at the temperature of `sampling`. `rows_per_unit` adjacent rows stay in one
    micro-batch, such as 2 for DPO. `old_logprobs` is described at `areno.Trainer.train`. `loss_fn` None takes the loss
    of the run. `updates` has the rows of each optimizer step, for a caller that divides the rows itself.
    """
    run, actor, version = setup.run, setup.config.actor, setup.trainer.engine.weights_version
    run.recorder.keep_update("actor", rows)
    with run.clock.phase("train"):
        log_stage("train_start")
        train = partial(
            setup.trainer.train,
            loss_fn=loss_fn or setup.loss_fn,
            gradient_accumulation_steps=actor.gradient_accumulation_steps,
            mb_spec=actor.mb_spec,
            sampling=sampling or SamplingConfig(),
            seed=run.progress.seed,
            rows_per_unit=rows_per_unit,
            old_logprobs=old_logprobs,
            divergence=divergence,
            differentiates_entropy=differentiates_entropy,
        )
        if updates is None:
            stats = train(rows, n_minibatches=n_minibatches)
        else:
            stats = average_steps([train(of_update) for of_update in updates])
        log_stage("train_end")
    run.tracer.weights_version = setup.trainer.engine.weights_version
    try:
        run.outputs.watch_update(stats, applied=run.tracer.weights_version > version)
    except EngineError:  # which ends the run, whose last step has a record, too
        run.recorder.keep_metrics({f"train/{name}": value for name, value in stats.items()})
        raise
    n_tokens = sum(map(len, token_rows(rows)))
    measured = {"host_memory_gib": setup.trainer.engine.host_memory_gib()}
    return {**stats, **measured, "tokens_per_second": n_tokens / run.clock.seconds["train"]}


def update_policy(
    setup: PolicySetup, rows: Sequence[TrainSequence], rollout: Rollout | None = None
) -> dict[str, float]:
    """Take the optimizer steps of a step. `rollout` is that of the rows, which some estimators of advantages need."""
    config, history, loss_fn = setup.config, setup.run.progress.history, setup.loss_fn
    if (coef := config.actor.adapted_entropy_coef(history.get("entropy", []))) is not None:
        loss_fn = partial(loss_fn, entropy_coef=coef)
    estimator, updates = config.actor.chosen_adv_estimator, None
    if rollout is not None and estimator is not None and estimator.follows_policy:
        updates = updates_with_own_advantages(setup, rollout, rows)
    stats = update_actor(
        setup,
        rows,
        updates=updates,
        sampling=config.gconfig,
        n_minibatches=config.actor.ppo_n_minibatches,
        old_logprobs=config.actor.old_logprobs,
        loss_fn=loss_fn,
        divergence=config.divergence,
        differentiates_entropy=config.actor.differentiates_entropy,
    )
    if coef is None:
        return stats
    if "entropy" in stats:
        setup.run.progress.append_to_history(entropy=stats["entropy"])
    return stats | {"entropy_coef": coef}


def updates_with_own_advantages(
    setup: PolicySetup, rollout: Rollout, rows: Sequence[TrainSequence]
) -> Iterator[list[TrainSequence]]:
    """Yield the rows of each update, with whole groups and with advantages that follow the policy.

    A loss that couples the samples of a group has a gradient of its own for each of them, which depends on the current
    log-probabilities of all. A pass before the update computes these, so that micro-batches need not hold groups.
    """
    actor, sizes, groups = setup.config.actor, rollout.rows_per_kept_sample, rollout.groups_of_kept_samples
    starts, distinct = np.cumsum([0, *sizes]), list(dict.fromkeys(groups))
    if actor.ppo_n_minibatches > 1:
        distinct = np.random.default_rng(setup.run.progress.seed).permutation(distinct).tolist()
    updates = []
    for part in np.array_split(np.array(distinct), actor.ppo_n_minibatches):
        samples = [index for index, group in enumerate(groups) if group in set(part.tolist())]
        if samples:
            updates.append((samples, [row for index in samples for row in rows[starts[index] : starts[index + 1]]]))
    for _, of_update in updates[1:]:  # before the first update
        for row, logprobs in zip(of_update, logprobs_of(setup, "actor", of_update), strict=True):
            row.old_logprobs = np.asarray(logprobs)
    for number, (samples, of_update) in enumerate(updates):
        if number:
            now = logprobs_of(setup, "actor", of_update)
            own_sizes, own_groups = ([each[index] for index in samples] for each in (sizes, groups))
            set_advantages(of_update, own_sizes, current_advantages(of_update, now, own_sizes, own_groups, actor))
        yield of_update
