"""The description of rotary position embeddings, without torch: a model's config holds one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Base of the frequencies, and how they are stretched to reach beyond the context of the first training.

    linear: all frequencies are divided by `factor`.
    llama3: wavelengths above original_max_positions / low_freq_factor are stretched by `factor`, wavelengths below
    original_max_positions / high_freq_factor are kept, and those between are interpolated.
    yarn (arXiv 2309.00071): frequencies that turn less than `beta_slow` times within original_max_positions are divided
    by `factor`, those that turn more than `beta_fast` times are kept, and those between are interpolated, over a range
    of whole frequencies with `truncate`. Queries and keys are multiplied by `attention_factor`.
    dynamic: nothing changes up to max_position_embeddings. Beyond, the frequencies would depend on the length of the
    text. A KV cache holds keys that were turned at shorter lengths, so decoding and training could not agree there:
    the model's context ends at max_position_embeddings.
    longrope (arXiv 2402.13753): within original_max_positions, each frequency is divided by its own one of
    `short_factors`, and queries and keys are multiplied by `attention_factor`. Beyond, all of a text's keys would be
    turned in another way, so the model's context ends there, as with dynamic.
    none: no rotation at all.

    partial: the share of each head that is rotated; the rest of it knows no position.
    interleaved: in the checkpoint, numbers that are rotated together are neighbours; see `head_order` in rotary.py.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope", "none"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    partial: float = 1.0
    interleaved: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return int(head_dim * self.partial)

    @property
    def limit(self) -> str:
        """For messages about the model's context: why it ends where it does. Empty where it is just its size."""
        if self.kind == "longrope":
            return " (original_max_position_embeddings; longrope scaling beyond it is not supported)"
        if self.kind != "dynamic":
            return ""
        return " (max_position_embeddings; dynamic rope scaling beyond it is not supported)"
