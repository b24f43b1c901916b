"""Losses of preference pairs: DPO and its variants, each a class with its formula and its settings.

The setting `actor.loss_type` of the recipe dpo chooses a class by the name under which PREFERENCE_LOSSES has registered
it. To add a loss, write a class with `PREFERENCE_LOSSES.register`.

A loss reads one score for each answer. With a reference model, the score is h, the sum over the answer's tokens of
log(p / p_ref). Without one, the score is the sum of log p. Classes that set `per_token` divide the sum by the number
of tokens. The module imports no torch, because the configuration of a run is read before torch is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areno.errors import Problem
from areno.schema.choices import Choices
from areno.schema.fields import Section, check, setting, settings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class PreferenceLoss(Section):
    """Base class of the losses of preference pairs, with the setting that all of them have.

    The fields of a subclass are keys of the configuration section `actor`. Two losses may use the same field name only
    for the same setting.

    Attributes:
        uses_reference: Whether scores compare with a reference model.
        per_token: Whether scores are means over the tokens of an answer, not sums.
        beta: Factor on the scores, or another number that the formula of the loss calls beta, tau or lambda.
    """

    uses_reference: ClassVar[bool] = True
    per_token: ClassVar[bool] = False
    beta: float = setting(
        0.1,
        help="Factor on the difference between the scores of chosen and rejected answer; larger keeps the policy "
        "closer to the reference. tau of IPO, lambda of ORPO",
        gt=0,
        flag="--dpo-beta",
    )

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (losses, statistics by name), all (P,), from (P,) scores.

        The caller logs the mean of each statistic.
        """
        raise NotImplementedError

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each setting with which the loss makes no sense. Called only for the chosen loss."""
        yield from ()


PREFERENCE_LOSSES: Choices[PreferenceLoss] = Choices("loss_type")


@dataclass(kw_only=True)
class SmoothedLoss(PreferenceLoss):
    """Base class of losses that assume that a share of the pairs is swapped: label_smoothing, s in the formulas."""

    label_smoothing: float = setting(
        0.0,
        help="Assumed probability that chosen and rejected answer are swapped. Above 0, sigmoid is conservative DPO; "
        "robust needs it",
        ge=0,
        lt=0.5,
    )


@PREFERENCE_LOSSES.register(
    "sigmoid",
    help="DPO (arXiv 2305.18290, eq. 7), conservative with label_smoothing above 0",
)
class Sigmoid(SmoothedLoss):
    """DPO (arXiv 2305.18290 eq. 7): -(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m), m = h_chosen - h_rejected.

    s is label_smoothing. s = 0 is the loss of the paper. A positive s is conservative DPO (cDPO; E. Mitchell, A note on
    DPO with noisy preferences, 2023): the best margin is where sigmoid(beta m) = 1 - s, so margins stay finite.
    """

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits_P = self.beta * (chosen_P - rejected_P)
        if not self.label_smoothing:
            return -_log_sigmoid(logits_P), {}
        s = self.label_smoothing
        return -(1 - s) * _log_sigmoid(logits_P) - s * _log_sigmoid(-logits_P), {}


@PREFERENCE_LOSSES.register(
    "robust", help="robust DPO (arXiv 2403.00409), for a share label_smoothing of swapped pairs"
)
class Robust(SmoothedLoss):
    """Robust DPO (arXiv 2403.00409): (-(1 - s) log sigmoid(beta m) + s log sigmoid(-beta m)) / (1 - 2 s).

    s is label_smoothing. If a share s of the pairs is swapped at random, the mean of this loss is that of DPO on the
    pairs before the swaps. So the loss is unbiased, where cDPO is not, but it has no lower bound.
    """

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits_P, s = self.beta * (chosen_P - rejected_P), self.label_smoothing
        return (s * _log_sigmoid(-logits_P) - (1 - s) * _log_sigmoid(logits_P)) / (1 - 2 * s), {}

    def problems(self) -> Iterator[Problem]:
        if self.label_smoothing == 0:
            text = "is 0, with which loss_type=robust is the same as sigmoid; set it to a share above 0"
            yield Problem("label_smoothing", text)


@PREFERENCE_LOSSES.register(
    "ipo",
    help="IPO (arXiv 2310.12036, eq. 17), over the mean of an answer's tokens",
)
class IPO(PreferenceLoss):
    """IPO (arXiv 2310.12036 eq. 17): (d - 1 / (2 beta))^2 with d = h_chosen / L - h_rejected / L.

    L is the number of tokens of each answer. The paper writes tau for beta, and has h in place of h / L. The mean over
    tokens, as in TRL, keeps the square from growing with the length of the answers.
    """

    per_token: ClassVar[bool] = True

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (chosen_P - rejected_P - 1 / (2 * self.beta)).square(), {}


@PREFERENCE_LOSSES.register("simpo", help="SimPO (arXiv 2405.14734), without a reference model")
@dataclass(kw_only=True)
class SimPO(PreferenceLoss):
    """SimPO (arXiv 2405.14734 eq. 6): -log sigmoid(beta (a_chosen - a_rejected) - simpo_gamma), a = mean of log p.

    There is no reference model. The mean over tokens is the score that greedy decoding maximises, and gives long
    answers no advantage.
    """

    uses_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    simpo_gamma: float = setting(
        0.5,
        help="With loss_type=simpo: gamma, the margin by which the chosen answer's reward (beta times its mean "
        "log-probability) should win",
        ge=0,
    )

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -_log_sigmoid(self.beta * (chosen_P - rejected_P) - self.simpo_gamma), {}


@PREFERENCE_LOSSES.register(
    "orpo",
    help="ORPO (arXiv 2403.07691): SFT on the chosen answer and an odds ratio loss, without a reference model",
)
class ORPO(PreferenceLoss):
    """ORPO (arXiv 2403.07691 eq. 6-7): -a_chosen - beta log sigmoid(log odds_chosen - log odds_rejected).

    a is the mean of log p over the tokens of an answer, odds = exp(a) / (1 - exp(a)), and beta is lambda of the paper.
    The first term is the loss of supervised fine-tuning on the chosen answer. There is no reference model.

    Statistics: nll_loss, the first term, and log_odds_ratio, the argument of the sigmoid.
    """

    uses_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    def pair_losses(self, chosen_P: Tensor, rejected_P: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_odds_P = chosen_P - _log_one_minus_exp(chosen_P) - rejected_P + _log_one_minus_exp(rejected_P)
        stats = {"nll_loss": -chosen_P.detach(), "log_odds_ratio": log_odds_P.detach()}
        return -chosen_P - self.beta * _log_sigmoid(log_odds_P), stats


@dataclass(kw_only=True)
class PreferenceLossConfig(*PREFERENCE_LOSSES.bases):
    """The choice of a preference loss, with the settings of all of them.

    The actor of the recipe dpo inherits from it.
    """

    loss_type: Literal[tuple(PREFERENCE_LOSSES)] = setting(  # type: ignore[valid-type]
        "sigmoid", help=PREFERENCE_LOSSES.help
    )

    @property
    def needs_reference(self) -> bool:
        return PREFERENCE_LOSSES[self.loss_type].uses_reference

    def loss_settings(self) -> dict[str, Any]:
        """Return the chosen loss and its settings as keyword arguments of `dpo_loss_fn`."""
        return PREFERENCE_LOSSES.loss_kwargs(self)

    @check
    def settings_of_other_losses(self) -> Iterator[Problem]:
        return PREFERENCE_LOSSES.unused_setting_problems(self)

    @check
    def problems_of_the_loss(self) -> Iterator[Problem]:
        return PREFERENCE_LOSSES[self.loss_type].problems(self)


def make_preference_loss(name: str, **given: Any) -> PreferenceLoss:
    """Make a preference loss from the keyword arguments of `dpo_loss_fn`.

    Raises TypeError for a setting of another loss.
    """
    loss = PREFERENCE_LOSSES.make_section(name, given)
    for keyword in given.keys() - settings(PREFERENCE_LOSSES[name]).keys():
        raise TypeError(f"{keyword} has no effect with loss_type {name}; leave it out")
    return loss


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, exact for x near 0 and far below.

    At x = 0, where the value is minus infinity, x is taken as -1e-7 and the gradient is 0: an answer whose every token
    is certain has no odds.
    """
    x = x.clamp(max=-1e-7)
    near = x > -0.6931471805599453
    # Each branch gets only arguments that are far from its pole, so that its gradient is finite where it is not taken.
    exact_near = (-x.where(near, x.new_tensor(-0.5)).expm1()).log()
    exact_far = (-x.where(~near, x.new_tensor(-1.0)).exp()).log1p()
    return exact_near.where(near, exact_far)
