"""The training half of a step: rows in, optimizer steps out. Every loop trains by `update`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno.engine.spec import OldLogprobs
from areno.run.setup import PolicySetup, Setup
from areno.tracking.console import log_stage
from areno.trainers.by_sample import score_agents
from areno.trainers.collect import Rollout
from areno.trainers.correct import correct_rows, needs_proximal
from areno.trainers.rows import policy_rows, sample_rewards, token_rows
from areno.types import TrainSequence


def rows_of(setup: PolicySetup, rollout: Rollout) -> list[TrainSequence]:
    """The rows to train on: shaped rewards, and the reference's log-probabilities where there is a reference."""
    config = setup.config
    rewards_B = sample_rewards(rollout.kept, config.actor, config.gconfig.max_new_tokens)
    eos, version = setup.tokenizer.eos_token_id or 0, setup.trainer.engine.weights_version
    rows = policy_rows(rollout.kept, rewards_B, eos, config.actor.mask_no_eos_with_zero, version)
    score_agents(setup.trainer, rollout.kept, rows, config.gconfig.temperature)
    if config.ref is not None:
        with setup.run.clock.phase("ref"):
            for row, logprobs in zip(rows, logprobs_of(setup, "ref", rows), strict=True):
                row.ref_logprobs = logprobs
    return rows


def logprobs_of(setup: PolicySetup, role: str, rows: Sequence[TrainSequence]) -> list[list[float]]:
    """Of every token of the rows, under the model of a role, at the temperature of the rollout."""
    routes = [row.routes for row in rows] if role == "actor" else None
    return setup.trainer.score_logprobs(role, token_rows(rows), setup.config.gconfig.temperature, routes=routes)


def correct(setup: PolicySetup, rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Score the rows under the policy and weigh them by `correct_rows`, where the settings need that."""
    actor = setup.config.actor
    if not needs_proximal(actor):
        return {}
    with setup.run.clock.phase("recompute"):
        return correct_rows(rows, logprobs_of(setup, "actor", rows), actor)


def update(
    setup: Setup[Any],
    rows: Sequence[TrainSequence],
    *,
    n_minibatches: int = 1,
    temperature: float = 1.0,
    rows_per_unit: int = 1,
    old_logprobs: OldLogprobs = "recompute",
) -> dict[str, float]:
    """Take optimizer steps of the actor and return the train/* statistics by name."""
    run, actor, version = setup.run, setup.config.actor, setup.trainer.engine.weights_version
    with run.clock.phase("train"):
        log_stage("train_start")
        stats = setup.trainer.train(
            rows,
            setup.loss_fn,
            gradient_accumulation_steps=actor.gradient_accumulation_steps,
            mb_spec=actor.mb_spec,
            n_minibatches=n_minibatches,
            temperature=temperature,
            seed=run.seed,
            rows_per_unit=rows_per_unit,
            old_logprobs=old_logprobs,
        )
        log_stage("train_end")
    run.watch_update(stats, applied=setup.trainer.engine.weights_version > version)
    n_tokens = sum(map(len, token_rows(rows)))
    return {**stats, "tokens_per_second": n_tokens / run.clock.seconds["train"]}


def update_policy(setup: PolicySetup, rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Call `update` with the minibatches, temperature and old log-probabilities of the settings."""
    actor = setup.config.actor
    how = {"n_minibatches": actor.ppo_n_minibatches, "old_logprobs": actor.old_logprobs}
    return update(setup, rows, temperature=setup.config.gconfig.temperature, **how)
