"""Checks of the numbers of a run that are far outside of what any run uses: rates, clips and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.checks.settings.run_length import rates
from areno.config.models import KLConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.ratio import RatioConfig
from areno.files.paths import existing_path
from areno.models.parameters import n_parameters
from areno.models.registry import load_config
from areno.recipes import dpo, kto, online_dpo, sft

_USUAL_WEIGHT = 0.02  # of a model
_LEAST_MOVE = 1e-7  # of a weight in the whole run
_MOST_MOVE = 0.05  # in one update
_MOST_DECAY = 10.0  # with it, the decay of a usual weight is a fifth of an update of Adam
_MOST_SHRINK = 0.7  # exponent by which weights decay in a run that starts from a trained model
_MOST_EPS = 3.0  # of Adam, as a multiple of the largest gradient of an element
_CLIPS = {"token": 1e-3, "sequence": 1e-6}  # the least that is more than rounding
_MOST_KL, _MOST_ENTROPY = 1.0, 0.5
_BETAS = (1e-3, 10.0)
_ADAM = ("adam", "adam_bf16", "adam_8bit")


def update_size(subject: Subject) -> Iterator[Finding]:
    """Whether the optimizer can move the weights by enough to matter, and by little enough to keep the model."""
    wrong, moves = list[Finding](), list[str]()
    for role, section in subject.config.trained_models().items():
        own, key = section.optimizer, f"{role}.optimizer"
        if not own.lr:
            continue  # see learning-rate
        gradient = _largest_element(subject, section)
        each = own.lr * (_share_of_step(own, gradient) if own.type != "sgd" else gradient or 1.0)
        total = sum(rates(subject, role)) / own.lr * each
        if own.type in _ADAM and own.beta1**2 >= own.beta2:
            text = f"{key}.beta1={own.beta1:g} and beta2={own.beta2:g}: Adam needs beta1^2 < beta2"
            wrong.append(red("update-size", f"{text}; are they exchanged?"))
        if each > _MOST_MOVE and own.type in _ADAM:
            text = f"{key}.lr={own.lr:g} moves a weight by up to {each:.2g} in one update"
            wrong.append(red("update-size", f"{text}, more than weights of a model are ({_USUAL_WEIGHT:g})"))
        elif 0 < total < _LEAST_MOVE:
            text = f"all updates of the {role} together move a weight by at most about {total:.1g}"
            wrong.append(red("update-size", f"{text}: see {key}.lr, type ({own.type}), eps and gradient_clipping"))
        elif own.type in _ADAM and gradient is not None and own.eps > _MOST_EPS * gradient:
            text = f"{key}.eps={own.eps:g} is more than a gradient, of at most about {gradient:.1g} for a weight"
            wrong.append(red("update-size", f"{text} with gradient_clipping={own.gradient_clipping:g}: weights stay"))
        moves.append(f"{total:.2g} ({role})")
    if moves:
        text = f"all updates together move a weight by at most about {', '.join(moves)}"
        yield from wrong or [green("update-size", text)]


def _largest_element(subject: Subject, section: Any) -> float | None:
    """Return the root mean square of the elements of a clipped gradient, at most. None if it is not known."""
    folder = existing_path(section.path or subject.config.actor.path)
    if not section.optimizer.gradient_clipping or vars(section).get("use_lora") or folder is None:
        return None
    return section.optimizer.gradient_clipping / math.sqrt(n_parameters(load_config(folder)))


def _share_of_step(optimizer: Any, gradient: float | None) -> float:
    """Return how much of the learning rate an update of Adam takes."""
    return 1.0 if gradient is None or optimizer.type == "muon" else gradient / (gradient + optimizer.eps)


def weight_decay(subject: Subject) -> Iterator[Finding]:
    """Whether the weight decay leaves the model as it was trained before."""
    wrong, shown = list[Finding](), list[str]()
    for role, section in subject.config.trained_models().items():
        decay = section.optimizer.weight_decay
        shrink = decay * sum(rates(subject, role))
        text = f"{role}.optimizer.weight_decay={decay:g}"
        if decay > _MOST_DECAY:
            share = min(1.0, decay * _USUAL_WEIGHT)
            wrong.append(red("weight-decay", f"{text} moves a weight by {share:.0%} of what the gradient moves it"))
        elif shrink > _MOST_SHRINK and not section.init_from_scratch:
            wrong.append(red("weight-decay", f"{text} shrinks weights to {math.exp(-shrink):.0%} in the run"))
        shown.append(f"{math.exp(-shrink):.4g} ({role})")
    yield from wrong or [green("weight-decay", f"of each weight, the decay leaves the share {', '.join(shown)}")]


def clip_range(subject: Subject) -> Iterator[Finding]:
    """Whether the clip range of importance ratios is wide enough to let anything move, and narrow enough to clip."""
    actor = subject.config.actor
    own = actor.clip_range() if isinstance(actor, RatioConfig) else None
    if own is None:
        return
    assert isinstance(actor, RatioConfig)
    least, text = _CLIPS[actor.ratio_level], f"actor.eps_clip={own:g}"
    dual, higher = vars(actor).get("c_clip"), vars(actor).get("eps_clip_higher") or own
    if own < least or higher < least:
        text = f"{text} and eps_clip_higher={higher:g}" if higher != own else text
        yield red("clip-range", f"{text}: rounding alone moves ratios out of it, and their tokens train nothing")
    elif own >= 1:
        yield red("clip-range", f"{text}: no ratio is below 1 - eps_clip, so nothing is clipped there")
    elif dual is not None and dual <= 1 + higher:
        yield red("clip-range", f"actor.c_clip={dual:g} lies within the clip range, which ends at {1 + higher:g}")
    else:
        yield green("clip-range", f"{text}, for ratios of a {actor.ratio_level}")


def loss_weights(subject: Subject) -> Iterator[Finding]:
    """Whether no term dwarfs the others, and the loss has a term at all."""
    config, wrong = subject.config, list[Finding]()
    actor = config.actor
    if isinstance(actor, KLConfig) and actor.kl_ctl >= _MOST_KL:
        text = f"actor.kl_ctl={actor.kl_ctl:g}: the KL dwarfs advantages, which are about 1"
        wrong.append(red("loss-weights", f"{text}, and holds the policy at the reference (usual: 0.001 to 0.1)"))
    bonus = vars(actor).get("entropy_bonus")
    if bonus is not None and bonus.coef >= _MOST_ENTROPY:
        text = f"actor.entropy_bonus.coef={bonus.coef:g}: the entropy dwarfs advantages, which are about 1"
        wrong.append(red("loss-weights", f"{text} (usual: 0.001)"))
    if isinstance(config, dpo.DPOConfig | online_dpo.OnlineDPOConfig | kto.KTOConfig):
        beta, kind = config.actor.beta, vars(actor).get("loss_type", "kto")
        if kind in ("sigmoid", "robust", "kto") and not _BETAS[0] <= beta <= _BETAS[1]:
            text = "the loss hardly depends on the answers" if beta < 1 else "the policy is held at the reference"
            wrong.append(red("loss-weights", f"actor.beta={beta:g}: {text} (usual: 0.01 to 1)"))
    teacher = config.teacher if isinstance(config, PolicyExperimentConfig) else None
    if teacher is not None and not (teacher.distill_loss_weight or teacher.rl_loss_weight):
        text = "teacher.distill_loss_weight and teacher.rl_loss_weight are 0"
        wrong.append(red("loss-weights", f"{text}: the loss is always 0"))
    if not isinstance(config, sft.SFTConfig):
        yield from wrong or [green("loss-weights", "no term of the loss dwarfs the others")]


CHECKS = (update_size, weight_decay, clip_range, loss_weights)
