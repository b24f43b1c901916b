"""The built-in rewards. A class below `Reward` is the only place where a reward is declared.

The class holds the name, the settings with their checks, and the code. The names that `reward.fn` accepts, the sections
of the configuration, the help texts and the checks follow from it. The driver sends an instance to the reward
processes, so this module imports little. Code that imports more is in a file of its own, which `load` imports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from areno.errors import ConfigError, Problem
from areno.reward_fns.answers import accepted, block, boxes, last_box, marked_answer
from areno.schema.fields import Section, check, forbid, setting


@dataclass(kw_only=True)
class Reward(Section):
    """A built-in reward.

    To add one, derive a class in this file. If it has settings, make it a dataclass: its fields are the section
    `reward.<name>`.

    Attributes:
        name: What `reward.fn` calls the reward.
    """

    name: ClassVar[str]

    def unusable(self, limit_s: float) -> Iterator[Problem]:
        """Report settings that do not work in a run that uses this reward.

        Args:
            limit_s: The time limit for scoring one sample, in seconds.

        Returns:
            Problems whose keys begin at this section.
        """
        yield from ()

    def prepare(self) -> Reward:
        """Check what the reward needs on this machine. The driver calls this before the reward processes start.

        Returns:
            The reward to send to the processes.

        Raises:
            ConfigError: A file, a package or a feature of the machine is missing.
        """
        return self

    def load(self) -> Callable[[Any], Any]:
        """Import what scoring needs, and return the function that scores. A reward process calls this once."""
        return self.score

    def warm_up(self) -> None:
        """Make the first call as fast as the later ones. A reward process calls this after it has reported ready."""

    def score(self, record: Any) -> float | dict[str, float]:
        """Score one RewardRecord.

        Returns:
            The reward, or a dictionary with "reward" and named parts.

        Raises:
            ValueError: The row lacks what the reward reads. The sample then has no reward.
        """
        raise NotImplementedError


class MathReward(Reward):
    """1 if the final answer has the value of one of the row's `solutions`, else 0. See math_reward.py."""

    name = "math"

    def load(self) -> Callable[[Any], Any]:
        """Import math-verify and sympy."""
        from areno.reward_fns.math_reward import reward_fn

        return reward_fn

    def warm_up(self) -> None:
        """Score some answers."""
        from areno.reward_fns.math_reward import warm_up

        warm_up()


class ExactMatchReward(Reward):
    r"""1 if the answer of the completion is one of the row's `solutions`, else 0.

    The answer is the last <answer>...</answer>, else the last \boxed{...}, else the text after the last ####, else the
    whole completion. Texts are compared letter by letter. Any white space counts as one space, and none counts at the
    ends.
    """

    name = "exact_match"

    def score(self, record: Any) -> float:
        """Score one RewardRecord. Raises ValueError without a solution, or if one has several different boxes."""
        solutions = [str(solution) for solution in accepted(record)]
        several = [text for text in solutions if len(set(boxes(text))) > 1 and marked_answer(text) == last_box(text)]
        if several:
            raise ValueError(
                f"field solutions is {several[0][:200]!r}, which has several boxes; exact_match compares one answer: "
                "keep one box, give a list if each is right, or use the math reward, for which all of them are needed"
            )
        return float(_answer(record.completion) in {_answer(text) for text in solutions})


def _answer(text: str) -> str:
    """Return the marked answer of a text, or the whole text, with single spaces."""
    marked = marked_answer(text)
    return " ".join((text if marked is None else marked).split())


_OPEN, _CLOSE = r"[(\[*_\s]*(?:\\(?:text|mathrm|mathbf)\s*\{\s*)?[(\[]?", r"[)\]}*_]*"
_CHOICE = rf"(?s:{_OPEN}([A-Za-z]){_CLOSE}\s*(?:\.|(?:[).:\]]|(?<=[)\]]))\s*\S.*)?\s*)"
_STATED = rf"\b[Aa]nswer\b(?:\s+(?:is|would\s+be|must\s+be))?\s*:?{_OPEN}([A-Z]){_CLOSE}(?![\w'])"
_ANOTHER = rf"\s*(?:,|/|\bor\b|\band\b)\s*{_OPEN}[A-Z]{_CLOSE}(?![\w'])"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ChoiceReward(Reward):
    r"""1 if the completion chooses the letter in the row's `solutions`, else 0.

    The choice is the letter in the last <answer>...</answer>, in \boxed{...} or after the last ####. Without these, it
    is the last letter that the text calls the answer, as in "the answer is (B)". Without that, it is the letter of the
    last line, if the line is nothing but a choice, such as "B) Paris". A completion that offers two letters, as in "the
    answer is A or B", has chosen none.
    """

    name = "choice"

    def score(self, record: Any) -> float:
        """Score one RewardRecord. A number in `solutions` counts from 0. Raises ValueError without a solution."""
        letters = {_letter(solution) for solution in accepted(record)}
        return float(chosen(record.completion) in letters)


def chosen(text: str) -> str | None:
    """Return the letter that a completion chooses; None if it chooses none."""
    marked = marked_answer(text)
    if marked is not None:
        return _letter_of_line(marked)
    stated = list(re.finditer(_STATED, text))
    if stated:
        return None if re.compile(_ANOTHER).match(text, stated[-1].end()) else stated[-1][1]
    lines = text.strip().splitlines()
    return _letter_of_line(lines[-1]) if lines else None


def _letter_of_line(line: str) -> str | None:
    """Return the letter of a line that is nothing but a choice; None for any other line."""
    found = re.fullmatch(_CHOICE, line.strip())
    return found[1].upper() if found else None


def _letter(solution: Any) -> str:
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
    """1 if the whole completion matches a regular expression, else 0."""

    name = "format"
    pattern: str = setting(
        THINK,
        help="Python regular expression that the whole completion must match. The dot also matches newlines. The "
        "default requires <think>...</think> and an answer after it; the opening tag may be missing",
    )

    @check
    def pattern_compiles(self) -> Iterator[Problem]:
        """Require a regular expression."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield Problem("pattern", f"is {self.pattern!r}, which is no regular expression: {error}")

    def score(self, record: Any) -> float:
        """Score one RewardRecord."""
        return float(re.fullmatch(self.pattern, record.completion, re.S) is not None)


@dataclass(kw_only=True)
class LengthReward(Reward):
    """1 between two lengths, and less the farther a completion is from them."""

    name = "length"
    min_tokens: int | None = setting(None, help="Shortest completion that gets reward 1, in tokens. null: 0", gt=0)
    max_tokens: int | None = setting(
        None, help="Longest completion that gets reward 1, in tokens. null: no limit", gt=0
    )
    margin_tokens: int = setting(
        0,
        help="Number of tokens outside of the limits over which the reward falls linearly from 1 to 0. 0: the "
        "reward is 0 directly outside of the limits",
        ge=0,
    )

    @forbid("min_tokens", "is {self.min_tokens}, more than max_tokens={self.max_tokens}")
    def limits_cross(self) -> bool:
        """Return whether no length lies between the limits."""
        return self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens

    def unusable(self, limit_s: float) -> Iterator[Problem]:
        """Require one of the limits."""
        if self.min_tokens is None and self.max_tokens is None:
            text = "is in reward.fn, but has no limit; set reward.length.max_tokens or reward.length.min_tokens"
            yield Problem("", text)

    def score(self, record: Any) -> float:
        """Score one RewardRecord. Raises ValueError for a record without tokens."""
        n_tokens = len(record.tokens)
        if not n_tokens:
            raise ValueError("the record has no tokens, so its length is not known")
        longest = n_tokens if self.max_tokens is None else self.max_tokens
        distance = max(0, (self.min_tokens or 0) - n_tokens, n_tokens - longest)
        return max(0.0, 1.0 - distance / self.margin_tokens) if self.margin_tokens else float(distance == 0)


@dataclass(kw_only=True)
class JsonReward(Reward):
    """1 if the answer is JSON that fits a schema, else 0. The part `parses` says whether the answer is JSON at all.

    The answer is the last fenced block after </think> or, without a block, all text there. The schema is the row's
    field `schema`, an object or its text, else the file of the setting. Without either, any JSON fits.
    """

    name = "json"
    schema: str | None = setting(
        None,
        help="File with the JSON schema for rows that have no field schema (needs the package jsonschema). null: "
        "any JSON gets reward 1",
    )

    def prepare(self) -> Reward:
        """Check the schema, and make its path absolute. Raises ConfigError, of reward.json.schema."""
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
        """Read the schema."""
        import json
        from pathlib import Path

        schema = None if self.schema is None else json.loads(Path(self.schema).read_text(encoding="utf-8"))
        return partial(fits_schema, schema=schema)


def fits_schema(record: Any, schema: Any = None) -> dict[str, float]:
    """Score one RewardRecord by the JSON in it.

    Args:
        record: The sample.
        schema: The JSON schema of rows that have none. None accepts any JSON.

    Raises:
        Exception: Whatever jsonschema raises for a wrong schema.
    """
    import json

    of_row = record.record.get("schema")
    schema = schema if of_row is None else json.loads(of_row) if isinstance(of_row, str) else of_row
    try:
        value = json.loads(block(record.completion, "json"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parses": 0.0}
    return {"reward": float(schema is None or _is_valid(value, schema)), "parses": 1.0}


def _refuse(name: str) -> Any:
    """Refuse NaN and Infinity, which Python's reader accepts."""
    raise ValueError(f"{name} is not JSON")


def _is_valid(value: Any, schema: Any) -> bool:
    """Return whether a value fits a JSON schema."""
    from jsonschema.validators import validator_for

    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema).is_valid(value)


@dataclass(kw_only=True)
class CodeReward(Reward):
    """1 if the program in the completion passes the tests of its row, else 0. Linux only. See code_reward.py."""

    name = "code"
    timeout_s: float = setting(10.0, help="Time limit in seconds for all tests of a sample together", gt=0, le=3600)
    memory_mb: int = setting(1024, help="Memory limit in MiB for each process of the tested program", ge=64)
    partial: bool = setting(
        False, help="true: the reward is the share of tests that pass. false: the reward is 1 if all tests pass, else 0"
    )

    def unusable(self, limit_s: float) -> Iterator[Problem]:
        """Require that the tests end before the limit of the sample."""
        if self.timeout_s >= limit_s:
            text = f"is {self.timeout_s}, which has to be less than reward.timeout_s={limit_s}, the limit for scoring "
            yield Problem("timeout_s", f"{text}a sample")

    def prepare(self) -> Reward:
        """Check that this machine can limit a program. Raises ConfigError, of reward.fn."""
        from areno.reward_fns.sandbox import problem

        if text := problem():
            raise ConfigError(Problem("reward.fn", f"names code, which {text}"))
        return self

    def load(self) -> Callable[[Any], Any]:
        """Import the sandbox."""
        from areno.reward_fns.code_reward import score_program

        return partial(score_program, timeout_s=self.timeout_s, memory_mb=self.memory_mb, partial=self.partial)


BUILT_IN_REWARDS: dict[str, type[Reward]] = {reward.name: reward for reward in Reward.__subclasses__()}
"""The classes of this file by name, in the order of their declaration."""
