"""Addition with a carry, made from a seed: what the quickstart trains on and is tested with.

Every problem adds two numbers below 100 whose units carry, such as 27+35. One pair in ten is held out for the split
"test".

`sloppy_demonstrations` are what the little base model learned from: in six of ten the carry is forgotten (27+35=52). So
the base model knows two ways to add and prefers the wrong one. The reward tells them apart; reinforcement learning
picks the right one.
"""

import random

SLOPPY = 0.6


def pairs(split):
    """All (a, b) of a split; a fixed multiplicative hash decides which pairs are held out."""
    carries = [(a, b) for a in range(100) for b in range(100) if a % 10 + b % 10 >= 10]
    held_out = {(a, b) for a, b in carries if (a * 100 + b) * 2654435761 % 2**32 % 10 == 0}
    return [pair for pair in carries if (pair in held_out) == (split == "test")]


def without_carry(a, b):
    """The sum of someone who forgets the carry: 27+35=52."""
    return (a // 10 + b // 10) * 10 + (a + b) % 10


def load_dataset(path, split):
    """Rows for reinforcement learning: prompt and solution."""
    return [{"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a, b in pairs(split)]


def sloppy_demonstrations(path, split, count=320_000, seed=1):
    """Rows for supervised fine-tuning: prompt and response, most of them without the carry."""
    draw = random.Random(seed)
    problems = pairs(split)
    rows = []
    for _ in range(count if split == "train" else len(problems)):
        a, b = draw.choice(problems)
        answer = without_carry(a, b) if draw.random() < SLOPPY else a + b
        rows.append({"prompt": f"{a}+{b}=", "response": str(answer)})
    return rows


def preferences(path, split):
    """Rows for preference training: the right sum is chosen, the one with the forgotten carry is rejected."""
    return [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(without_carry(a, b))} for a, b in pairs(split)
    ]
