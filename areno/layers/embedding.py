"""The vocabulary matrix, divided by rows over the tensor-parallel ranks: tokens to vectors, and vectors to logits.

Shape letters: N tokens, K positions whose logits are wanted, V vocabulary, D hidden size.

One number for each token: the head of critics and reward models.

Shape letters: K positions, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.matmul import FixedOrderProduct, float_product
from areno.layers.shard import Layout, Part, WeightSpec


class VocabParallelEmbedding(nn.Module):
    """One row for each token. A vocabulary that the ranks do not divide is padded with rows that are zero and stay so.

    Rank r holds the tokens `first .. first + n_valid`; only the last ranks have padding below their valid rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, spec: WeightSpec):
        super().__init__()
        self.tp = tp = spec.tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // tp.size)
        self.first = min(tp.rank * rows, vocab_size)
        self.n_valid = min(rows, vocab_size - self.first)
        self.weight = spec.empty(rows, hidden_size)
        part = Part((vocab_size, hidden_size), dim=0, start=self.first, size=self.n_valid)
        self.layout: Layout = {"weight": (part,)}
        self.unsplit: FixedOrderProduct | None = None  # as of Linear

    def clear_padding(self) -> None:
        """Zero the rows below the vocabulary. Loading calls this, since no checkpoint tensor fills them."""
        self.weight.detach()[self.n_valid :].zero_()

    def forward(self, tokens_N: Tensor, split: bool = False) -> Tensor:
        """int64 token ids to (N, D), the same on every rank, or if split to this rank's share of the tokens."""
        if self.tp.size == 1:
            return F.embedding(tokens_N, self.weight)
        local_N = tokens_N - self.first
        elsewhere_N = (local_N < 0) | (local_N >= self.n_valid)
        x_ND = F.embedding(local_N.masked_fill(elsewhere_N, 0), self.weight)
        x_ND = x_ND.masked_fill(elsewhere_N.unsqueeze(-1), 0)
        return self.tp.sum_out(x_ND) if split else self.tp.reduce_out(x_ND)

    def product(self, hidden_KD: Tensor) -> Tensor:
        """This rank's columns of the logits, (K, V / ranks) float32, and zeros for rows of padding.

        The product is accumulated and kept in fp32 where the device can do so: logits rounded to bf16 would make
        log-probabilities of rollout and training disagree.
        """
        if self.unsplit is not None:
            return self.unsplit(hidden_KD, self.weight, torch.float32)
        return float_product(hidden_KD, self.weight).float()


class ValueHead(nn.Module):
    """hidden w^T without bias, computed in fp32 whatever the dtype: bf16 would round a value of 20 by up to 0.06.

    Tensor-parallel ranks hold equal copies. The hidden states are the same on each of them, so are the values, and the
    gradients need no collective, as those of the final norm before it.
    """

    def __init__(self, hidden_size: int, spec: WeightSpec):
        super().__init__()
        self.weight = spec.empty(1, hidden_size)
        self.layout: Layout = {"weight": (Part((1, hidden_size)),)}

    def forward(self, hidden_KD: Tensor) -> Tensor:
        """(K, D) to (K,) float32."""
        return F.linear(hidden_KD.float(), self.weight.float()).squeeze(-1)
