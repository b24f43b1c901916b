"""Kernels that begin before the one in front of them has ended: what they do until then, and the same results."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from areno.kernels.delta import DeltaStates, DeltaWeights, delta_step
from areno.kernels.paged import decode_attention
from tests.helpers.paged_rows import LENGTHS, cut_into, make_case

pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _signals_stay() -> Iterator[None]:
    """LLVM takes over signals when it compiles. At the next of them it would take handlers of later tests away."""
    yield
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "XCPU", "XFSZ", "SYS"):
        number = signal.Signals[f"SIG{name}"]
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("device", "capability", "expected"), [("cpu", (9, 0), False), ("cuda:0", (8, 9), False), ("cuda:0", (9, 0), True)]
)
def test_which_devices_can_do_it(device: str, capability: tuple[int, int], expected: bool) -> None:
    from areno.kernels import jit

    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        jit.supports_pdl.cache_clear()
        try:
            assert jit.supports_pdl(torch.device(device)) is expected
            assert bool(jit.pdl_options(torch.device(device))) is expected
        finally:
            jit.supports_pdl.cache_clear()


def _compiled(
    kernel: Any, tensors: dict[str, str], numbers: Iterable[str], constants: dict[str, Any]
) -> tuple[set[str], str]:
    """Of a kernel for an H200: which tensors it reads or writes before it waits for the kernel before, on any way
    through it; and the order of reads, writes and waits in its PTX. Needs no device.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**{name: f"*{of}" for name, of in tensors.items()}, **dict.fromkeys(numbers, "i32")}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True})
    assert made.metadata.launch_pdl
    names = {"griddepcontrol.wait": "wait", "griddepcontrol.launch_dependents": "let", "st.global": "write"}
    found = re.findall(r"griddepcontrol\.\w+|ld\.global|st\.global|cp\.async\.c[ag]", made.asm["ptx"])
    pointers = [name for name in kernel.arg_names if name in tensors]
    return _touched_before_waiting(made.asm["ttir"], pointers), " ".join(names.get(each, "read") for each in found)


def _touched_before_waiting(ttir: str, pointers: list[str]) -> set[str]:
    arguments = re.findall(r"(%\w+): !tt\.ptr", ttir)
    base = dict(zip(arguments, pointers, strict=False))  # of each pointer, and of what is computed from it
    touched, waits = set(), []  # by how far they are indented: a wait holds to the end of its block
    for line in ttir.splitlines():
        indent = len(line) - len(line.lstrip())
        while waits and indent < waits[-1]:
            waits.pop()
        if "grid_dependency_wait" in line or "griddepcontrol.wait" in line:
            waits.append(indent)
        elif made := re.match(r"\s*(%\w+) = tt\.(?:addptr|splat|broadcast|expand_dims) (%\w+)", line):
            base[made[1]] = base.get(made[2], "")
        elif not waits and (used := re.search(r"tt\.(?:load|store) (%\w+)", line)):
            touched.add(base[used[1]])
    return touched


@pytest.mark.slow
def test_small_kernels_and_products_of_few_rows_wait_before_they_touch_anything() -> None:
    from areno.kernels.elementwise import triton_heads, triton_norm, triton_swiglu
    from areno.kernels.matmul import triton_few_rows

    halves = dict.fromkeys(["weight_ptr", "normed_ptr"], "bf16")
    before, order = _compiled(
        triton_norm._add_norm_kernel,
        {**dict.fromkeys(["x_ptr", "delta_ptr", "sum_ptr"], "fp32"), **halves},
        ("size",),
        {"eps": 1e-6, "PARTS": 2, "BLOCK": 32, "PLUS_ONE": False, "PDL": True},
    )
    assert not before
    assert re.fullmatch(r"let wait( read){4}( write)+", order)
    before, order = _compiled(
        triton_few_rows._few_rows_kernel,
        dict.fromkeys(["x_ptr", "weight_ptr", "bias_ptr", "out_ptr"], "bf16"),
        ("n_rows", "n_columns", "n_inputs", "span"),
        {"ROWS": 16, "COLUMNS": 32, "INPUTS": 32, "IS_EVEN": False, "IS_GATED": True, "GELU": False, "PDL": True},
    )
    assert not before
    assert re.fullmatch(r"let wait( read)+( write)+", order)
    before, order = _compiled(
        triton_heads._qk_norm_rope_kernel,
        {**dict.fromkeys(["qkv_ptr", "q_ptr", "k_ptr"], "bf16"), "cos_ptr": "fp32", "sin_ptr": "fp32"},
        ("qkv_stride",),
        {"q_weight_ptr": None, "k_weight_ptr": None, "eps": 1e-6, "HEADS": 2, "KV_HEADS": 1, "HALF": 8}
        | {"HEADS_BLOCK": 4, "HALF_BLOCK": 8, "PLUS_ONE": False, "GATED": False, "PDL": True},
    )
    assert not before
    assert re.fullmatch(r"let wait( read)+( write)+", order)
    before, order = _compiled(
        triton_swiglu._swiglu_kernel,
        dict.fromkeys(["gate_up_ptr", "out_ptr"], "bf16"),
        ("inner",),
        {"BLOCK": 64, "GELU": False, "PDL": True},
    )
    assert not before
    assert re.fullmatch(r"let wait( read)+( write)+", order)


def _compiled_gluon(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The intermediate code of a kernel in Gluon for an H200. Arguments without a type are integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": constants["num_warps"], "launch_pdl": True}
    source = GluonASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]


def _descriptor(rows: int) -> str:
    """The type of a descriptor of tiles of `rows` x 64 elements."""
    from areno.kernels.jit import gl

    layout = gl.NVMMASharedLayout.get_default_for([rows, 64], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, 64],{layout!r}>"


@pytest.mark.slow
@pytest.mark.parametrize("is_gated", [False, True])
def test_products_in_gluon_copy_all_of_their_weight_and_nothing_else_before_they_wait(is_gated: bool) -> None:
    gluon_few_rows = pytest.importorskip("areno.kernels.matmul.gluon_few_rows")
    if not gluon_few_rows.HAS_GLUON:
        pytest.skip("this Triton has no Gluon")
    n_tiles, n_x_tiles, n_weights = 5, 3, 1 + is_gated
    given = {"x_desc": _descriptor(64), "weight_desc": _descriptor(32), "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    fixed = {"INPUTS": 64, "TILES": n_tiles, "X_TILES": n_x_tiles, "IS_GATED": is_gated, "GELU": False, "num_warps": 4}
    code = _compiled_gluon(gluon_few_rows._gluon_few_rows_kernel, given, fixed)
    words = (
        r"(launch_dependents)|grid_?dep(?:endency_|control\.)(wait)|local %(x|weight)_desc|(group_dot_wait) "
        r"|tt.(load |store (?=%\w+, %\w+, %))"  # a store with a mask
    )
    order = re.findall(words, code)
    weights, multiplied = ["weight"] * n_tiles * n_weights, "group_dot_wait"
    xs = ["x"] * n_x_tiles + [multiplied, "x"] * (n_tiles - n_x_tiles)
    found = ["".join(each).strip() for each in order]
    assert found == ["launch_dependents", *weights, "wait", *xs, multiplied, "load", "store"]


@pytest.mark.slow
@pytest.mark.parametrize("reads_early", [True, False])
def test_splits_in_gluon_copy_tiles_before_they_wait_if_they_may(reads_early: bool) -> None:
    gluon_splits = pytest.importorskip("areno.kernels.paged.gluon_splits")
    if not gluon_splits.HAS_GLUON:
        pytest.skip("this Triton has no Gluon")
    kernel = gluon_splits._gluon_split_kernel
    given = dict.fromkeys(["k_desc", "v_desc"], _descriptor(16))
    given |= dict.fromkeys(["q_ptr", "new_k_ptr", "new_v_ptr", "k_ptr", "v_ptr"], "*bf16")
    given |= dict.fromkeys(["slots_ptr", "lengths_ptr", "shared_ptr", "split_lens_ptr", "groups_ptr"], "*i64")
    given |= {"table_ptr": "*i32", "partial_ptr": "*fp32", "log_sum_ptr": "*fp32", "scale": "fp32"}
    fixed = {"HEADS_PER_KEY": 2, "GROUP_SIZE": 8, "QUERIES": 16, "BLOCK_SIZE": 32, "STAGES": 2, "ONE_PART": False}
    fixed |= {"READS_EARLY": reads_early, "num_warps": 1, "PDL": True}
    fixed |= {f"{side}_exponents_{what}": None for side in "kv" for what in ("desc", "ptr")}
    code = _compiled_gluon(kernel, given, fixed)
    pointers = [name for name in kernel.arg_names if given.get(name, "").startswith("*")]
    before = {"slots_ptr", "lengths_ptr", "shared_ptr", "split_lens_ptr", "groups_ptr"}
    before |= {"table_ptr"} if reads_early else set()  # needed to copy a tile
    assert _touched_before_waiting(code, pointers) == before
    words = r"(launch_dependents)|grid_?dep(?:endency_|control\.)(wait)|async_tma_copy\w+ %(k|v)_desc|tt\.(store) "
    found = ["".join(each) for each in re.findall(words, code)]
    copies = ["k", "v"] * 2
    first = [*copies, "wait"] if reads_early else ["wait", *copies]
    # The new token's key and value; the copies of the next tiles; the partial result and the logarithm of its sum.
    assert found == ["launch_dependents", *first, "store", "store", "k", "v", "store", "store"]


@pytest.mark.slow
def test_attention_waits_behind_the_loads_that_need_nothing_and_before_all_others() -> None:
    from areno.kernels.paged import triton as paged

    ints = {"lengths_ptr": "i64", "shared_ptr": "i64", "split_lens_ptr": "i64"}
    partial = {"partial_ptr": "fp32", "log_sum_ptr": "fp32"}
    halves = dict.fromkeys(["q_ptr", "new_k_ptr", "new_v_ptr", "k_ptr", "v_ptr"], "bf16")
    numbers = (
        "q_stride",
        "new_k_stride",
        "new_v_stride",
        "stride",
        "table_stride",
        "n_group_splits",
        "own_splits",
        "shared_splits",
    )
    constants = {
        "scale": 1.0,
        "HEADS_PER_KEY": 1,
        "OWN_ROWS": 16,
        "GROUP_ROWS": 16,
        "HEAD_DIM": 16,
        "PADDED_DIM": 16,
        "BLOCK_SIZE": 32,
        "ONE_PART": False,
        "PDL": True,
    }
    pieces = {**ints, **partial, **halves, "table_ptr": "i32", "slots_ptr": "i64"}
    for window in (None, 40):
        before, piece = _compiled(
            paged._split_kernel,
            pieces,
            numbers,
            {**constants, "WINDOW": window, "groups_ptr": None, "GROUP_SIZE": 1, "HAS_GROUPS": False},
        )
        assert before == {*ints, "slots_ptr"}
        assert re.match(r"let (read ){4}wait read", piece)
        assert piece.count("wait") == 1
        before, piece = _compiled(
            paged._split_kernel,
            {**pieces, "groups_ptr": "i64"},
            numbers,
            {**constants, "WINDOW": window, "GROUP_SIZE": 2, "HAS_GROUPS": True},
        )
        assert before == {*ints, "slots_ptr", "groups_ptr"}
        assert piece.count("wait") == 2  # of a group's piece, and of a row's

    before, join = _compiled(
        paged._combine_splits_kernel,
        {**ints, **partial, "out_ptr": "bf16"},
        ("n_heads", "n_parts", "own_splits"),
        {"HEAD_DIM": 32, "PADDED_DIM": 32, "MAX_PARTS": 2, "JOIN_HEADS": 4, "PDL": True},
    )
    assert before == set(ints)
    assert re.fullmatch(r"(read ){4}let wait( read)+( write)+", join)


def test_the_delta_rule_waits_behind_the_loads_that_need_nothing_and_before_all_others() -> None:
    from areno.kernels.delta import triton as triton_step

    gates = dict.fromkeys(["proj_ptr", "A_log_ptr", "bias_ptr"], "bf16")
    states = {"matrices_ptr": "fp32", "slots_ptr": "i64"}
    before, head = _compiled(
        triton_step._head_kernel,
        {**gates, **states, "norm_ptr": "bf16", "mixed_ptr": "fp32", "out_ptr": "bf16"},
        ("proj_size", "n_channels", "n_heads", "shared", "n_key"),
        {"eps": 1e-6, "scale": 0.25, "KEY": 16, "VALUE": 32, "KEY_BLOCK": 16, "COLUMNS": 16, "PDL": True},
    )
    assert before == {*gates, *states}
    assert re.fullmatch(r"let( read)+ wait( read)+( write)+", head)

    before, norm = _compiled(
        triton_step._gated_norm_kernel,
        dict.fromkeys(["out_ptr", "proj_ptr", "norm_ptr", "normed_ptr"], "bf16"),
        ("n_lines",),
        {"eps": 1e-6, "CHANNELS": 64, "HEADS": 2, "VALUE": 16, "BLOCK": 16, "LINES": 32, "PDL": True},
    )
    assert before == {"proj_ptr", "norm_ptr"}
    assert re.fullmatch(r"(read )+wait( read)+( write)+", norm)


@pytest.mark.slow
def test_adapters_wait_behind_the_loads_that_need_nothing_and_before_all_others() -> None:
    from areno.kernels.adapters import triton as adapters

    halves = dict.fromkeys(["out_ptr", "h_ptr", "b_ptr"], "bf16")
    sizes = {"scaling": 2.0, "RANK": 70, "ROWS": 16, "COLUMNS": 128, "INPUTS": 64, "PDL": True}
    before, add = _compiled(
        adapters._add_lora_kernel,
        {**halves, "y_ptr": "bf16", "tiles_ptr": "i32"},
        ("n_rows", "y_stride", "out_stride", "h_stride"),
        sizes,
    )
    assert before == {"b_ptr", "tiles_ptr"}
    assert re.match(r"(read ){5,}wait read", add)
    before, swiglu = _compiled(
        adapters._swiglu_stacked_kernel,
        {**halves, "both_ptr": "bf16"},
        ("n_rows", "both_stride", "n_inner", "gate_row", "up_row"),
        {**sizes, "GATE_H": 0, "UP_H": 70, "GELU": False},
    )
    assert before == {"b_ptr"}
    assert re.match(r"(read )+wait read", swiglu)
    for each in (add, swiglu):
        assert each.count("wait") == 1
        assert each.index("wait") < each.index("write")


def _replayed(body: Callable[[], Tensor], changed: list[Tensor], steps: list[Callable[[], object]]) -> list[Tensor]:
    """The results of a CUDA graph of the body, replayed after each step; and the tensors that it changes."""
    before = [each.clone() for each in changed]
    body()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    for each, old in zip(changed, before, strict=True):
        each.copy_(old)
    results = []
    for step in steps:
        step()
        graph.replay()
        results.append(out.clone())
    results += [each.clone() for each in changed]
    for each, old in zip(changed, before, strict=True):
        each.copy_(old)
    return results


def _compare(body: Callable[[], Tensor], changed: list[Tensor], steps: list[Callable[[], object]]) -> None:
    from areno.kernels import jit

    assert jit.supports_pdl(changed[0].device) or torch.cuda.get_device_capability() < (9, 0)
    found = _replayed(body, changed, steps)
    with mock.patch.object(jit, "supports_pdl", return_value=False):
        expected = _replayed(body, changed, steps)
    for mine, plain in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("reads_early", [False, True])
@pytest.mark.parametrize("span", [32, 256])
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_layers_whose_kernels_begin_early_give_the_same_bits(kv_heads: int, span: int, reads_early: bool) -> None:
    from areno.kernels.elementwise.triton_heads import qk_norm_rope
    from areno.kernels.elementwise.triton_norm import add_rms_norm
    from areno.kernels.elementwise.triton_swiglu import swiglu

    heads, dim, hidden, n_layers = 16, 128, 512, 6
    cases = [make_case(heads, kv_heads, dim, 32, torch.bfloat16, "cuda")[3:] for _ in range(n_layers)]
    batch = cut_into(cases[0][1], span, span)
    batch.pdl, batch.reads_early = True, reads_early
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    x_BD, weight_C, n_rows = draw(len(LENGTHS), hidden), draw(dim), len(LENGTHS)
    qkv = [draw((heads + 2 * kv_heads) * dim, hidden) * hidden**-0.5 for _ in cases]
    out = [draw(hidden, heads * dim) * (heads * dim) ** -0.5 for _ in cases]
    gate_up, down, norm_D = draw(2 * hidden, hidden) * hidden**-0.5, draw(hidden, hidden) * hidden**-0.5, draw(hidden)
    cos, sin = (torch.rand(n_rows, 1, dim // 2, generator=generator, device="cuda") for _ in range(2))

    def body() -> Tensor:
        stream_BD, delta_BD = x_BD.float(), None
        for (pages, _), qkv_XD, out_DQ in zip(cases, qkv, out, strict=True):
            stream_BD, normed_BD = add_rms_norm(stream_BD, delta_BD, norm_D, 1e-6)
            given = normed_BD @ qkv_XD.T, cos, sin, weight_C, weight_C, 1e-6, heads, kv_heads, dim
            attended = decode_attention(*qk_norm_rope(*given), pages, batch)
            stream_BD, normed_BD = add_rms_norm(stream_BD, attended.flatten(1) @ out_DQ.T, norm_D, 1e-6)
            delta_BD = swiglu(normed_BD @ gate_up.T) @ down.T
        return stream_BD

    lengths = batch.lengths_B.clone()
    shorter = torch.minimum(lengths, (lengths - 40).maximum(batch.shared_lens_B + 1))
    steps = [lambda to=to: batch.lengths_B.copy_(to) for to in (lengths, shorter, lengths)]
    _compare(body, [pages for pages, _ in cases], steps)


@pytest.mark.gpu
def test_a_step_of_the_delta_rule_that_begins_early_gives_the_same_bits() -> None:
    n_rows, heads, key_heads, dim, n_layers = 40, 4, 2, 128, 4
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    channels, inner = (2 * key_heads + heads) * dim, heads * dim
    weights = DeltaWeights(draw(channels, 4), draw(heads), draw(heads), draw(dim), 1e-6, key_heads)
    given = [draw(channels + inner + 2 * heads, inner) * inner**-0.5 for _ in range(n_layers)]
    states = [
        DeltaStates(draw(n_rows + 1, channels, 3), draw(n_rows + 1, heads, dim, dim).float()) for _ in range(n_layers)
    ]
    slots_B, x_BI = torch.randperm(n_rows + 1, generator=generator, device="cuda")[:n_rows], draw(n_rows, inner)

    def body() -> Tensor:
        out_BI = x_BI
        for given_PI, state in zip(given, states, strict=True):
            out_BI = delta_step(out_BI @ given_PI.T, weights, state, slots_B)
        return out_BI

    _compare(body, [each for state in states for each in state], [lambda: None] * 3)
