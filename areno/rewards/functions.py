"""Which functions give the reward of a run: those of reward.fn or of a script, with their names and weights."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areno.config.rollout import BUILT_IN_REWARDS, RewardConfig
from areno.engine.processes.child import dumps
from areno.errors import ConfigError, Key, Problem, did_you_mean
from areno.files.paths import find_file
from areno.files.user_code import found_file, split_spec
from areno.rewards.process import RewardFunction
from areno.user_processes import sandbox

KEY = "reward.fn"
DEFAULT_FUNCTION = "reward_fn"
_FOLDER = "areno.rewards.built_in"


Given = Callable[..., Any] | Sequence[Callable[..., Any]]
"""What a script may give as reward_fn."""


def reward_functions(config: RewardConfig, given: Given | None = None) -> list[RewardFunction]:
    """The functions of a run. given: those of a script, in place of config.fn. Raises ConfigError, of reward.fn."""
    if given is None:
        return _of_settings(config)
    functions: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not functions:
        raise ConfigError("reward_fn is an empty list; expected a function of one record, or several")
    for function in functions:
        if not callable(function):
            raise ConfigError(f"reward_fn is {function!r}; expected a function of one record, or a list of them")
    names = _each_once([name_of(function) for function in functions])
    codes = [_pickled(function, name) for function, name in zip(functions, names, strict=True)]
    options: list[dict[str, Any]] = [{} for _ in functions]
    return _weighted(config, codes, names if isinstance(given, list | tuple) else [""], options)


def shown_names(config: RewardConfig, given: Given | None = None) -> str:
    """The functions of a run, for messages."""
    if given is None:
        return " + ".join(config.functions)
    return " + ".join(map(name_of, given if isinstance(given, list | tuple) else [given]))


def name_of(function: Any) -> str:
    """What a function of a script is called."""
    return getattr(function, "__name__", type(function).__name__)


def built_in_file(name: str) -> Path:
    """The file of a built-in function."""
    spec = importlib.util.find_spec(f"{_FOLDER}.{name}_reward")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _of_settings(config: RewardConfig) -> list[RewardFunction]:
    if config.fn is None:
        raise ConfigError(Problem(KEY, "is null, and no function was given; set it, or pass reward_fn="))
    specs = config.functions
    codes, problems = [], []
    for spec in specs:
        try:
            codes.append(_resolved(spec))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    names = [""] if isinstance(config.fn, str) else part_names(specs)
    return _weighted(config, codes, names, [_options(config, spec) for spec in specs])


def _options(config: RewardConfig, spec: str) -> dict[str, Any]:
    """The settings of a built-in function, as its keyword arguments. Raises ConfigError if it cannot work here."""
    if spec == "json":
        return {"schema": _schema(config.json.schema)}
    if spec == "code" and (problem := sandbox.problem()):
        raise ConfigError(Problem(KEY, f"names code, which {problem}"))
    sections = {"format": config.format, "length": config.length, "code": config.code}
    return asdict(sections[spec]) if spec in sections else {}


def _schema(file: str | None) -> Any:
    key = "reward.json.schema"
    if file is None:
        return None
    path = find_file(file, key)
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
    except ImportError as error:
        text = f"is {file}, but the package jsonschema is not installed: pip install 'areno[json]'"
        raise ConfigError(Problem(key, text)) from error
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        validator_for(schema).check_schema(schema)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(key, f"is {file}, which is not JSON: {error}")) from error
    except SchemaError as error:
        raise ConfigError(Problem(key, f"is {file}, which is no JSON schema: {error.message}")) from error
    return schema


def _resolved(spec: str) -> str:
    """One entry of reward.fn as `absolute file:function`. Raises ConfigError if there is no such file or built-in."""
    if spec in BUILT_IN_REWARDS:
        return f"{built_in_file(spec)}:{DEFAULT_FUNCTION}"
    if not split_spec(spec, DEFAULT_FUNCTION)[0].endswith(".py"):
        hint = did_you_mean(spec, BUILT_IN_REWARDS, otherwise=f"; built-in: {', '.join(BUILT_IN_REWARDS)}")
        raise ConfigError(Problem(KEY, f"is {spec!r}; expected file.py, file.py:function or a built-in{hint}"))
    return found_file(spec, DEFAULT_FUNCTION, KEY)


def part_names(specs: Sequence[str]) -> list[str]:
    """The names of the parts: of `a.py` a, of `a.py:format` format or, if that is taken, a.format.

    Raises ConfigError, of reward.fn, if a function is there twice.
    """
    pairs = [split_spec(spec, "") for spec in specs]
    short = [function or Path(file).stem for file, function in pairs]
    counts = Counter(short)
    names = [
        f"{Path(file).stem}.{function or DEFAULT_FUNCTION}" if counts[name] > 1 else name
        for name, (file, function) in zip(short, pairs, strict=True)
    ]
    return _each_once(names)


def _each_once(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(Problem(KEY, f"has two functions called {twice[0]}; give each a name of its own"))
    return names


def _weighted(
    config: RewardConfig, codes: Sequence[str | bytes], names: Sequence[str], options: Sequence[dict[str, Any]]
) -> list[RewardFunction]:
    weights = [1.0] * len(codes) if config.weights is None else config.weights
    if len(weights) != len(codes):
        text = f"has {len(weights)} numbers for {len(codes)} functions; give one for each"
        raise ConfigError(Problem("reward.weights", text))
    return [RewardFunction(*each) for each in zip(codes, names, weights, options, strict=True)]


def _pickled(function: Callable[..., Any], name: str) -> bytes:
    try:
        return dumps(function)
    except Exception as error:  # an object may raise anything when it is pickled
        raise ConfigError(
            "reward_fn {} cannot be sent to the reward processes ({}: {}); make what it holds inside of it, "
            "or put it into a file and set {}",
            name, type(error).__name__, error, Key(KEY),
        ) from error  # fmt: skip
