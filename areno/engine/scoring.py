"""Rows to score: checked, and shared out over the copies of a model. The driver does this, so no torch in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.engine.spec import EngineInfo
from areno.engine.train.micro_batches import split_balanced
from areno.engine.train.rows import read_tokens
from areno.models.cost.arithmetic import forward_flops


def share_rows(
    rows: Sequence[Any], routes: Sequence[np.ndarray] | None, n_shares: int, info: EngineInfo
) -> tuple[list[list[int]], list[list[list[np.ndarray]]]]:
    """The indices of each share, and its rows, followed by their routes where there are any.

    The shares take about equally long. DataError for a row that is none.
    """
    checked = [
        read_tokens(tokens, f"token_rows[{index}]", info.vocab_size, info.context_len)
        for index, tokens in enumerate(rows)
    ]
    shares = split_balanced([forward_flops(info.cost, [len(tokens)]) for tokens in checked], n_shares)
    columns = [checked] if routes is None else [checked, list(routes)]
    return shares, [[[column[index] for index in share] for column in columns] for share in shares]
