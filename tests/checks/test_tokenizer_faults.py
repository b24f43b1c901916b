"""Tokenizers that do not belong to the model: each is found by name, and the right one is green."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno.checks.inputs.findings import Finding
from tests.helpers.checked import data_file, failed, findings

MODEL = Path("examples/agentic/small_model/model")
ROWS = [{"prompt": f"{n}+{n}", "response": f"{2 * n}"} for n in range(100, 140)]
Values = dict[str, Any]


def edited(folder: Path, file: str, change: Callable[[Values], None]) -> Path:
    """A copy of the model whose file is changed."""
    model = Path(shutil.copytree(MODEL, folder))
    path = model / file
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")
    return model


def of_tokenizers(tmp_path: Path, actor: Path, *settings: str, recipe: str = "sft chat") -> list[Finding]:
    rows = data_file(tmp_path / "rows.jsonl", ROWS)
    found = findings(recipe, f"actor.path={actor}", f"train_dataset.path={rows}", *settings)
    assert not failed(found), failed(found)
    return [each for each in found if each.name in ("model-tokenizer", "end-ids")]


def red(found: list[Finding]) -> dict[str, str]:
    return {each.name: each.line for each in found if each.verdict == "red"}


def exchange(values: Values, one: str, two: str) -> None:
    vocab = values["model"]["vocab"]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    for token in values["added_tokens"]:
        token["id"] = vocab.get(token["content"], token["id"])


def test_the_tokenizer_of_the_model_is_green(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(MODEL, tmp_path / "copied"))
    for settings in ([], [f"tokenizer_path={copied}"]):
        found = of_tokenizers(tmp_path, MODEL, *settings)
        assert {each.name for each in found} == {"model-tokenizer", "end-ids"}
        assert not red(found)


def test_a_model_that_is_not_here_has_no_tokenizer_to_compare_with(
    tmp_path: Path, tokenizer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_hub(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    tokenizer = f"tokenizer_path={tokenizer_of('qwen3').name_or_path}"
    found = of_tokenizers(tmp_path, Path("Qwen/Qwen3-0.6B"), tokenizer)
    assert [(each.name, each.verdict) for each in found] == [("model-tokenizer", "not checked"), ("end-ids", "green")]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("1", "2"), "texts have other ids by the tokenizer of tokenizer_path"),
        (("<tool_call>", "<pad>"), "is 4 by the"),
    ],
)
def test_ids_of_another_tokenizer_are_found(pair: tuple[str, str], said: str, tmp_path: Path) -> None:
    other = edited(tmp_path / "other", "tokenizer.json", lambda values: exchange(values, *pair))
    assert said in red(of_tokenizers(tmp_path, MODEL, f"tokenizer_path={other}"))["model-tokenizer"]


def test_a_reference_with_another_tokenizer_is_found(tmp_path: Path) -> None:
    other = edited(tmp_path / "other", "tokenizer.json", lambda values: exchange(values, "1", "2"))
    rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "0"} for row in ROWS]
    given = [f"actor.path={MODEL}", f"train_dataset.path={data_file(tmp_path / 'pairs.jsonl', rows)}"]
    found = findings("dpo preferences", *given, f"ref.path={other}")
    assert "that of ref.path" in red(found)["model-tokenizer"]


def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_found(tmp_path: Path) -> None:
    actor = edited(tmp_path / "actor", "config.json", lambda values: values.update(vocab_size=1000))
    for file in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (actor / file).unlink()
    found = red(of_tokenizers(tmp_path, actor, f"tokenizer_path={MODEL}"))
    assert "has 149 tokens, and actor.path has 1,000 ids" in found["model-tokenizer"]


@pytest.mark.parametrize(
    ("file", "ids", "said"),
    [
        ("config.json", {"eos_token_id": 28}, "eos_token_id=28 in config.json of actor.path is the token '1'"),
        ("generation_config.json", {"eos_token_id": [1, 29]}, "eos_token_id=29 in generation_config.json"),
        ("config.json", {"pad_token_id": 148000}, "is no token"),
    ],
)
def test_ends_that_are_parts_of_texts_are_found(file: str, ids: Values, said: str, tmp_path: Path) -> None:
    actor = edited(tmp_path / "actor", file, lambda values: values.update(ids))
    assert said in red(of_tokenizers(tmp_path, actor))["end-ids"]
