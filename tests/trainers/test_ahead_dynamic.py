"""Dynamic sampling in steps that do not wait for their longest samples: prompts are replaced during the rollout."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.errors import ArenoError
from areno.run.group_selection import Group
from areno.run.groups_in_flight import GroupsInFlight
from areno.trainers import partial_rollout, rollout
from areno.types import GenerationOutput, PromptItem, TrainSequence
from tests.helpers.policy_runs import Played, play, trained
from tests.helpers.reward_functions import always_one, odd_length, slow_odd_length

# Which prompts begin and which are trained ----------------------------------------------------------------------------


def items_of(sizes: Sequence[int]) -> list[list[PromptItem]]:
    """The prompts of each batch, which are numbered through all batches."""
    numbers = itertools.count()
    return [[PromptItem(prompt="", text="", tokens=[2], index=next(numbers)) for _ in range(size)] for size in sizes]


def ended(sample: int, reason: Any = "stop", n_tokens: int = 3) -> GenerationOutput:
    tokens = [2] * n_tokens
    return GenerationOutput(
        request_id=0, sample=sample, tokens=tokens, logprobs=[0.0] * n_tokens, versions=tokens, finish_reason=reason
    )


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("ahead", [1, 4, 99])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("at_once", [4, 1000])
def test_a_simulated_run_trains_or_drops_each_prompt_once_and_in_time(limit, ahead, share, at_once):
    size, n_samples, draw = 4, 2, random.Random(5)
    batches = items_of([4] * 20 + [1, 4, 2])
    numbered, in_flight = iter(enumerate(batches, 1)), GroupsInFlight(lambda indices: [], n_samples, limit)
    ahead = min(ahead, limit * size)
    uniform = {item.index for item in chain(*batches) if draw.random() < share}
    begun_at: dict[int, int] = {}
    trained, dropped = Counter[int](), Counter[int]()
    for step in itertools.count(1):
        batch = next(numbered, None)
        if batch is not None:
            in_flight.admit(*batch)
        elif not in_flight.groups:
            break
        admission = in_flight.begin_dynamic_sampling(step, size, size + ahead, at_once, lambda: next(numbered, None))
        missing: list[tuple[Group, int]] = []
        while True:
            new = admission.begin_groups()
            while (group := admission.next_group_to_compare()) is not None:
                assert not group.n_missing_samples
                admission.record_uniformity(group.item.index in uniform)
                new += admission.begin_groups()
            admission.end_interval()
            missing += [(group, k) for group in new for k in range(n_samples) if k not in group.finished]
            in_play = [group for group in admission.groups if group not in admission.dropped]
            assert len(in_play) <= size + ahead
            if admission.is_over:
                break
            assert admission.n_open_groups == len(missing)
            for _ in range(draw.randint(0, 3)):
                if missing:
                    group, k = missing.pop(draw.randrange(min(len(missing), at_once)))
                    begun_at.setdefault(group.item.index, step)
                    admission.record_outputs([(group, ended(k))])
        parts = [(group, ended(k, None, draw.randint(0, 1))) for group, k in missing]
        for group, part in parts:
            if part.tokens:
                begun_at.setdefault(group.item.index, step)
        in_flight.end_rollout(step, admission, parts)
        assert len(admission.taken) == size or not in_flight.groups
        for group in admission.groups_no_longer_in_flight:
            assert step - begun_at[group.item.index] <= limit
        trained.update(group.item.index for group in admission.taken)
        dropped.update(group.item.index for group in admission.dropped)
    assert set(dropped) == uniform
    assert set(trained) == {item.index for item in chain(*batches)} - uniform
    assert set((trained + dropped).values()) == {1}


def test_without_dynamic_sampling_a_resumed_run_trains_what_is_left():
    """Also the prompts that the steps before have taken from the data and not begun."""
    batches, limit = items_of([4] * 6), 2
    items = [item for batch in batches for item in batch]
    before = GroupsInFlight(lambda indices: [], 1, limit)
    numbered = iter(enumerate(batches, 1))
    before.admit(*next(numbered))
    admission = before.begin_dynamic_sampling(1, 4, 10, 100, lambda: next(numbered, None))
    groups = admission.begin_groups()
    admission.record_outputs((group, ended(0)) for group in groups[:5])
    admission.end_interval()
    while (group := admission.next_group_to_compare()) is not None:
        admission.record_uniformity(group is groups[2])
    before.end_rollout(1, admission, [(group, ended(0, None, 1)) for group in groups[5:]])
    seen = Counter(group.item.index for group in admission.groups_no_longer_in_flight)
    in_flight = GroupsInFlight(lambda places: [items[index] for _, index in places], 1, limit)
    in_flight.load_state_dict(before.state_dict())
    n_taken = len(batches) - len(list(numbered))
    assert n_taken == 3
    for step in itertools.count(2):
        batch = batches[n_taken] if n_taken < len(batches) else []
        n_taken += bool(batch)
        if not batch and not in_flight.groups:
            break
        left = batches[n_taken:]
        choice = in_flight.begin_rollout(step, 2, batch, lambda n, left=left: left[:n], n_taken)
        missing = [group for group in choice.groups if group.n_missing_samples]
        while choice.min_missing_samples:
            choice.record_outputs([(missing.pop(), ended(0))])
        assert all(step - (group.begun_at or step) <= limit for group in choice.taken)
        seen.update(group.item.index for group in choice.taken)
        in_flight.end_rollout(step, choice, [(group, ended(0, None, 1)) for group in missing])
    assert seen == Counter(item.index for item in items)


def test_rewards_are_not_waited_for_while_the_device_is_full():
    in_flight = GroupsInFlight(lambda indices: [], 1, 4)
    in_flight.admit(1, items_of([12])[0])
    admission = in_flight.begin_dynamic_sampling(1, 4, 8, 6, lambda: None)
    groups = admission.begin_groups()
    assert [group.item.index for group in groups] == list(range(8))
    admission.record_outputs([(groups[2], ended(0))])
    assert admission.next_group_to_compare() is None  # it has just become whole
    admission.end_interval()
    assert admission.next_group_to_compare() is None  # seven samples are open, and six are decoded at once
    admission.record_outputs([(groups[1], ended(0)), (groups[0], ended(0))])
    assert admission.next_group_to_compare() is groups[2]
    admission.record_uniformity(True)
    assert [group.item.index for group in admission.begin_groups()] == [8]
    assert admission.next_group_to_compare() is None  # six samples are open
    admission.end_interval()
    admission.record_outputs([(groups[3], ended(0))])
    assert admission.next_group_to_compare() is groups[1]  # in the order of becoming whole
    admission.record_uniformity(False)
    assert admission.taken == [groups[1]]
    assert admission.dropped == [groups[2]]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The answers of the small model are short."""
    monkeypatch.setattr(partial_rollout, "DECISION_STEPS", 2)


# Runs ----------------------------------------------------------------------------------------------------------------

LONG = ["gconfig.max_new_tokens=60", "gconfig.temperature=3.0", "gconfig.n_samples=2", "reward.workers=1"]
AHEAD = [
    *LONG,
    "rollout.max_concurrent_rollouts=8",
    "rollout.max_head_offpolicyness=2",
    "rollout.prompts_ahead=3",
    "rollout.dynamic_sampling=true",
    "actor.use_decoupled_loss=true",
]


def epoch(folder: Path, *more: str, n: int = 22, reward: Any = odd_length) -> Played:
    """A whole epoch of 22 prompts, in batches of four and one of two."""
    rows = [{"prompt": f"{10 + k}+{20 + k}=", "solutions": [str(30 + 2 * k)]} for k in range(n)]
    data = ["total_train_steps=null", "total_train_epochs=1", "train_dataset.drop_last=false"]
    return play("grpo", folder, *data, *more, reward_fn=reward, train_dataset=rows)


Row = tuple[Any, ...]


def row_of(row: TrainSequence) -> Row:
    return tuple(np.asarray(row.tokens).tolist()), tuple(np.asarray(row.logprobs).tolist()), row.reward


def groups_of(rows: Sequence[TrainSequence]) -> Iterator[tuple[Row, ...]]:
    for start in range(0, len(rows), 2):
        yield tuple(map(row_of, rows[start : start + 2]))


@pytest.mark.slow
@pytest.mark.parametrize("reward", [odd_length, slow_odd_length], ids=["quick", "slow"])
def test_with_frozen_weights_an_epoch_trains_the_groups_with_different_rewards(reward, tmp_path):
    frozen = ["actor.optimizer.lr=0", "engine.exact=true"]
    waits = epoch(tmp_path / "waits", *LONG, *frozen)
    expected = [group for rows in waits.rows for group in groups_of(rows) if len({row[-1] for row in group}) > 1]
    assert 4 < len(expected) < 20
    run = epoch(tmp_path / "ahead", *AHEAD, *frozen, reward=reward)
    found = [group for rows in run.rows for group in groups_of(rows)]
    assert Counter(found) == Counter(expected)
    assert all(len(rows) == 8 for rows in run.rows[:-1])
    assert sum(run.series("rollout/dropped_groups")) == 22 - len(expected)
    assert sum(run.series("rollout/sampling_rounds")) == 6  # all batches of the epoch
    assert 1 <= max(run.series("rollout/oldest_gap")) <= 2
    assert sum(run.series("rollout/parked_samples")) > 0


def check_lengths(run: Played) -> None:
    """The metrics of lengths count the samples of trained prompts, each once."""
    for step, rows in enumerate(run.rows):
        lengths = [len(trained(row, "logprobs")) for row in rows]
        assert run.series("rollout/trained_len_mean")[step] == pytest.approx(np.mean(lengths))
        assert run.series("rollout/trained_len_max")[step] == max(lengths)


@pytest.mark.slow
def test_lengths_are_those_of_trained_prompts(tmp_path, monkeypatch):
    found = list[list[int]]()
    lengths_of = GroupsInFlight.stalest_lengths

    def watched(self: GroupsInFlight, *given: Any) -> list[int]:
        found.append(lengths_of(self, *given))
        return found[-1]

    monkeypatch.setattr(GroupsInFlight, "stalest_lengths", watched)
    run = epoch(tmp_path / "run", *AHEAD, n=40)
    assert sum(run.series("rollout/dropped_groups")) > 4
    check_lengths(run)
    assert found[:2] == [[], []]
    in_time = sorted(itertools.chain(*found))
    every = sorted(len(trained(row, "logprobs")) for rows in run.rows for row in rows)
    assert len(in_time) >= len(every) - 2 * 8 > 0  # the samples that the last two steps begin have no step to be logged
    assert not Counter(in_time) - Counter(every)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [odd_length, slow_odd_length], ids=["quick", "slow"])
def test_a_resumed_run_trains_the_same_samples(reward, tmp_path, monkeypatch):
    settings = [*AHEAD, "recover.mode=auto", "recover.freq_steps=1"]
    whole = epoch(tmp_path / "whole", *settings, n=60)
    assert whole.series("rollout/parked_samples")[1] > 0
    sample, n_calls = rollout.run_dynamic_sampling, itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(n_calls) == 3:
            raise ArenoError("the machine stops")
        return sample(*args)

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "run_dynamic_sampling", interrupted)
        with pytest.raises(ArenoError, match="stops"):
            epoch(tmp_path / "run", *settings, n=60, reward=reward)
    rest = epoch(tmp_path / "run", *settings, n=60, reward=reward)
    assert len(rest.rows) == len(whole.rows) - 2 > 1
    assert [list(map(row_of, rows)) for rows in rest.rows] == [list(map(row_of, rows)) for rows in whole.rows[2:]]


@pytest.mark.slow
def test_a_step_without_any_difference_ends_after_some_rounds(tmp_path):
    settings = [*AHEAD, "rollout.max_sampling_rounds=3", "total_train_steps=2"]
    run = epoch(tmp_path / "run", *settings, reward=always_one)
    assert run.series("rollout/sampling_rounds") == [3, 3]
    assert run.series("rollout/dropped_groups") == [8, 6]
    assert [len(rows) for rows in run.rows] == [8, 8]
    assert "all groups of this step have equal rewards" in (tmp_path / "run/logs/run.log").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["rollout.max_head_offpolicyness=2", "rollout.prompts_ahead=2"])
@pytest.mark.parametrize("once", ["dynamic_bs=true", "rollout.max_sampling_rounds=1"])
def test_dropped_prompts_are_not_replaced_if_a_step_takes_one_batch(once, ahead, tmp_path):
    settings = [*LONG, "rollout.dynamic_sampling=true", "actor.recompute_logprob=false", once, ahead]
    run = epoch(tmp_path / "run", *settings, "rollout.max_concurrent_rollouts=8")
    waiting = "parked_samples" if "max_head" in ahead else "postponed_prompts"
    assert sum(run.series(f"rollout/{waiting}")) > 0
    if "max_head" in ahead:
        check_lengths(run)
    dropped = run.series("rollout/dropped_groups")
    assert sum(dropped) > 2
    n_partial = 0
    for size, rows, gone in zip([4] * 5 + [2], run.rows, dropped, strict=True):
        differ = [len({row[-1] for row in group}) > 1 for group in groups_of(rows)]
        if gone == size:  # all groups are equal, and kept
            assert differ == [False] * size
        else:
            assert differ == [True] * (size - int(gone))
            n_partial += 1
    assert n_partial >= 2
