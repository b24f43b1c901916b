"""The built-in reward `math`: 1.0 if the completion's final answer equals one of the row's `solutions`, else 0.0.

The answer is the last \\boxed{...}. Without one it is what follows the last `####`. Without either it is the last
number or formula that math-verify finds. math-verify compares the values and not the texts: 0.5 equals 1/2.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException


def reward_fn(record: Any) -> float:
    """Score one RewardRecord. Raises ValueError without a usable solution, TimeoutError if math-verify gives up."""
    accepted = record.solutions if isinstance(record.solutions, list | tuple) else [record.solutions]
    golds = [
        parse(_boxed(final_answer(str(solution)) or str(solution))) for solution in accepted if solution is not None
    ]
    if not golds or not all(golds):
        raise ValueError(f"field solutions is {record.solutions!r}; the math reward needs a number or formula")
    answer = final_answer(record.completion)
    try:
        found = parse(record.completion if answer is None else _boxed(answer), raise_on_error=True)
        return float(any(verify(gold, found, raise_on_error=True) for gold in golds))
    except TimeoutException as error:
        raise TimeoutError("math-verify gave up on this answer") from error
    except Exception:  # sympy raises many kinds for malformed formulas; such an answer is wrong
        return 0.0


def final_answer(text: str) -> str | None:
    """The text in the last \\boxed{...} of `text`, else the text after its last ####; None if it has neither."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : end]
        return ""
    _, mark, answer = text.rpartition("####")
    return answer.strip() if mark else None


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"
