"""Word problems made of small operations: each thing is counted from other things, and the last count is asked for.

The things and the operations between them are a directed acyclic graph. Each sentence of the prompt describes a node of
the graph. An answer counts one thing after another:

    prompt    there are 7 bees . there are 3 more cats than bees . there are as many owls as cats and bees together .
              how many owls ?
    answer    bees = 7 . cats = 7 + 3 = 10 . owls = 10 + 7 = 17 .

Every word and every number is one token. Counts are from 1 to `largest`.

The demonstrations come from a careless pupil. Where a sentence says "fewer" or "times", the pupil adds with the
probability CONFUSED. Every result is wrong by 1 with the probability SLIP. The pupil goes on with the wrong count.

Sets of things are divided over the splits: a set of things that occurs in one of the splits "sft", "train"
(reinforcement learning) and "test" occurs in no other. So no problem is in two splits. The argument `operations` is
the smallest and the largest number of operations of a problem. So a test can have more operations than the training.
"""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

THINGS = [
    "ants",
    "bees",
    "cats",
    "cows",
    "cubs",
    "dogs",
    "elks",
    "emus",
    "eels",
    "ewes",
    "fish",
    "frogs",
    "geese",
    "goats",
    "hens",
    "jays",
    "kids",
    "lambs",
    "larks",
    "mice",
    "moths",
    "mules",
    "newts",
    "owls",
    "pigs",
    "pups",
    "rams",
    "rats",
    "seals",
    "swans",
    "toads",
    "wasps",
]
SHARES = {"sft": 50, "train": 30, "test": 20}  # percent of the sets of things
CONFUSED = 0.75  # chance to add instead of subtracting or multiplying
SLIP = 0.05  # chance of a result that is wrong by 1
CHUNK = 10_000  # rows that one process makes at a time


def split_of(things):
    """Return the split of a set of things, given as indices in ascending order. A fixed hash (FNV-1a) decides."""
    state = 2166136261
    for value in things:
        state = (state ^ value) * 16777619 % 2**32
    place = (state * 2654435761 % 2**32 >> 8) % 100
    for name, share in SHARES.items():
        if place < share:
            return name
        place -= share


def calculate(a, sign, b):
    """Return the result of an operation."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def make_node(draw, thing, known, unused, largest):
    """Draw how a thing is counted from known things.

    Args:
        draw: The random generator.
        thing: The thing to count.
        known: Counts of the things before it.
        unused: Things that no other thing is counted from yet. The new thing prefers these.
        largest: The largest count.

    Returns:
        (sentence, sign, operands), or None if the count would be out of range. An operand is a thing or a number.
    """
    order = [*draw.sample(unused, len(unused)), *draw.sample(list(known), len(known))]
    first, second = order[0], next((other for other in order if other != order[0]), None)
    number = draw.randint(1, 9)
    kind = draw.choice(["more", "fewer", "times", "sum"])
    if kind == "sum" and second is not None:
        text, sign, operands = f"as many {thing} as {first} and {second} together", "+", (first, second)
    elif kind == "times":
        number = draw.randint(2, 3)
        text, sign, operands = f"{number} times as many {thing} as {first}", "*", (number, first)
    else:
        kind, sign = ("fewer", "-") if kind == "fewer" else ("more", "+")
        text, operands = f"{number} {kind} {thing} than {first}", (first, number)
    count = calculate(known.get(operands[0], operands[0]), sign, known.get(operands[1], operands[1]))
    return (f"there are {text} .", sign, operands) if 1 <= count <= largest else None


def make_problem(draw, split, operations, largest):
    """Draw a problem of a split.

    Returns:
        (prompt, nodes). A node is (thing, sign, operands), and an operand is a thing or a number. A count that the
        prompt states has the sign "" and the count as its only operand. Each thing is needed to count the last one.
    """
    while True:
        needed = draw.randint(*operations)
        chosen = draw.sample(range(len(THINGS)), needed + draw.randint(1, 2))
        if split_of(sorted(chosen)) != split:
            continue
        known, unused, sentences, nodes = {}, [], [], []
        for place, thing in enumerate(THINGS[index] for index in chosen):
            if place < len(chosen) - needed:
                number = draw.randint(2, 9)
                node = f"there are {number} {thing} .", "", (number,)
            else:
                node = make_node(draw, thing, known, unused, largest)
            if node is None:
                break
            sentence, sign, operands = node
            values = [known.get(operand, operand) for operand in operands]
            known[thing] = calculate(values[0], sign, values[1]) if sign else values[0]
            unused = [*(other for other in unused if other not in operands), thing]
            sentences.append(sentence)
            nodes.append((thing, sign, operands))
        else:
            if len(unused) == 1:
                return f"{' '.join(sentences)} how many {unused[0]} ?", nodes


def answer(nodes, compute=lambda values, sign: (sign, calculate(values[0], sign, values[1]))):
    """Return the answer to a problem.

    Args:
        nodes: The nodes of the problem, from `make_problem`.
        compute: Function (values of the operands, sign) that returns the sign and the result to write.
    """
    known, parts = {}, []
    for thing, sign, operands in nodes:
        values = [known.get(operand, operand) for operand in operands]
        known[thing] = values[0]
        if sign:
            written, known[thing] = compute(values, sign)
            parts.append(f"{thing} = {values[0]} {written} {values[1]} = {known[thing]} .")
        else:
            parts.append(f"{thing} = {known[thing]} .")
    return " ".join(parts)


def careless(draw, largest):
    """Return a function for `answer` that computes as the careless pupil does."""

    def compute(values, sign):
        sign = "+" if draw.random() < CONFUSED else sign
        slip = draw.choice([-1, 1]) if draw.random() < SLIP else 0
        return sign, min(max(calculate(values[0], sign, values[1]) + slip, 0), largest)

    return compute


def make_rows(split, operations, largest, careless_answers, chunk, count):
    """Return `count` rows. They depend on the arguments alone."""
    draw = random.Random(f"{split} {list(operations)} {chunk}")
    rows = []
    for _ in range(count):
        prompt, nodes = make_problem(draw, split, operations, largest)
        if careless_answers:
            rows.append({"prompt": prompt, "response": " " + answer(nodes, careless(draw, largest))})
        else:
            rows.append(
                {"prompt": prompt, "solutions": answer(nodes), "operations": sum(1 for node in nodes if node[1])}
            )
    return rows


def load_rows(split, count, operations, largest, careless_answers):
    """Return `count` rows. If they are many, several processes make them."""
    arguments = [split, tuple(operations), largest, careless_answers]
    chunks = [(*arguments, chunk, min(CHUNK, count - start)) for chunk, start in enumerate(range(0, count, CHUNK))]
    if len(chunks) == 1:
        return make_rows(*chunks[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(in_a_process, chunks) for row in rows]


def in_a_process(arguments):
    """Return the rows that a process of its own makes. It runs this file."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def load_dataset(split, count=20_000, operations=(2, 5), largest=99):
    """Return rows for reinforcement learning and evaluation: prompt, and the right answer as its solution."""
    return load_rows(split, count, operations, largest, careless_answers=False)


def demonstrations(split, count=400_000, operations=(1, 4), largest=99):
    """Return rows for supervised fine-tuning: prompt and response."""
    return load_rows("sft" if split == "train" else split, count, operations, largest, careless_answers=True)


if __name__ == "__main__":
    json.dump(make_rows(*json.loads(sys.argv[1])), sys.stdout)
