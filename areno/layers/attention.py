"""How attention layers reach their keys and values: by a callable, so that one model serves training and decoding.

`PackedAttend` is for training and scoring. The decoder passes its own callable, in a `CachedAttend` if the model has
layers with a recurrent state.

Shape letters: N tokens, R rows, H query heads, K key heads, D head dimension; others as in `areno.kernels.delta`.
"""

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
"""(layer index, q_NHD, k_NKD, v_NKD, window) -> out_NHD, for this rank's heads, after rotary embedding.

window: the number of last tokens that a token attends to, itself included. None: all.
"""


@dataclass(frozen=True)
class PackedAttend:
    """Causal attention within packed rows, for training and scoring.

    Attributes:
        cu_seqlens: (R + 1,) int32, where each row begins, and N.
        max_len: the length of the longest row.
        backend: the attention backend, a key of `areno.kernels.attention.BACKENDS`.
        context: the ranks of context parallelism. Each has N / size tokens, in order. They exchange tokens for heads,
            and each attends over all tokens with some of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses",
            section 3).
    """

    cu_seqlens: Tensor
    max_len: int
    backend: str
    context: ParallelGroup = ParallelGroup()  # noqa: RUF009  (frozen)

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        """Attend over packed rows. Arguments and result as of `Attend`."""
        borders = self.cu_seqlens, self.cu_seqlens, self.max_len, self.max_len
        q_NHD, k_NKD, v_NKD = map(self.context.rows_to_columns, (q_NHD, k_NKD, v_NKD))
        return self.context.columns_to_rows(varlen_attention(q_NHD, k_NKD, v_NKD, *borders, self.backend, window))

    @cached_property
    def chunks(self) -> RowChunks:
        """The chunks of the rows, for layers with a recurrent state. The host waits for cu_seqlens once."""
        return RowChunks.of(self.cu_seqlens.tolist(), self.cu_seqlens.device)

    def recur(self, layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
        """Compute the gated delta rule of rows that begin with zero states, differentiable.

        Args:
            layer: the index among the layers with a state; unused.
            proj_NP: the projections of all tokens.
            weights: the weights of the layer.

        Returns:
            (N, I).
        """
        assert self.context.size == 1, "context parallelism does not support layers with a recurrent state"
        return delta_rows(proj_NP, weights, self.chunks)[0]

    def recur_backward(
        self, grad_NI: Tensor, proj_NP: Tensor, weights: DeltaWeights, of_weights: bool
    ) -> tuple[Tensor, DeltaGradients | None]:
        """Compute the gradients of `recur`, outside autograd.

        Args:
            grad_NI: the gradient of its result.
            proj_NP: its projections.
            weights: its weights.
            of_weights: also compute the gradients of the weights.

        Returns:
            The gradient of the projections, and of the weights or None.
        """
        return delta_rows_backward(grad_NI, proj_NP, weights, self.chunks, of_weights)

    def forward(
        self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute attention outside autograd, for a later `backward`.

        Args:
            q_NHD: queries of this rank's tokens.
            k_NKD: their keys.
            v_NKD: their values.
            window: the number of last tokens that a token attends to. None: all.

        Returns:
            The output (N, H, D), and further tensors that `backward` needs.
        """
        q_NHD, k_NKD, v_NKD = map(self.context.rows_to_columns, (q_NHD, k_NKD, v_NKD))
        out_NHD, saved = varlen_forward(q_NHD, k_NKD, v_NKD, self.cu_seqlens, self.max_len, self.backend, window)
        return self.context.columns_to_rows(out_NHD), saved

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
        """Compute the gradients of attention, outside autograd.

        Args:
            grad_NHD: the gradient of the output.
            q_NHD: the queries of `forward`.
            k_NKD: its keys.
            v_NKD: its values.
            out_NHD: its output.
            saved: the further tensors that it returned.
            window: its window.

        Returns:
            The gradients of q, k and v.
        """
        rows = self.cu_seqlens, self.max_len, self.backend
        inputs = grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD
        grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD = map(self.context.rows_to_columns, inputs)
        grads = varlen_backward(grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD, saved, *rows, window)
        grad_q, grad_k, grad_v = map(self.context.columns_to_rows, grads)
        return grad_q, grad_k, grad_v


@dataclass(frozen=True, slots=True)
class CachedAttend:
    """Attention over a KV cache, and the recurrent states of a cache, for models that have both.

    Attributes:
        attend: attention over the KV cache.
        states: (layer, proj_NP, weights) -> (N, I), the gated delta rule with the states of the cache.
    """

    attend: Attend
    states: Callable[[int, Tensor, DeltaWeights], Tensor]

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        """Attend over the KV cache. Arguments and result as of `Attend`."""
        return self.attend(layer, q_NHD, k_NKD, v_NKD, window)

    def recur(self, layer: int, proj_NP: Tensor, weights: DeltaWeights) -> Tensor:
        """Compute the gated delta rule with the states of the cache; arguments as of `Recurs.recur`."""
        return self.states(layer, proj_NP, weights)


@dataclass(frozen=True, slots=True)
class FirstTokensAttend:
    """Attention of the first n tokens of a pass. Tokens after them are padding of matrix products and get zeros.

    Attributes:
        attend: attention of the first n tokens.
        n: their number.
    """

    attend: Attend
    n: int

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None = None) -> Tensor:
        """Attend with the first n tokens. Arguments and result as of `Attend`."""
        out_NHD = self.attend(layer, q_NHD[: self.n], k_NKD[: self.n], v_NKD[: self.n], window)
        return F.pad(out_NHD, (0, 0, 0, 0, 0, len(q_NHD) - self.n))
