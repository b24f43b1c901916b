"""How attention layers reach their keys and values: a callable, so that one model serves training and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.nn import functional as F

from areno.kernels.attention import varlen_attention, varlen_backward, varlen_forward
from areno.kernels.delta import DeltaGradients, DeltaWeights, RowChunks, delta_rows, delta_rows_backward
from areno.layers.parallel import ParallelGroup

Attend = Callable[[int, Tensor, Tensor, Tensor, "int | None"], Tensor]
"""(layer index, q_NHD, k_NKD, v_NKD, window) -> out_NHD: H query and K key heads of this rank, rope already applied.

window: how many tokens each token sees, itself and the last ones before it; None is all.
"""


@dataclass(frozen=True)
class PackedAttend:
    """Attention for training: rows packed end to end, each token seeing itself and the earlier ones of its row.

    cu_seqlens: (R + 1,) int32, where each row starts, and the number of tokens at the end. max_len: longest row.
    context: ranks that hold a share of the tokens each, N / size of them in order. They trade tokens for heads, and
    each attends with some heads over all tokens (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3).
    """

    cu_seqlens: Tensor
    max_len: int
    backend: str
    context: ParallelGroup = ParallelGroup()  # noqa: RUF009  (frozen)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        borders = self.cu_seqlens, self.cu_seqlens, self.max_len, self.max_len
        q_NHD, k_NKD, v_NKD = map(self.context.to_columns, (q_NHD, k_NKD, v_NKD))
        return self.context.to_rows(varlen_attention(q_NHD, k_NKD, v_NKD, *borders, self.backend, window))

    @cached_property
    def chunks(self) -> RowChunks:
        """Of the rows, for layers with a recurrent state. The host waits for the borders once."""
        return RowChunks.of(self.cu_seqlens.tolist(), self.cu_seqlens.device)

    def recur(self, layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
        """What a layer with a recurrent state makes of rows that begin with none; see `layers/delta.py`."""
        assert self.context.size == 1, "ranks of a context have no states of each other's tokens"
        return delta_rows(proj_NP, weights, self.chunks)[0]

    def recur_backward(
        self, grad_NI: Tensor, proj_NP: Tensor, weights: DeltaWeights, of_weights: bool
    ) -> tuple[Tensor, DeltaGradients | None]:
        """Gradients of what `recur` was given, and with `of_weights` of the rule's weights; outside autograd."""
        return delta_rows_backward(grad_NI, proj_NP, weights, self.chunks, of_weights)

    def forward(
        self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same outside autograd, and what `backward` will want to know of it."""
        q_NHD, k_NKD, v_NKD = map(self.context.to_columns, (q_NHD, k_NKD, v_NKD))
        out_NHD, saved = varlen_forward(q_NHD, k_NKD, v_NKD, self.cu_seqlens, self.max_len, self.backend, window)
        return self.context.to_rows(out_NHD), saved

    def backward(
        self,
        grad_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        saved: Sequence[Tensor],
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v from that of the output; out_NHD and saved are what `forward` returned."""
        rows = self.cu_seqlens, self.max_len, self.backend
        given = grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD
        grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD = map(self.context.to_columns, given)
        grads = varlen_backward(grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD, saved, *rows, window)
        grad_q, grad_k, grad_v = map(self.context.to_rows, grads)
        return grad_q, grad_k, grad_v


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """Attention with what a cache holds, and beside it what layers do whose state is in a cache."""

    attend: Attend
    states: Callable[[int, Tensor, DeltaWeights], Tensor]

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        return self.attend(layer, q_NHD, k_NKD, v_NKD, window)

    def recur(self, layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
        """See `areno/layers/delta.py`."""
        return self.states(layer, proj_NP, weights)


@dataclass(frozen=True, slots=True)
class FirstTokensAttend:
    """Attention of the first `n` tokens of a pass. What comes after them only fills up the products, and gets zeros."""

    attend: Attend
    n: int

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        out_NHD = self.attend(layer, q_NHD[: self.n], k_NKD[: self.n], v_NKD[: self.n], window)
        return F.pad(out_NHD, (0, 0, 0, 0, 0, len(q_NHD) - self.n))
