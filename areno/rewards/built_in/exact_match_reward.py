"""The built-in reward `exact_match`: 1.0 if the completion's answer is one of the row's `solutions`, else 0.0.

The answer is the last <answer>...</answer>, else the last \\boxed{...}, else what follows the last ####, else all of
the completion. Texts are compared letter by letter, but any white space is one space, and none at the ends counts.
"""

from __future__ import annotations

from typing import Any

from areno.rewards.built_in.answers import accepted, marked_answer


def reward_fn(record: Any) -> float:
    """Score one RewardRecord. Raises ValueError without a solution."""
    return float(_answer(record.completion) in {_answer(str(solution)) for solution in accepted(record)})


def _answer(text: str) -> str:
    marked = marked_answer(text)
    return " ".join((text if marked is None else marked).split())
