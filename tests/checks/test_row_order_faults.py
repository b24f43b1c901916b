"""Orders of rows that leave some out, repeat them, or lose their place: each is found by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.checks.data.row_order import CHECKS
from areno.data.loader import BatchLoader
from tests.helpers.checked import data_file, failed, found_by

RIGHT = BatchLoader._row_order
DPO, RW = "dpo quickstart_dpo", "rw quickstart_rw"
Order = Callable[[Any, int], np.ndarray]


def row_order(command: str, *settings: str) -> dict[str, tuple[str, str]]:
    recipe, task = command.split()
    found = found_by(CHECKS, recipe, f"--config-name={task}", *settings)
    assert not failed(found), failed(found)
    return {each.name: (each.verdict, each.line) for each in found}


def third_tiled(loader: Any, epoch: int) -> np.ndarray:
    order = RIGHT(loader, epoch)
    return np.tile(order[: len(order) // 3 + 1], 3)[: len(order)]


def never_the_last(loader: Any, epoch: int) -> np.ndarray:
    order = RIGHT(loader, epoch)
    return order[: 2 * len(order) // 3]


def in_blocks(loader: Any, epoch: int) -> np.ndarray:
    n, rng = len(loader.rows), np.random.default_rng([loader.seed, epoch])
    blocks = np.array_split(np.arange(n), n // 16)
    return np.concatenate([blocks[index] for index in rng.permutation(len(blocks))])


def without_seed(loader: Any, epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).permutation(len(loader.rows))


@pytest.mark.parametrize("settings", [[], ["train_dataset.shuffle=false"], ["train_dataset.drop_last=false"]])
def test_the_right_order_is_green(settings: list[str]) -> None:
    assert row_order(DPO, *settings)["row-order"][0] == "green"


@pytest.mark.parametrize(
    ("order", "settings", "said"),
    [
        (third_tiled, [], "epoch 1 reads row"),
        (never_the_last, [], "epoch 1 reads 2"),
        (lambda loader, epoch: RIGHT(loader, 0), [], "second epoch reads its rows in the order of the first"),
        (lambda loader, epoch: np.arange(len(loader.rows)), [], "in the order of the first"),
        (in_blocks, [], "follow their neighbour"),
        (without_seed, [], "another seed gives the same order"),
        (without_seed, ["train_dataset.shuffle=false"], "not read in the order of the file"),
    ],
)
def test_a_wrong_order_is_found(order: Order, settings: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchLoader, "_row_order", order)
    verdict, line = row_order(RW, *settings)["row-order"]
    assert verdict == "red"
    assert said in line


def later(state: dict[str, int], n: int) -> dict[str, int]:
    return state | {"next": state["next"] + n}


def test_a_state_that_loses_its_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BatchLoader.state_dict
    monkeypatch.setattr(BatchLoader, "state_dict", lambda loader: later(right(loader), 1))
    verdict, line = row_order(DPO)["row-order"]
    assert verdict == "red"
    assert "resumes in the middle of an epoch goes on with rows" in line


def of_sources(folder: Path) -> list[str]:
    sums = [{"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a, b in itertools.product(range(10, 30), repeat=2)]
    one, two = data_file(folder / "one.jsonl", sums[:150]), data_file(folder / "two.jsonl", sums[150:])
    return [
        "train_dataset.path=null",
        "train_dataset.loader=null",
        "valid_dataset=null",
        f"+train_dataset.sources={{one: {{path: {one}}}, two: {{path: {two}}}}}",
    ]


def test_each_source_of_a_mixture_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = of_sources(tmp_path)
    assert row_order("gspo quickstart", *given)["row-order"][0] == "green"
    monkeypatch.setattr(BatchLoader, "_row_order", third_tiled)
    assert "train_dataset.sources.two: epoch 1 reads row" in row_order("gspo quickstart", *given)["row-order"][1]


def test_labels_that_are_sorted_and_not_shuffled_are_found(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "response": f"{2 * n}", "label": n < 50} for n in range(10, 90)]
    given = [f"train_dataset.path={data_file(tmp_path / 'rows.jsonl', rows)}", "train_dataset.loader=null"]
    given += ["train_dataset.batch_size=8", "valid_dataset=null"]
    assert "rows-of-a-step" not in row_order("kto quickstart_kto", *given)
    found = row_order("kto quickstart_kto", *given, "train_dataset.shuffle=false")["rows-of-a-step"]
    assert found[0] == "red"
    assert "10 of 10 steps" in found[1]
    mixed = [rows[at] for pair in zip(range(40), range(40, 80), strict=True) for at in pair]
    given[0] = f"train_dataset.path={data_file(tmp_path / 'mixed.jsonl', mixed)}"
    assert row_order("kto quickstart_kto", *given, "train_dataset.shuffle=false")["rows-of-a-step"][0] == "green"
