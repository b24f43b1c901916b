"""Encode the rows of a dataset in a process, while the run goes on.

Items come back as a few large arrays, since the driver would take longer to unpickle an array for each row.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from areno.engine.processes.child import exit_with_parent, without_main_module
from areno.types import AnswersItem, PairItem, TrainSequence

Encode = Callable[[Sequence[Any], Sequence[int]], Sequence[Any]]
"""(rows, index of each row) -> the item of each row, or the exception if the row cannot be encoded."""


class EncoderProcess:
    """A process that encodes rows. It ends when `close` is called, or when the driver ends.

    `pickle_rows` is a pickled `Encode`, whose items are instances of AnswersItem or PairItem. Call `wait_ready` before
    the first `encode`. `wait_ready` and `encode` raise OSError or EOFError if the process has ended, for example
    because it cannot import the code of the tokenizer.
    """

    def __init__(self, message: bytes):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_process_main, args=(theirs,), name="areno-encoder", daemon=True)
        with without_main_module():
            self._process.start()
        theirs.close()
        self._pipe.send_bytes(message)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "the process was started"
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the process has loaded the encoder, which takes some seconds."""
        self._pipe.recv_bytes()

    @staticmethod
    def pickle_rows(rows: Sequence[Any], indices: Sequence[int]) -> bytes:
        return pickle.dumps((rows, indices), pickle.HIGHEST_PROTOCOL)

    def encode(self, message: bytes, indices: Sequence[int]) -> list[Any]:
        """Encode rows. `pickle_rows` is the pickled (rows, indices). A row that cannot be encoded gives None."""
        self._pipe.send_bytes(message)
        flat: _FlatItems | None = pickle.loads(self._pipe.recv_bytes())
        return [None] * len(indices) if flat is None else flat.to_items(indices)

    def close(self) -> None:
        """Kill the process. If another thread waits in `encode`, its call raises EOFError."""
        self._process.kill()
        self._process.join()


@dataclass(slots=True)
class _FlatItems:
    """The items of several rows as a few concatenated arrays."""

    sizes: list[int]  # sequences of each row, 0 if it could not be encoded
    are_pairs: bool  # of two sequences each
    lengths: list[int]  # tokens of each sequence
    tokens: np.ndarray  # int64
    prompt_mask: np.ndarray  # bool
    returns: np.ndarray | None  # float32
    others: list[tuple[int, float]]  # (eos_token_id, reward) of each sequence

    @classmethod
    def from_items(cls, found: Sequence[Any]) -> _FlatItems:
        """Concatenate the arrays of items. An exception counts as a row without sequences."""
        items = [[] if isinstance(item, Exception) else _rows_of(item) for item in found]
        rows = [row for item in items for row in item]
        returns = [row.returns for row in rows if row.returns is not None]
        return cls(
            list(map(len, items)),
            any(isinstance(item, PairItem) for item in found),
            [len(row.tokens) for row in rows],
            np.concatenate([np.zeros(0, np.int64), *(row.tokens for row in rows)]),
            np.concatenate([np.zeros(0, bool), *(row.prompt_mask for row in rows)]),
            np.concatenate(returns) if returns else None,
            [(row.eos_token_id, row.reward) for row in rows],
        )

    def to_items(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of the rows with these indices. A row that could not be encoded has None."""
        rows = self._iter_rows()
        return [
            self._item_from_rows([next(rows) for _ in range(size)], index) if size else None
            for index, size in zip(indices, self.sizes, strict=True)
        ]

    def _item_from_rows(self, rows: list[TrainSequence], index: int) -> PairItem | AnswersItem:
        if self.are_pairs:
            return PairItem(chosen=rows[0], rejected=rows[1], index=index)
        return AnswersItem(rows=rows, index=index)

    def _iter_rows(self) -> Iterator[TrainSequence]:
        start = 0
        for length, (end, reward) in zip(self.lengths, self.others, strict=True):
            of_row = slice(start, start + length)
            start += length
            yield TrainSequence(
                tokens=self.tokens[of_row],
                prompt_mask=self.prompt_mask[of_row],
                returns=None if self.returns is None else self.returns[of_row],
                eos_token_id=end,
                reward=reward,
            )


def _rows_of(item: PairItem | AnswersItem) -> list[Any]:
    return [item.chosen, item.rejected] if isinstance(item, PairItem) else item.rows


def _process_main(pipe: Connection) -> None:
    """Run the process: unpickle the encoder, then encode rows until the driver closes the pipe or ends."""
    exit_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are several processes, and the training loop needs a core
    try:
        encode: Encode = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(b"ready")
    except Exception:  # such as a tokenizer whose code cannot be imported here; the driver logs the end of the process
        os._exit(1)
    with suppress(EOFError, OSError):
        while True:
            message = pipe.recv_bytes()
            try:
                rows, indices = pickle.loads(message)
                found = _FlatItems.from_items(encode(rows, indices))
            except Exception:  # the driver encodes these rows itself, and so meets the error where it is reported
                found = None
            pipe.send_bytes(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))
    os._exit(0)
