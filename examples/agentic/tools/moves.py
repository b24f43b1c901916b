"""Orders to move in a direction, in other words each time, and the tool that obeys them."""

import random

DIRECTIONS = ("up", "down", "left", "right")
ORDERS = ("Move {}.", "Go {}, please.", "Take one step {}.", "The exit is {} of you.", "I would like you to go {}.")
SYSTEM = "Call choose_move with the selected direction."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "choose_move",
            "description": "Move one step",
            "parameters": {
                "type": "object",
                "properties": {"direction": {"type": "string", "enum": list(DIRECTIONS)}},
                "required": ["direction"],
            },
        },
    }
]


def orders(count, seed):
    """Rows {prompt, solutions: the direction}."""
    draw = random.Random(seed)
    directions = [draw.choice(DIRECTIONS) for _ in range(count)]
    return [{"prompt": draw.choice(ORDERS).format(direction), "solutions": direction} for direction in directions]
