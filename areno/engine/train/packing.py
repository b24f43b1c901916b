"""Rows to tensors: packed end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.train.micro_batches import StepShare
from areno.engine.train.rows import Row
from areno.loss_fns.pack import DataPack


@dataclass(slots=True)
class PackedTokens:
    """What the model's forward pass needs of R packed rows with N tokens together, on the device."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64, from 0 in each row
    cu_seqlens: Tensor  # (R + 1,) int32
    max_len: int
    routes_NLk: Tensor | None = None  # of the tokens, where they are known: see areno/engine/routing/rows.py


def pack_tokens(
    token_rows: Sequence[np.ndarray], device: torch.device, routes: Sequence[np.ndarray] | None = None
) -> PackedTokens:
    """Rows of int64 token ids, end to end, with the routes of each."""
    lengths = np.array([len(row) for row in token_rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    arrays = np.concatenate(token_rows), positions, starts.astype(np.int32)
    tokens_N, positions_N, cu_seqlens = (torch.as_tensor(array, device=device) for array in arrays)
    routes_NLk = None if routes is None else torch.as_tensor(np.concatenate(routes), device=device)
    return PackedTokens(tokens_N, positions_N, cu_seqlens, int(lengths.max()), routes_NLk)


def pack_rows(
    rows: Sequence[Row], step: StepShare, rows_per_unit: int, device: torch.device
) -> tuple[PackedTokens, DataPack]:
    """One micro-batch of a step, for the model and for the loss."""
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
