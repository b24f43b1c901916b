"""Recompute a recorded sample under a checkpoint: log-probabilities, loss and gradient of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areno.api.algorithms import Algorithm, algorithm_of
from areno.config.experiments import LossFn
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.plan.folders import full_model_folder
from areno.plan.lora import with_model
from areno.plan.plan import TrainerPlan, plan_of_experiment
from areno.plan.roles import experiment_roles
from areno.plan.vocabularies import complete_roles
from areno.report.recorded_sample import RecordedRow, RecordedTurn, check_sample, recorded_row, recorded_turns
from areno.run.setup import with_distillation_loss
from areno.schema.values import value_at
from areno.specs.role import RoleSpec
from areno.tracking.reader import RunReader
from areno.trainers.off_policy_correction import correct_rows
from areno.trainers.rows import sample_rewards
from areno.trainers.update import pack_rows
from areno.types import PromptItem, RewardOutcome, RolloutSequence, ScoredSample, TrainSequence


def attribute_loss(
    loss_fn: LossFn, row: TrainSequence, logprobs: Sequence[float]
) -> tuple[float, np.ndarray | None, np.ndarray]:
    """Return (loss, contributions, gradient) of a step with a single row.

    A policy loss is linear in the token weights (`DataPack.weights`). So the contribution of a token is the derivative
    of the loss with respect to its weight, times the weight. The contributions, float32 (n,), add up to the policy term
    of the loss. They are None if the loss does not use token weights. The gradient with respect to the
    log-probabilities, float32 (n,), is negative for tokens that training makes more likely, and 0 for tokens that are
    clipped or not trained.
    """
    pack, given = pack_rows([row]), torch.tensor(logprobs, dtype=torch.float32, requires_grad=True)
    weights = torch.ones_like(given) if pack.weights is None else pack.weights.clone()
    pack.weights = weights.requires_grad_()
    loss, _ = loss_fn(pack, given)
    by_logprob, by_weight = torch.autograd.grad(loss, [given, weights], allow_unused=True)
    contributions = None if by_weight is None else (by_weight * weights).detach().numpy()
    return loss.item(), contributions, torch.zeros(len(given)).numpy() if by_logprob is None else by_logprob.numpy()


@dataclass(kw_only=True)
class ReplayedToken:
    """One token of a replayed sample. An unknown value is None."""

    token: int
    text: str
    trained: bool
    then: float | None  # log-probability in the rollout
    now: float | None  # log-probability under the checkpoint; None for the first token
    advantage: float | None = None  # None if the token was not trained
    loss: float | None = None  # contribution to the loss, see `attribute_loss`
    gradient: float | None = None  # of the loss with respect to `now`
    teacher: float | None = None  # log-probability under the teacher
    turn: int | None = None  # of an agent

    @property
    def log_ratio(self) -> float | None:
        """Logarithm of the importance ratio, `now` - `then`."""
        return None if self.then is None or self.now is None else self.now - self.then


@dataclass(kw_only=True)
class Replay:
    """A recorded sample, recomputed under a checkpoint."""

    sample: Mapping[str, Any]
    checkpoint: Path
    checkpoint_step: int | None  # 0: the first model; None: outside of the run
    tokens: list[ReplayedToken]
    versions: tuple[int, int] | None  # oldest and newest version of the weights that sampled it
    loss: float | None = None  # of a step with this sample alone
    turns: list[RecordedTurn] = field(default_factory=list)  # of an agent
    missing: list[str] = field(default_factory=list)  # unknown values, in words


def replay(
    run: RunReader, step: int, number: int, *, checkpoint: str | None = None, row: int = 0, device: str = "auto"
) -> Replay:
    """Recompute sample `number` of a training step under the checkpoint that `choose_checkpoint` returns.

    `row` is the index of the training row of an agent's sample.
    """
    samples = run.samples(step)
    if not 0 <= number < len(samples):
        text = "is {}; step {} has {} samples, counted from 0"
        raise ConfigError(Problem("--sample", text, number, step, len(samples)))
    for index, sample in enumerate(samples):  # the advantage may need the rewards of all
        check_sample(sample, index)
    folder, at = choose_checkpoint(run, step, checkpoint)
    missing: list[str] = []
    config, algorithm, roles = _replay_config(run, folder, device, missing, samples[number].get("teacher"))
    plan = plan_of_experiment(config)
    recorded = recorded_row(samples[number], plan.tokenizer, row)
    missing += recorded.missing
    now, ref, teacher = _logprobs(plan, config, roles, recorded.tokens)
    found = Replay(
        sample=samples[number],
        checkpoint=folder,
        checkpoint_step=at,
        versions=recorded.versions,
        missing=missing,
        tokens=_replayed_tokens(recorded, now, plan.tokenizer),
    )
    if np.isnan(recorded.advantages[recorded.trained]).any():
        _compute_advantage(recorded, samples, number, config, algorithm, missing)
    for token, advantage in zip(found.tokens, recorded.advantages, strict=True):
        token.advantage = _number_or_none(advantage) if token.trained else None
    found.turns = recorded_turns(found.sample, recorded)
    if np.isnan(recorded.logprobs[recorded.trained]).any():
        missing.append("the log-probabilities of the rollout, and so the loss")
    elif config.rows_per_item() > 1:
        missing.append("the loss: that of a pair needs both samples")
    elif not np.isnan(recorded.advantages[recorded.trained]).any():
        _add_loss(found, step, recorded, now, ref, teacher, config, algorithm)
    if teacher is not None:
        for token, value in zip(found.tokens[1:], teacher[1:], strict=True):
            token.teacher = float(value)
    return found


def choose_checkpoint(run: RunReader, step: int, wanted: str | None) -> tuple[Path, int | None]:
    """Return (folder, step) of the checkpoint `wanted`: a step of the run, `latest`, `best`, or a folder.

    If `wanted` is None, choose the checkpoint whose step is nearest to `step` - 1, because the weights after that step
    sampled the sample. The returned step is 0 for the initial model, and None for a folder outside of the run.
    """
    there = run.checkpoints()
    if wanted is None:
        path = value_at(run.config, "actor.path")
        if isinstance(path, str) and not value_at(run.config, "actor.init_from_scratch"):
            there = {0: Path(path), **there}
        if not there:
            raise ArenoError("{} has no checkpoint yet; name a model folder with --checkpoint", run.path)
        nearest = min(there, key=lambda at: abs(at - (step - 1)))  # the weights after step - 1 sampled this step
        return there[nearest], nearest
    if wanted.isdecimal() and int(wanted) in there:
        return there[int(wanted)], int(wanted)
    folder = Path(wanted).expanduser()
    if wanted in ("latest", "best") and there:
        folder = next(iter(there.values())).parent / wanted
    if not folder.is_dir():
        known = ", ".join(map(str, there)) or "none"
        raise ConfigError(Problem("--checkpoint", "there is no {}; checkpoints are of the steps {}", wanted, known))
    folder = folder.resolve()
    return folder, next((at for at, path in there.items() if path.resolve() == folder), None)


def _replay_config(
    run: RunReader, folder: Path, device: str, missing: list[str], named: str | None
) -> tuple[Any, Algorithm, dict[str, RoleSpec]]:
    """Load the run's configuration, with the checkpoint as the actor and the engine on this machine.

    Returns (configuration, algorithm, roles). `roles` are the reference model and the teacher, if they can score the
    row. `named` is the role of the sample's teacher, in a run with several teachers.
    """
    from areno.launch.compose import load, mention_version

    algorithm = algorithm_of(run.path)
    size = value_at(run.config, "engine.tp_size")
    size = size if isinstance(size, int) else 1
    changes = [f"engine.device={device}", f"engine.world_size={size}", "actor.init_from_scratch=false"]
    changes += ["cluster.n_nodes=1", "cluster.n_gpus_per_node=null", "scheduler.type=local"]  # on this machine
    changes += ["scheduler.setup_timeout=30", "engine.cp_size=1"]
    changes += ["experiment_name=replay", "trial_name=null"]  # nothing is written, so any name will do
    with mention_version(run.path):
        config: Any = load(algorithm.config, "config", changes, run.path)
    if not isinstance(config, PolicyExperimentConfig):
        raise ArenoError("{} is a run of {}, which samples nothing", run.path, algorithm.name)
    if config.ref is not None and config.ref.path is None:
        config.ref.path = config.actor.path
    from_scratch = value_at(run.config, "actor.init_from_scratch")
    if config.ref is not None and from_scratch and config.ref.path == config.actor.path:
        missing.append("the reference: the run began with random weights")
        config.ref = None
    teacher = config.teacher
    is_known = True
    if teacher is not None and teacher.models is not None:  # as in a run with the teacher of the sample alone
        is_known = named in teacher.paths  # samples that were not trained name no teacher
        teacher.path, teacher.models = teacher.paths.get(named or "", teacher.paths[teacher.role]), None
    if teacher is not None and not teacher.follows_actor and teacher.path is None:
        teacher.path = config.actor.path
    roles = experiment_roles(config)  # before the checkpoint takes the place of the actor's own model
    for name in (name for name, role in roles.items() if not role.path):  # adapters: on the base of the run
        roles[name] = replace(roles[name], path=full_model_folder(config.actor.path, "actor.path"))
    if not is_known:
        missing.append("the teacher, and so the loss: the sample does not name it")
        roles.pop("teacher", None)
    elif teacher is not None and from_scratch and teacher.path == config.actor.path:
        missing.append("the teacher, and so the loss: the run began with random weights")
        roles.pop("teacher", None)
    elif teacher is not None and teacher.prompt_key is not None:
        missing.append("the prompt of the teacher, and so the loss")
    elif teacher is not None and teacher.divergence is not None:
        missing.append("the loss: that of the teacher is over the whole vocabulary")
    if teacher is not None and teacher.prompt_key is not None:
        roles.pop("teacher", None)  # the prompt that it reads is not recorded
    config.actor = with_model(config.actor, str(folder))
    return config, algorithm, roles


def _logprobs(
    plan: TrainerPlan, config: PolicyExperimentConfig, roles: Mapping[str, RoleSpec], tokens: list[int]
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return the log-probabilities of all tokens under checkpoint, reference model and teacher, (n,) each."""
    from areno.engine.engine import Engine

    with Engine(plan.spec.without_optimizer(), plan.workers) as engine:
        found: dict[str, np.ndarray] = {}
        for name in (name for name in ("ref", "teacher") if name in roles):
            engine.ensure_roles(complete_roles({name: roles[name]}, plan))
            found[name] = engine.logprobs(name, [tokens], config.gconfig)[0]
        return engine.logprobs("actor", [tokens], config.gconfig)[0], found.get("ref"), found.get("teacher")


def _replayed_tokens(row: RecordedRow, now: np.ndarray, tokenizer: Any) -> list[ReplayedToken]:
    found = []
    for index, token in enumerate(row.tokens):
        is_trained = bool(row.trained[index])
        then, value = _number_or_none(row.logprobs[index]), float(now[index])
        text = tokenizer.decode([token])
        turn = None if row.turns is None else int(row.turns[index])
        now_or_none = value if index else None
        found.append(ReplayedToken(token=token, text=text, trained=is_trained, then=then, now=now_or_none, turn=turn))
    return found


def _number_or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _compute_advantage(
    row: RecordedRow,
    samples: Sequence[Mapping[str, Any]],
    number: int,
    config: PolicyExperimentConfig,
    algorithm: Algorithm,
    missing: list[str],
) -> None:
    """Compute `row.advantages` from the recorded rewards of the step. Adds to `missing` what is not known."""
    own = algorithm.advantage_fn is not None  # which may read any field of the rows
    own = own or config.agent.turn_credit != "outcome"
    if own or isinstance(config, CriticExperimentConfig) or config.actor.kl_reward_coef:
        missing.append("the advantage, which needs more than the rewards")
        return
    source = samples[number].get("source", "")
    scored = [sample for sample in samples if sample.get("reward") is not None and sample.get("source", "") == source]
    if samples[number] not in scored:
        missing.append("the advantage: the sample has no reward, and is not trained on")
        return
    given = [_scored_sample(sample) for sample in scored]
    rewards = sample_rewards(given, config.actor, config.gconfig_of(source).max_new_tokens)
    rows = [TrainSequence(prompt_mask=[True, False], tokens=[0, 0], reward=reward) for reward in rewards]
    advantages = config.advantages(rows, [one.group for one in given])
    row.advantages[row.trained] = advantages[scored.index(samples[number])][0]
    missing.append(f"the recorded advantage; it is computed from the {len(scored)} rewards of the step that were kept")


def _scored_sample(sample: Mapping[str, Any]) -> ScoredSample:
    """Return a recorded sample as a ScoredSample with only the fields that reward shaping reads."""
    return ScoredSample(
        item=PromptItem(prompt="", text="", tokens=[]),
        sequence=RolloutSequence(resp_tokens=[0] * (sample.get("response_tokens") or 0), resp_logprobs=[]),
        completion="",
        outcome=RewardOutcome(value=sample["reward"]),
        group=sample.get("group", sample.get("row", 0)),
    )


def _add_loss(
    found: Replay,
    step: int,
    recorded: RecordedRow,
    now: np.ndarray,
    ref: np.ndarray | None,
    teacher: np.ndarray | None,
    config: PolicyExperimentConfig,
    algorithm: Algorithm,
) -> None:
    """Set the loss of `found` as in a step with only this row, and contribution and gradient of each trained token."""
    if config.teacher is not None and (teacher is None or config.teacher.divergence is not None):
        return  # `missing` says why
    loss_fn = with_distillation_loss(config, algorithm.make_loss(config))
    advantages = np.where(recorded.trained, recorded.advantages, 0.0)
    row = TrainSequence(
        prompt_mask=~recorded.trained,
        tokens=recorded.tokens,
        advantages=advantages,
        logprobs=np.where(recorded.trained, recorded.logprobs, 0.0),
        ref_logprobs=ref,
        teacher_logprobs=teacher,
        staleness=0
        if recorded.versions is None or not found.checkpoint_step
        else max(0, found.checkpoint_step - recorded.versions[0]),
    )
    if isinstance(config.actor, RatioConfig) and config.actor.needs_proximal_logprobs:
        correct_rows([row], [now.tolist()], config.actor)
    rollout = np.where(recorded.trained, recorded.logprobs, 0.0)
    if config.actor.old_logprobs == "rollout":
        row.old_logprobs = rollout
    elif found.checkpoint_step == step - 1:  # the weights before the update
        row.old_logprobs = now
    else:
        row.old_logprobs = np.where(np.isnan(recorded.train_logprobs), rollout, recorded.train_logprobs)
    found.loss, contributions, gradient = attribute_loss(loss_fn, row, now.tolist())
    if contributions is None:
        found.missing.append("the parts of tokens in the loss: this loss does not weigh tokens")
    for index, token in enumerate(found.tokens):
        if token.trained:
            token.gradient = float(gradient[index])
            token.loss = None if contributions is None else float(contributions[index])
