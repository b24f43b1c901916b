"""What a script hands over, looked at before it goes to the workers: the errors name the place in the script's list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from areno.api.row_forms import messages_problem
from areno.engine.types import SamplingParams, TrainSequence
from areno.errors import ConfigError, DataError, Problem


def check_sampling(n_samples: Any, params: Any) -> None:
    """An error for arguments of another type than documented. Whether they fit the model is for the engine to say."""
    check_count("n_samples", n_samples)
    if not isinstance(params, SamplingParams):
        raise DataError(f"sampling_params is a {type(params).__name__}; an areno.SamplingParams is expected")
    for name in ("max_new_tokens", "min_new_tokens", "top_k", "max_context_len", "max_prompt_len"):
        value = getattr(params, name)
        may_lack = name.endswith("_len")
        if not (_is_int(value) or (may_lack and value is None)):
            raise DataError(f"SamplingParams.{name} is {value!r}; a whole number{' or None' * may_lack} is expected")
    for name in ("temperature", "top_p"):
        if not _is_number(getattr(params, name)):
            raise DataError(f"SamplingParams.{name} is {getattr(params, name)!r}; a number is expected")
    for name in ("greedy", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise DataError(f"SamplingParams.{name} is {getattr(params, name)!r}; True or False is expected")
    if params.stop is not None and not _is_list_of(params.stop, lambda text: isinstance(text, str) and text):
        raise DataError(f"SamplingParams.stop is {params.stop!r}; a list of strings, none of them empty, is expected")
    if params.stop_token_ids is not None and not _is_list_of(params.stop_token_ids, _is_int):
        raise DataError(f"SamplingParams.stop_token_ids is {params.stop_token_ids!r}; a list of ints is expected")


def check_count(name: str, value: Any, least: int | None = 1) -> None:
    """ConfigError unless the argument `name` is a whole number, of at least `least` where that is given."""
    if not _is_int(value) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError([Problem(name, f"is {value!r}; a whole number{bound} is expected")])


def check_positive(name: str, value: Any) -> None:
    """ConfigError unless the argument `name` is a finite number above 0."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError([Problem(name, f"is {value!r}; a number above 0 is expected")])


def check_prompts(prompts: Any) -> None:
    """DataError unless `prompts` is a non-empty list whose elements are texts or lists of chat messages."""
    if not isinstance(prompts, (list, tuple)):
        hint = "; for one prompt, write [prompt]" if isinstance(prompts, str) else ""
        raise DataError(f"prompts is a {type(prompts).__name__}; a list of strings is expected{hint}")
    if not prompts:
        raise DataError("prompts is empty; at least one is expected")
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt):
            raise DataError(f"prompts[{index}] {problem}")


def prompt_problem(prompt: Any) -> str | None:
    """What is wrong with one prompt, or None."""
    if isinstance(prompt, str):
        return None if prompt else "is an empty string"
    if isinstance(prompt, (list, tuple)) and prompt and _is_int(prompt[0]):
        return "is a list of token ids; give these to rollout_token_batch"
    if isinstance(prompt, (list, tuple)):
        return messages_problem(prompt)
    return f"is a {type(prompt).__name__}; a string is expected"


def check_token_rows(
    rows: Any, name: str, vocab_size: int, *, context_len: int | None = None, may_be_empty: bool = False
) -> None:
    """DataError unless `rows`, the argument `name`, is a list of non-empty lists of the model's token ids."""
    if not isinstance(rows, (list, tuple)):
        raise DataError(f"{name} is a {type(rows).__name__}; a list of lists of token ids is expected")
    if not rows and not may_be_empty:
        raise DataError(f"{name} is empty; at least one row is expected")
    for index, row in enumerate(rows):
        if isinstance(row, str):
            raise DataError(f"{name}[{index}] is a string; token ids are expected: tokenizer.encode(text)")
        if _is_int(row):
            raise DataError(f"{name}[{index}] is the number {row}; a list of token ids is expected: [[...]]")
        if problem := token_problem(row, vocab_size, context_len):
            raise DataError(f"{name}[{index}] {problem}")


def token_problem(tokens: Any, vocab_size: int, context_len: int | None = None) -> str | None:
    """What is wrong with the token ids of one row, or None."""
    try:
        ids = np.asarray(tokens)
    except ValueError:  # rows of different lengths inside
        return "is nested; a flat list of token ids is expected"
    if ids.ndim != 1:
        return f"has {ids.ndim} dimensions; a flat list of token ids is expected"
    if not ids.size:
        return "has no tokens; at least one is needed"
    if ids.dtype.kind not in "iu":
        wrong = next((token for token in tokens if not _is_int(token)), tokens[0])
        return f"holds {wrong!r}; token ids are ints"
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
        return f"holds {wrong}; the model has token ids 0 to {vocab_size - 1}; check that the tokenizer is the model's"
    if context_len is not None and ids.size > context_len:
        return f"has {ids.size} tokens, more than the model's context of {context_len}; cut the row"
    return None


def check_rows(rows: Any, vocab_size: int, context_len: int) -> None:
    """DataError unless `rows` is a non-empty list of TrainSequence whose tokens the model has, and no more than it can.

    Per-token lists of other lengths than the tokens are for the train backend to find.
    """
    per_token = ("prompt_mask", "logprobs", "advantages", "returns", "values", "ref_logprobs", "weights")
    if not isinstance(rows, (list, tuple)):
        raise DataError(f"batch_data is a {type(rows).__name__}; a list of areno.TrainSequence is expected")
    if not rows:
        raise DataError("batch_data is empty; there are no rows to train on")
    for index, row in enumerate(rows):
        if not isinstance(row, TrainSequence):
            raise DataError(f"batch_data[{index}] is a {type(row).__name__}; an areno.TrainSequence is expected")
        if row.tokens is None:
            raise DataError(f"batch_data[{index}] has no tokens; set TrainSequence.tokens")
        if problem := token_problem(row.tokens, vocab_size, context_len):
            raise DataError(f"batch_data[{index}]: tokens {problem}")
        for name in per_token:
            value = getattr(row, name)
            if value is not None and not hasattr(value, "__len__"):
                raise DataError(
                    f"batch_data[{index}]: {name} is {value!r}; a list with an entry for each token is expected"
                )
        if not hasattr(row.reward, "__float__"):
            raise DataError(f"batch_data[{index}]: reward is {row.reward!r}; a number is expected")
        if not _is_int(row.staleness) or row.staleness < 0:
            raise DataError(
                f"batch_data[{index}]: staleness is {row.staleness!r}; a whole number of at least 0 is expected"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_list_of(values: Any, fits: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(fits(value) for value in values)
