"""Text that cannot be: half of a surrogate pair, which no tokenizer and no file takes, and a path that is empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno import SamplingParams, Trainer
from areno.config.datasets import DatasetConfig
from areno.data.row_schema import RowKind
from areno.data.sources import load_rows
from areno.errors import ArenoError, ConfigError, DataError
from tests.helpers.sdk_script import SAMPLING, session


@pytest.mark.parametrize(
    ("kind", "row", "field"),
    [
        ("prompt", {"prompt": "1+\ud800="}, "prompt"),
        ("prompt", {"prompt": [{"role": "user", "content": "\udc00"}]}, "prompt"),
        ("prompt", {"prompt": "1+1=", "solutions": ["\udfff"]}, "solutions"),
        ("prompt", {"prompt": "1+1=", "tools": [{"name": "\ud800"}]}, "tools"),
        ("sft", {"prompt": "1+1=", "response": "\ud800"}, "response"),
        ("sft", {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "\ud800"}]}]}, "messages"),
        ("dpo", {"prompt": "1+1=", "chosen": "2", "rejected": "\ud800"}, "rejected"),
    ],
)
def test_a_row(tmp_path: Path, kind: RowKind, row: dict[str, Any], field: str) -> None:
    fine = {"prompt": "\ud83d\ude00\0", "response": "2", "chosen": "2", "rejected": "3"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (fine, row)))
    with pytest.raises(DataError, match=rf"rows.jsonl row 1: field {field} holds '\\u\w+' at character \d, half of a"):
        load_rows(DatasetConfig(path=str(path)), kind)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.rollout_batch(["1", "1\ud800"], 1, SAMPLING),
            r"prompts\[1\] holds '.ud800' at character 1, half of",
        ),
        (
            lambda t: t.rollout_batch([[{"role": "user", "content": "\udc00"}]], 1, SAMPLING),
            r"prompts\[0\] holds '.udc00'",
        ),
        (
            lambda t: t.rollout_token_batch([[4]], 1, SamplingParams(stop=["\ud800"])),
            r"SamplingParams.stop: \[0\] holds '.ud800' at character 0, half of a surrogate pair; whole characters are",
        ),
    ],
)
def test_a_call_inside_a_session(trainer: Trainer, call: Callable[[Trainer], Any], message: str) -> None:
    with session(trainer), pytest.raises(ArenoError, match=message):
        call(trainer)


def test_other_calls(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset row 0: field prompt holds"):
        next(trainer.load_prompt_batches([{"prompt": "\ud800"}], batch_size=1, max_prompt_tokens=9))
    for path in ("\ud800", "a\0b", " "):
        with pytest.raises(ConfigError, match=r"path: is .*; the name of a folder is expected"):
            trainer.save_checkpoint(path)
