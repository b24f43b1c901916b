"""The losses of distillation: a student q learns the next-token distribution of a teacher p.

    loss = rl_loss_weight * loss_RL + distill_loss_weight * (mean of D_t over trained tokens)

The whole-vocabulary forms of D_t are divergences between q and p at token t, given the earlier tokens of the row.
`areno.kernels.logprobs.divergence` has their formulas, and computes them with their gradients.

    forward_kl          KL(p | q)                      mode-covering
    reverse_kl          KL(q | p)                      mode-seeking
    jsd                 generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649), between the two

The sampled form needs only the teacher's log-probabilities of tokens that the student sampled:

    A_t = sum over tokens u >= t of kl_discount^(u - t) log(p(y_u) / q(y_u)), without gradient
    sampled_reverse_kl  -r_t A_t                       r_t: importance ratio of the token

Without kl_discount, the mean of -A_t over samples is KL(q | p). -A_t itself is not differentiated: its expected
gradient would be E[grad log q] = 0, whatever the teacher says. With kl_discount 0, the expected gradient is that of
reverse_kl at the positions that the student visits. With kl_discount 1, it is that of the reverse KL between the
distributions of whole answers. With prefix_weight, token t of a row has the weight of IW-OPD (`prefix_weights`).

The module imports no torch, because the configuration of a run is read before torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from areno.loss_fns.surrogates import ProxMethod, clamp_log_ratio, token_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from areno.loss_fns.data_pack import DataPack


def distillation_loss_fn(
    pack: DataPack,
    logprobs: Tensor,
    *,
    policy_loss_fn: Callable[..., tuple[Tensor, dict[str, Tensor]]] | None = None,
    rl_loss_weight: float = 1.0,
    distill_loss_weight: float = 1.0,
    sampled: bool = False,
    kl_discount: float = 0.0,
    prefix_weight: float = 0.0,
    prox_logp_method: ProxMethod = "recompute",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of distillation, alone or together with the loss of a policy algorithm.

    Args:
        pack: The micro-batch. If `sampled`, it has teacher_logprobs and old_logprobs. Otherwise it has `divergence`,
            which the training pass computes.
        logprobs: (N,) log-probabilities under the trained model, differentiable.
        policy_loss_fn: Loss function of the policy algorithm. None: the loss is that of distillation alone.
        rl_loss_weight: Factor on the loss of the policy algorithm. With 0, policy_loss_fn is not called.
        sampled: Whether to use the sampled reverse KL instead of a divergence over the whole vocabulary.
        kl_discount: Discount of later tokens in the sampled reverse KL.
        prefix_weight: gamma of the weights of tokens in the sampled reverse KL. 0: all tokens have the weight 1.
        prox_logp_method: If `sampled`, source of the denominator of r_t, see `surrogates.token_log_ratio`.

    Returns:
        (loss, statistics). distill_loss is the mean over tokens without its factor. If the rows have teacher_logprobs,
        teacher_kl is the mean of log(student / teacher) over trained tokens.
    """
    stats: dict[str, Tensor] = {}
    if sampled:
        values_T = sampled_reverse_kl(pack, logprobs, kl_discount, prox_logp_method, prefix_weight)
    else:
        values_T = pack.trained(pack.need("divergence"))
    distill_loss = pack.token_mean(values_T)
    loss = distill_loss_weight * distill_loss
    if policy_loss_fn is not None and rl_loss_weight:
        rl_loss, stats = policy_loss_fn(pack, logprobs)
        loss = loss + rl_loss_weight * rl_loss
        stats = {**stats, "rl_loss": rl_loss.detach()}
    elif pack.entropy is not None:
        stats["entropy"] = pack.token_mean(pack.trained(pack.entropy))
    if pack.teacher_logprobs is not None:
        apart_T = pack.trained(logprobs.detach()) - pack.trained(pack.teacher_logprobs)
        stats["teacher_kl"] = pack.token_mean(apart_T)
    return loss, {**stats, "distill_loss": distill_loss.detach()}


def sampled_reverse_kl(
    pack: DataPack,
    logprobs: Tensor,
    kl_discount: float = 0.0,
    prox_logp_method: ProxMethod = "recompute",
    prefix_weight: float = 0.0,
) -> Tensor:
    """Compute -r_t A_t at each trained token, see the docstring of the module. Rows must be sampled from the student.

    The result, (T,), is differentiable with respect to `logprobs`. It is exactly 0, with a gradient of 0, where student
    and teacher give the token the same probability. With a discount above 0, this must hold for all later tokens of the
    row, too.
    """
    logprobs_T, theirs_T = pack.trained(logprobs), pack.trained(pack.need("teacher_logprobs"))
    log_ratio_T, weights_T = token_log_ratio(pack, logprobs_T, prox_logp_method)
    kl_T = logprobs_T.detach() - theirs_T
    prefix_T = prefix_weights(pack, kl_T, prefix_weight) if prefix_weight else None
    if kl_discount:
        kl_T = pack.discounted_sums(kl_T, kl_discount)
    loss_T = clamp_log_ratio(log_ratio_T).exp() * kl_T
    loss_T = loss_T if prefix_T is None else prefix_T * loss_T
    return loss_T if weights_T is None else loss_T * weights_T


def prefix_weights(pack: DataPack, apart_T: Tensor, gamma: float) -> Tensor:
    """Compute the weights of IW-OPD (arXiv 2606.22600), w_t = 1 + gamma (1 - sum_(j<t) |d_j| / sum_j |d_j|).

    The sums are over the trained tokens of a row, and d_j is log(student / teacher) of token j. Without a difference in
    a row, its weights are 1.
    """
    size_T = apart_T.abs()
    whole_T = pack.of_rows(pack.sum_rows(size_T))
    return 1.0 + gamma * (pack.discounted_sums(size_T, 1.0) / whole_T).where(whole_T > 0, 0.0)
