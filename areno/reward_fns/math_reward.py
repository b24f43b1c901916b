r"""The built-in reward `math`: 1.0 if the completion's final answer equals one of the row's `solutions`, else 0.0.

The answer is in the text after the last </think>. It is the content of the last \boxed{...}. Without a box, it is the
text after the last `####`. Without either mark, it is what math-verify finds in the text, usually the last number or
formula. math-verify decides whether two answers are equal. It compares values, not texts: 0.5 equals 1/2. These are
the exceptions:

- If a completion has several boxes, the last one counts. math-verify would join boxes that are close to each other.
- If a solution has several different boxes, the completion needs all of these answers, in any order: either in its
  last boxes, as many as the solution has, or together in its final answer. 1,2 is a number, and (1,2) is a pair.
- An answer with the same text as the solution is right. So 12:00 equals 12:00, although math-verify reads 12 / 0.
- A solution in words is compared as text. math-verify takes "forty two" for a product of nine letters.
- A solution is read as a whole. math-verify reads 2\sqrt{3} without dollar signs as 2.
- A percentage in a box is read as a percentage. If the solution is a number, 1.5e3 is read as 1500.
- Without a box or ####, only the last 10,000 characters are read. An answer of more than 1,000 characters is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, partial
from itertools import product
from numbers import Number
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException
from sympy import FiniteSet, nan, zoo

from areno.reward_fns.answers import after_reasoning, boxes, last_box

# math-verify warns that its own time limit, a signal for each parsing step, is off. `_with_time_limit` limits the call.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

_LIMIT_S = 0.75  # an operation on a huge number may end somewhat later
_TICK_S = 0.05
_MAX_ANSWER = 1_000  # characters
_MAX_TEXT = 10_000

_PERCENT = r"(?:\\?%|(?:\\text\s*\{\s*)?(?:percent(?:age)?|pct)\b(?:\s*\})?)"
_CURRENCY = r"(?:\\?[$€£¥₹])?"
_DIGITS = r"-?(?:\d{1,3}(?:[, ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_IS_NUMBER = re.compile(rf"{_CURRENCY}{_DIGITS}\s*{_PERCENT}?(?:\s+[^\W\d_]{{3,}})*\.?", re.I)
_IS_PERCENTAGE = re.compile(rf"(.*?\S)\s*{_PERCENT}", re.I | re.S)
_SCIENTIFIC = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?|\.\d+)e[-+]?\d{1,3}(?!\w)", re.I)
_IN_MATH_MODE = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\\(.+\\\)|\\\[.+\\\]", re.S)

_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]*)")
# OpenAI's pattern for GSM8K, `#### (\-?[0-9\.\,]+)`, which also lets a currency, bold type and a percent sign pass.
_HASHED_NUMBER = re.compile(rf"{_CURRENCY}(-?[0-9.,]*[0-9])(\s*{_PERCENT})?[.,]?(?=$|[\s*_)!?;])", re.I)
_GOES_ON = re.compile(r"\s*[-+*/^=<>:\d\\\u00d7\u00f7\u00b7]")  # after a number: the number is a part of a formula

_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"(?<!\\)\\[(),;!\[\] ]|\\?\$|\*\*|\s+")
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"(?<!\w)[^\W\d_]{3,}")
_SENTENCE = re.compile(r"(?:[^\W\d_]{2,}\s+){2}[^\W\d_]{2,}")
_OPERATOR = re.compile(r"[+*/^=<>_|{}]")
_STATED = re.compile(r"\banswer(?:[\s*:]|is\b)+", re.I)
_LONG_NUMBER = re.compile(rf"[\d.,]{{{_MAX_ANSWER + 1},}}")
_FUNCTION = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|lim|max|min|gcd|lcm|det|mod|inf(?:inity)?|and"
)
_BETWEEN_ANSWERS = re.compile(r"\s*(?:[,;]\s*)?(?:[,;]|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\})\s*")
# 1,2 is 1.2 in many languages, 12,345 is a number in English, and (1,2) is a point or an interval.
_ONE_VALUE = re.compile(rf"{_CURRENCY}-?\d+(?:(?:,|\{{,\}})\d+)+\s*{_PERCENT}?|[(\[][^()\[\]]*[)\]]", re.I)
_FOREIGN = re.compile(r"(?![0-9])\d|\u2212")  # the digits of other scripts, and the minus sign


def reward_fn(record: Any) -> float:
    """Score one RewardRecord.

    Args:
        record: The sample.

    Returns:
        1.0 if the final answer is right, else 0.0.

    Raises:
        ValueError: The row has no usable solution.
        TimeoutError: math-verify took too long. Only the main thread, in which reward processes score, has a limit.
        Exception: Any exception that math-verify raises.
    """
    accepted = record.solutions if isinstance(record.solutions, list | tuple) else [record.solutions]
    solutions = [_solution_parts(solution) for solution in accepted if solution is not None]
    if not solutions or not all(solutions):
        raise ValueError(
            f"field solutions is {str(record.solutions)[:200]!r}; the math reward needs a number or formula, or words, "
            f"of at most {_MAX_ANSWER} characters"
        )
    return float(
        _with_time_limit(
            lambda: _any_pair_equal(
                _gives_all_answers, solutions, [_to_ascii_digits(after_reasoning(record.completion))]
            )
        )
    )


def warm_up() -> None:
    """Score a few answers, because math-verify and sympy import lazily.

    Otherwise the first answer of each kind would take up to 0.2 s longer.
    """
    for solution, answer in (("7", "$x^2+\\sqrt{3}$"), ("5", "so $(1,2)$ or 3/4 = 0.75 and 5\\%"), ("\\frac12", "0.4")):
        with contextlib.suppress(Exception):  # an error would appear again with real answers
            _with_time_limit(partial(_gives_all_answers, (solution,), f"\\boxed{{{answer}}}"))


def final_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, else the number or formula after the last ####, else None.

    Args:
        text: A completion or a solution.
    """
    box = last_box(text)
    return box if box is not None else _answer_after_hashes(text)


# The solution ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Solution:
    """A parsed solution.

    Attributes:
        plain: The text without formatting.
        is_words: Whether the text has only words.
        is_number: Whether the text is a number.
        values: The values that math-verify reads in the text, as sympy objects and texts.
    """

    plain: str
    is_words: bool
    is_number: bool
    values: list[Any]


def _solution_parts(solution: Any) -> tuple[str, ...]:
    """Return the answers in one solution, all of which a completion must give.

    Returns:
        The contents of the solution's boxes, or a single answer if it has no box. Empty if the solution cannot be used,
        for example because it is NaN or too long.
    """
    if not isinstance(solution, str | Number) or solution != solution:  # NaN is not equal to itself
        return ()
    text = _to_ascii_digits(after_reasoning(str(solution))).strip()
    answers = tuple(dict.fromkeys(boxes(text))) or (final_answer(text) or _line_after_hashes(text) or text,)
    is_usable = sum(map(len, answers)) <= _MAX_ANSWER and all(map(_without_formatting, answers))
    return answers if is_usable else ()


@lru_cache(maxsize=256)
def _distinct_answers(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the answers in `parts` without those that equal an earlier answer, such as 1.5 after 3/2."""
    found: list[str] = []
    for part in parts:
        if not any(_box_matches(earlier, part) for earlier in found):
            found.append(part)
    return tuple(found)


@lru_cache(maxsize=256)  # the samples of a prompt have the same solution
def read_solution(text: str) -> _Solution:
    """Parse the text of a solution."""
    number = _without_exponents(text)
    is_number = _IS_NUMBER.fullmatch(number) is not None
    values = _parse_whole_answer(number if is_number else text)
    # Nothing is comparable with 1/0, so its text decides.
    return _Solution(
        _without_formatting(text),
        _is_only_words(text),
        is_number,
        [value for value in values if value not in (zoo, nan)],
    )


@lru_cache(maxsize=256)
def _read_as_set(parts: tuple[str, ...]) -> _Solution:
    """Parse several answers as one set, such as the two roots of an equation.

    math-verify drops answers that it cannot read. So the result's `values` hold only sets with as many members as
    `parts`.
    """
    whole = read_solution(", ".join(parts))
    sets = [value for value in whole.values if isinstance(value, FiniteSet) and len(value) == len(parts)]
    return replace(whole, values=sets)


# The answer -----------------------------------------------------------------------------------------------------------


def _gives_all_answers(parts: tuple[str, ...], completion: str) -> bool:
    """Return whether a completion gives all answers in `parts`, the answers of one solution.

    Raises any exception that math-verify raises.
    """
    parts = _distinct_answers(parts)
    if len(parts) == 1:
        return _final_answer_matches(read_solution(parts[0]), completion)
    answer = final_answer(completion) or ""
    is_one = _ONE_VALUE.fullmatch(_without_formatting(answer)) is not None
    together = [] if is_one else _BETWEEN_ANSWERS.split(answer)
    for found in (boxes(completion)[-len(parts) :], together):
        if len(found) == len(parts):
            right = [[_box_matches(part, answer) for answer in found] for part in parts]
            if all(map(any, right)) and all(map(any, zip(*right, strict=True))):
                return True
    return not is_one and _final_answer_matches(_read_as_set(parts), completion)


def _final_answer_matches(solution: _Solution, completion: str) -> bool:
    answer, read = last_box(completion), _parse_formula
    if answer is None:
        answer, read = _answer_after_hashes(completion), _parse_whole_answer
    if answer is None:
        end = _LONG_NUMBER.sub(" ", completion[-_MAX_TEXT:])
        return _states_solution(solution, end) or _values_match(solution, end, _parse_math)
    return _answers_match(solution, answer, read)


def _box_matches(text: str, box: str) -> bool:
    """Return whether `box`, the content of a box in a completion, equals `text`, one answer of a solution."""
    return _answers_match(read_solution(text), box, _parse_formula)


def _answers_match(solution: _Solution, answer: str, read: Callable[[str], list[Any]]) -> bool:
    """Return whether an answer has the same text as the solution, or the same value.

    `read` is the function that parses the answer into values.
    """
    if _texts_match(solution, _without_formatting(answer)):
        return True
    return len(answer) <= _MAX_ANSWER and _values_match(solution, answer, read)


def _values_match(solution: _Solution, text: str, read: Callable[[str], list[Any]]) -> bool:
    """Return whether a value that the parser `read` finds in a text equals a value of the solution."""
    if solution.is_words and _is_only_words(text):
        return False
    found = read(_without_exponents(text) if solution.is_number else text)
    return _any_pair_equal(partial(verify, timeout_seconds=0, raise_on_error=True), solution.values, found)


def _any_pair_equal(equal: Callable[[Any, Any], bool], golds: list[Any], found: list[Any]) -> bool:
    """Return whether `equal` is True for any pair of a value in `golds` and a value in `found`.

    If no pair is equal, and `equal` raised exceptions, the first of them is raised.
    """
    failure = None
    for gold, value in product(golds, found):
        try:
            if equal(gold, value):
                return True
        except Exception as error:  # sympy raises many kinds of errors, and another pair may be equal
            failure = failure or error
    if failure is not None:
        raise failure
    return False


def _answer_after_hashes(text: str) -> str | None:
    """Return the number or formula after a #### mark, or None if no mark is followed by a number or formula.

    Of several such marks, the last counts.
    """
    for match in reversed(list(_AFTER_HASHES.finditer(text))):
        line = match[1].strip("*_` \t\r")
        number = _HASHED_NUMBER.match(line)
        if number and _IS_NUMBER.fullmatch(number[1] + (number[2] or "")):
            rest = line[number.end() :]
            if not _GOES_ON.match(rest) or _has_words(rest):
                return number[1] + (number[2] or "")
        if line and not _has_words(line.split()[0]):
            return line
    return None


def _line_after_hashes(text: str) -> str:
    """Return the rest of the line after the last ####, or "" without ####."""
    lines = _AFTER_HASHES.findall(text)
    return lines[-1].strip() if lines else ""


# Reading with math-verify ---------------------------------------------------------------------------------------------


def _parse_math(text: str) -> list[Any]:
    """Return what math-verify parses from a text: [], or a list with a sympy expression, its text, or both."""
    found = parse(text, parsing_timeout=0, raise_on_error=True)
    if "\\%" in text:  # math-verify drops the sign
        found = found + parse(text.replace("\\%", "%"), parsing_timeout=0, raise_on_error=True)
    return found


def _parse_formula(text: str) -> list[Any]:
    """Parse a text as the content of a box, and return what math-verify reads (see `_parse_math`)."""
    found = _parse_math(f"\\boxed{{{text}}}")
    if percentage := _IS_PERCENTAGE.fullmatch(text):  # math-verify 0.9 reads none in a box
        found = found + _parse_math(f"${percentage[1]}$%")
    return found


def _parse_whole_answer(text: str) -> list[Any]:
    """Parse a whole text as one answer, and return what math-verify reads (see `_parse_math`).

    Without dollar signs, math-verify alone would read only a part of a formula.
    """
    has_more = _IN_MATH_MODE.search(text) or (_is_sentence(text) and not _is_only_words(text))
    return _parse_math(text) if has_more or _IS_NUMBER.fullmatch(text) else _parse_formula(text)


def _without_exponents(text: str) -> str:
    """Rewrite numbers such as 1.5e3 as 1500, because math-verify cannot parse exponents."""
    return _SCIENTIFIC.sub(lambda match: format(Decimal(match[0]), "f"), text)


def _to_ascii_digits(text: str) -> str:
    """Replace Unicode digits and minus signs by ASCII, because math-verify does not recognize them."""
    return _FOREIGN.sub(lambda match: str(unicodedata.decimal(match[0], "-")), text)


# Text -----------------------------------------------------------------------------------------------------------------


def _without_formatting(text: str) -> str:
    r"""Remove formatting from a text: dollar signs, bold type, \text{}, spacing, a full stop at the end."""
    return " ".join(_SPACING.sub(" ", _TEXT_COMMAND.sub(r" \1 ", text)).split()).rstrip(" .")


def _has_words(text: str) -> bool:
    """Return whether a text has words other than names of mathematical functions."""
    text = _COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", text))
    return any(not _FUNCTION.fullmatch(word.lower()) for word in _WORD.findall(text))


def _is_only_words(text: str) -> bool:
    r"""Return whether a text has only words, such as "forty two".

    False if it has a digit, an operator or a backslash, as in \text{}.
    """
    text = text.replace("$", "")
    return _has_words(text) and not re.search(r"[\d\\]", text) and not _OPERATOR.search(text)


def _is_sentence(text: str) -> bool:
    """Return whether a text is a sentence around a number or formula, such as "the answer is 5"."""
    return _has_words(text) and (not _OPERATOR.search(text) or _SENTENCE.search(text) is not None)


def _texts_match(solution: _Solution, plain: str) -> bool:
    """Return whether `plain`, a text without formatting, is the text of the solution. For words, case is ignored."""
    return plain.casefold() == solution.plain.casefold() if solution.is_words else plain == solution.plain


def _states_solution(solution: _Solution, text: str) -> bool:
    """Return whether a text states the solution, word for word.

    The solution may follow "the answer is" or the last ####. Otherwise a solution in words must be the whole text, and
    any other solution the end of the text.
    """
    n_words = len(solution.plain.split())
    words = _without_formatting(text).split()
    places = [words if solution.is_words else words[-n_words:], _without_formatting(_line_after_hashes(text)).split()]
    for match in list(_STATED.finditer(text))[-1:]:
        places.append(_without_formatting(text[match.end() :]).split()[:n_words])
    return any(_texts_match(solution, " ".join(place).rstrip(" .,;!")) for place in places)


# Time -----------------------------------------------------------------------------------------------------------------


def _with_time_limit(function: Callable[[], bool]) -> bool:
    """Return the result of `function`. In the main thread, raise TimeoutError after _LIMIT_S seconds of CPU time."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    end = time.thread_time() + _LIMIT_S  # CPU time, so that a busy machine changes no reward

    def check_time(*_: Any) -> None:
        if time.thread_time() > end:
            raise TimeoutException  # a BaseException, since sympy and math-verify catch every Exception

    before = signal.signal(signal.SIGPROF, check_time)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, _TICK_S, _TICK_S)  # repeatedly: a bare except may catch the first
            return function()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except TimeoutException as error:
        raise TimeoutError(f"math-verify took more than {_LIMIT_S:g} s for this answer") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        # The default action would end the process if one more signal is on its way.
        signal.signal(signal.SIGPROF, before if callable(before) else signal.SIG_IGN)
