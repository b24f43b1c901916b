"""The gated delta rule in torch: packed rows in chunks, with gradients, and one token of each row.

Chunks follow section 3 of the paper ("extended WY representation"): within a chunk, what each token writes solves a
triangular system, so that a chunk is a few products of matrices. Only the states go from chunk to chunk, one step for
all rows. Letters as in the package and in `parts.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights, RowChunks

_EPS = 1e-6  # of the lengths of q and k


def delta_step(given_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    """See the package."""
    x_BX, z_BI, b_BH, a_BH = given_BP.split(weights.sizes, dim=-1)
    window_BXW = torch.cat((states.inputs_SXw.index_select(0, slots_B), x_BX.unsqueeze(-1)), dim=-1)
    states.inputs_SXw.index_copy_(0, slots_B, window_BXW[..., 1:])
    mixed_BX = F.silu((window_BXW.float() * weights.conv_XW.float()).sum(-1))
    q_BGK, k_BGK, v_BHV = to_heads(mixed_BX, weights, given_BP.dtype)
    shared = weights.n_heads // weights.n_key_heads
    q_BHK, k_BHK = (part.repeat_interleave(shared, dim=1) for part in (q_BGK, k_BGK))
    decay_BH, beta_BH = gates(b_BH, a_BH, weights)
    state_BHKV = states.matrices_SHKV.index_select(0, slots_B) * decay_BH.exp()[..., None, None]
    missing_BHV = v_BHV - (state_BHKV * k_BHK.unsqueeze(-1)).sum(-2)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * (missing_BHV * beta_BH.unsqueeze(-1)).unsqueeze(-2)
    states.matrices_SHKV.index_copy_(0, slots_B, state_BHKV)
    return gated_norm((state_BHKV * q_BHK.unsqueeze(-1)).sum(-2), z_BI, weights)


def delta_rows(
    given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, before: DeltaStates | None = None, keep: bool = False
) -> tuple[Tensor, DeltaStates | None]:
    """See the package. Has gradients by what is given and by the weights."""
    x_NX, z_NI, b_NH, a_NH = given_NP.split(weights.sizes, dim=-1)
    mixed_NX = _ConvolveRows.apply(x_NX, weights.conv_XW, chunks.ages_N)
    inputs_RXw = None
    if before is not None:
        mixed_NX = _add_earlier(mixed_NX, before.inputs_SXw, weights.conv_XW, chunks)
    if keep:
        inputs_RXw = _last_inputs(x_NX, None if before is None else before.inputs_SXw, weights, chunks)
    q_NGK, k_NGK, v_NHV = to_heads(F.silu(mixed_NX), weights, given_NP.dtype)
    decay_NH, beta_NH = gates(b_NH, a_NH, weights)
    state_RHKV = None if before is None else before.matrices_SHKV
    out_NHV, state_RHKV = chunked_delta(q_NGK, k_NGK, v_NHV, decay_NH, beta_NH, chunks, state_RHKV)
    after = None if inputs_RXw is None else DeltaStates(inputs_RXw, state_RHKV)
    return gated_norm(out_NHV, z_NI, weights), after


def delta_rows_backward(
    grad_NI: Tensor, given_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, of_weights: bool
) -> tuple[Tensor, DeltaGradients | None]:
    """See the package."""
    given_NP = given_NP.detach().requires_grad_()
    # Copies in float32, for gradients of this precision.
    conv, log_decay, bias, norm = copies = [each.detach().float().requires_grad_() for each in weights[:4]]
    with torch.enable_grad():
        copied = DeltaWeights(conv, log_decay, bias, norm, weights.eps, weights.n_key_heads)
        out_NI, _ = delta_rows(given_NP, copied, chunks)
        grad_given_NP, *found = torch.autograd.grad(out_NI, [given_NP, *(copies if of_weights else ())], grad_NI)
    return grad_given_NP, DeltaGradients(*found) if of_weights else None


def to_heads(mixed_NX: Tensor, weights: DeltaWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of length 1, q divided by the root of its size, and v: float32, rounded to the dtype."""
    n_key = weights.n_key_heads * weights.key_dim
    q, k, v = mixed_NX.split((n_key, n_key, mixed_NX.shape[-1] - 2 * n_key), dim=-1)
    q, k = (part.unflatten(-1, (-1, weights.key_dim)) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS) for part in (q, k))
    v = v.unflatten(-1, (-1, weights.value_dim))
    q, k, v = (part.to(dtype).float() for part in (q * weights.key_dim**-0.5, k, v))
    return q, k, v


def gates(b_NH: Tensor, a_NH: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """g, the logarithm of a state's decay, and beta, how much of a state's value is replaced: float32."""
    decay_NH = -weights.log_decay_H.float().exp() * F.softplus(a_NH.float() + weights.bias_H.float())
    return decay_NH, b_NH.float().sigmoid()


def gated_norm(out_NHV: Tensor, z_NI: Tensor, weights: DeltaWeights) -> Tensor:
    """The norm of each head times silu(z): (N, H V) in the dtype of z."""
    out_NHV = out_NHV.to(z_NI.dtype).float()
    normed_NHV = F.rms_norm(out_NHV, (weights.value_dim,), weights.norm_V.float(), weights.eps)
    return (normed_NHV.flatten(-2) * F.silu(z_NI.float())).to(z_NI.dtype)


def chunked_delta(
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    before_RHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The results of all tokens (N, H, V), and the states behind the rows (R, H, K, V)."""
    n_heads, n_key_heads, n_rows = v_NHV.shape[1], q_NGK.shape[1], len(chunks.order_R)

    def cut(x_NHD: Tensor) -> Tensor:
        """By chunks, (T, H, C, D), with zeros behind the rows' ends: these tokens change no state."""
        padded = F.pad(x_NHD, (0, 0, 0, 0, 0, 1))
        return padded.index_select(0, chunks.tokens_TC.flatten()).unflatten(0, chunks.tokens_TC.shape).transpose(1, 2)

    def by_value_head(x_TGCD: Tensor) -> Tensor:
        return x_TGCD.repeat_interleave(n_heads // n_key_heads, dim=1)

    q_TGCK, k_TGCK, v_THCV = cut(q_NGK), cut(k_NGK), cut(v_NHV)
    size = chunks.tokens_TC.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=v_NHV.device).triu(1)
    decay_THC1, beta_THC1 = cut(decay_NH.unsqueeze(-1)), cut(beta_NH.unsqueeze(-1))
    # Sums up to each token as one product, since torch's cumsum has no fixed order on CUDA. Differences are taken in
    # float64: sums reach hundreds, where float32 is 1e-5 off, and so would be the decay between two neighbours.
    sums = decay_THC1.flatten(0, 1).squeeze(-1).double() @ (~later).double().t()
    sums_THC1, dtype = sums.view_as(decay_THC1), v_NHV.dtype
    between_THCC = (sums_THC1 - sums_THC1.transpose(-1, -2)).to(dtype).masked_fill_(later, -torch.inf).exp_()
    since_THC1, until_THC1 = sums_THC1.exp().to(dtype), (sums_THC1[:, :, -1:] - sums_THC1).exp().to(dtype)
    keys_TGCC = k_TGCK @ k_TGCK.transpose(-1, -2)
    system_THCC = beta_THC1 * between_THCC * by_value_head(keys_TGCC)
    seen_THCC = between_THCC * by_value_head(q_TGCK @ k_TGCK.transpose(-1, -2))
    q_THCK, k_THCK = by_value_head(q_TGCK), by_value_head(k_TGCK)
    # What a token writes is its value without what the state and the chunk's earlier tokens hold for its key.
    sides = torch.cat((beta_THC1 * v_THCV, (beta_THC1 * since_THC1) * k_THCK), dim=-1)
    solved = torch.linalg.solve_triangular(system_THCC, sides, upper=False, unitriangular=True)
    new_THCV, held_THCK = solved.split((v_THCV.shape[-1], k_THCK.shape[-1]), dim=-1)
    left_THKC = (k_THCK * until_THC1).transpose(-1, -2)
    kept_TH11 = since_THC1[:, :, -1:]
    if before_RHKV is None:
        state_RHKV = v_NHV.new_zeros(n_rows, n_heads, k_THCK.shape[-1], v_THCV.shape[-1])
    else:
        state_RHKV = before_RHKV.index_select(0, chunks.order_R)
    written, states, ended, start = [], [], [], 0
    for n in chunks.rows_J:
        part, start = slice(start, start + n), start + n
        ended.append(state_RHKV[n:])  # rows that have no such chunk
        state_RHKV = state_RHKV[:n]
        states.append(state_RHKV)
        written.append(new_THCV[part] - held_THCK[part] @ state_RHKV)
        state_RHKV = kept_TH11[part] * state_RHKV + left_THKC[part] @ written[-1]
    final_RHKV = torch.cat([state_RHKV, *reversed(ended)])
    back_R = torch.empty_like(chunks.order_R)
    back_R[chunks.order_R] = torch.arange(n_rows, device=back_R.device)
    if not written:
        return torch.zeros_like(v_NHV), final_RHKV.index_select(0, back_R)
    out_THCV = (q_THCK * since_THC1) @ torch.cat(states) + seen_THCC @ torch.cat(written)
    out_NHV = out_THCV.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places_N)
    return out_NHV, final_RHKV.index_select(0, back_R)


class _ConvolveRows(torch.autograd.Function):
    """Each channel's convolution over the last W tokens of a row, float32. Keeps only what it was given."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, conv_XW: Tensor, ages_N: Tensor) -> Tensor:
        ctx.save_for_backward(x_NX, conv_XW, ages_N)
        conv_WX = conv_XW.float().t()
        out_NX = x_NX.float() * conv_WX[-1]
        for shift in range(1, len(conv_WX)):
            out_NX[shift:] += _shifted(x_NX, ages_N, shift) * conv_WX[-1 - shift]
        return out_NX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NX, conv_XW, ages_N = ctx.saved_tensors
        grad_NX, conv_WX = grads[0], conv_XW.float().t()
        grad_x_NX = grad_NX * conv_WX[-1]
        grad_conv = [(grad_NX * x_NX.float()).sum(0)]
        for shift in range(1, len(conv_WX)):
            within_N1 = (ages_N[shift:] >= shift).unsqueeze(-1)
            grad_x_NX[: max(0, len(x_NX) - shift)] += grad_NX[shift:] * within_N1 * conv_WX[-1 - shift]
            grad_conv.append((grad_NX[shift:] * _shifted(x_NX, ages_N, shift)).sum(0))
        return grad_x_NX.to(x_NX.dtype), torch.stack(grad_conv[::-1], dim=-1).to(conv_XW.dtype), None


def _shifted(x_NX: Tensor, ages_N: Tensor, shift: int) -> Tensor:
    """The tokens so many places earlier, from the token `shift` on; zeros where that is another row."""
    return x_NX[: max(0, len(x_NX) - shift)].float() * (ages_N[shift:] >= shift).unsqueeze(-1)


def _add_earlier(mixed_NX: Tensor, inputs_RXw: Tensor, conv_XW: Tensor, chunks: RowChunks) -> Tensor:
    """What tokens before the pack add to the first ones of each row."""
    n_before = inputs_RXw.shape[-1]
    for age in range(n_before):
        has_R = (chunks.lengths_R > age).unsqueeze(-1)
        tokens_R = (chunks.starts_R + age).clamp_max(len(mixed_NX) - 1)
        # The token `age` sees the inputs from `age` on, with the first weights of the convolution.
        added_RX = (inputs_RXw[..., age:].float() * conv_XW[:, : n_before - age].float()).sum(-1)
        mixed_NX = mixed_NX.index_add(0, tokens_R, added_RX * has_R)
    return mixed_NX


def _last_inputs(x_NX: Tensor, before_RXw: Tensor | None, weights: DeltaWeights, chunks: RowChunks) -> Tensor:
    """The last w inputs of each row, (R, X, w), those before the pack included; zeros before a row."""
    n_before = weights.conv_XW.shape[1] - 1
    if before_RXw is None:
        before_RXw = x_NX.new_zeros(len(chunks.order_R), x_NX.shape[1], n_before)
    found: list[Tensor] = []
    for place in range(n_before):
        ages_R = chunks.lengths_R - n_before + place
        own_RX = x_NX.index_select(0, (chunks.starts_R + ages_R).clamp(0, len(x_NX) - 1))
        columns_R = (n_before + ages_R).clamp(0, n_before - 1)[:, None, None].expand(-1, x_NX.shape[1], 1)
        earlier_RX = before_RXw.gather(2, columns_R).squeeze(-1)
        found.append(torch.where((ages_R >= 0).unsqueeze(-1), own_RX, earlier_RX))
    return torch.stack(found, dim=-1)
