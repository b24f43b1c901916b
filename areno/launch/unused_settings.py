"""Removal of settings that have no effect, so that files written for other tools can be used.

Such files set options of features that are off: when to write states that are not written, the estimator of a KL whose
weight is 0. A contradiction is still an error, unless the file itself says that the feature is off.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from areno.errors import Problem
from areno.launch.hints import NOT_HERE, all_setting_keys, setting_hint, settings_of_other_tool
from areno.launch.hydra import delete_key
from areno.launch.other_tools import EQUAL, HOLDS, PARTS, is_of_any_model
from areno.schema.build import earlier_names, with_defaults
from areno.schema.fields import Section, UnusedSetting, setting_rows
from areno.schema.values import value_at

logger = logging.getLogger("areno.launch")

_OFF = (None, False, 0, "", "off", "disabled", [], {})
_AS_DEFAULT: dict[str, tuple[object, ...]] = {
    "perf_tracer": (None,),
    "perf_tracer.session_tracer": (None,),
    "perf_tracer.save_interval": (0,),
    "scheduler.type": (None,),
    "tokenizer_path": ("",),
}
"""Setting -> values in other tools that mean our default."""


def remove_unused(
    cls: type[Section], data: dict[str, Any], *copies: dict[Any, Any], asked: Collection[str] = ()
) -> list[Problem]:
    """Remove the settings that have no effect from `data`, and log the features of other tools that areno lacks.

    The settings are also removed from `copies`, other forms of `data`. `asked` are sections that the command line
    chose, which are kept even if they are unknown. Returns a problem for each removed setting that areno has under
    another name, if its section is unknown.
    """
    known, whole = {row.key for row in setting_rows(cls)} | earlier_names(cls).keys(), with_defaults(cls, data)
    parts, problems = list[str](), list[Problem]()
    stays = {name for name in asked if not any(f"{key}.".startswith(f"{name}.") for key in known)}
    for key, value in [*_unknown_settings(data, known)]:
        if key.partition(".")[0] in stays:
            continue
        section = key.rpartition(".")[0]
        if key in PARTS:
            parts += [] if _is_off(value) else [key]
        elif _has_no_effect(key, value, whole):
            pass
        elif (
            section and section not in known and (key in NOT_HERE or not known.isdisjoint(settings_of_other_tool(key)))
        ):
            problems.append(Problem(key, f"unknown key{setting_hint(key, cls=cls)}"))
        else:
            continue
        _drop_key(key, data, *copies)
    for key, values in _AS_DEFAULT.items():
        section, _, name = key.rpartition(".")
        inside = value_at(data, section) if section else data
        if (
            isinstance(inside, Mapping)
            and name in inside
            and any(_equal_with_type(inside[name], value) for value in values)
        ):
            _drop_key(key, data, *copies)
    if parts:
        _warn_of_missing_parts(", ".join(parts))
    return problems


@cache
def _warn_of_missing_parts(names: str) -> None:
    logger.warning("left out, since areno has no such parts: %s", names)


def _unknown_settings(data: Mapping[str, Any], known: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each unknown setting. The settings in an unknown section come first."""
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in PARTS:
            yield from _unknown_settings(value, known, f"{key}.")
        if key not in known and not (isinstance(value, Mapping) and value and key not in PARTS):
            yield key, value


def _has_no_effect(key: str, value: Any, whole: Mapping[str, Any]) -> bool:
    """Return whether another tool's setting is off, or has the value that areno uses anyway."""
    section, _, name = key.partition(".")
    ours = EQUAL.get(key) or (
        f"actor.{name}" if section == "ref" or (section == "critic" and is_of_any_model(name)) else ""
    )
    if any(_equal_with_type(value, each) for each in HOLDS.get(key, ())) or (
        ours and _equal_with_type(value, value_at(whole, ours))
    ):
        return True
    engine = str(value_at(whole, "rollout.backend") or section)
    if section in ("sglang", "vllm") and not engine.startswith(section):
        return True  # the other engine decodes
    of_others = (key, section, f"{section}.{name.partition('.')[0]}")
    return _is_off(value) and (
        key in all_setting_keys() or bool(settings_of_other_tool(key)) or any(k in NOT_HERE for k in of_others)
    )


def _is_off(value: Any) -> bool:
    return any(_equal_with_type(value, off) for off in _OFF)


def _equal_with_type(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _drop_key(key: str, *forms: dict[str, Any]) -> None:
    """Remove a key from all `forms` of the data. A section that becomes empty is removed, too."""
    for data in forms:
        delete_key(data, key)
    section = key.rpartition(".")[0]
    if section and value_at(forms[0], section) == {}:
        _drop_key(section, *forms)


def is_ignorable(problem: UnusedSetting, data: Mapping[str, Any], files: Collection[Collection[str]]) -> bool:
    """Return whether to ignore the problem: the setting is off, or a file with the setting turns off its feature.

    `files` has the keys that each configuration file sets.
    """
    if _is_off(value_at(data, problem.key)):
        return True
    own = [keys for keys in files if problem.other_key in keys]
    inside = any(key == problem.key or key.startswith(f"{problem.key}.") for keys in own for key in keys)
    return inside and _is_off(value_at(data, problem.other_key))
