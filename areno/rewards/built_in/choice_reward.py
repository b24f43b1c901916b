"""The built-in reward `choice`: 1.0 if the completion chooses the letter in the row's `solutions`, else 0.0.

The choice is the letter in the last <answer>...</answer>, \\boxed{...} or behind the last ####. Without these it is
the last one that is called the answer, as in "the answer is (B)". Without that, it is the letter of the last line, if
this is nothing but a choice, such as "B) Paris". A completion that offers two letters, as in "the answer is A or B",
has chosen none.
"""

from __future__ import annotations

import re
from typing import Any

from areno.rewards.built_in.answers import accepted, marked_answer

_OPEN, _CLOSE = r"[(\[*_\s]*(?:\\(?:text|mathrm|mathbf)\s*\{\s*)?[(\[]?", r"[)\]}*_]*"
_CHOICE = re.compile(rf"{_OPEN}([A-Za-z]){_CLOSE}\s*(?:\.|(?:[).:\]]|(?<=[)\]]))\s*\S.*)?\s*", re.S)
_STATED = re.compile(rf"\b[Aa]nswer\b(?:\s+(?:is|would\s+be|must\s+be))?\s*:?{_OPEN}([A-Z]){_CLOSE}(?![\w'])")
_ANOTHER = re.compile(rf"\s*(?:,|/|\bor\b|\band\b)\s*{_OPEN}[A-Z]{_CLOSE}(?![\w'])")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def reward_fn(record: Any) -> float:
    """Score one RewardRecord. A number in `solutions` counts from 0. Raises ValueError without a usable solution."""
    letters = {_letter(solution) for solution in accepted(record)}
    return float(chosen(record.completion) in letters)


def chosen(text: str) -> str | None:
    """The letter that a completion chooses; None if it chooses none."""
    marked = marked_answer(text)
    if marked is not None:
        return _of_line(marked)
    stated = list(_STATED.finditer(text))
    if stated:
        return None if _ANOTHER.match(text, stated[-1].end()) else stated[-1][1]
    lines = text.strip().splitlines()
    return _of_line(lines[-1]) if lines else None


def _of_line(line: str) -> str | None:
    found = _CHOICE.fullmatch(line.strip())
    return found[1].upper() if found else None


def _letter(solution: Any) -> str:
    if isinstance(solution, int) and not isinstance(solution, bool) and 0 <= solution < len(_LETTERS):
        return _LETTERS[solution]
    found = _of_line(solution) if isinstance(solution, str) else None
    if found is None:
        text = f"field solutions has {str(solution)[:80]!r}; a letter is needed, or the number of a choice from 0 on"
        raise ValueError(text)
    return found
