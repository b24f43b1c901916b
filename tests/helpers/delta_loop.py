"""The gated delta rule token by token in float64, as the paper writes it, and random numbers to try it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_step

WIDTH, N_KEY_HEADS, N_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 4, 6, 5
N_CHANNELS = 2 * N_KEY_HEADS * KEY_DIM + N_HEADS * VALUE_DIM


def random_weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    conv, log_decay, bias, norm = draw(N_CHANNELS, WIDTH), draw(N_HEADS), draw(N_HEADS), draw(VALUE_DIM)
    return DeltaWeights(conv, log_decay, bias, norm, 1e-6, N_KEY_HEADS)


def random_tokens(n: int, seed: int = 1) -> Tensor:
    width = N_CHANNELS + N_HEADS * VALUE_DIM + 2 * N_HEADS
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def no_states(n: int) -> DeltaStates:
    return DeltaStates(torch.zeros(n, N_CHANNELS, WIDTH - 1), torch.zeros(n, N_HEADS, KEY_DIM, VALUE_DIM))


def one_by_one(row_NP: Tensor, weights: DeltaWeights, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The results of a row's tokens (N, H V), and the state behind it (H, K, V): a loop over tokens and heads.

    dtype: what q, k, v and the rule's results are rounded to.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    w = DeltaWeights(*(each.double() if isinstance(each, Tensor) else each for each in weights))
    state = row_NP.new_zeros(N_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    window = [torch.zeros(N_CHANNELS, dtype=torch.float64)] * WIDTH
    n_key, outs = N_KEY_HEADS * KEY_DIM, []
    for token in row_NP.double():
        window = [*window[1:], token[:N_CHANNELS]]
        x = sum(w.conv_XW[:, place] * window[place] for place in range(WIDTH))
        x = x / (1 + torch.exp(-x))
        z = token[N_CHANNELS : N_CHANNELS + N_HEADS * VALUE_DIM]
        b, a = token[-2 * N_HEADS : -N_HEADS], token[-N_HEADS:]
        for head in range(N_HEADS):
            at = head // (N_HEADS // N_KEY_HEADS) * KEY_DIM
            q, k = x[at : at + KEY_DIM], x[n_key + at : n_key + at + KEY_DIM]
            q, k = q / (q @ q + 1e-6).sqrt() / math.sqrt(KEY_DIM), k / (k @ k + 1e-6).sqrt()
            q, k, v = map(rounded, (q, k, x[2 * n_key + head * VALUE_DIM :][:VALUE_DIM]))
            alpha = torch.exp(-torch.exp(w.A_log_H[head]) * torch.log1p(torch.exp(a[head] + w.dt_bias_H[head])))
            beta = 1 / (1 + torch.exp(-b[head]))
            # S_t = S_{t-1} (alpha (I - beta k k^T)) + beta v k^T, here with S transposed
            erased = alpha * (torch.eye(KEY_DIM, dtype=torch.float64) - beta * torch.outer(k, k)) @ state[head]
            state = torch.cat([state[:head], (erased + beta * torch.outer(k, v))[None], state[head + 1 :]])
            out, gate = rounded(state[head].T @ q), z[head * VALUE_DIM :][:VALUE_DIM]
            outs.append(out / (out.square().mean() + 1e-6).sqrt() * w.norm_V * gate / (1 + torch.exp(-gate)))
    out = torch.stack(outs) if outs else row_NP.new_zeros(0, dtype=torch.float64)
    return out.view(len(row_NP), N_HEADS * VALUE_DIM), state


def compare_cut_rows(chunks_of: Callable[[list[int]], RowChunks]) -> tuple[DeltaStates, DeltaStates]:
    """Rows cut into pieces give what whole rows do. The states behind the pieces, and those behind the whole rows."""
    weights, lengths = random_weights(), [30, 11]
    given = random_tokens(sum(lengths))
    rows = given.split(lengths)
    whole, behind = delta_rows(given, weights, chunks_of(lengths), return_states=True)
    assert behind is not None
    outs: list[list[Tensor]] = [[], []]
    states = no_states(2)
    for cuts in ([0, 9], [1, 1], [20, 0], [9, 1]):
        pieces = [row[sum(map(len, out)) :][:n] for row, out, n in zip(rows, outs, cuts, strict=True)]
        out, found = delta_rows(torch.cat(pieces), weights, chunks_of(cuts), states, return_states=True)
        assert found is not None
        states = found
        for each, piece in zip(outs, out.split(cuts), strict=True):
            each.append(piece)
    torch.testing.assert_close(torch.cat([torch.cat(each) for each in outs]), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states, behind, atol=1e-5, rtol=1e-4)
    return states, behind


def compare_step() -> None:
    """A few steps with states at mixed places. Run with Triton's interpreter, it is about the kernels."""
    weights, slots = random_weights(), torch.tensor([4, 0, 2])
    states, tokens = no_states(5), random_tokens(18).view(6, 3, -1)
    outs = torch.stack([delta_step(step_BP, weights, states, slots) for step_BP in tokens])
    for row, slot in enumerate(slots.tolist()):
        expected, state = one_by_one(tokens[:, row], weights)
        torch.testing.assert_close(outs[:, row], expected.float(), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(states.matrices_SHKV[slot], state.float(), atol=2e-5, rtol=1e-4)
        assert torch.equal(states.inputs_SXw[slot], tokens[-WIDTH + 1 :, row, :N_CHANNELS].T)
    assert not states.matrices_SHKV[[1, 3]].any()


def compare_steps() -> None:
    """With programs that take all of a state, and with programs that take a part of its columns."""
    compare_step()
    with mock.patch("areno.kernels.delta.triton.COLUMNS", 4):
        compare_step()
