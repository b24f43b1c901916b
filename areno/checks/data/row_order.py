"""Checks of the order in which a run reads its rows: each once in an epoch, shuffled or not, also after a resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.known_answers import number_of
from areno.checks.inputs.subject import Dataset, Subject
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.loader import BatchLoader
from areno.run.progress import RunProgress

_MOST_ROWS, _EPOCHS = 4096, 2
_MOST_NEIGHBOURS = 0.25  # of rows that follow each other also in the file
_FEW_VALUES, _MOST_ALIKE = 20, 0.5
_SORTED = 0.95  # correlation of the places in the file and in the order of a number
_NOT_LIMITED = {"total_train_steps": None, "total_train_n_seqs": None, "total_train_epochs": _EPOCHS}

Batches = list[list[int]]


@dataclass
class _Row:
    """A row that is known by its place in the file alone."""

    index: int
    source: str = ""
    tokens: Sequence[int] = (0,)


def _encode(rows: Sequence[int], indices: Sequence[int]) -> list[_Row]:
    return [_Row(index) for index in rows]


def row_order(subject: Subject) -> Iterator[Finding]:
    """Whether each row is read once in an epoch, in another order in the next one, and where a resumed run goes on."""
    for dataset in subject.training_rows:
        name, n_rows = dataset.key, min(dataset.loader.n_rows, max(_MOST_ROWS, 4 * dataset.loader.batch_size))
        read = _read_source if dataset.source else _read_run
        epochs, resumed, others = read(subject, dataset, n_rows)
        faults = [*_order_faults(dataset, n_rows, epochs), *_seed_faults(dataset, epochs, others)]
        if resumed[0] != resumed[1]:
            faults.append(_resume_fault(*resumed))
        yield from (red("row-order", f"{name}: {text}") for text in faults[:1])
        if not faults:
            kept = "in another order in each epoch" if dataset.section.shuffle else "in the order of the file"
            text = f"each of {n_rows:,} rows is read once in an epoch, {kept}; a resumed run goes on with the next row"
            yield green("row-order", f"{name}: {text}")


def _loader(dataset: Dataset, n_rows: int, **changes: Any) -> BatchLoader[Any]:
    return replace(dataset.loader, rows=range(n_rows), encode=_encode, n_processes=0, **changes)


def _read_run(
    subject: Subject, dataset: Dataset, n_rows: int
) -> tuple[list[Batches], tuple[Batches, Batches], Batches]:
    """Read two epochs as a run does.

    Returns (batches of each epoch, (batches after the middle of the second epoch, those of a resumed run), batches of
    another seed).
    """
    changes: dict[str, Any] = dict(_NOT_LIMITED)
    if isinstance(subject.config, PolicyExperimentConfig):
        changes |= {"total_train_n_tokens": None, "rollout.dynamic_sampling": False, "dynamic_bs": False}
    config = subject.small_config(changes)

    def read(progress: RunProgress) -> Iterator[Any]:
        progress.open_batches()
        while (batch := progress.next_step()) is not None:
            yield batch

    epochs: list[Batches] = [[] for _ in range(_EPOCHS)]
    first, state, after = RunProgress(config, loader := _loader(dataset, n_rows)), dict[str, Any](), Batches()
    middle = loader.n_batches(_EPOCHS) * 3 // 4
    for number, batch in enumerate(read(first), 1):
        indices = [item.index for item in batch.items]
        epochs[min(batch.epoch, _EPOCHS - 1)].append(indices)
        if number > middle:
            after.append(indices)
        if number == middle:
            state = json.loads(json.dumps(first.state_dict()))
    loader.close()
    resumed = RunProgress(config, loader := _loader(dataset, n_rows))
    again = Batches()
    if state:
        resumed.load_state_dict(state)
        again = [[item.index for item in batch.items] for batch in read(resumed)]
        loader.close()
    others = _first_epoch(_loader(dataset, n_rows, seed=dataset.loader.seed + 1))
    return epochs, (after, again if state else after), others


def _first_epoch(loader: BatchLoader[Any]) -> Batches:
    found = [[item.index for item in batch.items] for batch in loader.batches()]
    loader.close()
    return found


def _read_source(
    subject: Subject, dataset: Dataset, n_rows: int
) -> tuple[list[Batches], tuple[Batches, Batches], Batches]:
    """Read one of several sources as their mixture draws from it. The end of an epoch is within a batch."""
    size = min(dataset.loader.batch_size, n_rows)

    def draw(loader: BatchLoader[Any], n: int) -> list[int]:
        items, *_ = loader.draw(n, {})
        return [item.index for item in items]

    loader = _loader(dataset, n_rows)
    start = draw(loader, n_rows + n_rows // 2)
    state = json.loads(json.dumps(loader.state_dict()))
    after = draw(loader, n_rows - n_rows // 2)
    loader.close()
    resumed = _loader(dataset, n_rows)
    resumed.load_state_dict(state)
    again = draw(resumed, n_rows - n_rows // 2)
    resumed.close()
    read = [*start, *after]
    epochs = [[read[at : at + size] for at in range(begin, begin + n_rows, size)] for begin in (0, n_rows)]
    epochs = [[batch[: n_rows - size * number] for number, batch in enumerate(of_epoch)] for of_epoch in epochs]
    other = _loader(dataset, n_rows, seed=dataset.loader.seed + 1)
    others = [draw(other, n_rows)]
    other.close()
    return epochs, ([after], [again]), others


def _order_faults(dataset: Dataset, n_rows: int, epochs: list[Batches]) -> Iterator[str]:
    section, size, orders = dataset.section, dataset.loader.batch_size, list[list[int]]()
    whole = n_rows if dataset.source or not section.drop_last else n_rows - n_rows % size
    for number, batches in enumerate(epochs, 1):
        order = [index for batch in batches for index in batch]
        orders.append(order)
        counts = Counter(order)
        row, most = max(counts.items(), key=lambda each: each[1], default=(0, 0))
        if most > 1:
            missing = n_rows - len(counts)
            yield f"epoch {number} reads row {row} {most} times, and {missing} of {n_rows} rows never"
        elif len(order) < whole:
            yield f"epoch {number} reads {len(order)} of {n_rows} rows"
    if not section.shuffle:
        if any(order != sorted(order) for order in orders):
            yield "shuffle=false, but rows are not read in the order of the file"
    elif n_rows > 8:
        if orders[0] == orders[1]:
            yield "the second epoch reads its rows in the order of the first, although shuffle is true"
        steps = np.abs(np.diff(orders[0]))
        if len(steps) and (steps <= 1).mean() > _MOST_NEIGHBOURS and n_rows > 32:
            yield f"{(steps <= 1).mean():.0%} of the rows follow their neighbour in the file, although shuffle is true"


def _seed_faults(dataset: Dataset, epochs: list[Batches], others: Batches) -> Iterator[str]:
    order = [index for batch in epochs[0] for index in batch]
    if dataset.section.shuffle and len(order) > 8 and order == [index for batch in others for index in batch]:
        yield "another seed gives the same order of rows"


def _resume_fault(after: Batches, again: Batches) -> str:
    if not again:
        return "a run that resumes in the middle of an epoch reads no row any more"
    wanted, found = after[0] if after else [], again[0]
    where = f"goes on with rows {found[:3]} and not with {wanted[:3]}"
    if found != wanted:
        return f"a run that resumes in the middle of an epoch {where}"
    return f"a run that resumes in the middle of an epoch reads {len(again)} more batches and not {len(after)}"


def rows_of_a_step(subject: Subject) -> Iterator[Finding]:
    """Whether rows that are not shuffled lie sorted in the file, so that the rows of a step are all of one kind."""
    for dataset in subject.training_rows:
        rows, size = [row for row in subject.rows_of(dataset) if row.item is not None], dataset.loader.batch_size
        if dataset.section.shuffle or len(rows) < dataset.loader.n_rows / 2 or size < 4:
            continue
        if (by := _sorted_by(rows)) is not None and len(rows) >= 4 * size:
            text = f"{dataset.key}: shuffle=false, and the rows are sorted by {by}: each step has rows that are alike."
            yield not_checked("rows-of-a-step", f"{text} This is right only for a curriculum: is it one?")
            continue
        kinds = [_kind(row) for row in rows]
        batches = [kinds[at : at + size] for at in range(0, len(kinds) - size + 1, size)]
        if not batches or not 2 <= len(set(kinds)) <= _FEW_VALUES:
            continue
        alike = sum(len(set(batch)) == 1 for batch in batches)
        most = max(Counter(kinds).values()) / len(kinds)
        text = f"{dataset.key}: shuffle=false, and in {alike} of {len(batches)} steps all rows have one label or answer"
        is_sorted = alike > max(_MOST_ALIKE, 2 * most**size) * len(batches)
        yield (red if is_sorted else green)("rows-of-a-step", text)


def _sorted_by(rows: Sequence[Any]) -> str | None:
    """Return by which number rows are sorted, nearly or wholly."""
    numbers: dict[str, list[float]] = {"the length of their texts": [len(str(row.given)) for row in rows]}
    answers = [number_of(_kind(row)) for row in rows]
    if None not in answers:
        numbers["their answers"] = [value for value in answers if value is not None]
    for name, values in numbers.items():
        if len(set(values)) > _FEW_VALUES:
            ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
            if abs(np.corrcoef(ranks, np.arange(len(rows)))[0, 1]) > _SORTED:
                return name
    return None


def _kind(row: Any) -> str:
    given = row.row if isinstance(row.row, dict) else {}
    for name in ("label", "solutions", "response"):
        if name in given:
            return str(given[name])
    return ""


CHECKS = (row_order, rows_of_a_step)
