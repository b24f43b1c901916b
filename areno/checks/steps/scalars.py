"""Checks of the numbers that a loop computes for a loss, and of weights that nothing but an update may move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.steps.step_formula import mask_of
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Tensors, WatchedRun
from areno.types import TrainSequence

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_POINT_ERROR = 1e-3  # of a sum over the tokens of an answer

Row = tuple[list[int], torch.Tensor]


def reference_point(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the reference point of KTO is the mean log-ratio of prompts with the answers of other prompts."""
    if not found.points:
        return
    run = found.run
    reference = run.frozen.get("ref", run.start())
    model = "ref" if "ref" in run.frozen else "actor"
    cases = [(each.rows, each.weights, each.point) for each in found.points]
    for update in run.of():
        cases.append((list(update.given), update.before, update.loss_fn.keywords["reference_point"]))  # type: ignore[attr-defined]
    informs, wrong = False, list[Finding]()
    for rows, weights, point in cases:
        mean = _mean_log_ratio(run, _joined(rows, 1), weights, reference, model)
        wanted = max(0.0, mean)
        informs = informs or wanted > _POINT_ERROR
        if abs(point - wanted) > _POINT_ERROR * max(1.0, abs(wanted)):
            text = f"the reference point of KTO is {point:.4g}, by the formula {wanted:.4g}"
            reason = _why(run, rows, weights, reference, model, point, mean)
            wrong.append(red("reference-point", f"{text}: {reason}" if reason else text))
    if wrong:
        yield wrong[0]
    elif informs:
        yield green("reference-point", "the reference point of KTO is that of prompts with answers to other prompts")
    else:
        yield not_checked("reference-point", "the reference point is 0 here, whatever the answers are")


def _why(
    run: WatchedRun,
    rows: Sequence[TrainSequence],
    weights: Tensors,
    reference: Tensors,
    model: str,
    point: float,
    mean: float,
) -> str:
    others = {
        "it is that of the rows' own answers": (0, True),
        "it is that of the answers to the next prompts": (-1, True),
        "it may be negative": (1, False),
    }
    for text, (shift, clips) in others.items():
        own = _mean_log_ratio(run, _joined(rows, shift), weights, reference, model)
        if abs(point - (max(0.0, own) if clips else own)) <= _POINT_ERROR * max(1.0, abs(own)):
            return text
    lengths = np.mean([float(mask_of(row).sum()) for row in rows])
    if abs(point * lengths - mean) < 0.2 * abs(mean):
        return "it is a mean over tokens and not over answers"
    return ""


def _joined(rows: Sequence[TrainSequence], shift: int) -> list[Row]:
    """Return each prompt with the answer to the prompt that is `shift` rows before."""
    found, n = list[Row](), len(rows)
    for number, row in enumerate(rows):
        other = rows[(number - shift) % n]
        start, begin = (int(mask_of(each).int().argmax()) for each in (row, other))
        tokens = [*np.asarray(row.tokens)[:start].tolist(), *np.asarray(other.tokens)[begin:].tolist()]
        mask = torch.cat([torch.zeros(start, dtype=torch.bool), mask_of(other)[begin:]])
        found.append((tokens, mask))
    return found


def _mean_log_ratio(run: WatchedRun, rows: list[Row], weights: Tensors, reference: Tensors, model: str) -> float:
    with torch.no_grad():
        sums = [
            [
                float(run.models[role].logprobs(_in_float64(own), tokens, mask=mask).sum())
                for role, own in (("actor", weights), (model, reference))
            ]
            for tokens, mask in rows
        ]
    return float(np.mean([ours - theirs for ours, theirs in sums]))


def _in_float64(weights: Tensors) -> Tensors:
    return {name: value.double() for name, value in weights.items()}


def weights_between_updates(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether an update begins with the weights that the last one made, and frozen models stay as they are."""
    wrong, run = list[Finding](), found.run
    for role in dict.fromkeys(update.role for update in run.updates):
        updates = run.of(role)
        for last, update in pairwise(updates):
            if changed := _changed(last.after, update.before):
                text = f"between updates {last.step} and {update.step}, something else changed the {role}"
                wrong.append(red("weights-between-updates", f"{text}: {len(changed)} tensors, such as {changed[0]}"))
    for role, after in found.frozen.items():
        if changed := _changed(run.frozen[role], after):
            text = f"the {role} is not trained, but {len(changed)} of its tensors have changed, such as {changed[0]}"
            wrong.append(red("weights-between-updates", text))
    yield from wrong or [green("weights-between-updates", "nothing but updates changes weights")]


def _changed(before: Tensors, after: Tensors) -> list[str]:
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


CHECKS = [of_two_steps(check) for check in (reference_point, weights_between_updates)]
