"""Rows to units, optimizer steps, data-parallel shares, micro-batches and tensors, packed end to end without padding.

A unit is what stays together: a row, or a pair of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areno.config.model_roles import MicroBatchSpec
from areno.engine.types import TrainSequence
from areno.errors import DataError
from areno.loss_fns.pack import DataPack

# TrainSequence's optional per-token fields -> their names in DataPack
FIELDS = {
    "logprobs": "old_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "ref_logprobs": "ref_logprobs",
    "weights": "weights",
}


@dataclass(slots=True)
class Row:
    """One checked TrainSequence as arrays of its n tokens."""

    tokens: np.ndarray  # int64
    trained: np.ndarray  # bool; never the first token, which nothing predicts
    fields: dict[str, np.ndarray] = field(default_factory=dict)  # DataPack name -> float32
    reward: float = 0.0
    staleness: int = 0

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_trained(self) -> int:
        return int(self.trained.sum())


def read_tokens(tokens: Sequence[int] | None, index: int, vocab_size: int) -> np.ndarray:
    """The token ids of one row, (n,) int64. DataError where there are none, or one that the model does not have."""
    ids = np.asarray(tokens if tokens is not None else [], dtype=np.int64)
    if not ids.size:
        raise DataError(f"row {index}: tokens is empty; a row needs at least one token")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise DataError(
            f"row {index}: tokens holds {wrong}, the model has token ids 0 to {vocab_size - 1}; check that "
            "tokenizer_path belongs to actor.path"
        )
    return ids


def read_rows(rows: Sequence[TrainSequence], vocab_size: int) -> list[Row]:
    """Check every row and turn it into arrays. DataError names the row's index and the field."""
    if not rows:
        raise DataError("there are no rows to train on")
    given = [name for name in FIELDS if getattr(rows[0], name) is not None]
    return [_read_row(row, index, given, vocab_size) for index, row in enumerate(rows)]


def _read_row(row: TrainSequence, index: int, given: list[str], vocab_size: int) -> Row:
    tokens = read_tokens(row.tokens, index, vocab_size)
    if row.prompt_mask is None:
        raise DataError(f"row {index}: prompt_mask is missing; give True for each token that is not trained")
    for name in ("prompt_mask", *FIELDS):
        values = getattr(row, name)
        if name in FIELDS and (values is not None) != (name in given):
            has, lacks = (0, index) if name in given else (index, 0)
            raise DataError(f"row {lacks}: {name} is missing, but row {has} has it; set it on every row or on none")
        if values is not None and len(values) != len(tokens):
            raise DataError(
                f"row {index}: {name} has {len(values)} entries, tokens has {len(tokens)}; per-token lists cover "
                "prompt and response"
            )
    trained = ~_read_mask(row.prompt_mask, index)
    trained[0] = False
    out = Row(tokens, trained, reward=row.reward, staleness=row.staleness)
    for name in given:
        try:
            values = np.asarray(getattr(row, name), dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"row {index}: {name} holds something that is no number: {error}") from error
        if values.ndim != 1:
            raise DataError(f"row {index}: {name} has {values.ndim} dimensions; one number for each token is expected")
        bad = np.flatnonzero(trained & ~np.isfinite(values))
        if bad.size:
            raise DataError(f"row {index}: {name} is {values[bad[0]]} at token {bad[0]}; trained tokens need a number")
        out.fields[FIELDS[name]] = values
    return out


def _read_mask(prompt_mask: Sequence[bool], index: int) -> np.ndarray:
    """(n,) bool. Text would count as True, so nothing but True and False, or 1 and 0, is taken for such."""
    try:
        mask = np.asarray(prompt_mask)
    except ValueError:  # lists of different lengths inside
        mask = np.zeros((0, 0))
    if mask.ndim != 1 or mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise DataError(f"row {index}: prompt_mask holds something else than True and False, one for each token")
    return mask.astype(bool)


@dataclass(slots=True)
class Unit:
    """Adjacent rows that belong together, such as the two of a preference pair. Nothing below here divides them."""

    rows: list[Row]

    @property
    def n_tokens(self) -> int:
        return sum(row.n_tokens for row in self.rows)


def units_of(rows: Sequence[Row], granularity: int, spec: MicroBatchSpec) -> tuple[list[Unit], MicroBatchSpec]:
    """Units of `granularity` rows each, and the micro-batches that `spec`, which counts rows, means for units.

    DataError where the rows do not come out even.
    """
    if granularity < 1:
        raise DataError(f"granularity is {granularity}; expected the number of adjacent rows that belong together")
    if len(rows) % granularity:
        raise DataError(
            f"there are {len(rows)} rows, not a multiple of granularity={granularity}; each unit is that many adjacent "
            "rows (a preference pair: chosen, then rejected)"
        )
    units = [Unit(list(rows[start : start + granularity])) for start in range(0, len(rows), granularity)]
    return units, dataclasses.replace(spec, mini_bs=max(1, spec.mini_bs // granularity))


def optimizer_steps(
    lengths: Sequence[int],
    spec: MicroBatchSpec,
    n_minibatches: int = 1,
    gradient_accumulation_steps: int | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Unit indices of each optimizer step, from the number of tokens in each unit.

    n_minibatches: as many steps of equally many units (give or take one), after a shuffle by `seed`.
    gradient_accumulation_steps: a step for every so many micro-batches, in the order of the units. Give one of the two.
    """
    if gradient_accumulation_steps is not None:
        if n_minibatches != 1:
            raise ValueError("give n_minibatches or gradient_accumulation_steps, not both")
        batches = micro_batches(lengths, spec)
        groups = [
            batches[i : i + gradient_accumulation_steps] for i in range(0, len(batches), gradient_accumulation_steps)
        ]
        return [sorted(unit for batch in group for unit in batch) for group in groups]
    if n_minibatches == 1:
        return [list(range(len(lengths)))]
    order = np.random.default_rng(seed).permutation(len(lengths))
    return [part.tolist() for part in np.array_split(order, n_minibatches) if part.size]


def micro_batches(lengths: Sequence[int], spec: MicroBatchSpec) -> list[list[int]]:
    """Unit indices of each micro-batch: `mini_bs` at a time, or first-fit decreasing under `max_tokens_per_mb`.

    A unit longer than the budget gets a micro-batch of its own. Indices ascend within a micro-batch, and micro-batches
    are ordered by their first unit, so that training follows the order of the data as far as the packing allows.
    """
    budget = spec.max_tokens_per_mb
    if budget is None:
        return [
            list(range(start, min(start + spec.mini_bs, len(lengths))))
            for start in range(0, len(lengths), spec.mini_bs)
        ]
    batches: list[list[int]] = []
    room: list[int] = []
    for unit in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[unit]
        fit = next((i for i, left in enumerate(room) if left >= size), None)
        if fit is None:
            batches.append([unit])
            room.append(budget - size)
        else:
            batches[fit].append(unit)
            room[fit] -= size
    return sorted(sorted(batch) for batch in batches)


def split_balanced(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Unit indices of `n` shares with nearly equal token counts: the longest unit left goes to the lightest share.

    No share is empty as long as there are `n` units. Indices ascend within a share.
    """
    shares: list[list[int]] = [[] for _ in range(n)]
    load = [0] * n
    for unit in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = min(range(n), key=lambda i: (load[i], len(shares[i])))
        shares[lightest].append(unit)
        load[lightest] += lengths[unit]
    return [sorted(share) for share in shares]


@dataclass(slots=True)
class PackedTokens:
    """What the model's forward pass needs of R packed rows with N tokens together, on the device."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64, from 0 in each row
    cu_seqlens: Tensor  # (R + 1,) int32
    max_len: int


def pack_tokens(token_rows: Sequence[np.ndarray], device: torch.device) -> PackedTokens:
    """Rows of int64 token ids, end to end."""
    lengths = np.array([len(row) for row in token_rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return PackedTokens(
        torch.from_numpy(np.concatenate(token_rows)).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(starts.astype(np.int32)).to(device),
        int(lengths.max()),
    )


def pack_units(
    units: Sequence[Unit], step_tokens: int, step_rows: int, device: torch.device
) -> tuple[PackedTokens, DataPack]:
    """One micro-batch for the model and for the loss. step_tokens, step_rows: see DataPack."""
    rows = [row for unit in units for row in unit.rows]
    trained = np.concatenate([row.trained for row in rows])
    fields = {name: np.concatenate([row.fields[name] for row in rows]) for name in rows[0].fields}
    packed = pack_tokens([row.tokens for row in rows], device)
    pack = DataPack(
        tokens=packed.tokens_N,
        row_of_token=torch.from_numpy(np.repeat(np.arange(len(rows)), [row.n_tokens for row in rows])).to(device),
        loss_mask=torch.from_numpy(trained).to(device),
        n_rows=len(rows),
        step_tokens=step_tokens,
        step_rows=step_rows,
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32).to(device),
        staleness=torch.tensor([row.staleness for row in rows], dtype=torch.float32).to(device),
        granularity=len(units[0].rows),
        trained_T=torch.from_numpy(np.flatnonzero(trained)).to(device),
        **{name: torch.from_numpy(values).to(device) for name, values in fields.items()},  # type: ignore[arg-type]
    )
    return packed, pack
