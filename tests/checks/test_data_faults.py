"""Faults of data, templates and masks, each planted from here and found by its name; nothing is red in its twin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.checks.data.prompts import other_prompt
from areno.data import loader, row_rendering, trained_turns
from areno.run import open_rows
from tests.helpers.checked import data_file, failed, findings, red
from tests.helpers.checked_rows import PAIRS, QUESTIONS, REASONED, TALKS, chat_model, dpo, gspo, sft
from tests.helpers.tokenizers import load_tokenizer, trl_templates


@pytest.mark.parametrize("run", [lambda folder: sft(folder), lambda folder: dpo(folder, PAIRS), gspo])
def test_clean_data_is_green(run: Callable[[Path], list[Any]], tmp_path: Path) -> None:
    found = run(tmp_path)
    assert not red(found), [finding for finding in found if finding.verdict == "red"]
    assert not failed(found)


# -- the mask -----


def change_sequences(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Let `change` edit every training sequence that is made of a row."""
    render = row_rendering.render_sequence

    def changed(*arguments: Any, **how: Any) -> Any:
        draft = render(*arguments, **how)

        def finish(tokens: list[list[int]]) -> Any:
            sequence = draft.finish(tokens)
            change(sequence)
            return sequence

        return dataclasses.replace(draft, finish=finish)

    patch.setattr(row_rendering, "render_sequence", changed)


def shift_right(sequence: Any) -> None:
    sequence.prompt_mask = np.roll(sequence.prompt_mask, 1)


def shift_left(sequence: Any) -> None:
    sequence.prompt_mask = np.roll(sequence.prompt_mask, -1)


def without_ends(sequence: Any) -> None:
    last = np.flatnonzero(np.diff(~sequence.prompt_mask, append=False) & ~sequence.prompt_mask)
    sequence.prompt_mask[last] = True


def from_first_answer_on(sequence: Any) -> None:
    sequence.prompt_mask[int(np.argmin(sequence.prompt_mask)) :] = False


def whole_rows(sequence: Any) -> None:
    sequence.prompt_mask[:] = False


def padded(sequence: Any) -> None:
    sequence.tokens = np.concatenate([sequence.tokens, [382] * 4])
    sequence.prompt_mask = np.concatenate([sequence.prompt_mask, [False] * 4])


def without_first_words(sequence: Any) -> None:
    sequence.prompt_mask[int(np.argmin(sequence.prompt_mask)) :][:6] = True


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (shift_right, "answers"),
        (shift_left, "turn-end"),
        (without_ends, "turn-end"),
        (from_first_answer_on, "only-answers"),
        (whole_rows, "only-answers"),
        (padded, "padding"),
        (without_first_words, "reasoning"),
    ],
)
def test_a_wrong_mask_is_found(
    change: Callable[[Any], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_sequences(monkeypatch, change)
    assert name in red(sft(tmp_path))


def test_turns_of_weight_0_that_are_trained_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(json.dumps(REASONED))
    for number, row in enumerate(rows):
        row["messages"][1] |= {"content": "I cannot help with that.", "weight": 0}
        row["messages"][3]["content"] = f"You are welcome, number {number}."
    assert not red(sft(tmp_path / "twin", rows=rows))
    monkeypatch.setattr(trained_turns, "is_trained", lambda message: message["role"] == "assistant")
    assert red(sft(tmp_path / "faulty", rows=rows)) == {"only-answers"}


def test_labels_beyond_the_context_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chat_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    make = open_rows.row_loader
    monkeypatch.setattr(open_rows, "row_loader", lambda *args, **how: make(*args[:4], **how))
    assert "context" in red(sft(tmp_path, model=model))


def test_swapped_answers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]
    by_file = [{**row, "score_chosen": 2, "score_rejected": 8.5} for row in swapped]
    assert red(dpo(tmp_path / "file", by_file)) == {"pair-scores"}
    some = [*PAIRS[:30], *({k: v for k, v in row.items() if "score" not in k} for row in swapped[:3])]
    assert red(dpo(tmp_path / "some", some)) == {"pair-scores"}
    render = row_rendering.render_pair

    def other_way(tokenizer: Any, row: Any, index: int) -> Any:
        return render(tokenizer, {**row, "chosen": row["rejected"], "rejected": row["chosen"]}, index)

    monkeypatch.setattr(loader, "render_pair", other_way)
    assert red(dpo(tmp_path / "code", PAIRS)) == {"answer-order"}


def test_answers_that_repeat_the_prompt_are_found(tmp_path: Path) -> None:
    with_prompt = [
        {**row, **{name: f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[name]}" for name in ("chosen", "rejected")}}
        for row in PAIRS
    ]
    assert "repeated-prompts" in red(dpo(tmp_path / "pairs", with_prompt))
    asked = "What is the sum of these numbers?"
    answers = [f"{asked} It is {n}." for n in range(10)] + [f"It is {n}, the sum of these numbers." for n in range(90)]
    rows = [{"prompt": asked, "response": answer} for answer in answers]
    assert not red(sft(tmp_path / "twin", rows=rows))
    assert red(sft(tmp_path / "answers", rows=2 * rows[:20])) == {"repeated-prompts"}


def test_answers_swapped_by_settings_are_found(tmp_path: Path) -> None:
    def columns(chosen: str, rejected: str) -> tuple[str, ...]:
        return f"train_dataset.columns.chosen={chosen}", f"train_dataset.columns.rejected={rejected}"

    assert red(dpo(tmp_path / "swapped", PAIRS, *columns("rejected", "chosen"))) == {"pair-scores"}
    better = {"chosen": "good", "rejected": "bad", "score_chosen": "good_score", "score_rejected": "bad_score"}
    named = [{better.get(name, name): value for name, value in row.items()} for row in PAIRS]
    twin = dpo(tmp_path / "twin", named, *columns("good", "bad"))
    assert not red(twin)
    assert "pair-scores" in {each.name for each in twin if each.verdict == "green"}


# -- templates -----


def test_a_template_without_generation_prompt_is_found(tmp_path: Path) -> None:
    model = chat_model(tmp_path, ("{{- '<|im_start|>assistant\\n' -}}", ""))
    found = gspo(tmp_path, model=model)
    assert "prompt-end" in red(found)
    line = next(each.line for each in found if each.name == "prompt-end")
    assert "writes '<|im_start|>assistant" in line
    assert "add_generation_prompt" in line


@pytest.mark.parametrize("thinking", ["null", "false"])
def test_a_generation_prompt_unlike_the_conversation_is_found(thinking: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, ("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>assistant' -}}"))
    found = gspo(tmp_path, f"rollout.enable_thinking={thinking}", model=model)
    assert "prompt-end" in red(found)
    assert "'<|im_start|>assistant" in next(each.line for each in found if each.name == "prompt-end")


@pytest.mark.parametrize("name", ["qwen3", "minimind", "tiny"])
def test_modes_of_thinking_agree_with_the_conversation(name: str) -> None:
    tokenizer = load_tokenizer(name)
    asked = [{"role": "user", "content": "?"}]
    for template in (tokenizer.chat_template, *trl_templates().values()):
        tokenizer.chat_template = template
        for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            assert other_prompt(tokenizer, asked, None, thinking) is None


def test_prompts_that_end_before_the_assistant_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = row_rendering.render_generation_prompt
    monkeypatch.setattr(
        row_rendering,
        "render_generation_prompt",
        lambda *args: render(*args).removesuffix("<|im_start|>assistant\n"),
    )
    assert {"prompt-end", "serving"} <= red(gspo(tmp_path))


def test_another_thinking_mode_than_in_serving_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    render = row_rendering.render_generation_prompt

    def without_mode(tokenizer: Any, prompt: Any, thinking: Any, tools: Any) -> str:
        return render(tokenizer, prompt, None, tools)

    monkeypatch.setattr(row_rendering, "render_generation_prompt", without_mode)
    assert "serving" in red(gspo(tmp_path, "rollout.enable_thinking=false"))
    monkeypatch.undo()
    assert not red(gspo(tmp_path / "twin", "rollout.enable_thinking=false"))


def test_dropped_reasoning_is_found(tmp_path: Path) -> None:
    assert not red(sft(tmp_path / "twin", rows=REASONED))
    assert "reasoning" in red(sft(tmp_path, "train_dataset.changed_turns=as_rendered", rows=REASONED))


# -- rows -----


def test_validation_rows_in_the_training_data_are_found(tmp_path: Path) -> None:
    valid = data_file(tmp_path / "valid.jsonl", [QUESTIONS[3], {"prompt": "What else?", "solutions": "1"}])
    found = gspo(tmp_path, valid=f"{{path: {valid}}}")
    assert red(found) == {"validation-rows"}
    assert "1 of 2 rows" in next(each.line for each in found if each.name == "validation-rows")


def test_a_task_of_few_rows_may_repeat_them_in_validation(tmp_path: Path) -> None:
    valid = data_file(tmp_path / "valid.jsonl", QUESTIONS[:3])
    train = data_file(tmp_path / "train.jsonl", QUESTIONS[:3] * 20)
    found = gspo(tmp_path, f"train_dataset.path={train}", valid=f"{{path: {valid}}}")
    assert [each.verdict for each in found if each.name == "validation-rows"] == ["not checked"]


def test_rows_that_are_mostly_left_out_are_found(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no " * 400}]}
    settings = ("train_dataset.max_length=300", "train_dataset.batch_size=4")
    assert red(sft(tmp_path, *settings, rows=[*TALKS[:20], *[long] * 30])) == {"dropped-rows"}


def test_shifted_labels_of_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    render = loader.render_steps

    def shifted(tokenizer: Any, row: Any, index: int, separator: str) -> Any:
        labels = row["labels"]
        return render(tokenizer, {**row, "labels": [*labels[1:], 1 - labels[-1]]}, index, separator)

    assert not red(findings("prm quickstart_prm"))
    monkeypatch.setattr(loader, "render_steps", shifted)
    assert red(findings("prm quickstart_prm")) == {"step-labels"}
