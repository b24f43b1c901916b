"""The description of rotary position embeddings, without torch: a model's config holds one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Base of the frequencies, and how they are stretched to reach beyond the context of the first training.

    linear: all frequencies are divided by `factor`. llama3: wavelengths above original_max_positions / low_freq_factor
    are stretched by `factor`, wavelengths below original_max_positions / high_freq_factor are kept, and those between
    are interpolated.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
