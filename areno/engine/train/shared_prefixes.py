"""Finds the prefixes that rows share, and lays rows out so that each shared token is computed once. Imports no torch.

Rows share a prefix if they begin with equal tokens: the samples of a prompt, the answers of a preference pair, the
turns of a conversation that branches. The rows form a forest of segments. A segment is a piece of one or more rows,
its parent is the piece before it, and a row is the path from a root to a segment. Causal attention gives a token the
same hidden state in all rows that contain its segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from areno.cost.prefix_sharing import FASTER, PrefixSharing
from areno.specs.engine import SharePrefixes
from areno.specs.role import RoleSpec

if TYPE_CHECKING:
    from areno.models.transformer import Transformer

LEAST = 16  # tokens in which rows must agree to share them; fewer would save less than the copies of keys cost
_LEAST_OF_SHORT = 4  # the same where all rows are short
KEYS = 8  # copied keys of shared tokens take about as much memory as one computed token
KEPT = (
    2  # memory, in computed tokens, of a prefix token whose activations, keys and gradients stay during linked passes
)

_MOST_AT_ONCE = 2**22  # tokens that are compared at once

Rows = Sequence[np.ndarray]


class UnitGroup(NamedTuple):
    """Units (rows that stay together, see micro_batches.py) that share prefixes and are computed together."""

    units: list[int]
    size: int  # stands for memory: computed tokens, and a KEYS-th of the others, whose keys are copied
    n_computed: int  # stands for time: computed tokens

    def with_unit(self, unit: int, size: int, n_computed: int) -> UnitGroup:
        return UnitGroup([*self.units, unit], self.size + size, self.n_computed + n_computed)


def min_shared_tokens(rows: Rows) -> int:
    """Return how many equal tokens rows must begin with to share them: half the mean length, at most LEAST."""
    return min(LEAST, max(_LEAST_OF_SHORT, sum(map(len, rows)) // (2 * len(rows))))


@dataclass(slots=True)
class Forest:
    """Rows laid out as a forest of segments. Letters: N tokens of all segments, S segments, U tokens of all rows.

    An earlier forward pass may have computed the first `n_before` tokens, see `divide_forest`. The S segments then hold
    only the other tokens. `starts` (S + 1,) holds the index of each segment's first token, minus `n_before`. `keys_M`
    lists, segment by segment, the indices of the tokens that a segment attends to: from the start of its rows to its
    own end. `key_starts` (S + 1,) says where each list begins. `indices_U` maps the tokens of all rows to the N tokens.
    """

    tokens_N: np.ndarray
    positions_N: np.ndarray
    previous_N: np.ndarray  # index of the token before each token; 0 for the first token of a row
    starts: np.ndarray
    keys_M: np.ndarray
    key_starts: np.ndarray
    indices_U: np.ndarray
    n_before: int = 0

    @property
    def counts_N(self) -> np.ndarray:
        return np.bincount(self.indices_U, minlength=len(self.tokens_N))


def build_forest(rows: Rows) -> Forest:
    """Lay out rows as a forest of segments. No row may be empty."""
    tree = _SegmentTree(rows)
    # Segments in the order of the rows, so that rows without a shared prefix are laid out as without sharing.
    order = sorted(range(len(tree.begin)), key=lambda s: (tree.first_row[s], tree.begin[s]))
    begin, end = np.array(tree.begin)[order], np.array(tree.end)[order]
    lengths = end - begin
    starts = np.concatenate([[0], lengths.cumsum()])
    place = {segment: index for index, segment in enumerate(order)}
    paths: list[np.ndarray] = []
    for index, segment in enumerate(order):  # a parent comes before its children
        own = np.arange(starts[index], starts[index + 1])
        parent = tree.parent[segment]
        paths.append(own if parent < 0 else np.concatenate([paths[place[parent]], own]))
    positions_N = np.arange(starts[-1]) - np.repeat(starts[:-1] - begin, lengths)
    previous_N = np.maximum(np.arange(starts[-1]) - 1, 0)
    for index, segment in enumerate(order):
        if tree.parent[segment] >= 0:
            previous_N[starts[index]] = paths[index][begin[index] - 1]
    indices_U = np.concatenate([paths[place[leaf]] for leaf in tree.leaf_of_row])
    return Forest(
        tokens_N=np.concatenate(rows)[_first_occurrences(indices_U, starts[-1])],
        positions_N=positions_N,
        previous_N=previous_N,
        starts=starts.astype(np.int32),
        keys_M=np.concatenate(paths),
        key_starts=np.concatenate([[0], np.cumsum([len(path) for path in paths])]).astype(np.int32),
        indices_U=indices_U,
    )


def _first_occurrences(indices_U: np.ndarray, n_tokens: int) -> np.ndarray:
    """Return, for each of the `n_tokens` tokens, the index of its first occurrence in `indices_U`, int64."""
    first_N = np.empty(n_tokens, dtype=np.int64)
    first_N[indices_U[::-1]] = np.arange(len(indices_U))[::-1]  # of several occurrences, the first is written last
    return first_N


def divide_forest(forest: Forest, sizes: Sequence[int]) -> list[tuple[np.ndarray, Forest]]:
    """Divide a forest into segments that several micro-batches share, and the remaining segments of each micro-batch.

    `sizes` are the numbers of tokens of the rows in each micro-batch. Returns pairs of (indices of tokens in the
    undivided forest, forest of these tokens). The first pair has the shared segments. Then there is a pair for each
    micro-batch, which begins with the tokens of the first pair. The list is empty if no segment is shared, or if a
    micro-batch has only shared segments.
    """
    lengths = np.diff(forest.starts)
    segment_N = np.repeat(np.arange(len(lengths)), lengths)
    of_batches = np.split(forest.indices_U, np.cumsum(sizes)[:-1])
    segments_of = [distinct_indices(segment_N[places], len(lengths)) for places in of_batches]
    is_common = np.bincount(np.concatenate(segments_of), minlength=len(lengths)) > 1
    rest = [segments[~is_common[segments]] for segments in segments_of]
    if not is_common.any() or not all(map(len, rest)):
        return []
    common, nothing = np.flatnonzero(is_common), np.empty(0, dtype=np.int64)
    place = np.zeros(len(forest.tokens_N), dtype=np.int64)
    parts = [_sub_forest(forest, nothing, common, forest.indices_U[is_common[segment_N[forest.indices_U]]], place)]
    return parts + [
        _sub_forest(forest, common, own, places, place) for own, places in zip(rest, of_batches, strict=True)
    ]


def distinct_indices(places: np.ndarray, n: int) -> np.ndarray:
    found = np.zeros(n, dtype=bool)
    found[places] = True
    return np.flatnonzero(found)


def _sub_forest(
    forest: Forest, before: np.ndarray, own: np.ndarray, indices_U: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, Forest]:
    """Return (token indices, forest) of the segments `own`, after the segments `before` of an earlier pass.

    `place` is scratch memory with one index for each token of the undivided forest.
    """
    kept = np.concatenate([_segment_ranges(forest.starts, before), _segment_ranges(forest.starts, own)])
    place[0], place[kept] = 0, np.arange(len(kept))  # the first tokens of rows have 0 as their previous token
    lengths, n_keys = np.diff(forest.starts)[own], np.diff(forest.key_starts)[own]
    return kept, Forest(
        tokens_N=forest.tokens_N[kept],
        positions_N=forest.positions_N[kept],
        previous_N=place[forest.previous_N[kept]],
        starts=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
        keys_M=place[forest.keys_M[_segment_ranges(forest.key_starts, own)]],
        key_starts=np.concatenate([[0], n_keys.cumsum()]).astype(np.int32),
        indices_U=place[indices_U],
        n_before=int(np.diff(forest.starts)[before].sum()),
    )


def _segment_ranges(starts: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges from the start of each segment to the start of the next one, int64."""
    ranges = [np.arange(int(starts[s]), int(starts[s + 1])) for s in segments]
    return np.concatenate([np.empty(0, dtype=np.int64), *ranges])


class _SegmentTree:
    """Divides rows into segments, by adding one row after another to a tree of segments.

    A segment covers the positions [begin, end) of its rows. `first_row` is the first row that contains it.
    """

    def __init__(self, rows: Rows):
        self.begin: list[int] = []
        self.end: list[int] = []
        self.parent: list[int] = []
        self.first_row: list[int] = []
        self.leaf_of_row = [-1] * len(rows)
        least = min_shared_tokens(rows)
        last = -1  # the last segment of the row before, in sorted order
        for index, common in sorted_rows(rows):
            length = len(rows[index])
            node = last
            while node >= 0 and self.begin[node] >= common:
                node = self.parent[node]
            if node >= 0 and common == self.end[node] == length:  # the row before is equal
                self.leaf_of_row[index] = last = node
                self._add_row_to(node, index)
                continue
            depth = 0
            if node >= 0:
                if min(common, self.end[node]) - self.begin[node] < least:
                    depth, node = self.begin[node], self.parent[node]
                else:
                    depth = common
                    node = self._split_segment(node, common) if common < self.end[node] else node
            self._add_row_to(node, index)
            last = self.leaf_of_row[index] = self._add(depth, length, node, index)

    def _add(self, begin: int, end: int, parent: int, row: int) -> int:
        self.begin.append(begin)
        self.end.append(end)
        self.parent.append(parent)
        self.first_row.append(row)
        return len(self.begin) - 1

    def _split_segment(self, node: int, position: int) -> int:
        """Divide a segment in two at a position, and return the new first part. The second part keeps the index."""
        first = self._add(self.begin[node], position, self.parent[node], self.first_row[node])
        self.begin[node], self.parent[node] = position, first
        return first

    def _add_row_to(self, node: int, row: int) -> None:
        """Record that a row contains a segment and its ancestors."""
        while node >= 0 and row < self.first_row[node]:
            self.first_row[node], node = row, self.parent[node]


def sorted_rows(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield (row index, tokens in common with the previous row), sorted so that common prefixes are adjacent.

    Fewer than `min_shared_tokens` tokens in common count as 0, unless both rows are equal.
    """
    least = min_shared_tokens(rows)
    alike: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(row[:least].tobytes(), []).append(index)
    for of_head in alike.values():
        if len(of_head) > 1:
            # Bytes of equal tokens are equal, so the order of bytes puts common prefixes next to each other.
            of_head.sort(key=lambda index: rows[index].tobytes())
    order = list(chain(*alike.values()))
    firsts = {of_head[0] for of_head in alike.values()}
    for index, common in zip(order, [0, *_common_lengths([rows[index] for index in order])], strict=True):
        yield index, 0 if index in firsts else common


def _common_lengths(rows: Rows) -> list[int]:
    """Return, for each row but the first, how many tokens at its beginning equal those of the row before it."""
    if len(rows) < 2:
        return []
    lengths = np.array([len(row) for row in rows])
    if (longest := lengths.max()) * len(rows) > _MOST_AT_ONCE:
        if len(rows) == 2:
            n = int(lengths.min())
            differs = rows[0][:n] != rows[1][:n]
            return [int(differs.argmax()) if differs.any() else n]
        middle = len(rows) // 2
        return [*_common_lengths(rows[: middle + 1]), *_common_lengths(rows[middle:])]
    tokens = np.full((len(rows), longest + 1), -1)
    tokens[np.arange(longest + 1) < lengths[:, None]] = np.concatenate(rows)
    differs = tokens[1:] != tokens[:-1]
    differs[:, -1] = True  # equal rows
    return np.minimum(differs.argmax(1), np.minimum(lengths[1:], lengths[:-1])).tolist()


def n_computed_tokens(rows: Rows) -> int:
    tree = _SegmentTree(rows)
    return sum(tree.end) - sum(tree.begin)


def _n_computed_by_unit(units: Sequence[Rows]) -> Iterator[int]:
    """Yield the number of tokens to compute for each unit, if its rows share prefixes."""
    pairs = [unit for unit in units if len(unit) == 2]
    of_pairs = iter(_common_lengths(list(chain(*pairs)))[::2])
    for unit in units:
        if len(unit) != 2:
            yield len(unit[0]) if len(unit) == 1 else n_computed_tokens(unit)
            continue
        common, (one, other) = next(of_pairs), map(len, unit)
        is_shared = common >= min_shared_tokens(unit) or common == one == other
        yield one + other - common * is_shared


def sharing_groups(units: Sequence[Rows], most: int) -> list[UnitGroup]:
    """Group units that share prefixes into groups of a size up to `most`. Compares only the first row of each unit."""
    return _group_units(_added_units(units), most)


class _AddedUnit(NamedTuple):
    """A unit, and what it adds to a group that already has the previous unit."""

    unit: int
    common: int  # tokens in common with the unit before
    size: int
    n_computed: int
    alone: UnitGroup


def _group_units(additions: Iterable[_AddedUnit], most: int) -> list[UnitGroup]:
    found: list[UnitGroup] = []
    for addition in additions:
        if addition.common and found and found[-1].size + addition.size <= most:
            found[-1] = found[-1].with_unit(addition.unit, addition.size, addition.n_computed)
        else:
            found.append(addition.alone)
    return found


def _added_units(units: Sequence[Rows], order: Iterable[tuple[int, int]] | None = None) -> Iterator[_AddedUnit]:
    """Yield the units, sorted so that units with a common prefix are adjacent."""
    firsts = [unit[0] for unit in units]
    least, of_units = min_shared_tokens(firsts), list(_n_computed_by_unit(units))
    for index, common in sorted_rows(firsts) if order is None else order:
        computed = of_units[index]
        size = computed + (sum(map(len, units[index])) - computed) // KEYS
        saved = max(0, common - least + 1)  # at least so many tokens are shared, see _SegmentTree
        yield _AddedUnit(
            index, common, size - saved + -(-saved // KEYS), computed - saved, UnitGroup([index], size, computed)
        )


class LinkedGroups(NamedTuple):
    """Groups of units (`pieces`) whose common prefixes are computed in a separate pass, or a single group."""

    pieces: list[UnitGroup]
    passes: list[int]  # computed tokens of each pass: of the prefixes, if there are several pieces, then of each piece


def linked_groups(
    units: Sequence[Rows], most: int, sharing: PrefixSharing, order: Iterable[tuple[int, int]] | None = None
) -> list[LinkedGroups]:
    """Divide units of rows into pieces as `sharing_groups` does, and link pieces that have a prefix in common.

    The common prefixes of linked pieces are computed in a separate forward pass, before the pieces. Their keys, values
    and activations stay in memory until the last piece is done, so linked pieces are smaller than others. Only units of
    one row are linked. In larger units, the first rows do not tell how many tokens the other rows share.
    """
    groups: list[list[_AddedUnit]] = []  # units with a common prefix
    for addition in _added_units(units, order):
        if addition.common:
            groups[-1].append(addition)
        else:
            groups.append([addition])
    found: list[LinkedGroups] = []
    for group in groups:
        apart = _group_units(group, most)
        linked = _linked_groups(group, most) if len(apart) > 1 and len(units[0]) == 1 else None
        # Compared with tokens alone: pieces that are not linked are put together, so launches do not limit them.
        if linked and sharing.time_in_tokens(linked.passes) < FASTER * sum(piece.n_computed for piece in apart):
            found.append(linked)
        else:
            found += [LinkedGroups([piece], [piece.n_computed]) for piece in apart]
    return found


def _linked_groups(additions: Sequence[_AddedUnit], most: int) -> LinkedGroups | None:
    """Return linked pieces that fit into `most` with their prefixes. None if a piece is empty or does not fit."""

    def cut(room: int) -> LinkedGroups:
        """Cut the units into pieces of size at most `room`. In the result, the pass over the prefixes comes first."""
        found = [additions[0].alone]
        moved = [0]  # tokens of each piece that the pass over the prefixes computes
        seen = 0  # tokens at the beginning of the unit that are counted in `moved`
        for addition in additions[1:]:
            seen = min(seen, addition.common)
            if found[-1].size + addition.size <= room:
                found[-1] = found[-1].with_unit(addition.unit, addition.size, addition.n_computed)
                continue
            moved[-1], seen = addition.common - seen, addition.common
            found.append(UnitGroup([addition.unit], addition.size, addition.n_computed))
            moved.append(0)
        own = [piece.n_computed - n for piece, n in zip(found, moved, strict=True)]
        return LinkedGroups(found, [sum(moved), *own])

    found = cut(most // 2)
    n_prefixes = found.passes[0]
    if KEPT * n_prefixes > most // 2:
        return None
    larger = cut(most - KEPT * n_prefixes)
    if larger.passes[0] <= n_prefixes:
        found = larger
    n_prefixes, *own = found.passes
    alone = {addition.unit: addition.alone.size for addition in additions}
    for piece, n in zip(found.pieces, own, strict=True):
        n_copied = piece.size - piece.n_computed
        fits = KEPT * n_prefixes + n + n_copied <= max(most, *(alone[unit] for unit in piece.units))
        if not n or not fits:
            return None
    return found


def shared_routes(forest: Forest, routes_U: np.ndarray) -> np.ndarray | None:
    """Return the known routes of each token of a forest, (N, layers, k).

    None if rows disagree about the experts of a shared token, so that they cannot share it.
    """
    known = np.flatnonzero(routes_U[:, 0, 0] != np.iinfo(routes_U.dtype).max)
    source_N = _first_occurrences(forest.indices_U, len(forest.tokens_N))
    source_N[forest.indices_U[known][::-1]] = known[::-1]
    routes_N = routes_U[source_N]
    return routes_N if np.array_equal(routes_N[forest.indices_U[known]], routes_U[known]) else None


def order_to_share(rows: Rows, sharing: PrefixSharing) -> list[tuple[int, int]] | None:
    """Return `sorted_rows` of the rows if computing shared prefixes once saves enough tokens, else None."""
    n_tokens = sum(map(len, rows))
    if sharing.when == "off" or not sharing.may_be_faster(n_tokens, len(rows)):
        return None
    least = min_shared_tokens(rows)
    if len({row[:least].tobytes() for row in rows}) == len(rows):
        return None
    order = list(sorted_rows(rows))
    return order if sharing.saves_enough(sum(common for _, common in order), n_tokens) else None


def prefix_sharing_rules(
    model: Transformer, role: RoleSpec, when: SharePrefixes
) -> tuple[PrefixSharing, PrefixSharing]:
    on_cuda, itemsize = model.device.type == "cuda", model.embed.weight.element_size()
    rule = partial(PrefixSharing.from_setting, when, model.config, itemsize, on_cuda=on_cuda, tp_size=model.tp.size)
    return rule(trains=False), rule(trains=True, adapters=role.adapters)
