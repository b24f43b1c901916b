"""Generators of the package reasoning-gym, which make questions and score answers.

A process makes the rows when they are read. Some generators take a second for a row, and the questions of others depend
on the hash seed of the process, so this process has a fixed one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, BinaryIO

from areno.environments.package import TEST, TRAIN, EnvironmentPackage, LazyRows, RewardFn
from areno.errors import DataError, EngineError
from areno.files.user_code import describe_error
from areno.reward_fns.answers import after_reasoning, tagged_answer

_SIZES = {TRAIN: 1000, TEST: 100}
_PROMPT = "default"  # of the system prompts of the package
# A question belongs to the test split if its hash is 0 modulo this. The other questions are for training.
_PARTS = 4
# Further questions are tried for a row until one belongs to its split. They have other seeds.
_TRIES, _STRIDE = 64, 1_000_003
_SERVE = "from areno.environments.reasoning_gym import serve; serve()"


class ReasoningGym(EnvironmentPackage):
    """`reasoning_gym:NAME`, a generator of questions."""

    scheme = "reasoning_gym"
    distribution = extra = "reasoning-gym"
    versions = ">=0.1.25,<0.2"
    gives_reward = True

    def check(self) -> None:
        """Check that the generator exists."""
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

        own = {"size": _SIZES[split], "seed": 0, "system_prompt": _PROMPT} | dict(options)
        settings = (field.name for field in fields(DATASETS[self.name][1]))
        self.check_options(options, list(dict.fromkeys(["size", "seed", "system_prompt", *settings])))
        if wrong := {
            name: f"is {own[name]!r}; a whole number {text} is expected"
            for name, text in (("size", "above 0"), ("seed", "of at least 0"))
            if type(own[name]) is not int or own[name] < (name == "size")
        }:
            raise self.option_errors(wrong)
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
                raise DataError(f"its row is not of {self.spec}")
            answered = after_reasoning(record.final_answer)
            answer = tagged_answer(answered)
            dataset = _dataset(self.name, pickle.dumps(row["generator_settings"]))
            return dataset.score_answer(answered.strip() if answer is None else answer, row["entry"])

        return score


@lru_cache(maxsize=_TRIES)
def _dataset(name: str, settings: bytes, tries: int = 0) -> Any:
    """Return the dataset of a generator, whose settings are pickled."""
    from reasoning_gym import create_dataset

    given = pickle.loads(settings)
    return create_dataset(name, **{**given, "seed": given["seed"] + tries * _STRIDE})


class _GeneratedRows(LazyRows):
    def __init__(self, name: str, split: str, settings: Mapping[str, Any], system: str | None):
        self._name, self._split, self._settings, self._system = name, split, settings, system
        self._lock = threading.Lock()

    @property
    def fingerprint(self) -> str:
        """What decides the rows."""
        return repr((self._name, self._split, self._settings, self._system, version("reasoning-gym")))

    def __len__(self) -> int:
        return self._settings["size"]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        entry = self._read((self._name, pickle.dumps(self._settings), self._split, index % len(self)))
        question = entry["question"]
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": question}]
        return {
            "prompt": question if self._system is None else messages,
            "solutions": entry["answer"],
            "generator": self._name,
            "generator_settings": self._settings,
            "entry": entry,
        }

    def _read(self, request: tuple[Any, ...]) -> Any:
        with self._lock:
            process = self._process
            try:
                pickle.dump(request, _file(process.stdin))
                _file(process.stdin).flush()
                found, text = pickle.load(_file(process.stdout))
            except (OSError, EOFError) as error:
                raise EngineError("the process that makes the rows of reasoning_gym:{} ended", self._name) from error
        if text:
            raise DataError(text)
        return found

    @cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, _end, process)
        return process


def _file(pipe: Any) -> BinaryIO:
    return pipe


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may be in the middle of a row, and that has nothing to clean up."""
    process.kill()
    process.communicate()


def serve() -> None:
    """Answer requests (name, settings, split, index) from stdin with (entry, "") or (None, error)."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # generators print
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            request = pickle.load(requests)
            try:
                answer: tuple[Any, str] = _entry(*request), ""
            except Exception as error:  # generators are code of others
                answer = None, describe_error(error)
            pickle.dump(answer, answers)
            answers.flush()


def _entry(name: str, settings: bytes, split: str, index: int) -> dict[str, Any]:
    """Return the entry of a row: the first whose question belongs to the split."""
    for tries in range(_TRIES):
        entry = _dataset(name, settings, tries)[index]
        is_test = zlib.crc32(entry["question"].encode()) % _PARTS == 0
        if is_test == (split == TEST):
            return entry
    raise DataError(f"reasoning_gym:{name} has too few different questions for the split {split}")
