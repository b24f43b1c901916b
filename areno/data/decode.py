"""Token ids to text, many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_all(tokenizer: Any, token_rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
    """What `tokenizer.batch_decode` returns, in a fraction of its time: rows are decoded side by side, on all cores."""
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast._decode
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer)._decode is plain
    if is_plain and type(tokenizer).decode is PreTrainedTokenizerFast.decode and not _cleans_up(tokenizer):
        return tokenizer.backend_tokenizer.decode_batch(list(token_rows), skip_special_tokens=skip_special_tokens)
    return tokenizer.batch_decode(list(token_rows), skip_special_tokens=skip_special_tokens)


def _cleans_up(tokenizer: Any) -> bool:
    """Whether spaces of a text are changed after it was decoded."""
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", True))
