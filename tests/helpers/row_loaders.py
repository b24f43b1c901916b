"""The loader of a training loop, from rows and a tokenizer."""

from __future__ import annotations

from typing import Any

from areno.config.datasets import DatasetConfig
from areno.data import loader
from areno.data.loader import BatchLoader, TokenLimit
from areno.data.row_schema import RowKind, Rows


def row_loader(
    kind: RowKind,
    rows: Rows,
    tokenizer: Any,
    config: DatasetConfig,
    context: tuple[int, str] | None = None,
    thinking: bool | None = None,
    **more: Any,
) -> BatchLoader[Any]:
    encode = loader.row_encoder(kind, tokenizer, config.changed_turns, thinking=thinking)
    return loader.row_loader(kind, rows, encode, config, None if context is None else TokenLimit(*context), **more)
