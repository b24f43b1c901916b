"""Settings of datasets: the source of rows, the columns of their fields, and how many rows a step uses."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from areno.config.resuming import FROM_HERE, SAME_CONTENT
from areno.environments.packages import package_of
from areno.errors import Key, Problem
from areno.schema.fields import (
    Flag,
    MissingSetting,
    Needs,
    Section,
    check,
    setting,
    setting_as_in,
    settings,
    source_check,
)

ChangedTurns = Literal["split", "last_turn", "as_rendered", "error"]


@dataclass(kw_only=True)
class ColumnsConfig(Section):
    """The dataset column that holds each field of a row. If null, the column has the same name as the field."""

    prompt: str | None = setting(None, help="The prompt, a text or a list of messages")
    solutions: str | None = setting(None, help="The reference answer that the reward function compares with")
    response: str | None = setting(None, help="The answer to train on (SFT, KTO)")
    messages: str | None = setting(None, help="The conversation to train on (SFT)")
    chosen: str | None = setting(None, help="The better answer (DPO, reward models)")
    rejected: str | None = setting(None, help="The worse answer (DPO, reward models)")
    label: str | None = setting(None, help="Whether the answer is desirable (KTO)")
    completions: str | None = setting(None, help="The steps of a solution (process reward models)")
    labels: str | None = setting(None, help="The labels of the steps (process reward models)")
    margin: str | None = setting(None, help="The margin of a pair (reward models)")
    answers: str | None = setting(None, help="The list of answers (reward models)")
    ratings: str | None = setting(None, help="The ratings of the answers (reward models)")
    tools: str | None = setting(None, help="Tool definitions for the chat template")

    def renamed_columns(self) -> dict[str, str]:
        """Return field -> column for the columns that are set."""
        return {field: column for field, column in vars(self).items() if column is not None}


@dataclass(kw_only=True)
class DatasetConfig(Section):
    """The source of training rows, how to read it, and how many rows a step uses."""

    path: str | None = setting(
        None,
        help="Source of the rows: a json, jsonl, parquet, csv, tsv or arrow file, a save_to_disk folder, an "
        "environment as SCHEME:NAME (reasoning_gym:basic_arithmetic), or a hub dataset as repo[:config[:split]]. "
        "null: loader makes the rows itself",
        flag=Flag(
            "--dataset-path",
            help="A json, jsonl, parquet, csv, tsv or arrow file, a save_to_disk folder, or a hub dataset as "
            "repo[:config[:split]]",
        ),
        on_resume=SAME_CONTENT,
    )
    loader: str | None = setting(
        None,
        help="Your function that returns the rows, as file.py[:function] (default name: load_dataset), called with "
        "the arguments path and split, or split alone if it takes no path. null: areno reads path",
        flag=Flag(
            "--dataset-loader-fn",
            help="Your function that loads the rows, as file.py[:function], for rows in no form that areno knows",
        ),
        on_resume=SAME_CONTENT,
    )
    columns: ColumnsConfig = setting(
        factory=ColumnsConfig,
        help="Dataset columns of the fields of a row. null: areno finds the column by its name",
        only_with=Needs(
            "loader", None, so="its rows are taken as they are", do="set loader to null to read the file itself"
        ),
    )
    dataset_kwargs: dict[str, Any] | None = setting(
        None,
        help="Keyword arguments for loader, such as {revision: v2}. Without loader: options of the environment in "
        "path, or arguments of datasets.load_dataset for hub datasets and folders",
    )
    split: str = setting("train", help="Split of the dataset to read, if the dataset has several")
    batch_size: int = setting(
        32,
        help="Number of prompts (RL) or rows (SFT, DPO) per training step",
        gt=0,
        flag=Flag("--batch-size", heading="Rollout"),
    )
    shuffle: bool = setting(True, help="Shuffle the rows anew in every epoch. The order depends on seed")
    drop_last: bool = setting(True, help="Skip the last batch of an epoch if it has fewer rows than batch_size")
    max_length: int | None = setting(
        1024,
        help="Largest number of tokens of a prompt (RL) or row (SFT, DPO). Longer ones are skipped and counted. "
        "null: the context length of the model",
        gt=0,
        flag=Flag("--max-prompt-tokens", heading="Rollout"),
    )
    changed_turns: ChangedTurns = setting(
        "split",
        help="SFT: what becomes of a conversation whose assistant turns are rendered differently once more messages "
        "follow, for example without reasoning. split: a sequence for each turn, as the model would write it. "
        "last_turn: train only the last turn. as_rendered: train what the template renders. error: end the run",
    )

    @property
    def max_length_or_unlimited(self) -> int:
        """The value of max_length, or a very large number if it is null."""
        return self.max_length or sys.maxsize

    @property
    def has_source(self) -> bool:
        """Whether a source of rows is set: a path or a loader."""
        return self.path is not None or self.loader is not None

    @check
    def check_loader_is_function(self) -> Iterator[Problem]:
        """Report an environment in place of a function that loads rows."""
        if package_of(self.loader) is not None:
            yield Problem("loader", "is {}, which is no function; set it as {}", self.loader, Key("path"))

    @check
    def check_loader_arguments(self) -> Iterator[Problem]:
        """Report dataset_kwargs without a source of rows, or with the keys path, name or split.

        The settings path and split determine these keys.
        """
        if self.dataset_kwargs and not self.has_source:
            text = "is set, but {} and {} are null, so nothing is loaded"
            yield Problem("dataset_kwargs", text, Key("path"), Key("loader"))
        for name in self.dataset_kwargs or ():
            if name in ("path", "name", "split"):
                other = "split" if name == "split" else "path"
                yield Problem(f"dataset_kwargs.{name}", "cannot be given here; set {}", Key(other))


MISSING_ROWS = f"missing ({settings(DatasetConfig)['path'].help})"


@dataclass(kw_only=True)
class ValidSetConfig(DatasetConfig):
    """Rows for evaluation. By default all rows are read, in order."""

    path: str | None = setting_as_in(DatasetConfig, "path", on_resume=FROM_HERE)
    loader: str | None = setting_as_in(DatasetConfig, "loader", on_resume=FROM_HERE)
    split: str = setting("test", help="Split of the dataset to read, if the dataset has several")
    batch_size: int | None = setting(
        None,
        help="Prompts sampled at the same time (RL), or rows per forward pass (SFT, DPO). null: all prompts, within "
        "rollout.max_concurrent_rollouts (RL), or 32 rows",
        gt=0,
    )
    shuffle: bool = setting(False, help="Shuffle the rows anew in every evaluation. The order depends on seed")
    drop_last: bool = setting(
        False, help="Skip the last batch if it has fewer rows than batch_size, or 32 if that is null"
    )
    max_rows: int | None = setting(None, help="Use only the first rows. null: all rows", gt=0)

    @source_check
    def check_has_data(self) -> Iterator[Problem]:
        """Report that the section has neither a path nor a loader, so that there are no rows to read."""
        if not self.has_source:
            yield MissingSetting("path", f"{MISSING_ROWS}; for a run without evaluation, use valid_dataset=null")


def section_name_problems(names: Collection[Any]) -> Iterator[str]:
    """Yield the problems with names of evaluation sets or sources, which become parts of metric and file names.

    Args:
        names: Keys of the setting `sets` or `sources`, of any type.

    Yields:
        The text of each problem, to be put after the key of the setting in an error message.
    """
    if not names:
        yield "is empty; at least one is expected"
    for name in names:
        if not isinstance(name, str) or not name.isascii() or not name.replace("-", "_").isidentifier():
            yield f"has the name {name!r}; a letter and then letters, digits, '-' and '_' are expected"


@dataclass(kw_only=True)
class ValidDatasetConfig(ValidSetConfig):
    """Rows for evaluation: a single set, or several named sets."""

    sets: dict[str, ValidSetConfig] | None = setting(
        None,
        help="Several evaluation sets: name -> settings. A set takes each key that it leaves out from valid_dataset. "
        "null: one set, valid_dataset itself",
    )

    @source_check
    def check_has_data(self) -> Iterator[Problem]:
        """Report that a single set has neither a path nor a loader. Named sets check their own sources."""
        return super().check_has_data() if self.sets is None else iter(())

    @check
    def check_set_names(self) -> Iterator[Problem]:
        """Report names of sets that cannot be parts of metric and file names."""
        if self.sets is not None:
            yield from (Problem("sets", text) for text in section_name_problems(self.sets))

    def by_name(self) -> dict[str, ValidSetConfig]:
        """Return name -> settings of each evaluation set. A single set has the name ""."""
        return {"": self} if self.sets is None else self.sets
