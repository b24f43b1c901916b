"""Causal attention over packed sequences (rows) of any length, by the fastest installed kernel.

`varlen_attention` runs under autograd. `varlen_forward` and `varlen_backward` run outside it, for layers that implement
their own backward pass. The backend "sdpa" is torch's scaled_dot_product_attention on padded batches, for CPUs, float32
and GPUs without flash attention.

Rows are packed as in flash-attn: `cu_seqlens_*` are int32 cumulative lengths, one more than there are rows. If a row
has more keys than queries, its queries are its last tokens; no row may have fewer. With a sliding window, a query
attends to its own and the `window` - 1 previous positions. `sinks_H` are those of `areno.kernels.sinks`, if there are
any.

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
from areno.kernels.padding import CuSeqlens, attend_padded
from areno.kernels.sinks import add_sinks, sdpa_with_sinks, sinks_gradient


def sdpa_attention(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    borders: CuSeqlens,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    return attend_padded(q_NHD, k_MKD, v_MKD, borders, partial(_sdpa, window=window, sinks_H=sinks_H))


def _sdpa(
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLD: Tensor,
    firsts_B: Tensor | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    n_q, n_k = q_BHLD.shape[2], k_BKLD.shape[2]
    mask = None
    if window is not None and window >= n_k:
        window = None
    if window is not None or firsts_B is not None or sinks_H is not None:
        device = q_BHLD.device
        firsts_B = torch.zeros(1, dtype=torch.int64, device=device) if firsts_B is None else firsts_B
        # Padding after the last query of a row attends to the last keys, since a query without keys would give NaN.
        positions_BL1 = (firsts_B.view(-1, 1, 1) + torch.arange(n_q, device=device).view(-1, 1)).clamp(max=n_k - 1)
        mask = (keys_L := torch.arange(n_k, device=device)) <= positions_BL1
        if window is not None:
            mask &= keys_L > positions_BL1 - window
        mask = mask.unsqueeze(1)
    enable_gqa = q_BHLD.shape[1] != k_BKLD.shape[1]
    if enable_gqa and q_BHLD.is_cuda:
        # torch's memory-efficient kernel does not support grouped heads, so torch would materialise all scores.
        n_shared = q_BHLD.shape[1] // k_BKLD.shape[1]
        k_BKLD, v_BKLD = (x.repeat_interleave(n_shared, dim=1) for x in (k_BKLD, v_BKLD))
        enable_gqa = False
    if sinks_H is not None and mask is not None:
        return sdpa_with_sinks(q_BHLD, k_BKLD, v_BKLD, mask, sinks_H.unsqueeze(1), enable_gqa=enable_gqa)
    return F.scaled_dot_product_attention(
        q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None and n_q == n_k, enable_gqa=enable_gqa
    )


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
    """Return the key of a backend in BACKENDS. "auto" and "native" mean the kernels of torch.

    With `exact`, the key is "fixed_order". Otherwise, a GPU without flash attention gets "sdpa", whatever is requested.
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
    borders: CuSeqlens,
    backend: str,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute attention with gradients. `backend` is a key of BACKENDS."""
    if backend == "sdpa":
        return sdpa_attention(q_NHD, k_MKD, v_MKD, borders, window, sinks_H)
    if backend == "flash" and sinks_H is None:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        how = {
            "window_size": (_left_window_size(window), -1),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        return flash_attn_varlen_func(q_NHD, k_MKD, v_MKD, *borders, causal=True, **how)
    if backend == "varlen" and window is None and sinks_H is None:
        attn, causal = _varlen_kernel()
        return attn(q_NHD, k_MKD, v_MKD, *borders, **causal)
    return _Attention.apply(q_NHD, k_MKD, v_MKD, sinks_H, borders, backend, window)  # type: ignore[return-value]


def varlen_forward(
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    borders: CuSeqlens,
    backend: str,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output (N, H, D), and the tensors that `varlen_backward` takes as `saved`."""
    if backend in ("varlen", "flash") and sinks_H is not None:
        out_NHD, (log_sum, *states) = varlen_forward(q_NHD, k_MKD, v_MKD, borders, backend, window)
        out_NHD, log_sum = add_sinks(out_NHD, log_sum, sinks_H)
        return out_NHD, (log_sum, *states)
    if backend == "varlen":
        out_NHD, *saved = torch.ops.aten._flash_attention_forward(
            q_NHD, k_MKD, v_MKD, *borders, 0.0, True, False, **_window_args(window)
        )
        # The log-sum-exp, and two tensors of dropout's random state, which backward requires even without dropout.
        return out_NHD, tuple(saved[:3])
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # type: ignore[import-not-found]

        how = {
            "dropout_p": 0.0,
            "softmax_scale": q_NHD.shape[-1] ** -0.5,
            "window_size_left": _left_window_size(window),
        }
        out_NHD, log_sum, _, state = _flash_attn_varlen_forward(q_NHD, k_MKD, v_MKD, *borders, causal=True, **how)
        return out_NHD, (log_sum, state)
    if backend == "fixed_order":
        out_NHD, log_sum = packed_attention(q_NHD, k_MKD, v_MKD, borders, window, sinks_H)
        return out_NHD, () if log_sum is None else (log_sum,)
    with torch.no_grad():
        return varlen_attention(q_NHD, k_MKD, v_MKD, borders, backend, window, sinks_H), ()


def varlen_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    out_NHD: Tensor,
    saved: Sequence[Tensor],
    borders: CuSeqlens,
    backend: str,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values and, if there are sinks that require a gradient, of these."""
    of_sinks = ()
    has_log_sum = backend in ("varlen", "flash") or (backend == "fixed_order" and has_flash_backward(q_NHD))
    if has_log_sum and sinks_H is not None and sinks_H.requires_grad:
        of_sinks = (sinks_gradient(grad_NHD, out_NHD, saved[0], sinks_H),)
    if has_log_sum and backend != "flash":
        log_sum, *states = saved
        states = states or _dropout_rng_state(q_NHD.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_NHD.contiguous(),
            q_NHD,
            k_MKD,
            v_MKD,
            out_NHD,
            log_sum,
            *borders,
            0.0,
            True,
            *states,
            **_window_args(window),
        )
        return *grads, *of_sinks
    if backend == "flash":
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward  # type: ignore[import-not-found]

        log_sum, state = saved
        grads = torch.empty_like(q_NHD), torch.empty_like(k_MKD), torch.empty_like(v_MKD)
        how = {
            "dropout_p": 0.0,
            "softmax_scale": q_NHD.shape[-1] ** -0.5,
            "causal": True,
            "window_size_left": _left_window_size(window),
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "rng_state": state,
        }
        _flash_attn_varlen_backward(grad_NHD, q_NHD, k_MKD, v_MKD, out_NHD, log_sum, *grads, *borders, **how)
        return *grads, *of_sinks
    return _sdpa_backward(grad_NHD, q_NHD, k_MKD, v_MKD, borders, window, sinks_H)


def has_flash_backward(q_NHD: Tensor) -> bool:
    """Return whether torch's flash kernel can compute the gradient of fixed-order attention for these queries."""
    return q_NHD.is_cuda and q_NHD.dtype != torch.float32 and not is_before_ampere(q_NHD.device)


def _left_window_size(window: int | None) -> int:
    """Return a sliding window as flash-attn counts it: the number of keys before the query's own, -1 for all keys."""
    return -1 if window is None else window - 1


def _window_args(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _sdpa_backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_MKD: Tensor,
    v_MKD: Tensor,
    borders: CuSeqlens,
    window: int | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute the gradients by a second forward pass under autograd, as torch has no function for the backward pass."""
    with torch.enable_grad():
        q_NHD, k_MKD, v_MKD = (x.detach().requires_grad_() for x in (q_NHD, k_MKD, v_MKD))
        out_NHD = sdpa_attention(q_NHD, k_MKD, v_MKD, borders, window, sinks_H)
        of_sinks = (sinks_H,) if sinks_H is not None and sinks_H.requires_grad else ()
        return torch.autograd.grad(out_NHD, (q_NHD, k_MKD, v_MKD, *of_sinks), grad_NHD)


@functools.cache
def _dropout_rng_state(device: torch.device) -> list[Tensor]:
    """Return the random state that torch's flash backward kernel requires even without dropout."""
    return [torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros(0, dtype=torch.uint64, device=device)]


class _Attention(torch.autograd.Function):
    """Attention under autograd: in a fixed order, by torch's kernels with sliding windows, or with sinks.

    The gradient of fixed-order attention is that of `sdpa_attention`, which has the same values up to rounding.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_MKD: Tensor,
        v_MKD: Tensor,
        sinks_H: Tensor | None,
        borders: CuSeqlens,
        backend: str,
        window: int | None,
    ) -> Tensor:
        out_NHD, saved = varlen_forward(q_NHD, k_MKD, v_MKD, borders, backend, window, sinks_H)
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, sinks_H, *(() if backend == "fixed_order" else (out_NHD, *saved)))
        ctx.borders, ctx.backend, ctx.window = borders, backend, window
        return out_NHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_MKD, v_MKD, sinks_H, *found = ctx.saved_tensors
        given = grads[0], q_NHD, k_MKD, v_MKD
        if found:
            rest = ctx.borders, ctx.backend, ctx.window, sinks_H
            *of_qkv, of_sinks = (*varlen_backward(*given, found[0], found[1:], *rest), None)[:4]
        else:
            *of_qkv, of_sinks = (*_sdpa_backward(*given, ctx.borders, ctx.window, sinks_H), None)[:4]
        return *of_qkv, of_sinks, None, None, None


@functools.cache
def _varlen_kernel() -> tuple[Any, dict[str, Any]]:
    """Return torch's `varlen_attn`, and the keyword arguments that make it causal, which differ between releases."""
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        causal["enable_gqa"] = True
    return varlen_attn, causal
