"""AdamW (arXiv 1711.05101) on slices of the flat buffers, with moments in fp32 or in 8 bits (arXiv 2110.02861).

`adam` and `adam_8bit` do one step of a slice. `squares_and_nonzeros` gives the norm of its gradient.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.adam.reference import BLOCK, Pair, Update
from areno.kernels.backend import form

__all__ = ["BLOCK", "Update", "adam", "adam_8bit", "squares_and_nonzeros"]


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: Update) -> None:
    """Do one AdamW step of a slice.

    Args:
        grad: (n,) float32 gradient.
        master: (n,) float32 parameters, updated in place.
        param: (n,) parameters in the dtype of the model, overwritten by the new `master`. May be `master` itself.
        moments: the first and second moment, (n,) float32, updated in place.
        update: the numbers of this step.
    """
    form(grad, __name__).adam(grad, master, param, moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: Update) -> None:
    """Do one AdamW step of a slice whose moments are kept in 8 bits.

    Args:
        grad: (n,) float32 gradient.
        master: (n,) float32 parameters, updated in place.
        param: (n,) parameters in the dtype of the model, overwritten by the new `master`. May be `master` itself.
        moments: the first and second moment, (n,) uint8 codes, updated in place.
        scales: the scales of the blocks of either moment, (ceil(n / BLOCK),) float32, updated in place.
        update: the numbers of this step.
    """
    form(grad, __name__).adam_8bit(grad, master, param, moments, scales, update)


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    """Sum the squares of a gradient, and count its entries that are not 0.

    Args:
        grad: (n,) float32.

    Returns:
        (2,) float64: the sum of squares, and the count.
    """
    return form(grad, __name__).squares_and_nonzeros(grad)
