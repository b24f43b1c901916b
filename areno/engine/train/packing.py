"""Packing of rows end to end into tensors, without padding, and their division over context-parallel ranks.

The ranks of a context-parallel group share the tokens of each micro-batch, so a row may be too long for one device.
A rank computes the layers for its tokens, and only attention exchanges data (see PackedAttend). Per-token results,
such as log-probabilities, are summed over the group. So each rank has the results of all tokens, and losses need no
code for context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.engine.train.micro_batches import StepMicroBatches
from areno.engine.train.rows import Row
from areno.layers.attention import PackedAttend
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.pack import DataPack


@dataclass(slots=True)
class PackedTokens:
    """The input of a forward pass: R packed rows with N tokens in total, on the device.

    Attributes:
        tokens_N: int64 token ids.
        positions_N: int64, position of each token in its row, from 0.
        cu_seqlens: (R + 1,) int32, index of the first token of each row, and N.
        max_len: Number of tokens in the longest row.
        routes_NLk: The k experts that each token must use in each of the L layers with experts, see
            areno/engine/train/rows.py. None lets the router choose.
    """

    tokens_N: Tensor
    positions_N: Tensor
    cu_seqlens: Tensor
    max_len: int
    routes_NLk: Tensor | None = None


def pack_tokens(
    token_rows: Sequence[np.ndarray], device: torch.device, routes: Sequence[np.ndarray] | None = None
) -> PackedTokens:
    """Pack rows of token ids end to end.

    Args:
        token_rows: int64 token ids of each row.
        device: Device of the result.
        routes: Experts of each row's tokens. None lets the router choose.
    """
    lengths = np.array([len(row) for row in token_rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    arrays = np.concatenate(token_rows), positions, starts.astype(np.int32)
    tokens_N, positions_N, cu_seqlens = (torch.as_tensor(array, device=device) for array in arrays)
    routes_NLk = None if routes is None else torch.as_tensor(np.concatenate(routes), device=device)
    return PackedTokens(tokens_N, positions_N, cu_seqlens, int(lengths.max()), routes_NLk)


def pack_rows(
    rows: Sequence[Row], step: StepMicroBatches, rows_per_unit: int, device: torch.device
) -> tuple[PackedTokens, DataPack]:
    """Pack the rows of one micro-batch.

    Args:
        rows: The rows. All have the same fields.
        step: This rank's share of the optimizer step, which has the step's numbers of tokens and rows.
        rows_per_unit: Number of adjacent rows that belong together.
        device: Device of the tensors.

    Returns:
        The input of the model, and the input of the loss function.
    """
    trained = np.concatenate([row.trained for row in rows])
    arrays = {
        "row_of_token": np.repeat(np.arange(len(rows)), [row.n_tokens for row in rows]),
        "loss_mask": trained,
        "trained_T": np.flatnonzero(trained),
        "rewards": np.array([row.reward for row in rows], dtype=np.float32),
        "staleness": np.array([row.staleness for row in rows], dtype=np.float32),
        **{name: np.concatenate([row.fields[name] for row in rows]) for name in rows[0].fields if name != "routes"},
    }
    routes = [row.fields["routes"] for row in rows] if "routes" in rows[0].fields else None
    packed = pack_tokens([row.tokens for row in rows], device, routes)
    pack = DataPack(
        tokens=packed.tokens_N,
        n_rows=len(rows),
        step_tokens=step.step_tokens,
        step_rows=step.step_rows,
        rows_per_unit=rows_per_unit,
        **{name: torch.as_tensor(array, device=device) for name, array in arrays.items()},  # type: ignore[arg-type]
    )
    return packed, pack


def halved(
    step: StepMicroBatches,
    old_logprobs: Sequence[Tensor | None],
    rows_per_unit: int,
    device: torch.device,
) -> list[tuple[PackedTokens, DataPack]]:
    """Divide each micro-batch of a step into two with about as many tokens. The order of the rows stays the same.

    Args:
        step: This rank's share of the step. Its `micro_batches` are replaced by the new ones.
        old_logprobs: The (N,) old log-probabilities of each micro-batch, or None. They become those of the new ones.
        rows_per_unit: Number of adjacent rows that stay together. A micro-batch with one unit is not divided.
        device: Device of the tensors.

    Returns:
        The new micro-batches, packed.
    """
    divided: list[list[Row]] = []
    packs = []
    for rows, old_N in zip(step.micro_batches, old_logprobs, strict=True):
        ends = np.cumsum([row.n_tokens for row in rows])[rows_per_unit - 1 : -1 : rows_per_unit]
        parts = [rows]
        if len(ends):
            n_first = rows_per_unit * (1 + int(np.abs(2 * ends - sum(row.n_tokens for row in rows)).argmin()))
            parts = [rows[:n_first], rows[n_first:]]
        start = 0
        for part in parts:
            packed, pack = pack_rows(part, step, rows_per_unit, device)
            pack.old_logprobs = None if old_N is None else old_N[start : start + len(packed.tokens_N)]
            start += len(packed.tokens_N)
            divided.append(part)
            packs.append((packed, pack))
    step.micro_batches = divided
    return packs


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The tokens of a micro-batch that this context-parallel rank computes: n consecutive tokens of its N tokens.

    Attributes:
        tokens_n: int64 token ids. They may end with padding.
        positions_n: int64, position of each token in its row.
        attend: Attention over the tokens of the whole micro-batch.
        first: Index, in the micro-batch, of this rank's first token.
        n_tokens: N, the number of tokens in the micro-batch, without padding.
    """

    tokens_n: Tensor
    positions_n: Tensor
    attend: PackedAttend
    first: int
    n_tokens: int

    @classmethod
    def of(cls, packed: PackedTokens, context: ParallelGroup, attn_backend: str, multiple: int = 1) -> LocalTokens:
        """Divide the tokens of a micro-batch equally over a group, and return the share of this rank.

        Args:
            packed: The micro-batch.
            context: The context-parallel group.
            attn_backend: Attention kernel.
            multiple: The number of tokens in a share becomes a multiple of this number. If necessary, a row of padding
                tokens is added at the end of the micro-batch.
        """
        tokens_N, positions_N, cu_seqlens, n_tokens = (
            packed.tokens_N,
            packed.positions_N,
            packed.cu_seqlens,
            len(packed.tokens_N),
        )
        if more := -n_tokens % (context.size * multiple):
            tokens_N, positions_N = F.pad(tokens_N, (0, more)), F.pad(positions_N, (0, more))
            cu_seqlens = F.pad(cu_seqlens, (0, 1), value=n_tokens + more)
        n = len(tokens_N) // context.size
        mine = slice(context.rank * n, (context.rank + 1) * n)
        attend = PackedAttend(cu_seqlens, max(packed.max_len, more), attn_backend, context)
        return cls(tokens_N[mine], positions_N[mine], attend, mine.start, n_tokens)

    def predicted_here(self, places_T: Tensor) -> Tensor:
        """Select the tokens that this rank predicts because it computes the hidden state of the previous token.

        Args:
            places_T: (T,) int64 indices of tokens in the micro-batch, without the first token of any row.

        Returns:
            The selected entries of `places_T`.
        """
        if self.attend.context.size == 1:
            return places_T
        return places_T[(places_T > self.first) & (places_T <= self.first + len(self.tokens_n))]

    def before(self, hidden_nD: Tensor, places_T: Tensor) -> Tensor:
        """Return the hidden states from which tokens are predicted, (T, D).

        Args:
            hidden_nD: (n, D) hidden states of this rank's tokens.
            places_T: (T,) int64 indices of the predicted tokens in the micro-batch, from `predicted_here`.
        """
        return hidden_nD.index_select(0, places_T - (self.first + 1))

    def aligned(self, places_T: Tensor, numbers_T: Tensor) -> Tensor:
        """Write per-token values at their indices in the micro-batch, and sum over the context-parallel ranks.

        Args:
            places_T: (T,) int64 indices of the tokens in the micro-batch, from `predicted_here`.
            numbers_T: (T,) values of these tokens.

        Returns:
            (N,) float32 with the values from all ranks. 0 at tokens without a value.
        """
        numbers_N = torch.zeros(self.n_tokens, dtype=torch.float32, device=places_T.device)
        return self.attend.context.reduce_out(numbers_N.index_copy(0, places_T, numbers_T))
