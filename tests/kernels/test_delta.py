"""The gated delta rule, in chunks and token by token, against a loop in float64 and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_5 import modeling_qwen3_5

from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows
from areno.kernels.delta.reference import chunked_delta
from tests.helpers.delta_loop import (
    KEY_DIM,
    N_HEADS,
    N_KEY_HEADS,
    VALUE_DIM,
    compare_cut_rows,
    compare_step,
    one_by_one,
    random_tokens,
    random_weights,
)
from tests.helpers.interpreted import run_interpreted

CPU = torch.device("cpu")


def chunks_of(lengths: list[int], chunk: int = 8) -> RowChunks:
    return RowChunks.from_starts(torch.tensor([0, *lengths]).cumsum(0).tolist(), CPU, chunk)


@pytest.mark.parametrize("lengths", [[1], [5, 20, 3, 8, 17], [2, 0, 16]])
def test_chunks_give_what_a_loop_over_tokens_gives(lengths: list[int]) -> None:
    weights, given = random_weights(), random_tokens(sum(lengths))
    out, after = delta_rows(given, weights, chunks_of(lengths), return_states=True)
    assert after is not None
    expected = [one_by_one(row, weights) for row in given.split(lengths)]
    torch.testing.assert_close(
        out, torch.cat([found for found, _ in expected if len(found)]).float(), atol=2e-5, rtol=1e-4
    )
    states = torch.stack([state for _, state in expected]).float()
    torch.testing.assert_close(after.matrices_SHKV, states, atol=2e-5, rtol=1e-4)


def test_rows_go_on_from_their_states() -> None:
    """Cut anywhere, also into pieces that are shorter than the convolution."""
    compare_cut_rows(chunks_of)


def test_gradients_are_those_of_the_loop() -> None:
    lengths = [19, 2, 9]
    given, weights = random_tokens(sum(lengths)), random_weights()
    direction = torch.randn(sum(lengths), N_HEADS * VALUE_DIM, generator=torch.Generator().manual_seed(3))
    found = [given.clone().requires_grad_(), *(each.clone().requires_grad_() for each in weights[:4])]
    out, _ = delta_rows(found[0], DeltaWeights(*found[1:], *weights[4:]), chunks_of(lengths))
    (out * direction).sum().backward()
    loop = [given.clone().requires_grad_(), *(each.clone().requires_grad_() for each in weights[:4])]
    slow = torch.cat([one_by_one(row, DeltaWeights(*loop[1:], *weights[4:]))[0] for row in loop[0].split(lengths)])
    (slow * direction).sum().backward()
    for ours, theirs in zip(found, loop, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3)


def test_training_has_no_operation_without_a_fixed_order() -> None:
    """Those that torch refuses on CUDA under engine.deterministic. A CPU has a fixed order for all."""
    found: set[str] = set()

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                found.add(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Listening():
        given = random_tokens(30).requires_grad_()
        delta_rows(given, random_weights(), chunks_of([19, 11]))[0].sum().backward()
    assert "linalg_solve_triangular" in found
    assert not found & {"cumsum", "cumsum_", "put", "put_", "histc", "bincount", "median", "kthvalue"}


def test_one_token_of_each_row() -> None:
    compare_step()


@pytest.mark.slow
def test_one_token_of_each_row_in_triton() -> None:
    run_interpreted("from tests.helpers.delta_loop import compare_steps; compare_steps()")


def test_chunks_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 150
    q, k = (torch.randn(n, N_KEY_HEADS, KEY_DIM, generator=generator) for _ in range(2))
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k))
    v = torch.randn(n, N_HEADS, VALUE_DIM, generator=generator)
    decay, beta = -torch.rand(n, N_HEADS, generator=generator), torch.rand(n, N_HEADS, generator=generator)
    before = torch.randn(1, N_HEADS, KEY_DIM, VALUE_DIM, generator=generator)
    out, state = chunked_delta(q * KEY_DIM**-0.5, k, v, decay, beta, chunks_of([n], 64), before)
    for theirs in (modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.torch_recurrent_gated_delta_rule):
        given = (each[None] for each in (q, k, v, decay, beta))
        expected, behind = theirs(*given, initial_state=before, output_final_state=True)
        torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state, behind, atol=1e-5, rtol=1e-4)


def test_the_form_of_states_is_kept() -> None:
    """Rows in half precision: results are rounded once, and states are not."""
    weights = random_weights(dtype=torch.bfloat16)
    given = random_tokens(12).bfloat16()
    out, after = delta_rows(given, weights, chunks_of([12]), return_states=True)
    assert isinstance(after, DeltaStates)
    assert (out.dtype, after.inputs_SXw.dtype, after.matrices_SHKV.dtype) == (given.dtype, given.dtype, torch.float32)
    expected, _ = one_by_one(given, weights)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
