"""Context parallel: the ranks of a group share the tokens of each micro-batch, and so of rows too long for one device.

A rank computes the layers for its tokens. Only attention looks at other tokens; see `PackedAttend`. What is found for
single tokens is added up, so each rank has it for all of them, and losses do not know of the sharing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.engine.train.packing import PackedTokens
from areno.layers.attention import PackedAttend
from areno.layers.parallel import ParallelGroup


@dataclass(frozen=True, slots=True)
class TokenShare:
    """This rank's n of the N tokens of a micro-batch, from the one at `first` on."""

    tokens_n: Tensor
    positions_n: Tensor
    attend: PackedAttend
    first: int
    n_tokens: int  # N

    @classmethod
    def of(cls, packed: PackedTokens, context: ParallelGroup, attn_backend: str, multiple: int = 1) -> TokenShare:
        """Equal shares, whose size is a multiple of a number; a row of padding fills them up."""
        tokens_N, positions_N, cu_seqlens, n_tokens = (
            packed.tokens_N, packed.positions_N, packed.cu_seqlens, len(packed.tokens_N)
        )  # fmt: skip
        if more := -n_tokens % (context.size * multiple):
            tokens_N, positions_N = F.pad(tokens_N, (0, more)), F.pad(positions_N, (0, more))
            cu_seqlens = F.pad(cu_seqlens, (0, 1), value=n_tokens + more)
        n = len(tokens_N) // context.size
        mine = slice(context.rank * n, (context.rank + 1) * n)
        attend = PackedAttend(cu_seqlens, max(packed.max_len, more), attn_backend, context)
        return cls(tokens_N[mine], positions_N[mine], attend, mine.start, n_tokens)

    def predicted_here(self, places_T: Tensor) -> Tensor:
        """Those of some places whose token is predicted in this share, from the place before."""
        if self.attend.context.size == 1:
            return places_T
        return places_T[(places_T > self.first) & (places_T <= self.first + len(self.tokens_n))]

    def before(self, hidden_nD: Tensor, places_T: Tensor) -> Tensor:
        """(T, D): the hidden states that predict the tokens at places `predicted_here`."""
        return hidden_nD.index_select(0, places_T - (self.first + 1))

    def aligned(self, places_T: Tensor, numbers_T: Tensor) -> Tensor:
        """(N,) float32: the numbers that this rank and the others have at their places; 0 elsewhere."""
        numbers_N = torch.zeros(self.n_tokens, dtype=torch.float32, device=places_T.device)
        return self.attend.context.reduce_out(numbers_N.index_copy(0, places_T, numbers_T))
