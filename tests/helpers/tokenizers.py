"""The tokenizers of the tests: two small ones that lie beside them, and real ones where a machine has these."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

_SHIPPED = Path(__file__).parents[1] / "tokenizers"
_REAL = [Path(__file__).parents[3] / "shared/data" / name for name in ("tokenizers", "models")]


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer that comes with the tests (tiny, plain), or a real one; the test is skipped without that."""
    folder = next((f / name for f in (_SHIPPED, *_REAL) if (f / name).is_dir()), None)
    if folder is None:
        pytest.skip(f"the tokenizer {name} is not at {_REAL[0] / name}")
    return AutoTokenizer.from_pretrained(folder)


@cache
def shared_tokenizer(name: str) -> Any:
    """The same, loaded once: for tests that leave it as it is. A real one takes half a second."""
    return load_tokenizer(name)


@cache
def trl_templates() -> dict[str, str]:
    """The chat templates that trl ships, without importing it, which takes seconds. None if it is not installed."""
    found = find_spec("trl")
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja")) if found and found.origin else []
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def plain_values(item: Any) -> Any:
    """Return an encoded row as dictionaries and lists, which can be compared although arrays cannot."""
    if is_dataclass(item) and not isinstance(item, type):
        item = asdict(item)
    if isinstance(item, dict):
        return {name: plain_values(value) for name, value in item.items()}
    if isinstance(item, list) and item and isinstance(item[0], dict):
        return [plain_values(each) for each in item]
    return item.tolist() if isinstance(item, np.ndarray) else item
