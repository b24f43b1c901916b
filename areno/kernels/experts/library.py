"""torch's own grouped product, where it is there and is right. It is faster than ours for large groups."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.backend import capability

logger = logging.getLogger("areno")

_ALIGNMENT = 16  # bytes, of what it reads: rows, and the distance between the columns of a transposed matrix
_MAJOR = (
    9  # of the devices for which torch has a kernel; on others it multiplies group by group, and waits for the sizes
)
_TRIED = ((5, 0, 40, 19), 64, 128)  # rows of four groups, inputs, outputs


def library_product(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor | None:
    """Each row times its expert's matrix, (M, O). None where the library cannot be used.

    Only for bfloat16 on CUDA. It does not wait for the device.
    """
    if not x_MI.is_cuda or x_MI.dtype != torch.bfloat16 or not _is_aligned(x_MI, weight_EIO):
        return None
    return _product(x_MI, weight_EIO, ends_E) if _is_right(x_MI.device.index or 0) else None


def _product(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    public = getattr(F, "grouped_mm", None)
    return (public or torch._grouped_mm)(x_MI, weight_EIO, offs=ends_E)


def _is_aligned(x_MI: Tensor, weight_EIO: Tensor) -> bool:
    strides = [x_MI.stride(0), *(stride for stride in weight_EIO.stride() if stride != 1)]
    starts = x_MI.data_ptr(), weight_EIO.data_ptr()
    return not any(stride * x_MI.element_size() % _ALIGNMENT for stride in strides) and not any(
        start % _ALIGNMENT for start in starts
    )


@functools.cache
def _is_right(device: int) -> bool:
    """Tried once on each device, with groups of uneven sizes, an empty one, and rows that belong to none."""
    if (capability(f"cuda:{device}") or (0, 0))[0] != _MAJOR:
        return False
    sizes, n_inputs, n_outputs = _TRIED
    with torch.no_grad(), torch.cuda.device(device):
        generator = torch.Generator("cuda").manual_seed(0)
        how = {"generator": generator, "device": "cuda"}
        x_MI = torch.randn(sum(sizes) + 8, n_inputs, **how).bfloat16()
        weight_EOI = torch.randn(len(sizes), n_outputs, n_inputs, **how).bfloat16()
        ends_E = torch.tensor(sizes, device="cuda").cumsum(0).int()
        for weight_EIO in (weight_EOI.transpose(1, 2), weight_EOI.transpose(1, 2).contiguous()):
            try:
                found_MO = _product(x_MI, weight_EIO, ends_E)[: sum(sizes)]
                rows = x_MI[: sum(sizes)].split(list(sizes))
                pairs = zip(rows, weight_EIO, strict=True)
                expected_MO = torch.cat([part.float() @ matrix.float() for part, matrix in pairs])
                problem = "" if torch.allclose(found_MO.float(), expected_MO, atol=0.1, rtol=0.02) else "it is wrong"
            except (RuntimeError, AttributeError, TypeError) as error:  # no stable part of torch
                problem = str(error).splitlines()[0]
            if problem:
                logger.info("products of experts by areno's own kernel, not by torch's: %s", problem)
                return False
    return True
