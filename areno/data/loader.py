"""Rows to batches: a seeded order for each epoch, a limit on the length of a row, a position that can be saved."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic

import numpy as np

from areno import heartbeat
from areno.config.datasets import DatasetConfig
from areno.data.encode import pair_item, prompt_item, sft_sequence
from areno.data.row_schema import RowKind, Rows, row_problem, rows_problem
from areno.errors import DataError, Key, Problem
from areno.types import Batch, Item, PromptItem

logger = logging.getLogger("areno.data")

# Encoded rows are kept for the next epoch up to this many tokens in all (some 40 bytes each as Python lists).
_CACHED_TOKENS = 4_000_000


@dataclass(eq=False, repr=False)
class BatchLoader(Generic[Item]):
    """Batches of encoded rows, epoch after epoch.

    encode: (row, its index) -> an item that has `tokens`. Items of more than `max_tokens` tokens are skipped, and
    counted in `total_skipped_long`. max_tokens_key: the setting behind `max_tokens`, for messages. key: the dataset's
    section, for messages. The order of an epoch depends on (seed, epoch) alone. The constructor raises DataError if
    there are too few rows for a batch or if the first row cannot be encoded.
    """

    rows: Rows
    encode: Callable[[Mapping[str, Any], int], Item]
    config: DatasetConfig
    _: KW_ONLY
    max_tokens: int
    max_tokens_key: str
    seed: int = 0
    key: str = "train_dataset"

    def __post_init__(self) -> None:
        # For messages: what the rows are called, and the setting that they come from.
        path, source = self.config.path, self.config.path or self.config.loader
        self.name = source or "the data given"
        self._setting = f"{self.key}.{'path' if path else 'loader'}" if source else self.key
        self.epoch = 0
        self.total_skipped_long = 0
        self._next = 0  # the place in this epoch's order behind the last batch given
        self._cache: dict[int, Item] = {}
        self._cached_tokens = 0
        self._too_long: dict[int, int] = {}  # row -> its tokens
        self._ready: dict[int, Item] = {}  # rows of later batches, as long or short as they are
        self._preparer: threading.Thread | None = None
        if self.config.drop_last and len(self.rows) < self.config.batch_size:
            raise self._too_few(len(self.rows))
        self._item(0)

    def batches(self) -> Iterator[Batch[Item]]:
        """The batches that are left of the current epoch. At its end `epoch` goes up by one.

        The loader encodes one batch ahead to know which is the last of an epoch; `state_dict` does not count that one.
        A thread encodes the batch behind it while this one is used.
        Raises DataError if a whole epoch gives no batch.
        """
        order = self._order()
        items, skipped, end = self._fill(order, self._next)
        if self._next == 0 and not self._is_batch(items):
            raise self._nothing_left(len(items))
        while self._is_batch(items):
            ahead = self._fill(order, end)
            self._next = end
            self.total_skipped_long += skipped
            self._prepare(order[ahead[2] : ahead[2] + self.config.batch_size].tolist())
            yield Batch(
                items=items,
                skipped_long=skipped,
                total_skipped_long=self.total_skipped_long,
                epoch=self.epoch,
                ends_epoch=not self._is_batch(ahead[0]),
            )
            items, skipped, end = ahead
        self.total_skipped_long += skipped
        self.epoch += 1
        self._next = 0

    def _prepare(self, indices: list[int]) -> None:
        """Encode rows in a thread. What goes wrong there goes wrong again where they are used, and is told there."""

        def run() -> None:
            with contextlib.suppress(Exception):
                for index in indices:
                    if index not in self._cache and index not in self._too_long:
                        self._ready[index] = self.encode(self.rows[index], index)

        self._wait_prepared()
        self._ready.clear()
        self._preparer = threading.Thread(target=run, daemon=True, name="areno-rows")
        self._preparer.start()

    def _wait_prepared(self) -> None:
        if self._preparer is not None:
            self._preparer.join()
            self._preparer = None

    def epochs(self, n: int) -> Iterator[Batch[Item]]:
        """The batches that are left of the first `n` epochs."""
        while self.epoch < n:
            yield from self.batches()

    def n_batches(self, n_epochs: int) -> int:
        """The batches of so many whole epochs. A row that nobody has looked at yet counts as not too long."""
        usable, size = len(self.rows) - len(self._too_long), self.config.batch_size
        return n_epochs * (usable // size if self.config.drop_last else -(-usable // size))

    def _fill(self, order: np.ndarray, start: int) -> tuple[list[Item], int, int]:
        """The next batch from place `start` of `order` on, how many too long rows it skips, and the place behind it."""
        self._wait_prepared()
        items: list[Item] = []
        place = start
        while place < len(order) and len(items) < self.config.batch_size:
            item = self._item(int(order[place]))
            heartbeat.beat()
            place += 1
            if item is not None:
                items.append(item)
        return items, place - start - len(items), place

    def _is_batch(self, items: list[Item]) -> bool:
        return len(items) == self.config.batch_size or (bool(items) and not self.config.drop_last)

    def items(self) -> Iterator[Item]:
        """Every row that is not too long, in the order of the dataset. The loader's position does not change."""
        yield from (item for index in range(len(self.rows)) if (item := self._item(index)) is not None)

    def state_dict(self) -> dict[str, int]:
        """The loader's position: right behind the batch that it gave last."""
        return {"epoch": self.epoch, "next": self._next, "total_skipped_long": self.total_skipped_long}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position that `state_dict` returned, with the same rows and seed."""
        self.epoch = state["epoch"]
        self._next = state["next"]
        self.total_skipped_long = state["total_skipped_long"]

    def _order(self) -> np.ndarray:
        if not self.config.shuffle:
            return np.arange(len(self.rows))
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.rows))

    def _item(self, index: int) -> Item | None:
        """The encoded row, or None if it is too long."""
        if index in self._too_long or index in self._cache:
            return self._cache.get(index)
        try:
            item = self._ready.pop(index, None) or self.encode(self.rows[index], index)
        except DataError as error:
            raise self._row_error(index, error) from error
        n_tokens = len(item.tokens)  # type: ignore[attr-defined]
        if n_tokens > self.max_tokens:
            if not self._too_long:
                text = "%s row %d has %d tokens, more than %d (%s); such rows are skipped and counted"
                logger.warning(text, self.name, index, n_tokens, self.max_tokens, self.max_tokens_key)
            self._too_long[index] = n_tokens
            return None
        if self._cached_tokens + n_tokens <= _CACHED_TOKENS:
            self._cache[index] = item
            self._cached_tokens += n_tokens
        return item

    def _row_error(self, index: int, error: DataError) -> DataError:
        [problem] = error.problems
        text, args = (problem.template, problem.args) if problem.args else ("{}", (problem.message,))
        if self._setting != self.key:
            return DataError(Problem(self._setting, "{} row {}: " + text, self.name, index, *args))
        return DataError("{} row {}: " + text, Key(self.key), index, *args)

    def _nothing_left(self, usable: int) -> DataError:
        if usable:
            return self._too_few(usable)
        shortest = min(self._too_long.values(), default=0)
        text = "every row of {} has more than {} tokens ({}), the shortest {}; use shorter rows, or raise the limit"
        limit = Key(self.max_tokens_key)
        return DataError(Problem(self._setting, text, self.name, self.max_tokens, limit, shortest))

    def _too_few(self, usable: int) -> DataError:
        long = f" ({len(self._too_long)} are too long)" if self._too_long else ""
        text = "is {}, but {} has only {} usable rows{}; lower it or set {}=false"
        values = (self.config.batch_size, self.name, usable, long, Key(f"{self.key}.drop_last"))
        return DataError(Problem(f"{self.key}.batch_size", text, *values))


def row_loader(
    kind: RowKind,
    rows: Rows,
    tokenizer: Any,
    config: DatasetConfig,
    *,
    context_len: int | None = None,
    context_key: str = "the model's context",
    enable_thinking: bool | None = None,
    seed: int = 0,
    key: str = "train_dataset",
) -> BatchLoader[Any]:
    """Batches of prompts (PromptItem), supervised rows (TrainSequence) or preference pairs (PairItem).

    context_len: the most tokens of a row; a prompt must leave room for one more, and of a pair the longer row counts.
    context_key: the setting behind it, for messages. enable_thinking: for prompts.
    """

    def encode(row: Mapping[str, Any], index: int) -> Any:
        if kind == "prompt":
            return prompt_item(tokenizer, row, index, enable_thinking)
        return sft_sequence(tokenizer, row) if kind == "sft" else pair_item(tokenizer, row, index)

    limit, limit_key = config.max_length, f"{key}.max_length"
    if context_len is not None and context_len - (kind == "prompt") < limit:
        limit, limit_key = context_len - (kind == "prompt"), context_key
    return BatchLoader(rows, encode, config, max_tokens=limit, max_tokens_key=limit_key, seed=seed, key=key)


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
    """Batches of a script's own prompts, in their order; the last may be short. DataError if `rows` is no dataset."""
    if problem := rows_problem(rows):
        raise DataError(f"dataset {problem}")
    if not len(rows):
        raise DataError("dataset has no rows")

    def encode(row: Any, index: int) -> PromptItem:
        if problem := row_problem(row, "prompt", prompt_key):
            raise DataError(problem)
        return prompt_item(tokenizer, row, index, enable_thinking, prompt_key=prompt_key, solutions_key=solutions_key)

    config = DatasetConfig(batch_size=batch_size, shuffle=False, drop_last=False)
    limit, limit_key = max_prompt_tokens, "max_prompt_tokens"
    return BatchLoader(rows, encode, config, max_tokens=limit, max_tokens_key=limit_key, key="dataset")
