"""Products in FP8 and their gradients against float64, with the rounding written as x + sg(q(x) - x)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from areno.config.fp8 import FP8Config
from areno.kernels.fp8 import quantize_rows, round_rows
from areno.kernels.fp8.matmul import QuantizedMatrix
from tests.helpers.interpreted import run_interpreted


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[0], 1, generator=generator).exp()
    return torch.randn(shape, generator=generator) * sizes


def straight_through(x: Tensor) -> Tensor:
    return x + (round_rows(x.float()).double() - x).detach()


def exact_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of q(x) q(W)^T by autograd, in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = straight_through(x) @ straight_through(weight).T
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad.double())


def gradients(x: Tensor, weight: Tensor, grad: Tensor, **how: bool) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = QuantizedMatrix.of(weight, **how).linear(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def test_gradients_that_are_not_rounded() -> None:
    given = draw(70, 96), draw(50, 96, seed=1), draw(70, 50, seed=2)
    for found, expected in zip(gradients(*given, dgrad=False), exact_gradients(*given), strict=True):
        assert error(found, expected) < 1e-6


def test_gradients_that_are_rounded() -> None:
    """A value is off by up to 1/16 of itself; the mean over random inputs is off by less than its noise."""
    errors: dict[bool, list[Tensor]] = {False: [], True: []}
    for seed in range(0, 300, 3):
        given = draw(64, 48, seed=seed), draw(40, 48, seed=seed + 1), draw(64, 40, seed=seed + 2)
        _, of_x, of_weight = exact_gradients(*given)
        plain = gradients(*given, dgrad=False)
        for wgrad in (False, True):
            found = gradients(*given, wgrad=wgrad)
            assert torch.equal(found[0], plain[0])
            assert 0.01 < error(found[1], of_x) < 0.05
            assert torch.equal(found[2], plain[2]) != wgrad
            if wgrad:
                assert 0.01 < error(found[2], of_weight) < 0.08
            errors[wgrad].append(((found[1 + wgrad] - (of_x, of_weight)[wgrad]) / found[1 + wgrad].norm()).mean())
    for each in errors.values():
        sample = torch.stack(each)
        assert sample.mean().abs() < 4 * sample.std() / len(sample) ** 0.5


def test_the_weight_that_was_rounded_last_counts() -> None:
    x, before, after = draw(3, 32), draw(16, 32, seed=1), draw(16, 32, seed=2)
    matrix = QuantizedMatrix.of(before)
    codes = matrix.codes_OI
    matrix.set(after)
    assert matrix.codes_OI is codes
    assert torch.equal(matrix.matmul(x), QuantizedMatrix.of(after).matmul(x))
    assert torch.equal(matrix.dequantized(torch.bfloat16).float(), round_rows(after))


SHAPES = [(1, 64, 32), (3, 512, 40), (9, 530, 33), (16, 300, 96)]


def compare(device: str, dtype: torch.dtype = torch.float32) -> None:
    from areno.kernels.fp8 import reference, triton
    from areno.kernels.fp8.triton_few_rows import few_rows_matmul

    for n, outputs in ((3, 7), (130, 300)):
        x, (codes, columns) = draw(n, outputs), reference.quantize_rows(draw(outputs, n, seed=1))
        given = [x, columns, 64]
        found = triton.quantize_rows(*(each.to(device) if isinstance(each, Tensor) else each for each in given))
        assert len(found[0]) == -(-n // 64) * 64
        for mine, expected in zip(found, reference.quantize_rows(*given), strict=True):
            assert torch.equal(mine.cpu().view(torch.uint8), expected.view(torch.uint8))
        of_columns = triton.quantize_columns(x.to(device), 16)
        padded = torch.cat((x, x.new_zeros(-n % 16, outputs)))
        for mine, expected in zip(of_columns, reference.quantize_rows(padded.t(), None, 1, True), strict=True):
            assert torch.equal(mine.cpu().view(torch.uint8), expected.contiguous().view(torch.uint8))
        transposed = triton.transpose(codes.to(device)).cpu()
        assert torch.equal(transposed.view(torch.uint8), codes.view(torch.uint8).t())
    for n, inputs, outputs in SHAPES:
        x, weight = draw(n, inputs).to(device), draw(outputs, inputs, seed=1).to(device)
        y = few_rows_matmul(*quantize_rows(x, None, 1, True), *quantize_rows(weight, None, 1, True), dtype)
        expected = round_rows(x).double() @ round_rows(weight).double().T
        assert error(y, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def compare_activation(device: str, dtype: torch.dtype) -> None:
    """The activation that rounds its results, and the activation before a kernel that rounds, bit for bit."""
    from areno.kernels.elementwise.triton_swiglu import swiglu, swiglu_backward
    from areno.kernels.elementwise.triton_swiglu_fp8 import swiglu_backward_codes, swiglu_codes

    for n, inner, gelu in ((5, 40, False), (2, 2500, True)):
        gate_up, grad = draw(n, 2 * inner).to(device, dtype), draw(n, inner, seed=1).to(device, dtype)
        columns = quantize_rows(draw(2 * inner, 4, seed=2).to(device))[1]
        expected = quantize_rows(swiglu(gate_up, gelu), None, 8, True)
        for mine, other in zip(swiglu_codes(gate_up, gelu, 8), expected, strict=True):
            assert same_bits(mine, other)
        of_gate_up, act, codes = swiglu_backward_codes(grad, gate_up, gelu, columns)
        expected_grad, expected_act = swiglu_backward(grad, gate_up, gelu)
        assert same_bits(of_gate_up, expected_grad)
        assert same_bits(act, round_rows(expected_act))
        for mine, other in zip(codes, quantize_rows(expected_grad, columns, 1, True), strict=True):
            assert same_bits(mine, other)


def compare_units() -> None:
    """Fused layers as on a GPU with FP8 units, whose product is done by plain torch, and as on one without."""
    from areno.kernels.fp8 import matmul
    from areno.models.quantization import quantized_linears
    from tests.helpers.fused_layers import BARE, SOME, build, run

    def scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out_dtype: torch.dtype, **how: bool) -> Tensor:
        return ((a.float() * of_a) @ (b.float() * of_b)).to(out_dtype)

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **BARE}
    for fp8 in (FP8Config(), FP8Config(wgrad=True)):
        expected = run(build(torch.float32, "cpu", fp8=fp8, **sizes), "sdpa", is_fused=True, **SOME)
        for few_rows, multiple in ((0, 1), (0, 16), (64, 1)):
            model = build(torch.float32, "cpu", fp8=fp8, **sizes)
            for module in quantized_linears(model):
                assert module.quantized is not None
                module.quantized.row_multiple = multiple
            with (
                mock.patch.object(matmul, "can_multiply_in_fp8", return_value=True),
                mock.patch.object(matmul, "FEW_ROWS", few_rows),
                mock.patch.object(torch, "_scaled_mm", scaled_mm),
            ):
                found = run(model, "sdpa", is_fused=True, **SOME)
            for mine, other in zip(found, expected, strict=True):
                assert error(mine, other.double()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compare('cpu')", "compare_activation('cpu', torch.float32)", "compare_units()"])
def test_interpreted_kernels(what: str) -> None:
    run_interpreted(f"from tests.kernels.test_fp8_matmul import *; {what}")


@pytest.mark.gpu
def test_the_forms_of_a_product_on_cuda() -> None:
    """Few rows, many rows, padded rows, and dequantized values: one function up to the order of sums."""
    compare("cuda", torch.bfloat16)
    compare_activation("cuda", torch.bfloat16)
    x, weight, grad = (draw(*shape).cuda().bfloat16() for shape in ((300, 512), (256, 512), (300, 256)))
    assert QuantizedMatrix.of(weight).uses_units(x)
    y, of_x, of_weight = exact_gradients(*(each.cpu() for each in (x, weight, grad)))
    for n_rows in (1, 64, 65, 300):
        for multiple in (1, 64):
            matrix = QuantizedMatrix.of(weight)
            matrix.row_multiple = multiple
            assert error(matrix.matmul(x[:n_rows]).cpu(), y[:n_rows]) < 4e-3
    for dgrad, wgrad in ((False, False), (True, False), (True, True)):
        found = gradients(x, weight, grad, dgrad=dgrad, wgrad=wgrad)
        assert error(found[1].cpu(), of_x) < (0.05 if dgrad else 4e-3)
        assert error(found[2].cpu(), of_weight) < (0.08 if wgrad else 4e-3)
        rounded = QuantizedMatrix.of(weight.cpu().float(), dgrad=dgrad).input_gradient(grad.cpu().float())
        assert error(found[1].cpu(), rounded.double()) < 4e-3  # the units round as the emulation does


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 1024), (6144, 2560), (4096, 12288)])
def test_bits_of_a_row_in_padded_products_on_cuda(shape: tuple[int, int]) -> None:
    weight = draw(*shape).cuda().bfloat16()
    matrix = QuantizedMatrix.of(weight)
    matrix.row_multiple = 64
    x = draw(16384, shape[1], seed=1).cuda().bfloat16()
    whole = matrix.matmul(x)
    for n_rows in (1, 2, 63, 64, 65, 200, 512, 2048):
        assert torch.equal(matrix.matmul(x[:n_rows]), whole[:n_rows])
