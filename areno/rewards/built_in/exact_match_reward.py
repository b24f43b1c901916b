"""The built-in reward `exact_match`: 1.0 if the completion's answer is one of the row's `solutions`, else 0.0.

The answer is the last <answer>...</answer>, else the last \\boxed{...}, else what follows the last ####, else all of
the completion. Texts are compared letter by letter, but any white space is one space, and none at the ends counts.
"""

from __future__ import annotations

from typing import Any

from areno.rewards.built_in.answers import accepted, boxes, last_box, marked_answer


def reward_fn(record: Any) -> float:
    """Score one RewardRecord. Raises ValueError without a solution, or if one has several different boxes."""
    solutions = [str(solution) for solution in accepted(record)]
    if several := [text for text in solutions if len(set(boxes(text))) > 1 and marked_answer(text) == last_box(text)]:
        raise ValueError(
            f"field solutions is {several[0][:200]!r}, which has several boxes; exact_match compares one answer: keep "
            "one box, give a list if each is right, or use the math reward, for which all of them are needed"
        )
    return float(_answer(record.completion) in {_answer(text) for text in solutions})


def _answer(text: str) -> str:
    marked = marked_answer(text)
    return " ".join((text if marked is None else marked).split())
