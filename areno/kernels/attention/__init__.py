"""Causal attention over packed sequences (rows) of any length, by the fastest installed kernel.

`choose_backend` picks a backend once. `varlen_attention` runs it under autograd. `varlen_forward` and `varlen_backward`
run its forward and backward pass outside autograd, for layers that implement their own backward pass. The backend
"sdpa" is torch's scaled_dot_product_attention on padded batches. It is used on CPUs, in float32, and on GPUs without
flash attention.

Shape letters: N query tokens, M key tokens, R rows, H query heads, K key heads (H is a multiple of K), D head
dimension; B rows of a padded batch of length L.
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
    """Compute causal attention of packed sequences (rows) with torch's scaled_dot_product_attention, differentiable.

    Args:
        q_NHD: queries of all rows, packed, shape (query tokens, heads, head dim).
        k_MKD: keys of all rows, packed. If a row has more keys than queries, its queries are its last tokens.
        v_MKD: values of all rows, packed in the same way.
        starts_q: cumulative numbers of queries, from 0 to N, one more than there are rows.
        starts_k: cumulative numbers of keys, from 0 to M, one more than there are rows.
        window: size of the sliding window: a query attends to its own and the `window` - 1 previous positions. None
            means full causal attention.

    Returns:
        The output (N, H, D).
    """
    return by_padding(q_NHD, k_MKD, v_MKD, starts_q, starts_k, partial(_sdpa, window=window))


def _sdpa(q_BHLD: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, firsts_B: Tensor | None, window: int | None) -> Tensor:
    n_q, n_k = q_BHLD.shape[2], k_BKLD.shape[2]
    mask = None
    if window is not None and window >= n_k:
        window = None
    if window is not None or firsts_B is not None:
        device = q_BHLD.device
        firsts_B = torch.zeros(1, dtype=torch.int64, device=device) if firsts_B is None else firsts_B
        # Padding behind the last query of a row attends to the last keys, since a query without keys would give NaN.
        places_BL1 = (firsts_B.view(-1, 1, 1) + torch.arange(n_q, device=device).view(-1, 1)).clamp(max=n_k - 1)
        mask = (keys_L := torch.arange(n_k, device=device)) <= places_BL1
        if window is not None:
            mask &= keys_L > places_BL1 - window
        mask = mask.unsqueeze(1)
    enable_gqa = q_BHLD.shape[1] != k_BKLD.shape[1]
    if enable_gqa and q_BHLD.is_cuda:
        # torch's memory-efficient kernel does not support grouped heads, so torch would materialise all scores.
        k_BKLD, v_BKLD = (_each_head(x, q_BHLD.shape[1]) for x in (k_BKLD, v_BKLD))
        enable_gqa = False
    return F.scaled_dot_product_attention(
        q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None and n_q == n_k, enable_gqa=enable_gqa
    )


def _each_head(x_BKLD: Tensor, n_heads: int) -> Tensor:
    """Repeat each key head for the query heads that share it, giving shape (B, n_heads, L, D)."""
    return x_BKLD.repeat_interleave(n_heads // x_BKLD.shape[1], dim=1)


BACKENDS = {
    "flash": "flash-attn",
    "varlen": "torch varlen_attn",
    "sdpa": "torch scaled_dot_product_attention",
    "fixed_order": "fixed-order kernels",
}


def choose_backend(
    requested: Literal["auto", "flash", "native"],
    device: torch.device | str,
    dtype: torch.dtype,
    exact: bool = False,
) -> str:
    """Return the name of the attention backend for a device and dtype.

    "auto" and "native" prefer torch's kernels, as flash-attn is not faster in training (docs/performance.md).

    Args:
        requested: the setting `engine.attn_backend`.
        device: device of the model. A GPU without flash attention gets "sdpa", whatever is requested.
        dtype: dtype of queries, keys and values.
        exact: whether a query's result must not depend on the rest of the batch (`engine.exact`). Then the backend is
            always "fixed_order".

    Returns:
        A key of BACKENDS.

    Raises:
        ConfigError: `requested` is "flash", but flash-attn is not installed or does not support the dtype or device.
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
    """Compute causal attention of packed sequences (rows), differentiable.

    Args:
        q_NHD: queries of all rows, packed, shape (query tokens, heads, head dim).
        k_MKD: keys of all rows, packed. If a row has more keys than queries, its queries are its last tokens. No row
            may have fewer keys than queries.
        v_MKD: values of all rows, packed in the same way.
        cu_seqlens_q: (rows + 1,) int32 on the device of the queries, cumulative numbers of queries, from 0 to N.
        cu_seqlens_k: (rows + 1,) int32, cumulative numbers of keys, from 0 to M.
        max_q: largest number of queries in a row.
        max_k: largest number of keys in a row.
        backend: a key of BACKENDS.
        window: size of the sliding window: a query attends to its own and the `window` - 1 previous positions. None
            means full causal attention.

    Returns:
        The output (N, H, D).

    Raises:
        ValueError: the backend is unknown.
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
        how = {"window_size": (_left(window), -1), "deterministic": torch.are_deterministic_algorithms_enabled()}
        return flash_attn_varlen_func(q_NHD, k_MKD, v_MKD, *rows, causal=True, **how)
    raise ValueError(f"unknown attention backend {backend!r}")


def varlen_forward(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute causal attention of packed sequences (rows) outside autograd, for a later call of `varlen_backward`.

    Args:
        q_NHD: queries of all rows, packed, shape (query tokens, heads, head dim).
        k_MKD: keys of all rows, packed. If a row has more keys than queries, its queries are its last tokens.
        v_MKD: values of all rows, packed in the same way.
        cu_seqlens_q: (rows + 1,) int32, cumulative numbers of queries, from 0 to N.
        cu_seqlens_k: (rows + 1,) int32, cumulative numbers of keys, from 0 to M.
        max_q: largest number of queries in a row.
        max_k: largest number of keys in a row.
        backend: a key of BACKENDS.
        window: size of the sliding window: a query attends to its own and the `window` - 1 previous positions. None
            means full causal attention.

    Returns:
        The output (N, H, D), and a tuple of tensors to pass to `varlen_backward` as `saved`.
    """
    rows = cu_seqlens_q, cu_seqlens_k, max_q, max_k
    if backend == "varlen":
        out_NHD, *saved = torch.ops.aten._flash_attention_forward(
            q_NHD, k_MKD, v_MKD, *rows, 0.0, True, False, **_sides(window)
        )
        # The log-sum-exp, and two tensors of dropout's random state, which backward requires even without dropout.
        return out_NHD, tuple(saved[:3])
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # type: ignore[import-not-found]

        how = {"dropout_p": 0.0, "softmax_scale": q_NHD.shape[-1] ** -0.5, "window_size_left": _left(window)}
        out_NHD, log_sum, _, state = _flash_attn_varlen_forward(q_NHD, k_MKD, v_MKD, *rows, causal=True, **how)
        return out_NHD, (log_sum, state)
    if backend == "fixed_order":
        out_NHD, log_sum = packed_attention(q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, max_q, window)
        return out_NHD, () if log_sum is None else (log_sum,)
    with torch.no_grad():
        return varlen_attention(q_NHD, k_MKD, v_MKD, *rows, backend, window), ()


def varlen_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    out_NHD: Tensor,
    saved: Sequence[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    backend: str,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of causal attention of packed sequences (rows), outside autograd.

    Args:
        grad_NHD: gradient with respect to the output.
        q_NHD: queries of the forward pass.
        k_MKD: keys of the forward pass.
        v_MKD: values of the forward pass.
        out_NHD: output of `varlen_forward`.
        saved: second result of `varlen_forward`.
        cu_seqlens_q: (rows + 1,) int32, cumulative numbers of queries, from 0 to N.
        cu_seqlens_k: (rows + 1,) int32, cumulative numbers of keys, from 0 to M.
        max_q: largest number of queries in a row.
        max_k: largest number of keys in a row.
        backend: backend of the forward pass.
        window: window of the forward pass.

    Returns:
        The gradients with respect to queries, keys and values, in their shapes.
    """
    rows = cu_seqlens_q, cu_seqlens_k, max_q, max_k
    if backend == "varlen" or (backend == "fixed_order" and has_flash_backward(q_NHD)):
        log_sum, *states = saved
        states = states or _no_dropout(q_NHD.device)
        return torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(), q_NHD, k_MKD, v_MKD, out_NHD, log_sum, *rows, 0.0, True, *states, **_sides(window)
        )
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # type: ignore[import-not-found]

        log_sum, state = saved
        grads = torch.empty_like(q_NHD), torch.empty_like(k_MKD), torch.empty_like(v_MKD)
        how = {
            "dropout_p": 0.0,
            "softmax_scale": q_NHD.shape[-1] ** -0.5,
            "causal": True,
            "window_size_left": _left(window),
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "rng_state": state,
        }
        _flash_attn_varlen_backward(grad_NHD, q_NHD, k_MKD, v_MKD, out_NHD, log_sum, *grads, *rows, **how)
        return grads
    return _sdpa_backward(grad_NHD, q_NHD, k_MKD, v_MKD, cu_seqlens_q, cu_seqlens_k, window)


def has_flash_backward(q_NHD: Tensor) -> bool:
    """Return whether torch's flash kernel can compute the gradient of fixed-order attention for these queries.

    True for half-precision queries on a GPU with flash attention.
    """
    return q_NHD.is_cuda and q_NHD.dtype != torch.float32 and not is_before_ampere(q_NHD.device)


def _left(window: int | None) -> int:
    """Return a sliding window as flash-attn counts it: the number of keys before the query's own, -1 for all keys."""
    return -1 if window is None else window - 1


def _sides(window: int | None) -> dict[str, int]:
    """Return a sliding window as keyword arguments of torch's flash kernel, empty if `window` is None."""
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
    """Return the gradients of `sdpa_attention` with respect to queries, keys and values.

    The forward pass runs again, because torch has no callable backward pass of scaled_dot_product_attention.
    """
    with torch.enable_grad():
        q_NHD, k_MKD, v_MKD = (x.detach().requires_grad_() for x in (q_NHD, k_MKD, v_MKD))
        out_NHD = sdpa_attention(q_NHD, k_MKD, v_MKD, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), window)
        return torch.autograd.grad(out_NHD, (q_NHD, k_MKD, v_MKD), grad_NHD)  # type: ignore[return-value]


@functools.cache
def _no_dropout(device: torch.device) -> list[Tensor]:
    """Return two uint64 tensors, a zero random state, for torch's flash backward kernel.

    The kernel requires a random state even without dropout.
    """
    return [torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros(0, dtype=torch.uint64, device=device)]


class _FixedOrderAttention(torch.autograd.Function):
    """Autograd function: fixed-order attention forward, and the gradient of `sdpa_attention` backward.

    Fixed-order attention and `sdpa_attention` give the same values up to rounding.
    """

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
    """Autograd function: torch's flash kernel with a sliding window.

    `varlen_attn` in older torch releases does not accept a window.
    """

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
    """Return torch's `varlen_attn`, and its keyword arguments for causal attention with grouped heads.

    The keyword arguments differ between releases of torch.
    """
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        causal["enable_gqa"] = True
    return varlen_attn, causal
