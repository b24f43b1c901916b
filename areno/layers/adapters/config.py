"""Which adapters a model has, without its weights. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROW_MULTIPLE = 16  # of a weight with a copy of A below it, and so of the columns of the product that gives both


@dataclass(frozen=True)
class AdapterSpec:
    """Low-rank adapters (LoRA, arXiv 2106.09685): W x becomes W x + scaling * B A x, with A (rank, I) and B (O, rank).

    targets: the last part of the checkpoint's names of the adapted modules, such as "q_proj". use_rslora: scaling is
    alpha / sqrt(rank) (arXiv 2312.03732) and not alpha / rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)
