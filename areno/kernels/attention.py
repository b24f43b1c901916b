"""Causal attention over packed rows of any length, by the fastest kernel that is installed.

Shape letters: N query tokens, M key tokens, R rows, H query heads, K key heads (H is a multiple of K), D head
dimension; inside: T tokens of the B rows of one padded batch of length L.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.errors import ConfigError, Problem

BACKENDS = {"flash": "flash-attn", "varlen": "torch varlen_attn", "sdpa": "torch scaled_dot_product_attention"}
SHORT_ROW = 64  # tokens; below this a kernel launch costs more than the padding it saves


def choose_backend(
    requested: Literal["auto", "flash", "native"], device: torch.device | str, dtype: torch.dtype
) -> str:
    """The kernel for this device and dtype: one of BACKENDS.

    ConfigError where engine.attn_backend asks for flash-attn and it cannot be used.
    """
    device = torch.device(device)
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash = half_on_cuda and importlib.util.find_spec("flash_attn") is not None
    if requested == "flash" and not has_flash:
        lack = "the flash-attn package is not installed" if half_on_cuda else f"it cannot run {dtype} on {device.type}"
        message = f"is flash, but {lack}; use auto or native, or `pip install flash-attn` on a CUDA machine"
        raise ConfigError([Problem("engine.attn_backend", message)])
    if has_flash and requested != "native":
        return "flash"
    if half_on_cuda and importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        return "varlen"
    return "sdpa"


def varlen_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
) -> Tensor:
    """Causal attention of each row's queries to its own keys: (N, H, D), differentiable.

    cu_seqlens_q, cu_seqlens_k: (R + 1,) int32 row borders on the device of q. Where a row has more keys than queries,
    the queries are its last tokens (bottom-right aligned). No row has fewer keys than queries. max_q, max_k: longest.
    """
    if backend == "sdpa":
        return _sdpa(q_NHD, k_MKD, v_MKD, cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    if backend == "varlen":
        attn, causal = _varlen_kernel()
        return attn(q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **causal)
    if backend == "flash":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return flash_attn_varlen_func(q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal=True)
    raise ValueError(f"unknown attention backend {backend!r}")


def varlen_forward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, cu_seqlens: Tensor, max_len: int, backend: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """varlen_attention of rows to themselves, outside autograd, with what `varlen_backward` will want to know of it."""
    if backend == "varlen":
        out_NHD, *saved = torch.ops.aten._flash_attention_forward(
            q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False
        )
        return out_NHD, tuple(saved[:3])  # log-sum-exp, and a random state that backward asks for without dropout too
    with torch.no_grad():
        return varlen_attention(q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, max_len, backend), ()


def varlen_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    out_NHD: Tensor,
    saved: Sequence[Tensor],
    cu_seqlens: Tensor,
    max_len: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output; out_NHD and saved are what `varlen_forward` returned."""
    if backend == "varlen":
        log_sum, state, unused = saved
        return torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(),
            q_NHD,
            k_NKD,
            v_NKD,
            out_NHD,
            log_sum,
            cu_seqlens,
            cu_seqlens,
            max_len,
            max_len,
            0.0,
            True,
            state,
            unused,
        )
    with torch.enable_grad():  # the other kernels have no backward pass that could be called: compute forward again
        q_NHD, k_NKD, v_NKD = (x.detach().requires_grad_() for x in (q_NHD, k_NKD, v_NKD))
        out_NHD = varlen_attention(q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, max_len, backend)
        return torch.autograd.grad(out_NHD, (q_NHD, k_NKD, v_NKD), grad_NHD)  # type: ignore[return-value]


@functools.cache
def _varlen_kernel() -> tuple[Any, dict[str, Any]]:
    """torch's varlen_attn with the keywords that make it causal and grouped; they differ between torch releases."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        causal["enable_gqa"] = True
    return varlen_attn, causal


def _sdpa(q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, starts_q: list[int], starts_k: list[int]) -> Tensor:
    """Rows of similar length share a call, since many short calls cost more than some padding."""
    outs: list[Tensor] = []
    order: list[Tensor] = []  # token indices of `outs`
    for rows in _batches(starts_q, starts_k):
        lengths_q = [starts_q[row + 1] - starts_q[row] for row in rows]
        lengths_k = [starts_k[row + 1] - starts_k[row] for row in rows]
        place_q = _Padding([starts_q[row] for row in rows], lengths_q, q_NHD.device)
        place_k = place_q
        if starts_q != starts_k:
            place_k = _Padding([starts_k[row] for row in rows], lengths_k, q_NHD.device)
        if len(rows) == len(starts_q) - 1:  # every token, in order: nothing to pick out
            q_THD, k_THD, v_THD = q_NHD, k_MKD, v_MKD
        else:
            q_THD = q_NHD.index_select(0, place_q.tokens_T)
            k_THD, v_THD = k_MKD.index_select(0, place_k.tokens_T), v_MKD.index_select(0, place_k.tokens_T)
        n_q, n_k = max(lengths_q), max(lengths_k)
        mask = None
        if 1 < n_q < n_k:
            mask = torch.ones(n_q, n_k, dtype=torch.bool, device=q_NHD.device).tril(n_k - n_q)
        out_BHLD = F.scaled_dot_product_attention(
            place_q.pad(q_THD),
            place_k.pad(k_THD),
            place_k.pad(v_THD),
            attn_mask=mask,
            is_causal=n_q == n_k,
            enable_gqa=q_NHD.shape[1] != k_MKD.shape[1],
        )
        outs.append(place_q.unpad(out_BHLD))
        order.append(place_q.tokens_T)
    if len(outs) == 1:
        return outs[0]
    if not outs:
        return torch.zeros_like(q_NHD)
    return torch.cat(outs).index_select(0, torch.cat(order).argsort())


def _batches(starts_q: list[int], starts_k: list[int]) -> list[list[int]]:
    """Rows that are computed together, each list in packed order.

    Rows whose queries and keys are the same tokens may differ in length: a padded key comes after every real query of
    its row, so the causal mask hides it. Rows with more keys than queries need a mask of their own and are batched at
    equal lengths only.
    """
    whole: list[tuple[int, int]] = []  # (length, row)
    tails: dict[tuple[int, int], list[int]] = {}
    for row in range(len(starts_q) - 1):
        n_q, n_k = starts_q[row + 1] - starts_q[row], starts_k[row + 1] - starts_k[row]
        if n_q == n_k > 0:
            whole.append((n_q, row))
        elif n_q > 0:
            tails.setdefault((n_q, n_k), []).append(row)
    batches = list(tails.values())
    whole.sort(reverse=True)
    first = 0
    for i in range(len(whole) + 1):
        if i == len(whole) or whole[i][0] < min(whole[first][0] * 3 // 4, whole[first][0] - SHORT_ROW):
            if i > first:
                batches.append(sorted(row for _, row in whole[first:i]))
            first = i
    return batches


class _Padding:
    """Packed tokens of B rows (T, heads, D) to and from a padded batch (B, heads, L, D)."""

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device):
        n_rows, longest = len(starts), max(lengths)
        self.shape = (n_rows, longest)
        self.ragged = min(lengths) < longest
        lengths_B = torch.tensor(lengths)
        within_BL = torch.arange(longest).expand(n_rows, longest)
        real_BL = within_BL < lengths_B.unsqueeze(1)
        tokens_BL = torch.tensor(starts).unsqueeze(1) + within_BL
        self.tokens_T = tokens_BL[real_BL].to(device)
        self.slots_T = real_BL.flatten().nonzero().squeeze(1).to(device)

    def pad(self, x_THD: Tensor) -> Tensor:
        if self.ragged:
            n_rows, longest = self.shape
            x_THD = x_THD.new_zeros(n_rows * longest, *x_THD.shape[1:]).index_copy(0, self.slots_T, x_THD)
        return x_THD.reshape(*self.shape, *x_THD.shape[1:]).transpose(1, 2)

    def unpad(self, x_BHLD: Tensor) -> Tensor:
        x_THD = x_BHLD.transpose(1, 2).flatten(0, 1)
        return x_THD.index_select(0, self.slots_T) if self.ragged else x_THD
