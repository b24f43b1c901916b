"""Token embedding and LM head, sharded by rows over the tensor-parallel ranks, and the value head of critics.

Shape letters: N tokens, K positions whose logits or values are computed, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.matmul import FixedOrderMatmul, float32_matmul
from areno.layers.shard import Layout, TensorPart, WeightSpec


class VocabParallelEmbedding(nn.Module):
    """The embedding matrix (V, D), for token embedding or as the LM head. Each rank has a range of the vocabulary.

    The vocabulary is padded with zero rows to a multiple of the number of ranks, so that all ranks have equally many
    rows. This rank has the token ids from `first` to `first + n_valid - 1`. `stored` is the number of rows in the
    checkpoint, if it differs from the vocabulary size. `fixed_order`, if set, computes products for `engine.exact`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, spec: WeightSpec, stored: int | None = None):
        super().__init__()
        self.tp = tp = spec.tp
        rows = -(-vocab_size // tp.size)
        stored = vocab_size if stored is None else stored
        n_used = min(vocab_size, stored)
        self.first = min(tp.rank * rows, vocab_size)
        self.n_valid = max(0, min(rows, n_used - self.first))
        self.weight = spec.empty(rows, hidden_size)
        part = TensorPart((stored, hidden_size), dim=0, start=self.first, size=self.n_valid)
        self.layout: Layout = {"weight": (part,)}
        self.fixed_order: FixedOrderMatmul | None = None

    def clear_padding(self) -> None:
        """Set the padding rows to zero. Loading a checkpoint does not write them."""
        self.weight.detach()[self.n_valid :].zero_()

    def forward(self, tokens_N: Tensor, split: bool = False) -> Tensor:
        """Embed tokens. All ranks pass the same tokens; with `split`, each gets only its share of the result."""
        if self.tp.size == 1:
            return F.embedding(tokens_N, self.weight)
        local_N = tokens_N - self.first
        elsewhere_N = (local_N < 0) | (local_N >= self.n_valid)
        x_ND = F.embedding(local_N.masked_fill(elsewhere_N, 0), self.weight)
        x_ND = x_ND.masked_fill(elsewhere_N.unsqueeze(-1), 0)
        return self.tp.scatter_rows(x_ND) if split else self.tp.reduce_out(x_ND)

    def matmul(self, hidden_KD: Tensor) -> Tensor:
        """Return this rank's columns of the logits in float32. Columns of padding rows are zero.

        Outside of autograd on CUDA, logits are accumulated and returned in fp32. Logits rounded to bf16 would make the
        log-probabilities of rollout and training disagree.
        """
        if self.fixed_order is not None:
            return self.fixed_order(hidden_KD, self.weight, torch.float32)
        return float32_matmul(hidden_KD, self.weight).float()


class ValueHead(nn.Module):
    """The head of critics and reward models, computed in fp32. bf16 would round a value of 20 by up to 0.06.

    With one label, the value is hidden w^T. With two labels, as in the token classification models of transformers,
    scores have biases, and the value is the log-odds of label 1: its score minus that of label 0. All tensor-parallel
    ranks hold the whole weight and the same hidden states, so gradients need no collective.
    """

    def __init__(self, hidden_size: int, spec: WeightSpec, n_labels: int = 1):
        super().__init__()
        self.weight = spec.empty(n_labels, hidden_size)
        self.layout: Layout = {"weight": (TensorPart((n_labels, hidden_size)),)}
        self.bias = None
        if n_labels > 1:
            self.bias = spec.empty(n_labels)
            self.layout["bias"] = (TensorPart((n_labels,)),)

    def forward(self, hidden_KD: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        scores_KL = F.linear(hidden_KD.float(), self.weight.float(), bias)
        return scores_KL.squeeze(-1) if bias is None else scores_KL[:, 1] - scores_KL[:, 0]
