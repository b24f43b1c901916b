"""The flags of `areno train`, derived from the fields of the configuration, and their translation into settings."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.config.models import OptimizerConfig
from areno.errors import Problem, did_you_mean
from areno.launch.hints import join_by_and, settings_of_other_tool
from areno.schema.fields import Flag, Section, SettingRow, setting_rows

logger = logging.getLogger("areno.cli")

TASK = "train"
"""The default task file, conf/train.yaml, whose settings the flags change."""

HEADINGS = {
    "Basic": "the algorithm, the model, the data and the devices",
    "Rollout": "completions: how many, how long, how they are sampled and scored",
    "Tuning": "settings of memory and speed, chosen by a trial before the run",
    "Train": "training: micro-batches, optimizer, loss, reference model and critic",
    "Checkpoint": "when and where checkpoints are saved",
    "Observability": "where metrics are written",
}
_TYPES = {int: "INTEGER", float: "FLOAT", str: "TEXT"}
_KL_TYPES = {"low_var_kl": "k3"}
_UNQUOTED = set("_/+.%*@?|:-")  # Hydra reads these, letters and digits as text without quotes


_USE_KL = Flag("--use-kl-loss", help="Add a KL term to the loss, which keeps the policy close to the reference model")


@dataclass(kw_only=True)
class TrainFlag:
    declared: Flag
    value: str | None  # value that a switch sets; None for a flag with an argument
    negative: bool  # there is also a --no- form
    keys: dict[str, list[SettingRow]] = field(default_factory=dict)  # recipe -> settings that it sets

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def row(self) -> SettingRow:
        return next(iter(self.keys.values()))[0]

    @property
    def description(self) -> str:
        """The description of the flag, without its default."""
        text = self.row.setting.help
        return self.declared.help or (text.replace(" null: ", " Default: ") if self.default == "null" else text)

    @property
    def help(self) -> str:
        if "Default: " in self.description or self.default in ("null", "required"):
            return self.description + (" (required)" if self.default == "required" else "")
        return f"{self.description} (default {self.default})"

    @property
    def type_text(self) -> str:
        """The type as shown in the help text: TEXT, INTEGER, FLOAT or the choices. "" for a switch."""
        if self.value is not None:
            return ""
        hint = self.row.setting.hint
        arms = [arm for arm in get_args(hint) or (hint,) if arm is not type(None)]
        if get_origin(hint) is Literal:
            more = _KL_TYPES if self.name == "--kl-loss-type" else ()
            return f"[{'|'.join([*map(str, get_args(hint)), *more])}]"
        return _TYPES[arms[0]]

    @property
    def default(self) -> str:
        """The default as text (on or off for a switch). If recipes differ, the default of each recipe."""
        found = {recipe: self._default_in(recipe) for recipe in self.keys}
        if len(set(found.values())) == 1:
            return next(iter(found.values()))
        return ", ".join(f"{default} ({recipe})" for recipe, default in found.items())

    def _default_in(self, recipe: str) -> str:
        row = self.keys[recipe][0]
        if self.name == "--min-lr":
            return "a tenth of --lr"
        if self.name == "--use-kl-loss":
            return "off" if row.default == "0.0" else "on"
        if self.value is None:
            return row.default.strip("'")
        return "on" if row.default == self.value else "off"


def all_train_flags() -> dict[str, TrainFlag]:
    """Return {name: flag} for the flags of all recipes of areno. A name begins with dashes."""
    found: dict[str, TrainFlag] = {}
    for recipe in built_in_algorithms():
        for row in setting_rows(get_algorithm(recipe).config):
            for flag in _flags_of(row):
                found.setdefault(flag.name, flag).keys.setdefault(recipe, []).append(row)
    return found


def unknown_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[Problem]:
    """Return a problem for each word that a parser does not know, with the flags that may be meant."""
    known = [option for action in vars(parser)["_actions"] for option in action.option_strings]
    names = {
        row.key: flag.name
        for flag in all_train_flags().values()
        for of_recipe in flag.keys.values()
        for row in of_recipe
    }
    found = []
    for word in [word.partition("=")[0] for word in words if word.startswith("-")] or words:
        settings = settings_of_other_tool(word.lstrip("-").replace("-", "_"))
        meant = [names[key] for key in settings if names.get(key) in known]
        hint = f"; here it is {' or '.join(meant)}" if meant else did_you_mean(word, known)
        found.append(Problem(word, f"there is no such flag{hint}"))
    return found


def _flags_of(row: SettingRow) -> Iterator[TrainFlag]:
    if row.flag.name == "--kl-loss-coef":
        yield TrainFlag(declared=_USE_KL, value="", negative=True)
    if row.flag.name:
        switched = "true" if row.setting.hint is bool else None
        yield TrainFlag(declared=row.flag, value=row.flag.value or switched, negative=row.default == "true")


def overrides_of_flags(
    algorithm: str, given: Mapping[str, Any], own_task: bool, cls: type[Section]
) -> tuple[list[str], list[Problem]]:
    """Translate the flags of a command line into settings. Flags of other algorithms are ignored with a warning.

    `given` has the value of each flag as text, or a bool for a switch. `own_task` means that the user named a task file
    or a run to resume. Settings without a flag may then differ from their defaults.
    """
    of_algorithm: dict[str, list[SettingRow]] = {}
    for row in setting_rows(cls):
        for flag in _flags_of(row):
            of_algorithm.setdefault(flag.name, []).append(row)
    known = all_train_flags()
    problems: list[Problem] = []
    found: list[str] = []
    for name, value in given.items():
        if name not in of_algorithm:
            text = "%s is a flag of %s, so %s ignores it"
            logger.warning(text, name, join_by_and(list(known[name].keys)), algorithm)
        elif name == "--use-kl-loss":
            found += _kl_overrides(value, given, of_algorithm[name][0], cls)
        elif name == "--min-lr":
            ratio, wrong = _min_lr_ratio_overrides(value, given.get("--lr"), own_task)
            found += ratio
            problems += wrong
        else:
            found += _settings_of_flag(known[name], of_algorithm[name], value, own_task)
    if "--ref-ckpt" in given and _is_null(cls, "ref"):
        found.insert(0, "ref=default")
    return list(dict.fromkeys(found)), problems


def merge_with_settings(
    found: list[str], settings: Sequence[str], names: Mapping[str, str]
) -> tuple[list[str], list[Problem]]:
    """Combine `found`, the settings of flags, with those given by key. Two different values are a problem."""
    by_key = {key: value for key, _, value in (line.partition("=") for line in found)}
    problems = []
    for line in settings:
        key, _, value = line.lstrip("+~").partition("=")
        if key in by_key and (line.startswith("~") or by_key[key] != value):
            text = f"stands for {key}={by_key[key]}, and {line} is given too; leave one of the two out"
            problems.append(Problem(names.get(key, key), text))
    return list(dict.fromkeys([*found, *settings])), problems


def _settings_of_flag(flag: TrainFlag, settings: Iterable[SettingRow], value: Any, own_task: bool) -> Iterator[str]:
    if flag.name == "--kl-loss-type":
        value = _KL_TYPES.get(value, value)
    for row in settings:
        text = value if isinstance(value, str) else flag.value or "" if value else "false"
        yield f"{row.key}={_quoted(text, str in (get_args(row.setting.hint) or (row.setting.hint,)))}"
        if flag.name == "--mini-bs" and own_task:  # a token budget of the task would override it
            yield f"{row.key.removesuffix('mini_bs')}max_tokens_per_mb=null"


def _kl_overrides(use: bool, given: Mapping[str, Any], kl_ctl: SettingRow, cls: type[Section]) -> Iterator[str]:
    if not use:
        yield from (f"{kl_ctl.key}=0", *([] if _is_null(cls, "ref") else ["ref=null"]))
    elif kl_ctl.default == "0.0":
        yield "ref=default"
        if "--kl-loss-coef" not in given:
            yield f"{kl_ctl.key}=0.001"


def _min_lr_ratio_overrides(value: str, lr: str | None, own_task: bool) -> tuple[list[str], list[Problem]]:
    """Translate --min-lr to actor.optimizer.min_lr_ratio, a fraction of --lr, and return (settings, problems).

    If --lr is wrong, both are empty: the check of the settings reports --lr.
    """
    if lr is None and own_task:
        return [], [Problem("--min-lr", "is a share of --lr; give that too")]
    least, peak = _number(value), OptimizerConfig().lr if lr is None else _number(lr)
    if peak is None or peak < 0:  # the check of the settings reports --lr
        return [], []
    if least is None or not 0 <= least <= peak:
        of_lr = f"{lr}" if lr is not None else f"{peak:g} by default"
        text = f"is {value}; expected a number from 0 to --lr ({of_lr})"
        return [], [Problem("--min-lr", text)]
    return [f"actor.optimizer.min_lr_ratio={least / peak:.12g}"] if peak else [], []


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return value if math.isfinite(value := float(text)) else None
    return None


def _is_null(cls: type[Section], section: str) -> bool:
    return any(row.key == section and row.default == "null" for row in setting_rows(cls))


def _quoted(text: str, is_text: bool) -> str:
    """Quote a value for Hydra's command line, if needed. With `is_text`, words such as "null" are quoted."""
    plain = text and all(letter.isalnum() or letter in _UNQUOTED for letter in text)
    if plain and not (is_text and text.lower() in ("true", "false", "null", "nan", "inf")):
        return text
    parts = text.split('"')
    # Hydra reads a backslash as such only before a quote, so backslashes before quotes are doubled.
    escaped = (part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts)
    return '"' + '\\"'.join(escaped) + '"'
