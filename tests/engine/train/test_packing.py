"""Rows to steps, shares, micro-batches and tensors: nothing lost, nothing doubled, budgets kept, bad rows named."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.engine.train import packing
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import (
    StepMicroBatches,
    divide_steps,
    micro_batches,
    optimizer_steps,
    split_balanced,
)
from areno.engine.train.packing import StepBatches
from areno.errors import DataError
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence

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
    assert optimizer_steps(LENGTHS, UpdateSpec(spec)) == [list(range(57))]
    parts = optimizer_steps(LENGTHS, UpdateSpec(spec, n_minibatches=4, seed=3))
    assert flat(parts) == list(range(57))
    assert sorted(len(part) for part in parts) == [14, 14, 14, 15]
    assert parts == optimizer_steps(LENGTHS, UpdateSpec(spec, n_minibatches=4, seed=3))
    assert parts != optimizer_steps(LENGTHS, UpdateSpec(spec, n_minibatches=4, seed=4))
    assert parts[0] != list(range(15))
    assert optimizer_steps([1, 1], UpdateSpec(spec, n_minibatches=3)) in ([[0], [1]], [[1], [0]])
    accumulated = optimizer_steps(LENGTHS, UpdateSpec(spec, gradient_accumulation_steps=5))
    assert accumulated == [list(range(20)), list(range(20, 40)), list(range(40, 57))]
    with pytest.raises(ValueError, match="not both"):
        optimizer_steps(LENGTHS, UpdateSpec(spec, n_minibatches=2, gradient_accumulation_steps=2))


@pytest.mark.parametrize("rows_per_unit", [1, 2, 3])
@pytest.mark.parametrize("spec", [MicroBatchSpec(mini_bs=7), MicroBatchSpec(mini_bs=7, max_tokens_per_mb=100)])
@pytest.mark.parametrize("cut", [{"n_minibatches": 5, "seed": 1}, {"gradient_accumulation_steps": 2}, {}])
def test_units_are_never_divided(rows_per_unit, spec, cut):
    """Whatever cuts the rows: steps by shuffle or by accumulation, data-parallel shares, micro-batches."""
    numbers = range(12 * rows_per_unit)
    rows = read_rows([row([1] * (20 + i % 5), [i % 3 == 0] * (20 + i % 5), reward=float(i)) for i in numbers], 10)
    shares = divide_steps(rows, UpdateSpec(spec, rows_per_unit=rows_per_unit, **cut), dp_size=2)
    seen = []
    for steps in zip(*shares, strict=True):
        mine = [row for share in steps for batch in share.micro_batches for row in batch]
        for share in steps:
            assert share.step_tokens == sum(row.n_trained for row in mine)
            assert share.step_rows == sum(row.n_trained > 0 for row in mine)
            for batch in share.micro_batches:
                _, pack = packed(batch, rows_per_unit=rows_per_unit)
                assert pack.rows_per_unit == rows_per_unit
                assert pack.n_rows % rows_per_unit == 0
                firsts = pack.rewards.reshape(-1, rows_per_unit)
                assert torch.equal(firsts, firsts[:, :1] + torch.arange(rows_per_unit))
                assert all(first % rows_per_unit == 0 for first in firsts[:, 0].tolist())
                if spec.max_tokens_per_mb is None:
                    assert pack.n_rows <= {1: 7, 2: 6, 3: 6}[rows_per_unit]
                seen += pack.rewards.tolist()
    assert sorted(seen) == list(numbers)


def test_each_rank_has_its_own_rows_of_every_step():
    rows = read_rows([row([1] * LENGTHS[i], [False] * LENGTHS[i], reward=float(i)) for i in range(20)], 10)
    update = UpdateSpec(MicroBatchSpec(mini_bs=4), n_minibatches=2, seed=3)
    (alone,), both = divide_steps(rows, update), divide_steps(rows, update, dp_size=2)
    assert len(alone) == len(both[0]) == len(both[1]) == 2
    for whole, *parts in zip(alone, *both, strict=True):
        theirs = [{row.reward for batch in part.micro_batches for row in batch} for part in parts]
        assert not theirs[0] & theirs[1]
        assert theirs[0] | theirs[1] == {row.reward for batch in whole.micro_batches for row in batch}
        assert {(part.step_tokens, part.step_rows) for part in parts} == {(whole.step_tokens, whole.step_rows)}


def test_a_rank_without_a_row_has_one_in_which_nothing_is_trained():
    rows = read_rows([row([1] * LENGTHS[i], [False] * LENGTHS[i], reward=float(i)) for i in range(20)], 10)
    update = UpdateSpec(MicroBatchSpec(mini_bs=4), n_minibatches=2, seed=3)
    for steps in zip(*divide_steps(rows, update, dp_size=11), strict=True):
        found = [each for step in steps for batch in step.micro_batches for each in batch]
        [idle] = [each for each in found if not each.trained.any()]
        assert len(found) == 11
        assert {(step.step_tokens, step.step_rows) for step in steps} == {(sum(each.n_trained for each in found), 10)}
        assert idle.n_tokens == min(2, *LENGTHS[:20])
    pairs = UpdateSpec(MicroBatchSpec(mini_bs=4), n_minibatches=2, rows_per_unit=2)
    with pytest.raises(DataError, match=r"has 10 rows, in units of 2, for 6 copies.*lower critic\.ppo_n_minibatches"):
        divide_steps(rows, pairs, dp_size=6, section="critic")


def test_a_unit_larger_than_the_micro_batch_is_one():
    rows = read_rows([row([1, 2], [True, False], reward=float(i)) for i in range(6)], vocab_size=10)
    for spec in (MicroBatchSpec(mini_bs=2), MicroBatchSpec(max_tokens_per_mb=1)):
        ((step,),) = divide_steps(rows, UpdateSpec(spec, rows_per_unit=3))
        assert [[one.reward for one in batch] for batch in step.micro_batches] == [[0, 1, 2], [3, 4, 5]]


def test_rows_that_do_not_come_out_even():
    rows = read_rows([row([1, 2], [True, False])] * 5, vocab_size=10)
    with pytest.raises(DataError, match="5 rows, not a multiple of rows_per_unit=2"):
        divide_steps(rows, UpdateSpec(MicroBatchSpec(), rows_per_unit=2))
    with pytest.raises(DataError, match="rows_per_unit is 0"):
        divide_steps(rows, UpdateSpec(MicroBatchSpec(), rows_per_unit=0))


def packed(rows, step_tokens=1, step_rows=1, rows_per_unit=1):
    (packed,) = StepBatches(StepMicroBatches(rows, [[len(rows)]], step_tokens, step_rows, 1), rows_per_unit, CPU)
    return packed


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
    inputs, pack = packed(rows, 11, 7)
    assert inputs.tokens_N.tolist() == pack.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert inputs.positions_N.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert inputs.cu_seqlens.tolist() == [0, 3, 5, 9]
    assert inputs.max_len == 4
    assert (inputs.tokens_N.dtype, inputs.positions_N.dtype) == (torch.int64, torch.int64)
    assert inputs.cu_seqlens.dtype == torch.int32
    assert pack.row_of_token.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert pack.loss_mask.tolist() == [False, True, True, False, False, False, True, False, True]
    assert pack.trained_T.tolist() == [1, 2, 6, 8]
    assert pack.trained_rows.tolist() == [0, 2]
    assert pack.of_trained_rows(torch.tensor([5, 6, 7])).tolist() == [5, 7]
    assert replace(pack, trained_rows=None).of_trained_rows(torch.tensor([5, 6, 7])).tolist() == [5, 7]
    assert pack.row_lengths().tolist() == [2, 0, 2]
    assert (pack.n_rows, pack.step_tokens, pack.step_rows) == (3, 11, 7)
    assert pack.rollout_logprobs.tolist() == [0, -1, -2, -9, 0, 0, -3, 0, -4]
    assert pack.advantages.dtype == torch.float32
    assert pack.rewards.tolist() == [1.5, 0, 0]
    assert pack.weights.tolist() == [0.0, 1.0, 0.25, 1, 1, 1, 2, 1, 3]
    assert pack.staleness.tolist() == [3, 0, 1]
    assert (pack.weights.dtype, pack.staleness.dtype) == (torch.float32, torch.float32)
    assert pack.rows_per_unit == 1
    assert pack.returns is None
    assert pack.sum_rows(pack.trained(pack.rollout_logprobs)).tolist() == [-3, 0, -7]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"tokens": []}, "row 1: tokens is empty"),
        ({"tokens": None}, "row 1: tokens is empty"),
        ({"tokens": [1, 99, 2]}, "row 1: tokens holds 99; the model has token ids 0 to 9"),
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
    assert got[0].fields["rollout_logprobs"][2] == -1.0


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        read_rows([], vocab_size=10)


def test_arrays_are_as_good_as_lists():
    lists = {"tokens": [1, 2, 3], "prompt_mask": [True, False, False], "logprobs": [0.0, -1.0, -2.5]}
    arrays = {name: np.array(values) for name, values in lists.items()}
    (from_lists,), (from_arrays,) = (read_rows([TrainSequence(**fields)], 10) for fields in (lists, arrays))
    assert np.array_equal(from_lists.tokens, from_arrays.tokens)
    assert np.array_equal(from_lists.trained, from_arrays.trained)
    assert np.array_equal(from_lists.fields["rollout_logprobs"], from_arrays.fields["rollout_logprobs"])


def test_a_row_longer_than_the_context():
    with pytest.raises(DataError, match="row 0: tokens has 3 tokens, more than the model's context of 2"):
        read_rows([row([1, 2, 3], [True, True, False])], 10, context_len=2)


def ten_rows():
    return [
        row([i] * (2 + i % 4), [True] + [False] * (1 + i % 4), logprobs=[-float(i)] * (2 + i % 4), reward=float(i))
        for i in range(10)
    ]


def test_rows_are_chosen_in_any_order_and_keep_their_numbers():
    rows = read_rows(ten_rows(), vocab_size=10)
    for chosen in ([], [3], [2, 3, 4], [7, 1, 1, 9]):
        found = rows.select(chosen)
        assert [(one.tokens.tolist(), one.trained.tolist(), one.reward) for one in found] == [
            (rows[i].tokens.tolist(), rows[i].trained.tolist(), rows[i].reward) for i in chosen
        ]
        of_fields = found.split_by_row(found.fields["rollout_logprobs"])
        assert [set(of_row.tolist()) for of_row in of_fields] == [{-float(i)} for i in chosen]
    assert [one.reward for one in rows[2:5]] == [2, 3, 4]
    assert np.shares_memory(rows[2:5].tokens, rows.tokens)


def test_a_step_arrives_as_it_was_sent():
    rows = read_rows(ten_rows(), vocab_size=10)
    ((step,),) = divide_steps(rows, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=9)))
    arrived = pickle.loads(pickle.dumps(step))
    assert (arrived.sizes, arrived.step_tokens, arrived.step_rows) == (step.sizes, step.step_tokens, step.step_rows)
    packed, others = StepBatches(arrived, 1, CPU), StepBatches(step, 1, CPU)
    for (inputs, pack), (other_inputs, other) in zip(packed, others, strict=True):
        assert torch.equal(inputs.tokens_N, other_inputs.tokens_N)
        assert inputs.tokens_N.dtype == torch.int64
        for name in ("rollout_logprobs", "rewards", "loss_mask", "row_of_token"):
            assert torch.equal(vars(pack)[name], vars(other)[name])


def test_a_micro_batch_is_packed_when_it_is_read(monkeypatch):
    ((step,),) = divide_steps(read_rows(ten_rows(), vocab_size=10), UpdateSpec(MicroBatchSpec(mini_bs=4)))
    n_packed, pack_rows = [], packing._pack_rows
    monkeypatch.setattr(packing, "_pack_rows", lambda *args: n_packed.append(1) or pack_rows(*args))
    batches = StepBatches(step, 1, CPU)
    assert (len(batches), len(n_packed)) == (3, 0)
    first = batches[0]
    assert len(n_packed) == 1
    assert batches[0] is first
    assert [len(pack.rewards) for _, pack in batches] == [4, 4, 2]
    assert len(n_packed) == 3
