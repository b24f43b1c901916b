"""Checks of the length of a run: its steps, warm-ups, schedules and evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from areno.checks.formulas.optimizer_formulas import learning_rate
from areno.checks.inputs.findings import Finding, NotChecked, green, red
from areno.checks.inputs.subject import Subject
from areno.config.policy_experiments import CriticExperimentConfig, PolicyExperimentConfig

_MOST_WARMUP = 0.75  # of the updates of a run
_LEAST_SHARE, _FEW_STEPS = 0.01, 10  # of the rows, by fewer steps than these, is a trial
_LOW = 0.2  # of the peak learning rate


def n_steps(subject: Subject) -> int | None:
    """Return the largest number of steps of the user's run. None if it is not known before the run."""
    config = subject.config
    limits = [config.total_train_steps]
    n_samples = config.gconfig.n_samples if isinstance(config, PolicyExperimentConfig) else 1
    if config.total_train_n_seqs is not None:
        limits.append(-(-config.total_train_n_seqs // (config.train_dataset.batch_size * n_samples)))
    if len(subject.training_rows) == 1:
        limits.append(config.total_train_epochs * _steps_of_epoch(subject))
    return min((limit for limit in limits if limit is not None), default=None)


def _steps_of_epoch(subject: Subject) -> int:
    [dataset] = subject.training_rows
    size, n_rows = dataset.section.batch_size or 1, dataset.loader.n_rows
    return n_rows // size if dataset.section.drop_last else -(-n_rows // size)


def n_updates(subject: Subject, role: str, steps: int) -> int | None:
    """Return the number of optimizer steps of a model in the user's run. None if it depends on the rows."""
    config = subject.config
    section = config.trained_models()[role]
    each = section.ppo_n_minibatches if isinstance(config, PolicyExperimentConfig) else 1
    if role == "critic":
        return steps * each * section.epochs
    if section.gradient_accumulation_steps is not None:
        if section.mb_spec.mini_bs is None:
            return None
        size = max(1, section.mb_spec.mini_bs // config.rows_per_item())
        each = -(-config.items_per_step // (size * section.gradient_accumulation_steps))
    first = config.critic.warmup_steps if isinstance(config, CriticExperimentConfig) else 0
    return max(0, steps - first) * each


def rates(subject: Subject, role: str) -> list[float]:
    """Return the learning rate of each update of a model in the user's run, by the schedule. Empty if not known."""
    steps = n_steps(subject)
    n = None if steps is None else n_updates(subject, role, steps)
    optimizer = subject.config.trained_models()[role].optimizer
    return [learning_rate(optimizer, number, n) for number in range(n or 0)]


def run_length(subject: Subject) -> Iterator[Finding]:
    """Whether the run has steps enough to read more than a few of its rows."""
    steps = n_steps(subject)
    if steps is None or len(subject.training_rows) != 1:
        raise NotChecked("the number of steps of the run is not known before it")
    share = steps / max(1, _steps_of_epoch(subject))
    text = f"the run has {steps} steps and reads {share:.3g} epochs of its rows"
    if share < _LEAST_SHARE and steps < _FEW_STEPS:
        yield red("run-length", f"{text}: see total_train_steps and total_train_n_seqs")
    else:
        yield green("run-length", text)


def critic_warmup(subject: Subject) -> Iterator[Finding]:
    """Whether the policy is trained at all after the critic's warm-up."""
    config, steps = subject.config, n_steps(subject)
    if not isinstance(config, CriticExperimentConfig) or steps is None:
        return
    warmup = config.critic.warmup_steps
    text = f"critic.warmup_steps={warmup} of the {steps} steps of the run train only the critic"
    if warmup >= steps:
        yield red("critic-warmup", f"{text}: the policy is never trained")
    elif warmup > _MOST_WARMUP * steps:
        yield red("critic-warmup", f"{text}: the policy is trained in {steps - warmup} steps alone")
    else:
        yield green("critic-warmup", text)


def lr_schedule(subject: Subject) -> Iterator[Finding]:
    """Whether the learning rate reaches its peak, and does not stay at its end for most of the run."""
    wrong, known = list[Finding](), False
    for role, section in subject.config.trained_models().items():
        of_updates, own = rates(subject, role), section.optimizer
        if not of_updates or not own.lr:
            continue
        known, n = True, len(of_updates)
        warmup = round(own.warmup_steps_proportion * (own.lr_decay_steps or n))
        low = sum(rate <= _LOW * own.lr for rate in of_updates[warmup:])
        name = f"{role}.optimizer"
        if warmup > _MOST_WARMUP * n and n > 1:
            text = f"the learning rate of the {role} warms up in {warmup} updates, and the run has {n}"
            wrong.append(red("lr-schedule", f"{text}: see {name}.warmup_steps_proportion and lr_decay_steps"))
        elif low > n / 2:
            text = f"in {low} of {n} updates, the learning rate of the {role} is at most {_LOW:g} of its peak"
            wrong.append(red("lr-schedule", f"{text}: see {name}.lr_decay_steps and min_lr_ratio"))
    if known:
        yield from wrong or [green("lr-schedule", "learning rates reach their peak, and decay over the run")]


def evaluations(subject: Subject) -> Iterator[Finding]:
    """Whether a run that shall be evaluated on its way is."""
    config, steps = subject.config, n_steps(subject)
    if config.valid_dataset is None or steps is None:
        return
    every, in_epochs = config.evaluator.freq_steps, config.evaluator.freq_epochs
    text = f"evaluator.freq_steps={every}, but the run has {steps} steps"
    n_epochs = math.ceil(steps / _steps_of_epoch(subject)) if len(subject.training_rows) == 1 else None
    if every is not None and every > steps and steps >= _FEW_STEPS:
        yield red("evaluations", f"{text}: it is evaluated at its end alone")
    elif in_epochs is not None and n_epochs is not None and in_epochs > n_epochs:
        text = f"evaluator.freq_epochs={in_epochs}, but the run has {n_epochs} epochs"
        yield red("evaluations", f"{text}: it is evaluated at its end alone")
    else:
        yield green("evaluations", f"the run is evaluated {_how_often(every, in_epochs)}")


def _how_often(every: Any, in_epochs: Any) -> str:
    if every is not None:
        return f"after every {every} steps, and at its end"
    return "after epochs, and at its end" if in_epochs is not None else "at its end"


CHECKS = (run_length, critic_warmup, lr_schedule, evaluations)
