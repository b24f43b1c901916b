"""Fits learning-rate schedules to the length of a run, and warns of settings that do not fit it or have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from areno.config.experiments import ExperimentConfig
from areno.config.models import ROWS_COUNTED
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.plan.plan import TrainerPlan, advice_on_rounding
from areno.schema.fields import changed_settings
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec

_EARLY, _LATE = 0.9, 2.0  # lr_decay_steps outside of this range, relative to the updates, causes a warning


def with_schedules(
    config: ExperimentConfig, plan: TrainerPlan, roles: dict[str, RoleSpec], n_steps: int
) -> tuple[TrainerPlan, dict[str, RoleSpec]]:
    """Set lr_decay_steps of each trained model to its number of updates, unless the user set it. Return copies."""
    updates = n_updates_by_role(config, n_steps)

    def with_schedule(name: str, role: RoleSpec) -> RoleSpec:
        if (optimizer := role.optimizer) is None:
            return role
        steps = optimizer.lr_decay_steps or max(1, updates[name])
        return replace(role, optimizer=replace(optimizer, lr_decay_steps=steps))

    plan = replace(plan, spec=replace(plan.spec, actor=with_schedule("actor", plan.spec.actor)))
    return plan, {name: with_schedule(name, role) for name, role in roles.items()}


def n_updates_by_role(config: ExperimentConfig, n_steps: int) -> dict[str, int]:
    """Return the number of optimizer updates in a run by role, for trained models, if all batches are full."""
    actor = config.actor
    each, first = 1, 0
    found = {}
    if isinstance(config, PolicyExperimentConfig):
        each = config.actor.ppo_n_minibatches
    if isinstance(config, CriticExperimentConfig):
        first = config.critic.warmup_steps
        found["critic"] = n_steps * config.critic.ppo_n_minibatches * config.critic.epochs
    if actor.gradient_accumulation_steps is not None:
        size = actor.mb_spec.mini_bs or ROWS_COUNTED
        size = max(1, size // config.rows_per_item())  # the two rows of a pair stay together
        each = -(-config.items_per_step // (size * actor.gradient_accumulation_steps))
    return {"actor": max(0, n_steps - first) * each, **found}


def device_warnings(config: ExperimentConfig, spec: EngineSpec) -> Iterator[str]:
    is_policy = isinstance(config, PolicyExperimentConfig)
    if is_policy and config.prompts_ahead > 0 and config.rollout.speculation == "on":
        yield (
            "rollout.speculation=on drafts nothing in training: samples that continue in later steps "
            "(rollout.prompts_ahead, rollout.max_head_offpolicyness) have no drafts; only evaluations have them"
        )
    fp8 = config.actor.fp8
    if is_policy and fp8 is not None and fp8.rounds_inputs and not config.engine.exact:
        yield (
            f"linear layers compute in FP8 without engine.exact, so rollout and training differ more than in "
            f"{spec.dtype}; {advice_on_rounding(spec)}"
        )
    if config.engine.zero_stage == 2 and spec.layout.dp_size == 1:
        yield "engine.zero_stage=2 has no effect: the run has one copy of the model, which shares no gradients"
    if not spec.devices[0].startswith("cuda"):
        offloads = [key for key, value in changed_settings(config) if value is True and key.endswith("offload")]
        if offloads:
            yield f"{' and '.join(offloads)} has no effect: the models of a CPU are in host memory already"


def staleness_warnings(config: ExperimentConfig) -> Iterator[str]:
    """Yield a warning if samples may be off-policy and the loss does not correct for that."""
    if not isinstance(config, PolicyExperimentConfig) or not (limit := config.rollout.max_head_offpolicyness):
        return
    teacher = config.teacher
    if teacher is not None and teacher.divergence is not None and not teacher.rl_loss_weight:
        return  # a divergence over the whole vocabulary does not depend on the policy that sampled
    if config.rows_per_item() > 1:
        return  # neither does a loss of pairs, which reads the rewards of given answers
    text = (
        f"rollout.max_head_offpolicyness is {limit}, so tokens of older weights are trained as if the current weights "
        "had sampled them; "
    )
    if not isinstance(config.actor, RatioConfig):
        yield f"{text}this algorithm has no correction for them, so set rollout.max_head_offpolicyness=0"
    elif not config.actor.corrects_staleness:
        yield f"{text}set actor.use_decoupled_loss=true, actor.recompute_logprob=false or actor.m2_threshold"


def schedule_warnings(config: ExperimentConfig, n_steps: int) -> Iterator[str]:
    """Yield warnings about a run that ends early, and about schedules and profiles that do not fit its length."""
    if config.total_train_steps is not None and n_steps < config.total_train_steps:
        limit = f"total_train_epochs={config.total_train_epochs}"
        if config.total_train_n_seqs is not None:
            limit += f" and total_train_n_seqs={config.total_train_n_seqs}"
        yield (
            f"the run ends after at most {n_steps} steps and not after total_train_steps={config.total_train_steps}, "
            f"since {limit} ends it before"
        )
    profiles = {"perf_tracer": config.perf_tracer.profile_steps or []}
    if config.memory_profiler is not None:
        profiles["memory_profiler"] = config.memory_profiler.profile_steps
    for name, steps in profiles.items():
        if late := [step for step in steps if step > n_steps]:
            yield f"{name}.profile_steps has {', '.join(map(str, late))}, but the run ends after {n_steps} steps"
    updates = n_updates_by_role(config, n_steps)
    for name, model in config.trained_models().items():
        optimizer, n = model.optimizer, updates[name]
        decay = optimizer.lr_decay_steps
        if optimizer.lr == 0:
            yield f"{name}.optimizer.lr is 0, so the weights of the {name} stay as they are; set it above 0 to train"
            continue
        if decay is None or n == 0:
            continue
        key, warmup = f"{name}.optimizer", round(optimizer.warmup_steps_proportion * decay)
        if warmup >= n:
            yield (
                f"the learning rate warms up for {warmup} updates, and this run has {n}, so it never reaches "
                f"{key}.lr={optimizer.lr:g}; lower {key}.warmup_steps_proportion or set {key}.lr_decay_steps=null"
            )
        elif optimizer.lr_scheduler_type != "constant" and decay < _EARLY * n:
            yield (
                f"the learning rate decays in {decay} of the {n} updates of this run, and stays at "
                f"{optimizer.min_lr_ratio * optimizer.lr:g} for the rest; {key}.lr_decay_steps=null is "
                "as long as the run"
            )
        elif optimizer.lr_scheduler_type != "constant" and decay > _LATE * n:
            yield (
                f"the learning rate decays in {decay} updates, and this run has {n}, so most of the decay never comes; "
                f"{key}.lr_decay_steps=null is as long as the run"
            )
