"""Rows of a watched run, computed again in other ways: off-policy, in other micro-batches, with equal rewards."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from areno.checks.inputs.findings import NotChecked
from areno.checks.steps.step_formula import PolicyFormula, formula_of, mask_of
from areno.checks.steps.watched_run import LossRow, Probe, Tensors, Update, WatchedRun
from areno.config.policy_experiments import CriticExperimentConfig
from areno.config.ratio import RatioConfig
from areno.errors import EngineError
from areno.trainers.rows import set_trained
from areno.types import TrainSequence

_RATIOS = (0.3, -0.3, 3.0, -3.0)  # in units of the clip range
_BEYOND_DUAL_CLIP = 1.6  # log ratio
_NARROW = 0.02  # clip range
_POINT_MOVE = 3e-3  # of each weight, on average
_LONGEST_MOVE = 0.01  # of the weights, so that the loss is straight
_SHORTER_MOVES = (1.0, 0.1, 0.01)  # a sum of steep slopes may be small, so that a ratio passes its clip on the way
ROUGH = 0.05  # relative error of a finite difference of a loss in fp32


@dataclass
class FiniteDifference:
    """How the loss changes along the gradient, and how the gradient says that it does."""

    measured: float
    predicted: float

    @property
    def apart(self) -> float:
        return abs(self.measured / self.predicted - 1)


@dataclass
class Probes:
    """What `make_probes` computes of the rows of a role's last update, all with the same weights."""

    update: Update
    weights: Tensors
    plain: Probe  # as the update: ratios are 1
    off_policy: Probe  # ratios, reference and old values differ from those of the model
    single_rows: Probe
    shared: Probe | None
    ranks: Probe | None
    difference: FiniteDifference | None
    equal_rewards: Probe | None = None
    policy_term: Probe | None = None  # without the KL, as if the policy were the one that sampled
    two_minibatches: Probe | None = None  # the last probe, because it changes the weights


def make_probes(run: WatchedRun, role: str = "actor") -> Probes:
    update = run.of(role)[-1]
    unit = update.how.rows_per_unit
    plain = run.probe(update, _fresh(update), keeps_gradient=False)
    rows = off_policy_rows(run, plain)
    off_policy = run.probe(update, rows)
    enough = len(rows) // unit >= 2
    shares = run.engine._train_sharing[role].when != "off" and role == "actor"
    found = Probes(
        update,
        run.saved(role),
        plain,
        off_policy,
        single_rows=run.probe(update, rows, mini_bs=unit),
        shared=run.probe(update, rows, shares_prefixes=True) if shares else None,
        ranks=run.probe(update, rows, n_ranks=2) if enough else None,
        difference=_finite_difference(run, off_policy, update),
    )
    if role == "actor" and has_advantages(run):
        on_policy = [
            replace(row, logprobs=seen.outputs) for row, seen in zip(_fresh(update), rows_in_order(plain), strict=True)
        ]
        found.policy_term = run.probe(update, on_policy, loss_fn=_without_kl(update.loss_fn), keeps_gradient=False)
        found.equal_rewards = _with_equal_rewards(run, update)
        if len(rows) > 1:
            found.two_minibatches = run.probe(update, _fresh(update), n_minibatches=2, keeps_gradient=False)
    return found


@dataclass
class MovedPoint:
    """The reference point of KTO, of the rows of the last step, with weights that were moved from those of the run."""

    rows: list[TrainSequence]
    weights: Tensors
    point: float


def moved_points(run: WatchedRun) -> list[MovedPoint]:
    """Compute the reference point as the run does, with weights on both sides of the last ones.

    A point is 0 where its mean is negative, which says nothing, so that one side alone may not do.
    """
    if not run.points:
        return []
    items, *more = run.points[-1]
    update, found = run.of()[-1], list[MovedPoint]()
    direction = run.probe(update, _fresh(update), keeps_gradient=False).own_gradient
    norm = sum(float(tensor.double().square().sum()) for tensor in direction) ** 0.5
    size = sum(tensor.numel() for tensor in direction) ** 0.5 * _POINT_MOVE
    for side in (size, -size):
        with run.moved(update.role, direction, side / (norm or 1.0)):
            rows = [item.rows[0] for item in items]
            found.append(MovedPoint(rows, run.saved(update.role), run.loop.reference_point(items, *more)))
    return found


def _fresh(update: Update) -> list[TrainSequence]:
    # Old log-probabilities are stored by updates. Routes are of the weights that sampled, and not of the probe.
    return [replace(row, old_logprobs=None, routes=None) for row in update.given]


def has_advantages(run: WatchedRun) -> bool:
    """Whether the loss of the actor is a policy gradient alone."""
    try:
        return isinstance(formula_of(run.config, run.of()[-1]), PolicyFormula)
    except NotChecked:
        return False


def _without_kl(loss_fn: Any) -> Any:
    """Return a loss of areno without the terms beside that of the policy."""
    terms = ("kl_coef", "entropy_coef")
    return partial(loss_fn, **{name: 0.0 for name in terms if name in getattr(loss_fn, "keywords", {})})


def off_policy_rows(run: WatchedRun, plain: Probe) -> list[TrainSequence]:
    """Return copies of rows whose old log-probabilities, references and old values are drawn around the model's own.

    Ratios lie on both sides of each clip, and not near to it, so that rounding decides nothing.
    """
    draw, clip_range = np.random.default_rng(0), _clip_range(run)
    actor = run.config.actor
    by_sequence = isinstance(actor, RatioConfig) and actor.ratio_level == "sequence"
    found = []
    for index, (row, seen) in enumerate(zip(plain.rows, rows_in_order(plain), strict=True)):
        n_tokens = len(seen.tokens)
        row = copy.copy(row)
        if row.advantages is not None:
            numbers = np.arange(n_tokens) if not by_sequence else np.full(n_tokens, index)
            apart = clip_range * np.take(_RATIOS, numbers % len(_RATIOS))
            if not by_sequence or index % 5 == 4:
                far = (numbers % 5 == 4) if not by_sequence else np.ones(n_tokens, bool)
                apart = np.where(far, _BEYOND_DUAL_CLIP, apart)
            row.old_logprobs = seen.outputs.astype(np.float64) - apart
            if row.logprobs is not None:
                row.logprobs = row.old_logprobs + (0.0 if run.config.actor.old_logprobs == "rollout" else 0.1)
        for name in ("ref_logprobs", "teacher_logprobs"):
            if vars(row)[name] is not None:
                vars(row)[name] = seen.outputs.astype(np.float64) + draw.uniform(-0.4, 0.4, n_tokens)
        if row.weights is not None:
            row.weights = draw.uniform(0.5, 1.5, n_tokens)
        if row.values is not None:
            row.values = seen.outputs + run.config.critic.eps_clip * np.take(
                (0.3, 2.0, -0.3, -2.0), np.arange(n_tokens) % 4
            )
        found.append(row)
    return found


def _clip_range(run: WatchedRun) -> float:
    actor = run.config.actor
    own = actor.clip_range() if isinstance(actor, RatioConfig) else None
    return min(own or 0.2, 0.3)


def rows_in_order(probe: Probe) -> list[LossRow]:
    """Return what the loss saw of each of the probe's rows. Raises an error unless it saw each row once."""
    return match_rows(probe.rows, probe.seen)


def seen_rows(update: Update) -> list[tuple[TrainSequence, LossRow]]:
    """Return each row of an update with what the loss saw of it."""
    return list(zip(update.given, match_rows(update.given, update.seen), strict=True))


def match_rows(rows: Sequence[TrainSequence], seen: Sequence[LossRow]) -> list[LossRow]:
    left = list(seen)
    found = []
    for row in rows:
        own = np.asarray(row.tokens)
        same = [each for each in left if np.array_equal(each.tokens, own)]
        if not same and mask_of(row).any():
            text = f"of the {len(rows)} rows of an update, the loss has not seen each: row {len(found)} is left out"
            raise EngineError(text)
        if not same:
            raise NotChecked("the loss did not see each row once")
        exact = [each for each in same if np.array_equal(each.trained, mask_of(row).numpy())]
        found.append((exact or same)[0])
        left = [each for each in left if each is not found[-1]]
    return found


def _finite_difference(run: WatchedRun, probe: Probe, update: Update) -> FiniteDifference | None:
    """Move the weights along the gradient by little enough that no ratio passes a clip.

    A narrow clip range is widened, because weights in fp32 cannot move by as little as it takes.
    """
    clip, loss_fn = _clip_range(run), update.loss_fn
    if clip < _NARROW and "clip_eps" in getattr(loss_fn, "keywords", {}):
        clip, loss_fn = 0.2, partial(loss_fn, clip_eps=0.2, clip_eps_higher=None)
        probe = run.probe(update, probe.rows, loss_fn=loss_fn, keeps_gradient=False)
    squared = sum(float(tensor.double().square().sum()) for tensor in probe.own_gradient)
    if not squared:
        return None
    change = 0.05 * min(clip, 0.05)  # of the loss, in each direction
    amount = min(change / squared, _LONGEST_MOVE / squared**0.5)
    found = FiniteDifference(math.inf, squared)
    for part in _SHORTER_MOVES:
        losses = []
        for side in (part * amount, -part * amount):
            with run.moved(update.role, probe.own_gradient, side):
                losses.append(run.probe(update, probe.rows, loss_fn=loss_fn, keeps_gradient=False).loss)
        measured = FiniteDifference((losses[0] - losses[1]) / (2 * part * amount), squared)
        found = min(found, measured, key=lambda each: each.apart)
        if found.apart <= ROUGH:
            break
    return found


def _with_equal_rewards(run: WatchedRun, update: Update) -> Probe | None:
    """Compute the gradient of rows whose rewards are all equal.

    None with a critic, whose values still differ, and with rewards of turns.
    """
    if isinstance(run.config, CriticExperimentConfig) or run.config.actor.kl_reward_coef:
        return None
    if run.config.agent.turn_credit != "outcome":
        return None
    rows = [replace(row, reward_parts=dict.fromkeys(row.reward_parts or {}, 1.0)) for row in _fresh(update)]
    for row in rows:
        row.reward = 1.0
    set_trained(rows, "advantages", run.loop.advantages(rows, [0] * len(rows)))
    return run.probe(update, rows, loss_fn=_without_kl(update.loss_fn), keeps_gradient=False)
