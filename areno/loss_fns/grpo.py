"""GRPO: Group Relative Policy Optimization (arXiv 2402.03300 eq. 3), and the losses derived from it.

    loss = reduce_t( w_t surrogate(r_t, A_t) ) + kl_coef reduce_t( kl_t ) - entropy_coef reduce_t( entropy_t )

r_t is the importance ratio of the token or of its row, and A_t is the token's advantage. w_t is `pack.weights`, which
multiplies the policy term but not the KL. `pack.kl_weights` times |log r_t| of the token is added to the policy term.
reduce_t averages over tokens and rows. docs/algorithms.md says which paper chose which surrogate, ratio and reduction.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.kl import KLEstimator
from areno.loss_fns.masks import MASKS, Mask
from areno.loss_fns.policy import add_kl, entropy_with_gradient, policy_stats, reduce_tokens, surrogate_stats
from areno.loss_fns.surrogates import (
    SURROGATES,
    ImportanceLevel,
    ProxMethod,
    Reduction,
    Surrogate,
    clamp_log_ratio,
    sequence_log_ratio,
    token_log_ratio,
)
from areno.loss_fns.teacher_signals import TEACHER_SIGNALS, TeacherSignal


def grpo_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    reduction: Reduction = "seq_mean_token_mean",
    norm_length: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    importance_sampling_level: ImportanceLevel = "token",
    prox_logp_method: ProxMethod = "recompute",
    surrogate: str | Surrogate = "clip",
    mask: str | Mask | None = None,
    entropy_coef: float = 0.0,
    teacher_signal: str | TeacherSignal | None = None,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of GRPO, or of a related algorithm that differs in its settings. The defaults are GRPO.

    Args:
        pack: The micro-batch, with advantages and old_logprobs. A kl_coef above 0 needs ref_logprobs. prox_logp_method
            "loglinear" needs rollout_logprobs and staleness.
        logprobs: (N,) log-probabilities under the trained policy, differentiable.
        reduction: How the policy term and the KL are averaged over tokens and rows, see `policy.reduce_tokens`.
        norm_length: The constant, in tokens, that reduction "seq_mean_token_sum_norm" divides by.
        kl_coef: Coefficient of the KL to the reference model. 0 computes no KL.
        kl_estimator: "k1", "k2" or "k3" (formulas in areno/loss_fns/kl.py).
        importance_sampling_level: "token" uses the ratio of each token. "sequence" gives every token the ratio of its
            row (GSPO-token, `surrogates.sequence_log_ratio`).
        prox_logp_method: Source of the denominator of the ratios: "recompute" takes old_logprobs, "loglinear"
            interpolates (`surrogates.token_log_ratio`).
        surrogate: A surrogate of `areno.loss_fns.surrogates`, or its name, such as "clip", with the defaults of its
            settings.
        mask: A mask of `areno.loss_fns.masks`, or its name, with the defaults of its settings. Masked tokens have the
            policy loss 0, and still count in means. A mask needs rollout_logprobs. None: no mask.
        entropy_coef: Coefficient of the entropy, which is reduced like the policy term and subtracted from the loss. A
            coefficient above 0 needs an entropy with a gradient, see `Trainer.train`.
        teacher_signal: A signal of `areno.loss_fns.teacher_signals`, or its name, with the defaults of its settings. It
            needs teacher_logprobs. None: no signal.
        settings: Settings of the surrogates "clip", "cispo" and "sapo" by the names of their classes, except that
            eps_clip is called clip_eps and eps_clip_higher is called clip_eps_higher. "clip" has clip_eps,
            clip_eps_higher and c_clip.
    """
    chosen = SURROGATES.make_section(surrogate, settings)
    chosen_mask = None if mask is None else MASKS.make_section(mask, {})
    logprobs_T, advantages_T = pack.trained(logprobs), pack.trained(pack.need("advantages"))
    log_ratio_T, weights_T = token_log_ratio(pack, logprobs_T, prox_logp_method)
    signal = None if teacher_signal is None else TEACHER_SIGNALS.make_section(teacher_signal, {})
    gap_T = logprobs_T if signal is None else pack.trained(pack.need("teacher_logprobs")) - logprobs_T
    if signal is not None:
        advantages_T = signal.advantages(advantages_T, gap_T.detach())
    moved_T = clamp_log_ratio(log_ratio_T).abs()
    stats = policy_stats(pack, advantages_T, clamp_log_ratio(log_ratio_T))
    if importance_sampling_level == "sequence":
        if chosen.couples_tokens:
            raise ValueError(f"importance_sampling_level is sequence, but {surrogate!r} needs ratios of tokens")
        log_ratio_T = sequence_log_ratio(pack, log_ratio_T, logprobs_T)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level is {importance_sampling_level!r}; expected token or sequence")
    policy_T, how_T = chosen.token_losses(pack, log_ratio_T, advantages_T, logprobs_T)
    if chosen_mask is not None:
        keep_T = chosen_mask.keep_tokens(pack, logprobs_T.detach(), advantages_T)
        policy_T = policy_T.where(keep_T, 0.0)
        stats["masked_frac"] = pack.token_mean((~keep_T).to(policy_T.dtype))
    if weights_T is not None:
        policy_T = policy_T * weights_T
        stats["weights"] = weights_T.detach()
    if signal is not None and (signal_T := signal.losses(gap_T)) is not None:
        policy_T = policy_T + signal_T
    if pack.kl_weights is not None:
        policy_T = policy_T + pack.trained(pack.kl_weights) * moved_T

    policy_loss = reduce_tokens(pack, policy_T, reduction, norm_length)
    ratio_T = clamp_log_ratio(log_ratio_T.detach()).exp()
    stats |= surrogate_stats({name: pack.token_mean(value) for name, value in how_T.items()}, policy_loss, ratio_T)
    loss, stats = add_kl(pack, policy_loss, logprobs_T, stats, kl_coef, kl_estimator, reduction, norm_length)
    if entropy_coef:
        loss = loss - entropy_coef * reduce_tokens(pack, entropy_with_gradient(pack), reduction, norm_length)
    return loss, stats
