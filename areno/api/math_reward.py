"""The built-in reward `math`: 1.0 if the completion's final answer equals one of the row's `solutions`, else 0.0.

The answer is the last \\boxed{...}; without one, what follows the last `####`; without either, the last number or
formula that math-verify finds. Equality is mathematical (0.5 = 1/2), as math-verify decides it.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException


def reward_fn(record: Any) -> float:
    """Score one RewardRecord. Raises ValueError if the row has no usable solution, TimeoutError if sympy gets lost."""
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
    except Exception:  # sympy raises many kinds over malformed formulas; such an answer is not the right one
        return 0.0


def final_answer(text: str) -> str | None:
    """What stands in the last \\boxed{...} of `text`, or else after its last ####; None if it has neither."""
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
