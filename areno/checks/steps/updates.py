"""Checks of what an optimizer makes of a gradient, and of the checkpoint that the run saves."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areno.checks.formulas.optimizer_formulas import Moments, decays, learning_rate, optimizer_step
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.steps.gradient import norm_of
from areno.checks.steps.step_formula import relative_difference
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Tensors, WatchedRun
from areno.engine.train import optimizer as train_optimizer
from areno.plan.folders import load_tokenizer

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_ROUNDED = 0.01  # relative error of a change of weights in fp32; with moments in bf16 it is 0.002
_OF_8_BITS = 0.15  # from the second update on, as the moments of the first are rounded
_OF_DECAY = 0.1  # relative error of a measured weight decay
_NO_DECAY = 1e-4  # of the weights, as a share of the learning rate
_MEASURED = ("adam", "sgd", "muon", "adam_8bit")  # whose first update has no rounding but that of fp32
_MOST_RATES = 100_000
_TEXT = "The 3 numbers: 17 + 25 = 42!\n"


def learning_rates(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the learning rates are those of the schedule and none is 0, here and in the user's own run."""
    wrong = list[Finding]()
    run = found.run
    for role, section in subject.config.trained_models().items():
        own, steps = section.optimizer, subject.config.total_train_steps
        length = own.lr_decay_steps or steps
        if not own.lr:
            wrong.append(red("learning-rate", f"{role}.optimizer.lr is 0, so no weight changes"))
        elif length is not None:
            rates = [learning_rate(own, step, length) for step in range(steps or length)]
            if fault := _other_schedule(replace(own, lr_decay_steps=length), rates):
                wrong.append(red("learning-rate", f"of the schedule of the {role}, {fault}"))
            if zeros := [number for number, rate in enumerate(rates, 1) if rate <= 0]:
                text = f"by its schedule, the learning rate of the {role} is 0 in {len(zeros)} of {len(rates)} updates"
                wrong.append(red("learning-rate", f"{text}, first in update {zeros[0]}: see {role}.optimizer"))
    seen = []
    for update in run.updates:
        optimizer = run.config.trained_models()[update.role].optimizer
        wanted = learning_rate(optimizer, update.step - 1, run.config.total_train_steps)
        seen.append(update.stats["lr"])
        if abs(seen[-1] - wanted) > 1e-6 * wanted:
            text = f"update {update.step} of the {update.role} has the learning rate {seen[-1]:g}, expected {wanted:g}"
            wrong.append(red("learning-rate", text))
    yield from wrong or [green("learning-rate", "learning rates are those of the schedule, and none is 0")]


def _other_schedule(own: Any, rates: Sequence[float]) -> str:
    """Say which update of the user's run would have another learning rate than its schedule says, or ""."""
    for number, wanted in enumerate(rates[:_MOST_RATES]):
        if abs((given := train_optimizer.learning_rate(own, number)) - wanted) > 1e-6 * own.lr:
            return f"update {number + 1} would have the learning rate {given:.4g}, and not {wanted:.4g}"
    return ""


def optimizer_updates(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether weights move as the optimizer's formula says, from the gradient and the learning rate."""
    run, apart, wrong = found.run, list[float](), list[Finding]()
    for role in dict.fromkeys(update.role for update in run.updates):
        optimizer, moments = run.config.trained_models()[role].optimizer, Moments()
        for number, update in enumerate(update for update in run.of(role) if update.n_steps):
            change = {name: update.after[name].double() - value for name, value in update.before.items()}
            rate = learning_rate(optimizer, update.step - 1, run.config.total_train_steps)
            earlier = copy.deepcopy(moments)
            wanted = optimizer_step(optimizer, rate, update.before, update.gradient, moments)
            apart.append(relative_difference(change, wanted))
            most = _OF_8_BITS if optimizer.type == "adam_8bit" and number else _ROUNDED
            if apart[-1] > most:
                text = f"update {update.step} moves the weights of the {role} by {norm_of(change):.3g}, by the formula"
                text += f" of {optimizer.type} by {norm_of(wanted):.3g}"
                text += f", in a direction of cosine {_cosine(change, wanted):.3f}"
                unclipped = optimizer_step(optimizer, rate, update.before, update.gradient, earlier, clips=False)
                if relative_difference(change, unclipped) <= most:
                    text += ": gradient_clipping is left out"
                wrong.append(red("optimizer-update", text))
            elif not number and optimizer.type in _MEASURED:
                wrong += _decay_faults(optimizer, rate, role, update.before, change, wanted)
    if apart and not wrong:
        wrong = [green("optimizer-update", f"weights move as the optimizer's formula says, to {max(apart):.1g}")]
    yield from wrong


def _decay_faults(
    optimizer: Any, rate: float, role: str, weights: Tensors, change: Tensors, wanted: Tensors
) -> Iterator[Finding]:
    """Measure the weight decay, which is too small a part of an update to be seen in its norm."""
    given = optimizer.weight_decay
    for what, share in (("matrices", given), ("norms and biases", 0.0)):
        names = [name for name, value in weights.items() if decays(name, value) == (what == "matrices")]
        squares = sum(float(weights[name].double().square().sum()) for name in names)
        if not squares:
            continue
        more = sum(float(((change[name] - wanted[name]) * weights[name].double()).sum()) for name in names)
        measured = share - more / squares / rate
        if abs(measured - share) > _OF_DECAY * given + _NO_DECAY:
            text = f"{what} of the {role} decay by {measured:.3g} per learning rate, expected {share:g}"
            yield red("optimizer-update", f"{text} ({role}.optimizer.weight_decay={given:g})")
            return


def _cosine(one: Tensors, other: Tensors) -> float:
    product = sum(float((one[name].double() * other[name].double()).sum()) for name in one)
    return product / (norm_of(one) * norm_of(other) or 1.0)


def saved_checkpoint(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the checkpoint at the end of the run is the trained model, as transformers loads it."""
    folders = sorted((found.folder / "checkpoints").glob("step-*"))
    if not folders:
        yield not_checked("saved-checkpoint", "the run saves no checkpoint at its end")
        return
    run, folder, wrong = found.run, folders[-1], list[str]()
    for role in dict.fromkeys(update.role for update in run.updates):
        place = folder if role == "actor" else folder / role
        if place.is_dir():
            wrong += _other_weights(run, role, place)
    if not (folder / "adapter_config.json").is_file():
        wrong += _other_outputs(run, folder)
    wrong += _other_tokenizer(subject, folder)
    yield from (red("saved-checkpoint", text) for text in wrong[:2])
    if not wrong:
        yield green(
            "saved-checkpoint", "transformers loads the last checkpoint as the trained model, with its tokenizer"
        )


def _other_weights(run: WatchedRun, role: str, folder: Path) -> Iterator[str]:
    saved, trained, before = run.models[role].read(folder), run.of(role)[-1].after, run.start(role)
    apart = {name: float((saved[name].float() - value).abs().max()) for name, value in trained.items()}
    name, most = max(apart.items(), key=lambda each: each[1])
    if most:
        text = f"the checkpoint has other weights than the trained {role}, by up to {most:.2g} in {name}"
        is_start = all(torch.equal(saved[name].float(), value) for name, value in before.items())
        yield f"{text}: they are those from before the training" if is_start else text


def _other_outputs(run: WatchedRun, folder: Path) -> Iterator[str]:
    """Load the folder alone, so that its config.json counts."""
    update, model = run.of()[-1], run.models["actor"]
    tokens = [int(token) for token in update.given[0].tokens]  # type: ignore[union-attr]
    with torch.no_grad():
        wanted = model.outputs({name: value.double() for name, value in update.after.items()}, tokens)
        loaded = type(model)(folder, model.head).outputs({}, tokens)
    if (apart := float((loaded - wanted).abs().max())) > 1e-4 * max(1.0, float(wanted.abs().max())):
        yield f"the checkpoint alone has other outputs by transformers, by up to {apart:.2g}: see its config.json"


def _other_tokenizer(subject: Subject, folder: Path) -> Iterator[str]:
    own, saved = subject.tokenizer, load_tokenizer(str(folder))
    if saved(_TEXT, add_special_tokens=False)["input_ids"] != own(_TEXT, add_special_tokens=False)["input_ids"]:
        yield "the tokenizer of the checkpoint makes other ids of a text"
    elif saved.chat_template != own.chat_template:
        yield "the checkpoint has another chat template than the run"


CHECKS = [of_two_steps(check) for check in (learning_rates, optimizer_updates, saved_checkpoint)]
