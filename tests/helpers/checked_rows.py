"""Rows with known faults or none, and what `areno check` finds in runs of the small chat model on them."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from tests.helpers import agent_model
from tests.helpers.checked import data_file, findings

TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {
                "role": "assistant",
                "content": "<think>\nI add.\n</think>\n\n",
                "tool_calls": [{"function": {"name": "add", "arguments": {"text": f"{n}+{n}"}}}],
            },
            {"role": "tool", "content": f"The tool says {2 * n}."},
            {"role": "assistant", "content": f"<think>\nTwice {n} is it.\n</think>\n\nIt is {2 * n}."},
        ]
    }
    for n in range(100, 140)
]
REASONED = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"<think>\nTwice {n} is it.\n</think>\n\nIt is {2 * n}."},
            {"role": "user", "content": "Thank you very much."},
            {"role": "assistant", "content": "You are welcome."},
        ]
    }
    for n in range(100, 140)
]
QUESTIONS = [{"prompt": f"What is {n} plus {n}?", "solutions": str(2 * n)} for n in range(100, 140)]
PAIRS = [
    {
        "prompt": f"What is {n} plus {n}?",
        "chosen": f"It is {2 * n}.",
        "rejected": f"It must be {3 * n}.",
        "score_chosen": 8.5,
        "score_rejected": 2,
    }
    for n in range(100, 140)
]


def sentences(number: int) -> str:
    """Four sentences of words that say nothing, others for each number."""
    drawn = random.Random(number)
    words = ["river", "stone", "lamp", "window", "garden", "cloud", "paper", "bridge", "winter", "silver", "market"]
    return " ".join(" ".join(drawn.choices(words, k=drawn.randrange(5, 12))).capitalize() + "." for _ in range(4))


def chat_model(folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the small chat model whose template is changed: each (text, other text)."""
    model = Path(shutil.copytree(agent_model.model_folder(), folder / "model"))
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    for text, other in changes:
        assert text in template
        template = template.replace(text, other)
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    return model


def sft(folder: Path, *settings: str, rows: list[dict[str, Any]] = TALKS, model: Path | None = None) -> list[Any]:
    folder.mkdir(exist_ok=True)
    path = data_file(folder / "rows.jsonl", rows)
    model = model or chat_model(folder)
    return findings("sft chat", f"actor.path={model}", f"train_dataset.path={path}", *settings)


def dpo(folder: Path, rows: list[dict[str, Any]], *settings: str) -> list[Any]:
    folder.mkdir(exist_ok=True)
    files = [f"actor.path={chat_model(folder)}", f"train_dataset.path={data_file(folder / 'rows.jsonl', rows)}"]
    return findings("dpo preferences", *files, "valid_dataset=null", *settings)


def gspo(folder: Path, *settings: str, model: Path | None = None, valid: str = "null") -> list[Any]:
    folder.mkdir(exist_ok=True)
    path = data_file(folder / "rows.jsonl", QUESTIONS)
    files = [f"actor.path={model or chat_model(folder)}", f"train_dataset.path={path}"]
    return findings("gspo prompts", *files, f"valid_dataset={valid}", "reward.fn=math", *settings)
