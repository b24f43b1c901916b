"""AdamW (arXiv 1711.05101) on slices of flat parameter buffers. Moments in fp32, bf16 or 8 bits (arXiv 2110.02861).

All tensors of a slice are 1-dimensional. `grad` and `master` are float32. `param` has the dtype of the model and is
overwritten by the new `master`; it may be `master` itself. `moments` are the first and the second moment, float32 or
uint8 codes, with one float32 scale for each block of BLOCK codes. Master, moments and scales are updated in place.

bfloat16 moments are rounded stochastically, so that small changes count on average. The random bits are a hash of `key`
(of the parameter), the step and the element's index in the parameter; `start` is the index of the first element.
"""

from __future__ import annotations

from areno.kernels.adam import reference
from areno.kernels.adam.reference import BLOCK, AdamUpdate
from areno.kernels.backend import dispatch_by_device

__all__ = ["BLOCK", "AdamUpdate", "adam", "adam_8bit", "adam_bf16", "squares_and_nonzeros"]

adam = dispatch_by_device(reference.adam)
adam_bf16 = dispatch_by_device(reference.adam_bf16)
adam_8bit = dispatch_by_device(reference.adam_8bit)
squares_and_nonzeros = dispatch_by_device(reference.squares_and_nonzeros)
"""Return [sum of squares, number of nonzero elements], float64."""
