"""The callables through which attention layers reach the keys and values of all tokens.

A model is called with an `Attend`, so that the same model serves training and decoding. `PackedAttend` is for training
and for computing log-probabilities. In decoding, the callable is attention over the KV cache, wrapped in a
`CachedAttend` if the model has layers with a recurrent state, which `recur` counts by themselves.

Shape letters: N tokens of this rank, R packed sequences (rows), H query heads, K key heads, D head dimension; others as
in `areno.kernels.delta`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.attention import varlen_attention, varlen_backward, varlen_forward
from areno.kernels.copies import copy_rows, order_of_copies, sum_copies
from areno.kernels.delta import DeltaGradients, DeltaWeights, RowChunks, delta_rows, delta_rows_backward
from areno.kernels.padding import CuSeqlens
from areno.layers.parallel import ParallelGroup


class AttentionLayer(NamedTuple):
    """What attention has to know of a layer: `index` counts only the layers with attention."""

    index: int
    window: int | None = None  # the number of last tokens that a token attends to, itself included. None: all
    sinks_H: Tensor | None = None  # see `areno.kernels.sinks`


Attend = Callable[[AttentionLayer, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_NHD, k_NKD, v_NKD) -> out_NHD, for this rank's heads, after rotary embedding."""


@dataclass(frozen=True)
class SharedKeys:
    """The M keys of all rows if rows share prefixes: for each row, the keys of its shared prefix and then its own."""

    tokens_M: Tensor  # int64, the token of each key, row by row
    cu_seqlens: Tensor  # (R + 1,) int32, cumulative numbers of keys
    max_len: int  # in keys
    n_tokens: int  # N, own tokens of all rows, and tokens of an earlier pass

    def with_row(self, n_tokens: int) -> SharedKeys:
        """Return a copy with one more row, of `n_tokens` tokens, that shares nothing."""
        total = self.n_tokens + n_tokens
        tokens_M = torch.cat([self.tokens_M, torch.arange(self.n_tokens, total, device=self.tokens_M.device)])
        cu_seqlens = F.pad(self.cu_seqlens, (0, 1), value=len(tokens_M))
        return SharedKeys(tokens_M, cu_seqlens, max(self.max_len, n_tokens), total)

    def gather(self, x_NKD: Tensor) -> Tensor:
        """Copy the keys or values of the N tokens to all rows that use them, (M, K, D). Differentiable."""
        return copy_rows(x_NKD, self.tokens_M, lambda: self._order_of_copies)

    @cached_property
    def _order_of_copies(self) -> tuple[Tensor, Tensor]:
        return order_of_copies(self.tokens_M, self.n_tokens)

    def sum_gradients(self, grad_MKD: Tensor) -> Tensor:
        """Do the backward pass of `gather`: sum the gradients of all copies of a token, (N, K, D)."""
        return sum_copies(grad_MKD.contiguous().flatten(1), *self._order_of_copies).view(
            self.n_tokens, *grad_MKD.shape[1:]
        )


class PrefixKeys:
    """The keys and values of prefixes that the rows of several forward passes share, and their gradients.

    A first forward pass computes the prefixes and stores keys and values of each layer. Later passes read them, and
    their backward passes add the gradients. The backward pass of the prefixes comes last and takes the sums.
    """

    def __init__(self, n_tokens: int):
        self.n_tokens = n_tokens
        self._of_layer: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, *keys_values: Tensor) -> tuple[Tensor, ...]:
        """Store the keys and values of a layer without the padding at their end. Return views of the arguments."""
        k_NKD, v_NKD = (x.detach()[: self.n_tokens].contiguous() for x in keys_values)
        self._of_layer[layer] = k_NKD, v_NKD
        return tuple(x.view_as(x) for x in keys_values)

    def prepend_prefixes(self, layer: int, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of a layer: the stored ones of the prefixes, followed by the arguments."""
        before_k, before_v = self._of_layer[layer]
        return torch.cat((before_k, k_NKD)), torch.cat((before_v, v_NKD))

    def add_gradients(self, layer: int, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Add the prefixes' part of the gradients to sums in at least float32, and return the rest."""
        (of_k, of_v), (own_k, own_v) = zip(*((x[: self.n_tokens], x[self.n_tokens :]) for x in gradients), strict=True)
        if (sums := self._gradients.get(layer)) is None:
            dtype = torch.promote_types(of_k.dtype, torch.float32)
            self._gradients[layer] = of_k.to(dtype, copy=True), of_v.to(dtype, copy=True)
        else:
            sums[0].add_(of_k)
            sums[1].add_(of_v)
        return own_k, own_v

    def add_stored_gradients(self, layer: int, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients that later passes have summed to `grad_k` and `grad_v`, those of the prefixes' own pass."""
        joined = []
        for grad, later in zip((grad_k, grad_v), self._gradients.pop(layer), strict=True):
            total = later.add_(grad[: self.n_tokens]).to(grad.dtype)
            joined.append(torch.cat((total, grad[self.n_tokens :])))  # padding
        return joined[0], joined[1]


class _WithPrefix(torch.autograd.Function):
    """Applies one method of `PrefixKeys` to keys and values, and another one to their gradients."""

    @staticmethod
    def forward(ctx: Any, k_NKD: Tensor, v_NKD: Tensor, layer: int, forward: Any, backward: Any) -> Any:
        ctx.layer, ctx.inverse = layer, backward
        return forward(layer, k_NKD, v_NKD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.inverse(ctx.layer, *grads), None, None, None


@dataclass(frozen=True)
class PackedAttend:
    """Causal attention within packed sequences (rows), for training and for computing log-probabilities.

    In context parallelism, each rank has an equal share of the N tokens, as consecutive tokens. An all-to-all exchanges
    tokens for heads, so that each rank attends over all tokens with some of the heads (Jacobs et al. 2023, "DeepSpeed
    Ulysses", section 3).

    Attributes:
        cu_seqlens: (R + 1,) int32, the cumulative lengths of the rows.
        backend: a key of `areno.kernels.attention.BACKENDS`.
        keys: the keys of rows that share prefixes. None: a row attends only to its own tokens.
        stores: receives the keys and values of this pass, if later passes need them.
        prefix: keys and values from an earlier pass. They precede those of the N tokens, also in the indices of `keys`.
    """

    cu_seqlens: Tensor
    max_len: int
    backend: str
    context: ParallelGroup = ParallelGroup()  # noqa: RUF009  (frozen)
    keys: SharedKeys | None = None
    stores: PrefixKeys | None = None
    prefix: PrefixKeys | None = None

    def _with_prefixes(self, layer: int, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all rows, including shared prefixes, outside autograd."""
        if self.prefix is not None:
            k_NKD, v_NKD = self.prefix.prepend_prefixes(layer, k_NKD, v_NKD)
        return (k_NKD, v_NKD) if self.keys is None else (self.keys.gather(k_NKD), self.keys.gather(v_NKD))

    def _how(self, layer: AttentionLayer) -> tuple[CuSeqlens, str, int | None, Tensor | None]:
        """Return the last arguments of the kernels. The sinks are those of the heads that this rank computes."""
        keys, sinks_H = self.keys or self, layer.sinks_H
        if sinks_H is not None and self.context.size > 1:
            with torch.enable_grad():  # also outside autograd, it stays known whether sinks are trained
                sinks_H = self.context.own_rows(sinks_H)
        cu_seqlens = CuSeqlens(self.cu_seqlens, keys.cu_seqlens, self.max_len, keys.max_len)
        return cu_seqlens, self.backend, layer.window, sinks_H

    def __call__(self, layer: AttentionLayer, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        q_NHD, k_NKD, v_NKD = map(self.context.rows_to_columns, (q_NHD, k_NKD, v_NKD))
        k_MKD, v_MKD = k_NKD, v_NKD
        if self.stores is not None:
            how = layer.index, self.stores.store, self.stores.add_stored_gradients
            k_MKD, v_MKD = _WithPrefix.apply(k_MKD, v_MKD, *how)  # type: ignore[misc]
        if self.prefix is not None:
            how = layer.index, self.prefix.prepend_prefixes, self.prefix.add_gradients
            k_MKD, v_MKD = _WithPrefix.apply(k_MKD, v_MKD, *how)  # type: ignore[misc]
        if self.keys is not None:
            k_MKD, v_MKD = self.keys.gather(k_MKD), self.keys.gather(v_MKD)
        return self.context.columns_to_rows(varlen_attention(q_NHD, k_MKD, v_MKD, *self._how(layer)))

    @cached_property
    def chunks(self) -> RowChunks:
        """The chunks of the rows, for recurrent layers. The first access copies cu_seqlens to the host."""
        return RowChunks.from_starts(self.cu_seqlens.tolist(), self.cu_seqlens.device)

    def recur(self, layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
        """Compute the gated delta rule of rows whose states begin at zero. Differentiable."""
        assert self.context.size == 1, "context parallelism does not support layers with a recurrent state"
        assert self.keys is None, "layers with a recurrent state cannot share prefixes"
        return delta_rows(proj_NP, weights, self.chunks)[0]

    def recur_backward(
        self, grad_NI: Tensor, proj_NP: Tensor, weights: DeltaWeights, of_weights: bool
    ) -> tuple[Tensor, DeltaGradients | None]:
        """Return the gradients of `proj_NP` and, if `of_weights`, of the weights. Outside autograd."""
        return delta_rows_backward(grad_NI, proj_NP, weights, self.chunks, of_weights)

    def forward(
        self, layer: AttentionLayer, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute attention outside autograd. Return the output and the tensors to pass to `backward` as `saved`."""
        q_NHD, k_NKD, v_NKD = map(self.context.rows_to_columns, (q_NHD, k_NKD, v_NKD))
        if self.stores is not None:
            self.stores.store(layer.index, k_NKD, v_NKD)
        k_MKD, v_MKD = self._with_prefixes(layer.index, k_NKD, v_NKD)
        out_NHD, saved = varlen_forward(q_NHD, k_MKD, v_MKD, *self._how(layer))
        return self.context.columns_to_rows(out_NHD), saved

    def backward(
        self,
        layer: AttentionLayer,
        grad_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        saved: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values, and add that of the sinks to their `.grad`."""
        inputs = grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD
        grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD = map(self.context.rows_to_columns, inputs)
        k_MKD, v_MKD = self._with_prefixes(layer.index, k_NKD, v_NKD)
        given = grad_NHD, q_NHD, k_MKD, v_MKD, out_NHD, saved
        grad_q, grad_k, grad_v, *grad_sinks = varlen_backward(*given, *self._how(layer))
        if grad_sinks:
            assert layer.sinks_H is not None
            assert layer.sinks_H.grad is not None
            self.context.own_rows(layer.sinks_H.grad).add_(grad_sinks[0])
        if self.keys is not None:
            grad_k, grad_v = self.keys.sum_gradients(grad_k), self.keys.sum_gradients(grad_v)
        if self.prefix is not None:
            grad_k, grad_v = self.prefix.add_gradients(layer.index, grad_k, grad_v)
        if self.stores is not None:
            grad_k, grad_v = self.stores.add_stored_gradients(layer.index, grad_k, grad_v)
        grad_q, grad_k, grad_v = map(self.context.columns_to_rows, (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """Attention over a KV cache together with cached recurrent states, for models that have both kinds of layers."""

    attend: Attend
    recur: Callable[[int, Tensor, DeltaWeights], Tensor]  # reads and updates the cached states of a layer

    def __call__(self, layer: AttentionLayer, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        return self.attend(layer, q_NHD, k_NKD, v_NKD)


@dataclass(frozen=True, slots=True)
class FirstTokensAttend:
    """Attention over the first n tokens only. The rest is padding, and its output is zero.

    With `engine.exact`, tokens are padded, because matrix products then need a multiple of some number of rows.
    """

    attend: Attend
    n: int

    def __call__(self, layer: AttentionLayer, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        out_NHD = self.attend(layer, q_NHD[: self.n], k_NKD[: self.n], v_NKD[: self.n])
        return F.pad(out_NHD, (0, 0, 0, 0, 0, len(q_NHD) - self.n))
