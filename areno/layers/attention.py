"""How attention layers reach their keys and values: a callable, so that one model serves training and decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from areno.kernels.attention import varlen_attention, varlen_backward, varlen_forward

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q_NHD, k_NKD, v_NKD) -> out_NHD: H query heads and K key heads of this rank, rope already applied."""


class PackedAttend:
    """Attention for training: rows packed end to end, each token seeing itself and the earlier ones of its row.

    cu_seqlens: (R + 1,) int32, where each row starts, and the number of tokens at the end. max_len: longest row.
    """

    def __init__(self, cu_seqlens: Tensor, max_len: int, backend: str):
        self.cu_seqlens = cu_seqlens
        self.max_len = max_len
        self.backend = backend

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cu, longest = self.cu_seqlens, self.max_len
        return varlen_attention(q_NHD, k_NKD, v_NKD, cu, cu, longest, longest, self.backend)

    def forward(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same outside autograd, and what `backward` wants to know of it."""
        return varlen_forward(q_NHD, k_NKD, v_NKD, self.cu_seqlens, self.max_len, self.backend)

    def backward(
        self, grad_NHD: Tensor, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_NHD: Tensor, saved: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""
        cu, longest = self.cu_seqlens, self.max_len
        return varlen_backward(grad_NHD, q_NHD, k_NKD, v_NKD, out_NHD, saved, cu, longest, self.backend)
