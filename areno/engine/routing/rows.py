"""Routes of rows: which experts their tokens went through, as an array. The driver checks them, so no torch in here.

Routes of a row are (n, L, k): the experts of its first n tokens in each of L layers, in uint8 where these numbers are
below 256, else int16. The largest number of the type stands for a token whose experts are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from areno.engine.train.rows import Row
from areno.errors import DataError, EngineError
from areno.types import TrainSequence

FIELD = "routes"  # of Row.fields


class RouteShape(NamedTuple):
    """What a model's routes look like. bytes_per_token: of memory, for a token in the KV cache and of a sample."""

    n_layers: int
    top_k: int
    n_experts: int

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.n_experts < 2**8 else np.int16

    @property
    def none(self) -> int:
        """For a token whose experts are not known."""
        return int(np.iinfo(self.dtype).max)

    @property
    def bytes_per_token(self) -> int:
        return self.n_layers * self.top_k * np.dtype(self.dtype).itemsize


def read_routes(routes: Any, n_tokens: int, shape: RouteShape | None, name: str) -> np.ndarray:
    """The routes of a row of n_tokens, for all of them. None: of no token. DataError, with `name`, if they are none."""
    if shape is None:
        raise DataError(f"{name}: routes are given, but the model has no experts; leave them out")
    whole = np.full((n_tokens, shape.n_layers, shape.top_k), shape.none, dtype=shape.dtype)
    if routes is None:
        return whole
    routes = np.asarray(routes)
    expected = f"(at most {n_tokens} tokens, {shape.n_layers} layers, {shape.top_k} experts)"
    if (
        routes.ndim != 3
        or routes.shape[1:] != whole.shape[1:]
        or len(routes) > n_tokens
        or routes.dtype.kind not in "iu"
    ):
        raise DataError(
            f"{name}: routes are {routes.dtype} of shape {routes.shape}; whole numbers, {expected}, expected"
        )
    given = routes[routes != shape.none]
    if given.size and not 0 <= given.min() <= given.max() < shape.n_experts:
        wrong = int(given.min() if given.min() < 0 else given.max())
        raise DataError(f"{name}: routes hold {wrong}; the model's experts are 0 to {shape.n_experts - 1}")
    whole[: len(routes)] = routes
    return whole


def routes_of_rows(
    routes: Sequence[Any] | None, token_rows: Sequence[Any], shape: RouteShape | None, role: str
) -> list[np.ndarray] | None:
    """Those of all rows; None where none is given. EngineError unless there are as many, and of the actor."""
    if routes is None or all(each is None for each in routes):
        return None
    if role != "actor":
        raise EngineError(f"routes are the actor's, and role {role!r} has other experts; leave them out")
    if len(routes) != len(token_rows):
        raise EngineError(f"there are routes of {len(routes)} rows, and {len(token_rows)} rows of tokens")
    pairs = zip(routes, token_rows, strict=True)
    return [read_routes(each, len(row), shape, f"token_rows[{index}]") for index, (each, row) in enumerate(pairs)]


def add_routes(rows: Sequence[Row], given: Sequence[TrainSequence], shape: RouteShape | None, name: str) -> None:
    """Give checked rows the routes they came with. Where some came with none, their tokens have unknown experts.

    name: of a row in messages, with {} for its index.
    """
    if any(row.routes is not None for row in given):
        for index, (row, source) in enumerate(zip(rows, given, strict=True)):
            row.fields[FIELD] = read_routes(source.routes, row.n_tokens, shape, name.format(index))
