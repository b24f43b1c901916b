# The language of Triton kernels is not Python's, whatever it looks like to a type checker:
# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
"""The decode attention of `paged.py` as Triton kernels: each row's positions are split over several programs, whose
partial results a second kernel joins (flash-decoding; the running softmax is that of arXiv 1805.02867).

Shape letters as in `paged.py`; R splits of a row. No number of one step goes into a launch: the grid depends on the
shapes alone and each program reads its row's length on the device, so a launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # positions read together
_MAX_SPLITS = 32


def paged_attention(
    q_BHC: Tensor, pages: Tensor, table_TW: Tensor, slots_B: Tensor, lengths_B: Tensor, n_splits: int | None = None
) -> Tensor:
    """As `areno.kernels.paged.paged_attention`. n_splits: a power of two; None chooses by the shapes."""
    n_rows, n_heads, head_dim = q_BHC.shape
    _, _, page_size, n_kv_heads, _ = pages.shape
    q_BHC = q_BHC.contiguous()
    k_pages, v_pages = pages[0], pages[1]
    if n_splits is None:
        n_splits = splits_for(n_rows * n_kv_heads, table_TW.shape[1] * page_size, q_BHC.device)
    out = torch.empty_like(q_BHC)
    partial = q_BHC.new_empty((n_rows, n_heads, n_splits, head_dim), dtype=torch.float32) if n_splits > 1 else out
    log_sum = q_BHC.new_empty((n_rows, n_heads, n_splits), dtype=torch.float32)
    group = n_heads // n_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    _split_kernel[(n_rows, n_kv_heads, n_splits)](
        q_BHC,
        k_pages,
        v_pages,
        table_TW,
        slots_B,
        lengths_B,
        partial,
        log_sum,
        head_dim**-0.5,
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        table_TW.stride(0),
        GROUP=group,
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),  # tl.dot needs 16 rows
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PAGE_SIZE=page_size,
        TILE=_TILE,
        N_SPLITS=n_splits,
    )
    if n_splits > 1:
        _join_kernel[(n_rows * n_heads,)](
            partial, log_sum, out, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, N_SPLITS=n_splits
        )
    return out


def splits_for(n_programs: int, max_len: int, device: torch.device) -> int:
    """Splits that fill the device about four times over when there are few rows, and none when there are many."""
    wanted = triton.cdiv(4 * _n_processors(device), n_programs)
    useful = triton.cdiv(max_len, _TILE)
    return triton.next_power_of_2(max(1, min(wanted, useful, _MAX_SPLITS)))


@functools.cache
def _n_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    slots_ptr,
    lengths_ptr,
    partial_ptr,
    log_sum_ptr,
    scale,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    N_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    n_heads = tl.num_programs(1) * GROUP

    length = tl.load(lengths_ptr + row).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(length, TILE), N_SPLITS) * TILE
    start = split * per_split
    end = tl.minimum(start + per_split, length)
    table_row = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride

    group = tl.arange(0, PADDED_GROUP)
    dim = tl.arange(0, PADDED_DIM)
    real_group = group < GROUP
    real_dim = dim < HEAD_DIM
    head = kv_head * GROUP + group
    q = tl.load(
        q_ptr + (row * n_heads + head)[:, None] * HEAD_DIM + dim[None, :],
        mask=real_group[:, None] & real_dim[None, :],
        other=0.0,
    )
    best = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < end
        page = tl.load(table_row + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        base = page * page_stride + (position % PAGE_SIZE) * token_stride + kv_head * head_stride
        k = tl.load(k_ptr + base[None, :] + dim[:, None], mask=inside[None, :] & real_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_best[:, None])
        decay = tl.exp(best - new_best)
        v = tl.load(v_ptr + base[:, None] + dim[None, :], mask=inside[:, None] & real_dim[None, :], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, axis=1)
        best = new_best
    # A split beyond the row's length has total 0: its result is 0 with log-sum -inf, which the join leaves out.
    is_empty = total == 0.0
    safe_total = tl.where(is_empty, 1.0, total)
    cell = (row * n_heads + head) * N_SPLITS + split
    tl.store(
        partial_ptr + cell[:, None] * HEAD_DIM + dim[None, :],
        (acc / safe_total[:, None]).to(partial_ptr.dtype.element_ty),
        mask=real_group[:, None] & real_dim[None, :],
    )
    tl.store(log_sum_ptr + cell, tl.where(is_empty, float("-inf"), best + tl.log(safe_total)), mask=real_group)


@triton.jit
def _join_kernel(
    partial_ptr,
    log_sum_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    N_SPLITS: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, N_SPLITS)
    dim = tl.arange(0, PADDED_DIM)
    log_sum = tl.load(log_sum_ptr + cell * N_SPLITS + split)
    weights = tl.exp(log_sum - tl.max(log_sum, axis=0))
    partial = tl.load(
        partial_ptr + (cell * N_SPLITS + split)[:, None] * HEAD_DIM + dim[None, :],
        mask=(dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out_ptr + cell * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
