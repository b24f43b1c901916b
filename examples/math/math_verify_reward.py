"""1.0 if the final answer is mathematically equal to the reference answer, else 0.0.

    reward.fn=examples/math/math_verify_reward.py

The same idea comes built in as `reward.fn=math`; this file is the place to start from for a reward of your own.
"""

from math_verify import parse, verify


def reward_fn(record):
    gold = parse(f"\\boxed{{{record.solutions}}}")
    return float(verify(gold, parse(final_answer(record.completion))))


def final_answer(text):
    """The last \\boxed{...}, or what follows the last ####, or all of it: math-verify then finds the last number."""
    if "\\boxed" in text:
        return text[text.rindex("\\boxed") :]
    return text.split("####")[-1]
