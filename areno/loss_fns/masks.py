"""Masks of the policy loss: tokens whose probability has moved too far from that of the rollout do not count.

A mask is a class that declares its settings and its formula. The setting `actor.mask` chooses a class by the name under
which MASKS has registered it. To add a mask, write a class with `MASKS.register`.

pi is the probability of a token under the trained policy and mu under the policy that sampled it. The policy loss of a
masked token is 0. The token still counts where a mean divides by the number of tokens. The KL is not masked. The module
imports no torch, because the configuration of a run is read before torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areno.schema.choices import Choices
from areno.schema.fields import Section, setting

if TYPE_CHECKING:
    from torch import Tensor

    from areno.loss_fns.data_pack import DataPack


@dataclass(kw_only=True)
class Mask(Section):
    """Base class of masks. The fields of a subclass are keys of the section `actor.<name>`."""

    @property
    def n_recorded_tokens(self) -> int:
        """How many of the most likely tokens the rollout records beside each token, for `divergence`."""
        return 0

    @property
    def divergence(self) -> str | None:
        """The kind of divergence of pi from mu that training passes compute for `keep_tokens`. None: none."""
        return None

    def keep_tokens(self, pack: DataPack, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """As `keep`, for masks that need more of the rows than the log-probabilities of the rollout."""
        return self.keep(logprobs, pack.trained(pack.need("rollout_logprobs")), advantages)

    def keep(self, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Choose the tokens whose policy loss counts.

        Args:
            logprobs: log pi, without gradient.
            rollout_logprobs: log mu, of the same shape.
            advantages: Advantages A, of the same shape.

        Returns:
            A bool tensor of this shape, False for masked tokens.
        """
        raise NotImplementedError


MASKS: Choices[Mask] = Choices("mask")


@MASKS.register("dppo_tv", section=True, help="DPPO with total variation (arXiv 2602.04879, eq. 13)")
@dataclass(kw_only=True)
class DPPOTV(Mask):
    """DPPO, binary TV (arXiv 2602.04879 eq. 12-13): masks A > 0 and pi - mu > d, and A < 0 and pi - mu < -d.

    d is `threshold`. |pi - mu| is the total variation between the two policies for two outcomes: this token, or any
    other. Only tokens are masked whose update would move the policies further apart.
    """

    threshold: float = setting(0.15, help="Largest difference of the two probabilities of a token", gt=0, lt=1)

    def keep(self, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
        moved = logprobs.exp() - rollout_logprobs.exp()
        return (moved * advantages.sign()) <= self.threshold


@MASKS.register("dppo_kl", section=True, help="DPPO with the KL divergence (arXiv 2602.04879, eq. 14)")
@dataclass(kw_only=True)
class DPPOKL(Mask):
    """DPPO, binary KL (arXiv 2602.04879 eq. 12 and 14): as dppo_tv, with KL(mu, pi) > d in place of |pi - mu| > d.

    KL(mu, pi) = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), for two outcomes: this token, or any other.
    """

    threshold: float = setting(0.05, help="Largest KL divergence between the two policies at a token", gt=0)

    def keep(self, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
        nearly_one = -1e-7  # with a probability of 1, the other outcome would have log-probability -inf
        new, old = logprobs.clamp(max=nearly_one), rollout_logprobs.clamp(max=nearly_one)
        other_new, other_old = -new.expm1(), -old.expm1()
        kl = old.exp() * (old - new) + other_old * (other_old.log() - other_new.log())
        return (kl <= self.threshold) | ((logprobs - rollout_logprobs) * advantages <= 0)


@dataclass(kw_only=True)
class _DPPOTop(Mask):
    """DPPO, top-K (arXiv 2602.04879 eq. 12): masks a token if D > d and its update would move pi / mu away from 1.

    D is the divergence between the two policies for these outcomes: the K most likely tokens under mu, the sampled
    token, and all others together.
    """

    kind: ClassVar[str]

    top_k: int = setting(20, help="K: number of the rollout's most likely tokens that are compared", ge=1)
    threshold: float = setting(0.15, help="Largest divergence between the two policies at a token", gt=0)

    @property
    def n_recorded_tokens(self) -> int:
        return self.top_k

    @property
    def divergence(self) -> str:
        return self.kind

    def keep_tokens(self, pack: DataPack, logprobs: Tensor, advantages: Tensor) -> Tensor:
        rollout = pack.trained(pack.need("rollout_logprobs"))
        divergence = pack.trained(pack.need("divergence")).detach()
        return (divergence <= self.threshold) | ((logprobs - rollout) * advantages <= 0)


@MASKS.register("dppo_topk_tv", section=True, help="as dppo_tv, over the rollout's K most likely tokens")
@dataclass(kw_only=True)
class DPPOTopTV(_DPPOTop):
    """DPPO, top-K TV: D = sum |pi - mu| / 2 over the outcomes."""

    kind = "tv"


@MASKS.register("dppo_topk_kl", section=True, help="as dppo_kl, over these tokens")
@dataclass(kw_only=True)
class DPPOTopKL(_DPPOTop):
    """DPPO, top-K KL: D = sum mu log(mu / pi) over the outcomes."""

    kind = "forward_kl"

    threshold: float = setting(0.05, help="Largest divergence between the two policies at a token", gt=0)


@MASKS.register("prime_ipo", section=True, help="the probability changed too much, in either direction (prime-rl)")
@dataclass(kw_only=True)
class PrimeIPO(Mask):
    """IPO of prime-rl (pull request 3586): masks |pi - mu| > threshold, whatever the sign of A. It has no pairs."""

    threshold: float = setting(0.3, help="Largest difference of the two probabilities of a token", gt=0, lt=1)

    def keep(self, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
        return (logprobs.exp() - rollout_logprobs.exp()).abs() <= self.threshold


@MASKS.register("sao", section=True, help="the ratio is out of bounds, whatever the advantage (SAO, arXiv 2607.07508)")
@dataclass(kw_only=True)
class SAOMask(Mask):
    """SAO (arXiv 2607.07508 sec. 3.1): a token counts only if 1 - eps_low < pi / mu < 1 + eps_high.

    Unlike PPO's clip, this also masks tokens whose update would move the ratio back towards 1.
    """

    eps_low: float = setting(0.8, help="The ratio must be more than 1 - eps_low", gt=0, le=1)
    eps_high: float = setting(3.0, help="The ratio must be less than 1 + eps_high", gt=0)

    def keep(self, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
        ratio = (logprobs - rollout_logprobs).exp()
        return (1.0 - self.eps_low < ratio) & (ratio < 1.0 + self.eps_high)


@dataclass(kw_only=True)
@MASKS.with_sections
class MaskConfig(Section):
    """The choice of a mask, with the settings of all of them. The actors of GRPO and PPO inherit from it."""

    mask: Literal[tuple(MASKS)] | None = setting(  # type: ignore[valid-type]
        None,
        help="Tokens that each update leaves out of the policy loss, because policy and rollout differ too much there. "
        f"{MASKS.help}. null: none",
    )

    def mask_settings(self) -> Mapping[str, Any]:
        """Return the chosen mask as keyword argument of `grpo_loss_fn`."""
        return {"mask": MASKS.chosen(self)}

    @property
    def n_recorded_tokens(self) -> int:
        chosen = MASKS.chosen(self)
        return 0 if chosen is None else chosen.n_recorded_tokens

    @property
    def mask_divergence(self) -> str | None:
        chosen = MASKS.chosen(self)
        return None if chosen is None else chosen.divergence
