"""From what the small model for a mixture has learned: careless answers to countdown, arithmetic and tools."""

import random
import runpy
from pathlib import Path

countdown, arithmetic, moves = (
    runpy.run_path(str(Path(__file__).parents[1] / file))
    for file in ("countdown/dataset_loader.py", "arithmetic/dataset_loader.py", "agentic/small_model/demonstrations.py")
)


def load_dataset(split, count=60_000):
    """Rows for supervised fine-tuning: messages and tools. One in five is an order to move, mostly obeyed."""
    draw, n = random.Random(1 if split == "train" else 2), count * 2 // 5
    plain = countdown["demonstrations"](split, n, numbers=3, largest=9, targets=(10, 40), easy=0.3, sight=0.6)
    plain += arithmetic["demonstrations"](split, n, operations=(1, 2), largest=30)
    orders = moves["orders"](count - 2 * n, draw.randrange(2**32))
    return [*map(conversation, plain), *(moves["order"](row, draw, no_call=0.05, wrong=0.15) for row in orders)]


def conversation(row):
    said = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"].strip()}]
    return {"messages": said, "tools": []}
