"""Checks the rows of a caller once, and converts them to arrays. Runs in the driver, so it imports no torch.

Routes are the experts that tokens were routed to: an array (n, L, k) for the first n tokens of a row, with L layers
that have experts, and k experts per token in each of these layers. The dtype is uint8 if the model has fewer than 256
experts, else int16. The largest value of the dtype marks unknown experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, overload

import numpy as np

from areno.errors import DataError, EngineError
from areno.types import TrainSequence

# TrainSequence's optional per-token fields -> their names in DataPack
OLD = "old_logprobs"  # a row may lack them, and they are NaN for tokens that were never trained
_SAME = (OLD, "advantages", "returns", "values", "ref_logprobs", "teacher_logprobs", "weights", "kl_weights")
FIELDS = {"logprobs": "rollout_logprobs", **{name: name for name in _SAME}}
TOP = ("teacher_top_tokens", "teacher_top_logprobs")  # names in Row.fields and in DataPack
ID_BITS = 32  # of a token id


@dataclass(slots=True)
class Row:
    """One checked TrainSequence as arrays of its n tokens.

    `fields` maps names of DataPack to float32 arrays, and "routes" to the experts. `teacher` is a role, "" for the
    teacher that the settings of the divergence name. If there is a `teacher_prompt`, the teacher reads it in place of
    the tokens before `response_start`.
    """

    tokens: np.ndarray
    trained: np.ndarray  # False for the first token, which no token predicts
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    reward: float = 0.0
    staleness: int = 0  # optimizer steps since the row was sampled
    teacher: str = ""
    teacher_prompt: np.ndarray | None = None
    response_start: int = 0

    def for_teacher(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that a teacher reads, and a mask that is True at the trained tokens."""
        if self.teacher_prompt is None:
            return self.tokens, self.trained
        first = self.response_start
        before = np.zeros(len(self.teacher_prompt), dtype=bool)
        tokens = np.concatenate([self.teacher_prompt, self.tokens[first:]])
        return tokens, np.concatenate([before, self.trained[first:]])

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_trained(self) -> int:
        return int(np.count_nonzero(self.trained))


@dataclass(slots=True, eq=False)
class FlatRows(Sequence[Row]):
    """Many rows as concatenated arrays, because a batch may have thousands of short rows.

    An index gives a Row with views of the arrays, a slice gives FlatRows. `starts` holds the index of each row's first
    token.
    """

    lengths: np.ndarray
    tokens: np.ndarray
    trained: np.ndarray
    fields: dict[str, np.ndarray]
    rewards: np.ndarray
    staleness: np.ndarray
    teachers: list[str]
    teacher_prompts: list[np.ndarray | None]
    response_starts: list[int]
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.starts = row_starts(self.lengths)

    @staticmethod
    def concatenate(rows: Sequence[Row]) -> FlatRows:
        """Concatenate one or more rows, which must have the same fields."""
        return FlatRows(
            lengths=np.array([row.n_tokens for row in rows]),
            tokens=np.concatenate([row.tokens for row in rows]),
            trained=np.concatenate([row.trained for row in rows]),
            fields={name: np.concatenate([row.fields[name] for row in rows]) for name in rows[0].fields},
            rewards=np.array([row.reward for row in rows]),
            staleness=np.array([row.staleness for row in rows]),
            teachers=[row.teacher for row in rows],
            teacher_prompts=[row.teacher_prompt for row in rows],
            response_starts=[row.response_start for row in rows],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> FlatRows: ...

    def __getitem__(self, index: int | slice) -> Row | FlatRows:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        start = int(self.starts[index])
        place = slice(start, start + int(self.lengths[index]))
        return Row(
            self.tokens[place],
            self.trained[place],
            {name: values[place] for name, values in self.fields.items()},
            float(self.rewards[index]),
            int(self.staleness[index]),
            self.teachers[index],
            self.teacher_prompts[index],
            self.response_starts[index],
        )

    @property
    def n_trained(self) -> np.ndarray:
        return np.add.reduceat(self.trained, self.starts, dtype=np.int64)

    def ids_to_share(self, first_row: int = 0) -> np.ndarray:
        """Return ids by which rows with a common prefix are found. Their lower ID_BITS are the token ids.

        A trained token with a list of log-probabilities (`teacher_top`) has the row's number above these bits, so that
        no other row shares it: other weights may have sampled that row, and its lists would differ. Rows are numbered
        from `first_row`.
        """
        if TOP[0] not in self.fields:
            return self.tokens
        row_of_token = np.repeat(np.arange(len(self)) + first_row + 1, self.lengths)
        return self.tokens + np.where(self.trained, row_of_token << ID_BITS, 0)

    def split_by_row(self, values: np.ndarray) -> list[np.ndarray]:
        """Split an array with one value per token into one array per row."""
        ends = (self.starts + self.lengths).tolist()
        return [values[start:end] for start, end in zip(self.starts.tolist(), ends, strict=True)]

    def select(self, indices: Sequence[int]) -> FlatRows:
        """Return the rows with these indices. Their arrays are views if the rows are adjacent."""
        chosen = np.asarray(indices, dtype=np.int64)
        lengths = self.lengths[chosen]
        of_tokens: slice | np.ndarray = slice(0)
        if len(chosen) and (np.diff(chosen) == 1).all():
            start = int(self.starts[chosen[0]])
            of_tokens = slice(start, start + int(lengths.sum()))
        elif len(chosen):
            of_tokens = np.repeat(self.starts[chosen] - row_starts(lengths), lengths) + np.arange(lengths.sum())
        return FlatRows(
            lengths,
            self.tokens[of_tokens],
            self.trained[of_tokens],
            {name: values[of_tokens] for name, values in self.fields.items()},
            self.rewards[chosen],
            self.staleness[chosen],
            [self.teachers[index] for index in indices],
            [self.teacher_prompts[index] for index in indices],
            [self.response_starts[index] for index in indices],
        )


def row_starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def read_tokens(tokens: Any, name: str, vocab_size: int, context_len: int | None = None) -> np.ndarray:
    """Check the token ids of one row, and convert them to int64. Raises DataError, which calls the row `name`."""
    if isinstance(tokens, str):
        raise DataError(f"{name} is a string; token ids are expected: tokenizer.encode(text)")
    tokens = [] if tokens is None else tokens
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of different lengths inside
        raise DataError(f"{name} is nested; a flat list of token ids is expected") from None
    if ids.ndim == 0:
        raise DataError(f"{name} is the number {tokens!r}; a list of token ids is expected: [[...]]")
    if ids.ndim > 1:
        raise DataError(f"{name} has {ids.ndim} dimensions; a flat list of token ids is expected")
    if not ids.size:
        raise DataError(f"{name} is empty; at least one token is needed")
    if ids.dtype.kind not in "iu":
        wrong = next((token for token in tokens if not isinstance(token, (int, np.integer))), tokens[0])
        raise DataError(f"{name} holds {wrong!r}; token ids are ints")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise DataError(
            f"{name} holds {wrong}; the model has token ids 0 to {vocab_size - 1}; check that the tokenizer is "
            "the model's"
        )
    if context_len is not None and ids.size > context_len:
        raise DataError(f"{name} has {ids.size} tokens, more than the model's context of {context_len}; cut the row")
    return ids.astype(np.int64, copy=False)


def read_rows(
    rows: Sequence[TrainSequence], vocab_size: int, context_len: int | None = None, name: str = "row {}"
) -> FlatRows:
    """Check all rows, and convert them to arrays. `name` is what errors call a row, with {} for its index.

    Raises DataError, which names the row and the field, if a row is invalid.
    """
    if not rows:
        raise DataError("there are no rows to train on")
    given = [
        field for field in FIELDS if vars(rows[0])[field] is not None or (field == OLD and _have_old_logprobs(rows))
    ]
    if (flat := _read_arrays(rows, given, vocab_size, context_len)) is not None:
        return flat
    first = name.format(0)
    return FlatRows.concatenate(
        [_read_row(row, name.format(i), first, given, vocab_size, context_len) for i, row in enumerate(rows)]
    )


def _have_old_logprobs(rows: Sequence[TrainSequence]) -> bool:
    return any(row.old_logprobs is not None for row in rows)


_COLUMNS, _SHAPE = itemgetter("tokens", "prompt_mask", *FIELDS), attrgetter("shape")


def _read_arrays(
    rows: Sequence[TrainSequence], given: list[str], vocab_size: int, context_len: int | None
) -> FlatRows | None:
    """Check and convert all rows at once, which is possible only if their fields are arrays.

    Returns None if any check fails. The caller must then check each row by itself, to find the row and the field that
    are wrong.
    """
    # Each check is one pass over a column in C, because a batch may have thousands of short rows.
    names = ("tokens", "prompt_mask", *FIELDS)
    columns = dict(zip(names, zip(*map(_COLUMNS, map(vars, rows)), strict=True), strict=True))
    for name, arrays in columns.items():
        if name in FIELDS and name not in given:
            if {*map(type, arrays)} != {type(None)}:
                return None
            continue
        kinds = {"tokens": "iu", "prompt_mask": "b"}.get(name, "f")
        if {*map(type, arrays)} != {np.ndarray} or not all(kind in kinds for kind in {a.dtype.kind for a in arrays}):
            return None
    rewards, staleness = [row.reward for row in rows], [row.staleness for row in rows]
    if {*map(type, rewards)} != {float} or {*map(type, staleness)} != {int} or min(staleness) < 0:
        return None
    shapes = list(map(_SHAPE, columns["tokens"]))
    if {*map(len, shapes)} != {1}:
        return None
    if any(list(map(_SHAPE, columns[name])) != shapes for name in ("prompt_mask", *given)):
        return None
    lengths = np.fromiter(map(len, columns["tokens"]), np.int64, len(rows))
    if lengths.min() < 1 or (context_len is not None and lengths.max() > context_len):
        return None
    tokens, prompt_mask = (np.concatenate(columns[name]) for name in ("tokens", "prompt_mask"))
    fields = {FIELDS[name]: np.concatenate(columns[name], dtype=np.float32) for name in given}
    trained = ~prompt_mask
    trained[row_starts(lengths)] = False
    is_good = tokens.min() >= 0 and tokens.max() < vocab_size
    # Selecting the trained tokens is slow and rarely needed, so all tokens are checked first.
    finite = (np.isfinite(values).all() or np.isfinite(values[trained]).all() for values in fields.values())
    if not is_good or not all(finite):
        return None
    n, ids = len(lengths), tokens.astype(np.int64, copy=False)
    return FlatRows(
        lengths, ids, trained, fields, np.array(rewards), np.array(staleness), [""] * n, [None] * n, [0] * n
    )


def _read_row(
    row: TrainSequence, called: str, first: str, given: list[str], vocab_size: int, context_len: int | None
) -> Row:
    tokens = read_tokens(row.tokens, f"{called}: tokens", vocab_size, context_len)
    _check_row(row, called, first, given, len(tokens))
    trained = ~_read_mask(row.prompt_mask, f"{called}: prompt_mask")
    trained[0] = False
    out = Row(tokens, trained, reward=float(row.reward), staleness=int(row.staleness))
    for name in given:
        if name == OLD and row.old_logprobs is None:
            out.fields[OLD] = np.full(len(tokens), np.nan, dtype=np.float32)
            continue
        try:
            values = np.asarray(vars(row)[name], dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"{called}: {name} holds something that is no number: {error}") from error
        if values.ndim != 1:
            raise DataError(f"{called}: {name} has {values.ndim} dimensions; one number for each token is expected")
        bad = np.flatnonzero(trained & (np.isinf(values) if name == OLD else ~np.isfinite(values)))
        if bad.size:
            raise DataError(f"{called}: {name} is {values[bad[0]]} at token {bad[0]}; trained tokens need a number")
        out.fields[FIELDS[name]] = values
    return out


def _check_row(row: TrainSequence, called: str, first: str, given: list[str], n_tokens: int) -> None:
    if row.prompt_mask is None:
        raise DataError(f"{called}: prompt_mask is missing; give True for each token that is not trained")
    for name in ("prompt_mask", *FIELDS):
        values = vars(row)[name]
        if name in FIELDS and name != OLD and (values is not None) != (name in given):
            has, lacks = (first, called) if name in given else (called, first)
            raise DataError(f"{lacks}: {name} is missing, but {has} has it; set it on every row or on none")
        if values is None:
            continue
        if not hasattr(values, "__len__"):
            raise DataError(f"{called}: {name} is {values!r}; a list with an entry for each token is expected")
        if len(values) != n_tokens:
            raise DataError(
                f"{called}: {name} has {len(values)} entries, tokens has {n_tokens}; per-token lists cover "
                "prompt and response"
            )
    if not hasattr(row.reward, "__float__"):
        raise DataError(f"{called}: reward is {row.reward!r}; a number is expected")
    is_whole = isinstance(row.staleness, (int, np.integer)) and not isinstance(row.staleness, bool)
    if not is_whole or row.staleness < 0:
        raise DataError(f"{called}: staleness is {row.staleness!r}; a whole number of at least 0 is expected")


def _read_mask(prompt_mask: Any, name: str) -> np.ndarray:
    """Convert a mask of True and False, or 1 and 0, to bool. Raises DataError for other values, such as text."""
    try:
        mask = np.asarray(prompt_mask)
    except ValueError:  # lists of different lengths inside
        mask = np.zeros((0, 0))
    if mask.ndim != 1 or mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise DataError(f"{name} holds something else than True and False, one for each token")
    return mask.astype(bool)


FIELD = "routes"  # name in Row.fields


class RouteShape(NamedTuple):
    """The shape of a model's routes (the experts that its tokens are routed to)."""

    n_layers: int
    top_k: int
    n_experts: int

    @property
    def dtype(self) -> Any:
        return np.uint8 if self.n_experts < 2**8 else np.int16

    @property
    def unknown_expert(self) -> int:
        """Value that marks a token with unknown experts: the largest value of the dtype."""
        return int(np.iinfo(self.dtype).max)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's routes, in the KV cache and in a sample."""
        return self.n_layers * self.top_k * np.dtype(self.dtype).itemsize


def read_routes(routes: Any, n_tokens: int, shape: RouteShape | None, name: str) -> np.ndarray:
    """Check the routes of a row's first tokens, and pad them with `shape.unknown_expert` to all tokens of the row."""
    if shape is None:
        raise DataError(f"{name}: routes are given, but the model has no experts; leave them out")
    whole = np.full((n_tokens, shape.n_layers, shape.top_k), shape.unknown_expert, dtype=shape.dtype)
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
    given = routes[routes != shape.unknown_expert]
    if given.size and not 0 <= given.min() <= given.max() < shape.n_experts:
        wrong = int(given.min() if given.min() < 0 else given.max())
        raise DataError(f"{name}: routes hold {wrong}; the model's experts are 0 to {shape.n_experts - 1}")
    whole[: len(routes)] = routes
    return whole


def read_routes_to_score(
    routes: Sequence[Any] | None, token_rows: Sequence[Any], shape: RouteShape | None, role: str
) -> list[np.ndarray] | None:
    """Check the routes of rows to score, where some rows may have no routes. Returns None if no row has any."""
    if routes is None or all(each is None for each in routes):
        return None
    if role != "actor":
        raise EngineError(f"routes are the actor's, and role {role!r} has other experts; leave them out")
    if len(routes) != len(token_rows):
        raise EngineError(f"there are routes of {len(routes)} rows, and {len(token_rows)} rows of tokens")
    pairs = zip(routes, token_rows, strict=True)
    return [read_routes(each, len(row), shape, f"token_rows[{index}]") for index, (each, row) in enumerate(pairs)]


def without_padding(tokens: np.ndarray, pad: int | None) -> np.ndarray:
    """Return a row without the padding tokens at its end, but with at least its first token."""
    kept = np.flatnonzero(np.asarray(tokens) != pad)
    return tokens[: kept[-1] + 1 if kept.size else 1]


def read_prompt_masks(prompt_masks: Sequence[Any] | None, token_rows: Sequence[Any]) -> list[np.ndarray] | None:
    """Check the prompt masks of rows to score. A mask is True where no log-probability is needed."""
    if prompt_masks is None:
        return None
    if not isinstance(prompt_masks, list | tuple | np.ndarray):
        raise DataError(f"prompt_masks is {prompt_masks!r}; a list with a mask for each row is expected")
    if len(prompt_masks) != len(token_rows):
        raise EngineError(f"there are prompt_masks of {len(prompt_masks)} rows, and {len(token_rows)} rows of tokens")
    masks = [_read_mask(mask, f"prompt_masks[{index}]") for index, mask in enumerate(prompt_masks)]
    for index, (mask, row) in enumerate(zip(masks, token_rows, strict=True)):
        if hasattr(row, "__len__") and len(mask) != len(row):  # other rows are refused where rows are read
            raise DataError(f"prompt_masks[{index}] has {len(mask)} entries, token_rows[{index}] has {len(row)} tokens")
    return masks


def add_routes(rows: FlatRows, given: Sequence[TrainSequence], shape: RouteShape | None, name: str) -> None:
    """Add the field "routes" to checked rows, in place, if any of the caller's rows has routes."""
    if any(row.routes is not None for row in given):
        sources = enumerate(zip(rows.lengths.tolist(), given, strict=True))
        rows.fields[FIELD] = np.concatenate(
            [read_routes(source.routes, n_tokens, shape, name.format(index)) for index, (n_tokens, source) in sources]
        )
