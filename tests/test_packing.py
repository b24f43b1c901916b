"""Rows to steps, shares, micro-batches and tensors: nothing lost, nothing doubled, budgets kept, bad rows named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from areno.config.model_roles import MicroBatchSpec
from areno.engine.train.packing import (
    micro_batches,
    optimizer_steps,
    pack_units,
    read_rows,
    split_balanced,
    units_of,
)
from areno.engine.types import TrainSequence
from areno.errors import DataError

CPU = torch.device("cpu")
rng = random.Random(0)
LENGTHS = [rng.randint(1, 90) for _ in range(57)]


def flat(batches):
    return sorted(i for batch in batches for i in batch)


def test_mini_bs_cuts_in_order():
    assert micro_batches(LENGTHS[:7], MicroBatchSpec(mini_bs=3)) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("budget", [1, 60, 100, 400, 10**6])
def test_token_budget(budget):
    batches = micro_batches(LENGTHS, MicroBatchSpec(max_tokens_per_mb=budget, mini_bs=2))
    assert flat(batches) == list(range(57))
    for batch in batches:
        assert sum(LENGTHS[i] for i in batch) <= budget or len(batch) == 1
        assert batch == sorted(batch)
    assert [batch[0] for batch in batches] == sorted(batch[0] for batch in batches)
    if budget >= max(LENGTHS):  # first-fit decreasing is within 11/9 of the optimum, plus one
        assert len(batches) <= -(-sum(LENGTHS) // budget) * 11 / 9 + 1


def test_first_fit_decreasing_fills_gaps():
    assert micro_batches([2, 6, 5, 4, 8, 5], MicroBatchSpec(max_tokens_per_mb=10)) == [[0, 4], [1, 3], [2, 5]]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_shares_are_balanced(n):
    shares = split_balanced(LENGTHS, n)
    assert flat(shares) == list(range(57))
    loads = [sum(LENGTHS[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(LENGTHS)
    assert max(loads) <= 1.1 * sum(LENGTHS) / n
    assert all(len(share) == 1 for share in split_balanced([5, 1, 1], 3))


def test_steps():
    spec = MicroBatchSpec(mini_bs=4)
    assert optimizer_steps(LENGTHS, spec) == [list(range(57))]
    parts = optimizer_steps(LENGTHS, spec, n_minibatches=4, seed=3)
    assert flat(parts) == list(range(57))
    assert sorted(len(part) for part in parts) == [14, 14, 14, 15]
    assert parts == optimizer_steps(LENGTHS, spec, n_minibatches=4, seed=3)
    assert parts != optimizer_steps(LENGTHS, spec, n_minibatches=4, seed=4)
    assert parts[0] != list(range(15))
    assert optimizer_steps([1, 1], spec, n_minibatches=3) in ([[0], [1]], [[1], [0]])
    accumulated = optimizer_steps(LENGTHS, spec, gradient_accumulation_steps=5)
    assert accumulated == [list(range(20)), list(range(20, 40)), list(range(40, 57))]
    with pytest.raises(ValueError, match="not both"):
        optimizer_steps(LENGTHS, spec, n_minibatches=2, gradient_accumulation_steps=2)


@pytest.mark.parametrize("granularity", [1, 2, 3])
@pytest.mark.parametrize("spec", [MicroBatchSpec(mini_bs=7), MicroBatchSpec(mini_bs=7, max_tokens_per_mb=100)])
def test_units_are_never_divided(granularity, spec):
    """Whatever cuts the rows: steps by shuffle or by accumulation, data-parallel shares, micro-batches."""
    numbers = range(12 * granularity)
    rows = read_rows([row([1] * LENGTHS[i], [True] * LENGTHS[i], reward=float(i)) for i in numbers], vocab_size=10)
    units, unit_spec = units_of(rows, granularity, spec)
    assert unit_spec.mini_bs == {1: 7, 2: 3, 3: 2}[granularity]
    lengths = [unit.n_tokens for unit in units]
    assert lengths == [sum(LENGTHS[i : i + granularity]) for i in range(0, 12 * granularity, granularity)]
    cuts = [{"n_minibatches": 5, "seed": 1}, {"gradient_accumulation_steps": 2}, {}]
    for how in cuts:
        seen = []
        for step in optimizer_steps(lengths, unit_spec, **how):
            for share in split_balanced([lengths[i] for i in step], 2):
                mine = [units[step[i]] for i in share]
                for batch in micro_batches([unit.n_tokens for unit in mine], unit_spec):
                    _, pack = pack_units([mine[i] for i in batch], 1, 1, CPU)
                    assert pack.granularity == granularity
                    assert pack.n_rows % granularity == 0
                    firsts = pack.rewards.reshape(-1, granularity)
                    assert torch.equal(firsts, firsts[:, :1] + torch.arange(granularity))
                    assert all(first % granularity == 0 for first in firsts[:, 0].tolist())
                    if spec.max_tokens_per_mb is None:
                        assert pack.n_rows <= max(7, granularity)
                    seen += pack.rewards.tolist()
        assert sorted(seen) == list(numbers)


def test_a_unit_larger_than_the_micro_batch_is_one():
    rows = read_rows([row([1, 2], [True, False])] * 6, vocab_size=10)
    units, spec = units_of(rows, 3, MicroBatchSpec(mini_bs=2))
    assert micro_batches([unit.n_tokens for unit in units], spec) == [[0], [1]]
    assert micro_batches([unit.n_tokens for unit in units], MicroBatchSpec(max_tokens_per_mb=1)) == [[0], [1]]


def test_rows_that_do_not_come_out_even():
    rows = read_rows([row([1, 2], [True, False])] * 5, vocab_size=10)
    with pytest.raises(DataError, match="5 rows, not a multiple of granularity=2"):
        units_of(rows, 2, MicroBatchSpec())
    with pytest.raises(DataError, match="granularity is 0"):
        units_of(rows, 0, MicroBatchSpec())


def row(tokens, mask, **fields):
    return TrainSequence(tokens=tokens, prompt_mask=mask, **fields)


def test_tensors():
    rows = read_rows(
        [
            row(
                [5, 6, 7],
                [True, False, False],
                logprobs=[0.0, -1.0, -2.0],
                advantages=[0.0, 0.5, 0.5],
                weights=[0.0, 1.0, 0.25],
                reward=1.5,
                staleness=3,
            ),
            row([8, 9], [False, True], logprobs=[-9.0, 0.0], advantages=[1.0, 1.0], weights=[1.0, 1.0]),
            row(
                [1, 2, 3, 4],
                [True, False, True, False],
                logprobs=[0, -3, 0, -4],
                advantages=[2, 2, 2, 2],
                weights=[1, 2, 1, 3],
                staleness=1,
            ),
        ],
        vocab_size=10,
    )
    assert [r.n_trained for r in rows] == [2, 0, 2]  # the first token of a row is never trained
    packed, pack = pack_units(units_of(rows, 1, MicroBatchSpec())[0], 11, 7, CPU)
    assert packed.tokens_N.tolist() == pack.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert packed.positions_N.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert packed.max_len == 4
    assert (packed.tokens_N.dtype, packed.positions_N.dtype) == (torch.int64, torch.int64)
    assert packed.cu_seqlens.dtype == torch.int32
    assert pack.row_of_token.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert pack.loss_mask.tolist() == [False, True, True, False, False, False, True, False, True]
    assert pack.trained_T.tolist() == [1, 2, 6, 8]
    assert pack.row_lengths().tolist() == [2, 0, 2]
    assert (pack.n_rows, pack.step_tokens, pack.step_rows) == (3, 11, 7)
    assert pack.old_logprobs.tolist() == [0, -1, -2, -9, 0, 0, -3, 0, -4]
    assert pack.advantages.dtype == torch.float32
    assert pack.rewards.tolist() == [1.5, 0, 0]
    assert pack.weights.tolist() == [0.0, 1.0, 0.25, 1, 1, 1, 2, 1, 3]
    assert pack.staleness.tolist() == [3, 0, 1]
    assert (pack.weights.dtype, pack.staleness.dtype) == (torch.float32, torch.float32)
    assert pack.granularity == 1
    assert pack.returns is None
    assert pack.sum_rows(pack.trained(pack.old_logprobs)).tolist() == [-3, 0, -7]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tokens": []}, "row 1: tokens is empty"),
        ({"tokens": None}, "row 1: tokens is empty"),
        ({"tokens": [1, 99, 2]}, "row 1: tokens holds 99, the model has token ids 0 to 9"),
        ({"tokens": [1, -1, 2]}, "row 1: tokens holds -1"),
        ({"prompt_mask": None}, "row 1: prompt_mask is missing"),
        ({"prompt_mask": [True, False]}, "row 1: prompt_mask has 2 entries, tokens has 3"),
        ({"logprobs": [0.0]}, "row 1: logprobs has 1 entries, tokens has 3"),
        ({"logprobs": None}, "row 1: logprobs is missing, but row 0 has it"),
        ({"values": [0.0, 0.0, 0.0]}, "row 0: values is missing, but row 1 has it"),
        ({"weights": [1.0, 1.0]}, "row 0: weights is missing, but row 1 has it"),
        ({"advantages": [0.0, 0.0, float("nan")]}, "row 1: advantages is nan at token 2"),
        ({"logprobs": [0.0, float("-inf"), 0.0]}, "row 1: logprobs is -inf at token 1"),
    ],
)
def test_bad_rows_are_named(bad, message):
    def good():
        return {
            "tokens": [1, 2, 3],
            "prompt_mask": [True, False, False],
            "logprobs": [0.0, -1.0, -1.0],
            "advantages": [0.0, 1.0, 1.0],
        }

    with pytest.raises(DataError) as caught:
        read_rows([TrainSequence(**good()), TrainSequence(**{**good(), **bad})], vocab_size=10)
    assert message in str(caught.value)


def test_untrained_tokens_may_hold_anything():
    got = read_rows([row([1, 2, 3], [True, True, False], logprobs=[np.nan, np.inf, -1.0])], vocab_size=10)
    assert got[0].fields["old_logprobs"][2] == -1.0


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        read_rows([], vocab_size=10)
