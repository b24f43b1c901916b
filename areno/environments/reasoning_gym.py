"""Generators of the package reasoning-gym, which make questions and score answers."""

from __future__ import annotations

import pickle
import random
import re
import unicodedata
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from areno.environments.package import SIZES, TEST, EnvironmentPackage, LazyRows, RewardFn
from areno.environments.rows_process import rows_process
from areno.errors import DataError
from areno.files.user_code import describe_error
from areno.reward_fns.answers import after_reasoning, tagged_answer

_PROMPT = "default"  # of the system prompts of the package
# A question belongs to the test split if its hash is 0 modulo this. The other questions are for training.
_PARTS = 4
# Further questions are tried for a row until one belongs to its split. They have other seeds.
_TRIES, _STRIDE = 64, 1_000_003


EVALUATED = {
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
}
"""Generators that run an answer as Python, by eval or by parse_expr of sympy."""
_FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt"}
_CALL, _OTHER_CALL = re.compile(r"([^\W\d]\w*)\s*\("), re.compile(r"[\])}'\"]\s*\(")


class ReasoningGym(EnvironmentPackage):
    """`reasoning_gym:NAME`, a generator of questions."""

    scheme = "reasoning_gym"
    distribution = extra = "reasoning-gym"
    versions = ">=0.1.25,<0.2"
    gives_reward = True

    def check(self) -> None:
        self.check_installed()
        if self.name == "composite":
            raise self.problem("mixes other generators; name one of them")
        from reasoning_gym.factory import DATASETS

        self.check_name(sorted(DATASETS.keys() - {"composite"}))

    def rows(self, split: str, options: Mapping[str, Any]) -> LazyRows:
        """Return rows with the field `entry`, from which the package scores an answer.

        The options are size, seed, system_prompt (a name of the package's, or a text, or null), and the settings of
        the generator. No question is in both splits.
        """
        self.check()
        self.check_split(split)
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        own = {"size": SIZES[split], "seed": 0, "system_prompt": _PROMPT} | dict(options)
        settings = (field.name for field in fields(DATASETS[self.name][1]))
        self.check_options(options, list(dict.fromkeys(["size", "seed", "system_prompt", *settings])))
        self.check_counts(own, size=1, seed=0)
        prompt = own.pop("system_prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise self.option_errors({"system_prompt": f"is {prompt!r}; a text, a name or null is expected"})
        try:
            _dataset(self.name, pickle.dumps(own))
        except (AssertionError, TypeError, ValueError) as error:  # the settings of a generator check themselves
            raise self.option_errors({"": f"is not accepted by {self.spec}: {describe_error(error)}"}) from error
        return _GeneratedRows(self.name, split, own, SYSTEM_PROMPTS.get(prompt, prompt))

    def reward(self) -> RewardFn:
        """Return a function that scores the text of the last <answer>, or the whole text without one."""
        self.check()

        def score(record: Any) -> float:
            row = record.record
            if row.get("generator") != self.name:
                raise DataError("its row is not of {}", self.spec)
            answered = after_reasoning(record.final_answer)
            answer, entry = tagged_answer(answered), row["entry"]
            dataset = _dataset(self.name, pickle.dumps(row["generator_settings"]))
            answer = answered.strip() if answer is None else answer
            if self.name in EVALUATED and could_run_code(answer):
                return 0.0
            try:
                return dataset.score_answer(answer, entry)
            except Exception:
                # Some generators cannot read a wrong answer. If they cannot score the right one either, they fail.
                if entry["answer"] is None or not dataset.score_answer(entry["answer"], entry):
                    raise
                return 0.0

        return score


def could_run_code(answer: str) -> bool:
    """Whether an answer that is evaluated as Python could call more than functions of mathematics."""
    text = unicodedata.normalize("NFKC", answer)  # as Python reads names
    if "__" in text or any(mark in text for mark in "\\#") or re.search(r"\.\s*[^\W\d]", text):
        return True
    return bool(_OTHER_CALL.search(text)) or any(name not in _FUNCTIONS for name in _CALL.findall(text))


@lru_cache(maxsize=_TRIES)
def _dataset(name: str, settings: bytes, tries: int = 0) -> Any:
    """Return the dataset of a generator, whose settings are pickled."""
    from reasoning_gym.factory import create_dataset

    given = pickle.loads(settings)
    return create_dataset(name, **{**given, "seed": given["seed"] + tries * _STRIDE})


class _GeneratedRows(LazyRows):
    def __init__(self, name: str, split: str, settings: Mapping[str, Any], system: str | None):
        self._name, self._split, self._settings, self._system = name, split, settings, system

    @property
    def fingerprint(self) -> str:
        return repr((self._name, self._split, self._settings, self._system, version("reasoning-gym")))

    def __len__(self) -> int:
        return self._settings["size"]

    def _made(self, *given: Any) -> dict[str, Any]:
        with suppress(DataError):  # a row can take too long to make
            return rows_process(ReasoningGym.scheme).call(_entry, *given, 0)
        return rows_process(ReasoningGym.scheme).call(_entry, *given, _TRIES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        given = self._name, pickle.dumps(self._settings), self._split, index % len(self)
        entry = self._made(*given)
        question = entry["question"]
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        return {
            "prompt": question if self._system is None else messages,
            "solutions": entry["answer"],
            "generator": self._name,
            "generator_settings": self._settings,
            "entry": entry,
        }


def _entry(name: str, settings: bytes, split: str, index: int, first: int) -> dict[str, Any]:
    """Return the entry of a row: the first whose question belongs to the split."""
    for tries in range(first, first + _TRIES):
        random.seed(f"{index} {tries}")  # which some generators use
        entry = _dataset(name, settings, tries)[index]
        is_test = zlib.crc32(entry["question"].encode()) % _PARTS == 0
        if is_test == (split == TEST):
            return entry
    raise DataError("it has too few different questions for the split {}", split)
