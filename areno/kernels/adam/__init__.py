"""AdamW (arXiv 1711.05101) on slices of flat parameter buffers, with moments in fp32 or 8 bits (arXiv 2110.02861).

All tensors of a slice are 1-dimensional. `grad` and `master` are float32. `param` has the dtype of the model and is
overwritten by the new `master`; it may be `master` itself. `moments` are the first and the second moment, float32 or
uint8 codes, with one float32 scale for each block of BLOCK codes. Master, moments and scales are updated in place.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.adam.reference import BLOCK, Pair, Update
from areno.kernels.backend import implementation

__all__ = ["BLOCK", "Update", "adam", "adam_8bit", "squares_and_nonzeros"]


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: Update) -> None:
    implementation(grad, __name__).adam(grad, master, param, moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: Update) -> None:
    implementation(grad, __name__).adam_8bit(grad, master, param, moments, scales, update)


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    """Return [sum of squares, number of nonzero elements], float64."""
    return implementation(grad, __name__).squares_and_nonzeros(grad)
