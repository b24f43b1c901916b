"""From what the small model has learned: conversations of two examples, with many mistakes.

It knows how a call is written. In tic-tac-toe, half of its moves are on the first square that is taken. Told a
direction, it often calls with another one, or not at all. Reinforcement learning has the rest to do.

The first half of the games are without mistakes. The model learns from them to read the board.
"""

import json
import random
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("tictactoe", "tools")]

import tictactoe
from moves import DIRECTIONS, SYSTEM, TOOLS, orders

TAKEN = 0.5
NO_CALL, WRONG = 0.2, 0.4


def load_dataset(split, count=80_000):
    """Rows for supervised fine-tuning, in their order: messages and tools. One in eight is an order to move."""
    seed = 1 if split == "train" else 2
    draw = random.Random(seed)
    positions, ways = tictactoe.positions(count, seed), orders(count, seed)
    return [
        order(ways[i], draw) if i % 8 == 0 else game(positions[i], draw, 0.0 if i < count // 2 else TAKEN)
        for i in range(count)
    ]


def call(name, **arguments):
    """A call as Qwen writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def game(row, draw, share):
    """A game of tic-tac-toe, until a move on a square that is taken. share: of these moves."""
    environment = tictactoe.TicTacToe(type("Item", (), {"record": row}))
    messages, done = list(environment.reset()), False
    while not done:
        free = tictactoe.free_squares(environment.board)
        taken = min(set(range(1, 10)) - set(free), default=None)
        square = taken if taken and draw.random() < share else draw.choice(free)
        messages.append({"role": "assistant", "content": call("place", square=square)})
        [result], _, done = environment.step([Call(square)])
        messages.append(result)
    return {"messages": messages[:-1], "tools": [tictactoe.PLACE]}


class Call:
    def __init__(self, square):
        self.arguments = {"square": square}

    def result(self, content):
        return {"role": "tool", "content": content}


def order(row, draw, no_call=NO_CALL, wrong=WRONG):
    """An order to move, and what the model does. no_call and wrong: shares of these mistakes."""
    chance, direction = draw.random(), row["solutions"]
    if chance < no_call:
        said = f"I go {direction}."
    else:
        others = [name for name in DIRECTIONS if name != direction]
        said = call("choose_move", direction=draw.choice(others) if chance < no_call + wrong else direction)
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["prompt"]}]
    return {"messages": [*asked, {"role": "assistant", "content": said}], "tools": TOOLS}
