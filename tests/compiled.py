"""Compiles the kernels of areno for a GPU without one: as they are launched by commands that run here on the CPU.

    python -m tests.compiled 90 bfloat16                                      # an H200
    python -m tests.compiled 75 float32 "step --shape tiny --dtype float32"   # one command for a T4

The interpreter of Triton shows what kernels compute. It does not show whether they compile: it takes variables that
change their type, and tests give it float32 where a GPU has bfloat16. Here a launch compiles its kernel and computes
nothing, and new tensors hold zeros. So all that a rollout and a training step launch is met in seconds.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

KERNELS = Path(__file__).parents[1] / "areno" / "kernels"
SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability -> KiB of shared memory that a program may have, of the CUDA programming guide."""
FP8_CAPABILITY = 89
SIZES = "--prompts 2 --samples 4 --prompt-len 200 --new-tokens 6 --repeats 1"
COMMANDS = [
    f"step --shape tiny --dtype bfloat16 {SIZES} --record",
    f"step --shape tiny --dtype bfloat16 {SIZES} --lora-rank 8",
    f"rollout --shape tiny --dtype bfloat16 {SIZES} --exact",
    f"train --shape tiny --dtype bfloat16 {SIZES} --exact",
    f"train --shape tiny --dtype bfloat16 {SIZES} --optimizer adam_8bit --share-prefixes on",
    f"train --shape tiny --dtype bfloat16 {SIZES} --optimizer adam_bf16",
    f"sampling --shape tiny --dtype bfloat16 {SIZES}",
    f"step --shape tiny-moe --dtype bfloat16 {SIZES}",
    f"step --shape tiny-moe --dtype bfloat16 {SIZES} --lora-rank 8",
    f"step --shape tiny-qwen3.5 --dtype bfloat16 {SIZES} --lora-rank 8",
]


class Gpu:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(capability: int) -> tuple[dict[str, int], list[str]]:
    """Make launches compile for a GPU from here on. Returns what grows: how often each kernel was compiled, and errors.

    A kernel that asks for more shared memory than the GPU has is an error, too.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from areno.engine import exact
    from areno.kernels import backend
    from areno.kernels.fp8 import triton  # noqa: F401  # learns now that Triton itself is not interpreted

    driver.set_active(Gpu(capability))  # type: ignore[arg-type]
    backend.is_triton_interpreted = lambda: True  # Triton itself must not
    compile_, seen, counts, errors = JITFunction.run, set(), dict[str, int](), list[str]()
    layouts: dict[int, str] = {}  # number of columns -> how they are divided over threads

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        types = [of.dtype if isinstance(of, torch.Tensor) else of for of in args]
        key = repr((self.fn.__module__, self.fn.__name__, types, sorted(kwargs.items())))
        if key in seen:
            return
        seen.add(key)
        counts[self.fn.__name__] = counts.get(self.fn.__name__, 0) + 1
        try:
            made = compile_(self, *map(_without_data, args), grid=grid, warmup=True, **kwargs)
            kib = made.metadata.shared / 1024
            if kib > SHARED[capability]:
                raise MemoryError(f"{kib:.0f} KiB of shared memory, and there are {SHARED[capability]}: {kwargs}")
            if "_gluon_" in self.fn.__name__ and not kwargs.get("launch_pdl"):
                raise ValueError("does not begin early")
            if "fixed_order" in self.fn.__module__ and "kWidth = 4" in made.asm["ttgir"]:
                raise ValueError("adds the products of FP8 keys and values in another order than training does")
            if self.fn.__name__ == "_softmax_statistics_kernel":
                [layout] = re.findall(r"#ttg\.blocked<.*>", made.asm["ttgir"])
                if layouts.setdefault(args[4], layout) != layout:
                    raise ValueError(f"sums {args[4]} columns in two orders: {layout} and {layouts[args[4]]}")
            if "\t.loc\t" in made.asm["ptx"]:
                raise ValueError("has line numbers of the source, which take a quarter of the time to compile")
        except Exception as error:
            errors.append(f"{self.fn.__module__}.{self.fn.__name__}: {error}")

    JITFunction.run = run
    _fill_new_tensors()
    math.isfinite = lambda _: True  # no sample fails and no update is skipped for numbers that nothing has computed
    # Products of the CPU fill up their rows, which kernels do not expect.
    exact.row_multiple, exact._check_products_on_cpu, exact._check_adapter = lambda: 1, lambda *_: None, lambda *_: None
    return counts, errors


def _without_data(argument: Any) -> Any:
    """A tensor as Triton's compiler may see it without its device; it lies at a multiple of 16 bytes."""
    from triton.runtime.jit import MockTensor

    return MockTensor(argument.dtype) if isinstance(argument, torch.Tensor) else argument


def _fill_new_tensors() -> None:
    def with_zeros(zeros: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, memory_format=None, **kwargs: zeros(*args, **kwargs)

    torch.empty, torch.empty_like = with_zeros(torch.zeros), with_zeros(torch.zeros_like)
    torch.Tensor.new_empty = with_zeros(torch.Tensor.new_zeros)


def launch_in_fp8(dtype: torch.dtype) -> None:
    from areno.kernels import jit
    from areno.kernels.fp8 import triton as fp8
    from areno.kernels.paged import decode_attention, load_rows, store_rows
    from tests.helpers.paged_rows import make_case

    x = torch.zeros(16, 128, dtype=dtype)
    codes, exponents = fp8.quantize_rows(x)
    fp8.dequantize_rows(codes, exponents, dtype)
    fp8.round_rows(x)
    fp8.transpose(codes)
    fp8.quantize_columns(x, 16)
    for heads, fixed_order in product((4, 8), (False, True)):
        dim = 32 if fixed_order and heads == 4 else 128  # 32 rows of a product are too few for Hopper's instructions
        q, k, v, blocks, batch = make_case(heads, 2, dim, 64, dtype)
        cache = torch.zeros(blocks.shape, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(*blocks.shape[:2], 2, 64, dtype=torch.uint8)
        alone = replace(batch, prefix_groups_GR=None, fixed_order=fixed_order, pdl=True)
        window = 16 if fixed_order == (heads == 8) else None  # any two of the three meet in all their forms
        with mock.patch.object(jit, "pdl_options", return_value={"PDL": True, "launch_pdl": True}):
            decode_attention(q, k, v, cache, alone, window, scales)
        store_rows(k, v, cache, scales, torch.arange(len(k)))
        load_rows(cache, scales, torch.arange(len(k)), dtype)


def launch_alone(dtype: torch.dtype, capability: int) -> None:
    """Kernels that no command launches without GPUs."""
    from areno.kernels import jit
    from areno.kernels.elementwise.triton_gate import add_gated, add_gated_backward
    from areno.kernels.experts import (
        BiasedClamp,
        choose_experts,
        combine,
        expert_glu,
        expert_load,
        expert_weights,
        group_by_expert,
        weighted_glu_backward,
    )
    from areno.kernels.fixed_order import packed_attention
    from areno.kernels.logprobs import triton as logprobs
    from areno.kernels.matmul import fixed_order_matmul, gluon_few_rows
    from areno.kernels.matmul import triton_few_rows as few_rows
    from areno.kernels.padding import CuSeqlens
    from areno.kernels.paged import decode_attention
    from areno.kernels.sampling import (
        CONTEXT,
        NgramTable,
        SamplingFlags,
        draft_tokens,
        sample_slots,
        triton_head,
    )
    from areno.kernels.sampling.triton import sample_columns
    from areno.kernels.symmetric_memory import triton as symmetric_memory
    from areno.types import SamplingParams
    from tests.helpers.paged_rows import SHAPES, make_case
    from tests.helpers.slot_samplers import settings_of

    logits, norm = torch.zeros(4, 300), torch.zeros(2, 4)
    for kind in ("forward_kl", "reverse_kl", "jsd", "tv"):
        sums = logprobs.divergence_sums(logits, logits, norm, norm, 1.0, kind, 0.5)
        grad = torch.zeros(4, 300, dtype=dtype)
        logprobs.divergence_gradient(logits, logits, norm, norm, sums[1], 1.0, kind, 0.5, grad)
    for heads, kv_heads, dim, block_size in SHAPES:
        *qkv, blocks, batch = make_case(heads, kv_heads, dim, block_size, dtype)
        decode_attention(*qkv, blocks, batch, window=16)
        sinks, rows = torch.zeros(heads, dtype=dtype), torch.tensor([0, len(qkv[0])], dtype=torch.int32)
        for fixed_order in (False, True) if dim == 64 else ():  # with 128, a T4 lacks shared memory for float32
            alone = replace(batch, prefix_groups_GR=None, fixed_order=fixed_order)
            decode_attention(*qkv, blocks, alone, sinks_H=sinks)
            packed_attention(*qkv, CuSeqlens(rows, rows, len(qkv[0]), len(qkv[0])), None, sinks)
    some = torch.zeros(16, 128, dtype=dtype)
    fixed_order_matmul(some, some, dtype)
    _launch_softmax_of_two_ranks()
    edited = SamplingParams(min_new_tokens=4, frequency_penalty=0.5)
    sampler, slots = settings_of(5, 300, [edited] * 4, "cpu", ((0, 290),))
    every = SamplingFlags(filtered=True, n_banned=sampler.tensors.banned.shape[1], penalized=True)
    for flags in (SamplingFlags(), SamplingFlags(filtered=True), every):
        sample_slots(logits, slots, slots, sampler.tensors, flags)
    sample_columns(logits, 300, slots, slots, sampler.tensors, SamplingFlags(), 0, lambda x: torch.stack((x, x)))
    cases = [((), 32, False), ((), 128, False), ((), 128, capability == 90), (((0, 290),), 32, False)]
    for texts, n_rows, by_tma in cases:  # small and large tiles
        sampler, slots = settings_of(n_rows + 1, 300, [SamplingParams()] * n_rows, "cpu", texts)
        with mock.patch.object(triton_head, "_can_use_tma", return_value=by_tma):
            hidden, weight = some.repeat(n_rows // 16, 1), some.repeat(20, 1)[:300]
            triton_head.sample_hidden(hidden, weight, slots, slots, sampler.tensors)
    contexts = torch.zeros(CONTEXT, n_rows, dtype=torch.int64)
    draft_tokens(NgramTable.empty(8, contexts.device), contexts, slots, slots, slots, sampler.tensors, 3)
    if _has_few_rows(capability, str(dtype).removeprefix("torch.")):
        few_rows.n_multiprocessors = gluon_few_rows.n_multiprocessors = lambda _: 132
        for has_gluon in {False, capability == 90 and jit.HAS_GLUON}:
            jit.can_run_gluon = lambda *_, found=has_gluon: found
            sizes = product((4, 64), [(1024, 1024), (1024, 3072)]) if has_gluon else [(4, (50, 100)), (64, (96, 128))]
            for n_rows, size in sizes:
                x, weight = torch.zeros(n_rows, size[1], dtype=dtype), torch.zeros(size, dtype=dtype)
                few_rows.few_rows_matmul(x, weight, weight[:, 0].contiguous())
                few_rows.partial_products(x, weight)
                for gelu in (False, True):
                    few_rows.gated_product(x, weight, gelu)
            for size, dim in ((1, 64), (2, 128)):
                *qkv, blocks, batch = make_case(2 * size, 2, dim, 32, dtype)
                alone = replace(batch, prefix_groups_GR=None)
                with mock.patch.object(jit, "pdl_options", return_value={"PDL": True, "launch_pdl": True}):
                    # Any two of groups, early reads and size meet in all their forms.
                    for of_groups, reads_early in ((batch, size == 1), (alone, size == 2)):
                        decode_attention(*qkv, blocks, replace(of_groups, pdl=True, reads_early=reads_early))
    choose_experts(torch.zeros(16, 128), 8, True, torch.zeros(128), 2.5)
    chosen, weights = choose_experts(torch.zeros(16, 32), 4, True)
    group_by_expert(chosen.repeat(150, 1), 0, 32)
    logits = torch.zeros(16, 32, requires_grad=True)
    for sigmoid in (False, True):
        expert_weights(logits, chosen, True, sigmoid).sum().backward()
        expert_load(logits.detach(), chosen, chosen if sigmoid else None, sigmoid, 12, torch.zeros(12))
    groups, biases = group_by_expert(chosen, 0, 32), (torch.zeros(32, 128, dtype=dtype), chosen)
    copies, of_glu = some.repeat(4, 1), (groups.ends_E, BiasedClamp(torch.zeros(32, 128, dtype=dtype), 1.7, 7.0))
    combine(copies, groups.copies_Nk, weights, groups.ends_E, *biases)
    expert_glu(copies, *of_glu)
    weighted_glu_backward(copies[:, :64], copies, weights, groups.choices_M, *of_glu)
    add_gated(some, some, logits[:, :1].detach())
    add_gated_backward(some, some, logits[:, :1].detach())
    if capability >= FP8_CAPABILITY:
        launch_in_fp8(dtype)
    numbers = torch.zeros(4, 16, dtype=torch.int32)
    shared = symmetric_memory.PeerBuffers(
        rank=0, size=2, inboxes=1 << 40, turns=numbers, outboxes=1 << 40, signals=1 << 40, counts=numbers
    )
    symmetric_memory.all_reduce(some, shared)
    symmetric_memory.all_reduce(some.float(), shared)
    symmetric_memory.add_and_norm(some, some, some[0], 1e-6, False, shared)
    symmetric_memory.all_gather(numbers, shared)


def _launch_softmax_of_two_ranks() -> None:
    """What training computes, and rollout from gathered logits, whose rows alone lie at multiples of 16 elements."""
    from areno.kernels.logprobs import triton as logprobs
    from tests.helpers.exact_logits import logits_to_score

    columns, targets = 8 * 513, torch.zeros(4, dtype=torch.int64)
    scored = logits_to_score(torch.zeros(4, 2 * columns)[:, columns:], columns)
    for logits in (torch.zeros(4, columns), scored):
        logprobs.softmax_statistics(logits, targets, columns, torch.ones(4))


def kernels_of(folder: Path) -> Iterator[str]:
    """The names of the kernels in the files of a folder."""
    for path in sorted(folder.rglob("*.py")):
        yield from re.findall(r"^ *@(?:kernel|gluon\.jit).*?^ *def (_\w+_kernel)\(", path.read_text(), re.M | re.S)


def _has_few_rows(capability: int, dtype: str) -> bool:
    """Products of few rows need PDL, much shared memory and half precision."""
    return capability >= 90 and dtype == "bfloat16"


def main(capability: str, dtype: str, *commands: str) -> int:
    assert os.environ.get("TRITON_INTERPRET") != "1"
    counts, errors = compile_launches(int(capability))
    from areno.bench import __main__ as bench
    from areno.bench.device import Rates
    from benchmarks.__main__ import main as run_benchmark

    # The rates of this CPU in bfloat16 would take ten times as long as all kernels.
    bench.measured_rates = lambda *_: Rates(copy_bytes_s=1e10, matmul_flops_s=1e11)
    for command in commands or [command.replace("bfloat16", dtype) for command in COMMANDS]:
        print(f"python -m benchmarks {command}", flush=True)
        run_benchmark(command.split())
    launch_alone(getattr(torch, dtype), int(capability))
    print(f"{sum(counts.values())} launches of {len(counts)} kernels compiled")
    from areno.kernels import jit

    expected = set(kernels_of(KERNELS))
    if int(capability) < FP8_CAPABILITY:
        expected -= {
            f"_{name}_kernel"
            for name in (
                "quantize",
                "largest_of_columns",
                "quantize_columns",
                "dequantize",
                "round",
                "transpose",
                "store",
                "load",
            )
        }
    if not _has_few_rows(int(capability), dtype):
        expected.discard("_few_rows_kernel")
    if capability != "90" or dtype != "bfloat16" or not jit.HAS_GLUON:
        expected -= {"_gluon_few_rows_kernel", "_gluon_split_kernel"}
    print("not launched:", " ".join(sorted(expected - set(counts))))
    for error in errors:
        print(error, file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
