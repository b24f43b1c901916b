"""Checks of the gradient, on two steps of the run with a small model in fp32.

Each check yields red findings for what is wrong, or one green finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.steps.probes import ROUGH, match_rows
from areno.checks.steps.step_formula import (
    DistillFormula,
    PolicyFormula,
    StepFormula,
    formula_of,
    loss_and_gradient,
    mask_of,
    relative_difference,
)
from areno.checks.steps.two_steps import TwoSteps, of_two_steps
from areno.checks.steps.watched_run import Probe, Tensors, Update
from areno.models.registry import load_config

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

CLOSE = 1e-4  # relative difference of a gradient in fp32 and in float64
SAME = 1e-5  # relative difference of losses in fp32 whose sums are in another order
_NOTHING = 1e-6  # norm of a gradient that is made of rounding alone
_EQUAL_SAMPLES = "the model here draws the same sample for a prompt each time, which trains nothing"
_LEFT = 1e-3  # relative difference of what is left of a gradient, a difference of two of them


def gradient_nonzero(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the first update of each model has a gradient."""
    norms = []
    for update in found.run.updates:
        norm = update.stats["grad_norm"]
        if not norm and found.run.has_equal_samples(update.step):
            yield not_checked("gradient-nonzero", f"in step {update.step}, {_EQUAL_SAMPLES}")
            continue
        if not update.n_steps:
            yield red("gradient-nonzero", f"update {update.step} of the {update.role} was skipped")
        elif not math.isfinite(norm) or not norm:
            yield red("gradient-nonzero", f"the gradient of update {update.step} of the {update.role} is {norm:g}")
        norms.append(norm)
    if norms and all(math.isfinite(norm) and norm for norm in norms):
        yield green("gradient-nonzero", f"the gradients of the first updates have norms of {_range(norms)}")


def loss_formula(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether loss and gradient of each update are those of the formula in float64, on a model of transformers."""
    apart, wrong = list[float](), list[Finding]()
    for update in found.run.updates:
        if not update.stats["grad_norm"]:
            yield not_checked("loss-formula", f"update {update.step} of the {update.role}: see gradient-nonzero")
            return
        formula = formula_of(found.run.config, update)
        what = f"of update {update.step} of the {update.role}"
        result = update.stats["loss"], update.gradient
        wrong += _compare("loss-formula", what, found, formula, update, update.before, result, apart)
        if wrong:  # later updates are of weights that it has made
            break
    yield from wrong or [
        green("loss-formula", f"loss and gradient equal the formula in float64 on transformers, to {max(apart):.1g}")
    ]


def off_policy_loss(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether they are so with ratios, references and old values that differ from the model's own."""
    apart, wrong = list[float](), list[Finding]()
    for role, probes in found.probes.items():
        formula = formula_of(found.run.config, probes.update)
        probe, what = probes.off_policy, f"of the {role} away from the policy that sampled"
        result = probe.loss, probe.gradient
        wrong += _compare("off-policy-loss", what, found, formula, probes.update, probes.weights, result, apart, probe)
    text = "loss and gradient equal the formula also away from the policy that sampled"
    yield from wrong or [green("off-policy-loss", f"{text}, to {max(apart):.1g}")]


def _compare(
    name: str,
    what: str,
    found: TwoSteps,
    formula: StepFormula,
    update: Update,
    weights: Tensors,
    result: tuple[float, Tensors],
    differences: list[float],
    probe: Probe | None = None,
) -> Iterator[Finding]:
    rows = update.given if probe is None else probe.rows

    def agrees(formula: StepFormula) -> tuple[bool, float, float]:
        loss, slopes = loss_and_gradient(formula, found.run, weights, rows, update)
        apart = relative_difference(result[1], slopes) if result[1] else math.inf
        if result[1] and max(norm_of(result[1]), norm_of(slopes)) <= _NOTHING:
            apart = 0.0
        return abs(result[0] - loss) <= CLOSE * max(1.0, abs(loss)) and apart <= CLOSE, loss, apart

    is_same, loss, apart = agrees(formula)
    differences.append(apart)
    if is_same:
        return
    losses = f"{result[0]:.6g}", f"{loss:.6g}"
    said = f"the loss {what} is {losses[0]}, by the formula {losses[1]}, and the gradients differ"
    if losses[0] == losses[1]:
        said = f"the loss {what} is that of the formula ({losses[0]}), but the gradients differ"
    said += f" by {apart:.2g} of their size"
    reason = next((text for text, other in formula.variants() if agrees(other)[0]), "")
    if not reason and result[1]:
        slopes = loss_and_gradient(formula, found.run, weights, rows, update)[1]
        factor = norm_of(result[1]) / (norm_of(slopes) or math.inf)
        if factor and relative_difference(result[1], {key: factor * value for key, value in slopes.items()}) <= CLOSE:
            reason = f"the gradient is {factor:.5g} times that of the formula"
        elif probe is None:
            reason = _left_gradient(found.run.of(update.role), update, slopes)
    yield red(name, f"{said}: {reason}" if reason else said)


def _left_gradient(updates: Sequence[Update], update: Update, slopes: Tensors) -> str:
    """Say that a gradient contains that of the update before, if what it has beyond `slopes` is a multiple of it."""
    number = next(index for index, each in enumerate(updates) if each is update)
    if not number:
        return ""
    before = {key: value.double() for key, value in updates[number - 1].gradient.items()}
    more = {key: value.double() - slopes[key] for key, value in update.gradient.items()}
    factor = _product(more, before) / (_product(before, before) or math.inf)
    if factor <= 0 or relative_difference(more, {key: factor * value for key, value in before.items()}) > _LEFT:
        return ""
    times = "" if abs(factor - 1) <= _LEFT else f" {factor:.3g} times"
    return f"it is the gradient of this update plus{times} that of the update before. Gradients are not cleared"


def _product(one: Tensors, other: Tensors) -> float:
    return sum(float((value.double() * other[key].double()).sum()) for key, value in one.items())


def finite_differences(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the loss changes along the gradient as the gradient says. Needs no formula, so any loss is checked."""
    for role, probes in found.probes.items():
        if role == "actor" and (reason := _stops_gradient(found)):
            yield not_checked("finite-differences", reason)
            continue
        difference = probes.difference
        if difference is None:
            yield not_checked("finite-differences", f"the gradient of the {role} is 0 away from the sampled policy")
            continue
        apart = difference.apart
        text = f"moved along its gradient, the loss of the {role} changes by {difference.measured:.4g} per unit; the "
        text += f"squared norm of the gradient is {difference.predicted:.4g}"
        if apart > ROUGH and load_config(subject.plan.spec.actor.path).experts is not None:
            yield not_checked("finite-differences", f"{text}; tokens may change their experts, where the loss jumps")
            continue
        yield (green if apart <= ROUGH else red)("finite-differences", text)


def _stops_gradient(found: TwoSteps) -> str:
    """Return why the loss of the actor need not change as its gradient says, or ""."""
    try:
        formula = formula_of(found.run.config, found.run.of()[-1])
    except NotChecked:
        return ""
    if isinstance(formula, DistillFormula) and formula.kind == "sampled_reverse_kl":
        return "no gradient flows through the advantages of sampled distillation, so its value changes otherwise"
    own = formula.policy if isinstance(formula, DistillFormula) else formula
    stops = isinstance(own, PolicyFormula) and own.objective.stops_gradient
    return "no gradient flows through the importance ratios of this surrogate, so its value changes otherwise" * stops


def micro_batches(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    yield from _unchanged(found, "micro-batches", "single_rows", "micro-batches of one row each")


def shared_prefixes(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    yield from _unchanged(found, "shared-prefixes", "shared", "prefixes of rows that are computed once")


def data_parallel_ranks(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    yield from _unchanged(found, "data-parallel-ranks", "ranks", "the sum over the shares of two data-parallel ranks")


_WHY_NOT = {
    "shared": "the model or actor.share_prefixes=off shares no prefixes",
    "ranks": "there are too few rows for two ranks",
}


def _unchanged(found: TwoSteps, name: str, attribute: str, what: str) -> Iterator[Finding]:
    """Compare loss and gradient with those of all rows in one micro-batch."""
    for role, probes in found.probes.items():
        other: Probe | None = vars(probes)[attribute]
        if other is None:
            if role == "actor":
                yield not_checked(name, _WHY_NOT[attribute])
            continue
        whole = probes.off_policy
        apart = relative_difference(other.gradient, {key: value.double() for key, value in whole.gradient.items()})
        of_loss = abs(other.loss - whole.loss) / max(1.0, abs(whole.loss))
        said = f"with {what}, the gradient of the {role} changes by {apart:.1g} and the loss by {of_loss:.1g}"
        if apart <= CLOSE and of_loss <= SAME:
            yield green(name, said)
            continue
        said += (
            f" (relative), and rounding explains {CLOSE:.0g} of a gradient whose terms cancel, and {SAME:.0g} of a loss"
        )
        factor = norm_of(other.gradient) / (norm_of(whole.gradient) or math.inf)
        if abs(factor - 1) > ROUGH:
            said += f". It is {factor:.3g} times as large, computed in {other.n_micro_batches} parts and not in one"
        yield red(name, said)


def first_ratio(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the importance ratios of a first update are 1 and nothing is clipped."""
    updates = [update for update in found.run.of() if "ratio_mean" in update.stats]
    if not updates:
        return
    wrong = []
    for update in updates:
        stats = update.stats
        largest = max(abs(stats["ratio_mean"] - 1), abs(stats["ratio_max"] - 1))
        clipped = max(stats.get("clip_frac", 0.0), stats.get("clip_frac_dual", 0.0))
        close = CLOSE if update.how.old_logprobs == "rollout" else 0.0
        if largest > close or clipped:
            text = f"update {update.step} is the first of its rows, but its ratios differ from 1 by up to {largest:.2g}"
            wrong.append(red("first-ratio", f"{text} and {clipped:.3g} of them are clipped"))
    yield from wrong or [green("first-ratio", "importance ratios of the first update are 1, and none is clipped")]


def old_logprobs(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether the ratios of a second mini-batch compare with the policy before the first one."""
    probes = found.probes["actor"]
    probe, update = probes.two_minibatches, probes.update
    if probe is None:
        return
    if update.how.old_logprobs == "loglinear":
        yield not_checked("old-logprobs", "actor.prox_logp_method=loglinear interpolates them in the loss")
        return
    of_rollout = update.how.old_logprobs == "rollout"
    largest, moved = 0.0, 0.0
    before = match_rows(probe.rows, probes.plain.seen)
    for row, seen, own in zip(probe.rows, match_rows(probe.rows, probe.seen), before, strict=True):
        if seen.number and seen.old_logprobs is not None and seen.trained.any():
            wanted = np.asarray(row.logprobs) if of_rollout else own.outputs
            largest = max(largest, float(np.abs(seen.old_logprobs - wanted)[seen.trained].max()))
            moved = max(moved, float(np.abs(seen.old_logprobs - seen.outputs)[seen.trained].max()))
    policy = "the rollout" if of_rollout else "the policy before the first"
    if largest > CLOSE:
        text = f"the ratios of a second mini-batch do not compare with {policy}: they differ by {largest:.2g}"
        yield red("old-logprobs", text + (": they compare with the live policy" if not moved else ""))
    else:
        yield green("old-logprobs", f"the ratios of a second mini-batch compare with {policy}")


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def _range(numbers: list[float]) -> str:
    low, high = float(np.min(numbers)), float(np.max(numbers))
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def mini_batches(subject: Subject, found: TwoSteps) -> Iterator[Finding]:
    """Whether each row is in one of several mini-batches, and they are of equal sizes."""
    probe = found.probes["actor"].two_minibatches
    if probe is None:
        return
    given = Counter(tuple(np.asarray(row.tokens).tolist()) for row in probe.rows if mask_of(row).any())
    seen = Counter(tuple(each.tokens.tolist()) for each in probe.seen if each.trained.any())
    more, fewer = (seen - given).total(), (given - seen).total()
    sizes = Counter(each.number for each in probe.seen if each.trained.any())
    if more or fewer:
        text = f"of {given.total()} rows in two mini-batches, {fewer} are never trained and {more} once too often"
        yield red("mini-batches", text)
    elif len(sizes) != 2 or max(sizes.values()) - min(sizes.values()) > 1 + given.total() // 4:
        yield red("mini-batches", f"two mini-batches have {sorted(sizes.values())} rows")
    else:
        yield green("mini-batches", "each row is in one of two mini-batches")


CHECKS = [
    of_two_steps(check)
    for check in (
        gradient_nonzero,
        loss_formula,
        off_policy_loss,
        finite_differences,
        micro_batches,
        shared_prefixes,
        data_parallel_ranks,
        first_ratio,
        old_logprobs,
        mini_batches,
    )
]
