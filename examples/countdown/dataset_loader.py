"""Countdown: combine numbers by +, -, * and / so that the result is a target.

A prompt lists the numbers and the target. An answer is a search with one attempt per line, and the last attempt
counts. An attempt is a list of steps. Each step replaces two of the values that are left by its result:

    prompt    6,7,25,50=82
    answer    50-7=43 43+25=68
              25+7=32 50+32=82

An attempt may leave numbers unused. Values are positive whole numbers of at most three digits.

The demonstrations come from a careless searcher. It takes most steps at random, overlooks most chances to
reach the target, and often gives up after a failed attempt. A model that has learned from the demonstrations searches
in the same way, so it solves few problems. Reinforcement learning can make it look closer and try longer.

Sets of numbers are divided over the splits: a set of numbers that occurs in one of the splits "sft", "train"
(reinforcement learning) and "test" occurs in no other. So no problem is in two splits. Targets are not divided. If they
were, a policy could learn the targets of its split by heart, and would then reach no other.
"""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

SHARES = {"sft": 50, "train": 30, "test": 20}  # percent of the sets of numbers
GIVE_UP = 0.45  # chance to stop after a failed attempt
ABANDON = 0.1  # chance to abandon an attempt after a step
MOST_ATTEMPTS = 8
CHUNK = 10_000  # rows that one process makes at a time


def split_of(given):
    """Return the split of a set of numbers in ascending order. A fixed hash (FNV-1a) decides."""
    state = 2166136261
    for value in given:
        state = (state ^ value) * 16777619 % 2**32
    place = (state * 2654435761 % 2**32 >> 8) % 100
    for name, share in SHARES.items():
        if place < share:
            return name
        place -= share


def steps_of(a, b, limit):
    """Return (text, result) of each step with two values. The larger value comes first. Results are below `limit`."""
    if a < b:
        a, b = b, a
    found = []
    if a + b < limit:
        found.append((f"{a}+{b}={a + b}", a + b))
    if a > b:
        found.append((f"{a}-{b}={a - b}", a - b))
    if b > 1:
        if a * b < limit:
            found.append((f"{a}*{b}={a * b}", a * b))
        if a % b == 0:
            found.append((f"{a}/{b}={a // b}", a // b))
    return found


def make_problem(draw, split, numbers, largest, targets, easy):
    """Draw a problem of a split that has a solution.

    Returns:
        (numbers in ascending order, target). The target is the result of a random attempt, which uses two numbers with
        the probability `easy` and otherwise all of them.
    """
    limit = 10 ** len(str(targets[1]))
    while True:
        given = sorted(draw.randint(1, largest) for _ in range(numbers))
        if split_of(given) != split:
            continue
        count = 1 if draw.random() < easy else numbers - 1
        for _ in range(20):
            values = draw.sample(given, numbers)
            for _ in range(count):
                steps = steps_of(values.pop(), values.pop(), limit)
                if not steps:
                    break
                values.append(draw.choice(steps)[1])
            else:
                target = values[-1]
                if targets[0] <= target <= targets[1] and target not in given:
                    return given, target


def attempt(draw, given, target, limit, sight):
    """Return (text, whether the target was reached) of one attempt of the careless searcher.

    sight: chance to notice a step that reaches the target, if there is one.
    """
    values, text = list(given), []
    while len(values) > 1:
        i, j = draw.sample(range(len(values)), 2)
        steps = steps_of(values[i], values[j], limit)
        if draw.random() < sight:
            pairs = [(a, b) for b in range(len(values)) for a in range(b)]
            hits = [step for a, b in pairs for step in steps_of(values[a], values[b], limit) if step[1] == target]
            steps = hits or steps
        if not steps:
            continue
        step, value = draw.choice(steps)
        text.append(step)
        if value == target:
            return " ".join(text), True
        values = [value, *(values[k] for k in range(len(values)) if k not in (i, j))]
        if draw.random() < ABANDON:
            break
    return " ".join(text), False


def make_trace(draw, given, target, limit, sight):
    """Return the text of a demonstration: attempts until one reaches the target, or until the searcher gives up."""
    lines = []
    while True:
        text, found = attempt(draw, given, target, limit, sight)
        lines.append(text)
        if found or len(lines) == MOST_ATTEMPTS or draw.random() < GIVE_UP:
            return "\n".join(lines)


def make_rows(split, numbers, largest, targets, easy, sight, chunk, count):
    """Return `count` rows. They depend on the arguments alone. If `sight` is None, the rows have no demonstrations."""
    draw = random.Random(f"{split} {chunk}")
    limit = 10 ** len(str(targets[1]))
    rows = []
    for _ in range(count):
        given, target = make_problem(draw, split, numbers, largest, targets, easy)
        prompt = f"{','.join(map(str, given))}={target}\n"
        if sight is None:
            rows.append({"prompt": prompt, "solutions": str(target), "split": split})
        else:
            rows.append({"prompt": prompt, "response": make_trace(draw, given, target, limit, sight)})
    return rows


def load_rows(split, count, numbers, largest, targets, easy, sight):
    """Return `count` rows. If they are many, several processes make them."""
    arguments = [split, numbers, largest, tuple(targets), easy, sight]
    chunks = [(*arguments, chunk, min(CHUNK, count - start)) for chunk, start in enumerate(range(0, count, CHUNK))]
    if len(chunks) == 1:
        return make_rows(*chunks[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [row for rows in pool.map(in_a_process, chunks) for row in rows]


def in_a_process(arguments):
    """Return the rows that a process of its own makes. It runs this file."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def load_dataset(split, count=20_000, numbers=4, largest=50, targets=(100, 999), easy=0.2):
    """Return rows for reinforcement learning and evaluation: prompt, the target as its solution, and the split."""
    return load_rows(split, count, numbers, largest, targets, easy, sight=None)


def validation(split, count=500, numbers=4, largest=50, targets=(100, 999), easy=0.2):
    """Return rows for the choice of settings: whatever the split, other problems of "train" than load_dataset."""
    return make_rows("train", numbers, largest, tuple(targets), easy, None, "validation", count)


def demonstrations(split, count=400_000, numbers=4, largest=50, targets=(100, 999), easy=0.2, sight=0.2):
    """Return rows for supervised fine-tuning: prompt and response."""
    return load_rows("sft" if split == "train" else split, count, numbers, largest, targets, easy, sight)


if __name__ == "__main__":
    json.dump(make_rows(*json.loads(sys.argv[1])), sys.stdout)
