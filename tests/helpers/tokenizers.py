"""The tokenizers of the tests: two small ones that lie beside them, and real ones where a machine has these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

_SHIPPED = Path(__file__).parents[1] / "tokenizers"
_REAL = Path(__file__).parents[3] / "shared/data/tokenizers"


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer that comes with the tests (tiny, plain), or a real one; the test is skipped without that."""
    folder = next((f / name for f in (_SHIPPED, _REAL) if (f / name).is_dir()), None)
    if folder is None:
        pytest.skip(f"the tokenizer {name} is not at {_REAL / name}")
    return AutoTokenizer.from_pretrained(folder)
