"""Batches from several sources: shares of places, the order of each source, and what is saved."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from areno.config.sources import CurriculumConfig, SourceConfig
from areno.data.curriculum import Curriculum, GroupResult
from areno.data.mixed_loader import MixedLoader, ShareDealer
from areno.errors import ConfigError, DataError
from areno.types import PromptItem
from tests.helpers.row_loaders import row_loader
from tests.helpers.tokenizers import load_tokenizer


def mixed(
    n_rows: Mapping[str, int],
    weights: Mapping[str, float],
    size: int = 5,
    curriculum: CurriculumConfig | None = None,
    **config: Any,
) -> MixedLoader:
    parts = {}
    for name, n in n_rows.items():
        rows = [{"prompt": f"{name} {number}" + " long" * 40 * (number % 7 == 6)} for number in range(n)]
        source = SourceConfig(**{"max_length": 60, **config})
        parts[name] = row_loader("prompt", rows, load_tokenizer("tiny"), source, seed=3, source=name)
    sources = {name: SourceConfig(weight=weight) for name, weight in weights.items()}
    return MixedLoader(parts, Curriculum(curriculum or CurriculumConfig(), sources), size)


def drawn(loader: MixedLoader, n_batches: int) -> list[list[PromptItem]]:
    return [batch.items for batch in itertools.islice(loader.batches_until_epoch(10**6), n_batches)]


def rows_of(batches: list[list[PromptItem]], source: str) -> list[int]:
    return [item.index for items in batches for item in items if item.source == source]


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_shares_are_exact_up_to_a_place_after_any_batch(size: int) -> None:
    draw = random.Random(size)
    for _ in range(20):
        weights = {f"s{k}": draw.choice([0.0, 0.1, 1 / 3, 0.5, 2, draw.random()]) for k in range(draw.randint(1, 6))}
        weights["s0"] = 1.0
        dealer, dealt = ShareDealer(list(weights)), Counter[str]()
        for n_batches in range(1, 60):
            dealt.update(dealer.deal(weights, size))
            for name, weight in weights.items():
                assert abs(dealt[name] - weight / sum(weights.values()) * size * n_batches) < 1 - 1e-9
    dealer, counts = ShareDealer("abc"), []
    for _ in range(10):
        counts.append(Counter(dealer.deal({"a": 50, "b": 30, "c": 20}, size)))
    assert sum(counts, Counter()) == {"a": 5 * size, "b": 3 * size, "c": 2 * size}


def test_shares_follow_weights_that_change() -> None:
    dealer = ShareDealer("ab")
    first = Counter(place for _ in range(10) for place in dealer.deal({"a": 1, "b": 3}, 2))
    then = Counter(place for _ in range(10) for place in dealer.deal({"a": 1, "b": 0}, 2))
    assert (first, then) == ({"a": 5, "b": 15}, {"a": 20})


def test_the_rows_of_a_source_do_not_depend_on_the_others() -> None:
    alone = drawn(mixed({"a": 20}, {"a": 1}), 20)
    assert sorted(rows_of(alone, "a")[:18]) == [n for n in range(20) if n % 7 != 6]  # an epoch without the long rows
    assert sorted(rows_of(alone, "a")[18:36]) == sorted(rows_of(alone, "a")[:18])
    assert rows_of(alone, "a")[18:36] != rows_of(alone, "a")[:18]
    for weights in ({"a": 1, "b": 1}, {"a": 3, "b": 0.5}, {"c": 2, "b": 1, "a": 1}):
        batches = drawn(mixed({"a": 20, "b": 9, "c": 30}, {"c": 0, **weights}), 20)
        rows = rows_of(batches, "a")
        assert len(rows) > 20
        assert rows == rows_of(alone, "a")[: len(rows)]
    other = rows_of(drawn(mixed({"b": 20}, {"b": 1}), 20), "b")
    assert other != rows_of(alone, "a")
    assert rows_of(drawn(mixed({"a": 10}, {"a": 1}, shuffle=False), 4), "a")[:9] == [0, 1, 2, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("n_before", [0, 1, 7])
def test_a_loader_continues_where_another_one_was(n_before: int) -> None:
    sizes, weights = {"a": 20, "b": 3}, {"a": 5, "b": 3}
    whole = drawn(mixed(sizes, weights), 12)
    before, after = mixed(sizes, weights), mixed(sizes, weights)
    drawn(before, n_before)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    rest = drawn(after, 12 - n_before)
    assert [(item.source, item.index) for items in rest for item in items] == [
        (item.source, item.index) for items in whole[n_before:] for item in items
    ]
    more = mixed({**sizes, "c": 8}, {**weights, "c": 4})
    more.load_state_dict(before.state_dict())
    added = drawn(more, 12)
    for name in sizes:
        rows, kept = rows_of(added, name), rows_of(whole[n_before:], name)
        n = min(len(rows), len(kept))
        assert rows[:n] == kept[:n]
    assert len(rows_of(added, "c")) == 20
    places = [(item.source, item.index) for item in added[0]]
    assert [(item.source, item.index) for item in more.items_at(places)] == places
    with pytest.raises(ConfigError, match=r"train_dataset\.sources: has no source c"):
        before.items_at([("c", 0)])
    with pytest.raises(ConfigError, match="began with a single source"):
        before.load_state_dict({"epoch": 0, "next": 0})
    with pytest.raises(ConfigError, match="is null, but the run to resume began with several sources"):
        before.parts["a"].load_state_dict(before.state_dict())


def test_epochs_are_as_long_as_all_rows_together() -> None:
    loader = mixed({"a": 8, "b": 4}, {"a": 5, "b": 1}, size=4)
    batches = list(loader.batches_until_epoch(3))
    assert len(batches) == loader.n_batches(3) == 9
    assert [batch.epoch for batch in batches] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [batch.ends_epoch for batch in batches] == [False, False, True] * 3
    assert loader.epoch == 3
    assert loader.total_skipped_long == sum(batch.skipped_long for batch in batches) > 0


def test_a_source_without_a_row_that_fits_is_named() -> None:
    with pytest.raises(DataError, match=r"every row of the data given has more than 1 tokens .*, the shortest 11"):
        drawn(mixed({"a": 8}, {"a": 1}, max_length=1), 1)


def test_weights_follow_their_schedule() -> None:
    sources = {"a": SourceConfig(weight=3, final_weight=1), "b": SourceConfig(weight=1)}
    curriculum = Curriculum(CurriculumConfig(schedule_steps=4), sources)
    found = [curriculum.weights(n)["a"] for n in (0, 1, 2, 4, 100)]
    assert found == pytest.approx([3 / 4, 2.5 / 3.5, 2 / 3, 1 / 2, 1 / 2])


def test_the_bandit_prefers_sources_with_large_advantages() -> None:
    config = CurriculumConfig(type="bandit", learning_rate=0.25, temperature=0.5)
    curriculum = Curriculum(config, {"a": SourceConfig(), "b": SourceConfig(weight=2), "c": SourceConfig()})
    assert curriculum.weights(0) == pytest.approx({"a": 0.25, "b": 0.5, "c": 0.25})
    draw, values = random.Random(1), dict.fromkeys("abc", 0.0)
    for _ in range(5):
        results = [
            GroupResult(name, 0, [], [draw.gauss(0, scale) for _ in range(3)])
            for name, scale in (("a", 1.0), ("b", 0.1), ("a", 2.0))
        ]
        curriculum.learn(results, {})
        for name in "ab":
            sizes = [abs(each) for result in results if result.source == name for each in result.advantages]
            values[name] = 0.75 * values[name] + 0.25 * sum(sizes) / len(sizes)
    assert curriculum.values == pytest.approx(values)
    expected = np.array([1, 2, 1]) * np.exp(np.array([values[name] for name in "abc"]) / 0.5)
    assert list(curriculum.weights(7).values()) == pytest.approx(expected / expected.sum())
    again = Curriculum(config, {"a": SourceConfig(), "d": SourceConfig()})
    again.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert again.values == {"a": curriculum.values["a"], "d": 0.0}


def test_the_bandit_leaves_out_a_source_without_weight_whatever_its_advantages() -> None:
    config = CurriculumConfig(type="bandit", learning_rate=1, temperature=1e-3, schedule_steps=2)
    curriculum = Curriculum(config, {"a": SourceConfig(final_weight=0), "b": SourceConfig(), "c": SourceConfig()})
    curriculum.learn([GroupResult("a", 0, [], [1.0])], {})
    assert curriculum.weights(1) == {"a": 1, "b": 0, "c": 0}
    assert curriculum.weights(2) == {"a": 0, "b": 0.5, "c": 0.5}


def test_solved_and_hopeless_prompts_rest() -> None:
    config = CurriculumConfig(rest_epochs=2, solved=0.9, hopeless=0.1)
    loader = mixed({"a": 6, "b": 4}, {"a": 1, "b": 0}, 6, config)
    results = [GroupResult("a", 0, [1, 1], [0, 0]), GroupResult("a", 1, [0, 0.2], [0, 0]), GroupResult("a", 2, [], [])]
    assert set(rows_of(drawn(loader, 1), "a")) == set(range(6))
    loader.learn([*results, GroupResult("a", 3, [0.5, 1], [0, 0])])
    assert loader.metrics() == {"rollout/a/resting": 2.0, "rollout/b/resting": 0.0}
    rows = rows_of(drawn(loader, 4), "a")
    assert set(rows[:4]) == set(rows[4:8]) == {2, 3, 4, 5}
    assert set(rows[8:14]) == set(rows[14:20]) == set(range(6))
    assert not loader.metrics()
    results = [GroupResult("a", 4, [1, 1], [0, 0])]
    loader.learn(results)  # in the middle of an epoch, which does not count
    rows = rows_of(drawn(loader, 4), "a")
    assert 4 not in rows[4:14]
    assert 4 in rows[14:20]
    loader.learn([GroupResult("a", row, [1, 1], [0, 0]) for row in range(6)])
    assert loader.metrics()["rollout/a/resting"] == 6
    again = mixed({"a": 6, "b": 4}, {"a": 1, "b": 0}, 6, config)
    again.load_state_dict(loader.state_dict())
    again.curriculum.load_state_dict(json.loads(json.dumps(loader.curriculum.state_dict())))
    rest = [rows_of(drawn(each, 4), "a") for each in (loader, again)]
    assert rest[0] == rest[1]
    assert len(rest[0]) == 24  # nobody is awake, so all are drawn
