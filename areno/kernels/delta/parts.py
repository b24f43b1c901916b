"""What a gated delta layer is made of, and what it remembers of a row. Letters as in the package.

How packed rows are cut into chunks of equal size. Letters as in the package; T chunks of C tokens, J steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class DeltaWeights(NamedTuple):
    """Of one layer on one rank. log_decay: the logarithm of how fast states decay. norm, eps: of the result's heads."""

    conv_XW: Tensor
    log_decay_H: Tensor
    bias_H: Tensor
    norm_V: Tensor
    eps: float
    n_key_heads: int

    @property
    def n_heads(self) -> int:
        return len(self.log_decay_H)

    @property
    def value_dim(self) -> int:
        return len(self.norm_V)

    @property
    def key_dim(self) -> int:
        return (len(self.conv_XW) - self.n_heads * self.value_dim) // (2 * self.n_key_heads)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of the parts of a token's P numbers: inputs of the convolution, z, b, a."""
        return len(self.conv_XW), self.n_heads * self.value_dim, self.n_heads, self.n_heads


class DeltaGradients(NamedTuple):
    """Of the weights, float32 and in their shapes."""

    conv_XW: Tensor
    log_decay_H: Tensor
    bias_H: Tensor
    norm_V: Tensor


class DeltaStates(NamedTuple):
    """Of one layer: the last inputs of the convolution, the oldest first, and the matrices, float32."""

    inputs_SXw: Tensor
    matrices_SHKV: Tensor


CHUNK = 64  # tokens: enough for products of matrices, few enough for the triangular system of a chunk


@dataclass(frozen=True)
class RowChunks:
    """The chunks of all rows: first those that begin a row, then the second ones, and so on, the longest rows first.

    So the chunks of one step are neighbours, and their rows are the first ones of the step before.

    order_R: the rows, the longest first. lengths_R: of rows, as they are packed. borders: (R + 1,), where they start,
    and the number of tokens.
    rows_J: how many rows each step has. firsts_J: the first chunk of each step, on the device; the j-th chunk of the
    row order_R[i] is firsts_J[j] + i. tokens_TC: the token at each place of a chunk, N where there is none.
    sizes_T: how many there are. places_N: where in the flattened chunks each token is. ages_N: how many tokens of its
    row are before a token. rows_N: its row, as they are packed.
    """

    order_R: Tensor
    lengths_R: Tensor
    borders: Tensor
    rows_J: tuple[int, ...]
    firsts_J: Tensor
    tokens_TC: Tensor
    sizes_T: Tensor
    places_N: Tensor
    ages_N: Tensor
    rows_N: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], device: torch.device, chunk: int = CHUNK) -> RowChunks:
        """starts: where each row begins, and the number of tokens at the end."""
        starts_R = np.array(starts, dtype=np.int64)
        n_tokens, lengths_R = int(starts_R[-1]), np.diff(starts_R)
        order_R = np.argsort(-lengths_R, kind="stable")
        n_chunks_R = -(-lengths_R[order_R] // chunk)
        n_steps = int(n_chunks_R.max(initial=0))
        rows_J = tuple(int((n_chunks_R > step).sum()) for step in range(n_steps))
        firsts_J = np.cumsum([0, *rows_J[:-1]], dtype=np.int64)[:n_steps]
        steps_T = np.repeat(np.arange(n_steps), rows_J)
        rows_T = order_R[np.concatenate([np.arange(n) for n in rows_J])] if rows_J else order_R[:0]
        ages_TC = (steps_T * chunk)[:, None] + np.arange(chunk)
        inside_TC = ages_TC < lengths_R[rows_T][:, None]
        tokens_TC = np.where(inside_TC, starts_R[rows_T][:, None] + ages_TC, n_tokens)
        places_N = np.empty(n_tokens, dtype=np.int64)
        places_N[tokens_TC[inside_TC]] = np.flatnonzero(inside_TC)
        rows_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
        ages_N = np.arange(n_tokens) - starts_R[rows_N]

        def upload(array: np.ndarray) -> Tensor:
            host = torch.from_numpy(np.ascontiguousarray(array))
            # From memory that is not pinned, a large copy would make the host wait for the device.
            return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

        order, lengths, borders, firsts, tokens, sizes, places, ages, rows = map(
            upload, (order_R, lengths_R, starts_R, firsts_J, tokens_TC, inside_TC.sum(1), places_N, ages_N, rows_N)
        )
        return cls(order, lengths, borders, rows_J, firsts, tokens, sizes, places, ages, rows)

    @property
    def starts_R(self) -> Tensor:
        """The first token of each row."""
        return self.borders[:-1]
