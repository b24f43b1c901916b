"""AdamW (arXiv 1711.05101) on slices of flat parameter buffers, with moments in fp32 or 8 bits (arXiv 2110.02861).

`adam` and `adam_8bit` do one optimizer step on a slice. `squares_and_nonzeros` returns the sum of squares of a
slice's gradient, for gradient clipping by the norm, and the number of nonzero elements of this gradient.
"""

from __future__ import annotations

from torch import Tensor

from areno.kernels.adam.reference import BLOCK, Pair, Update
from areno.kernels.backend import form

__all__ = ["BLOCK", "Update", "adam", "adam_8bit", "squares_and_nonzeros"]


def adam(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, update: Update) -> None:
    """Do one AdamW step on a slice of a flat parameter buffer.

    Args:
        grad: float32 gradient, (n,).
        master: float32 parameters, (n,), updated in place.
        param: parameters in the dtype of the model, (n,), overwritten by the new `master`. May be `master` itself.
        moments: first and second moment, float32, (n,) each, updated in place.
        update: learning rate, betas and other constants of this step.
    """
    form(grad, __name__).adam(grad, master, param, moments, update)


def adam_8bit(grad: Tensor, master: Tensor, param: Tensor, moments: Pair, scales: Pair, update: Update) -> None:
    """Do one AdamW step on a slice of a flat parameter buffer, with moments in 8 bits.

    Args:
        grad: float32 gradient, (n,).
        master: float32 parameters, (n,), updated in place.
        param: parameters in the dtype of the model, (n,), overwritten by the new `master`. May be `master` itself.
        moments: first and second moment, uint8 codes, (n,) each, updated in place.
        scales: scale of each block of BLOCK codes, for each moment, float32, (ceil(n / BLOCK),) each, updated in place.
        update: learning rate, betas and other constants of this step.
    """
    form(grad, __name__).adam_8bit(grad, master, param, moments, scales, update)


def squares_and_nonzeros(grad: Tensor) -> Tensor:
    """Return the sum of squares and the number of nonzero elements of a gradient.

    Args:
        grad: gradient, (n,) float32.

    Returns:
        (2,) float64: [sum of squares, number of nonzero elements].
    """
    return form(grad, __name__).squares_and_nonzeros(grad)
