"""Fingerprints of what a run began with, to tell whether a resumed run has the same model and the same data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
_ROWS = 64
_SAMPLE = 1 << 16  # bytes at the start, the middle and the end of a file


def folder_fingerprint(folder: str | Path) -> str:
    """Of a model or tokenizer folder: the names and sizes of its files, and samples of their bytes."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start in {0, max(0, size // 2), max(0, size - _SAMPLE)}:
                    file.seek(start)
                    digest.update(hashlib.sha256(file.read(_SAMPLE)).digest())
    return digest.hexdigest()[:16]


def rows_fingerprint(rows: Any) -> str:
    """Of a dataset, anything with a length and indexing: the number of its rows, and a sample of them."""
    count = len(rows)
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({count * n // _ROWS for n in range(_ROWS)} | {count - 1}):
        # Of what is not JSON only the type: its text may differ between processes, as that of a set does.
        row = json.dumps(rows[index], default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(row.encode(errors="surrogatepass"))
    return f"{count} rows, {digest.hexdigest()[:16]}"
