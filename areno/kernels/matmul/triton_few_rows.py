# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""Matrix products of at most 64 rows, for decoding steps of few samples, in Triton, or in Gluon where possible.

Such a product takes about as long as reading its weight from memory. So the weight is divided by outputs, and also by
inputs if there are few outputs, until most multiprocessors read a part. The kernels use programmatic dependent launch
(`kernels/jit.py`), so no kernel of the chain may write the weight. With the kernel of this file, a layer of Qwen3-0.6B
without its attention takes 25 us for 64 rows on an H100, and 36 us with the products of cuBLAS.

S parts of the inputs. `gelu` takes the tanh form of GELU instead of SiLU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from areno.kernels import jit
from areno.kernels.elementwise.triton_norm import n_multiprocessors
from areno.kernels.elementwise.triton_swiglu import glu
from areno.kernels.jit import kernel, load_fp32, round_to_dtype
from areno.kernels.matmul.gluon_few_rows import FEW_ROWS_KERNEL, LEAST_INPUTS, launch_few_rows

MOST_ROWS = 64
_COLUMNS, _WARPS = 32, 4  # outputs of a tile, and warps of its program
# Rows of a tile -> its inputs, and the number of pipeline stages without and with a gate. With a gate, a stage holds
# two tiles of the weight. The fastest on an H100, whose matrix units take 64 rows at once, or 16 by older instructions.
_TILES = {16: (256, 4, 4), MOST_ROWS: (128, 6, 4)}
_SHARED_MEMORY = 200 * 2**10  # bytes that are enough for each entry of _TILES
# On an H100, decoding with 8 to 64 rows is 7 to 14 % faster for Qwen3-0.6B. For 4B it is up to 8 % slower than with the
# products of cuBLAS, because reading the weights takes longer than the time that these kernels save between kernels.
_MOST_WIDTH = 1024
_MOST_PARTS = 4


def supports_few_rows(weight_OI: Tensor) -> bool:
    """Return whether the products support a weight and its device, and are faster than cuBLAS.

    The device must have PDL and enough shared memory. The products are faster if the weight has few outputs or few
    inputs.
    """
    is_supported = weight_OI.dtype in (torch.bfloat16, torch.float16) and _has_enough_shared_memory(weight_OI.device)
    return is_supported and min(weight_OI.shape) <= _MOST_WIDTH


@functools.cache
def _has_enough_shared_memory(device: torch.device) -> bool:
    if not jit.supports_pdl(device):
        return False
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= _SHARED_MEMORY


def few_rows_matmul(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x W^T + b in the dtype of x."""
    return _launch(x_NI, weight_OI, bias_O, x_NI.new_empty((1, len(x_NI), len(weight_OI))))[0]


def partial_products(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T as S float32 summands, each the product of a part of the inputs."""
    n_tiles, parts = triton.cdiv(len(weight_OI), _COLUMNS), 1
    # Half as many programs as multiprocessors are the fastest in Triton on an H100, as many in Gluon on an H200.
    is_gluon, most = jit.can_run_gluon(x_NI.device, FEW_ROWS_KERNEL), n_multiprocessors(x_NI.device)
    while parts < _MOST_PARTS and 2 * parts * n_tiles <= (most if is_gluon else most // 2):
        if is_gluon and x_NI.shape[1] % (2 * parts * LEAST_INPUTS):  # no tile would divide the parts
            break
        parts *= 2
    return _launch(x_NI, weight_OI, None, x_NI.new_empty((parts, len(x_NI), len(weight_OI)), dtype=torch.float32))


def gated_product(x_NI: Tensor, weight_2OI: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(x G^T) * (x U^T), where the weight of the gate G lies above U."""
    out_NO = x_NI.new_empty((1, len(x_NI), len(weight_2OI) // 2))
    return _launch(x_NI, weight_2OI, None, out_NO, is_gated=True, gelu=gelu)[0]


def _launch(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_SNO: Tensor,
    is_gated: bool = False,
    gelu: bool = False,
) -> Tensor:
    (n_parts, n_rows, n_columns), n_inputs = out_SNO.shape, x_NI.shape[1]
    assert n_rows <= MOST_ROWS
    x_NI = x_NI.contiguous()
    if launch_few_rows(x_NI, weight_OI, bias_O, out_SNO, is_gated, gelu):
        return out_SNO
    rows = 16 if n_rows <= 16 else MOST_ROWS
    inputs, n_stages, n_gated_stages = _TILES[rows]
    span = triton.cdiv(n_inputs, n_parts * inputs) * inputs  # inputs of a part
    _few_rows_kernel[(triton.cdiv(n_columns, _COLUMNS), n_parts)](
        x_NI,
        weight_OI,
        bias_O,
        out_SNO,
        n_rows,
        n_columns,
        n_inputs,
        span,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        INPUTS=inputs,
        IS_EVEN=n_inputs == n_parts * span and n_columns % _COLUMNS == 0,
        IS_GATED=is_gated,
        GELU=gelu,
        num_warps=_WARPS,
        num_stages=n_gated_stages if is_gated else n_stages,
        **jit.pdl_options(x_NI.device),
    )
    return out_SNO


@kernel(do_not_specialize=["n_rows"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n_rows,
    n_columns,
    n_inputs,
    span,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Compute, in each program, some columns of the product of one part of the inputs."""
    if PDL:
        jit.launch_dependents()
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = (row < n_rows)[:, None], (column < n_columns)[None, :]
    part = tl.program_id(1)
    x_place = x_ptr + row.to(tl.int64)[:, None] * n_inputs
    weight_place = weight_ptr + column.to(tl.int64)[None, :] * n_inputs
    up_place = weight_place + n_columns.to(tl.int64) * n_inputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PDL:
        jit.wait_for_previous()
    for start in range(part * span, tl.minimum((part + 1) * span, n_inputs), INPUTS):
        at = start + tl.arange(0, INPUTS)
        if IS_EVEN:
            x = tl.load(x_place + at[None, :], mask=real_row, other=0.0)
            weight = tl.load(weight_place + at[:, None])
        else:
            inside = at < n_inputs
            x = tl.load(x_place + at[None, :], mask=real_row & inside[None, :], other=0.0)
            weight = tl.load(weight_place + at[:, None], mask=real_column & inside[:, None], other=0.0)
        total = tl.dot(x, weight, acc=total, input_precision="ieee")
        if IS_GATED:
            if IS_EVEN:
                up = tl.load(up_place + at[:, None])
            else:
                up = tl.load(up_place + at[:, None], mask=real_column & (at < n_inputs)[:, None], other=0.0)
            up_total = tl.dot(x, up, acc=up_total, input_precision="ieee")
    place = out_ptr + (part * n_rows + row).to(tl.int64)[:, None] * n_columns + column[None, :]
    if bias_ptr is not None:
        total += load_fp32(bias_ptr + column, column < n_columns)[None, :]
    if IS_GATED:  # rounded as by a product without activation
        total = glu(round_to_dtype(total, out_ptr), round_to_dtype(up_total, out_ptr), out_ptr, GELU)
    tl.store(place, total, mask=real_row & real_column)
