"""Functions that find the answer in a completion, and the reference answers in a row."""

from __future__ import annotations

import re
from numbers import Number
from typing import Any

_BRACE = re.compile(r"(?P<box>\\boxed\s*)?\{|\}")
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
_HASHED = re.compile(r"####[ \t]*(\S[^\n]*)")
_FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.S | re.M)


def after_reasoning(text: str) -> str:
    """Return the text after the last </think>, or the whole text if it has no </think>.

    Args:
        text: A completion or a reference answer.
    """
    return text.rpartition("</think>")[2]


def boxes(text: str) -> list[str]:
    r"""Return the contents of all \boxed{...} in a text, in order.

    Empty and unclosed boxes are left out. Of nested boxes, only the innermost counts.

    Args:
        text: A completion or a reference answer.
    """
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
    r"""Return the content of the last \boxed{...} that is closed and not empty, or None if there is none.

    Args:
        text: A completion or a reference answer.
    """
    return next(reversed(boxes(text)), None)


def tagged_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, or None if there is none.

    Args:
        text: A completion.
    """
    tagged = _TAGGED.findall(text)
    return tagged[-1].strip() if tagged else None


def marked_answer(text: str) -> str | None:
    r"""Return the answer that a text marks.

    Args:
        text: A completion or a reference answer.

    Returns:
        The content of the last <answer>...</answer>. If there is none, the content of the last \boxed{...}. If there is
        none either, the rest of the line after the last ####. None if the text has no such mark.
    """
    if (tagged := tagged_answer(text)) is not None:
        return tagged
    if (box := last_box(text)) is not None:
        return box
    hashed = _HASHED.findall(text)
    return hashed[-1].strip() if hashed else None


def fenced_block(text: str, *languages: str) -> str:
    """Return the content of the last fenced block (```) after the last </think>.

    Args:
        text: A completion.
        *languages: The languages of preferred blocks, such as "python".

    Returns:
        The last block in one of the languages. If there is none, the last block. If there is no block, all text after
        the reasoning.
    """
    text = after_reasoning(text)
    blocks = _FENCED.findall(text)
    named = [inside for language, inside in blocks if language.lower() in languages]
    return (named or [inside for _, inside in blocks] or [text])[-1]


def reference_answers(record: Any) -> list[Any]:
    """Return the reference answers of a record. Each of them is a right answer.

    Args:
        record: A RewardRecord. Its `solutions` are one answer or a list of answers.

    Raises:
        ValueError: There is no answer, or an answer is neither a text nor a number.
    """
    found = record.solutions if isinstance(record.solutions, list | tuple) else [record.solutions]
    found = [solution for solution in found if solution is not None]
    if not found or not all(isinstance(solution, str | Number) for solution in found):
        text = f"field solutions is {str(record.solutions)[:200]!r}; text or a number is needed, or a list of them"
        raise ValueError(text)
    return [after_reasoning(solution) if isinstance(solution, str) else solution for solution in found]
