"""The gated delta rule in plain torch: packed sequences (rows) in chunks, with gradients, and decoding steps.

Chunks follow section 3 of the paper ("extended WY representation"): a few matrix products solve a triangular system,
and its solution is what the tokens of a chunk write to the state. Only the states pass from chunk to chunk. Each turn
of a loop computes one chunk of every row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.delta.parts import DeltaGradients, DeltaStates, DeltaWeights, RowChunks

_EPS = 1e-6  # added to the squared lengths of q and k


def delta_step(proj_BP: Tensor, weights: DeltaWeights, states: DeltaStates, slots_B: Tensor) -> Tensor:
    x_BX, z_BI, b_BH, a_BH = proj_BP.split(weights.projection_sizes, dim=-1)
    window_BXW = torch.cat((states.inputs_SXw.index_select(0, slots_B), x_BX.unsqueeze(-1)), dim=-1)
    states.inputs_SXw.index_copy_(0, slots_B, window_BXW[..., 1:])
    mixed_BX = F.silu((window_BXW.float() * weights.conv_XW.float()).sum(-1))
    q_BGK, k_BGK, v_BHV = to_heads(mixed_BX, weights, proj_BP.dtype)
    shared = weights.n_heads // weights.n_key_heads
    q_BHK, k_BHK = (part.repeat_interleave(shared, dim=1) for part in (q_BGK, k_BGK))
    decay_BH, beta_BH = decay_and_beta(b_BH, a_BH, weights)
    state_BHKV = states.matrices_SHKV.index_select(0, slots_B) * decay_BH.exp()[..., None, None]
    missing_BHV = v_BHV - (state_BHKV * k_BHK.unsqueeze(-1)).sum(-2)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * (missing_BHV * beta_BH.unsqueeze(-1)).unsqueeze(-2)
    states.matrices_SHKV.index_copy_(0, slots_B, state_BHKV)
    return gated_norm((state_BHKV * q_BHK.unsqueeze(-1)).sum(-2), z_BI, weights)


def delta_rows(
    proj_NP: Tensor,
    weights: DeltaWeights,
    chunks: RowChunks,
    initial: DeltaStates | None = None,
    return_states: bool = False,
) -> tuple[Tensor, DeltaStates | None]:
    x_NX, z_NI, b_NH, a_NH = proj_NP.split(weights.projection_sizes, dim=-1)
    mixed_NX = _ConvolveRows.apply(x_NX, weights.conv_XW, chunks.positions_N)
    inputs_RXw = None
    if initial is not None:
        mixed_NX = _add_earlier(mixed_NX, initial.inputs_SXw, weights.conv_XW, chunks)
    if return_states:
        inputs_RXw = _conv_states(x_NX, None if initial is None else initial.inputs_SXw, weights, chunks)
    q_NGK, k_NGK, v_NHV = to_heads(F.silu(mixed_NX), weights, proj_NP.dtype)
    decay_NH, beta_NH = decay_and_beta(b_NH, a_NH, weights)
    state_RHKV = None if initial is None else initial.matrices_SHKV
    out_NHV, state_RHKV = chunked_delta(q_NGK, k_NGK, v_NHV, decay_NH, beta_NH, chunks, state_RHKV)
    after = None if inputs_RXw is None else DeltaStates(inputs_RXw, state_RHKV)
    return gated_norm(out_NHV, z_NI, weights), after


def delta_rows_backward(
    grad_NI: Tensor, proj_NP: Tensor, weights: DeltaWeights, chunks: RowChunks, of_weights: bool = True
) -> tuple[Tensor, DeltaGradients | None]:
    proj_NP = proj_NP.detach().requires_grad_()
    # Copies of the weights in float32, so that their gradients are float32, too.
    conv, log_decay, bias, norm = copies = [each.detach().float().requires_grad_() for each in weights[:4]]
    with torch.enable_grad():
        copied = DeltaWeights(conv, log_decay, bias, norm, weights.eps, weights.n_key_heads)
        out_NI, _ = delta_rows(proj_NP, copied, chunks)
        grad_proj_NP, *found = torch.autograd.grad(out_NI, [proj_NP, *(copies if of_weights else ())], grad_NI)
    return grad_proj_NP, DeltaGradients(*found) if of_weights else None


def to_heads(mixed_NX: Tensor, weights: DeltaWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised and scaled queries and keys (N, G, K) and values (N, H, V), rounded to `dtype`, as float32."""
    n_key = weights.n_key_heads * weights.key_dim
    q, k, v = mixed_NX.split((n_key, n_key, mixed_NX.shape[-1] - 2 * n_key), dim=-1)
    q, k = (part.unflatten(-1, (-1, weights.key_dim)) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _EPS) for part in (q, k))
    v = v.unflatten(-1, (-1, weights.value_dim))
    q, k, v = (part.to(dtype).float() for part in (q * weights.key_dim**-0.5, k, v))
    return q, k, v


def decay_and_beta(b_NH: Tensor, a_NH: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """Return the logarithm g of the state's decay, at most 0, and beta, the fraction of the stored value to replace."""
    decay_NH = -weights.A_log_H.float().exp() * F.softplus(a_NH.float() + weights.dt_bias_H.float())
    return decay_NH, b_NH.float().sigmoid()


def gated_norm(out_NHV: Tensor, z_NI: Tensor, weights: DeltaWeights) -> Tensor:
    """Return the RMS norm of each head, times silu(z)."""
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
    initial_RHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (N, H, V), and the state of each row after its last token. `decay_NH` has the logarithms g."""
    n_heads, n_key_heads, n_rows = v_NHV.shape[1], q_NGK.shape[1], len(chunks.order_R)

    def cut(x_NHD: Tensor) -> Tensor:
        """Gather tokens into chunks. Positions after the end of a row are zeros, which change no state."""
        padded = F.pad(x_NHD, (0, 0, 0, 0, 0, 1))
        return padded.index_select(0, chunks.tokens_TC.flatten()).unflatten(0, chunks.tokens_TC.shape).transpose(1, 2)

    def repeat_heads(x_TGCD: Tensor) -> Tensor:
        return x_TGCD.repeat_interleave(n_heads // n_key_heads, dim=1)

    q_TGCK, k_TGCK, v_THCV = cut(q_NGK), cut(k_NGK), cut(v_NHV)
    size = chunks.tokens_TC.shape[1]
    later = torch.ones(size, size, dtype=torch.bool, device=v_NHV.device).triu(1)
    decay_THC1, beta_THC1 = cut(decay_NH.unsqueeze(-1)), cut(beta_NH.unsqueeze(-1))
    # Running sums by a matrix product, since torch's cumsum has no fixed order on CUDA. The sums reach hundreds, where
    # float32 is off by 1e-5. So their differences, the decays between tokens, are computed in float64.
    sums = decay_THC1.flatten(0, 1).squeeze(-1).double() @ (~later).double().t()
    sums_THC1, dtype = sums.view_as(decay_THC1), v_NHV.dtype
    between_THCC = (sums_THC1 - sums_THC1.transpose(-1, -2)).to(dtype).masked_fill_(later, -torch.inf).exp_()
    since_THC1, until_THC1 = sums_THC1.exp().to(dtype), (sums_THC1[:, :, -1:] - sums_THC1).exp().to(dtype)
    keys_TGCC = k_TGCK @ k_TGCK.transpose(-1, -2)
    system_THCC = beta_THC1 * between_THCC * repeat_heads(keys_TGCC)
    seen_THCC = between_THCC * repeat_heads(q_TGCK @ k_TGCK.transpose(-1, -2))
    q_THCK, k_THCK = repeat_heads(q_TGCK), repeat_heads(k_TGCK)
    # A token writes its value minus the value that the state and the chunk's earlier tokens hold for its key.
    sides = torch.cat((beta_THC1 * v_THCV, (beta_THC1 * since_THC1) * k_THCK), dim=-1)
    solved = torch.linalg.solve_triangular(system_THCC, sides, upper=False, unitriangular=True)
    new_THCV, held_THCK = solved.split((v_THCV.shape[-1], k_THCK.shape[-1]), dim=-1)
    left_THKC = (k_THCK * until_THC1).transpose(-1, -2)
    kept_TH11 = since_THC1[:, :, -1:]
    if initial_RHKV is None:
        state_RHKV = v_NHV.new_zeros(n_rows, n_heads, k_THCK.shape[-1], v_THCV.shape[-1])
    else:
        state_RHKV = initial_RHKV.index_select(0, chunks.order_R)
    written, states, ended, start = [], [], [], 0
    for n in chunks.rows_J:
        part, start = slice(start, start + n), start + n
        ended.append(state_RHKV[n:])  # states of rows that have no chunk in this step
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
    """Causal convolution of each channel over the last W tokens of a row, in float32. Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, conv_XW: Tensor, positions_N: Tensor) -> Tensor:
        ctx.save_for_backward(x_NX, conv_XW, positions_N)
        conv_WX = conv_XW.float().t()
        out_NX = x_NX.float() * conv_WX[-1]
        for shift in range(1, len(conv_WX)):
            out_NX[shift:] += _shifted(x_NX, positions_N, shift) * conv_WX[-1 - shift]
        return out_NX

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NX, conv_XW, positions_N = ctx.saved_tensors
        grad_NX, conv_WX = grads[0], conv_XW.float().t()
        grad_x_NX = grad_NX * conv_WX[-1]
        grad_conv = [(grad_NX * x_NX.float()).sum(0)]
        for shift in range(1, len(conv_WX)):
            within_N1 = (positions_N[shift:] >= shift).unsqueeze(-1)
            grad_x_NX[: max(0, len(x_NX) - shift)] += grad_NX[shift:] * within_N1 * conv_WX[-1 - shift]
            grad_conv.append((grad_NX[shift:] * _shifted(x_NX, positions_N, shift)).sum(0))
        return grad_x_NX.to(x_NX.dtype), torch.stack(grad_conv[::-1], dim=-1).to(conv_XW.dtype), None


def _shifted(x_NX: Tensor, positions_N: Tensor, shift: int) -> Tensor:
    """Return the x of the token `shift` positions earlier, for tokens from index `shift` on.

    The result has N - shift lines. A line is zero if the earlier token is in another row.
    """
    return x_NX[: max(0, len(x_NX) - shift)].float() * (positions_N[shift:] >= shift).unsqueeze(-1)


def _add_earlier(mixed_NX: Tensor, inputs_RXw: Tensor, conv_XW: Tensor, chunks: RowChunks) -> Tensor:
    """Add the terms of the inputs before each row, `inputs_RXw`, to the convolution of the row's first tokens."""
    n_before = inputs_RXw.shape[-1]
    for age in range(n_before):
        has_R = (chunks.lengths_R > age).unsqueeze(-1)
        tokens_R = (chunks.starts_R + age).clamp_max(len(mixed_NX) - 1)
        # The token at position `age` sees the earlier inputs from index `age` on, with the first weights.
        added_RX = (inputs_RXw[..., age:].float() * conv_XW[:, : n_before - age].float()).sum(-1)
        mixed_NX = mixed_NX.index_add(0, tokens_R, added_RX * has_R)
    return mixed_NX


def _conv_states(x_NX: Tensor, initial_RXw: Tensor | None, weights: DeltaWeights, chunks: RowChunks) -> Tensor:
    """Return the last w inputs of each row. If a row is shorter, the result begins with inputs of `initial_RXw`."""
    n_before = weights.conv_XW.shape[1] - 1
    if initial_RXw is None:
        initial_RXw = x_NX.new_zeros(len(chunks.order_R), x_NX.shape[1], n_before)
    found: list[Tensor] = []
    for place in range(n_before):
        positions_R = chunks.lengths_R - n_before + place
        own_RX = x_NX.index_select(0, (chunks.starts_R + positions_R).clamp(0, len(x_NX) - 1))
        columns_R = (n_before + positions_R).clamp(0, n_before - 1)[:, None, None].expand(-1, x_NX.shape[1], 1)
        earlier_RX = initial_RXw.gather(2, columns_R).squeeze(-1)
        found.append(torch.where((positions_R >= 0).unsqueeze(-1), own_RX, earlier_RX))
    return torch.stack(found, dim=-1)
