"""Settings of the importance ratio: which policies it compares, and how stale or mismatched rollouts are corrected.

The actors of GRPO, GSPO and PPO have these settings (`RatioConfig`). Settings of what a loss does with the ratio, such
as the clip range, stand beside the formulas in `areno.loss_fns.surrogates`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.models import PolicyConfig
from areno.errors import Problem
from areno.schema.fields import Needs, Section, check, require, setting


@dataclass(kw_only=True)
class RejectionSamplingConfig(Section):
    """Corrections of tokens or rows with extreme importance weights, in the decoupled PPO loss.

    Such tokens or rows are masked, or their weights are clamped. The importance weight is the probability of a token
    under the proximal policy (before the update), divided by that under the behaviour policy (of the rollout).
    """

    level: Literal["token", "sequence"] = setting(
        "token", help="Whether the metric of each token, or one of the whole row, is compared with lower and upper"
    )
    action: Literal["mask", "clamp"] = setting(
        "mask",
        help="What happens beyond the bounds. mask: the token or row is not trained. clamp: its importance weight is "
        "clamped to [lower, upper] (truncated importance sampling)",
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = setting(
        "ratio",
        help="Metric of the importance weight w. ratio: w. kl_k1: log w. kl_k2: (log w)^2 / 2. kl_k3: w - log w - 1. "
        "binary_kl: the larger of both KL divergences between the policies with two outcomes, this token and any "
        "other",
    )
    agg: Literal["sum", "mean", "max"] = setting(
        "mean",
        help="With level=sequence: how the metrics of a row's tokens are combined. With metric=ratio, applied to log "
        "w, so mean gives the geometric mean",
        only_with=Needs("level", "sequence", so="tokens are not combined"),
    )
    upper: float = setting(5.0, help="Upper bound of the metric", gt=0)
    lower: float | None = setting(None, help="Lower bound of the metric. null: no lower bound")

    @require("action", "is clamp, which limits a ratio, but metric is {self.metric}; use mask")
    def clamp_has_ratio(self) -> bool:
        return self.action != "clamp" or self.metric == "ratio"

    @check
    def check_kl_bounds(self) -> Iterator[Problem]:
        """Report a lower bound that rejects tokens on which the proximal and the behaviour policy agree."""
        if self.lower is None or self.metric == "ratio":
            return
        if self.metric != "kl_k1":
            yield Problem("lower", f"is {self.lower}, but {self.metric} is never negative, and 0 must pass; use null")
        elif self.lower >= 0:
            yield Problem("lower", f"is {self.lower}, but a kl_k1 of 0 (no difference) must pass; use lower < 0")

    @require("lower", "is {self.lower}, but it must be less than upper={self.upper}")
    def bounds_are_ordered(self) -> bool:
        return self.lower is None or self.lower < self.upper

    @require("upper", "is {self.upper} and lower is {self.lower}; a ratio needs 0 < lower < 1 < upper")
    def bounds_include_ratio_of_one(self) -> bool:
        below = self.lower is not None and not 0 < self.lower < 1
        return self.metric != "ratio" or (self.upper > 1 and not below)


@dataclass(kw_only=True)
class RatioConfig(PolicyConfig):
    """Settings of the actor for losses that use the importance ratio of the trained to the old policy.

    An algorithm of your own inherits from this class if its loss divides by the probabilities in
    `pack.old_logprobs`.
    """

    recompute_logprob: bool = setting(
        True,
        help="Take the denominator of the importance ratio from the training code, with a further forward pass if a "
        "batch has several updates. false: from the rollout, whose rounding can move ratios out of a narrow clip "
        "range",
    )
    use_decoupled_loss: bool = setting(
        False,
        help="Loss of decoupled PPO (arXiv 2505.24298), for rollouts that are stale or of other kernels. The clipped "
        "ratio compares with the policy before the update (proximal policy), and a token weighs by w = p_proximal / "
        "p_rollout",
    )
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = setting(
        "recompute",
        help="With use_decoupled_loss: source of the proximal log-probabilities. recompute: a forward pass before "
        "the update. loglinear: the first update's own pass; later updates interpolate between rollout and current "
        "policy by the row's staleness. metrics: as recompute, with a metric of the error of loglinear",
        only_with=Needs("use_decoupled_loss", so="there is no proximal policy"),
    )
    rejection_sampling: RejectionSamplingConfig | None = setting(
        None,
        help="With use_decoupled_loss: mask tokens with an extreme importance weight w (p_proximal / p_rollout), or "
        "clamp it. null: neither",
        only_with=Needs("use_decoupled_loss", so="tokens have no weights"),
    )
    m2_threshold: float | None = setting(
        None,
        help="M2PO (arXiv 2510.01161, which uses 0.04): tokens with the largest log-ratios between policy before the "
        "update and rollout are masked until the mean square of the others is at most this. null: no mask",
        gt=0,
    )

    @require(
        "prox_logp_method",
        "is loglinear, but rejection_sampling and m2_threshold need proximal log-probabilities before the update; set "
        "it to recompute",
    )
    def proximal_logprobs_precede_update(self) -> bool:
        needed = self.rejection_sampling is not None or self.m2_threshold is not None
        return self.prox_logp_method != "loglinear" or not needed

    @require(
        "recompute_logprob",
        "is false, but use_decoupled_loss compares with the policy before the update, not with the rollout; leave "
        "recompute_logprob out",
    )
    def decoupled_loss_recomputes(self) -> bool:
        return not self.use_decoupled_loss or self.recompute_logprob

    @property
    def ratio_level(self) -> Literal["token", "sequence"]:
        """Whether each token has its own importance ratio ("token") or all tokens of a row share one ("sequence")."""
        return "token"

    def clip_range(self) -> float | None:
        """Return the lower clip range of the ratio, such as 0.2. None if the loss does not clip."""
        return None

    @property
    def rollout_clip_range(self) -> float | None:
        """Lower clip range if ratios divide by probabilities from the rollout, or by interpolated probabilities.

        None if ratios divide by the probabilities of a training pass, or if the loss does not clip. Interpolation is
        between the probabilities of the rollout and of the current policy. Probabilities of a rollout and of a training
        pass differ by rounding, and this difference can exceed a narrow clip range.
        """
        updates_again = self.ppo_n_minibatches > 1 or self.gradient_accumulation_steps is not None
        interpolates = self.prox_logp_method == "loglinear" and updates_again
        return self.clip_range() if interpolates or not self.recompute_logprob else None

    @property
    def old_logprobs(self) -> Literal["recompute", "loglinear", "rollout"]:
        """The log-probabilities that importance ratios divide by, as the argument `old_logprobs` of Trainer.train.

        "recompute": from a training pass of the policy before the update. "rollout": recorded in the rollout.
        "loglinear": interpolated by the loss in every optimizer step after the first.
        """
        if not self.recompute_logprob:
            return "rollout"
        return self.loss_prox_logp_method

    @property
    def loss_prox_logp_method(self) -> Literal["recompute", "loglinear"]:
        """Argument `prox_logp_method` of loss functions. "metrics" has the same loss as "recompute"."""
        return "loglinear" if self.prox_logp_method == "loglinear" else "recompute"

    @property
    def corrects_staleness(self) -> bool:
        """Whether the loss takes into account that older weights may have sampled some tokens."""
        return self.use_decoupled_loss or not self.recompute_logprob or self.m2_threshold is not None

    @property
    def is_scored_before_update(self) -> bool:
        """Whether a forward pass of the actor precedes its first update."""
        return super().is_scored_before_update or self.needs_proximal_logprobs

    @property
    def needs_proximal_logprobs(self) -> bool:
        """Whether a forward pass must score the rows before the update, to weight or mask their tokens."""
        decoupled = self.use_decoupled_loss and self.prox_logp_method != "loglinear"
        return decoupled or self.m2_threshold is not None
