"""The weights, gradients and states of a gated delta layer, and the chunks into which packed sequences (rows) are cut.

T chunks of C tokens; J steps, of which step j computes the j-th chunk of every row that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areno.kernels.backend import to_device


class DeltaWeights(NamedTuple):
    conv_XW: Tensor  # from the oldest input to the newest
    A_log_H: Tensor
    dt_bias_H: Tensor  # added to the projection a before softplus
    norm_V: Tensor
    eps: float
    n_key_heads: int

    @property
    def n_heads(self) -> int:
        return len(self.A_log_H)

    @property
    def value_dim(self) -> int:
        return len(self.norm_V)

    @property
    def key_dim(self) -> int:
        return (len(self.conv_XW) - self.n_heads * self.value_dim) // (2 * self.n_key_heads)

    @property
    def projection_sizes(self) -> tuple[int, int, int, int]:
        """Sizes of a token's projections: channels of the convolution (q, k and v), z, b, a."""
        return len(self.conv_XW), self.n_heads * self.value_dim, self.n_heads, self.n_heads


class DeltaGradients(NamedTuple):
    """The gradients of the weights in `DeltaWeights`, float32."""

    conv_XW: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    norm_V: Tensor


class DeltaStates(NamedTuple):
    """The recurrent states of one layer, for S rows or S slots."""

    inputs_SXw: Tensor  # last w inputs of the convolution, the oldest first
    matrices_SHKV: Tensor  # float32


CHUNK = 64  # tokens: enough to fill matrix units, and few enough to solve a triangular system of this size


@dataclass(frozen=True)
class RowChunks:
    """The chunks of C tokens into which packed rows are cut.

    Chunks are ordered by step, and within a step by the length of the row, longest first. So the chunks of a step are
    consecutive, and the rows that have a chunk in a step are the first ones among the rows of the step before.
    """

    order_R: Tensor  # indices of the rows, the longest row first
    lengths_R: Tensor  # in packed order
    borders: Tensor  # (R + 1,), cumulative lengths from 0 to N
    rows_J: tuple[int, ...]  # number of rows with a chunk in each step
    first_chunks_J: Tensor  # the j-th chunk of row order_R[i] has the index first_chunks_J[j] + i
    tokens_TC: Tensor  # index of the token at each position of a chunk, N after the end of the row
    sizes_T: Tensor  # number of tokens in each chunk
    places_N: Tensor  # index of each token in the flattened `tokens_TC`
    positions_N: Tensor  # position of each token in its row
    rows_N: Tensor  # row of each token, in packed order

    @classmethod
    def from_starts(cls, starts: Sequence[int], device: torch.device, chunk: int = CHUNK) -> RowChunks:
        starts_R = np.array(starts, dtype=np.int64)
        n_tokens, lengths_R = int(starts_R[-1]), np.diff(starts_R)
        order_R = np.argsort(-lengths_R, kind="stable")
        n_chunks_R = -(-lengths_R[order_R] // chunk)
        n_steps = int(n_chunks_R.max(initial=0))
        rows_J = tuple(int((n_chunks_R > step).sum()) for step in range(n_steps))
        first_chunks_J = np.cumsum([0, *rows_J[:-1]], dtype=np.int64)[:n_steps]
        steps_T = np.repeat(np.arange(n_steps), rows_J)
        rows_T = order_R[np.concatenate([np.arange(n) for n in rows_J])] if rows_J else order_R[:0]
        positions_TC = (steps_T * chunk)[:, None] + np.arange(chunk)
        inside_TC = positions_TC < lengths_R[rows_T][:, None]
        tokens_TC = np.where(inside_TC, starts_R[rows_T][:, None] + positions_TC, n_tokens)
        places_N = np.empty(n_tokens, dtype=np.int64)
        places_N[tokens_TC[inside_TC]] = np.flatnonzero(inside_TC)
        rows_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
        positions_N = np.arange(n_tokens) - starts_R[rows_N]

        def upload(array: np.ndarray) -> Tensor:
            return to_device(np.ascontiguousarray(array), device)

        return cls(
            order_R=upload(order_R),
            lengths_R=upload(lengths_R),
            borders=upload(starts_R),
            rows_J=rows_J,
            first_chunks_J=upload(first_chunks_J),
            tokens_TC=upload(tokens_TC),
            sizes_T=upload(inside_TC.sum(1)),
            places_N=upload(places_N),
            positions_N=upload(positions_N),
            rows_N=upload(rows_N),
        )

    @property
    def starts_R(self) -> Tensor:
        return self.borders[:-1]
