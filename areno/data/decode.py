"""Token ids to text, many rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_all(tokenizer: Any, token_rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
    """What `tokenizer.batch_decode` returns, in a fraction of its time: rows are decoded side by side, on all cores."""
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast
    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, own) and kind._decode is own._decode and kind.decode is own.decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(list(token_rows), skip_special_tokens=skip_special_tokens)
    return tokenizer.batch_decode(list(token_rows), skip_special_tokens=skip_special_tokens)
