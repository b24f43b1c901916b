"""One AdamW update (arXiv 1711.05101) of a slice of the flat buffers.

The moments are kept in fp32 or in 8 bits (arXiv 2110.02861).
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.adam.reference import BLOCK, Pair, Update
from areno.kernels.backend import form

__all__ = ["BLOCK", "Update", "adam", "adam_8bit", "squares_and_nonzeros"]


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: Update) -> None:
    """Update master and the two moments (all (n,) float32) in place and write param, which may be master itself."""
    form(grad, __name__).adam(grad, master, param, moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: Update) -> None:
    """As `adam`, with moments as uint8 codes and the scales of their blocks: (ceil(n / BLOCK),) float32 each."""
    form(grad, __name__).adam_8bit(grad, master, param, moments, scales, update)


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    """(2,) float64: the sum of squares of grad (n,), and how many of its entries are not 0."""
    return form(grad, __name__).squares_and_nonzeros(grad)
