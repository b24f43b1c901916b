"""The losses as their papers state them, in float64 on plain rows: what a check compares a training step with.

Nothing here is shared with `areno.loss_fns`, and rows are neither packed nor padded. A row is a tensor with the numbers
of its trained tokens, (T,), and a batch is a list of rows. Gradients come from autograd. Rows without a trained token
do not count in any mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Row = Tensor
Rows = Sequence[Row]


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


Keep = Callable[[Row, Row, Row, Row | None], Tensor]
"""Whether the policy loss of each token counts.

The arguments are log-probabilities, those of the rollout, advantages, and divergences if the rollout recorded
distributions.
"""


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The objective of GRPO, GSPO, PPO and their variants.

    `ratio` says which tokens share an importance ratio: "token", "sequence" (GSPO) or "sequence_token" (GSPO-token,
    with the gradient of the token's own probability). `sign` and the other fields that no setting has are for wrong
    objectives, with which a check finds out what is wrong.
    """

    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    tau: tuple[float, float] = (1.0, 1.05)  # of SAPO, for positive and for negative advantages
    log_clip: float = 0.4  # of GMPO
    vespo: tuple[float, float, float, float] = (2.0, 3.0, 3.0, 2.0)  # k, lambda of positive, then negative advantages
    fipo: tuple[float, float, float, float] = (32.0, 1.0, 1.2, 10.0)  # half-life, lowest, highest weight, cap
    rlsd: tuple[float, float] | None = None  # mix, eps
    sdar: tuple[float, float] | None = None  # coefficient, steepness
    keep: Keep | None = None
    reduction: str = "seq_mean_token_mean"
    norm_length: float = 1.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    sign: float = 1.0
    kl_sign: float = 1.0
    keeps_smaller: bool = True  # the clip takes the smaller of two objectives
    clips: bool = True
    sums_ratio: bool = False  # the log-ratio of a row is the sum over its tokens, not their mean

    @property
    def stops_gradient(self) -> bool:
        """Whether the value of the loss depends on weights in ways in which its gradient does not."""
        return self.surrogate in ("cispo", "vespo", "fipo", "gmpo")

    def loss(
        self,
        logprobs: Rows,
        old: Rows,
        advantages: Rows,
        reference: Rows | None = None,
        weights: Rows | None = None,
        rollout: Rows | None = None,
        penalties: Rows | None = None,
        entropies: Rows | None = None,
        divergences: Rows | None = None,
        teacher: Rows | None = None,
    ) -> Tensor:
        """Compute the loss of a step.

        `penalties` are factors of |log ratio| (KL-Cov). `entropies` are those of the policy at each token, with the
        factor `entropy_coef`.
        """
        found, kl, bonus = [], [], []
        for index, new in enumerate(logprobs):
            if not len(new):
                continue
            log_ratio = new - old[index]
            advantage = advantages[index]
            if self.rlsd is not None and teacher is not None:
                mix, eps = self.rlsd
                factor = (torch.sign(advantage) * (teacher[index] - new)).detach().exp()
                advantage = advantage * (1 - mix + mix * torch.clip(factor, 1 - eps, 1 + eps))
            weight = torch.ones_like(new) if weights is None else weights[index]
            of_row = log_ratio.sum() if self.sums_ratio else log_ratio.mean()
            if self.ratio == "sequence":
                objective = self._objective(of_row.exp(), advantage.mean(), new.mean()) * weight.mean()
                found.append(objective.expand(len(new)))
            else:
                if self.ratio == "sequence_token":
                    log_ratio = of_row.detach() + new - new.detach()
                found.append(self._row_objective(log_ratio, advantage, new) * weight)
            if self.keep is not None and rollout is not None:
                apart = None if divergences is None else divergences[index]
                found[-1] = found[-1] * self.keep(new.detach(), rollout[index], advantage, apart)
            if self.sdar is not None and teacher is not None:
                coef, steepness = self.sdar
                gap = teacher[index] - new
                found[-1] = found[-1] - coef * torch.sigmoid(steepness * gap.detach()) * gap
            if penalties is not None:
                found[-1] = found[-1] - penalties[index] * (new - old[index]).abs()
            if reference is not None and self.kl_coef:
                kl.append(self._kl(new, reference[index]))
            if entropies is not None:
                bonus.append(entropies[index])
        loss = -self.sign * self._reduce(found)
        if bonus:
            loss = loss - self.entropy_coef * self._reduce(bonus)
        return loss + self.kl_sign * self.kl_coef * self._reduce(kl) if kl else loss

    def _row_objective(self, log_ratio: Row, advantage: Row, logprob: Row) -> Row:
        """Return what is maximised, for each token of a row."""
        fixed = log_ratio.detach()
        if self.surrogate == "gmpo":
            sign = torch.sign(advantage)
            clipped = sign * torch.clip(sign * log_ratio, max=self.log_clip)
            return clipped.detach().mean().exp() * (clipped - clipped.detach()).exp() * advantage
        if self.surrogate == "vespo":
            k, factor = (torch.where(advantage >= 0, *self.vespo[at::2]) for at in (0, 1))
            log_weight = fixed.sum()
            return (k * log_weight + factor * (1 - log_weight.exp())).exp() * advantage * logprob
        objective = self._objective(log_ratio.exp(), advantage, logprob)
        if self.surrogate != "fipo":
            return objective
        half_life, low, high, cap = self.fipo
        counted = torch.where(fixed.exp() <= (self.dual_clip or math.inf), fixed, 0.0).tolist()
        later = [
            sum(0.5 ** ((u - t) / half_life) * counted[u] for u in range(t, len(counted))) for t in range(len(counted))
        ]
        weight = torch.clip(torch.tensor(later, dtype=fixed.dtype).exp(), low, high)
        is_capped = (advantage < 0) & (fixed.exp() > cap)
        return torch.where(is_capped, torch.clip(weight, max=1.0), weight) * objective

    def _objective(self, ratio: Tensor, advantage: Tensor, logprob: Tensor) -> Tensor:
        """Return what is maximised, for tokens or for a sequence."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        if self.surrogate == "sapo":
            tau = torch.where(advantage > 0, *self.tau)
            return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
        if self.surrogate == "cispo":
            weight = ratio.detach()
            return (torch.clip(weight, low, high) if self.clips else weight) * advantage * logprob
        if self.surrogate == "reinforce":
            return advantage * logprob
        if self.surrogate == "unclipped" or not self.clips:
            return ratio * advantage
        pair = ratio * advantage, torch.clip(ratio, low, high) * advantage
        objective = torch.minimum(*pair) if self.keeps_smaller else torch.maximum(*pair)
        if self.dual_clip is not None:
            floor = torch.maximum(objective, self.dual_clip * advantage)
            objective = torch.where(advantage < 0, floor, objective)
        return objective

    def _kl(self, new: Tensor, reference: Tensor) -> Tensor:
        apart = reference - new
        return {"k1": -apart, "k2": apart.square() / 2, "k3": apart.exp() - apart - 1}[self.kl_estimator]

    def _reduce(self, rows: Rows) -> Tensor:
        if self.reduction == "token_mean":
            return torch.cat(list(rows)).mean()
        if self.reduction == "seq_mean_token_sum_norm":
            return _mean([row.sum() / self.norm_length for row in rows])
        return _mean([row.mean() for row in rows])


def keep_function(name: str | None, settings: Any) -> Keep:
    """Return the mask `actor.mask`: which tokens have not moved too far from the rollout."""

    def keep(new: Row, rollout: Row, advantage: Row, apart: Row | None) -> Tensor:
        p, q = new.exp(), rollout.exp()
        goes_on = torch.sign(p - q) == torch.sign(advantage)  # the update would move the token further
        if name == "dppo_tv":
            return ~(goes_on & ((p - q).abs() > settings.threshold))
        if name == "dppo_kl":
            kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
            return ~(goes_on & (kl > settings.threshold))
        if apart is not None:
            return ~(goes_on & (apart > settings.threshold))
        if name == "prime_ipo":
            return (p - q).abs() <= settings.threshold
        return (p / q > 1 - settings.eps_low) & (p / q < 1 + settings.eps_high)

    return keep


def listed_divergence(policy: Tensor, tokens: Tensor, logprobs: Tensor, kind: str) -> Tensor:
    """Return how far the policy is from the distribution that the rollout recorded, for each token of a row.

    `policy` has its log-probabilities of the whole vocabulary. The recorded ones are of `tokens`, without those of -1.
    """
    found = []
    for new, ids, old in zip(policy.detach().exp(), tokens, logprobs.exp(), strict=True):
        p, q = new[ids[ids >= 0]], old[ids >= 0]
        p, q = (torch.cat((each, (1 - each.sum()).clamp(min=1e-13)[None])) for each in (p, q))
        found.append((q * torch.log(q / p)).sum() if kind == "forward_kl" else (p - q).abs().sum() / 2)
    return torch.stack(found) if found else policy.new_zeros(0)


@dataclass(frozen=True, kw_only=True)
class PairObjective:
    """The objectives of preference pairs: DPO (2305.18290), robust DPO, IPO, SimPO and ORPO."""

    kind: str = "sigmoid"
    beta: float = 0.1
    smoothing: float = 0.0
    gamma: float = 0.0
    is_swapped: bool = False
    uses_reference: bool = True

    def loss(self, chosen: Rows, rejected: Rows, chosen_ref: Rows | None, rejected_ref: Rows | None) -> Tensor:
        if self.is_swapped:
            chosen, rejected, chosen_ref, rejected_ref = rejected, chosen, rejected_ref, chosen_ref
        better, worse = self._scores(chosen, chosen_ref), self._scores(rejected, rejected_ref)
        return _mean([self._pair(one, other) for one, other in zip(better, worse, strict=True)])

    @property
    def is_per_token(self) -> bool:
        return self.kind in ("ipo", "simpo", "orpo")

    def _scores(self, rows: Rows, reference: Rows | None) -> list[Tensor]:
        compares = self.kind in ("sigmoid", "robust", "ipo") and self.uses_reference and reference is not None
        apart = [row - reference[index] if compares else row for index, row in enumerate(rows)]  # type: ignore[index]
        return [row.mean() if self.is_per_token else row.sum() for row in apart]

    def _pair(self, better: Tensor, worse: Tensor) -> Tensor:
        margin, s = better - worse, self.smoothing
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        if self.kind == "simpo":
            return _softplus(self.gamma - self.beta * margin)
        if self.kind == "orpo":
            log_odds = margin - torch.log1p(-better.exp()) + torch.log1p(-worse.exp())
            return -better + self.beta * _softplus(-log_odds)
        right, wrong = _softplus(-self.beta * margin), _softplus(self.beta * margin)  # -log p of the two orders
        if self.kind == "robust":
            return ((1 - s) * right - s * wrong) / (1 - 2 * s)
        return (1 - s) * right + s * wrong


def kto_loss(
    logprobs: Rows,
    reference: Rows,
    is_desirable: Sequence[bool],
    beta: float,
    point: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """KTO (2402.01306 eq. 8). `weights` are those of desirable and of undesirable answers."""
    found = []
    for new, ref, good in zip(logprobs, reference, is_desirable, strict=True):
        if len(new):
            gain = beta * ((new - ref).sum() - point)
            found.append(weights[0] * (1 - torch.sigmoid(gain)) if good else weights[1] * (1 - torch.sigmoid(-gain)))
    return _mean(found)


def likelihood_loss(logprobs: Rows) -> Tensor:
    """Supervised fine-tuning: the mean of -log p over all trained tokens."""
    return -torch.cat(list(logprobs)).mean()


def ranking_loss(
    scores: Sequence[Tensor],
    ratings: Sequence[float],
    levels: Sequence[float] | None,
    units: Sequence[Sequence[int]],
    margin_coef: float,
    center_coef: float,
) -> Tensor:
    """Bradley-Terry with margins and centred scores. A unit lists the answers to one prompt.

    A unit counts by its number of answers, as the loss of areno says, and within it each comparison counts equally.
    """
    losses, counts = [], []
    for unit in units:
        found = []
        for one in unit:
            for other in unit:
                if ratings[one] > ratings[other]:
                    margin = margin_coef * (levels[one] - levels[other]) if levels is not None else 0.0
                    found.append(_softplus(margin - (scores[one] - scores[other])))
                    found[-1] = found[-1] + center_coef * (scores[one] + scores[other]) ** 2
        if found:
            losses.append(_mean(found) * len(unit))
            counts.append(len(unit))
    return torch.stack(losses).sum() / sum(counts)


def step_loss(log_odds: Rows, labels: Rows) -> Tensor:
    """Process reward models: the cross entropy of each labelled step."""
    logits, wanted = torch.cat(list(log_odds)), torch.cat(list(labels))
    return (wanted * _softplus(-logits) + (1 - wanted) * _softplus(logits)).mean()


def value_loss(values: Rows, old: Rows, returns: Rows, clip_range: float, coef: float) -> Tensor:
    """Return the loss of PPO's critic: the larger of the squared errors of the value and of the clipped value."""
    new, before, target = (torch.cat(list(rows)) for rows in (values, old, returns))
    clipped = before + torch.clip(new - before, -clip_range, clip_range)
    return coef * torch.maximum((new - target) ** 2, (clipped - target) ** 2).mean()


def divergence(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Return a divergence between two distributions at each token, from log-probabilities (T, V)."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    mixture = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def sampled_reverse_kl(logprobs: Rows, old: Rows, teacher: Rows, discount: float) -> list[Tensor]:
    """Policy gradient whose advantage of a token is the discounted sum of later log(teacher / student)."""
    found = []
    for new, before, theirs in zip(logprobs, old, teacher, strict=True):
        apart, advantage, later = (theirs - new).detach(), [], 0.0
        for value in reversed(apart.tolist()):
            later = value + discount * later
            advantage.append(later)
        found.append(-(new - before).exp() * torch.tensor(advantage[::-1], dtype=new.dtype))
    return found


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), which is -log sigmoid(-x)."""
    return torch.logaddexp(x, torch.zeros_like(x))
