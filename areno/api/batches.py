"""Rows to batches: seeded order, too long rows skipped and counted, a cursor that can be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic

import numpy as np

from areno.api.chat import pair_item, prompt_item, sft_sequence
from areno.api.checks import check_count
from areno.api.data import Rows, rows_problem
from areno.api.row_forms import row_problem
from areno.api.types import Batch, Item, PairBatch, PairItem, PromptBatch, PromptItem, SequenceBatch
from areno.config.run import DatasetConfig
from areno.engine.types import TrainSequence
from areno.errors import DataError

logger = logging.getLogger("areno.data")

# Encoded rows are kept for the next epoch up to this many tokens in all (some 40 bytes each as Python lists).
_CACHED_TOKENS = 4_000_000


class BatchLoader(Generic[Item]):
    """Batches of encoded rows, epoch after epoch.

    `encode(row, index)` makes an item that has `tokens`; items of more than `max_tokens` tokens are skipped and counted
    in `total_skipped_long`. The order of an epoch is a function of (seed, epoch) alone. Construction raises DataError
    for what no batch can come of: too few rows, or a first row that cannot be encoded.
    """

    def __init__(
        self,
        rows: Rows,
        encode: Callable[[Mapping[str, Any], int], Item],
        config: DatasetConfig,
        *,
        batch_type: type[Batch[Item]],
        max_tokens: int,
        max_tokens_key: str,
        seed: int = 0,
        key: str = "train_dataset",
    ):
        self.rows = rows
        self.encode = encode
        self.config = config
        self.batch_type = batch_type
        self.max_tokens = max_tokens
        self.max_tokens_key = max_tokens_key
        self.seed = seed
        self.key = key
        # For messages: what the rows are called, and what is to be set where something is wrong with them.
        self.name, self._setting = (config.path, f"{key}.path") if config.path else ("the data given", key)
        self.epoch = 0
        self.total_skipped_long = 0
        self._next = 0  # rows of this epoch's order that are used up
        self._cache: dict[int, Item] = {}
        self._cached_tokens = 0
        self._too_long: dict[int, int] = {}  # row -> its tokens
        if config.drop_last and len(rows) < config.batch_size:
            raise self._too_few(len(rows))
        self._item(0)

    def batches(self) -> Iterator[Batch[Item]]:
        """The rest of the current epoch; then the number goes up. Raises DataError if a whole epoch gives no batch."""
        order = self._order()
        whole_epoch = self._next == 0
        n_batches = 0
        items: list[Item] = []
        skipped = 0
        while self._next < len(order):
            index = int(order[self._next])
            self._next += 1
            item = self._item(index)
            if item is None:
                skipped += 1
                self.total_skipped_long += 1
                continue
            items.append(item)
            if len(items) == self.config.batch_size:
                n_batches += 1
                yield self._batch(items, skipped)
                items, skipped = [], 0
        if items and not self.config.drop_last:
            n_batches += 1
            yield self._batch(items, skipped)
        if whole_epoch and not n_batches:
            raise self._nothing_left(len(items))
        self.epoch += 1
        self._next = 0

    def _batch(self, items: list[Item], skipped: int) -> Batch[Item]:
        return self.batch_type(
            items=items, skipped_long=skipped, total_skipped_long=self.total_skipped_long, epoch=self.epoch
        )

    def items(self) -> Iterator[Item]:
        """Every row that is not too long, in the order of the dataset. Where the loader stands is left as it is."""
        for index in range(len(self.rows)):
            item = self._item(index)
            if item is not None:
                yield item

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: after the batch it last gave."""
        return {"epoch": self.epoch, "next": self._next, "total_skipped_long": self.total_skipped_long}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken, on the same rows and seed."""
        self.epoch = state["epoch"]
        self._next = state["next"]
        self.total_skipped_long = state["total_skipped_long"]

    def _order(self) -> np.ndarray:
        if not self.config.shuffle:
            return np.arange(len(self.rows))
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.rows))

    def _item(self, index: int) -> Item | None:
        """The encoded row, or None if it is too long."""
        if index in self._too_long:
            return None
        item = self._cache.get(index)
        if item is not None:
            return item
        try:
            item = self.encode(self.rows[index], index)
        except DataError as error:
            source = f"{self._setting}: {self.name}" if self.config.path else self.key
            raise DataError(f"{source} row {index}: {error}") from error
        n_tokens = len(item.tokens)  # type: ignore[attr-defined]
        if n_tokens > self.max_tokens:
            if not self._too_long:
                logger.warning(
                    "%s row %d has %d tokens, more than %d (%s); such rows are skipped and counted",
                    self.name, index, n_tokens, self.max_tokens, self.max_tokens_key,
                )  # fmt: skip
            self._too_long[index] = n_tokens
            return None
        if self._cached_tokens + n_tokens <= _CACHED_TOKENS:
            self._cache[index] = item
            self._cached_tokens += n_tokens
        return item

    def _nothing_left(self, usable: int) -> DataError:
        if usable:
            return self._too_few(usable)
        shortest = min(self._too_long.values(), default=0)
        return DataError(
            f"{self._setting}: every row of {self.name} has more than {self.max_tokens} tokens "
            f"({self.max_tokens_key}), the shortest {shortest}; use shorter rows, or raise what limits them"
        )

    def _too_few(self, usable: int) -> DataError:
        long = f" ({len(self._too_long)} are too long)" if self._too_long else ""
        return DataError(
            f"{self.key}.batch_size: is {self.config.batch_size}, but {self.name} has only {usable} usable "
            f"rows{long}; lower it or set {self.key}.drop_last=false"
        )


def prompt_loader(
    rows: Rows,
    tokenizer: Any,
    config: DatasetConfig,
    *,
    context_len: int | None = None,
    context_key: str = "gconfig.max_tokens",
    enable_thinking: bool | None = None,
    seed: int = 0,
    key: str = "train_dataset",
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
) -> BatchLoader[PromptItem]:
    """Batches of prompts. `context_len`: prompt plus completion may not exceed it, so prompts must leave room for one
    token.

    `context_key` names, in messages, what sets `context_len`.
    """

    def encode(row: Mapping[str, Any], index: int) -> PromptItem:
        return prompt_item(tokenizer, row, index, enable_thinking, prompt_key=prompt_key, solutions_key=solutions_key)

    max_tokens, max_tokens_key = _limit(config, key, None if context_len is None else context_len - 1, context_key)
    return BatchLoader(
        rows,
        encode,
        config,
        batch_type=PromptBatch,
        max_tokens=max_tokens,
        max_tokens_key=max_tokens_key,
        seed=seed,
        key=key,
    )


def dataset_loader(
    dataset: Any,
    tokenizer: Any,
    *,
    batch_size: int,
    max_prompt_tokens: int,
    prompt_key: str,
    solutions_key: str,
    enable_thinking: bool | None,
) -> BatchLoader[PromptItem]:
    """Batches of the prompts that a script holds, in their order, the last one short; rows are checked as they come.

    Raises DataError for what is no dataset, ConfigError for numbers that make no sense.
    """
    if problem := rows_problem(dataset):
        raise DataError(f"dataset {problem}")
    if not len(dataset):
        raise DataError("dataset has no rows")
    check_count("batch_size", batch_size)
    check_count("max_prompt_tokens", max_prompt_tokens)

    def encode(row: Any, index: int) -> PromptItem:
        if isinstance(row, Mapping):
            problem = row_problem({"prompt": row[prompt_key]} if prompt_key in row else {}, "prompt")
        else:
            problem = row_problem(row, "prompt")
        if problem:
            raise DataError(problem.replace("field prompt", f"field {prompt_key}", 1))
        return prompt_item(tokenizer, row, index, enable_thinking, prompt_key=prompt_key, solutions_key=solutions_key)

    return BatchLoader(
        dataset,
        encode,
        DatasetConfig(batch_size=batch_size, shuffle=False, drop_last=False),
        batch_type=PromptBatch,
        max_tokens=max_prompt_tokens,
        max_tokens_key="max_prompt_tokens",
        key="dataset",
    )


def sft_loader(
    rows: Rows,
    tokenizer: Any,
    config: DatasetConfig,
    *,
    context_len: int | None = None,
    seed: int = 0,
    key: str = "train_dataset",
) -> BatchLoader[TrainSequence]:
    """Batches of supervised rows. `context_len`: the model's longest row."""

    def encode(row: Mapping[str, Any], index: int) -> TrainSequence:
        return sft_sequence(tokenizer, row)

    return _whole_row_loader(rows, encode, SequenceBatch, config, context_len, seed, key)


def dpo_loader(
    rows: Rows,
    tokenizer: Any,
    config: DatasetConfig,
    *,
    context_len: int | None = None,
    seed: int = 0,
    key: str = "train_dataset",
) -> BatchLoader[PairItem]:
    """Batches of preference pairs. The limits hold for the longer row of a pair."""

    def encode(row: Mapping[str, Any], index: int) -> PairItem:
        return pair_item(tokenizer, row, index)

    return _whole_row_loader(rows, encode, PairBatch, config, context_len, seed, key)


def _whole_row_loader(
    rows: Rows,
    encode: Callable[[Mapping[str, Any], int], Item],
    batch_type: type[Batch[Item]],
    config: DatasetConfig,
    context_len: int | None,
    seed: int,
    key: str,
) -> BatchLoader[Item]:
    """Of rows that nothing is added to: they may fill max_length and the model's context."""
    max_tokens, max_tokens_key = _limit(config, key, context_len, "the model's context")
    return BatchLoader(
        rows,
        encode,
        config,
        batch_type=batch_type,
        max_tokens=max_tokens,
        max_tokens_key=max_tokens_key,
        seed=seed,
        key=key,
    )


def _limit(config: DatasetConfig, key: str, other: int | None, other_key: str) -> tuple[int, str]:
    """The smaller of max_length and `other`, with the name of the one that it is."""
    if other is not None and other < config.max_length:
        return other, other_key
    return config.max_length, f"{key}.max_length"
