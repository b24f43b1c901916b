"""Answers whose worth is known, and trials of others beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.checks.inputs.findings import Finding
from areno.config.rollout import GenerationConfig
from areno.types import PromptItem

Asked = tuple[PromptItem, str]
Values = list[float | None]

NOISE = "areno areno areno"


@dataclass(frozen=True)
class KnownAnswers:
    """The reference answers of prompts in each form, with their rewards, and the rewards of answers without worth."""

    where: str  # the source, as a line begins
    items: Sequence[PromptItem]
    references: Sequence[str]
    forms: Mapping[str, list[str]]
    rewards: Mapping[str, Values]  # of the forms
    best: str  # the form with the largest rewards
    templates: Sequence[str]  # those of the forms that have a place for the answer
    worthless: Sequence[float]  # for each prompt, the larger reward of an empty answer and of noise
    tokenizer: Any
    settings: GenerationConfig

    def is_right(self, form: str, number: int) -> bool:
        value = self.rewards[form][number]
        return value is not None and value > self.worthless[number]

    @property
    def floor(self) -> float:
        return statistics.fmean(self.worthless)


@dataclass(frozen=True)
class Trial:
    answers: list[Asked]
    judge: Callable[[Values], Iterator[Finding]]


def mean_of(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else float("nan")


def number_of(text: str) -> float | None:
    if set(text) - set("-.,0123456789"):
        return None
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
