"""Comparisons of the kernels of packed rows: interpreted on the CPU, and at the sizes of a model on the GPU."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areno.cost import memory
from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_rows_backward, delta_step
from areno.kernels.delta.parts import CHUNK
from areno.layers.config import DeltaConfig
from tests.helpers.delta_loop import (
    N_HEADS,
    VALUE_DIM,
    compare_cut_rows,
    one_by_one,
    random_tokens,
    random_weights,
)
from tests.helpers.interpreted import run_interpreted

CPU = torch.device("cpu")
HALF = torch.float16  # the interpreter cuts numbers to bfloat16, where a GPU rounds them
ROWS = [18, 2, 0, 1]  # more than a program or a chunk has, and shorter than the convolution


def chunks_of(lengths: list[int], device: torch.device = CPU, chunk: int = 16) -> RowChunks:
    return RowChunks.from_starts(torch.tensor([0, *lengths]).cumsum(0).tolist(), device, chunk)


def in_torch(function: Any, *given: Any, **more: Any) -> Any:
    """What the torch form gives."""
    with mock.patch("areno.kernels.backend.can_use_triton", return_value=False):
        return function(*given, **more)


def away(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, of that of what is right."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def halves(weights: DeltaWeights) -> DeltaWeights:
    return DeltaWeights(*(each.to(HALF) if isinstance(each, Tensor) else each for each in weights))


def compare_forward() -> None:
    """With the loop in float64: also where it rounds, which is where the kernels do."""
    weights, given = random_weights(), random_tokens(sum(ROWS))
    out, after = delta_rows(given, weights, chunks_of(ROWS), return_states=True)
    assert after is not None
    loops = [one_by_one(row, weights) for row in given.split(ROWS)]
    expected = torch.cat([found for found, _ in loops if len(found)]).float()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    states = torch.stack([state for _, state in loops]).float()
    torch.testing.assert_close(after.matrices_SHKV, states, atol=2e-5, rtol=1e-4)
    _, expected_after = in_torch(delta_rows, given, weights, chunks_of(ROWS), return_states=True)
    assert torch.equal(after.inputs_SXw, expected_after.inputs_SXw)

    weights, given = halves(weights), given.to(HALF)
    out, after = delta_rows(given, weights, chunks_of(ROWS), return_states=True)
    assert after is not None
    assert (out.dtype, after.inputs_SXw.dtype, after.matrices_SHKV.dtype) == (given.dtype, given.dtype, torch.float32)
    loops = [one_by_one(row, weights, HALF)[0] for row in given.split(ROWS)]
    expected = torch.cat([found for found in loops if len(found)])
    # A number next to the middle between two others may be rounded to the other one, which few are.
    assert (out != expected.to(HALF)).float().mean() < 0.02
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)


def compare_pieces() -> None:
    """Rows cut anywhere give what whole rows do, bit by bit where the rule does not come in."""
    states, behind = compare_cut_rows(chunks_of)
    assert torch.equal(states.inputs_SXw, behind.inputs_SXw)


def compare_gradients() -> None:
    """With autograd over the loop in float64, and with those of torch's form."""
    weights, given, chunks = random_weights(), random_tokens(sum(ROWS)), chunks_of(ROWS)
    grad_NI = torch.randn(sum(ROWS), N_HEADS * VALUE_DIM, generator=torch.Generator().manual_seed(3))
    leaves: Any = [each.double().requires_grad_() for each in (given, *weights[:4])]
    rows = [one_by_one(row, DeltaWeights(*leaves[1:], *weights[4:]))[0] for row in leaves[0].split(ROWS)]
    expected = torch.autograd.grad(torch.cat([row for row in rows if len(row)]), leaves, grad_NI.double())
    for backward in (delta_rows_backward, partial(in_torch, delta_rows_backward)):
        found, of_weights = backward(grad_NI, given, weights, chunks)
        for ours, theirs in zip((found, *of_weights), expected, strict=True):
            assert away(ours, theirs) < 1e-5
    alone, nothing = in_torch(delta_rows_backward, grad_NI, given, weights, chunks, of_weights=False)
    assert nothing is None
    assert torch.equal(alone, found)


def compare_no_tokens() -> None:
    weights = random_weights()
    for chunks in (chunks_of([]), chunks_of([0, 0])):
        out, after = delta_rows(random_tokens(0), weights, chunks, return_states=True)
        assert out.shape == (0, N_HEADS * VALUE_DIM)
        assert after is not None
        assert len(after.inputs_SXw) == len(after.matrices_SHKV) == len(chunks.lengths_R)
        assert not after.inputs_SXw.any()
        grad, of_weights = delta_rows_backward(out, random_tokens(0), weights, chunks)
        assert grad.shape == random_tokens(0).shape
        assert not any(each.any() for each in of_weights or ())


def compare_step_with_rows() -> None:
    """Decoding and prefill round at the same places: in half precision, they give the same numbers but for a few."""
    weights, given = halves(random_weights()), random_tokens(24).to(HALF)
    expected, after = delta_rows(given, weights, chunks_of([24]), return_states=True)
    assert after is not None
    states = DeltaStates(*(torch.zeros_like(each) for each in after))
    out = torch.cat([delta_step(token[None], weights, states, torch.zeros(1, dtype=torch.int64)) for token in given])
    assert (out != expected).float().mean() < 0.01
    assert torch.equal(states.inputs_SXw, after.inputs_SXw)
    torch.testing.assert_close(states.matrices_SHKV, after.matrices_SHKV, atol=1e-3, rtol=1e-2)


def around_in_float64(
    proj_NP: Tensor, out_NHV: Tensor, weights: DeltaWeights, lengths: list[int]
) -> tuple[Tensor, ...]:
    """q, k, v, decay, beta, and the gated norm of what the rule would give, written down row by row."""
    x_NX, z_NI, b_NH, a_NH = proj_NP.split(weights.projection_sizes, dim=-1)
    width, rows = weights.conv_XW.shape[1], []
    for row in x_NX.split(lengths):
        padded = F.pad(row, (0, 0, width - 1, 0))
        rows.append(sum(padded[at : at + len(row)] * weights.conv_XW[:, at] for at in range(width)))
    mixed = torch.cat(rows)
    mixed = mixed / (1 + (-mixed).exp())
    n_key = weights.n_key_heads * weights.key_dim
    q, k, v = (
        each.unflatten(1, (-1, dim))
        for each, dim in zip(
            mixed.split((n_key, n_key, mixed.shape[1] - 2 * n_key), dim=1),
            (weights.key_dim, weights.key_dim, weights.value_dim),
            strict=True,
        )
    )
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    decay = -weights.A_log_H.exp() * (1 + (a_NH + weights.dt_bias_H).exp()).log()
    normed = out_NHV / (out_NHV.square().mean(-1, keepdim=True) + weights.eps).sqrt() * weights.norm_V
    normed = normed.flatten(1) * z_NI / (1 + (-z_NI).exp())
    return q / weights.key_dim**0.5, k, v, decay, 1 / (1 + (-b_NH).exp()), normed


def compare_around(device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], lengths: list[int]) -> None:
    """What the kernels around the rule give, rounded once, and twice the same gradients. sizes: G, H, K, V, W."""
    from areno.kernels.delta.triton import gated_norm, gated_norm_backward
    from areno.kernels.delta.triton_rows import conv_and_gates
    from areno.kernels.delta.triton_rows_backward import conv_and_gates_backward

    n_key_heads, n_heads, key, value, width = sizes
    n, n_channels = sum(lengths), 2 * n_key_heads * key + n_heads * value
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    proj_NP, out_NHV = draw(n, n_channels + n_heads * (value + 2)), draw(n, n_heads, value)
    drawn = (draw(n_channels, width), draw(n_heads), draw(n_heads), draw(value))
    weights, chunks = DeltaWeights(*drawn, 1e-6, n_key_heads), chunks_of(lengths, torch.device(device))
    leaves: Any = [each.double().requires_grad_() for each in (proj_NP, out_NHV, *drawn)]
    exact = around_in_float64(*leaves[:2], DeltaWeights(*leaves[2:], *weights[4:]), lengths)
    found = (*conv_and_gates(proj_NP, weights, chunks), gated_norm(out_NHV, proj_NP, weights))
    unit = torch.finfo(dtype).eps
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == (torch.float32 if ours.shape == (n, n_heads) else dtype)
        allowed = theirs.abs() * (0.5 * torch.finfo(ours.dtype).eps + 1e-5) + 1e-5
        assert ((ours.double() - theirs).abs() <= allowed).all()

    # The rule gives gradients in float32; what comes from the layer's last product has the dtype given.
    upstream = [draw(*each.shape, dtype=torch.float32) for each in exact[:-1]]
    grad_NI = draw(*exact[-1].shape)
    expected = torch.autograd.grad(exact, leaves, [each.double() for each in (*upstream, grad_NI)])
    results = []
    for is_wanted in (True, True, False):
        grad_NP = torch.full_like(proj_NP, torch.nan)
        grad_out, grad_norm = gated_norm_backward(grad_NI, out_NHV, proj_NP, weights, grad_NP, is_wanted)
        grads: Any = [each.clone() for each in upstream]
        of_weights = conv_and_gates_backward(grads, proj_NP, weights, chunks, grad_NP, is_wanted)
        assert (of_weights is not None) == (grad_norm is not None) == is_wanted
        results.append((grad_NP, grad_out, *(of_weights or ()), *(() if grad_norm is None else (grad_norm,))))
    *twice, alone = results
    for ours, again, theirs in zip(*twice, expected, strict=True):
        assert torch.equal(ours, again)
        assert away(ours, theirs) < (1e-5 if ours.dtype == torch.float32 else 0.5 * unit), ours.shape
    assert all(map(torch.equal, alone, twice[0]))


def compare_around_interpreted() -> None:
    compare_around("cpu", torch.float32, (2, 4, 6, 5, 3), ROWS)
    # Sums over several blocks of tokens, and over heads of a token in several programs.
    with mock.patch("areno.kernels.delta.triton_rows_backward.CONV_TOKENS", 8):
        compare_around("cpu", HALF, (1, 3, 8, 4, 4), [9, 1, 30])


class PeakBytes(TorchDispatchMode):
    """The most that tensors take at once that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.nbytes and each.untyped_storage().data_ptr() not in given:
                storage = each.untyped_storage()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, n_bytes: int) -> None:
        self.now -= n_bytes


def compare_memory() -> None:
    """The backward pass takes what the estimate says, but for a few numbers a head, where rows fill their chunks."""
    delta = DeltaConfig(layers=(0,), n_key_heads=1, n_value_heads=2, key_dim=32, value_dim=32, width=4)
    n, dtype = 64, torch.bfloat16
    drawn = (torch.ones(delta.n_channels, delta.width), torch.ones(2), torch.ones(2), torch.ones(delta.value_dim))
    weights = DeltaWeights(*(each.to(dtype) for each in drawn), 1e-6, delta.n_key_heads)
    given, grad_NI = torch.zeros(n, delta.projected_size, dtype=dtype), torch.zeros(n, delta.inner_size, dtype=dtype)
    with PeakBytes() as found:
        delta_rows_backward(grad_NI, given, weights, chunks_of([n], chunk=CHUNK))
    # The estimate counts the gradient that goes in, and leaves the one that comes out to the products.
    at_work = found.peak + grad_NI.nbytes - given.nbytes
    assert 1.0 <= at_work / (n * memory._delta_rule_bytes(delta, dtype.itemsize)) < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        *("forward", "gradients", "no_tokens", "step_with_rows"),
        *(pytest.param(what, marks=pytest.mark.slow) for what in ("memory", "pieces", "around_interpreted")),
    ],
)
def test_interpreted_kernels(what: str) -> None:
    run_interpreted(f"from tests.kernels.test_delta_rows import compare_{what} as compare; compare()")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_around_the_rule_at_real_sizes(dtype: torch.dtype) -> None:
    compare_around("cuda", dtype, (16, 32, 128, 128, 4), [512, 1, 300, 2, 700])


@pytest.mark.gpu
def test_rows_at_real_sizes_are_those_of_torch() -> None:
    """In fp32; in bf16 twice the same bits."""
    sizes, device = (2 * 16 * 128 + 32 * 128, 4), torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    lengths = [512, 1, 300, 2, 700]
    given, grad_NI = draw(sum(lengths), sizes[0] + 32 * 130), draw(sum(lengths), 32 * 128)
    weights = DeltaWeights(draw(*sizes), draw(32), draw(32), draw(128), 1e-6, 16)
    chunks = chunks_of(lengths, device, 64)
    expected, after = in_torch(delta_rows, given, weights, chunks, return_states=True)
    found, behind = delta_rows(given, weights, chunks, return_states=True)
    assert behind is not None
    for ours, theirs in zip((found, *behind), (expected, *after), strict=True):
        assert away(ours, theirs.double()) < 1e-4
    expected, of_weights = in_torch(delta_rows_backward, grad_NI, given, weights, chunks)
    found, ours = delta_rows_backward(grad_NI, given, weights, chunks)
    assert ours is not None
    for one, other in zip((found, *ours), (expected, *of_weights), strict=True):
        assert away(one, other.double()) < 1e-3
    given, grad_NI = given.bfloat16(), grad_NI.bfloat16()
    runs: Any = [
        (*delta_rows(given, weights, chunks), *delta_rows_backward(grad_NI, given, weights, chunks)) for _ in "ab"
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][2], runs[1][2])
    assert all(map(torch.equal, runs[0][3], runs[1][3]))
