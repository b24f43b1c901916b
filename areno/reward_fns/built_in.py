"""The built-in rewards. Each is declared once, as a subclass of `Reward` in this file.

The class holds the name, the settings with their checks, and the code. The names that `reward.fn` accepts, the sections
of the configuration, the help texts and the checks are derived from it. The driver sends an instance to the reward
processes, so this module imports little. Code that imports more is in a separate file, which `load` imports.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from areno.errors import ConfigError, Problem
from areno.reward_fns.answers import after_reasoning, boxes, fenced_block, last_box, marked_answer, reference_answers
from areno.schema.fields import Section, check, require, setting

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reward(Section):
    """Base class of the built-in rewards.

    To add a reward, derive a class in this file. If the reward has settings, make the class a dataclass: its fields
    become the section `reward.<name>` of the configuration.

    Attributes:
        name: The name of the reward in `reward.fn`.
    """

    name: ClassVar[str]

    def find_problems(self, limit_s: float) -> Iterator[Problem]:
        """Report settings that cannot work in a run that uses this reward.

        Args:
            limit_s: The time limit for scoring one sample, in seconds.

        Yields:
            A problem for each wrong setting. Its key is the name of the setting within this section, or "" for the
            section.
        """
        yield from ()

    def prepare(self) -> Reward:
        """Check whether this machine has everything that the reward needs.

        The driver calls this before the reward processes start.

        Returns:
            The reward to send to the processes, such as a copy with absolute paths.

        Raises:
            ConfigError: A file, a package or a feature of the machine is missing.
        """
        return self

    def load(self) -> Callable[[Any], Any]:
        """Import the packages that scoring needs, and return the function that scores one RewardRecord.

        Each reward process calls this once.
        """
        return self.score

    def warm_up(self) -> None:
        """Make the first call of the function that `load` returned as fast as later calls.

        A reward process calls this after it has reported that it is ready.
        """

    def score(self, record: Any) -> float | dict[str, float]:
        """Score one RewardRecord.

        Args:
            record: The sample.

        Returns:
            The reward, or a dictionary whose entry "reward" is the reward. Its other entries are logged as parts of it.

        Raises:
            ValueError: The row of the dataset lacks a field that the reward needs. The sample then has no reward.
        """
        raise NotImplementedError


class MathReward(Reward):
    """Gives 1 if the final answer has the value of one of the row's `solutions`, else 0. See math_reward.py."""

    name = "math"

    def load(self) -> Callable[[Any], Any]:
        """Import math-verify and sympy, and return the function that scores one RewardRecord."""
        from areno.reward_fns.math_reward import reward_fn

        return reward_fn

    def warm_up(self) -> None:
        """Score a few answers, so that math-verify and sympy import all that they need."""
        from areno.reward_fns.math_reward import warm_up

        warm_up()


class ExactMatchReward(Reward):
    r"""Gives 1 if the completion's answer is the same text as one of the row's `solutions`, else 0.

    The answer is the content of the last <answer>...</answer>, else of the last \boxed{...}, else the text after the
    last ####, else the whole completion. Upper and lower case differ. White space at the ends is ignored. Other
    consecutive white space counts as one space.
    """

    name = "exact_match"

    def score(self, record: Any) -> float:
        """Score one RewardRecord.

        Args:
            record: The sample.

        Returns:
            1.0 if the answer equals a solution, else 0.0.

        Raises:
            ValueError: There is no solution, or a solution has several different boxes.
        """
        solutions = [str(solution) for solution in reference_answers(record)]
        several = [text for text in solutions if len(set(boxes(text))) > 1 and marked_answer(text) == last_box(text)]
        if several:
            raise ValueError(
                f"field solutions is {several[0][:200]!r}, which has several boxes; exact_match compares one answer: "
                "keep one box, give a list if each is right, or use the math reward, for which all of them are needed"
            )
        return float(
            _extract_answer(after_reasoning(record.completion)) in {_extract_answer(text) for text in solutions}
        )


def _extract_answer(text: str) -> str:
    """Return the answer that a text marks, or the whole text if no answer is marked.

    Consecutive white space becomes one space, and white space at the ends is removed.
    """
    marked = marked_answer(text)
    return " ".join((text if marked is None else marked).split())


_OPEN, _CLOSE = r"[(\[*_\s]*(?:\\(?:text|mathrm|mathbf)\s*\{\s*)?[(\[]?", r"[)\]}*_]*"
_CHOICE = rf"(?s:{_OPEN}([A-Za-z]){_CLOSE}\s*(?:\.|(?:[).:\]]|(?<=[)\]]))\s*\S.*)?\s*)"
_STATED = rf"\b[Aa]nswer\b(?:\s+(?:is|would\s+be|must\s+be))?\s*:?{_OPEN}([A-Z]){_CLOSE}(?![\w'])"
_ANOTHER = rf"\s*(?:,|/|\bor\b|\band\b)\s*{_OPEN}[A-Z]{_CLOSE}(?![\w'])"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ChoiceReward(Reward):
    r"""Gives 1 if the completion chooses the letter in the row's `solutions`, else 0.

    The choice is the letter in the last <answer>...</answer>, in \boxed{...} or after the last ####. Without these
    marks, it is the letter that the text last calls the answer, as in "the answer is (B)". Otherwise it is the letter
    in the last line, if the line is only a choice, such as "B) Paris". A completion that offers two letters, as in "the
    answer is A or B", chooses none.
    """

    name = "choice"

    def score(self, record: Any) -> float:
        """Score one RewardRecord. In `solutions`, 0 stands for A, 1 for B and so on.

        Args:
            record: The sample.

        Returns:
            1.0 if the chosen letter is among the solutions, else 0.0.

        Raises:
            ValueError: There is no solution, or a solution is neither a letter nor the number of a letter.
        """
        letters = {_solution_letter(solution) for solution in reference_answers(record)}
        return float(chosen_letter(after_reasoning(record.completion)) in letters)


def chosen_letter(text: str) -> str | None:
    """Return the letter that a completion chooses, in upper case, or None if it chooses none.

    Args:
        text: A completion.
    """
    marked = marked_answer(text)
    if marked is not None:
        return _letter_of_line(marked)
    stated = list(re.finditer(_STATED, text))
    if stated:
        return None if re.compile(_ANOTHER).match(text, stated[-1].end()) else stated[-1][1]
    lines = text.strip().splitlines()
    return _letter_of_line(lines[-1]) if lines else None


def _letter_of_line(line: str) -> str | None:
    """Return the letter of a line that is only a choice, such as "B) Paris", or None for any other line."""
    found = re.fullmatch(_CHOICE, line.strip())
    return found[1].upper() if found else None


def _solution_letter(solution: Any) -> str:
    """Return the letter of a solution. Raises ValueError if it is neither a letter nor a number from 0 to 25."""
    if isinstance(solution, int) and not isinstance(solution, bool) and 0 <= solution < len(_LETTERS):
        return _LETTERS[solution]
    found = _letter_of_line(solution) if isinstance(solution, str) else None
    if found is None:
        text = f"field solutions has {str(solution)[:80]!r}; a letter is needed, or the number of a choice from 0 on"
        raise ValueError(text)
    return found


# A reasoning that is closed once, and an answer after it. Many chat templates write the opening tag themselves.
_NO_TAG = r"(?!</?think>)"
THINK = rf"\s*(?:<think>)?(?:{_NO_TAG}.)*</think>\s*{_NO_TAG}\S(?:{_NO_TAG}.)*"


@dataclass(kw_only=True)
class FormatReward(Reward):
    """Gives 1 if the whole completion matches a regular expression, else 0.

    Attributes:
        pattern: The regular expression. A dot also matches newlines.
    """

    name = "format"
    pattern: str = setting(
        THINK,
        help="Regular expression that the whole completion must match; a dot matches newlines, too. Default: "
        "<think>...</think> and an answer; the opening tag may be missing",
    )

    @check
    def check_pattern(self) -> Iterator[Problem]:
        """Report a pattern that is not a valid regular expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield Problem("pattern", f"is {self.pattern!r}, which is no regular expression: {error}")

    def score(self, record: Any) -> float:
        """Return 1.0 if the record's whole completion matches `pattern`, else 0.0."""
        return float(re.fullmatch(self.pattern, record.completion, re.S) is not None)


@dataclass(kw_only=True)
class LengthReward(Reward):
    """Gives 1 if the completion's length is between two limits. Outside of them, the reward falls with the distance.

    Attributes:
        min_tokens: The lower limit. None means 0.
        max_tokens: The upper limit. None means no limit.
        margin_tokens: The distance from a limit at which the reward reaches 0, falling linearly. 0 gives the reward
            0 at once.
    """

    name = "length"
    min_tokens: int | None = setting(None, help="Shortest length in tokens with reward 1. null: no minimum", gt=0)
    max_tokens: int | None = setting(None, help="Longest length in tokens with reward 1. null: no maximum", gt=0)
    margin_tokens: int = setting(
        0,
        help="Tokens over which the reward falls linearly from 1 to 0 outside of min_tokens to max_tokens. 0: at once",
        ge=0,
    )

    @require("min_tokens", "is {self.min_tokens}, more than max_tokens={self.max_tokens}")
    def limits_are_ordered(self) -> bool:
        return self.min_tokens is None or self.max_tokens is None or self.min_tokens <= self.max_tokens

    def find_problems(self, limit_s: float) -> Iterator[Problem]:
        """Report a problem if neither limit is set.

        Args:
            limit_s: The time limit for scoring one sample, in seconds. It is not used here.

        Yields:
            At most one problem.
        """
        if self.min_tokens is None and self.max_tokens is None:
            text = "is in reward.fn, but has no limit; set reward.length.max_tokens or reward.length.min_tokens"
            yield Problem("", text)

    def score(self, record: Any) -> float:
        """Score one RewardRecord by the number of its completion's tokens.

        Args:
            record: The sample.

        Returns:
            A reward between 0.0 and 1.0.

        Raises:
            ValueError: The record has no tokens.
        """
        n_tokens = len(record.tokens)
        if not n_tokens:
            raise ValueError("the record has no tokens, so its length is not known")
        longest = n_tokens if self.max_tokens is None else self.max_tokens
        distance = max(0, (self.min_tokens or 0) - n_tokens, n_tokens - longest)
        return max(0.0, 1.0 - distance / self.margin_tokens) if self.margin_tokens else float(distance == 0)


@dataclass(kw_only=True)
class JsonReward(Reward):
    """Gives 1 if the answer is JSON that fits a schema, else 0.

    The answer is the last fenced block after </think>, preferably one marked as json. Without a block, it is all text
    after </think>. The schema is the row's field `schema` (an object, or its JSON text). If the row has no such field,
    it is in the file that the setting `reward.json.schema` names. Without a schema, any JSON fits. The result also has
    the part `parses`: 1 for any valid JSON, else 0.

    Attributes:
        schema: The file with the JSON schema for rows that have no field `schema`. None means no schema.
    """

    name = "json"
    schema: str | None = setting(
        None,
        help="File with the JSON schema for rows without a field schema (needs jsonschema). null: any valid JSON "
        "gets reward 1 there",
    )

    def prepare(self) -> Reward:
        """Check the schema file, and return a copy of this reward in which the path of the file is absolute.

        Returns:
            The copy, or this reward itself if no file is set.

        Raises:
            ConfigError: The file is missing, is not a JSON schema, or the package jsonschema is missing. The error
                names the setting reward.json.schema.
        """
        if self.schema is None:
            return self
        import json

        from areno.files.paths import find_file

        key = "reward.json.schema"
        path = find_file(self.schema, key)
        try:
            from jsonschema import SchemaError
            from jsonschema.validators import validator_for
        except ImportError as error:
            text = f"is {self.schema}, but the package jsonschema is not installed: pip install 'areno[json]'"
            raise ConfigError(Problem(key, text)) from error
        try:
            schema = json.loads(path.read_text(encoding="utf-8"))
            validator_for(schema).check_schema(schema)
        except (OSError, ValueError) as error:
            raise ConfigError(Problem(key, f"is {self.schema}, which is not JSON: {error}")) from error
        except SchemaError as error:
            raise ConfigError(Problem(key, f"is {self.schema}, which is no JSON schema: {error.message}")) from error
        return replace(self, schema=str(path))

    def load(self) -> Callable[[Any], Any]:
        """Read the schema file, if one is set, and return the function that scores one RewardRecord."""
        import json
        from pathlib import Path

        schema = None if self.schema is None else json.loads(Path(self.schema).read_text(encoding="utf-8"))
        return partial(fits_schema, schema=schema)


def fits_schema(record: Any, schema: Any = None) -> dict[str, float]:
    """Score one RewardRecord by whether its answer is JSON that fits a schema.

    Args:
        record: The sample.
        schema: The JSON schema for rows that have no field `schema`. None accepts any JSON.

    Returns:
        {"reward", "parses"}. "reward" is 1.0 if the answer is JSON that fits the schema, else 0.0. "parses" is 1.0 if
        the answer is valid JSON, else 0.0.

    Raises:
        Exception: Any exception that jsonschema raises for a schema that is not valid.
    """
    import json

    of_row = record.record.get("schema")
    schema = schema if of_row is None else json.loads(of_row) if isinstance(of_row, str) else of_row
    try:
        value = json.loads(fenced_block(record.completion, "json"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parses": 0.0}
    return {"reward": float(schema is None or _is_valid(value, schema)), "parses": 1.0}


def _refuse(name: str) -> Any:
    """Raise ValueError for the constant `name`, NaN or Infinity, which Python's JSON parser accepts."""
    raise ValueError(f"{name} is not JSON")


def _is_valid(value: Any, schema: Any) -> bool:
    """Return whether a value fits a JSON schema. Raises an exception of jsonschema if the schema is not valid."""
    from jsonschema.validators import validator_for

    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema).is_valid(value)


@dataclass(kw_only=True)
class CodeReward(Reward):
    """Gives 1 if the program in the completion passes the tests in its row, else 0. Linux only. See code_reward.py.

    Attributes:
        timeout_s: The time limit for all tests of a sample, in seconds.
        memory_mb: The memory limit of each process of the program, in MiB.
        partial: Whether the reward is the fraction of passed tests.
        read_paths: Further files and folders that the program may read.
    """

    name = "code"
    timeout_s: float = setting(10.0, help="Time limit in seconds for all tests of a sample together", gt=0, le=3600)
    memory_mb: int = setting(1024, help="Memory limit in MiB for each process of the tested program", ge=64)
    partial: bool = setting(False, help="Reward the share of tests that pass. false: 1 if all pass, else 0")
    read_paths: list[str] = setting(
        factory=list,
        help="Files and folders, such as those of a compiler, that the tested program may read and execute besides "
        "those of system and Python",
    )

    def find_problems(self, limit_s: float) -> Iterator[Problem]:
        """Report a problem unless `timeout_s`, the time limit for the tests, is below the limit for scoring a sample.

        Args:
            limit_s: The time limit for scoring one sample, in seconds.

        Yields:
            At most one problem.
        """
        if self.timeout_s >= limit_s:
            text = f"is {self.timeout_s}, which has to be less than reward.timeout_s={limit_s}, the limit for scoring "
            yield Problem("timeout_s", f"{text}a sample")

    def prepare(self) -> Reward:
        """Check that this machine can limit a program, and warn of what it cannot limit.

        Returns:
            A copy of this reward, in which the paths are absolute.

        Raises:
            ConfigError: The machine cannot limit a program, or a path is missing. The error names the setting.
        """
        from areno.files.paths import existing_path
        from areno.sandbox.box import try_box

        problem, means = try_box()
        problems = [Problem("reward.fn", f"names code, which {problem}")] if problem else []
        found = {path: existing_path(path) for path in self.read_paths}
        problems += [
            Problem("reward.code.read_paths", f"has {path}, which does not exist") for path in found if not found[path]
        ]
        if problems:
            raise ConfigError(problems)
        if "files" not in means:
            logger.warning(
                "reward.fn names code, and programs of the model can read and change all files of this user: the "
                "kernel has no Landlock (Linux 5.13)"
            )
        if "signals" not in means:
            logger.warning(
                "reward.fn names code, and programs of the model can end processes of this user, also this run: the "
                "kernel limits signals neither by Landlock (Linux 6.12) nor by PID namespaces"
            )
        return replace(self, read_paths=[str(path) for path in found.values()])

    def load(self) -> Callable[[Any], Any]:
        """Import what runs programs, and return the function that scores one RewardRecord."""
        from areno.reward_fns.code_reward import score_program

        return partial(score_program, **vars(self))


BUILT_IN_REWARDS: dict[str, type[Reward]] = {reward.name: reward for reward in Reward.__subclasses__()}
"""The classes of this file by name, in the order of their declaration."""
