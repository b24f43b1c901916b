"""Checks rows to train on, with what they bring for routing replay and for a teacher. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.engine.reports import EngineInfo
from areno.engine.train.checked_rows import TOP, FlatRows, Row, add_routes, read_rows, read_tokens
from areno.errors import DataError
from areno.types import TrainSequence


def read_training_rows(
    rows: Sequence[TrainSequence], info: EngineInfo, name: str, with_teacher: bool = False
) -> FlatRows:
    """Check and convert rows, with their routes and, if `with_teacher`, with the input of the teacher."""
    checked = read_rows(rows, info.vocab_size, info.context_len, name)
    add_routes(checked, rows, info.routes, name)
    if with_teacher:
        _add_teacher(checked, rows, info.vocab_size, info.context_len, name)
    return checked


def _add_teacher(rows: FlatRows, given: Sequence[TrainSequence], vocab_size: int, context_len: int, name: str) -> None:
    """Add to checked rows the teacher's own prompts, or the log-probabilities that rows list (`teacher_top`)."""
    if any(row.teacher_top is not None for row in given):
        rows.fields |= _read_teacher_tops(rows, given, vocab_size, name)
        return
    for index, source in enumerate(given):
        called = name.format(index)
        if source.teacher is not None and not isinstance(source.teacher, str):
            raise DataError(f"{called}: teacher is {source.teacher!r}; the name of a role is expected, or None")
        rows.teachers[index] = source.teacher or ""
        if source.teacher_prompt is not None:
            called = f"{called}: teacher_prompt"
            rows.teacher_prompts[index] = read_tokens(source.teacher_prompt, called, vocab_size)
            rows.response_starts[index] = source.for_teacher()[1]
            if (n_tokens := len(rows[index].for_teacher()[0])) > context_len:
                text = f"with its response has {n_tokens} tokens, more than the model's context of {context_len}"
                raise DataError(f"{called} {text}; shorten it")


def _read_teacher_tops(
    rows: FlatRows, given: Sequence[TrainSequence], vocab_size: int, name: str
) -> dict[str, np.ndarray]:
    found: list[dict[str, np.ndarray]] = []
    for index, (row, source) in enumerate(zip(rows, given, strict=True)):
        called = name.format(index)
        found.append(_read_teacher_top(source.teacher_top, row, vocab_size, called))
        n, n_first = (each[TOP[0]].shape[1] for each in (found[-1], found[0]))
        if n != n_first:
            raise DataError(f"{called}: teacher_top has {n} tokens for each position, the first row {n_first}")
    return {name: np.concatenate([each[name] for each in found]) for name in TOP}


def _read_teacher_top(top: Any, row: Row, vocab_size: int, called: str) -> dict[str, np.ndarray]:
    if not isinstance(top, tuple) or len(top) != 2:
        raise DataError(f"{called}: teacher_top is {type(top).__name__}; (token ids, log-probabilities) is expected")
    try:
        tokens, logprobs = np.asarray(top[0]), np.asarray(top[1], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{called}: teacher_top holds lists of different lengths, or no numbers") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or len(tokens) != row.n_tokens or not tokens.shape[1]:
        found = f"token ids of shape {tokens.shape} and type {tokens.dtype}"
        raise DataError(f"{called}: teacher_top has {found}; integers of shape ({row.n_tokens}, J) are expected")
    if logprobs.shape != tokens.shape:
        raise DataError(f"{called}: teacher_top has ids of shape {tokens.shape}, log-probabilities {logprobs.shape}")
    of_trained, values = tokens[row.trained], logprobs[row.trained]
    if of_trained.size and not -1 <= of_trained.min() <= of_trained.max() < vocab_size:
        raise DataError(f"{called}: teacher_top holds token ids outside of the vocabulary of {vocab_size} tokens")
    in_order, is_absent = np.sort(of_trained, axis=1), of_trained < 0
    if ((np.diff(in_order, axis=1) == 0) & (in_order[:, 1:] >= 0)).any():
        raise DataError(f"{called}: teacher_top names a token twice at one place")
    if not np.isfinite(values).all() or (np.exp(values.astype(np.float64)).sum(1, where=~is_absent) > 1.001).any():
        raise DataError(
            f"{called}: teacher_top holds no log-probabilities: they are not finite, or their sum exceeds 1"
        )
    mask = row.trained[:, None]
    return dict(zip(TOP, (np.where(mask, tokens, 0).astype(np.int64), np.where(mask, logprobs, 0.0)), strict=True))
