"""The kernels of the delta rule in chunks, interpreted or on a GPU, against the reference in float64 under autograd."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from areno.kernels.delta import RowChunks
from areno.kernels.delta.reference import chunked_delta
from tests.helpers.interpreted import run_interpreted

# Operands of products have 11, 16 and 8 bits, and numbers go through several products. Results are then rounded to 8
# bits, which Triton's interpreter does by cutting off the others.
BOUNDS = {"tf32": 2e-3, "bf16x3": 2e-4, "bf16": 2e-2}
RESULT = 8e-3
NAMES = ("out", "after", "q", "k", "v", "decay", "beta")
REAL = {"heads": (16, 32), "dims": (128, 128), "size": 64, "device": "cuda"}


def given_to(
    lengths: list[int],
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (6, 5),
    size: int = 16,
    decay: float = 1.0,
    equal_keys: bool = False,
    device: str = "cpu",
) -> tuple[list[Tensor], RowChunks, Tensor, Tensor]:
    """q, k, v, decay, beta; chunks; states before rows; a gradient of the results. In float64."""
    generator = torch.Generator().manual_seed(0)
    n, (n_key, n_value), (key_dim, value_dim) = sum(lengths), heads, dims

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.float64)

    q, k = normalize(draw(n, n_key, key_dim), dim=-1) * key_dim**-0.5, normalize(draw(n, n_key, key_dim), dim=-1)
    beta = draw(n, n_value).sigmoid()
    if equal_keys:
        k, beta = k[:1].expand_as(k).clone(), 1 - 1e-3 * beta
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    chunks = RowChunks.from_starts(starts, torch.device(device), size)
    before = draw(len(lengths), n_value, key_dim, value_dim)
    return (
        [q, k, draw(n, n_value, value_dim), -decay * draw(n, n_value).square(), beta],
        chunks,
        before,
        draw(n, n_value, value_dim),
    )


def expected(given: list[Tensor], chunks: RowChunks, before: Tensor | None, upstream: Tensor) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    out, after = chunked_delta(*leaves, chunks, before)
    return [out.detach(), after.detach(), *torch.autograd.grad(out, leaves, upstream)]


def by_kernels(given: list[Tensor], chunks: RowChunks, before: Tensor | None, upstream: Tensor) -> list[Tensor]:
    from areno.kernels.delta.triton_chunks import chunks_forward
    from areno.kernels.delta.triton_chunks_backward import chunks_backward

    out, after, saved = chunks_forward(*given, chunks, before, return_states=True)
    assert after is not None
    return [out, after, *chunks_backward(upstream, *given, chunks, saved)]


def worst(found: list[Tensor], right: list[Tensor]) -> dict[str, float]:
    """By name the largest error, relative to the largest number, or that of all in their norm where it is larger."""
    away = {}
    for name, one, other in zip(NAMES, found, right, strict=True):
        assert one.shape == other.shape, name
        error = one.double() - other
        if other.any():
            away[name] = max((error.abs().max() / other.abs().max()).item(), (error.norm() / other.norm()).item())
        else:
            assert not error.any(), name
    return away


def compare(lengths: list[int], has_before: bool = True, bound: float = 3e-6, **settings: Any) -> None:
    """In fp32, whose rounding is 6e-8. Most gradients come to 2e-7; by decay, little is left of larger numbers."""
    given, chunks, before, upstream = given_to(lengths, **settings)
    first = before if has_before else None
    right = expected(given, chunks, first, upstream)
    single = [each.float() for each in given]
    found = by_kernels(single, chunks, None if first is None else first.float(), upstream.float())
    away = worst(found, right)
    assert max(away.values(), default=0.0) < bound, away


def compare_rounded(products: tuple[str, str, str], **settings: Any) -> None:
    """bfloat16, against float64 with the same rounded q, k and v. Twice the same.

    products: of the forward pass, of its kernel along rows, and of the backward pass.
    """
    from areno.kernels.delta import triton_chunks, triton_chunks_backward

    given, chunks, before, upstream = given_to(**settings)
    given = [each.bfloat16() if i < 3 else each.float() for i, each in enumerate(given)]
    before, upstream = before.float(), upstream.bfloat16()
    right = expected([each.double() for each in given], chunks, before.double(), upstream.double())
    with (
        mock.patch.object(triton_chunks, "PRECISION", products[0]),
        mock.patch.object(triton_chunks, "_STATES_PRECISION", products[1]),
        mock.patch.object(triton_chunks_backward, "PRECISION", products[2]),
    ):
        found, again = (by_kernels(given, chunks, before, upstream) for _ in range(2))
    assert found[0].dtype == torch.bfloat16
    assert all(each.dtype == torch.float32 for each in found[1:])
    away = worst(found, right)
    for name, value in away.items():
        bound = max(BOUNDS[each] for each in (products[:2] if name in ("out", "after") else products))
        bound = max(bound, RESULT) if name == "out" else bound
        assert value < bound, (name, away)
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one, other)


def compare_rounded_interpreted(products: tuple[str, str, str]) -> None:
    _multiply_bfloat16()
    compare_rounded(products, lengths=[21], dims=(16, 16), heads=(1, 2))


def _multiply_bfloat16() -> None:
    """Triton's interpreter has bfloat16 as integers of 16 bits, and multiplies these."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float, tl

    multiply = InterpreterBuilder.create_dot

    def in_fp32(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(_convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32"), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(self, in_fp32(a), in_fp32(b), *rest)


def compare_all() -> None:
    compare([1], heads=(1, 1))
    compare([5, 20, 3, 17], has_before=False, heads=(1, 1))
    compare([2, 0, 16])
    compare([40], size=32, dims=(20, 33), heads=(1, 3))


def compare_parts() -> None:
    """Several parts of keys and of values, the last ones cut off; and several programs for the columns of a state."""
    from areno.kernels.delta import triton_chunks, triton_chunks_backward

    real = triton_chunks.kernel_sizes

    def small(*given: Any) -> dict[str, Any]:
        return real(*given[:4], *(given[4:] or (16, 16)))

    with ExitStack() as stack:
        for module in (triton_chunks, triton_chunks_backward):
            stack.enter_context(mock.patch.object(module, "kernel_sizes", small))
            stack.enter_context(mock.patch.object(module, "state_columns", return_value=16))
        compare([20, 3], dims=(20, 35), heads=(1, 2))


def compare_empty() -> None:
    given, chunks, before, upstream = given_to([0, 0])
    out, after, *grads = by_kernels([each.float() for each in given], chunks, before.float(), upstream.float())
    assert torch.equal(after, before.float())
    assert not len(out)
    assert [each.shape for each in grads] == [each.shape for each in given]


def compare_hard() -> None:
    compare([70], size=64, decay=50.0, heads=(1, 1))
    compare([70], size=64, decay=0.0, heads=(1, 1))
    # Every token overwrites what the one before it wrote.
    compare([70], size=64, decay=0.0, equal_keys=True, heads=(1, 1))
    compare([70], size=64, decay=1e-4, equal_keys=True, heads=(1, 1))


@pytest.mark.slow
def test_kernels_give_what_the_reference_gives() -> None:
    run_interpreted("from tests.kernels.test_delta_chunks import compare_all; compare_all()")


@pytest.mark.slow
def test_heads_that_take_several_parts() -> None:
    run_interpreted("from tests.kernels.test_delta_chunks import compare_parts; compare_parts()")


def test_rows_without_tokens() -> None:
    run_interpreted("from tests.kernels.test_delta_chunks import compare_empty; compare_empty()")


@pytest.mark.slow
def test_strong_decay_no_decay_and_equal_keys() -> None:
    run_interpreted("from tests.kernels.test_delta_chunks import compare_hard; compare_hard()")


@pytest.mark.slow
@pytest.mark.parametrize("products", [("bf16x3", "tf32", "bf16"), ("bf16x3", "bf16x3", "bf16x3")])
def test_half_precision(products: tuple[str, str, str]) -> None:
    run_interpreted(
        f"from tests.kernels.test_delta_chunks import compare_rounded_interpreted as compare; compare({products!r})"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "settings"),
    [([512, 700, 1, 0, 64, 130], {}), ([300], {"decay": 50.0}), ([512], {"decay": 1e-3}), ([8192], {"decay": 0.1})],
)
def test_kernels_of_real_sizes_on_the_gpu(lengths: list[int], settings: dict[str, Any]) -> None:
    """fp32, with products of three TF32 ones: 1e-6 each, and up to 128 chunks in a row."""
    compare(lengths, bound=2e-5, **REAL, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("products", [("bf16x3", "tf32", "bf16"), ("bf16x3", "bf16x3", "bf16x3")])
@pytest.mark.parametrize("lengths", [[512, 700, 1, 0, 64, 130], [8192]])
def test_half_precision_of_real_sizes_on_the_gpu(products: tuple[str, str, str], lengths: list[int]) -> None:
    compare_rounded(products, lengths=lengths, decay=0.3, **REAL)
