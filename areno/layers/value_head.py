"""One number for each token: the head of critics and reward models.

Shape letters: K positions, D hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from areno.layers.shard import Layout, Part, WeightSpec


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
