"""The rows of the quickstart: additions with a carry.

Every problem adds two numbers below 100 whose units carry, such as 27+35. One pair in ten is held out for the split
"test".

The base model of the quickstart has learned from `sloppy_demonstrations`. Six in ten of them forget the carry
(27+35=52). So the base model knows two ways to add and prefers the wrong one. The reward prefers the correct one, and
reinforcement learning makes the model use it.
"""

import random

SLOPPY = 0.6


def pairs(split):
    """All (a, b) of a split. A fixed multiplicative hash decides which pairs are held out."""
    carries = [(a, b) for a in range(100) for b in range(100) if a % 10 + b % 10 >= 10]
    held_out = {(a, b) for a, b in carries if (a * 100 + b) * 2654435761 % 2**32 % 10 == 0}
    return [pair for pair in carries if (pair in held_out) == (split == "test")]


def without_carry(a, b):
    """The sum without the carry: 27+35=52."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def load_dataset(split):
    """Rows for reinforcement learning: prompt and solution."""
    return [{"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a, b in pairs(split)]


def sloppy_demonstrations(split, count=320_000, seed=1):
    """Rows for supervised fine-tuning: prompt and response. Most responses forget the carry."""
    draw = random.Random(seed)
    problems = pairs(split)
    rows = []
    for _ in range(count if split == "train" else len(problems)):
        a, b = draw.choice(problems)
        answer = without_carry(a, b) if draw.random() < SLOPPY else a + b
        rows.append({"prompt": f"{a}+{b}=", "response": str(answer)})
    return rows


def with_responses(split):
    """Rows for distillation on given answers: prompt, solution and the correct sum as the response.

    The prompt that a teacher may read in place of the prompt begins with the solved problem.
    """
    return [
        {"prompt": f"{a}+{b}=", "solutions": str(a + b), "response": str(a + b), "solved": f"{a}+{b}={a + b} {a}+{b}="}
        for a, b in pairs(split)
    ]


def preferences(split):
    """Rows for preference training. The correct sum is chosen, and the sum without the carry is rejected."""
    return [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(without_carry(a, b))} for a, b in pairs(split)
    ]


def labelled_answers(split):
    """Rows for KTO: one labelled answer in each, the correct sum or the sum without the carry."""
    rows = []
    for number, (a, b) in enumerate(pairs(split)):
        right = number % 2 == 0
        rows.append({"prompt": f"{a}+{b}=", "response": str(a + b if right else without_carry(a, b)), "label": right})
    return rows


def labelled_steps(split, seed=1):
    """Rows for a process reward model: the steps of a solution, each right or wrong.

    A solution adds the units, then the tens and the carry, and then says the sum: 7+5=12, 2+3+1=6, 62. An error forgets
    the carry, in the first step (7+5=2) or in the second (2+3=5). All steps after an error are wrong, too.
    """
    draw, rows = random.Random(seed), []
    for a, b in pairs(split):
        first_error = draw.choice([0, 1, 3, 3])  # 3: no error
        units = a % 10 + b % 10 - 10 * (first_error == 0)
        carry = "+1" * (first_error == 3)
        tens = a // 10 + b // 10 + len(carry) // 2
        steps = [f"{a % 10}+{b % 10}={units}", f"{a // 10}+{b // 10}{carry}={tens}", f"{tens}{units % 10}"]
        rows.append({"prompt": f"{a}+{b}=", "completions": steps, "labels": [n < first_error for n in range(3)]})
    return rows
