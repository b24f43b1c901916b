"""Make batches of encoded rows.

`BatchLoader` yields the rows of each epoch in a seeded order, skips rows that are too long, and can save and load its
position. `row_loader` makes the loaders of the training loops, and `row_encoder` the function with which they encode
rows. `given_prompt_loader` makes the loader for `Trainer.load_prompt_batches`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

import numpy as np

from areno import heartbeat
from areno.config.datasets import ChangedTurns, DatasetConfig
from areno.data.encode import RenderedRow, encode_rows
from areno.data.encode_ahead import CHUNK, BackgroundEncoder
from areno.data.messages import with_template_variables
from areno.data.row_rendering import render_labelled, render_pair, render_prompt, render_ranked, render_sft
from areno.data.row_schema import (
    RowKind,
    Rows,
    RowTooLong,
    TiedAnswers,
    row_problem,
    rows_at,
    rows_problem,
    template_variables,
)
from areno.data.solution_steps import render_steps
from areno.data.teacher_rows import TeacherRowRenderer
from areno.errors import ConfigError, DataError, Key, Problem
from areno.types import Batch, Item, PromptItem

logger = logging.getLogger("areno.data")

# The most tokens of encoded rows that are cached for the next epoch (9 bytes each as arrays, 40 as Python lists).
_CACHED_TOKENS = 4_000_000

_ROWS = 32  # of a batch, if a validation set has no batch_size
_BATCHES_AHEAD = 4  # batches that a thread encodes before they are used, if they are not long

Encode = Callable[[Sequence[Any], Sequence[int]], Sequence[Item | Exception]]
"""(rows, index of each row) -> the item of each row, or the exception if the row cannot be encoded."""


class TokenLimit(NamedTuple):
    """The maximum number of tokens of a row, and the setting that messages name for it."""

    n: int
    key: str


@dataclass(eq=False, repr=False)
class BatchLoader(Generic[Item]):
    """Iterates over a dataset in batches of encoded rows, epoch after epoch.

    The order of rows in an epoch depends only on the seed and the number of the epoch. Items have the attribute
    `tokens`. Items with more tokens than `limit` are skipped and counted in `total_skipped_long`. Rows in which no
    answer is preferred are skipped and counted in `total_skipped_ties`. Messages name the setting `key`.
    """

    rows: Rows
    encode: Encode[Item]
    config: DatasetConfig
    limit: TokenLimit
    _: KW_ONLY
    seed: int = 0
    key: str = "train_dataset"
    n_processes: int = 0
    source: str = ""  # the name of the rows among several sources

    def __post_init__(self) -> None:
        # For messages: the name of the rows, and the setting that they come from.
        path, source = self.config.path, self.config.path or self.config.loader
        self.name = source or "the data given"
        self._setting = f"{self.key}.{'path' if path else 'loader'}" if source else self.key
        self.epoch = 0
        self.total_skipped_long = self.total_skipped_ties = 0
        self._next = 0  # the position in this epoch's order after the last returned batch
        self._order: tuple[int, np.ndarray] | None = None  # of an epoch
        self._cache: dict[int, Item] = {}
        self._cached_tokens = 0
        self._too_long: dict[int, int] = {}  # index of a row -> number of its tokens
        self._why_long = ""  # why one of these rows is too long, if not for its own tokens
        self._ties: set[int] = set()
        read = partial(rows_at, self.rows)
        self._ahead = BackgroundEncoder(read, self.encode, _n_tokens, self.n_processes)
        self._n_epochs = 0  # epochs of the run that `batches_until_epoch` iterates over
        if self.config.drop_last and len(self.rows) < self.batch_size:
            raise self._too_few_rows_error(len(self.rows))
        self._item_or_none(0, self._ahead.pop_items([0]))

    @property
    def batch_size(self) -> int:
        return self.config.batch_size or _ROWS

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    @property
    def epochs_begun(self) -> int:
        return self.epoch + (self._next > 0)

    @property
    def parts(self) -> dict[str, BatchLoader[Item]]:
        return {"": self}

    def batches(self) -> Iterator[Batch[Item]]:
        """Iterate over the remaining batches of the current epoch. At the end, `epoch` increases by one.

        Batches are encoded ahead. When a batch is yielded, the next batch is already encoded, so that it is known
        whether the yielded batch is the last of the epoch. A thread encodes the rows of the batches after the next
        while the caller uses the yielded batch. `state_dict` counts only batches that were yielded.
        """
        order = self._row_order(self.epoch)
        items, long, ties, end = self._fill_batch(order, self._next)
        if self._next == 0 and not self._is_complete_batch(items):
            raise self._no_batch_error(len(items))
        while self._is_complete_batch(items):
            ahead = self._fill_batch(order, end)
            self._next = end
            self._count_skipped(long, ties)
            self._encode_next_batches(order, ahead[-1])
            yield Batch(
                items=items,
                skipped_long=long,
                total_skipped_long=self.total_skipped_long,
                skipped_ties=ties,
                total_skipped_ties=self.total_skipped_ties,
                epoch=self.epoch,
                ends_epoch=not self._is_complete_batch(ahead[0]),
            )
            items, long, ties, end = ahead
        self._count_skipped(long, ties)
        self.epoch += 1
        self._next = 0

    def draw(self, n: int, awake_from: Mapping[int, int]) -> tuple[list[Item], int, int]:
        """Return the next `n` rows that are not skipped, and the numbers of long rows and of ties on the way.

        After the last row of an epoch comes the first of the next one. A row in `awake_from` rests until this epoch, if
        the others suffice.
        """
        items, n_long, n_ties = list[Item](), 0, 0
        while len(items) < n:
            order, start = self._row_order(self.epoch), self._next
            found, long, ties, self._next = self._fill_batch(order, start, n - len(items), awake_from)
            if not start and not found:
                if not awake_from:
                    raise self._no_batch_error(0)
                awake_from, self._next = {}, 0
                continue
            items, n_long, n_ties = items + found, n_long + long, n_ties + ties
            if self._next == len(order):
                self.epoch, self._next = self.epoch + 1, 0
        self._count_skipped(n_long, n_ties)
        self._n_epochs = self.epoch + 2
        self._encode_next_batches(self._row_order(self.epoch), self._next)
        return items, n_long, n_ties

    def _count_skipped(self, long: int, ties: int) -> None:
        self.total_skipped_long += long
        self.total_skipped_ties += ties

    def _encode_next_batches(self, order: np.ndarray, start: int) -> None:
        """Start to encode the rows of the next batches, also those of the next epoch if the run has one."""
        n_rows = _BATCHES_AHEAD * self.batch_size
        indices = order[start : start + n_rows]
        if len(indices) < n_rows and self.epoch + 1 < self._n_epochs:
            indices = np.concatenate([indices, self._row_order(self.epoch + 1)[: n_rows - len(indices)]])
        self._ahead.schedule_rows(self._rows_to_encode(dict.fromkeys(indices.tolist())), self.batch_size)

    def _rows_to_encode(self, indices: Iterable[int]) -> list[int]:
        """Return the indices of the rows that are neither cached nor known to be skipped."""
        cache, too_long, ties = self._cache, self._too_long, self._ties
        return [index for index in indices if index not in cache and index not in too_long and index not in ties]

    @property
    def encoder_pids(self) -> list[int]:
        """Process ids of the processes that encode rows. Empty while a thread encodes them."""
        return [process.pid for process in self._ahead.processes]

    def close(self) -> None:
        self._ahead.close()

    def batches_until_epoch(self, n: int) -> Iterator[Batch[Item]]:
        """Iterate over the batches from the current position to the end of the `n`-th epoch of the run."""
        self._n_epochs = n
        while self.epoch < n:
            yield from self.batches()

    def n_batches(self, n_epochs: int) -> int:
        """Return an upper bound of the number of batches: rows that are not encoded yet may still be skipped."""
        usable, size = len(self.rows) - len(self._too_long) - len(self._ties), self.batch_size
        return n_epochs * (usable // size if self.config.drop_last else -(-usable // size))

    def _fill_batch(
        self, order: np.ndarray, start: int, n: int | None = None, awake_from: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[list[Item], int, int, int]:
        """Read `n` items (None: a batch) from `order[start:]`. Returns (items, number of long rows, of ties, end)."""
        items: list[Item] = []
        position, size = start, self.batch_size if n is None else n
        while position < len(order) and len(items) < size:
            due = order[position : position + size - len(items)].tolist()
            position += len(due)
            for item in self._iter_encoded([index for index in due if awake_from.get(index, 0) <= self.epoch]):
                heartbeat.beat()
                if item is not None:
                    items.append(item)
        seen = order[start:position].tolist()
        return items, sum(at in self._too_long for at in seen), sum(at in self._ties for at in seen), position

    def _is_complete_batch(self, items: list[Item]) -> bool:
        return len(items) == self.batch_size or (bool(items) and not self.config.drop_last)

    def items(self) -> Iterator[Item]:
        """Iterate over all rows that are not skipped, in the order of the dataset. The position does not change."""
        for start in range(0, len(self.rows), CHUNK):
            due = range(start, min(start + CHUNK, len(self.rows)))
            yield from (item for item in self._iter_encoded(due) if item is not None)

    def items_at(self, places: Sequence[tuple[str, int]]) -> list[Item]:
        """Return encoded rows by (source, index), without those that are skipped. The position does not change."""
        return [item for item in self._iter_encoded([index for _, index in places]) if item is not None]

    def _iter_encoded(self, indices: Sequence[int]) -> Iterator[Item | None]:
        """Yield the encoded row of each index, or None if the row is skipped."""
        found = self._ahead.pop_items(self._rows_to_encode(dict.fromkeys(indices)))
        yield from (self._item_or_none(index, found) for index in indices)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the loader after the last batch that it has yielded."""
        skipped = {"total_skipped_long": self.total_skipped_long, "total_skipped_ties": self.total_skipped_ties}
        return {"epoch": self.epoch, "next": self._next, **skipped}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved position. The rows and the seed must be the same as when it was saved."""
        if "sources" in state:
            text = "is null, but the run to resume began with several sources; name them, or start a new run"
            raise ConfigError(Problem("train_dataset.sources", text))
        self.epoch = state["epoch"]
        self._next = state["next"]
        self.total_skipped_long = state["total_skipped_long"]
        self.total_skipped_ties = state.get("total_skipped_ties", 0)  # absent in older states

    def _row_order(self, epoch: int) -> np.ndarray:
        if not self.config.shuffle:
            return np.arange(len(self.rows))
        if self._order is None or self._order[0] != epoch:
            of_source = [zlib.crc32(self.source.encode())] if self.source else []
            order = np.random.default_rng([self.seed, *of_source, epoch]).permutation(len(self.rows))
            self._order = epoch, order
        return self._order[1]

    def _item_or_none(self, index: int, found: Mapping[int, Item | Exception]) -> Item | None:
        """Return the item of a row, None if the row is skipped. `found` has the rows that are not cached."""
        if (item := self._cache.get(index)) is not None or index in self._too_long or index in self._ties:
            return item
        item = found[index]
        if isinstance(item, TiedAnswers | RowTooLong):
            if not (self._ties if isinstance(item, TiedAnswers) else self._too_long):
                logger.warning("%s row %d: %s; such rows are skipped and counted", self.name, index, item)
            if isinstance(item, TiedAnswers):
                self._ties.add(index)
            else:
                self._too_long[index], self._why_long = item.n_tokens, str(item)
            return None
        if isinstance(item, DataError):
            raise self._row_error(index, item) from item
        if isinstance(item, Exception):
            raise item
        n_tokens = _n_tokens(item)
        if n_tokens > self.limit.n:
            if not self._too_long:
                text = "%s row %d has %d tokens, more than %d (%s); such rows are skipped and counted"
                logger.warning(text, self.name, index, n_tokens, self.limit.n, self.limit.key)
            self._too_long[index] = n_tokens
            return None
        if self._cached_tokens + n_tokens <= _CACHED_TOKENS:
            self._cache[index] = item
            self._cached_tokens += n_tokens
        return item

    def _row_error(self, index: int, error: DataError) -> DataError:
        """Return a copy of `error` whose message begins with the name of the dataset and the index of the row."""
        [problem] = error.problems
        text, args = (problem.template, problem.args) if problem.args else ("{}", (problem.message,))
        if self._setting != self.key:
            return DataError(Problem(self._setting, "{} row {}: " + text, self.name, index, *args))
        return DataError("{} row {}: " + text, Key(self.key), index, *args)

    def _no_batch_error(self, usable: int) -> DataError:
        """Return the error for an epoch without a batch. `usable` is the number of rows that are not skipped."""
        if usable:
            return self._too_few_rows_error(usable)
        limit = Key(self.limit.key)
        if self._ties:
            text = "no row of {} can be trained on: in {} no answer is preferred, and {} have more than {} tokens ({})"
            counts = (len(self._ties), len(self._too_long), self.limit.n, limit)
            return DataError(Problem(self._setting, text, self.name, *counts))
        if self._why_long:
            return DataError(Problem(self._setting, "every row of {} is too long: {}", self.name, self._why_long))
        shortest = min(self._too_long.values(), default=0)
        text = "every row of {} has more than {} tokens ({}), the shortest {}; use shorter rows, or raise the limit"
        return DataError(Problem(self._setting, text, self.name, self.limit.n, limit, shortest))

    def _too_few_rows_error(self, usable: int) -> DataError:
        found = [(len(self._too_long), "are too long"), (len(self._ties), "have no preferred answer")]
        why = ", ".join(f"{count} {reason}" for count, reason in found if count)
        text = "is {}, but {} has only {} usable rows{}; lower it or set {}=false"
        values = (self.batch_size, self.name, usable, why and f" ({why})", Key(f"{self.key}.drop_last"))
        return DataError(Problem(f"{self.key}.batch_size", text, *values))


def _n_tokens(item: Any) -> int:
    return len(item.tokens)


def row_loader(
    kind: RowKind,
    rows: Rows,
    encode: Encode[Any],
    config: DatasetConfig,
    context: TokenLimit | None = None,
    *,
    seed: int = 0,
    key: str = "train_dataset",
    n_processes: int = 0,
    source: str = "",
) -> BatchLoader[Any]:
    """Make the batch loader of a training loop.

    Rows with more than config.max_length or `context` tokens are skipped. A prompt must be one token shorter than
    `context`, to leave room for a completion. A row for a reward model must be one token shorter, to leave room for its
    score. For a pair, the longer of its two sequences counts. Messages name the section `key`. Processes never encode
    prompts.
    """
    limit = TokenLimit(config.max_length_or_unlimited, f"{key}.max_length")
    room = kind in ("prompt", "rw", "prm")
    if context is not None and context.n - room < limit.n:
        limit = context._replace(n=context.n - room)
    n_processes = 0 if kind == "prompt" else n_processes
    encode = partial(_encode_of_source, source, encode) if source else encode
    return BatchLoader(rows, encode, config, limit, seed=seed, key=key, n_processes=n_processes, source=source)


def _encode_of_source(
    source: str, encode: Encode[PromptItem], rows: Sequence[Any], indices: Sequence[int]
) -> Sequence[PromptItem | Exception]:
    items = encode(rows, indices)
    for item in items:
        if isinstance(item, PromptItem):
            item.source = source
    return items


def row_encoder(
    kind: RowKind,
    tokenizer: Any,
    changed: ChangedTurns,
    *,
    thinking: bool | None = None,
    separator: str = "",
    teacher: TeacherRowRenderer | None = None,
) -> Encode[Any]:
    """Return the function that encodes the rows of a training loop. Only the kind "prm" uses `separator`."""
    drafts: dict[RowKind, Callable[..., RenderedRow[Any]]] = {
        "prompt": partial(render_prompt, enable_thinking=thinking),
        "sft": partial(render_sft, changed=changed),
        "prm": partial(render_steps, separator=separator),
        "dpo": render_pair,
        "kto": render_labelled,
        "rw": render_ranked,
    }
    draft = drafts[kind] if teacher is None else partial(teacher.render, thinking=thinking)
    return partial(encode_rows, tokenizer, draft=partial(_render_with_row_variables, draft, tokenizer))


def _render_with_row_variables(
    draft: Callable[..., RenderedRow[Any]], tokenizer: Any, row: Mapping[str, Any], index: int
) -> RenderedRow[Any]:
    """Render a row with its own variables of the chat template. At module level, so that it can be pickled."""
    return draft(with_template_variables(tokenizer, template_variables(row)), row, index)


def given_prompt_loader(
    rows: Any,
    tokenizer: Any,
    *,
    batch_size: int,
    max_prompt_tokens: int,
    prompt_key: str,
    solutions_key: str,
    enable_thinking: bool | None,
) -> BatchLoader[PromptItem]:
    """Make a batch loader for a script's prompts, which keep their order. The last batch may be smaller."""
    if problem := rows_problem(rows):
        raise DataError(f"dataset {problem}")
    if not len(rows):
        raise DataError("dataset has no rows")

    def render_row(row: Any, index: int) -> RenderedRow[PromptItem]:
        if problem := row_problem(row, "prompt", prompt_key):
            raise DataError(problem)
        how = {"prompt_key": prompt_key, "solutions_key": solutions_key}
        return render_prompt(
            with_template_variables(tokenizer, template_variables(row)), row, index, enable_thinking, **how
        )

    encode = partial(encode_rows, tokenizer, draft=render_row)
    config = DatasetConfig(batch_size=batch_size, shuffle=False, drop_last=False)
    return BatchLoader(rows, encode, config, TokenLimit(max_prompt_tokens, "max_prompt_tokens"), key="dataset")
