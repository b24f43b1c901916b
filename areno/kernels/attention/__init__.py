"""Attention over packed rows by torch's scaled_dot_product_attention, which takes padded batches.

It is the form of the CPU, of float32, and of GPUs without flash attention.

Shape letters as in `areno/kernels/padding.py`.

Causal attention over packed rows of any length, by the fastest kernel that is installed.

Shape letters: N query tokens, M key tokens, R rows, H query heads, K key heads (H is a multiple of K), D head
dimension.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.errors import ConfigError, Problem
from areno.kernels.backend import is_before_ampere
from areno.kernels.fixed_order import packed_attention
from areno.kernels.padding import by_padding


def sdpa_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    starts_q: list[int],
    starts_k: list[int],
    window: int | None = None,
) -> Tensor:
    """Causal attention of each row's queries to its own keys, the last `window` of them: (N, H, D)."""
    return by_padding(q_NHD, k_MKD, v_MKD, starts_q, starts_k, partial(_sdpa, window=window))


def _sdpa(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, window: int | None) -> Tensor:
    n_q, n_k = q_BHLD.shape[2], k_BKLD.shape[2]
    mask = None
    if window is not None and window >= n_k:
        window = None
    if window is not None or 1 < n_q < n_k:
        mask = torch.ones(n_q, n_k, dtype=torch.bool, device=q_BHLD.device).tril(n_k - n_q)
        if window is not None:
            mask = mask.triu(n_k - n_q + 1 - window)
    enable_gqa = q_BHLD.shape[1] != k_BKLD.shape[1]
    if enable_gqa and q_BHLD.is_cuda:
        # Grouped heads would run the form that holds all scores at once. The memory-efficient kernel has no groups.
        k_BKLD, v_BKLD = (_each_head(x, q_BHLD.shape[1]) for x in (k_BKLD, v_BKLD))
        enable_gqa = False
    return F.scaled_dot_product_attention(
        q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None and n_q == n_k, enable_gqa=enable_gqa
    )


def _each_head(x_BKLD: Tensor, n_heads: int) -> Tensor:
    """Repeat each key head for the query heads that share it: (B, H, L, D)."""
    return x_BKLD.repeat_interleave(n_heads // x_BKLD.shape[1], dim=1)


BACKENDS = {
    "flash": "flash-attn",
    "varlen": "torch varlen_attn",
    "sdpa": "torch scaled_dot_product_attention",
    "fixed_order": "fixed-order attention",
}


def choose_backend(
    requested: Literal["auto", "flash", "native"],
    device: torch.device | str,
    dtype: torch.dtype,
    exact: bool = False,
) -> str:
    """Return the kernel for this device and dtype: one of BACKENDS.

    auto takes torch's: flash-attn is not faster in training (docs/performance.md). On a GPU that flash attention has no
    kernels for, every choice is sdpa. exact: a result may not depend on what is computed beside it.

    Raises ConfigError if engine.attn_backend asks for flash-attn where it is not installed or has no such dtype.
    """
    if exact:
        return "fixed_order"
    device = torch.device(device)
    if is_before_ampere(device):
        return "sdpa"
    half_on_cuda = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash = half_on_cuda and importlib.util.find_spec("flash_attn") is not None
    if requested == "flash" and not has_flash:
        lack = "the flash-attn package is not installed" if half_on_cuda else f"it cannot run {dtype} on {device.type}"
        message = f"is flash, but {lack}; use auto or native, or `pip install flash-attn` on a CUDA machine"
        raise ConfigError([Problem("engine.attn_backend", message)])
    if requested == "flash":
        return "flash"
    return "varlen" if half_on_cuda else "sdpa"


def varlen_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    window: int | None = None,
) -> Tensor:
    """Causal attention of each row's queries to its own keys: (N, H, D), differentiable.

    cu_seqlens_q, cu_seqlens_k: (R + 1,) int32 row borders on the device of q. Where a row has more keys than queries,
    the queries are its last tokens (bottom-right aligned). No row has fewer keys than queries. max_q, max_k: longest.
    window: how many keys a query sees at most, the last ones; None is all.
    """
    if backend == "sdpa":
        return sdpa_attention(q_NHD, k_MKD, v_MKD, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), window)
    if backend == "fixed_order":
        return _FixedOrderAttention.apply(q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_q, window)  # type: ignore[return-value]
    if backend == "varlen" and window is not None:
        borders = cu_seqlens_q, cu_seqlens_k, max_q, max_k
        return _Windowed.apply(q_NHD, k_MKD, v_MKD, *borders, window)  # type: ignore[return-value]
    if backend == "varlen":
        attn, causal = _varlen_kernel()
        return attn(q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_q, max_k, **causal)
    if backend == "flash":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        rows = cu_seqlens_q, cu_seqlens_k, max_q, max_k
        return flash_attn_varlen_func(
            q_NHD, k_MKD, v_MKD, *rows, causal=True, window_size=(_left(window), -1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    raise ValueError(f"unknown attention backend {backend!r}")


def varlen_forward(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    backend: str,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """varlen_attention of rows to themselves, outside autograd, with what `varlen_backward` will want to know of it."""
    if backend == "varlen":
        out_NHD, *saved = torch.ops.aten._flash_attention_forward(
            q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False, **_sides(window)
        )
        return out_NHD, tuple(saved[:3])  # log-sum-exp, and a random state that backward asks for without dropout too
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # type: ignore[import-not-found]

        rows = cu_seqlens, cu_seqlens, max_len, max_len
        out_NHD, log_sum, _, state = _flash_attn_varlen_forward(
            q_NHD, k_NKD, v_NKD, *rows, dropout_p=0.0, softmax_scale=q_NHD.shape[-1] ** -0.5, causal=True,
            window_size_left=_left(window),
        )  # fmt: skip
        return out_NHD, (log_sum, state)
    if backend == "fixed_order":
        out_NHD, log_sum = packed_attention(q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, window)
        return out_NHD, () if log_sum is None else (log_sum,)
    with torch.no_grad():
        return varlen_attention(q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, max_len, max_len, backend, window), ()


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
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output; out_NHD and saved are what `varlen_forward` returned."""
    rows = cu_seqlens, cu_seqlens, max_len, max_len
    if backend == "varlen" or (backend == "fixed_order" and _has_flash_backward(q_NHD)):
        log_sum, *states = saved
        states = states or _no_dropout(q_NHD.device)
        return torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(), q_NHD, k_NKD, v_NKD, out_NHD, log_sum, *rows, 0.0, True, *states, **_sides(window)
        )
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # type: ignore[import-not-found]

        log_sum, state = saved
        grads = torch.empty_like(q_NHD), torch.empty_like(k_NKD), torch.empty_like(v_NKD)
        _flash_attn_varlen_backward(
            grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD, log_sum, *grads, *rows, dropout_p=0.0,
            softmax_scale=q_NHD.shape[-1] ** -0.5, causal=True, window_size_left=_left(window), window_size_right=-1,
            softcap=0.0, alibi_slopes=None, deterministic=torch.are_deterministic_algorithms_enabled(), rng_state=state,
        )  # fmt: skip
        return grads
    return _sdpa_backward(grad_NHD, q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, window)


def _has_flash_backward(q_NHD: Tensor) -> bool:
    """Return whether torch's flash kernel, which knows half precision alone, gives the gradient of spans."""
    return q_NHD.is_cuda and q_NHD.dtype != torch.float32 and not is_before_ampere(q_NHD.device)


def _left(window: int | None) -> int:
    """How flash-attn counts: keys before the query's own, -1 for all."""
    return -1 if window is None else window - 1


def _sides(window: int | None) -> dict[str, int]:
    """The same for torch's kernels. Nothing is passed where there is no window."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _sdpa_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. There is no backward pass that could be called: forward is computed again."""
    with torch.enable_grad():
        q_NHD, k_MKD, v_MKD = (x.detach().requires_grad_() for x in (q_NHD, k_MKD, v_MKD))
        out_NHD = sdpa_attention(q_NHD, k_MKD, v_MKD, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), window)
        return torch.autograd.grad(out_NHD, (q_NHD, k_MKD, v_MKD), grad_NHD)  # type: ignore[return-value]


@functools.cache
def _no_dropout(device: torch.device) -> list[Tensor]:
    """The random state that the backward pass of torch's kernel asks for, though nothing is drawn."""
    return [torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros(0, dtype=torch.uint64, device=device)]


class _FixedOrderAttention(torch.autograd.Function):
    """The gradient is that of attention by `sdpa_attention`, which computes the same but for rounding."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_MKD: Tensor,
        v_MKD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, cu_q, cu_k)
        ctx.window = window
        return packed_attention(q_NHD, k_MKD, v_MKD, cu_q, cu_k, max_q, window)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_MKD, v_MKD, cu_q, cu_k = ctx.saved_tensors
        return *_sdpa_backward(grads[0], q_NHD, k_MKD, v_MKD, cu_q, cu_k, ctx.window), None, None, None, None


class _Windowed(torch.autograd.Function):
    """torch's kernel with a window, which `varlen_attn` of older releases cannot be asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_MKD: Tensor,
        v_MKD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        window: int,
    ) -> Tensor:
        ctx.lengths, ctx.window = (max_q, max_k), window
        out_NHD, log_sum, *states = torch.ops.aten._flash_attention_forward(
            q_NHD, k_MKD, v_MKD, cu_q, cu_k, max_q, max_k, 0.0, True, False, **_sides(window)
        )
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, out_NHD, log_sum, cu_q, cu_k, *states[:2])
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, cu_q, cu_k, state, unused = ctx.saved_tensors
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), *given, cu_q, cu_k, *ctx.lengths, 0.0, True, state, unused, **_sides(ctx.window)
        )
        return *found, None, None, None, None, None


@functools.cache
def _varlen_kernel() -> tuple[Any, dict[str, Any]]:
    """torch's varlen_attn with the keywords that make it causal and grouped; they differ between torch releases."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        causal["enable_gqa"] = True
    return varlen_attn, causal
