"""Packing of rows end to end into tensors, without padding, and their division over context-parallel ranks.

The ranks of a context-parallel group share the tokens of each micro-batch, so a row may be too long for one device. A
rank computes the layers for its tokens, and only attention exchanges data (see PackedAttend). Per-token results, such
as log-probabilities, are summed over the group. So each rank has the results of all tokens, and losses need no code for
context parallelism.

Shape letters: N tokens of a micro-batch, n of them on this rank, T tokens to predict, U tokens of the caller's rows, R
packed rows. U = N without shared prefixes. `indices_*` are indices among the N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from areno.engine.train.checked_rows import ID_BITS, TOP, FlatRows
from areno.engine.train.micro_batches import StepMicroBatches
from areno.engine.train.shared_prefixes import Forest, build_forest, distinct_indices, divide_forest, shared_routes
from areno.kernels.backend import to_device
from areno.kernels.copies import copy_rows
from areno.layers.attention import PackedAttend, PrefixKeys, SharedKeys
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.data_pack import DataPack


@dataclass(slots=True)
class SharedTokens:
    """Maps the tokens of rows that share prefixes to the N tokens of a forward pass."""

    keys: SharedKeys  # of each segment: of its own tokens and of the tokens before it in its rows
    previous_N: Tensor  # index of the token before; 0 for the first token of a row
    indices_U: Tensor
    counts_N: Tensor  # float32, rows that contain each token
    wanted_U: Tensor | None  # whether the value is needed in this row; another may need it; None: all


@dataclass(slots=True)
class PackedTokens:
    """The input of a forward pass: R packed rows with N tokens in total, on the device.

    With `shared`, the R packed rows are segments of the caller's rows, and each shared token is packed once. With
    `prefix`, an earlier pass has computed the first tokens, and the R packed rows hold only the remaining tokens. If
    `predicted_T` is None, all tokens are predicted except the first of each of the caller's rows. `teacher` is a role,
    "" for the teacher that the divergence names. If the teacher has prompts of its own, `for_teacher` is its input,
    with the same predicted tokens.
    """

    tokens_N: Tensor
    positions_N: Tensor
    cu_seqlens: Tensor  # (R + 1,) int32
    max_len: int
    routes_NLk: Tensor | None = None  # experts to use, see checked_rows.py; None lets the router choose
    predicted_T: Tensor | None = None
    shared: SharedTokens | None = None
    prefix: PrefixPass | None = None
    teacher: str = ""
    for_teacher: PackedTokens | None = None

    @property
    def n_prefix_tokens(self) -> int:
        return 0 if self.prefix is None else len(self.prefix.packed.tokens_N)

    @property
    def n_computed(self) -> int:
        return len(self.tokens_N) - self.n_prefix_tokens

    def indices_to_predict(self) -> Tensor:
        return self.positions_N.nonzero().squeeze(-1) if self.predicted_T is None else self.predicted_T

    def expand_to_rows(self, numbers_N: Tensor) -> Tensor:
        """Copy values of the N tokens to the U tokens of the rows. Gradients flow back."""
        return numbers_N if self.shared is None else copy_rows(numbers_N, self.shared.indices_U)


class PrefixPass:
    """The forward pass over prefixes that several micro-batches share. It runs before these micro-batches.

    Call `begin`, then `join` for each micro-batch, and at last `end`. Training runs the backward pass of
    `output_and_gradient` after the backward passes of all micro-batches.
    """

    def __init__(self, packed: PackedTokens):
        self.packed = packed
        self.keys: PrefixKeys | None = None
        self._hidden_ND: Tensor | None = None
        # A leaf of autograd with the same numbers. It is float32, in which its gradient adds up over the micro-batches.
        self._leaf_ND: Tensor | None = None

    def begin(self, run: Callable[[PackedTokens, PrefixKeys], Tensor]) -> None:
        """Compute the prefixes. `run` returns hidden states, and stores keys and values."""
        self.keys = PrefixKeys(len(self.packed.tokens_N))
        hidden_ND = self._hidden_ND = run(self.packed, self.keys)[: self.keys.n_tokens]
        leaf_ND = hidden_ND.detach().to(torch.promote_types(hidden_ND.dtype, torch.float32))
        self._leaf_ND = leaf_ND.requires_grad_(hidden_ND.requires_grad)

    def join(self, hidden_nD: Tensor) -> Tensor:
        """Return the hidden states of the prefixes, then those of a micro-batch, as (N, D). Gradients flow back."""
        assert self._leaf_ND is not None, "the pass has not begun"
        return torch.cat((self._leaf_ND.to(hidden_nD.dtype), hidden_nD))

    def output_and_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the prefixes, and their gradient from the passes of all micro-batches."""
        assert self._hidden_ND is not None, "the pass has not begun"
        assert self._leaf_ND is not None
        grad_ND = torch.zeros_like(self._leaf_ND) if self._leaf_ND.grad is None else self._leaf_ND.grad
        return self._hidden_ND, grad_ND.to(self._hidden_ND.dtype)

    def end(self) -> None:
        self.keys = self._hidden_ND = self._leaf_ND = None


def pack_tokens(
    token_rows: Sequence[np.ndarray],
    device: torch.device,
    routes: Sequence[np.ndarray] | None = None,
    trained: np.ndarray | None = None,
    share: bool = False,
) -> PackedTokens:
    """Pack rows of token ids end to end. With `share`, tokens of shared prefixes are packed once.

    `trained` says for all U tokens whether the log-probability is needed. None means all except the first of each row.
    """
    if share:
        forest = build_forest(token_rows)
        routes_N = None if routes is None else shared_routes(forest, np.concatenate(routes))
        if len(forest.tokens_N) < len(forest.indices_U) and (routes is None) == (routes_N is None):
            return _pack_forest(forest, device, routes_N, trained)
    lengths = np.array([len(row) for row in token_rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    arrays = np.concatenate(token_rows), positions, starts.astype(np.int32)
    tokens_N, positions_N, cu_seqlens = (to_device(array, device) for array in arrays)
    routes_NLk = None if routes is None else to_device(np.concatenate(routes), device)
    predicted_T = None if trained is None else to_device(np.flatnonzero(trained), device)
    return PackedTokens(tokens_N, positions_N, cu_seqlens, int(lengths.max()), routes_NLk, predicted_T)


def pack_group(
    token_rows: Sequence[Sequence[np.ndarray]],
    device: torch.device,
    routes: Sequence[Sequence[np.ndarray]] | None = None,
    trained: Sequence[np.ndarray] | None = None,
    share: bool = False,
) -> list[PackedTokens]:
    """Pack the rows of micro-batches whose common prefixes are computed once, in a forward pass of their own.

    Arguments are those of `pack_tokens` for each micro-batch. All results have the same `prefix`.
    """
    parts: list[tuple[np.ndarray, Forest]] = []
    routes_N = None
    if share and len(token_rows) > 1:
        forest = build_forest(list(chain(*token_rows)))
        routes_N = None if routes is None else shared_routes(forest, np.concatenate(list(chain(*routes))))
        if (routes is None) == (routes_N is None):
            parts = divide_forest(forest, [sum(map(len, rows)) for rows in token_rows])
    wanted = [None] * len(token_rows) if trained is None else trained
    if not parts:
        given = [None] * len(token_rows) if routes is None else routes
        each = zip(token_rows, given, wanted, strict=True)
        return [pack_tokens(rows, device, of_rows, trained_U, share) for rows, of_rows, trained_U in each]
    (places, common), *rest = parts
    prefix = PrefixPass(_pack_forest(common, device, None if routes_N is None else routes_N[places], None))
    return [
        _pack_forest(of_batch, device, None if routes_N is None else routes_N[places], trained_U, prefix)
        for (places, of_batch), trained_U in zip(rest, wanted, strict=True)
    ]


def _pack_forest(
    forest: Forest,
    device: torch.device,
    routes_N: np.ndarray | None,
    trained: np.ndarray | None,
    prefix: PrefixPass | None = None,
) -> PackedTokens:
    """Pack the segments of a forest. `prefix` computes the first `forest.n_before` tokens."""

    def on_device(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else to_device(array, device)

    longest, n_tokens = int(np.diff(forest.key_starts).max()), len(forest.tokens_N)
    keys = SharedKeys(on_device(forest.keys_M), on_device(forest.key_starts), longest, n_tokens)  # type: ignore[arg-type]
    counts_N = forest.counts_N.astype(np.float32)
    arrays = forest.previous_N, forest.indices_U, counts_N, trained
    return PackedTokens(
        on_device(forest.tokens_N),  # type: ignore[arg-type]
        on_device(forest.positions_N),  # type: ignore[arg-type]
        on_device(forest.starts),  # type: ignore[arg-type]
        int(np.diff(forest.starts).max()),
        on_device(routes_N),
        None if trained is None else on_device(distinct_indices(forest.indices_U[trained], n_tokens)),
        SharedTokens(keys, *map(on_device, arrays)),  # type: ignore[arg-type]
        prefix,
    )


class StepBatches(Sequence[tuple[PackedTokens, DataPack]]):
    """The micro-batches of a step: the input of the model and the input of the loss function for each of them.

    A micro-batch is packed when it is first read, so that a GPU computes the first one while the host packs the others.
    """

    def __init__(self, step: StepMicroBatches, rows_per_unit: int, device: torch.device):
        self._step, self._rows_per_unit, self._device = step, rows_per_unit, device
        self._groups = step.groups
        self._n_groups = 0  # that are packed
        self._packs: list[tuple[PackedTokens, DataPack]] = []

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    @overload
    def __getitem__(self, index: int) -> tuple[PackedTokens, DataPack]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[PackedTokens, DataPack]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        most = max(range(len(self))[index], default=-1) if isinstance(index, slice) else range(len(self))[index]
        while len(self._packs) <= most:
            self._packs += self._pack(self._groups[self._n_groups])
            self._n_groups += 1
        return self._packs[index]

    def _pack(self, group: list[FlatRows]) -> list[tuple[PackedTokens, DataPack]]:
        starts, trained = np.cumsum([0, *map(len, group)]).tolist(), [rows.trained for rows in group]
        tokens = [rows.split_by_row(rows.ids_to_share(start)) for start, rows in zip(starts, group)]  # noqa: B905
        routes = None
        if "routes" in self._step.rows.fields:
            routes = [rows.split_by_row(rows.fields["routes"]) for rows in group]
        packed = pack_group(tokens, self._device, routes, trained, self._step.shares)
        if TOP[0] in self._step.rows.fields:
            prefix = packed[0].prefix
            for one in packed if prefix is None else (*packed, prefix.packed):
                one.tokens_N &= (1 << ID_BITS) - 1
        for rows, one in zip(group, packed, strict=True):
            one.teacher, one.for_teacher = rows.teachers[0], _pack_for_teacher(rows, self._device)
        pairs = zip(group, packed, strict=True)
        return [(one, _pack_rows(rows, one, self._step, self._rows_per_unit)) for rows, one in pairs]

    def halve(self, old_logprobs: Sequence[Tensor | None]) -> bool:
        """Split each micro-batch of several units in two of about equal size. Returns False if there is none.

        The order of the rows stays the same. `sizes` of the step are updated. `old_logprobs`, one for each micro-batch,
        are split, too, and become those of the new micro-batches.
        """
        olds: list[Tensor | None] = []
        sizes: list[list[int]] = []
        left = iter(old_logprobs)
        for group in self._groups:
            divided = [_split_in_two(rows, self._rows_per_unit) for rows in group]
            for parts, old_N in zip(divided, left):  # noqa: B905  (continues with the next group)
                n_tokens = [len(part.tokens) for part in parts]
                olds += [None] * len(parts) if old_N is None else old_N.split(n_tokens)
            n_rows = list(map(len, chain(*divided)))
            sizes += [n_rows] if len(group) > 1 else [[n] for n in n_rows]
        if len(olds) == len(self):
            return False
        self._step.sizes = sizes
        self._groups, self._n_groups, self._packs = self._step.groups, 0, []
        for (_, pack), old_N in zip(self, olds, strict=True):
            pack.old_logprobs = old_N
        return True


def _pack_for_teacher(rows: FlatRows, device: torch.device) -> PackedTokens | None:
    """Pack rows after the teacher's own prompts, with the same trained tokens in order. None without such prompts."""
    if all(prompt is None for prompt in rows.teacher_prompts):
        return None
    found = [row.for_teacher() for row in rows]
    return pack_tokens([tokens for tokens, _ in found], device, None, np.concatenate([mask for _, mask in found]))


def _pack_rows(rows: FlatRows, packed: PackedTokens, step: StepMicroBatches, rows_per_unit: int) -> DataPack:
    device = packed.tokens_N.device
    arrays = {
        "row_of_token": np.repeat(np.arange(len(rows)), rows.lengths),
        "loss_mask": rows.trained,
        "trained_rows": np.flatnonzero(rows.n_trained),
        "rewards": rows.rewards.astype(np.float32),
        "staleness": rows.staleness.astype(np.float32),
        **{name: values for name, values in rows.fields.items() if name != "routes"},
    }
    if packed.shared is None:
        of_rows = {"tokens": packed.tokens_N, "trained_T": packed.predicted_T}
    else:
        arrays["trained_T"], of_rows = np.flatnonzero(rows.trained), {"tokens": packed.expand_to_rows(packed.tokens_N)}
    return DataPack(
        **of_rows,  # type: ignore[arg-type]
        n_rows=len(rows),
        step_tokens=step.step_tokens,
        step_rows=step.step_rows,
        rows_per_unit=rows_per_unit,
        **{name: to_device(array, device) for name, array in arrays.items()},  # type: ignore[arg-type]
    )


def predicted_mask(prompt_masks: Sequence[np.ndarray], batch: Sequence[int]) -> np.ndarray:
    """Return a mask over the tokens of the rows `batch`, False at masked tokens and at the first token of each row."""
    asked = [~prompt_masks[index] for index in batch]
    for of_row in asked:
        of_row[0] = False
    return np.concatenate(asked)


def _split_in_two(rows: FlatRows, rows_per_unit: int) -> list[FlatRows]:
    ends = np.cumsum(rows.lengths)[rows_per_unit - 1 : -1 : rows_per_unit]
    if not len(ends):
        return [rows]
    n_first = rows_per_unit * (1 + int(np.abs(2 * ends - len(rows.tokens)).argmin()))
    return [rows[:n_first], rows[n_first:]]


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """The tokens of a micro-batch that this context-parallel rank computes: n consecutive tokens of its N tokens.

    The last of the n tokens may be padding. `first` is the index of the first one among the N tokens. `attend` covers
    the whole micro-batch.
    """

    tokens_n: Tensor
    positions_n: Tensor
    attend: PackedAttend
    first: int
    packed: PackedTokens

    @classmethod
    def for_rank(
        cls,
        packed: PackedTokens,
        context: ParallelGroup,
        attn_backend: str,
        multiple: int = 1,
        stores: PrefixKeys | None = None,
    ) -> LocalTokens:
        """Divide the tokens of a micro-batch equally over a group, and return the share of this rank.

        Shares are padded at the end to a multiple of `multiple`. `stores` receives keys and values for later passes.
        """
        tokens_N, positions_N, cu_seqlens = (
            packed.tokens_N[packed.n_prefix_tokens :],
            packed.positions_N,
            packed.cu_seqlens,
        )
        positions_N, n_tokens = positions_N[packed.n_prefix_tokens :], len(tokens_N)
        keys = None if packed.shared is None else packed.shared.keys
        more = -n_tokens % (context.size * multiple)
        if more:
            tokens_N, positions_N = F.pad(tokens_N, (0, more)), F.pad(positions_N, (0, more))
            cu_seqlens = F.pad(cu_seqlens, (0, 1), value=n_tokens + more)
            keys = None if keys is None else keys.with_row(more)
        n = len(tokens_N) // context.size
        mine = slice(context.rank * n, (context.rank + 1) * n)
        prefix = None if packed.prefix is None else packed.prefix.keys
        attend = PackedAttend(cu_seqlens, max(packed.max_len, more), attn_backend, context, keys, stores, prefix)
        return cls(tokens_N[mine], positions_N[mine], attend, packed.n_prefix_tokens + mine.start, packed)

    @property
    def n_tokens(self) -> int:
        return len(self.packed.tokens_N)

    def select_predecessors(self, hidden_nD: Tensor, indices_T: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.packed.shared
        return self.select(hidden_nD, indices_T, indices_T - 1 if shared is None else shared.previous_N[indices_T])

    def select(self, hidden_nD: Tensor, indices_T: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the `indices_T` whose tokens `sources_T` have hidden states on this rank, and these hidden states."""
        if self.packed.prefix is None:
            sources_T = sources_T - self.first
        else:
            hidden_nD = self.packed.prefix.join(hidden_nD)
        if self.attend.context.size > 1:
            here = (sources_T >= 0) & (sources_T < len(self.tokens_n))
            indices_T, sources_T = indices_T[here], sources_T[here]
        if self.packed.shared is None:
            return indices_T, hidden_nD.index_select(0, sources_T)
        return indices_T, copy_rows(hidden_nD, sources_T)  # the last token of a prefix predicts several tokens

    def gather_values(self, indices_T: Tensor, numbers_T: Tensor) -> Tensor:
        """Put values at their token indices (0 elsewhere), sum over context-parallel ranks, and return (U,)."""
        numbers_N = torch.zeros(self.n_tokens, dtype=torch.float32, device=indices_T.device)
        numbers_N = self.attend.context.reduce_out(numbers_N.index_copy(0, indices_T, numbers_T))
        numbers_U, shared = self.packed.expand_to_rows(numbers_N), self.packed.shared
        return numbers_U if shared is None or shared.wanted_U is None else numbers_U.where(shared.wanted_U, 0.0)
