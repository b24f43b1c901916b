"""Rows that are rendered and encoded one by one, as the batches of a loader are compared with them."""

from __future__ import annotations

from typing import Any

from areno.data.encode import pair_draft, prompt_draft, sft_draft
from areno.types import PairItem, PromptItem, TrainSequence


def prompt_item(tokenizer: Any, *args: Any, **how: Any) -> PromptItem:
    return prompt_draft(tokenizer, *args, **how).encode(tokenizer)


def sft_sequence(tokenizer: Any, *args: Any, **how: Any) -> TrainSequence:
    return sft_draft(tokenizer, *args, **how).encode(tokenizer)


def pair_item(tokenizer: Any, *args: Any, **how: Any) -> PairItem:
    return pair_draft(tokenizer, *args, **how).encode(tokenizer)
