"""Rows that are rendered and encoded one by one, as the batches of a loader are compared with them."""

from __future__ import annotations

from typing import Any

from areno.data.row_rendering import render_pair, render_prompt, render_sft
from areno.types import AnswersItem, PairItem, PromptItem, TrainSequence


def prompt_item(tokenizer: Any, *args: Any, **how: Any) -> PromptItem:
    return render_prompt(tokenizer, *args, **how).encode(tokenizer)


def sft_item(tokenizer: Any, *args: Any, **how: Any) -> AnswersItem:
    return render_sft(tokenizer, *args, **how).encode(tokenizer)


def sft_sequence(tokenizer: Any, *args: Any, **how: Any) -> TrainSequence:
    """Return the only sequence of a row."""
    [sequence] = sft_item(tokenizer, *args, **how).rows
    return sequence


def pair_item(tokenizer: Any, *args: Any, **how: Any) -> PairItem:
    return render_pair(tokenizer, *args, **how).encode(tokenizer)


class UnreadableRow:
    """Rows of which one cannot be read."""

    def __init__(self, rows: list[Any], bad: int = -1):
        self.rows, self.bad = rows, bad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError(f"no row {index}")
        return self.rows[index]
