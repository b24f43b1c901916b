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
from areno.engine.train.prefixes import forest_of, shared_routes
from areno.engine.train.rows import Row
from areno.kernels.copies import copy_rows
from areno.layers.attention import PackedAttend, SharedKeys
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.pack import DataPack


@dataclass(slots=True)
class SharedTokens:
    """The relation of rows that share prefixes, with U tokens in all, to the N tokens of a forward pass.

    Attributes:
        keys: Keys of each segment: of its own tokens and of the tokens before it in its rows.
        previous_N: int64, index of the token before each token. 0 for the first token of a row.
        places_U: int64, for each token of the rows, in the order of the rows, its index among the N tokens.
        counts_N: float32, number of rows that contain each token.
        wanted_U: bool, whether the value of a row's token is needed. Another row that contains the token may need its
            value. None if the values of all tokens are needed.
    """

    keys: SharedKeys
    previous_N: Tensor
    places_U: Tensor
    counts_N: Tensor
    wanted_U: Tensor | None


@dataclass(slots=True)
class PackedTokens:
    """The input of a forward pass: R packed rows with N tokens in total, on the device.

    With `shared`, the R packed rows are segments of the caller's rows, and shared tokens are among the N tokens once.

    Attributes:
        tokens_N: int64 token ids.
        positions_N: int64, position of each token in its row, from 0.
        cu_seqlens: (R + 1,) int32, index of the first token of each row, and N.
        max_len: Number of tokens in the longest row.
        routes_NLk: The k experts that each token must use in each of the L layers with experts, see
            areno/engine/train/rows.py. None lets the router choose.
        predicted_T: int64, indices of the tokens whose log-probabilities are needed. None stands for all tokens but the
            first ones of the caller's rows.
        shared: How the caller's rows are made of the N tokens. None if no prefixes are shared.
    """

    tokens_N: Tensor
    positions_N: Tensor
    cu_seqlens: Tensor
    max_len: int
    routes_NLk: Tensor | None = None
    predicted_T: Tensor | None = None
    shared: SharedTokens | None = None

    def places_to_predict(self) -> Tensor:
        """Return `predicted_T` or, if it is None, the indices of all tokens but the first ones of the rows."""
        return self.positions_N.nonzero().squeeze(-1) if self.predicted_T is None else self.predicted_T

    def in_rows(self, numbers_N: Tensor) -> Tensor:
        """Return values of the N tokens as values of the tokens of the caller's rows, (U,), differentiable.

        Args:
            numbers_N: A value for each of the N tokens.
        """
        return numbers_N if self.shared is None else copy_rows(numbers_N, self.shared.places_U)


def pack_tokens(
    token_rows: Sequence[np.ndarray],
    device: torch.device,
    routes: Sequence[np.ndarray] | None = None,
    trained: np.ndarray | None = None,
    share: bool = False,
) -> PackedTokens:
    """Pack rows of token ids end to end.

    Args:
        token_rows: int64 token ids of each row.
        device: Device of the result.
        routes: Experts of each row's tokens. None lets the router choose.
        trained: For the tokens of all rows, whether the log-probability of the token is needed. None stands for all
            tokens but the first ones.
        share: Whether tokens of shared prefixes are packed once.
    """

    def on_device(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=device)

    if share:
        forest = forest_of(token_rows)
        places, lengths = forest.places_U, np.diff(forest.starts)
        routes_N = None if routes is None else shared_routes(forest, np.concatenate(routes))
        if len(forest.tokens_N) < len(places) and (routes is None) == (routes_N is None):
            longest = int(np.diff(forest.key_starts).max())
            keys = SharedKeys(on_device(forest.keys_M), on_device(forest.key_starts), longest, len(forest.tokens_N))
            counts = on_device(forest.counts_N.astype(np.float32))
            wanted = None if trained is None else on_device(trained)
            shared = SharedTokens(keys, on_device(forest.previous_N), on_device(places), counts, wanted)
            return PackedTokens(
                on_device(forest.tokens_N),
                on_device(forest.positions_N),
                on_device(forest.starts),
                int(lengths.max()),
                None if routes_N is None else on_device(routes_N),
                None if trained is None else on_device(np.unique(places[trained])),
                shared,
            )
    lengths = np.array([len(row) for row in token_rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    arrays = np.concatenate(token_rows), positions, starts.astype(np.int32)
    tokens_N, positions_N, cu_seqlens = map(on_device, arrays)
    routes_NLk = None if routes is None else on_device(np.concatenate(routes))
    predicted_T = None if trained is None else on_device(np.flatnonzero(trained))
    return PackedTokens(tokens_N, positions_N, cu_seqlens, int(lengths.max()), routes_NLk, predicted_T)


def pack_rows(
    rows: Sequence[Row], step: StepMicroBatches, rows_per_unit: int, device: torch.device, share: bool = False
) -> tuple[PackedTokens, DataPack]:
    """Pack the rows of one micro-batch.

    Args:
        rows: The rows. All have the same fields.
        step: This rank's share of the optimizer step, which has the step's numbers of tokens and rows.
        rows_per_unit: Number of adjacent rows that belong together.
        device: Device of the tensors.
        share: Whether the model computes tokens of shared prefixes once.

    Returns:
        The input of the model, and the input of the loss function.
    """
    trained = np.concatenate([row.trained for row in rows])
    arrays = {
        "row_of_token": np.repeat(np.arange(len(rows)), [row.n_tokens for row in rows]),
        "loss_mask": trained,
        "rewards": np.array([row.reward for row in rows], dtype=np.float32),
        "staleness": np.array([row.staleness for row in rows], dtype=np.float32),
        **{name: np.concatenate([row.fields[name] for row in rows]) for name in rows[0].fields if name != "routes"},
    }
    routes = [row.fields["routes"] for row in rows] if "routes" in rows[0].fields else None
    packed = pack_tokens([row.tokens for row in rows], device, routes, trained, share)
    if packed.shared is None:
        of_rows = {"tokens": packed.tokens_N, "trained_T": packed.predicted_T}
    else:
        arrays["trained_T"], of_rows = np.flatnonzero(trained), {"tokens": packed.in_rows(packed.tokens_N)}
    pack = DataPack(
        **of_rows,  # type: ignore[arg-type]
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
    share: bool = False,
) -> list[tuple[PackedTokens, DataPack]]:
    """Divide each micro-batch of a step into two with about as many tokens. The order of the rows stays the same.

    Args:
        step: This rank's share of the step. Its `micro_batches` are replaced by the new ones.
        old_logprobs: The (N,) old log-probabilities of each micro-batch, or None. They become those of the new ones.
        rows_per_unit: Number of adjacent rows that stay together. A micro-batch with one unit is not divided.
        device: Device of the tensors.
        share: Whether the model computes tokens of shared prefixes once.

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
            packed, pack = pack_rows(part, step, rows_per_unit, device, share)
            pack.old_logprobs = None if old_N is None else old_N[start : start + len(pack.tokens)]
            start += len(pack.tokens)
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
        packed: The whole micro-batch.
    """

    tokens_n: Tensor
    positions_n: Tensor
    attend: PackedAttend
    first: int
    packed: PackedTokens

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
        keys = None if packed.shared is None else packed.shared.keys
        more = -n_tokens % (context.size * multiple)
        if more:
            tokens_N, positions_N = F.pad(tokens_N, (0, more)), F.pad(positions_N, (0, more))
            cu_seqlens = F.pad(cu_seqlens, (0, 1), value=n_tokens + more)
            keys = None if keys is None else keys.with_row(more)
        n = len(tokens_N) // context.size
        mine = slice(context.rank * n, (context.rank + 1) * n)
        attend = PackedAttend(cu_seqlens, max(packed.max_len, more), attn_backend, context, keys)
        return cls(tokens_N[mine], positions_N[mine], attend, mine.start, packed)

    @property
    def n_tokens(self) -> int:
        """N, the number of tokens in the micro-batch, without padding."""
        return len(self.packed.tokens_N)

    def before(self, hidden_nD: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
        """Select the tokens that this rank predicts because it computes the hidden state of the token before.

        Args:
            hidden_nD: (n, D) hidden states of this rank's tokens.
            places_T: (T,) int64 indices of tokens in the micro-batch, without the first token of any row.

        Returns:
            The selected entries of `places_T`, and the (selected entries, D) hidden states of the tokens before them.
        """
        shared = self.packed.shared
        return self.at(hidden_nD, places_T, places_T - 1 if shared is None else shared.previous_N[places_T])

    def at(self, hidden_nD: Tensor, places_T: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
        """Select the entries of `places_T` whose source is a token of this rank.

        Args:
            hidden_nD: (n, D) hidden states of this rank's tokens.
            places_T: (T,) int64.
            sources_T: (T,) int64 indices of tokens in the micro-batch.

        Returns:
            The selected entries of `places_T`, and the (selected entries, D) hidden states of their sources.
        """
        sources_T = sources_T - self.first
        if self.attend.context.size > 1:
            here = (sources_T >= 0) & (sources_T < len(self.tokens_n))
            places_T, sources_T = places_T[here], sources_T[here]
        if self.packed.shared is None:
            return places_T, hidden_nD.index_select(0, sources_T)
        return places_T, copy_rows(hidden_nD, sources_T)  # the last token of a prefix predicts several tokens

    def aligned(self, places_T: Tensor, numbers_T: Tensor) -> Tensor:
        """Write per-token values at their indices in the micro-batch, and sum over the context-parallel ranks.

        Args:
            places_T: (T,) int64 indices of tokens in the micro-batch, as `before` selects them.
            numbers_T: (T,) values of these tokens.

        Returns:
            (U,) float32 with the values from all ranks, for the tokens of the caller's rows, of which there are N
            without shared prefixes. 0 at tokens without a value.
        """
        numbers_N = torch.zeros(self.n_tokens, dtype=torch.float32, device=places_T.device)
        numbers_N = self.attend.context.reduce_out(numbers_N.index_copy(0, places_T, numbers_T))
        numbers_U, shared = self.packed.in_rows(numbers_N), self.packed.shared
        return numbers_U if shared is None or shared.wanted_U is None else numbers_U.where(shared.wanted_U, 0.0)
