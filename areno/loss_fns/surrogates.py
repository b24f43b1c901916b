"""Importance ratios, and the surrogate objectives that a policy loss computes from the ratios, such as PPO's clip.

A surrogate is a class that declares its settings and its formula. The setting `actor.surrogate` chooses a class by the
name under which SURROGATES has registered it. To add a surrogate, write a class with `SURROGATES.register`.

Most surrogates are elementwise (`Surrogate.surrogate_loss`), so they accept ratios of tokens and of sequences. Those
that couple the tokens of a row override `Surrogate.token_losses`. The module imports no torch, because the
configuration of a run is read before torch is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from areno.errors import Problem
from areno.schema.choices import Choices
from areno.schema.fields import Section, check, setting, setting_as_in

if TYPE_CHECKING:
    from torch import Tensor

    from areno.loss_fns.data_pack import DataPack

MAX_LOG_RATIO = 20.0  # ratios are clamped at exp(20) = 5e8: far beyond every clip range, and finite in float32

ImportanceLevel = Literal["token", "sequence"]
ProxMethod = Literal["recompute", "loglinear"]
Reduction = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp a log ratio to [-20, 20]. The gradient is 0 outside of that range.

    exp(20) = 5e8 is far beyond every clip range, so no ratio that can matter changes. Without the clamp, exp overflows
    to inf in float32 at 88. Then inf times a zero advantage, or times the zero gradient of a clipped branch, is NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_log_ratio(pack: DataPack, logprobs_T: Tensor, prox_logp_method: ProxMethod) -> tuple[Tensor, Tensor | None]:
    """Compute the log importance ratio of each trained token, and the factor on its policy loss, (T,) each.

    "recompute": `pack.old_logprobs` is the denominator of the ratio, and the factor is `pack.weights`.

    "loglinear": the decoupled objective (arXiv 2505.24298) without a forward pass for the proximal policy. In the first
    update of a batch the proximal policy is `pack.old_logprobs`. Later, `pack.old_logprobs` is None and the proximal
    log-probability is interpolated between the policy that sampled the token and the policy in training (A-3PO, arXiv
    2512.06547): prox = rollout + alpha (logprobs - rollout), alpha = staleness / (staleness + 1), without gradient. The
    log ratio is logprobs - prox, and the factor is multiplied by exp(prox - rollout). For a row with staleness 0, alpha
    is 0: prox equals rollout, and this multiplier is 1.

    The log ratio is differentiable and not clamped. The factor is None if it is 1 for all tokens.
    """
    weights_T = None if pack.weights is None else pack.trained(pack.weights)
    if prox_logp_method == "recompute":
        return logprobs_T - pack.trained(pack.need("old_logprobs")), weights_T
    if prox_logp_method != "loglinear":
        raise ValueError(f"prox_logp_method is {prox_logp_method!r}; expected recompute or loglinear")
    rollout_T = pack.trained(pack.need("rollout_logprobs"))
    if pack.old_logprobs is not None:
        prox_T = pack.trained(pack.old_logprobs)
        log_ratio_T, factor_T = logprobs_T - prox_T, clamp_log_ratio(prox_T - rollout_T).exp()
        return log_ratio_T, factor_T if weights_T is None else factor_T * weights_T
    moved_T = (logprobs_T - rollout_T).detach()
    staleness_T = pack.of_rows(pack.need("staleness")).to(moved_T.dtype)
    alpha_T = staleness_T / (staleness_T + 1.0)
    factor_T = (alpha_T * clamp_log_ratio(moved_T)).exp()
    # Written as a product, because inf - alpha * inf would be NaN for an infinite difference of log-probabilities.
    log_ratio_T = (1.0 - alpha_T) * moved_T + (logprobs_T - logprobs_T.detach())
    return log_ratio_T, factor_T if weights_T is None else factor_T * weights_T


def sequence_log_ratio(pack: DataPack, log_ratio_T: Tensor, logprobs_T: Tensor) -> Tensor:
    """Give every token its row's mean log ratio, with the gradient of its own log-probability (GSPO-token).

    s_it = sg(s_i) pi_t / sg(pi_t), where sg stops the gradient (arXiv 2507.18071 eq. 14). If the advantages within each
    row are equal, the loss and its gradient are those of GSPO.
    """
    return pack.of_rows(pack.mean_rows(log_ratio_T.detach())) + (logprobs_T - logprobs_T.detach())


@dataclass(kw_only=True)
class Surrogate(Section):
    """Base class of surrogates: a policy objective as a function of the importance ratio, with its settings.

    The fields of a subclass are keys of the section `actor.<name>`, or of `actor` if it is registered as flat. Two flat
    surrogates may use the same field name only for the same setting.
    """

    couples_tokens: ClassVar[bool] = False
    """Whether the loss of a token depends on the ratios of other tokens of its row, so that they must be of tokens."""

    uses_ratio: ClassVar[bool] = True

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of each token or sequence. Training minimises it.

        Args:
            ratio: Importance ratios r, trained policy / old policy, differentiable.
            advantages: Advantages A, of the same shape.
            logprobs: Log-probabilities under the trained policy, of the same shape, differentiable.

        Returns:
            (losses, statistics by name), all of the shape of `ratio`. The caller logs the mean of each statistic.
        """
        raise NotImplementedError

    def token_losses(
        self, pack: DataPack, log_ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of each trained token of a micro-batch, with the result of `surrogate_loss`.

        `log_ratio_T` is differentiable and not clamped. Surrogates with `couples_tokens` override this method.
        """
        return self.surrogate_loss(clamp_log_ratio(log_ratio_T).exp(), advantages_T, logprobs_T)

    def clip_range(self) -> float | None:
        """Return the eps for which ratios below 1 - eps are clipped, or None for a surrogate without a clip."""
        return None


SURROGATES: Choices[Surrogate] = Choices("surrogate", eps_clip="clip_eps", eps_clip_higher="clip_eps_higher")


@dataclass(kw_only=True)
class ClipRange(Surrogate):
    """Base of the surrogates that clip the ratio to [1 - eps_clip, 1 + eps_clip_higher]."""

    eps_clip: float = setting(
        0.2, help="Clip range e: the importance ratio is clipped to [1 - e, 1 + e]", gt=0, flag="--clip-eps"
    )
    eps_clip_higher: float | None = setting(
        None,
        help="Upper clip range: ratios are clipped to [1 - eps_clip, 1 + eps_clip_higher] (DAPO, arXiv 2503.14476). "
        "null: eps_clip",
        gt=0,
    )

    def bounds(self) -> tuple[float, float]:
        """Return (smallest, largest) ratio that is not clipped."""
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return 1.0 - self.eps_clip, 1.0 + higher

    def clip_range(self) -> float | None:
        return self.eps_clip


@SURROGATES.register("clip", help="PPO's clipped objective (arXiv 1707.06347, eq. 7)")
@dataclass(kw_only=True)
class Clip(ClipRange):
    """PPO's clip (arXiv 1707.06347 eq. 7): -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A).

    With c_clip, the loss of a token with A < 0 is at most -c_clip A (dual clip, arXiv 1912.09729 eq. 5). So a token
    whose ratio is far above 1 has no unbounded loss.

    Statistics: clip_frac_low, clip_frac_high and, with c_clip, clip_frac_dual. Each is 1 where the clip makes the
    gradient 0, and 0 elsewhere.
    """

    c_clip: float | None = setting(
        None,
        help="Dual clip (arXiv 1912.09729): the loss of a token with a negative advantage A is at most -c_clip * A. "
        "null: no dual clip",
        gt=1,
        flag="--clip-ratio-c",
    )

    def surrogate_loss(
        self, ratio: Tensor, advantages: Tensor, logprobs: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.bounds()
        loss = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
        cut = {
            "clip_frac_low": ((ratio < low) & (advantages < 0)).to(ratio.dtype),
            "clip_frac_high": ((ratio > high) & (advantages > 0)).to(ratio.dtype),
        }
        if self.c_clip is not None:
            bound = -self.c_clip * advantages
            cut["clip_frac_dual"] = ((loss > bound) & (advantages < 0)).to(ratio.dtype)
            loss = loss.minimum(bound).where(advantages < 0, loss)
        return loss, cut


@SURROGATES.register("unclipped", help="ratio times advantage; for use with a mask")
class Unclipped(Surrogate):
    """-r A, whose gradient with the ratio to the rollout is the policy gradient with importance sampling."""

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -ratio * advantages, {}


@SURROGATES.register("reinforce", help="advantage times log-probability; for adv_estimator=real")
class Reinforce(Surrogate):
    """-A log pi: the policy gradient without importance sampling."""

    uses_ratio: ClassVar[bool] = False

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -advantages * logprobs, {}


@SURROGATES.register(
    "cispo",
    help="the clipped ratio is a constant weight of the gradient (CISPO, arXiv 2506.13585, eq. 4)",
)
class CISPO(ClipRange):
    """CISPO (arXiv 2506.13585 eq. 4-5): -sg(clip(r, 1 - eps_clip, 1 + eps_clip_higher)) A log pi.

    sg stops the gradient. The clip bounds the weight of a token's gradient, so no token loses its gradient. The paper
    uses no lower bound, which eps_clip = 1 reproduces.

    Statistics: clip_frac_low and clip_frac_high, 1 where the weight was clipped, whatever the sign of A.
    """

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.bounds()
        ratio = ratio.detach()
        cut = {"clip_frac_low": (ratio < low).to(ratio.dtype), "clip_frac_high": (ratio > high).to(ratio.dtype)}
        return -ratio.clamp(low, high) * advantages * logprobs, cut


@SURROGATES.register("sapo", help="a smooth gate in place of the clip (SAPO, arXiv 2511.20347)")
@dataclass(kw_only=True)
class SAPO(Surrogate):
    """SAPO (arXiv 2511.20347): -f(r) A with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1)).

    tau is sapo_tau_pos where A > 0 and sapo_tau_neg elsewhere. Since f'(1) = 1, the gradient at the old policy is that
    of -r A. The gradient decreases to 0 as r moves away from 1 in either direction.

    Statistic: sapo_gate = f'(r) in (0, 1], the share of the gradient that passes.
    """

    sapo_tau_pos: float = setting(
        1.0,
        help="With surrogate=sapo, for positive advantages: the larger, the faster the gradient falls as the ratio "
        "moves away from 1",
        gt=0,
    )
    sapo_tau_neg: float = setting(
        1.05,
        help="The same as sapo_tau_pos, for negative advantages",
        gt=0,
    )

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        tau = ratio.new_full(ratio.shape, self.sapo_tau_neg).masked_fill(advantages > 0, self.sapo_tau_pos)
        soft = (tau * (ratio - 1.0)).sigmoid()
        gate = (4.0 * soft * (1.0 - soft)).detach()
        return -4.0 / tau * soft * advantages, {"sapo_gate": gate}


@SURROGATES.register("gmpo", section=True, help="the geometric mean of a row's clipped ratios (GMPO, arXiv 2507.20673)")
@dataclass(kw_only=True)
class GMPO(Surrogate):
    """GMPO (arXiv 2507.20673 eq. 4): -A (prod_t c_t)^(1/T), log c_t = sgn(A) min(sgn(A) log r_t, log_clip).

    The product is over the T trained tokens of a row. The clip has one side: it stops ratios from rising further if A >
    0 and from falling further if A < 0. As in GSPO-token, the loss of token t has the value of the whole row's and the
    gradient of its own log-probability, so that its mean over the tokens is the loss of the paper, and advantages may
    differ within a row.

    Statistics: clip_frac_low and clip_frac_high, 1 where the clip makes the gradient 0.
    """

    couples_tokens: ClassVar[bool] = True
    log_clip: float = setting(0.4, help="Largest logarithm of a token's ratio, in the direction of its advantage", gt=0)

    def token_losses(
        self, pack: DataPack, log_ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sign_T = advantages_T.sign()
        log_clipped_T = sign_T * (sign_T * log_ratio_T).clamp(max=self.log_clip)
        mean_R = clamp_log_ratio(pack.mean_rows(log_clipped_T.detach()))
        ratio_T = pack.of_rows(mean_R.exp()) * (log_clipped_T - log_clipped_T.detach()).exp()
        cut_T = (sign_T * log_ratio_T.detach() > self.log_clip).to(ratio_T.dtype)
        cut = {"clip_frac_low": cut_T * (sign_T < 0), "clip_frac_high": cut_T * (sign_T > 0)}
        return -ratio_T * advantages_T, cut


@SURROGATES.register("vespo", section=True, help="a smooth weight of each row by its ratio (VESPO, arXiv 2602.10693)")
@dataclass(kw_only=True)
class VESPO(Surrogate):
    """VESPO (arXiv 2602.10693): -sg(phi(w)) A log pi, w = product of the row's ratios, phi(w) = w^k e^(lambda (1 - w)).

    (k, lambda) is (k_pos, lambda_pos) for tokens with A >= 0 and (k_neg, lambda_neg) for others. phi(1) = 1, and phi
    falls to 0 for rows that have become much more or much less probable. log w is clamped to [-20, 20].

    Statistic: vespo_weight = phi(w).
    """

    couples_tokens: ClassVar[bool] = True
    k_pos: float = setting(2.0, help="k for tokens with advantages of at least 0", ge=0)
    lambda_pos: float = setting(3.0, help="lambda for tokens with advantages of at least 0", ge=0)
    k_neg: float = setting(3.0, help="k for tokens with negative advantages", ge=0)
    lambda_neg: float = setting(2.0, help="lambda for tokens with negative advantages", ge=0)

    def token_losses(
        self, pack: DataPack, log_ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_w_T = clamp_log_ratio(pack.of_rows(pack.sum_rows(log_ratio_T.detach())))
        rises = 1.0 - log_w_T.exp()
        positive_T = (self.k_pos * log_w_T + self.lambda_pos * rises).exp()
        negative_T = (self.k_neg * log_w_T + self.lambda_neg * rises).exp()
        phi_T = positive_T.where(advantages_T >= 0, negative_T)
        return -phi_T * advantages_T * logprobs_T, {"vespo_weight": phi_T}


@SURROGATES.register(
    "fipo", section=True, help="PPO's clip, weighted by how the later tokens' ratios move (FIPO, arXiv 2603.19835)"
)
@dataclass(kw_only=True)
class FIPO(Clip):
    """FIPO (arXiv 2603.19835): f_t times PPO's clipped loss, f_t = sg(clip(exp(F_t), weight_low, weight_high)).

    F_t = sum over k >= t of gamma^(k - t) log r_k over the trained tokens of the row, gamma = 2^(-1 / half_life).
    Tokens with r_k > c_clip are left out of the sum, since a few of them would decide it. A token with A < 0 and r >
    cap_ratio has at most the weight 1.

    Statistics: those of the clip, and fipo_weight = f_t.
    """

    couples_tokens: ClassVar[bool] = True
    c_clip: float | None = setting_as_in(Clip, "c_clip", 10.0)
    half_life: float = setting(32.0, help="Number of tokens after which a later token counts half", gt=0)
    weight_low: float = setting(1.0, help="Smallest weight. The paper uses 1.0 and 0.8", gt=0, le=1)
    weight_high: float = setting(1.2, help="Largest weight", ge=1)
    cap_ratio: float = setting(
        10.0, help="A token with a negative advantage and a larger ratio has at most the weight 1", gt=1
    )

    def token_losses(
        self, pack: DataPack, log_ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss_T, how = super().token_losses(pack, log_ratio_T, advantages_T, logprobs_T)
        log_ratio_T = clamp_log_ratio(log_ratio_T.detach())
        counted_T = log_ratio_T if self.c_clip is None else log_ratio_T.where(log_ratio_T.exp() <= self.c_clip, 0.0)
        sums_T = pack.discounted_sums(counted_T, 2.0 ** (-1.0 / self.half_life))
        weight_T = clamp_log_ratio(sums_T).exp().clamp(self.weight_low, self.weight_high)
        capped_T = (advantages_T < 0) & (log_ratio_T.exp() > self.cap_ratio)
        weight_T = weight_T.clamp(max=1.0).where(capped_T, weight_T)
        return weight_T * loss_T, {**how, "fipo_weight": weight_T}


_SWITCHES = {"use_cispo_loss": "cispo", "use_sapo_loss": "sapo"}  # setting -> the surrogate that it turns on or off


@dataclass(kw_only=True)
@SURROGATES.with_sections
class SurrogateConfig(*SURROGATES.bases):
    """The choice of a surrogate, with the settings of all of them. The actors of GRPO and PPO inherit from it.

    Code reads only `surrogate`: `canonical` replaces the shorthands use_cispo_loss and use_sapo_loss by values of it.
    """

    surrogate: Literal[tuple(SURROGATES)] = setting(  # type: ignore[valid-type]
        "clip", help=f"How the loss uses the importance ratio. {SURROGATES.help}"
    )
    use_cispo_loss: bool | None = setting(
        None,
        help="true: the same as surrogate=cispo. false: cispo is off. null: surrogate decides",
    )
    use_sapo_loss: bool | None = setting(
        None,
        help="true: the same as surrogate=sapo. false: sapo is off. null: surrogate decides",
    )

    @classmethod
    def canonical(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of settings with the shorthands use_cispo_loss and use_sapo_loss applied to `surrogate`.

        use_cispo_loss=True contradicts surrogate="sapo", and use_sapo_loss=True contradicts "cispo". Such values stay
        as they are. A shorthand that is applied becomes None, so that a copy may have another `surrogate`. It keeps its
        value only in a subclass that gives it a default other than None.
        """
        found = dict(values)
        for switch, name in _SWITCHES.items():
            chosen = found["surrogate"]
            if found[switch] is True and chosen in ("clip", name):
                found["surrogate"] = name
            elif found[switch] is False:
                found["surrogate"] = "clip" if chosen == name else chosen
            else:
                continue
            if cls.__dataclass_fields__[switch].default is None:
                found[switch] = None
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Setting use_cispo_loss or use_sapo_loss also changes `surrogate`."""
        super().__setattr__(name, value)
        is_constructed = vars(self).keys() >= {"surrogate", *_SWITCHES}
        if is_constructed and name in _SWITCHES:
            self.__dict__.update(self.canonical(vars(self)))

    def surrogate_loss(self, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.chosen_surrogate.surrogate_loss(ratio, advantages, logprobs)

    @property
    def chosen_surrogate(self) -> Surrogate:
        found = SURROGATES.chosen(self)
        assert found is not None
        return found

    def clip_range(self) -> float | None:
        return self.chosen_surrogate.clip_range()

    def surrogate_settings(self) -> dict[str, Any]:
        """Return the chosen surrogate and its settings as keyword arguments of `grpo_loss_fn`."""
        return SURROGATES.loss_kwargs(self)

    @check
    def two_names_of_one_choice(self) -> Iterator[Problem]:
        for switch, name in _SWITCHES.items():
            if vars(self)[switch] is True and self.surrogate != name:
                yield Problem(switch, f"is true, but surrogate is {self.surrogate}; leave one of them out")

    @check
    def settings_of_other_surrogates(self) -> Iterator[Problem]:
        return SURROGATES.unused_setting_problems(self)
