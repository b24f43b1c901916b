"""1.0 if the final answer is mathematically equal to the reference answer, else 0.0.

    reward.fn=examples/math/math_verify_reward.py

The built-in `reward.fn=math` does much the same. Start from this file to write your own reward.
"""

from math_verify import parse, verify


def reward_fn(record):
    gold = parse(f"\\boxed{{{record.solutions}}}")
    return float(verify(gold, parse(final_answer(record.completion))))


def final_answer(text):
    """The last \\boxed{...}, or the text after the last ####, or the whole text.

    math-verify then finds the last number in it.
    """
    if "\\boxed" in text:
        return text[text.rindex("\\boxed") :]
    return text.split("####")[-1]
