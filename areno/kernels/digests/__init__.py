"""Digests of matrices of 64-bit words: equal words give equal digests, and other words almost surely other ones.

`matrix_digests(words_NRC)` takes contiguous int64 [N, R, C] and returns int64 [N]. The sums of the rows and the columns
of a matrix are mixed with their place and added up. So neither words that change places nor changes of opposite sign
cancel out. The result has the same bits on every device.
"""

from __future__ import annotations

from areno.kernels.backend import dispatch_by_device
from areno.kernels.digests import reference

__all__ = ["matrix_digests"]

matrix_digests = dispatch_by_device(reference.matrix_digests)
