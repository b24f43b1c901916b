# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
"""Products with each expert's matrix as Triton kernels, or by torch's grouped_mm for large groups, where it is faster.

The host does not know how many rows each expert has, so a launch has enough programs for any numbers of rows. Each
program finds its expert from `ends_E`, and programs without work return.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from areno.kernels.backend import is_hopper
from areno.kernels.experts.triton_activation import expert_glu as expert_glu
from areno.kernels.experts.triton_activation import weighted_glu_backward as weighted_glu_backward
from areno.kernels.experts.triton_routing import choose_experts as choose_experts
from areno.kernels.experts.triton_routing import expert_load as expert_load
from areno.kernels.jit import kernel, load_fp32, load_masked, program_id_64

logger = logging.getLogger("areno")

_ALIGNMENT = 16  # bytes; grouped_mm requires addresses and strides to be multiples of this
_TRIED = ((5, 0, 40, 19), 64, 128)  # the test of grouped_mm: rows of four groups, inputs, outputs


def try_torch_grouped_mm(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor | None:
    """Return the products by torch's grouped_mm, without waiting for the device, or None if it cannot be used.

    grouped_mm needs bfloat16, a Hopper GPU on which it has given right results, and aligned tensors.
    """
    if not x_MI.is_cuda or x_MI.dtype != torch.bfloat16 or not _is_aligned(x_MI, weight_EIO):
        return None
    return _torch_grouped_mm(x_MI, weight_EIO, ends_E) if _is_grouped_mm_right(x_MI.device.index or 0) else None


def _torch_grouped_mm(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    public = getattr(F, "grouped_mm", None)
    return (public or torch._grouped_mm)(x_MI, weight_EIO, offs=ends_E)


def _is_aligned(x_MI: Tensor, weight_EIO: Tensor) -> bool:
    strides = [x_MI.stride(0), *(stride for stride in weight_EIO.stride() if stride != 1)]
    starts = x_MI.data_ptr(), weight_EIO.data_ptr()
    return not any(stride * x_MI.element_size() % _ALIGNMENT for stride in strides) and not any(
        start % _ALIGNMENT for start in starts
    )


@functools.cache
def _is_grouped_mm_right(device: int) -> bool:
    """Return whether grouped_mm gives right results for uneven and empty groups, and for rows after the last group."""
    # For other GPUs, torch has no grouped kernel: the host waits for the sizes of the groups, and loops over them.
    if not is_hopper(f"cuda:{device}"):
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
                found_MO = _torch_grouped_mm(x_MI, weight_EIO, ends_E)[: sum(sizes)]
                rows = x_MI[: sum(sizes)].split(list(sizes))
                pairs = zip(rows, weight_EIO, strict=True)
                expected_MO = torch.cat([part.float() @ matrix.float() for part, matrix in pairs])
                problem = "" if torch.allclose(found_MO.float(), expected_MO, atol=0.1, rtol=0.02) else "it is wrong"
            except (RuntimeError, AttributeError, TypeError) as error:  # grouped_mm is not a stable API
                problem = str(error).splitlines()[0]
            if problem:
                logger.info("products of experts by areno's own kernel, not by torch's: %s", problem)
                return False
    return True


# (largest mean number of rows of an expert, (rows, columns and inputs of a tile, warps, stages)). Up to 64 rows, tiles
# have at least as many rows as the mean, since an expert that needs a second tile reads its weights twice.
_TILES = (
    (8, (16, 64, 128, 4, 3)),
    (24, (32, 64, 128, 4, 3)),
    (64, (64, 64, 64, 4, 3)),
    (math.inf, (128, 128, 64, 8, 3)),
)
_LIBRARY_ROWS = 64  # mean number of rows of an expert from which on grouped_mm is used
_LIBRARY_COLUMNS = 64  # fewest outputs of an expert's matrix, above those of an adapter


def _tile_sizes(n_rows: int, n_experts: int) -> tuple[int, int, int, int, int]:
    return next(tile for most, tile in _TILES if n_rows <= most * n_experts)


def _pipeline_stages(x: Tensor, n_stages: int) -> int:
    """Return `n_stages`, but 2 for fp32, because more would not fit into the shared memory of every GPU."""
    return n_stages if x.element_size() < 4 else 2


def grouped_matmul(
    x_MI: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool = False, row_multiple: int = 1
) -> Tensor:
    assert row_multiple == 1, "the kernel computes each row by itself"
    x_MI = x_MI.contiguous()
    n_columns = weight.shape[2] if transposed else weight.shape[1]
    if len(x_MI) >= _LIBRARY_ROWS * len(weight) and n_columns >= _LIBRARY_COLUMNS:
        done = try_torch_grouped_mm(x_MI, weight if transposed else weight.transpose(1, 2), ends_E)
        if done is not None:
            return done
    out_MO = x_MI.new_empty((len(x_MI), n_columns))
    _launch_grouped_matmul(out_MO, x_MI, weight, ends_E, transposed, None)
    return out_MO


def add_expert_lora(
    y_MO: Tensor,
    h_Mr: Tensor,
    weight: Tensor,
    ends_E: Tensor,
    scaling: float,
    transposed: bool = False,
    row_multiple: int = 1,
) -> Tensor:
    assert row_multiple == 1, "the kernel computes each row by itself"
    y_MO = y_MO.contiguous()
    _launch_grouped_matmul(y_MO, h_Mr.contiguous(), weight, ends_E, transposed, scaling)
    return y_MO


def _fitted(size: int, n: int) -> int:
    """Return the size of a tile for a side of `n` elements, which is the rank of an adapter, or 1 for biases."""
    return max(16, min(size, triton.next_power_of_2(n)))


def _launch_grouped_matmul(
    out_MO: Tensor, x_MI: Tensor, weight: Tensor, ends_E: Tensor, transposed: bool, scaling: float | None
) -> None:
    """Write the products to `out_MO` or, with `scaling`, add them times `scaling`."""
    n_experts, (n_rows, n_inputs), n_columns = len(weight), x_MI.shape, out_MO.shape[1]
    rows, columns, inputs, n_warps, n_stages = _tile_sizes(n_rows, n_experts)
    # The last tile of each group may not be full, so there may be one more tile per group.
    n_tiles = triton.cdiv(n_rows, rows) + min(n_experts, n_rows)
    by_output, by_input = (1, 2) if not transposed else (2, 1)
    columns, inputs = _fitted(columns, n_columns), _fitted(inputs, n_inputs)
    if n_rows:
        # Programs that share a tile of a matrix run one after another, while the tile is in the L2 cache.
        _grouped_matmul_kernel[(n_tiles, triton.cdiv(n_columns, columns))](
            x_MI,
            weight,
            out_MO,
            ends_E,
            n_experts,
            n_columns,
            n_inputs,
            weight.stride(0),
            weight.stride(by_output),
            weight.stride(by_input),
            1.0 if scaling is None else scaling,
            EXPERTS=triton.next_power_of_2(n_experts),
            ROWS=rows,
            COLUMNS=columns,
            INPUTS=inputs,
            ADDS=scaling is not None,
            num_warps=n_warps,
            num_stages=_pipeline_stages(x_MI, n_stages),
        )


@kernel(do_not_specialize=["scaling"])
def _grouped_matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    ends_ptr,
    n_experts,
    n_columns,
    n_inputs,
    expert_stride,
    output_stride,
    input_stride,
    scaling,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    ADDS: tl.constexpr,
):
    tile = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    real = each < n_experts
    end_E = load_masked(ends_ptr + each, real)
    begin_E = load_masked(ends_ptr + each - 1, real & (each > 0))
    n_tiles_E = tl.where(real, (end_E - begin_E + ROWS - 1) // ROWS, 0)
    last_tile_E = tl.cumsum(n_tiles_E, 0)
    mine = (tile < last_tile_E) & (tile >= last_tile_E - n_tiles_E)
    if tile >= tl.sum(n_tiles_E, 0):
        return
    expert = tl.sum(tl.where(mine, each, 0), 0)
    begin = tl.sum(tl.where(mine, begin_E, 0), 0)
    end = tl.sum(tl.where(mine, end_E, 0), 0)
    before = tl.sum(tl.where(mine, last_tile_E - n_tiles_E, 0), 0)

    row = begin + (tile - before) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < end, column < n_columns
    x_place = x_ptr + row.to(tl.int64)[:, None] * n_inputs
    weight_place = weight_ptr + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[None, :] * output_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n_inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        inside = at < n_inputs
        x = load_masked(x_place + at[None, :], real_row[:, None] & inside[None, :])
        weight = load_masked(
            weight_place + at.to(tl.int64)[:, None] * input_stride, inside[:, None] & real_column[None, :]
        )
        total = tl.dot(x, weight, acc=total, input_precision="ieee")
    place = out_ptr + row.to(tl.int64)[:, None] * n_columns + column[None, :]
    written = real_row[:, None] & real_column[None, :]
    if ADDS:
        total = load_fp32(place, written) + scaling * total
    tl.store(place, total, mask=written)


def add_grouped_matmul(out_EOI: Tensor, a_MO: Tensor, b_MI: Tensor, ends_E: Tensor, scale: float = 1.0) -> None:
    n_experts, n_outputs, n_inputs = out_EOI.shape
    few = len(a_MO) <= 32 * n_experts
    outputs, inputs, rows, n_warps = (64, 64, 32, 4) if few else (128, 128, 64, 8)
    outputs, inputs = _fitted(outputs, n_outputs), _fitted(inputs, n_inputs)
    grid = (triton.cdiv(n_outputs, outputs), triton.cdiv(n_inputs, inputs), n_experts)
    _add_grouped_kernel[grid](
        out_EOI,
        a_MO.contiguous(),
        b_MI.contiguous(),
        ends_E,
        n_outputs,
        n_inputs,
        out_EOI.stride(0),
        out_EOI.stride(1),
        scale,
        OUTPUTS=outputs,
        INPUTS=inputs,
        ROWS=rows,
        num_warps=n_warps,
        num_stages=_pipeline_stages(a_MO, 3),
    )


@kernel(do_not_specialize=["scale"])
def _add_grouped_kernel(
    out_ptr,
    a_ptr,
    b_ptr,
    ends_ptr,
    n_outputs,
    n_inputs,
    expert_stride,
    output_stride,
    scale,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    expert = tl.program_id(2)
    begin = load_masked(ends_ptr + expert - 1, expert > 0)
    end = tl.load(ends_ptr + expert)
    if end <= begin:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    real_output, real_column = output < n_outputs, column < n_inputs
    total = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        real_row = row < end
        at = row.to(tl.int64)
        a = load_masked(a_ptr + at[None, :] * n_outputs + output[:, None], real_row[None, :] & real_output[:, None])
        b = load_masked(b_ptr + at[:, None] * n_inputs + column[None, :], real_row[:, None] & real_column[None, :])
        total = tl.dot(a, b, acc=total, input_precision="ieee")
    place = (
        out_ptr + expert.to(tl.int64) * expert_stride + output.to(tl.int64)[:, None] * output_stride + column[None, :]
    )
    inside = real_output[:, None] & real_column[None, :]
    tl.store(place, load_masked(place, inside) + scale * total, mask=inside)


def combine(
    y_MD: Tensor,
    copies_Nk: Tensor,
    weights_Nk: Tensor | None,
    ends_E: Tensor,
    bias_ED: Tensor | None = None,
    experts_Nk: Tensor | None = None,
) -> Tensor:
    n_tokens, top_k = copies_Nk.shape
    size = y_MD.shape[1]
    out_ND = y_MD.new_empty((n_tokens, size))
    if n_tokens:
        _combine_kernel[(n_tokens, triton.cdiv(size, 1024))](
            y_MD.contiguous(),
            copies_Nk.contiguous(),
            weights_Nk if weights_Nk is None else weights_Nk.float().contiguous(),
            ends_E[-1:],
            bias_ED if bias_ED is None else bias_ED.contiguous(),
            experts_Nk if experts_Nk is None else experts_Nk.contiguous(),
            out_ND,
            size,
            CHOICES=top_k,
            HAS_WEIGHTS=weights_Nk is not None,
            HAS_BIAS=bias_ED is not None,
            BLOCK=1024,
        )
    return out_ND


@kernel
def _combine_kernel(
    y_ptr,
    places_ptr,
    weights_ptr,
    end_ptr,
    bias_ptr,
    experts_ptr,
    out_ptr,
    size,
    CHOICES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = program_id_64(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    end = tl.load(end_ptr)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        n_columns = tl.where(place < end, size, 0)
        row = load_fp32(y_ptr + place * size + column, column < n_columns)
        if HAS_BIAS:
            expert = tl.load(experts_ptr + token * CHOICES + choice)
            row += load_fp32(bias_ptr + expert * size + column, column < n_columns)
        if HAS_WEIGHTS:
            row *= tl.load(weights_ptr + token * CHOICES + choice)
        total += row
    tl.store(out_ptr + token * size + column, total, mask=inside)
