"""Divides rows into optimizer steps, data-parallel shares and micro-batches. Runs in the driver and imports no torch.

A unit is a fixed number of adjacent rows that stay together: a single row, or the two rows of a preference pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from typing import Any

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.cost.flops import TokenCost, forward_flops, train_flops
from areno.cost.prefix_sharing import PrefixSharing
from areno.engine.reports import EngineInfo
from areno.engine.train.checked_rows import FlatRows, read_tokens
from areno.engine.train.shared_prefixes import (
    LinkedGroups,
    Rows,
    linked_groups,
    n_computed_tokens,
    order_to_share,
    sharing_groups,
)
from areno.errors import DataError, EngineError, Key
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence

NO_SHARING = PrefixSharing("off")

_BALANCED = 1.1  # largest cost of a rank, divided by the mean, with which rows are not divided further
_PIECES = 4  # at least so many pieces of rows with a shared prefix for each data-parallel rank


@dataclass(slots=True)
class StepMicroBatches:
    """The work of one data-parallel rank in one optimizer step.

    `sizes` has a list for each group of micro-batches: the number of rows of each micro-batch. A separate forward pass
    computes the prefixes that the micro-batches of a group share. Most groups have one micro-batch.
    """

    rows: FlatRows
    sizes: list[list[int]]
    step_tokens: int  # trained tokens of the whole step, over all ranks
    step_rows: int  # rows with trained tokens, over all ranks
    rounds: int  # most backward passes of any rank
    shares: bool = False  # whether shared prefixes are computed once
    row_indices: Sequence[int] = ()  # among the caller's rows; empty for an added row, and in a worker

    @property
    def groups(self) -> list[list[FlatRows]]:
        batches = iter(self.micro_batches)
        return [list(islice(batches, len(group))) for group in self.sizes]

    @property
    def micro_batches(self) -> list[FlatRows]:
        ends = list(accumulate(chain(*self.sizes)))
        return [self.rows[start:end] for start, end in pairwise([0, *ends])]

    @property
    def max_backward_passes(self) -> int:
        """Largest possible number of backward passes of this rank."""
        return sum(len(group) + (len(group) > 1) for group in self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        # int32 halves the bytes of the largest array.
        tokens = self.rows.tokens.astype(np.int32, casting="same_kind")
        others = self.sizes, self.step_tokens, self.step_rows, self.rounds, self.shares
        return _from_pickle, (replace(self.rows, tokens=tokens), *others)


@dataclass(slots=True)
class TrainResult:
    """The result of one rank's optimizer steps. `old_logprobs` has (N,), or None if not recomputed, for each step."""

    stats: dict[str, float]  # equal on all ranks
    old_logprobs: list[np.ndarray | None]
    n_halvings: int = 0


def store_old_logprobs(
    rows: Sequence[TrainSequence], shares: Sequence[Sequence[StepMicroBatches]], results: Sequence[TrainResult]
) -> None:
    """Store in each row the old log-probabilities with which training computed its importance ratios.

    A later call of `Engine.train` on the same rows then computes its ratios to the same old policy. Tokens that were
    not trained get NaN.
    """
    for steps, result in zip(shares, results, strict=True):
        for step, old_N in zip(steps, result.old_logprobs, strict=True):
            if old_N is None:
                continue
            # NaN means unknown: these tokens were not trained, but may be trained in a later call.
            kept = step.rows.split_by_row(np.where(step.rows.trained, old_N, np.nan))
            for place, of_row in zip(step.row_indices, kept, strict=False):  # no index of a row that was added
                rows[place].old_logprobs = of_row


def sharing_with_teachers(
    sharing: PrefixSharing, of_teachers: Iterable[PrefixSharing], rows: FlatRows, cp_size: int
) -> PrefixSharing:
    """Return the rule by which an update with teachers computes shared prefixes once: `sharing` or NO_SHARING.

    It is NO_SHARING if a teacher's model cannot share prefixes, or if rows have a `teacher_prompt`: a shared token may
    then have another divergence in each row. Raises EngineError for a `teacher_prompt` with context parallelism.
    """
    if any(prompt is not None for prompt in rows.teacher_prompts):
        if cp_size > 1:
            text = "rows have a teacher_prompt, which context parallelism does not support; set {}=1"
            raise EngineError(text, Key("engine.cp_size"))
        return NO_SHARING
    return NO_SHARING if any(each.when == "off" for each in of_teachers) else sharing


def _from_pickle(rows: FlatRows, *others: Any) -> StepMicroBatches:
    """Rebuild a StepMicroBatches from a message, in which token ids are int32."""
    return StepMicroBatches(replace(rows, tokens=rows.tokens.astype(np.int64)), *others)


def divide_steps(
    rows: FlatRows,
    update: UpdateSpec,
    dp_size: int = 1,
    section: str = "actor",
    cost: TokenCost | None = None,
    cp_size: int = 1,
    sharing: PrefixSharing = NO_SHARING,
) -> list[list[StepMicroBatches]]:
    """Divide rows into optimizer steps, and each step over the data-parallel ranks.

    All ranks have the same number of steps. If a step has fewer rows than ranks (rows may have been dropped), a rank
    without a row gets a short row without trained tokens. With `cost`, ranks get nearly equal FLOPs, otherwise nearly
    equal numbers of tokens. Rows that share a prefix stay together as far as possible.

    Raises DataError if the rows are no multiple of `update.rows_per_unit`, or if a step has fewer units of several rows
    than there are ranks.
    """
    n_units, update_of_units = _count_units(len(rows), update)
    per_unit = update.rows_per_unit
    lengths = rows.lengths.reshape(n_units, per_unit).sum(1).tolist()
    trained_of_unit = rows.n_trained.reshape(n_units, per_unit)
    rows_of_unit = np.arange(len(rows)).reshape(n_units, per_unit)
    of_rows = rows.split_by_row(rows.ids_to_share())
    tokens_of_unit = [of_rows[first : first + per_unit] for first in range(0, len(rows), per_unit)]
    teachers = _teachers_of(rows, per_unit)
    shares: list[list[StepMicroBatches]] = [[] for _ in range(dp_size)]
    for step in optimizer_steps(lengths, update_of_units, cp_size):
        if len(step) < dp_size and per_unit > 1:
            raise DataError(
                f"an optimizer step has {len(step) * per_unit} rows, in units of {per_unit}, "
                f"for {dp_size} copies of the model; each needs one: raise {{}}, or lower {{}} or {{}}",
                Key("train_dataset.batch_size"),
                Key(f"{section}.ppo_n_minibatches"),
                Key("engine.world_size"),
            )
        trained = trained_of_unit[step]
        tokens = [tokens_of_unit[index] for index in step]
        order = order_to_share(list(chain(*tokens)), sharing)
        step_shares = order is not None
        if dp_size > 1 or per_unit > 1:
            order = None  # because it is not that of a rank's units
        n_tokens, n_rows = int(trained.sum()), int((trained > 0).sum())
        of_ranks: list[StepMicroBatches] = []
        costs = [1.0] * len(step)
        if dp_size > 1:
            costs = [_unit_cost(list(map(len, tokens[at])), trained[at].tolist(), cost) for at in range(len(step))]
        divide = partial(
            row_micro_batches,
            spec=update_of_units.mb_spec,
            cp_size=cp_size,
            sharing=sharing if step_shares else NO_SHARING,
            # A number of micro-batches that the user has set must not depend on sharing.
            keeps_count=update.gradient_accumulation_steps is not None,
        )
        for mine in _split_units(tokens, costs, dp_size, step_shares):
            own_units = [step[place] for place in mine]
            of_teachers = [teachers[unit] for unit in own_units]
            found, rank_shares = _divide_by_teacher([tokens[place] for place in mine], of_teachers, divide, order)
            if mine:
                indices = rows_of_unit[[own_units[at] for at in chain(*chain(*found))]].ravel().tolist()
                own, sizes = rows.select(indices), [[per_unit * len(batch) for batch in group] for group in found]
            else:  # the rank takes part in collectives, but adds nothing to the loss
                indices, own, sizes = [], _dummy_rows(rows, rows_of_unit[step][:, 0]), [[1]]
            of_ranks.append(StepMicroBatches(own, sizes, n_tokens, n_rows, 0, rank_shares, indices))
        rounds = max(of_rank.max_backward_passes for of_rank in of_ranks)
        for of_rank, steps in zip(of_ranks, shares, strict=True):
            steps.append(replace(of_rank, rounds=rounds))
    return shares


def _teachers_of(rows: FlatRows, per_unit: int) -> list[str]:
    """Return the teacher of each unit. Raises DataError if a unit has rows with different teachers."""
    if per_unit > 1:
        for first in range(0, len(rows), per_unit):
            if len(set(rows.teachers[first : first + per_unit])) > 1:
                raise DataError(f"{per_unit} adjacent rows belong together, but have different teachers; give them one")
    return rows.teachers[::per_unit]


def _divide_by_teacher(
    units: Sequence[Rows],
    teachers: Sequence[str],
    divide: Callable[..., tuple[list[list[list[int]]], bool]],
    order: Sequence[tuple[int, int]] | None,
) -> tuple[list[list[list[int]]], bool]:
    """Apply `divide` to the units of each teacher separately, and join the resulting groups of micro-batches."""
    parts: dict[str, list[int]] = {}
    for index, teacher in enumerate(teachers):
        parts.setdefault(teacher, []).append(index)
    found, shares = list[list[list[int]]](), False
    for part in parts.values():
        groups, part_shares = divide([units[at] for at in part], order=order if len(parts) == 1 else None)
        found += [[[part[at] for at in batch] for batch in group] for group in groups]
        shares |= part_shares
    return found, shares


def _split_units(units: Sequence[Rows], costs: Sequence[float], n_shares: int, share: bool) -> list[list[int]]:
    """Divide units into shares of nearly equal cost, and return the unit indices.

    With `share`, units with a common prefix stay together, and a shared token costs once. If the shares are then not
    balanced, groups of such units are cut (see `pieces`). If a share is empty, common prefixes are ignored.
    """
    if not share or n_shares == 1:
        return split_balanced(costs, n_shares)
    n_tokens = [sum(map(len, unit)) for unit in units]
    total = sum(n_tokens)
    shares: list[list[int]] = []
    for most in (total, max(1, total // (_PIECES * n_shares))):
        found = sharing_groups(units, most)
        of_pieces = [
            piece.size * sum(costs[i] for i in piece.units) / sum(n_tokens[i] for i in piece.units) for piece in found
        ]
        shares = split_balanced(of_pieces, n_shares)
        loads = [sum(of_pieces[place] for place in share) for share in shares]
        if max(loads) <= _BALANCED * sum(loads) / n_shares:
            break
    if not all(shares):  # each rank needs a unit, if there are enough
        return split_balanced(costs, n_shares)
    return [sorted(i for place in share for i in found[place].units) for share in shares]


def _dummy_rows(rows: FlatRows, indices: np.ndarray) -> FlatRows:
    """Return two untrained tokens of the shortest of some rows, for a rank that has no row of its own."""
    row = rows[int(indices[rows.lengths[indices].argmin()])]
    fields = {name: numbers[:2] for name, numbers in row.fields.items()}
    return FlatRows.concatenate(
        [replace(row, tokens=row.tokens[:2], trained=np.zeros_like(row.trained[:2]), fields=fields)]
    )


def _unit_cost(lengths: Sequence[int], n_trained: Sequence[int], cost: TokenCost | None) -> float:
    if cost is None:
        return sum(lengths)
    return sum(train_flops(cost, [length], n) for length, n in zip(lengths, n_trained, strict=True))


def _count_units(n_rows: int, update: UpdateSpec) -> tuple[int, UpdateSpec]:
    """Return the number of units, and a copy of `update` whose mini_bs counts units."""
    rows_per_unit, spec = update.rows_per_unit, update.mb_spec
    if rows_per_unit < 1:
        raise DataError(f"rows_per_unit is {rows_per_unit}; expected the number of adjacent rows that belong together")
    if n_rows % rows_per_unit:
        raise DataError(
            f"there are {n_rows} rows, not a multiple of rows_per_unit={rows_per_unit}; each unit is that many "
            "adjacent rows (a preference pair: chosen, then rejected)"
        )
    if spec.mini_bs is not None:
        spec = replace(spec, mini_bs=max(1, spec.mini_bs // rows_per_unit))
    return n_rows // rows_per_unit, replace(update, mb_spec=spec)


def optimizer_steps(lengths: Sequence[int], update: UpdateSpec, cp_size: int = 1) -> list[list[int]]:
    """Divide units into optimizer steps, and return the unit indices of each step.

    If `update.gradient_accumulation_steps` is set, a step has this number of micro-batches. If it is None, the units
    are shuffled with `update.seed` and split into `update.n_minibatches` steps. A single step keeps the order of the
    units.
    """
    if (n := update.gradient_accumulation_steps) is not None:
        if update.n_minibatches != 1:
            raise ValueError("give n_minibatches or gradient_accumulation_steps, not both")
        batches = micro_batches(lengths, update.mb_spec, cp_size)
        groups = [batches[i : i + n] for i in range(0, len(batches), n)]
        return [sorted(unit for batch in group for unit in batch) for group in groups]
    if update.n_minibatches == 1:
        return [list(range(len(lengths)))]
    order = np.random.default_rng(update.seed).permutation(len(lengths))
    return [part.tolist() for part in np.array_split(order, update.n_minibatches) if part.size]


def micro_batches(lengths: Sequence[int], spec: MicroBatchSpec, cp_size: int = 1) -> list[list[int]]:
    """Divide units into micro-batches, and return the unit indices of each micro-batch.

    If `spec.max_tokens_per_mb` (of one device) is set, units are packed first-fit decreasing, and a unit with more
    tokens is alone. If it is None, each micro-batch has `spec.mini_bs` units. Indices ascend within a micro-batch, and
    micro-batches are ordered by their first unit, so training follows the order of the data as far as possible.
    """
    budget = spec.max_tokens_per_mb
    if budget is None:
        assert spec.mini_bs is not None, "the engine has chosen no size of micro-batches"
        units = list(range(len(lengths)))
        return [units[start : start + spec.mini_bs] for start in range(0, len(units), spec.mini_bs)]
    if lengths and sum(lengths) <= budget * cp_size:  # a batch may have thousands of short rows
        return [list(range(len(lengths)))]
    batches: list[list[int]] = []
    room: list[int] = []
    open_batches: list[int] = []  # with room for the shortest unit
    capacity, shortest = budget * cp_size, min(lengths, default=0)
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for length, of_length in groupby(by_length, key=lengths.__getitem__):
        left = list(of_length)  # units of one length go into a batch together
        for batch in open_batches:
            n = room[batch] // length
            batches[batch] += left[:n]
            room[batch] -= length * len(left[:n])
            left = left[n:]
        n = max(1, capacity // length)
        for first in range(0, len(left), n):
            batches.append(left[first : first + n])
            room.append(capacity - length * len(batches[-1]))
            open_batches.append(len(batches) - 1)
        open_batches = [batch for batch in open_batches if room[batch] >= shortest]
    return sorted(sorted(batch) for batch in batches)


def row_micro_batches(
    units: Sequence[Rows],
    spec: MicroBatchSpec,
    cp_size: int = 1,
    sharing: PrefixSharing = NO_SHARING,
    order: Sequence[tuple[int, int]] | None = None,
    *,
    keeps_count: bool = False,
) -> tuple[list[list[list[int]]], bool]:
    """Divide units of rows into micro-batches as `micro_batches` does.

    A shared prefix counts once towards `spec.max_tokens_per_mb`, and units that share a prefix are put together as far
    as possible. With `keeps_count`, the micro-batches are the same as without sharing. `order` is the result of
    `sorted_rows` for the first rows of the units, or None.

    Returns groups of micro-batches, and whether the model should compute shared prefixes once. If a group has several
    micro-batches, their common prefixes are computed in a separate pass, see `linked_groups`. With context parallelism,
    each group has one micro-batch.
    """
    lengths = [sum(map(len, unit)) for unit in units]
    apart = micro_batches(lengths, spec, cp_size)
    passes_apart = [sum(lengths[unit] for unit in batch) for batch in apart]

    def is_faster(passes: Sequence[int]) -> bool:
        of_device = ([-(-n // cp_size) for n in sizes] for sizes in (passes, passes_apart))
        return sharing.is_faster(*of_device, n_rows=sum(map(len, units)))

    if sharing.when == "off" or not units:
        return [[batch] for batch in apart], False
    if keeps_count or spec.max_tokens_per_mb is None:
        passes = [n_computed_tokens([row for unit in batch for row in units[unit]]) for batch in apart]
        return [[batch] for batch in apart], is_faster(passes)
    most = spec.max_tokens_per_mb * cp_size
    if order is not None:  # dividing thousands of short rows takes longer than to see that it would be of no use
        n_least = sum(lengths) - sum(n_common for _, n_common in order)
        n_passes = -(-n_least // max(most, *lengths))
        if not is_faster([n_least // n_passes] * n_passes):
            return [[batch] for batch in apart], False
    if cp_size == 1:
        found = linked_groups(units, most, sharing, order)
    else:
        found = [LinkedGroups([piece], [piece.n_computed]) for piece in sharing_groups(units, most)]
    alone = [each.pieces[0] for each in found if len(each.pieces) == 1]
    linked = [each for each in found if len(each.pieces) > 1]
    batches = micro_batches([piece.size for piece in alone], spec, cp_size)
    passes = [sum(alone[place].n_computed for place in batch) for batch in batches]
    passes += [n for each in linked for n in each.passes]
    if not is_faster(passes):
        return [[batch] for batch in apart], False
    groups = [[sorted(unit for place in batch for unit in alone[place].units)] for batch in batches]
    return sorted(groups + [[sorted(piece.units) for piece in each.pieces] for each in linked]), True


def split_balanced(costs: Sequence[float], n: int) -> list[list[int]]:
    """Divide units into `n` shares of nearly equal cost, and return the ascending indices in each share.

    The most expensive remaining unit goes to the cheapest share. No share is empty if there are at least `n` units.
    """
    if n == 1:
        return [list(range(len(costs)))]
    shares: list[list[int]] = [[] for _ in range(n)]
    load = [0.0] * n
    for unit in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lightest = min(range(n), key=lambda i: (load[i], len(shares[i])))
        shares[lightest].append(unit)
        load[lightest] += costs[unit]
    return [sorted(share) for share in shares]


def divide_rows(
    rows: Sequence[Any], n_shares: int, info: EngineInfo, sharing: PrefixSharing = NO_SHARING
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Check rows to score, and divide their indices over replicas of a model. Also returns the checked rows."""
    checked = [
        read_tokens(tokens, f"token_rows[{index}]", info.vocab_size, info.context_len)
        for index, tokens in enumerate(rows)
    ]
    costs = [forward_flops(info.cost, [len(tokens)]) for tokens in checked]
    share = n_shares > 1 and order_to_share(checked, sharing) is not None
    return _split_units([[tokens] for tokens in checked], costs, n_shares, share), checked
