"""Paged decode attention: the torch form against each row alone, the Triton kernels against the torch form."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from areno.kernels.fixed_order import SPAN
from areno.kernels.fp8 import dequantize_rows, quantize_rows, round_rows
from areno.kernels.paged import PagedBatch, decode_attention, load_rows, reference, store_rows
from tests.helpers import paged_rows
from tests.helpers.interpreted import run_interpreted
from tests.helpers.paged_rows import LENGTHS, SHAPES, cut_into, make_case


def without_teams(batch: PagedBatch) -> PagedBatch:
    return replace(batch, shared_lens_B=torch.zeros_like(batch.shared_lens_B), prefix_groups_GR=None)


def row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    batch: PagedBatch,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k / sqrt(C)) v in float64, one row and one head at a time, over what the pages hold before the call.

    The sink of a head is one more score, without a value.
    """
    out = torch.empty(q.shape, dtype=torch.float64)
    page_size, group = pages.shape[2], q.shape[1] // pages.shape[3]
    for row, length in enumerate(batch.lengths_B.tolist()):
        line = batch.table_TW[batch.slots_B[row]].tolist()
        first = 0 if window is None else max(0, length - window)
        places = [(line[n // page_size], n % page_size) for n in range(first, length - 1)]
        past = torch.stack([pages[:, page, offset] for page, offset in places], 1) if places else pages[:, 0, :0]
        keys, values = (torch.cat((old, new[row][None])).double() for old, new in zip(past, (k, v), strict=True))
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[row, head].double() / q.shape[2] ** 0.5
            found = scores if sinks is None else torch.cat((scores, sinks[head : head + 1].double()))
            out[row, head] = found.softmax(0)[: len(scores)] @ values[:, head // group]
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_is_attention_over_the_row(shape: tuple[int, int, int, int]) -> None:
    q, k, v, pages, batch = make_case(*shape)
    expected = row_by_row(q, k, v, pages, batch)
    for max_len in (max(LENGTHS), max(LENGTHS) + 3, None):
        got = decode_attention(q, k, v, pages.clone(), replace(batch, max_len=max_len))
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def forgotten(batch: PagedBatch, page_size: int, window: int) -> PagedBatch:
    """The blocks behind the window of rows in no group are those of somebody else."""
    table = batch.table_TW.clone()
    for row, length in enumerate(LENGTHS):
        if batch.shared_lens_B[row] == 0:
            table[batch.slots_B[row], : max(0, length - window) // page_size] = table[0, 0]
    return replace(batch, table_TW=table)


@pytest.mark.parametrize("window", [1, 20, 64, 149])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_is_attention_over_the_last_positions(shape: tuple[int, int, int, int], window: int) -> None:
    q, k, v, pages, batch = make_case(*shape)
    expected = row_by_row(q, k, v, pages, batch, window)
    for tried in (batch, forgotten(batch, shape[3], window)):
        got = decode_attention(q, k, v, pages.clone(), tried, window)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_new_keys_and_values_go_to_the_last_position_and_nowhere_else() -> None:
    q, k, v, pages, batch = make_case(*SHAPES[0])
    written = pages.clone()
    decode_attention(q, k, v, written, batch)
    for row, length in enumerate(LENGTHS):
        page, offset = batch.table_TW[batch.slots_B[row], (length - 1) // 16], (length - 1) % 16
        assert torch.equal(written[:, page, offset], torch.stack((k[row], v[row])))
        written[:, page, offset] = pages[:, page, offset]
    assert torch.equal(written, pages)


def compare_triton(device: str) -> None:
    """Run in a process of its own under the interpreter, which is slow and so gets less, or on the GPU."""
    from areno.kernels.paged import triton

    on_gpu = device == "cuda"
    tolerances = {torch.float32: 2e-5, torch.float16: 4e-3}
    few = {(2, 2, 32, 32): torch.float32, SHAPES[2]: torch.float16}
    for shape in SHAPES if on_gpu else few:
        for dtype in tolerances if on_gpu else [few[shape]]:
            tolerance = tolerances[dtype]
            q, k, v, pages, teamed = make_case(*shape, dtype=dtype, device=device)
            wide = torch.cat((q, k, v), dim=1)  # as a projection leaves them, with strides of their own
            q, k, v = wide.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
            expected_pages = pages.float()
            expected = reference.decode_attention(q.float(), k.float(), v.float(), expected_pages, teamed)
            batches = [cut_into(teamed, 64, 32), without_teams(teamed)]
            if on_gpu:
                batches += [teamed, cut_into(without_teams(teamed), 32, 32), cut_into(teamed, 512, 32)]
            for batch in batches:
                written = pages.clone()
                got = triton.decode_attention(q, k, v, written, batch)
                assert got.dtype == dtype
                torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
                assert torch.equal(written.float(), expected_pages)


def sinks_of(q: Tensor) -> Tensor:
    """One of each head, the first far below all scores and the last above them."""
    return torch.linspace(-20, 6, q.shape[1], device=q.device)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_sinks_take_part_in_the_softmax(
    shape: tuple[int, int, int, int], window: int | None, fixed_order: bool
) -> None:
    q, k, v, pages, batch = make_case(*shape)
    expected = row_by_row(q, k, v, pages, batch, window, sinks_of(q))
    got = decode_attention(q, k, v, pages, replace(batch, fixed_order=fixed_order), window, None, sinks_of(q))
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def compare_sinks(device: str) -> None:
    """One part, several, and groups, with windows and FP8 caches; each kernel joins the sinks once."""
    from areno.kernels.paged import triton

    paged_rows.GROUPS = [((1, 2, 4), 1), ((6, 7, 9), 2)]
    cases = [((3, 1, 16, 64), None, False, torch.float32), ((2, 2, 32, 64), 20, True, torch.float32)]
    tolerances = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
    if device == "cuda":  # in bfloat16 and without a window, splits are computed in Gluon
        cases = list(product(SHAPES, (None, 20), (False, True), tolerances))
    for shape, window, is_fp8, dtype in cases:
        q, k, v, pages, teamed = make_case(*shape, dtype=dtype, device=device)
        k, v, pages = round_rows(k), round_rows(v), round_rows(pages)
        sinks, alone = sinks_of(q).to(dtype), without_teams(teamed)
        in_float = (each.float() for each in (q, k, v, pages))
        expected = reference.decode_attention(*in_float, teamed, window, None, sinks)
        in_order = replace(cut_into(teamed if shape[3] == 64 else alone, SPAN, SPAN), fixed_order=True)
        for batch in (alone, cut_into(teamed, 64, 32), in_order):
            cache, exponents = in_fp8(pages) if is_fp8 else (pages.clone(), None)
            got = triton.decode_attention(q, k, v, cache, batch, window, exponents, sinks)
            torch.testing.assert_close(got.float(), expected, atol=tolerances[dtype], rtol=tolerances[dtype])


@pytest.mark.slow
def test_sinks_of_the_triton_kernels_in_the_interpreter_are_the_references() -> None:
    run_interpreted("from tests.kernels.test_paged import compare_sinks; compare_sinks('cpu')")


@pytest.mark.gpu
def test_sinks_of_the_triton_kernels_on_the_gpu_are_the_references() -> None:
    compare_sinks("cuda")


def compare_windows(device: str) -> None:
    """Windows within a piece, over several, and longer than rows; with and without groups; blocks behind them gone."""
    from areno.kernels.paged import triton

    for shape, window in ((SHAPES[1], 20), (SHAPES[2], 100), *([(SHAPES[0], 1), (SHAPES[3], 64)] * (device == "cuda"))):
        q, k, v, pages, teamed = make_case(*shape, device=device)
        expected_pages = pages.clone()
        expected = reference.decode_attention(q, k, v, expected_pages, teamed, window)
        for batch in (cut_into(teamed, 64, 32), without_teams(teamed), forgotten(teamed, shape[3], window)):
            written = pages.clone()
            got = triton.decode_attention(q, k, v, written, batch, window)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
            assert torch.equal(written, expected_pages)


def skip_what_is_behind(device: str) -> None:
    """What a row does not see is nan, apart from the tile in which its window begins: who reads it gives nan."""
    from areno.kernels.paged import triton

    shape, window = SHAPES[2], 33
    q, k, v, pages, teamed = make_case(*shape, device=device)
    alone = without_teams(teamed)
    expected = reference.decode_attention(q, k, v, pages.clone(), alone, window)
    fixed_order = replace(cut_into(alone, SPAN, SPAN), fixed_order=True)
    for batch, tile in ((cut_into(alone, 64, 32), 32), (fixed_order, 64)):
        places: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}  # whether a row reads them
        for row, length in enumerate(LENGTHS):
            for position in range(length):
                page = int(batch.table_TW[batch.slots_B[row], position // shape[3]])
                places[position >= max(0, length - window) // tile * tile].add((page, position % shape[3]))
        spoiled = pages.clone()
        for page, offset in (unread := places[False] - places[True]):
            spoiled[:, page, offset] = torch.nan
        assert len(unread) > 100
        got = triton.decode_attention(q, k, v, spoiled, batch, window)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_no_tile_behind_a_window_is_read_by_the_interpreted_kernels() -> None:
    run_interpreted("from tests.kernels.test_paged import skip_what_is_behind; skip_what_is_behind('cpu')")


@pytest.mark.gpu
def test_no_tile_behind_a_window_is_read_on_the_gpu() -> None:
    skip_what_is_behind("cuda")


@pytest.mark.slow
def test_windows_of_the_triton_kernel_in_the_interpreter_are_the_references() -> None:
    run_interpreted("from tests.kernels.test_paged import compare_windows; compare_windows('cpu')")


@pytest.mark.gpu
def test_windows_of_the_triton_kernel_on_the_gpu_are_the_references() -> None:
    compare_windows("cuda")


@pytest.mark.slow
def test_triton_kernel_in_the_interpreter_is_the_reference() -> None:
    run_interpreted("from tests.kernels.test_paged import compare_triton; compare_triton('cpu')")


@pytest.mark.gpu
def test_triton_kernel_on_the_gpu_is_the_reference() -> None:
    compare_triton("cuda")


def in_fp8(pages: Tensor) -> tuple[Tensor, Tensor]:
    """An FP8 cache of pages: codes, and exponents with the positions of a page together."""
    codes, exponents = quantize_rows(pages)
    return codes, exponents.transpose(-2, -1).contiguous()


def out_of_fp8(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_rows(codes, exponents.transpose(-2, -1).contiguous(), dtype)


@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_fp8_cache_is_one_of_rounded_pages(
    shape: tuple[int, int, int, int], window: int | None, fixed_order: bool
) -> None:
    q, k, v, pages, batch = make_case(*shape)
    k, v, pages = round_rows(k), round_rows(v), round_rows(pages)
    batch = replace(batch, fixed_order=fixed_order)
    codes, exponents = in_fp8(pages)
    got = decode_attention(q, k, v, codes, batch, window, exponents)
    assert torch.equal(got, decode_attention(q, k, v, pages, replace(batch), window))
    assert torch.equal(out_of_fp8(codes, exponents, torch.float32), pages)


def test_rows_of_an_fp8_cache_are_what_was_stored() -> None:
    _, _, _, pages, _ = make_case(*SHAPES[2])
    codes, exponents = in_fp8(pages)
    k, v = round_rows(torch.randn(2, 5, 1, 24))
    indices = torch.tensor([3, 77, 12, 0, 100])
    store_rows(k, v, codes, exponents, indices)
    for new, found in zip((k, v), load_rows(codes, exponents, indices, torch.float32), strict=True):
        assert torch.equal(found, new)
    expected = round_rows(pages)
    expected.flatten(1, 2)[:, indices] = torch.stack((k, v))
    assert torch.equal(out_of_fp8(codes, exponents, torch.float32), expected)


def compare_fp8(device: str) -> None:
    """The kernels on codes against the torch form on rounded pages; with a fixed order also against themselves."""
    from areno.kernels.paged import triton

    paged_rows.GROUPS = [((1, 2, 4), 1), ((6, 7, 9), 2)]  # with pages of 64, spans begin after those that are shared
    cases = [
        (SHAPES[2], torch.float32, None),
        ((2, 2, 32, 64), torch.float16, 20),
        ((3, 1, 16, 64), torch.float32, None),
    ]
    tolerances = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    if device == "cuda":
        cases = [(shape, dtype, window) for shape in SHAPES for dtype in tolerances for window in (None, 20)]
    for shape, dtype, window in cases:
        q, k, v, pages, teamed = make_case(*shape, device=device)
        pages *= 2.0 ** torch.randint(-3, 4, (*pages.shape[:4], 1), device=device)
        q, k, v, pages = q.to(dtype), *(round_rows(each.to(dtype)) for each in (k, v, pages))
        wide = torch.cat((q, k, v), dim=1)  # as a projection leaves them, with strides of their own
        q, k, v = wide.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
        expected_pages = pages.float()
        expected = reference.decode_attention(q.float(), k.float(), v.float(), expected_pages, teamed, window)
        in_order = replace(cut_into(teamed if shape[3] == 64 else without_teams(teamed), SPAN, SPAN), fixed_order=True)
        for batch in (cut_into(teamed, 64, 32), without_teams(teamed), in_order):
            codes, exponents = in_fp8(pages)
            got = triton.decode_attention(q, k, v, codes, batch, window, exponents)
            torch.testing.assert_close(got.float(), expected, atol=tolerances[dtype], rtol=tolerances[dtype])
            assert torch.equal(out_of_fp8(codes, exponents, torch.float32), expected_pages)
            if batch.fixed_order:
                assert torch.equal(got, triton.decode_attention(q, k, v, pages.clone(), batch, window))


def compare_fp8_rows(device: str) -> None:
    from areno.kernels.paged import rows, triton_rows

    for shape, dtype in ((SHAPES[2], torch.float32), (SHAPES[0], torch.float16)):
        _, _, _, pages, _ = make_case(*shape, dtype=dtype, device=device)
        k, v = round_rows(torch.randn(2, 5, *pages.shape[3:], device=device).to(dtype))
        indices = torch.tensor([3, 77, 12, 0, 100], device=device)
        expected = [x.cpu() for x in in_fp8(pages)]
        got = in_fp8(pages)
        rows.store_rows(k.cpu(), v.cpu(), *expected, indices.cpu())
        triton_rows.store_rows(k, v, *got, indices)
        assert all(
            torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, expected, strict=True)
        )
        for new, found in zip((k, v), triton_rows.load_rows(*got, indices, dtype), strict=True):
            assert torch.equal(found, new)


@pytest.mark.slow
def test_fp8_caches_of_the_triton_kernels_in_the_interpreter() -> None:
    both = "compare_fp8, compare_fp8_rows"
    run_interpreted(f"from tests.kernels.test_paged import {both}; compare_fp8('cpu'); compare_fp8_rows('cpu')")


@pytest.mark.gpu
def test_fp8_caches_of_the_triton_kernels_on_the_gpu() -> None:
    compare_fp8("cuda")
    compare_fp8_rows("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_on_the_gpu_is_attention_over_the_row(shape: tuple[int, int, int, int]) -> None:
    q, k, v, pages, batch = make_case(*shape, dtype=torch.bfloat16, device="cuda")
    on_cpu = replace(batch, table_TW=batch.table_TW.cpu(), slots_B=batch.slots_B.cpu(), lengths_B=batch.lengths_B.cpu())
    expected = row_by_row(q.cpu(), k.cpu(), v.cpu(), pages.cpu(), on_cpu)
    got = decode_attention(q, k, v, pages, batch)
    torch.testing.assert_close(got.double().cpu(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "group_rows", "is_fp8"),
    [
        (shape, group_rows, is_fp8)
        for shape, group_rows in (
            ((16, 8, 128, 32), 8),
            ((4, 2, 64, 16), 8),
            ((3, 1, 128, 64), 5),
            ((8, 1, 64, 32), 2),
            ((2, 2, 128, 32), 8),
        )
        for is_fp8 in (False, True)
        if shape[0] // shape[1] > 2 or not is_fp8
    ],
)
def test_hopper_computes_splits_in_gluon(
    shape: tuple[int, int, int, int], group_rows: int, is_fp8: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("areno.kernels.paged.triton")
    if not triton.jit.can_run_gluon(torch.device("cuda"), "_gluon_split_kernel"):
        pytest.skip("needs a Hopper GPU and a Triton with Gluon")
    launched: list[bool] = []
    compute = triton.compute_splits
    monkeypatch.setattr(triton, "compute_splits", lambda *args, **how: launched.append(compute(*args, **how)) or True)
    monkeypatch.setattr(paged_rows, "GROUP_ROWS", group_rows)
    # A group of all its rows, one with rows left over, and rows in none.
    monkeypatch.setattr(paged_rows, "GROUPS", [(tuple(range(8)), 2), (tuple(range(8, 13)), 1)])
    monkeypatch.setattr(paged_rows, "LENGTHS", [150, 129, 130, 145, 146, 200, 161, 160, 65, 300, 66, 80, 97, 1, 2, 77])
    q, k, v, pages, teamed = make_case(*shape, dtype=dtype, device="cuda")
    is_filler = pages == 1e3
    if is_fp8:
        pages *= 2.0 ** torch.randint(-3, 4, (*pages.shape[:4], 1), device="cuda")
        k, v, pages = round_rows(k), round_rows(v), round_rows(pages)
    expected_pages = pages.float()
    expected = reference.decode_attention(q.float(), k.float(), v.float(), expected_pages, teamed)
    expected_pages[is_filler & (expected_pages == pages.float())] = torch.nan  # positions that no row has
    pages[is_filler] = torch.nan
    batches = [teamed, without_teams(teamed), cut_into(teamed, 64, 32), cut_into(teamed, 512, 32)]
    batches += [replace(batch, pdl=True, reads_early=early) for batch in batches[:3] for early in (False, True)]
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    results = []
    for batch in batches:
        if is_fp8:
            codes, exponents = in_fp8(pages)
            got = triton.decode_attention(q, k, v, codes, batch, None, exponents)
            written = out_of_fp8(codes, exponents, dtype)
        else:
            written = pages.clone()
            got = triton.decode_attention(q, k, v, written, batch)
        torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(written.float(), expected_pages, atol=0, rtol=0, equal_nan=True)
        results.append(got)
    assert launched == [True] * len(batches)
    for number, early in enumerate(results[4:]):
        assert torch.equal(early, results[number // 2])  # an early start changes no bit


@pytest.mark.parametrize(
    ("queries", "group_size", "head_dim", "block_size", "expected"),
    [
        (2, 8, 128, 32, True),
        (16, 1, 64, 16, True),
        (4, 2, 128, 32, True),
        (4, 8, 128, 32, True),
        (5, 8, 128, 32, False),
        (2, 8, 96, 32, False),
        (2, 8, 128, 24, False),
    ],
)
def test_which_splits_gluon_computes(
    queries: int, group_size: int, head_dim: int, block_size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gluon_splits = pytest.importorskip("areno.kernels.paged.gluon_splits")
    if not gluon_splits.HAS_GLUON:
        pytest.skip("this Triton has no Gluon")
    monkeypatch.setattr(gluon_splits.jit, "can_run_gluon", lambda device, name: True)
    monkeypatch.setattr(gluon_splits.jit, "launch_gluon", lambda *args, **options: True)
    q, blocks = torch.zeros(1, queries, head_dim), torch.zeros(2, 3, block_size, 1, head_dim, dtype=torch.bfloat16)
    constants = {"HEADS_PER_KEY": queries, "GROUP_SIZE": group_size, "BLOCK_SIZE": block_size}
    rest = {"arguments": (), "constants": constants, "reads_early": True}
    assert gluon_splits.compute_splits((1, 1), q.bfloat16(), blocks, None, **rest) is expected
    assert not gluon_splits.compute_splits((1, 1), q, blocks.float(), None, **rest)
    assert not gluon_splits.compute_splits((1, 1), q.half(), blocks, None, **rest)
    codes, exponents = blocks.to(torch.float8_e4m3fn), torch.zeros(2, 3, 1, block_size, dtype=torch.uint8)
    assert gluon_splits.compute_splits((1, 1), q.bfloat16(), codes, exponents, **rest) is expected
    monkeypatch.setattr(gluon_splits.jit, "can_run_gluon", lambda device, name: False)
    assert not gluon_splits.compute_splits((1, 1), q.bfloat16(), blocks, (), **rest)
