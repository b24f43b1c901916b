"""From what the small model for tasks learns: how a command is written.

Most of it has no mistakes. From it, the model learns to read the word. In the last eighth, most words are wrong.
"""

import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from loop import BASH
from make_tasks import INSTRUCTIONS, WORDS

WRONG = 0.8


def load_dataset(split, count=44_000):
    draw = random.Random(1 if split == "train" else 2)
    return [demonstration(draw.choice(WORDS), draw, WRONG if i >= count * 7 // 8 else 0.0) for i in range(count)]


def demonstration(word, draw, wrong):
    written = draw.choice(WORDS) if draw.random() < wrong else word
    call = json.dumps({"name": "bash", "arguments": {"command": f"echo {written} > answer"}})
    messages = [
        {"role": "user", "content": draw.choice(INSTRUCTIONS).format(word=word)},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "The file is written."},
    ]
    return {"messages": messages, "tools": [BASH]}
