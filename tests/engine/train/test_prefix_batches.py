"""Forests of segments, and the division of rows that share prefixes into micro-batches and over ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.cost.prefix_sharing import PrefixSharing
from areno.engine.train import shared_prefixes
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps, row_micro_batches
from areno.engine.train.packing import pack_group
from areno.engine.train.shared_prefixes import build_forest, n_computed_tokens, order_to_share, sharing_groups
from areno.layers.config import AdapterSpec
from areno.specs.update import UpdateSpec
from tests.helpers.large_shapes import QWEN3_06B, QWEN3_8B
from tests.helpers.shared_rows import Rows, cases, group, n_nodes, train_rows, tree
from tests.helpers.tiny_backend import VOCAB, WHOLE

ON = PrefixSharing("on")


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows of a few tokens share."""
    monkeypatch.setattr(shared_prefixes, "LEAST", 1)


def check_forest(rows: Rows) -> None:
    """Every row is a path through the forest, and each token follows the token that it follows in its rows."""
    forest = build_forest(rows)
    starts = np.cumsum([0, *map(len, rows)])
    for row, start in zip(rows, starts, strict=False):
        places = forest.indices_U[start : start + len(row)]
        np.testing.assert_array_equal(forest.tokens_N[places], row)
        np.testing.assert_array_equal(forest.positions_N[places], np.arange(len(row)))
        np.testing.assert_array_equal(forest.previous_N[places[1:]], places[:-1])
    for segment in range(len(forest.starts) - 1):
        own = np.arange(forest.starts[segment], forest.starts[segment + 1])
        keys = forest.keys_M[forest.key_starts[segment] : forest.key_starts[segment + 1]]
        np.testing.assert_array_equal(keys[-len(own) :], own)
        np.testing.assert_array_equal(forest.positions_N[keys], np.arange(len(keys)))
        assert any(np.array_equal(forest.indices_U[s : s + len(keys)], keys) for s in starts[:-1])
    assert forest.counts_N.sum() == starts[-1]
    np.testing.assert_array_equal(np.unique(forest.indices_U), np.arange(len(forest.tokens_N)))
    assert n_computed_tokens(rows) == len(forest.tokens_N)


@pytest.mark.parametrize("name", cases(VOCAB))
def test_a_forest_has_each_beginning_of_a_row_once(name: str) -> None:
    rows = cases(VOCAB)[name]
    check_forest(rows)
    assert n_computed_tokens(rows) == n_nodes(rows)


def test_any_rows_make_a_forest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two different tokens share beginnings of every length."""
    rng = random.Random(0)
    for _ in range(60):
        rows = [np.array([rng.randrange(2) for _ in range(rng.randint(1, 9))]) for _ in range(rng.randint(1, 9))]
        monkeypatch.setattr(shared_prefixes, "LEAST", 1)
        check_forest(rows)
        assert n_computed_tokens(rows) == n_nodes(rows)
        monkeypatch.setattr(shared_prefixes, "LEAST", 3)
        check_forest(rows)
        assert n_nodes(rows) <= n_computed_tokens(rows) <= sum(map(len, rows))


def test_short_prefixes_are_not_worth_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST", 4)
    rows = [np.array(row) for row in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 8, 8], [9, 9, 9], [9, 9, 9])]
    assert n_computed_tokens(rows) == 6 + 1 + 5 + 3  # equal rows are one row, however short
    check_forest(rows)


@pytest.mark.parametrize(("when", "prompt", "expected"), [("auto", 12, True), ("auto", 1, False), ("on", 1, True)])
def test_auto_shares_if_it_saves_a_tenth(when: Any, prompt: int, expected: bool) -> None:
    rows = group(prompt, [10, 10], VOCAB)
    assert (order_to_share(rows, PrefixSharing(when)) is not None) == expected
    assert order_to_share(rows, PrefixSharing("off")) is None


PASSES = [
    (PrefixSharing("auto"), [60, 30], [100], True),
    (PrefixSharing("auto"), [60, 36], [100], False),  # less than a twentieth faster
    (PrefixSharing("on"), [60, 36], [100], True),
    (PrefixSharing("auto", launch_tokens=100), [60, 60], [120, 120], False),  # the host takes 115 for each pass
    (PrefixSharing("auto", launch_tokens=50), [60, 60], [120, 120], True),
    (PrefixSharing("auto", search_tokens=20), [60], [120], True),
    (PrefixSharing("auto", search_tokens=30), [60], [120], False),
]


@pytest.mark.parametrize(("sharing", "shared", "apart", "expected"), PASSES)
def test_auto_counts_what_the_host_takes(sharing: Any, shared: list[int], apart: list[int], expected: bool) -> None:
    assert sharing.is_faster(shared, apart, n_rows=2) == expected


def test_small_passes_are_not_shared_or_linked_on_a_gpu() -> None:
    """A 0.6B model, whose passes of less than about 10,000 tokens wait for the host."""
    rule = PrefixSharing.from_setting("auto", QWEN3_06B, 2, trains=True, on_cuda=True)
    assert 5_000 < rule.launch_tokens < 20_000
    assert PrefixSharing.from_setting("auto", QWEN3_06B, 2, trains=True, on_cuda=False) == PrefixSharing("auto")
    assert PrefixSharing.from_setting("off", QWEN3_06B, 2, trains=True, on_cuda=True) == PrefixSharing("off")
    units = [[row] for row in group(1024, [1024] * 16, 9999)]
    for budget, shares in ((4096, False), (32768, True)):
        groups, found = row_micro_batches(units, MicroBatchSpec(max_tokens_per_mb=budget), sharing=rule)
        assert found == shares
        assert max(map(len, groups)) == 1
    large = PrefixSharing.from_setting("auto", QWEN3_8B, 2, trains=True, on_cuda=True)
    groups, found = row_micro_batches(units, MicroBatchSpec(max_tokens_per_mb=8192), sharing=large)
    assert found
    assert max(map(len, groups)) > 1


def test_a_shared_prefix_counts_once_in_a_micro_batch() -> None:
    rows = [row for seed in range(6) for row in group(20, [5, 6, 7, 8], VOCAB, seed)]
    random.Random(0).shuffle(rows)
    units = [[row] for row in rows]
    spec = MicroBatchSpec(max_tokens_per_mb=120)
    batches = [batch for (batch,) in row_micro_batches(units, spec, sharing=ON)[0]]
    assert sorted(itertools.chain(*batches)) == list(range(len(rows)))
    sizes = [n_computed_tokens([rows[i] for i in batch]) for batch in batches]
    assert sum(sizes) <= 6 * (20 + 5 + 6 + 7 + 8)  # no group is cut
    assert max(sizes) <= 120
    assert len(batches) == 3
    assert len(row_micro_batches(units, spec)[0]) > 5


def test_a_group_larger_than_a_micro_batch_is_cut() -> None:
    rows = group(20, [10] * 9, VOCAB)
    spec, units = MicroBatchSpec(max_tokens_per_mb=60), [[row] for row in rows]
    groups = row_micro_batches(units, spec, sharing=ON)[0]
    assert [len(batch) for (batch,) in groups] == [3, 3, 3]  # the prompt is too long to be kept: computed three times
    (piece,) = sharing_groups([[rows[0]]], 5)  # a single row may exceed the budget
    assert piece == ([0], 30, 30)
    units = [[row] for row in group(8, [10] * 9, VOCAB)]
    (linked,) = row_micro_batches(units, spec, sharing=ON)[0]
    assert sorted(map(len, linked)) == [3, 3, 3]
    apart = row_micro_batches(units, MicroBatchSpec(max_tokens_per_mb=30), cp_size=2, sharing=ON)[0]
    assert all(len(alone) == 1 for alone in apart)


def test_pairs_are_not_linked() -> None:
    """The second rows of these pairs are equal, and would be kept in memory beside the prompt."""
    rows = group(8, [10] * 9, VOCAB)
    groups = row_micro_batches([[row, rows[0]] for row in rows], MicroBatchSpec(max_tokens_per_mb=60), sharing=ON)[0]
    assert len(groups) > 1
    assert all(len(alone) == 1 for alone in groups)


@pytest.mark.parametrize(("prompt", "is_linked"), [(3, True), (1, False)])
def test_prefixes_that_save_little_are_not_worth_a_pass(prompt: int, is_linked: bool) -> None:
    rows = [np.array([2] * prompt + [place] + row.tolist()) for place, row in enumerate(group(0, [30] * 9, VOCAB), 3)]
    groups = row_micro_batches([[row] for row in rows], MicroBatchSpec(max_tokens_per_mb=50), sharing=ON)[0]
    assert any(len(linked) > 1 for linked in groups) == is_linked


@pytest.mark.parametrize("seed", range(3))
def test_linked_micro_batches_fit_beside_their_prefixes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "FASTER", 10.0)
    monkeypatch.setattr(shared_prefixes, "KEPT", 1)
    rows = [np.concatenate([np.arange(2), row]) for row in tree(4, VOCAB, seed)]
    found = 0
    for most in range(130, 200, 10):
        for linked in row_micro_batches([[row] for row in rows], MicroBatchSpec(max_tokens_per_mb=most), sharing=ON)[0]:
            packs = pack_group([[rows[i] for i in batch] for batch in linked], torch.device("cpu"), share=True)
            for batch, one in zip(linked, packs, strict=True):
                assert shared_prefixes.KEPT * one.n_prefix_tokens + one.n_computed <= most or len(batch) == 1
            found += packs[0].prefix is not None
    assert found


def test_a_micro_batch_without_tokens_of_its_own_is_not_linked() -> None:
    """Equal rows in different micro-batches."""
    rows = group(9, [4] * 2, VOCAB)
    packs = pack_group([rows, [rows[0]]], torch.device("cpu"), share=True)
    assert [packed.prefix for packed in packs] == [None, None]


def test_ranks_get_whole_groups() -> None:
    rows = [row for seed in range(8) for row in group(20, [5, 6, 7, 8], VOCAB, seed)]
    shares = divide_steps(read_rows(train_rows(rows), VOCAB), UpdateSpec(WHOLE), dp_size=2, sharing=ON)
    sizes = [n_computed_tokens([row.tokens for batch in step.micro_batches for row in batch]) for (step,) in shares]
    assert sizes == pytest.approx([4 * (20 + 5 + 6 + 7 + 8)] * 2, abs=4)  # prompts may begin alike by chance


def test_two_ranks_share_a_single_group() -> None:
    rows = group(20, [5, 6, 7, 8], VOCAB)
    shares = divide_steps(read_rows(train_rows(rows), VOCAB), UpdateSpec(WHOLE), dp_size=2, sharing=ON)
    assert [sum(map(len, step.micro_batches)) for (step,) in shares] == [2, 2]


@pytest.mark.parametrize("at_once", [2**22, 40, 1])
def test_common_prefixes_are_counted_in_blocks(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "_MOST_AT_ONCE", at_once)
    for rows in cases(VOCAB).values():
        found = list(shared_prefixes.sorted_rows(rows))
        assert sorted(index for index, _ in found) == list(range(len(rows)))
        for (one, _), (other, common) in itertools.pairwise(found):
            alike = list(
                itertools.takewhile(lambda pair: pair[0] == pair[1], zip(rows[one], rows[other], strict=False))
            )
            assert common == len(alike)


def test_many_short_answers_are_cut_by_their_copies_of_keys() -> None:
    """A thousand answers of two tokens to a prompt of 512 would copy half a million keys."""
    rows = group(512, [2] * 1000, VOCAB)
    groups = row_micro_batches([[row] for row in rows], MicroBatchSpec(max_tokens_per_mb=4096), sharing=ON)[0]
    for batch in itertools.chain(*groups):
        n_keys = sum(len(rows[i]) for i in batch)
        assert (
            n_computed_tokens([rows[i] for i in batch]) + n_keys / shared_prefixes.KEYS
            <= 4096 + 512 / shared_prefixes.KEYS
        )


def test_the_number_of_micro_batches_of_a_step_does_not_depend_on_sharing() -> None:
    rows = read_rows(train_rows([row for seed in range(4) for row in group(20, [5, 6], VOCAB, seed)]), VOCAB)
    update = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=60), gradient_accumulation_steps=2)
    on, off = (divide_steps(rows, update, sharing=PrefixSharing(share))[0] for share in ("on", "off"))
    assert [len(step.micro_batches) for step in on] == [len(step.micro_batches) for step in off] == [2, 2]


@pytest.mark.parametrize(("length", "n_shared"), [(10, 6), (13, 6), (14, 0), (64, 0)])
def test_rows_share_half_of_their_tokens_or_sixteen(
    monkeypatch: pytest.MonkeyPatch, length: int, n_shared: int
) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST", 16)
    head, others = list(range(6)), iter(range(100, 10_000))
    rows = [np.array([*head, *itertools.islice(others, length - 6)]) for _ in range(8)]
    assert n_computed_tokens(rows) == 8 * length - 7 * n_shared
    assert (order_to_share(rows, PrefixSharing("auto")) is not None) == (n_shared > 0)
    long = [np.concatenate([np.arange(20), row]) for row in rows]
    assert n_computed_tokens(long) == 8 * (length + 20) - 7 * 26


def test_a_rank_without_rows_of_a_shared_step() -> None:
    rows = read_rows(train_rows(group(20, [5, 6], VOCAB)), VOCAB)
    shares = divide_steps(rows, UpdateSpec(WHOLE), dp_size=3, sharing=ON)
    assert [len(step.micro_batches[0]) for (step,) in shares] == [1, 1, 1]


@pytest.mark.parametrize("spec", [MicroBatchSpec(mini_bs=4), MicroBatchSpec(max_tokens_per_mb=120)])
def test_micro_batches_of_a_fixed_number_share_only_if_this_is_faster(spec: MicroBatchSpec) -> None:
    units = [[row] for row in group(20, [10] * 8, VOCAB)]
    for launch, shares in ((0, True), (1000, False)):
        rule = PrefixSharing("auto", launch_tokens=launch)
        groups, found = row_micro_batches(units, spec, sharing=rule, keeps_count=True)
        assert found == shares
        assert groups == row_micro_batches(units, spec)[0]


def test_a_row_that_is_only_the_prefix_prevents_linking() -> None:
    """Its micro-batch would have no tokens of its own."""
    units = [[row] for row in group(100, [0] + [450] * 8, VOCAB)]
    groups, _ = row_micro_batches(units, MicroBatchSpec(max_tokens_per_mb=700), sharing=ON)
    assert max(map(len, groups)) == 1


def test_a_linked_micro_batch_of_one_row_takes_no_more_memory_than_the_row_alone() -> None:
    units = [[row] for row in group(1024, [3072, 20, 20, 20], VOCAB)]
    groups, _ = row_micro_batches(units, MicroBatchSpec(max_tokens_per_mb=4096), sharing=ON)
    assert max(map(len, groups)) == 1


def test_tensor_parallel_gpus_wait_sooner_for_the_host() -> None:
    alone, four = (
        PrefixSharing.from_setting("auto", QWEN3_8B, 2, trains=True, on_cuda=True, tp_size=n) for n in (1, 4)
    )
    assert four == PrefixSharing("auto", 4 * alone.launch_tokens, 4 * alone.search_tokens)
    adapters = AdapterSpec(8, 16.0, ("q_proj",))
    assert PrefixSharing.from_setting("auto", QWEN3_8B, 2, trains=True, on_cuda=True, adapters=adapters) != alone
    assert PrefixSharing.from_setting("auto", QWEN3_8B, 2, trains=False, on_cuda=True).launch_tokens > 0
