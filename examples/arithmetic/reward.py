"""Rewards for the word problems of this example. A parser checks every step of an answer.

    reward.fn=examples/arithmetic/reward.py                    outcome: 1 if the last step has the right count, else 0
    reward.fn=examples/arithmetic/reward.py:process_reward     process: share of the steps that are right

The parser computes the right counts from the prompt. A step `cats = 7 + 3 = 10 .` is right if the prompt relates its
thing to these numbers by this operation, and if the result is the right count.
"""

import re

SENTENCES = (
    (re.compile(r"there are (\d{1,4}) (\w+)", re.ASCII), lambda m: (m[2], "", (m[1],))),
    (re.compile(r"there are (\d{1,4}) more (\w+) than (\w+)", re.ASCII), lambda m: (m[2], "+", (m[3], m[1]))),
    (re.compile(r"there are (\d{1,4}) fewer (\w+) than (\w+)", re.ASCII), lambda m: (m[2], "-", (m[3], m[1]))),
    (re.compile(r"there are (\d{1,4}) times as many (\w+) as (\w+)", re.ASCII), lambda m: (m[2], "*", (m[1], m[3]))),
    (
        re.compile(r"there are as many (\w+) as (\w+) and (\w+) together", re.ASCII),
        lambda m: (m[1], "+", (m[2], m[3])),
    ),
)
STEP = re.compile(r"(\w+) = (?:(\d{1,4}) ([-+*]) (\d{1,4}) = )?(\d{1,4})", re.ASCII)


def parse_problem(prompt):
    """Return ({thing: (sign, operands, count)}, the thing asked for), or ({}, "") for a text of another form."""
    *sentences, question = prompt.strip().split(" . ")
    asked = re.fullmatch(r"how many (\w+) \?", question)
    nodes = {}
    for sentence in sentences:
        found = next((read(match) for form, read in SENTENCES if (match := form.fullmatch(sentence))), None)
        if found is None:
            return {}, ""
        thing, sign, operands = found
        values = [nodes[o][2] if o in nodes else int(o) if o.isdecimal() else None for o in operands]
        if None in values:
            return {}, ""
        nodes[thing] = (sign, values, calculate(sign, values))
    return (nodes, asked[1]) if asked and asked[1] in nodes else ({}, "")


def calculate(sign, values):
    """Return the result of an operation, or the only value if there is no operation."""
    a, b = values[0], values[-1]
    return {"": a, "+": a + b, "-": a - b, "*": a * b}[sign]


def parse_answer(completion):
    """Return the steps (thing, sign, values, result) of an answer. A step without this form is None."""
    texts = completion.strip().removesuffix(".").split(" . ")
    steps = []
    for text in texts:
        match = STEP.fullmatch(text.strip())
        steps.append(match and (match[1], match[3] or "", [int(v) for v in (match[2], match[4]) if v], int(match[5])))
    return steps


def is_right(step, nodes):
    """Return whether a step is right: the operation, the order-free operands and the result are those of the prompt."""
    if step is None or step[0] not in nodes:
        return False
    thing, sign, values, result = step
    true_sign, true_values, count = nodes[thing]
    if not sign:
        return not true_sign and result == count
    same = values == true_values or (sign != "-" and values == true_values[::-1])
    return sign == true_sign and same and result == count


def outcome(prompt, completion):
    """Return whether the last step counts the thing asked for, with the right result."""
    nodes, asked = parse_problem(prompt)
    last = parse_answer(completion)[-1]
    return bool(nodes) and last is not None and last[0] == asked and last[3] == nodes[asked][2]


def process(prompt, completion):
    """Return the share of right steps, from 0 to 1.

    Repeated steps count once. The divisor is the number of things or the number of steps, whichever is larger, so
    neither missing nor superfluous steps are free.
    """
    nodes, _ = parse_problem(prompt)
    if not nodes:
        return 0.0
    steps = parse_answer(completion)
    right = {step[0] for step in steps if is_right(step, nodes)}
    return len(right) / max(len(nodes), len(steps))


def reward_fn(record):
    return float(outcome(record.prompt, record.completion))


def process_reward(record):
    """The share of right steps. An answer with a wrong last step gets at most 0.9, so that it counts as no solution."""
    share = process(record.prompt, record.completion)
    return share if outcome(record.prompt, record.completion) else min(share, 0.9)
