"""Where the answer is in a completion, and the solutions of a row."""

from __future__ import annotations

import re
from numbers import Number
from typing import Any

_BRACE = re.compile(r"(?P<box>\\boxed\s*)?\{|\}")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
_HASHED = re.compile(r"####[ \t]*(\S[^\n]*)")
_FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.S | re.M)


def boxes(text: str) -> list[str]:
    """Return the text in each closed, non-empty \\boxed{...}, in order; of nested boxes, only that of the inner one."""
    found: list[tuple[int, str]] = []
    is_open: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            is_open.append(brace)
        elif is_open:
            opening = is_open.pop()
            if not opening["box"] or (found and found[-1][0] > opening.start()):
                continue
            if inside := text[opening.end() : brace.start()].strip():
                found.append((opening.start(), inside))
    return [inside for _, inside in found]


def last_box(text: str) -> str | None:
    """Return the last of the boxes, or None if there are none."""
    return next(reversed(boxes(text)), None)


def marked_answer(text: str) -> str | None:
    """The last <answer>...</answer>, else the last \\boxed{...}, else what follows the last ####; None without any."""
    tagged = _TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip()
    if (box := last_box(text)) is not None:
        return box
    hashed = _HASHED.findall(text)
    return hashed[-1].strip() if hashed else None


def block(text: str, *languages: str) -> str:
    """The last fenced block behind the reasoning: of these languages, else the last of any; without one, all text."""
    text = text.rpartition("</think>")[2]
    blocks = _FENCED.findall(text)
    named = [inside for language, inside in blocks if language.lower() in languages]
    return (named or [inside for _, inside in blocks] or [text])[-1]


def accepted(record: Any) -> list[Any]:
    """The solutions of a record, of which each is right. Raises ValueError if there are none."""
    found = record.solutions if isinstance(record.solutions, list | tuple) else [record.solutions]
    found = [solution for solution in found if solution is not None]
    if not found or not all(isinstance(solution, str | Number) for solution in found):
        text = f"field solutions is {str(record.solutions)[:200]!r}; text or a number is needed, or a list of them"
        raise ValueError(text)
    return found
