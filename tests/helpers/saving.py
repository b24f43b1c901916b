"""Saves the weights of a model in one call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from areno.models import saving
from areno.models.transformer import Transformer


def save_weights(
    model: Transformer,
    folder: str | Path,
    *,
    source: str | Path | Sequence[str | Path] = (),
    max_shard_bytes: int = saving.MAX_SHARD_BYTES,
) -> None:
    sources = [source] if isinstance(source, str | Path) else source
    with mock.patch.object(saving, "MAX_SHARD_BYTES", max_shard_bytes):
        saving.write_all(folder, saving.file_writers(model, folder, source=sources))
