"""Rows to tensors: packed end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.train.rows import Row
from areno.loss_fns.pack import DataPack


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


def pack_rows(
    rows: Sequence[Row], *, step_tokens: int, step_rows: int, rows_per_unit: int, device: torch.device
) -> tuple[PackedTokens, DataPack]:
    """One micro-batch for the model and for the loss. step_tokens, step_rows, rows_per_unit: see DataPack."""
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
        rows_per_unit=rows_per_unit,
        trained_T=torch.from_numpy(np.flatnonzero(trained)).to(device),
        **{name: torch.from_numpy(values).to(device) for name, values in fields.items()},  # type: ignore[arg-type]
    )
    return packed, pack
