"""Checks of the arguments that a script passes to a Trainer, before they reach the workers.

An error names the argument. If the argument is a list, the error also names the index of the wrong element.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np

from areno.config.models import MicroBatchSpec
from areno.config.run import may_be_folder
from areno.config.teacher import Divergence
from areno.data.row_schema import json_value_problem, messages_problem
from areno.engine.requests import check_params
from areno.engine.train.checked_rows import read_tokens
from areno.errors import ConfigError, DataError, Problem
from areno.schema.values import text_problem
from areno.specs.update import OldLogprobs, UpdateSpec
from areno.types import SamplingParams, TrainSequence


def check_sampling(n_samples: Any, params: Any, vocab_size: int | None = None) -> None:
    """Check the sampling arguments of a rollout. The engine checks later whether the samples fit into memory."""
    check_count("n_samples", n_samples)
    if not isinstance(params, SamplingParams):
        raise DataError(f"sampling_params is a {type(params).__name__}; an areno.SamplingParams is expected")
    check_params(params)
    if vocab_size is not None and (most := max(params.stop_token_ids or [0])) >= vocab_size:
        problem = Problem("SamplingParams.stop_token_ids", f"holds {most}; the vocabulary has {vocab_size} tokens")
        raise ConfigError([problem])


def check_count(name: str, value: Any, least: int | None = 1) -> None:
    """Raise ConfigError unless an argument is a whole number of at least `least`. numpy integers pass, bools do not."""
    if not _is_int(value) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ConfigError([Problem(name, f"is {value!r}; a whole number{bound} is expected")])


def check_positive(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ConfigError([Problem(name, f"is {value!r}; a number above 0 is expected")])


def check_folder(name: str, path: Any) -> None:
    """Raise ConfigError unless an argument is a possible path of a folder. The folder need not exist."""
    text = str(path) if isinstance(path, (str, Path)) else ""
    if not may_be_folder(text) or text_problem(text):
        raise ConfigError([Problem(name, f"is {path!r}; the name of a folder is expected")])


def check_prompts(prompts: Any) -> None:
    hint = "; for one prompt, write [prompt]" if isinstance(prompts, str) else ""
    _check_list("prompts", prompts, f"a list of strings is expected{hint}", "at least one is expected")
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(prompt) or json_value_problem(prompt):
            raise DataError(f"prompts[{index}] {problem}")


def prompt_problem(prompt: Any) -> str | None:
    """Return what is wrong with a prompt, or None if it is a non-empty text or a list of chat messages."""
    if isinstance(prompt, str):
        return None if prompt else "is an empty string"
    if isinstance(prompt, (list, tuple)) and prompt and _is_int(prompt[0]):
        return "is a list of token ids; give these to rollout_token_batch"
    if isinstance(prompt, (list, tuple)):
        return messages_problem(prompt)
    return f"is a {type(prompt).__name__}; a string is expected"


def check_token_rows(rows: Any, name: str, vocab_size: int | None = None, *, may_be_empty: bool = False) -> None:
    """Raise DataError unless rows are lists of token ids. Without `vocab_size`, the engine checks the ids later."""
    if_empty = None if may_be_empty else "at least one row is expected"
    _check_list(name, rows, "a list of lists of token ids is expected", if_empty)
    if vocab_size is not None:
        for index, row in enumerate(rows):
            read_tokens(row, f"{name}[{index}]", vocab_size)


def check_rows(rows: Any) -> None:
    """Raise DataError unless rows are a non-empty list. The engine checks the fields of each row later."""
    _check_list("batch_data", rows, "a list of areno.TrainSequence is expected", "there are no rows to train on")
    for index, row in enumerate(rows):
        if not isinstance(row, TrainSequence):
            raise DataError(f"batch_data[{index}] is a {type(row).__name__}; an areno.TrainSequence is expected")


def check_update(update: UpdateSpec, loss_fn: Any) -> None:
    """Raise ConfigError if an argument of Trainer.train is wrong or contradicts another argument."""
    if not callable(loss_fn):
        raise ConfigError([Problem("loss_fn", f"is a {type(loss_fn).__name__}; a function is expected")])
    check_count("n_minibatches", update.n_minibatches)
    check_count("rows_per_unit", update.rows_per_unit)
    check_count("seed", update.seed, least=0)
    if (steps := update.gradient_accumulation_steps) is not None:
        check_count("gradient_accumulation_steps", steps)
        if update.n_minibatches > 1:
            both = f"is {update.n_minibatches}, and gradient_accumulation_steps is {steps}"
            raise ConfigError([Problem("n_minibatches", f"{both}; both cut the rows into steps, give one of them")])
    if update.old_logprobs not in (choices := get_args(OldLogprobs)):
        found = f"is {update.old_logprobs!r}; expected {', '.join(choices)}"
        raise ConfigError([Problem("old_logprobs", found)])
    if not isinstance(update.divergence, Divergence | None):
        found = f"is a {type(update.divergence).__name__}; an areno.config.teacher.Divergence is expected"
        raise ConfigError([Problem("divergence", found)])
    if update.differentiates_entropy and update.divergence is not None:
        text = "is true, but a pass with a divergence has no gradient of the entropy; leave one of them out"
        raise ConfigError([Problem("differentiates_entropy", text)])
    if not isinstance(update.mb_spec, MicroBatchSpec):
        found = f"is a {type(update.mb_spec).__name__}; a MicroBatchSpec is expected"
        raise ConfigError([Problem("mb_spec", found)])


def _check_list(name: str, value: Any, expected: str, if_empty: str | None) -> None:
    if not isinstance(value, (list, tuple)):
        raise DataError(f"{name} is a {type(value).__name__}; {expected}")
    if not value and if_empty is not None:
        raise DataError(f"{name} is empty; {if_empty}")


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
