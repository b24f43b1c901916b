"""The AdamW kernels: 8-bit codes against their definition, interpreted kernels against the torch forms, training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from areno.config.models import OptimizerConfig
from areno.engine.train.optimizer import Optimizer
from areno.engine.train.zero_buffers import FlatParameters
from areno.kernels.adam import BLOCK, AdamUpdate, adam, adam_8bit, adam_bf16, squares_and_nonzeros
from areno.kernels.adam.reference import (
    code_values,
    dequantise,
    quantise,
    random_bits,
    round_to_bf16,
    rounding_key,
)
from areno.layers.parallel import ParallelGroup
from tests.helpers.interpreted import run_interpreted

UPDATE = AdamUpdate(
    lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.999, scale=0.5, correction_1=0.271, correction_2=0.1723
)


@pytest.mark.parametrize("n", [0, 5, 1024, 2**22 + 5])
def test_the_norm_of_a_long_gradient_is_as_exact_as_that_of_a_short_one(n):
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2))
    grad[::5] = 0.0
    squares, nonzeros = squares_and_nonzeros(grad).tolist()
    assert squares == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    assert nonzeros == grad.count_nonzero()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_spaced_by_their_size(signed):
    table = code_values(signed, torch.device("cpu"))
    assert len(table) == len(set(table.tolist())) == 256
    assert table.tolist() == sorted(table.tolist())
    assert table.max() == 1.0
    assert 0.0 in table
    assert bool((table < 0).any()) == signed
    n = 64 if signed else 128
    tops = table[(table > 0.1) & (table < 1.0)]
    assert len(tops) == n
    torch.testing.assert_close(tops[1:] - tops[:-1], torch.full((n - 1,), 0.9 / n), atol=1e-6, rtol=0)
    # A decade further down: half as many, ten times as dense.
    assert len(table[(table > 0.01) & (table < 0.1)]) == n // 2


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_becomes_the_nearest_code_of_its_block(signed):
    torch.manual_seed(0)
    n = 3 * BLOCK + 17
    values = torch.randn(n).double().exp().float() * torch.tensor([1e-12, 1.0, 1e8, 0.0]).repeat_interleave(BLOCK)[:n]
    if signed:
        values *= torch.randn(n).sign()
    code, scale = torch.empty(n, dtype=torch.uint8), torch.empty(4)
    quantise(values, code, scale, signed=signed)
    got = dequantise(code, scale, signed=signed)
    table = code_values(signed, values.device).double()
    for block in range(4):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        largest = values[part].abs().max().double()
        assert scale[block] == largest
        best = (values[part].double().unsqueeze(1) - table * largest).abs().amin(1)
        error = (got[part].double() - values[part]).abs()
        assert (error <= best + 1e-6 * largest).all()


def test_a_positive_second_moment_never_vanishes():
    values = torch.full((BLOCK,), 1e-12)
    values[0] = 1.0
    values[1] = 0.0
    code, scale = torch.empty(BLOCK, dtype=torch.uint8), torch.empty(1)
    quantise(values, code, scale, signed=False)
    got = dequantise(code, scale, signed=False)
    assert got[1] == 0
    assert (got[2:] > 0).all()


def states(n, dtype, device, eight_bits):
    """grad, master, param and moments in the middle of a training run."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(n, generator=generator)  # noqa: E731
    grad, master, first, second = draw(), draw(), draw() * 0.1, draw().square() * 0.01
    param = master.to(dtype)
    if dtype == torch.float32:
        param = master
    if not eight_bits:
        return [x.to(device) for x in (grad, master, param, first, second)]
    n_blocks = -(-n // BLOCK)
    moments = [torch.empty(n, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.empty(n_blocks) for _ in range(2)]
    quantise(first, moments[0], scales[0], signed=True)
    quantise(second, moments[1], scales[1], signed=False)
    return [x.to(device) for x in (grad, master, param, *moments, *scales)]


HALF, FULL = torch.bfloat16, torch.float32
ALL = dict.fromkeys((5 * BLOCK, 3 * BLOCK + 16, 100), (FULL, HALF))  # dtypes by numbers of parameters
FEW = {2 * BLOCK: (FULL,), 2 * BLOCK + 16: (FULL, HALF), 100: (HALF,)}


def compare(device, cases=ALL):
    """The Triton kernels against the torch forms."""
    from areno.kernels.adam import triton

    grad = torch.randn(3 * 1024 + 7, generator=torch.Generator().manual_seed(2)).to(device)
    grad[::5] = 0.0
    with mock.patch.object(triton, "MAX_PROGRAMS", 2):
        squares, nonzeros = squares_and_nonzeros(grad).tolist()
    assert nonzeros == grad.count_nonzero()
    assert squares == pytest.approx(grad.double().square().sum().item(), rel=1e-6)
    grad[1] = torch.inf
    assert squares_and_nonzeros(grad)[0] == torch.inf
    for n, dtypes in cases.items():
        for dtype in dtypes:
            forms: list[tuple[Callable[..., None], bool]] = [(adam, False), (adam_8bit, True)]
            for update, eight_bits in forms:
                want, got = (states(n, dtype, device, eight_bits) for _ in range(2))
                with mock.patch("areno.kernels.backend.can_use_triton", return_value=False):
                    update(*want[:3], *zip(want[3::2], want[4::2], strict=True), UPDATE)
                update(*got[:3], *zip(got[3::2], got[4::2], strict=True), UPDATE)
                assert not torch.equal(got[1], states(n, dtype, device, eight_bits)[1])
                for one, other in zip(got, want, strict=True):
                    if one.dtype == torch.uint8:  # a value half way between two codes may go either way
                        assert (one.int() - other.int()).abs().max() <= 1
                        assert (one != other).float().mean() < 0.01
                    else:
                        tolerance = 1e-2 if one.dtype == torch.bfloat16 else 1e-5
                        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def bf16_states(n, dtype, device):
    return [x.bfloat16() if i > 2 else x for i, x in enumerate(states(n, dtype, device, False))]


def compare_bf16(device):
    """The random bits are the same, so moments differ only where float32 arithmetic does."""
    for n, key, start in ((2 * BLOCK + 16, 3, 0), (100, 2**32 - 5, 2**31 - 40), (7, 0, 2**33)):
        want, got = (bf16_states(n, torch.bfloat16, device) for _ in range(2))
        update = replace(UPDATE, step=77)
        with mock.patch("areno.kernels.backend.can_use_triton", return_value=False):
            adam_bf16(*want[:3], (want[3], want[4]), update, key, start)
        adam_bf16(*got[:3], (got[3], got[4]), update, key, start)
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[2], want[2], atol=1e-2, rtol=1e-2)
        for one, other in zip(got[3:], want[3:], strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
            assert (one != other).float().mean() < 0.02


@pytest.mark.slow
def test_interpreted_kernels_are_the_torch_forms():
    run_interpreted(
        "from tests.kernels.test_adam import FEW, compare, compare_bf16; compare('cpu', FEW); compare_bf16('cpu')"
    )


@pytest.mark.gpu
def test_kernels_on_the_gpu_are_the_torch_forms():
    compare("cuda")
    compare_bf16("cuda")


def test_rounding_to_bf16_is_right_on_average():
    """Up with the probability of the part that is cut off, in both directions, and never away from bf16 values."""
    n = 2**18
    for value in (1.0 + 0.3 * 2**-7, -3e-9, 1e-37, 0.0, 1.5):
        values = torch.full((n,), value)
        bits = random_bits(5, 0, n, values.device)
        for part in (bits & 0xFFFF, bits >> 16):
            rounded = round_to_bf16(values, part).double()
            assert len(rounded.unique()) <= 2
            assert rounded.mean().item() == pytest.approx(values[0].item(), rel=1e-4)
    together = torch.stack([bits & 0xFFFF, bits >> 16]).double()
    assert torch.corrcoef(together)[0, 1].abs() < 0.01
    assert torch.corrcoef(torch.stack([together[0, 1:], together[0, :-1]]))[0, 1].abs() < 0.01
    assert not torch.equal(
        random_bits(rounding_key(7, 1), 0, 64, bits.device), random_bits(rounding_key(7, 2), 0, 64, bits.device)
    )


def test_an_element_in_bf16_rounds_alike_in_any_slice():
    whole, cut = (bf16_states(1000, torch.bfloat16, "cpu") for _ in range(2))
    adam_bf16(*whole[:3], (whole[3], whole[4]), UPDATE, 9, 40)
    for low, high in ((0, 13), (13, 640), (640, 1000)):
        grad, master, param, first, second = (x[low:high] for x in cut)
        adam_bf16(grad, master, param, (first, second), UPDATE, 9, 40 + low)
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)


def fit(kind, device="cpu", dtype=torch.float32, steps=150):
    """Loss of a small network on a fixed task after training, and what its moments take for each parameter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).to(device, dtype)
    flat = FlatParameters(model, align=BLOCK)
    config = OptimizerConfig(type=kind, lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    optimizer = Optimizer(flat, config, ParallelGroup())
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3].sin(), x[:, 4:8].mean(1)], 1).float()
    losses = []
    for _ in range(steps):
        flat.grads.zero_()
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step(optimizer.gradient_stats().norm)
        losses.append(loss.item())
    n_bytes = sum(state.numel() * state.element_size() for state in optimizer.moments.values())
    return losses, n_bytes / flat.params.numel()


def test_8_bits_train_like_32():
    (exact, exact_bytes), (small, small_bytes) = fit("adam"), fit("adam_8bit")
    assert exact_bytes == 8
    assert small_bytes < 2.1
    assert exact[-1] < 0.1 * exact[0]
    assert small[-1] == pytest.approx(exact[-1], rel=0.1)
    assert small != exact


def test_bf16_moments_train_like_32():
    (exact, _), (half, n_bytes) = fit("adam"), fit("adam_bf16")
    assert n_bytes == 4
    assert half[-1] == pytest.approx(exact[-1], rel=0.1)
    assert half != exact


@pytest.mark.gpu
def test_8_bits_on_the_gpu_train_like_the_cpu():
    assert fit("adam_8bit", "cuda", torch.bfloat16)[0][-1] == pytest.approx(fit("adam")[0][-1], rel=0.15)
