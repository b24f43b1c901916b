"""Chooses matrix-product kernels that give a row the same bits for any number of rows (batch-invariant kernels).

The setting `engine.exact` requires this property. Attention has it with the backend "fixed_order". Elementwise
operations and norms always have it, because they compute each row separately. Matrix products often lack it, because
the library (cuBLAS on a GPU) chooses its kernel by the number of rows, and some kernels split the sum over the input
features. When a model is loaded, this module tests how the installed library computes products, and chooses the kernels
for the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from areno.config.fp8 import SIZE_MULTIPLE
from areno.errors import EngineError, Key
from areno.kernels.adapters import add_lora
from areno.kernels.backend import can_use_triton
from areno.kernels.fixed_order import row_multiple
from areno.kernels.fp8.int8 import Int8Matrix
from areno.kernels.fp8.matmul import QuantizedMatrix
from areno.kernels.matmul import FixedOrderMatmul
from areno.layers.adapter import Adapter
from areno.layers.embedding import VocabParallelEmbedding
from areno.layers.linear import Linear
from areno.layers.mlp import ExpertMLP
from areno.layers.norm import ShardedRMSNorm
from areno.models.quantization import quantized_linears
from areno.models.transformer import Transformer

Product = Callable[[Tensor], Tensor]

_CPU_SIZES = (1, 2, 3, 4, 7, 16)  # numbers of rows to test, in units of `row_multiple`
_CUDA_ROWS = 8192
_TIMED, _REPEATS = (8, 16, 32, 64, 128, 256), 10
_UNTIMED = 64  # rows up to which Triton is assumed to be faster, if the choice may not depend on timings
# The library may split the sums of 100 rows, but not those of 96 or 128. So all small numbers of rows are tested.
_CUDA_SIZES = (*range(1, 513), *range(513, 2048, 61), 2048, 4096)
_FP8_MULTIPLES = (64, 128, 256, 512)  # of rows, of which the first that keeps the bits is taken


@torch.no_grad()
def make_exact(model: Transformer, timed: bool = True) -> str:
    """Test a model's matrix products, and choose kernels that give each row the same bits for any number of rows.

    If several kernels give the same bits, `timed` measures which is faster. Without `timed`, a fixed rule decides, so
    the choice is the same in every run. Returns a description of the chosen kernels. Raises EngineError if no kernel
    fits.
    """
    if model.config.delta is not None:
        raise EngineError(
            "{} is not supported for a model with recurrent states, which training computes in chunks and decoding "
            "token by token; set it to false",
            Key("engine.exact"),
        )
    if model.routing is not None and model.device.type != "cpu":
        raise EngineError(
            "{} is not supported on {} for a model with experts, whose products have no fixed order there; set it to "
            "false",
            Key("engine.exact"),
            model.device.type,
        )
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    products = [module for module in model.modules() if isinstance(module, _PRODUCTS)]
    in_fp8 = [module for module in quantized_linears(model) if _is_in_fp8(module)]
    of_fp8 = {module.weight.shape: module for module in in_fp8}
    modules = {module.weight.shape: module for module in products if not _is_in_fp8(module)}
    if model.device.type == "cpu":
        model.row_multiple = row_multiple()
        for module in (*modules.values(), *of_fp8.values()):
            _check_products_on_cpu(_product_of(module), module.weight, model.row_multiple)
        mixtures = [module for module in model.modules() if isinstance(module, ExpertMLP)]
        for mixture in mixtures:
            mixture.row_multiple = model.row_multiple
        for matrices in (mixtures[0].experts_gate_up, mixtures[0].experts_down) if mixtures else ():
            adapter = matrices.adapter
            of_adapter = () if adapter is None else (adapter.a_ErI[0], adapter.b_EOr[0])
            for expert_OI in (matrices.stack_EOI[0], *of_adapter):
                _check_products_on_cpu(partial(nn.functional.linear, weight=expert_OI), expert_OI, model.row_multiple)
        _check_adapters(adapters, model.row_multiple)
        return f"products of {model.row_multiple} rows at a time"
    if model.tp.size > 1 and any(isinstance(module, ShardedRMSNorm) for module in model.modules()):
        raise EngineError(
            "{} cannot be kept for this model on several GPUs, which divide its norms over all queries of a token; "
            "set it to false, or {} to 1",
            Key("engine.exact"),
            Key("engine.tp_size"),
        )
    found = {shape: _choose_fixed_order_matmul(module, timed) for shape, module in modules.items()}
    for module in products:
        if isinstance(matrix := _matrix_of(module), Int8Matrix):
            matrix.fixed_order = found[module.weight.shape]
        elif not _is_in_fp8(module):
            module.fixed_order = found[module.weight.shape]
    multiples = {shape: _choose_row_multiple(module) for shape, module in of_fp8.items()}
    for module in in_fp8:
        assert module.quantized is not None
        module.quantized.row_multiple = multiples[module.weight.shape]
    for adapter in adapters:
        adapter.in_order = can_use_triton(adapter.a)
    _check_adapters(adapters, 1)
    plain = [
        f"without a split up to {max(how.triton_rows, how.library_rows)} rows ({o}x{i}, {how.triton_rows} of them by "
        "Triton)"
        for (o, i), how in found.items()
    ]
    padded = [f"in FP8 of {multiple} rows at a time ({o}x{i})" for (o, i), multiple in multiples.items()]
    return "products " + ", ".join([*plain, *padded])


def _check_adapters(adapters: list[Adapter], multiple: int) -> None:
    for adapter in {(each.a.shape, each.b.shape): each for each in adapters}.values():
        _check_adapter(adapter, multiple)


def _check_adapter(adapter: Adapter, multiple: int) -> None:
    """Raise EngineError if the results of rows depend on how many rows are computed together."""
    x_NI, b_SR = _random_input(multiple * _CPU_SIZES[-1], adapter.a), _random_input(len(adapter.b), adapter.b)
    n_columns = max(column + size for column, _, size in adapter.slices)

    def add_adapter(n_rows: int) -> Tensor:
        h_NR, y_NO = adapter.project_a(x_NI[:n_rows]), x_NI.new_zeros(n_rows, n_columns)
        return add_lora(y_NO, h_NR, b_SR, adapter.slices, adapter.tiles, adapter.scaling)

    all_NO = add_adapter(len(x_NI))
    for n_rows in (size * multiple for size in _CPU_SIZES):
        if not torch.equal(add_adapter(n_rows), all_NO[:n_rows]):
            raise EngineError(
                "{} cannot be kept on this machine: what an adapter of rank {} adds to {} rows differs in its last "
                "bits from the same rows in a larger product; set it to false",
                Key("engine.exact"),
                adapter.rank,
                n_rows,
            )


_PRODUCTS = (Linear, VocabParallelEmbedding)


def _matrix_of(module: nn.Module) -> QuantizedMatrix | None:
    return module.quantized if isinstance(module, Linear) else None


def _is_in_fp8(module: nn.Module) -> bool:
    """Return whether a product rounds its inputs to FP8, and does not only read a weight in 8 bits."""
    matrix = _matrix_of(module)
    return matrix is not None and not isinstance(matrix, Int8Matrix)


def _product_of(module: Linear | VocabParallelEmbedding) -> Product:
    if isinstance(module, Linear) and module.quantized is not None:
        return module.matmul
    return partial(nn.functional.linear, weight=module.weight)


def _weight_of(module: Linear | VocabParallelEmbedding) -> Tensor:
    matrix = _matrix_of(module)
    return module.weight if matrix is None else matrix.dequantized(module.weight.dtype)


def _choose_row_multiple(module: Linear) -> int:
    """Return to which multiple of rows FP8 products are padded on CUDA, so that a row's bits depend on no other row.

    Raises EngineError if there is none.
    """
    matrix, x_NI = module.quantized, _random_input(_CUDA_ROWS, module.weight)
    assert matrix is not None
    if not matrix.uses_units(x_NI):
        raise EngineError(
            "{} cannot be kept: FP8 products with a matrix of {} in {} are emulated, in no fixed order; FP8 units need "
            "bfloat16 and sizes that are multiples of {}. Set it to false, or name the layer in {}",
            Key("engine.exact"),
            tuple(module.weight.shape),
            str(module.weight.dtype).removeprefix("torch."),
            SIZE_MULTIPLE,
            Key("actor.fp8_config.exclude_modules"),
        )
    for multiple in _FP8_MULTIPLES:
        padded = replace(matrix, row_multiple=multiple)
        all_NO = padded.matmul(x_NI)
        sizes = {n + -n % multiple for n in _CUDA_SIZES}
        if not torch.stack([(padded.matmul(x_NI[:n]) != all_NO[:n]).any() for n in sizes]).any():
            return multiple
    raise EngineError(
        "{} cannot be kept on this machine: an FP8 product with a matrix of {} differs in its last bits from the same "
        "rows in a larger product; set it to false, or name the layer in {}",
        Key("engine.exact"),
        tuple(module.weight.shape),
        Key("actor.fp8_config.exclude_modules"),
    )


def _check_products_on_cpu(product: Product, weight_OI: Tensor, multiple: int) -> None:
    x_NI = _random_input(multiple * _CPU_SIZES[-1], weight_OI)
    all_NO = product(x_NI)
    for size in _CPU_SIZES:
        rows = slice(0, size * multiple)
        if not torch.equal(product(x_NI[rows]), all_NO[rows]):
            raise EngineError(
                "{} cannot be kept on this machine: a product of {} rows with a matrix of {} differs in its last bits "
                "from the same rows in a larger product; set it to false",
                Key("engine.exact"),
                rows.stop,
                tuple(weight_OI.shape),
            )


def _choose_fixed_order_matmul(module: Linear | VocabParallelEmbedding, timed: bool) -> FixedOrderMatmul:
    """Choose the kernels for products with a weight on CUDA, so that every sum has one fixed order.

    If the library (cuBLAS) never splits a sum, it computes all products. Otherwise products of few rows need another
    kernel: the library without split-K, or Triton. A kernel is suitable if it gives the same bits as the library gives
    for the same rows in a product of many rows. If both kernels are suitable, the number of rows decides: by measured
    times if `timed`, otherwise by a fixed limit. If none is suitable, Triton computes all products. Raises EngineError
    if Triton is needed and missing.
    """
    x_NI, weight_OI = _random_input(_CUDA_ROWS, module.weight), _weight_of(module)
    dtype = module.matmul(x_NI[:1]).dtype
    as_ever = FixedOrderMatmul()
    all_NO = as_ever(x_NI, weight_OI, dtype)

    def sizes_that_differ(product: FixedOrderMatmul) -> list[int]:
        differs = [(product(x_NI[:n], weight_OI, dtype) != all_NO[:n]).any() for n in _CUDA_SIZES]
        return [n for n, is_other in zip(_CUDA_SIZES, torch.stack(differs).tolist(), strict=True) if is_other]

    def seconds(product: FixedOrderMatmul, n_rows: int) -> float:
        return _shortest_time(lambda: product(x_NI[:n_rows], weight_OI, dtype))

    if not (split := sizes_that_differ(as_ever)):
        return as_ever
    by_library, by_triton = FixedOrderMatmul(library_rows=split[-1]), FixedOrderMatmul(triton_rows=split[-1])
    library_can = not sizes_that_differ(by_library)
    if not can_use_triton(x_NI):
        if library_can:
            return by_library
        raise EngineError(
            "{} needs triton, since a product of {} rows differs in its last bits from the same rows in a larger one; "
            "pip install triton, or set it to false",
            Key("engine.exact"),
            split[-1],
        )
    if sizes_that_differ(by_triton):  # its own bits for all, where they are not the library's
        return by_library if library_can else FixedOrderMatmul(triton_rows=sys.maxsize)
    if not library_can:
        return by_triton
    if not timed:
        return FixedOrderMatmul(min(_UNTIMED, split[-1]), split[-1])
    slower = (n for n in _TIMED if n <= split[-1] and seconds(by_library, n) < seconds(by_triton, n))
    return FixedOrderMatmul(next(slower, split[-1] + 1) - 1, split[-1])


def _shortest_time(run: Callable[[], object]) -> float:
    """Return the shortest of several times of `run`, since other work on the device only adds time."""
    run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_REPEATS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return min(begin.elapsed_time(end) for begin, end in events) / 1e3


def _random_input(n_rows: int, weight_OI: Tensor) -> Tensor:
    generator = torch.Generator(weight_OI.device).manual_seed(0)
    shape = (n_rows, weight_OI.shape[1])
    return torch.randn(shape, generator=generator, device=weight_OI.device).to(weight_OI.dtype)
