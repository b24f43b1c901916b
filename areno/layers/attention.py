"""How attention layers reach their keys and values: a callable, so that one model serves training and decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from areno.kernels.attention import varlen_attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q_NHD, k_NKD, v_NKD) -> out_NHD: H query heads and K key heads of this rank, rope already applied."""


@dataclass(frozen=True, slots=True)
class PackedAttend:
    """Attention for training: rows packed end to end, each token seeing itself and the earlier ones of its row.

    cu_seqlens: (R + 1,) int32, where each row starts, and the number of tokens at the end. max_len: longest row.
    """

    cu_seqlens: Tensor
    max_len: int
    backend: str

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        cu, longest = self.cu_seqlens, self.max_len
        return varlen_attention(q_NHD, k_NKD, v_NKD, cu, cu, longest, longest, self.backend)


@dataclass(frozen=True, slots=True)
class FirstTokensAttend:
    """Attention of the first `n` tokens of a pass. What comes after them only fills up the products, and gets zeros."""

    attend: Attend
    n: int

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        out_NHD = self.attend(layer, q_NHD[: self.n], k_NKD[: self.n], v_NKD[: self.n])
        return F.pad(out_NHD, (0, 0, 0, 0, 0, len(q_NHD) - self.n))
