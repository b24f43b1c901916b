"""The samples of a rollout as a tree for a step record, and back: tokens, versions, rewards, and agents' trajectories.

Dataset rows are not copied into a record. A record has the place and the tokens of each prompt, and the row is read
from the data again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areno.errors import ArenoError
from areno.types import PromptItem, ScoredSample

ItemsAt = Callable[[Sequence[tuple[str, int]]], Sequence[PromptItem]]
"""Reads dataset rows by (source, index)."""


def samples_to_tree(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    """Return {"prompts": ..., "samples": ...}. A sample refers to its prompt by number."""
    prompts: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}  # by identity: the samples of a prompt share its item
    found = []
    for sample in samples:
        item = sample.item
        if id(item) not in numbers:
            numbers[id(item)] = len(prompts)
            # An agent asks with a prompt of its own.
            own = {} if sample.trajectory is None else {"text": item.text}
            prompts.append({"source": item.source, "index": item.index, "tokens": list(item.tokens), **own})
        found.append(
            {
                "prompt": numbers[id(item)],
                "sequence": sample.sequence,
                "completion": sample.completion,
                "outcome": sample.outcome,
                "group": sample.group,
                "trajectory": sample.trajectory,
                "over_budget": sample.over_budget,
            }
        )
    return {"prompts": prompts, "samples": found}


def samples_from_tree(tree: Mapping[str, Any], items_at: ItemsAt) -> list[ScoredSample]:
    """Restore samples. Raises ArenoError if the data has another prompt at the place of a recorded one."""
    prompts = tree["prompts"]
    rows = items_at([(prompt["source"], prompt["index"]) for prompt in prompts])
    if len(rows) != len(prompts):
        raise ArenoError("the data skips {} of the recorded prompts: it has changed", len(prompts) - len(rows))
    items = [_item_of(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
    return [
        ScoredSample(item=items[sample["prompt"]], **{name: sample[name] for name in sample if name != "prompt"})
        for sample in tree["samples"]
    ]


def _item_of(prompt: Mapping[str, Any], row: PromptItem) -> PromptItem:
    if "text" in prompt:
        return replace(row, tokens=prompt["tokens"], text=prompt["text"])
    if list(row.tokens) != prompt["tokens"]:
        where = f"row {row.index}" + (f" of {row.source}" if row.source else "")
        raise ArenoError("{} has another prompt than the one that the run recorded: the data has changed", where)
    return row
