"""1 if the last attempt of a countdown answer reaches the target by correct steps, else 0.

    reward.fn=examples/countdown/reward.py

Each step must be computed correctly, and must use values that are left: a number of the prompt, or the result of an
earlier step of the same attempt. So each number is used at most once.

`random_reward` is a control. It ignores answers to problems of training, so a run with it must not improve. Answers to
test problems get the reward of the task.
"""

import random
import re

STEP = re.compile(r"(\d{1,6})([-+*/])(\d{1,6})=(\d{1,6})", re.ASCII)
PROMPT = re.compile(r"(\d{1,6}(?:,\d{1,6})*)=(\d{1,6})\n", re.ASCII)


def result(a, sign, b):
    """Return the result of a step, or None for a division with a remainder."""
    if sign == "/":
        return a // b if b and a % b == 0 else None
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def values_left(numbers, attempt):
    """Return the values after an attempt, the last result at the end, or None if a step is wrong or has no form."""
    left = list(numbers)
    for text in attempt.split(" "):
        step = STEP.fullmatch(text)
        if step is None:
            return None
        a, b, found = int(step[1]), int(step[3]), int(step[4])
        for value in (a, b):
            if value not in left:
                return None
            left.remove(value)
        if result(a, step[2], b) != found:
            return None
        left.append(found)
    return left


def is_solved(prompt, completion):
    """Return whether the last attempt of an answer reaches the target of the prompt."""
    asked = PROMPT.fullmatch(prompt)
    if asked is None:
        return False
    left = values_left(map(int, asked[1].split(",")), completion.rsplit("\n", 1)[-1])
    return left is not None and left[-1] == int(asked[2])


def reward_fn(record):
    return float(is_solved(record.prompt, record.completion))


def random_reward(record):
    """1 for one answer in four, whatever it says. The same answer at the same step has the same reward."""
    if record.record.get("split") == "test":
        return reward_fn(record)
    return float(random.Random(f"{record.step} {record.tokens} {record.logprobs}").random() < 0.25)
