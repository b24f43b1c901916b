"""Find the reward functions of a run, which the setting reward.fn names or a script passes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areno.config.reward import RewardConfig
from areno.config.sources import source_key
from areno.engine.processes.child import dumps
from areno.environments.package import EnvironmentPackage
from areno.environments.packages import package_of
from areno.errors import ConfigError, Key, Problem, all_of, did_you_mean, keys_renamed
from areno.files.user_code import resolve_spec, split_spec
from areno.reward_fns.built_in import BUILT_IN_REWARDS, Reward
from areno.scoring.process import RewardFunction

KEY = "reward.fn"
DEFAULT_FUNCTION = "reward_fn"


Given = Callable[..., Any] | Sequence[Callable[..., Any]]


def reward_functions(
    config: RewardConfig, given: Given | None = None, sources: Mapping[str, str | list[str] | None] | None = None
) -> list[RewardFunction]:
    """Return the reward functions in the form in which they are sent to the reward processes.

    `given` are functions of a script. Without it, reward.fn names them. `sources` maps the name of a source to its own
    functions, which score its samples in place of the others, or None. Raises a ConfigError with all problems:
    functions that cannot be found or pickled, and files, packages or features that this machine lacks.
    """
    if not sources:
        return _run_functions(config, given)
    own = {name: [specs] if isinstance(specs, str) else specs for name, specs in sources.items() if specs}
    found = all_of(*(partial(_functions_of_source, config, name, specs) for name, specs in own.items()))
    if given is not None or config.fn is not None:
        others = {"", *(name for name in sources if name not in own)}
        found.append([replace(each, sources=others) for each in _run_functions(config, given)])
    return [each for functions in found for each in functions]


def _functions_of_source(config: RewardConfig, name: str, specs: list[str]) -> list[RewardFunction]:
    with keys_renamed({KEY: f"{source_key(name)}.reward"}.get):
        codes, parts = [_resolve_spec(config, spec) for spec in specs], part_names(specs) if len(specs) > 1 else [""]
    return [RewardFunction(*each, 1.0, {name}) for each in zip(codes, parts, strict=True)]


def _run_functions(config: RewardConfig, given: Given | None) -> list[RewardFunction]:
    if given is None:
        return _functions_from_settings(config)
    functions: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not functions:
        raise ConfigError("reward_fn is an empty list; expected a function of one record, or several")
    for function in functions:
        if not callable(function):
            raise ConfigError(f"reward_fn is {function!r}; expected a function of one record, or a list of them")
    names = _check_unique([function_name(function) for function in functions])
    codes = [_pickle_function(function, name) for function, name in zip(functions, names, strict=True)]
    return _weighted_functions(config, codes, names if isinstance(given, list | tuple) else [""])


def joined_names(config: RewardConfig, given: Given | None = None) -> str:
    """Return the names of the reward functions joined by " + ", for messages."""
    if given is None:
        return " + ".join(config.function_names)
    return " + ".join(map(function_name, given if isinstance(given, list | tuple) else [given]))


def function_name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _functions_from_settings(config: RewardConfig) -> list[RewardFunction]:
    if config.fn is None:
        raise ConfigError(Problem(KEY, "is null, and no function was given; set it, or pass reward_fn="))
    specs = config.function_names
    codes, problems = [], []
    for spec in specs:
        try:
            codes.append(_resolve_spec(config, spec))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _weighted_functions(config, codes, [""] if isinstance(config.fn, str) else part_names(specs))


def _resolve_spec(config: RewardConfig, spec: str) -> str | Reward | EnvironmentPackage:
    """Return what an entry of reward.fn names: a built-in reward, `absolute path:function` or an environment."""
    if spec in BUILT_IN_REWARDS:
        # A reward without settings has no section.
        return vars(config).get(spec, BUILT_IN_REWARDS[spec]()).prepare()
    if (environment := package_of(spec, KEY)) is not None:
        return environment
    if not split_spec(spec, DEFAULT_FUNCTION)[0].endswith(".py"):
        hint = did_you_mean(spec, BUILT_IN_REWARDS, otherwise=f"; built-in: {', '.join(BUILT_IN_REWARDS)}")
        raise ConfigError(Problem(KEY, f"is {spec!r}; expected file.py, file.py:function or a built-in{hint}"))
    return resolve_spec(spec, DEFAULT_FUNCTION, KEY)


def part_names(specs: Sequence[str]) -> list[str]:
    """Return a name for each function's part of the reward, for logging.

    The part for `a.py` is called a, and the part for `a.py:format` is called format. If two functions would get the
    same name, the name of the file comes first, as in a.format. Raises ConfigError if the same function is named twice.
    """
    pairs = [split_spec(spec, "") for spec in specs]
    short = [function or Path(file).stem for file, function in pairs]
    counts = Counter(short)
    names = [
        f"{Path(file).stem}.{function or DEFAULT_FUNCTION}" if counts[name] > 1 else name
        for name, (file, function) in zip(short, pairs, strict=True)
    ]
    return _check_unique(names)


def _check_unique(names: list[str]) -> list[str]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(Problem(KEY, f"has two functions called {twice[0]}; give each a name of its own"))
    return names


def _weighted_functions(
    config: RewardConfig, codes: Sequence[str | bytes | Reward | EnvironmentPackage], names: Sequence[str]
) -> list[RewardFunction]:
    weights = [1.0] * len(codes) if config.weights is None else config.weights
    if len(weights) != len(codes):
        text = f"has {len(weights)} numbers for {len(codes)} functions; give one for each"
        raise ConfigError(Problem("reward.weights", text))
    return [RewardFunction(*each) for each in zip(codes, names, weights, strict=True)]


def _pickle_function(function: Callable[..., Any], name: str) -> bytes:
    try:
        return dumps(function)
    except Exception as error:  # an object may raise anything when it is pickled
        text = (
            "reward_fn {} cannot be sent to the reward processes ({}: {}); make what it holds inside of it, "
            "or put it into a file and set {}"
        )
        raise ConfigError(text, name, type(error).__name__, error, Key(KEY)) from error
