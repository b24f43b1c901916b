"""Data of other tools trains as it is: its form is read from its columns, and real files of each form are read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from areno.config.datasets import ColumnsConfig, DatasetConfig
from areno.data.dataset_formats import prepare_rows, recognise_format
from areno.data.sources import load_rows, prepare_script_rows
from areno.errors import ConfigError, DataError
from tests.helpers.encoded_rows import prompt_item, sft_item, sft_sequence
from tests.helpers.row_loaders import row_loader
from tests.helpers.tokenizers import plain_values

SHARED = Path(__file__).parents[3] / "shared/data"
TURNS = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALL = {"name": "add", "arguments": {"a": 2}}


def real(name: str) -> str:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"there is no {path}")
    return str(path)


@pytest.mark.parametrize(
    ("kind", "row", "form", "expected"),
    [
        ("prompt", {"question": "2+2?", "answer": "4"}, "questions", {"prompt": "2+2?", "solutions": "4"}),
        ("prompt", {"problem": "x", "solution": "long", "answer": "4"}, "questions", {"solutions": "4"}),
        ("prompt", {"prompt": "2+2?", "answer": "4"}, "questions", {"prompt": "2+2?", "solutions": "4"}),
        (
            "prompt",
            {"instruction": "Add.", "input": "2, 2", "output": "4"},
            "alpaca",
            {"prompt": "Add.\n2, 2", "solutions": "4"},
        ),
        ("prompt", {"messages": MESSAGES}, "conversation", {"prompt": MESSAGES[:1], "solutions": "4"}),
        ("prompt", {"messages": MESSAGES[:1]}, "conversation", {"prompt": MESSAGES[:1]}),
        ("prompt", {"conversations": TURNS}, "sharegpt", {"prompt": MESSAGES[:1], "solutions": "4"}),
        (
            "prompt",
            {"prompt": MESSAGES[:1], "reward_model": {"ground_truth": "4", "style": "rule"}},
            "verl",
            {"solutions": "4"},
        ),
        ("sft", {"prompt": "2+2?", "completion": "4"}, "completion", {"response": "4"}),
        ("sft", {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, "completion", {"messages": MESSAGES}),
        ("sft", {"instruction": "Add.", "input": "", "output": "4"}, "alpaca", {"prompt": "Add.", "response": "4"}),
        (
            "sft",
            {"instruction": "And 1?", "output": "5", "system": "Add.", "history": [["2+2?", "4"]]},
            "alpaca",
            {
                "prompt": [{"role": "system", "content": "Add."}, *MESSAGES, {"role": "user", "content": "And 1?"}],
                "response": "5",
            },
        ),
        (
            "sft",
            {"conversations": TURNS, "system": "Be brief."},
            "sharegpt",
            {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]},
        ),
        (
            "sft",
            {
                "conversations": [
                    TURNS[0],
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "4"},
                    TURNS[1],
                ]
            },
            "sharegpt",
            {
                "messages": [
                    MESSAGES[0],
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
                    {"role": "tool", "content": "4"},
                    MESSAGES[1],
                ]
            },
        ),
        (
            "dpo",
            {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "5"}},
            "sharegpt",
            {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": [{"role": "assistant", "content": "5"}]},
        ),
        ("dpo", {"question": "2+2?", "chosen": "4", "rejected": "5"}, "questions", {"prompt": "2+2?"}),
        (
            "prm",
            {
                "input": "Add 3 to 2 + 2? Step 1: 2+2=4 ки\nStep 2: 4+3=8 ки\nStep 3: The answer is: 8 ки",
                "label": "Add 3 to 2 + 2? Step 1: 2+2=4 +\nStep 2: 4+3=8 -\nStep 3: The answer is: 8 -",
                "task": "GSM8K",
            },
            "math-shepherd",
            {
                "prompt": "Add 3 to 2 + 2?",
                "completions": ["Step 1: 2+2=4", "Step 2: 4+3=8", "Step 3: The answer is: 8"],
                "labels": [True, False, False],
            },
        ),
    ],
)
def test_forms(kind, row, form, expected, caplog):
    caplog.set_level(logging.INFO, "areno")
    found = recognise_format([row], kind)
    assert found
    assert found.name == form
    [got] = [prepare_script_rows([row], kind)[0]]
    assert {name: got[name] for name in expected} == expected
    assert row.items() <= {**got, **{name: row[name] for name in expected if name in row}}.items()
    assert f"of the form {form}: {found.description}" in caplog.text


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("prompt", {"prompt": "x", "solutions": "4", "answer": "5"}),
        ("prompt", {"prompt": "x"}),
        ("sft", {"messages": MESSAGES, "conversations": TURNS}),
        ("sft", {"prompt": "x", "response": "y", "completion": "z"}),
        ("dpo", {"prompt": "x", "chosen": "4", "rejected": "5"}),
        ("dpo", {"chosen": MESSAGES, "rejected": MESSAGES}),
    ],
)
def test_our_own_form_is_left_alone(kind, row):
    assert recognise_format([row], kind) is None


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [
        ("sft", "instruct/alpaca_en_demo.json", 999),
        ("prompt", "instruct/alpaca_en_demo.json", 999),
        ("dpo", "preference/dpo_en_demo.json", 300),
        ("sft", "toolcall/glaive_toolcall_en_demo.json", 300),
        ("prompt", "gsm8k/test.jsonl", 1319),
        ("prompt", "math/math500.jsonl", 500),
        ("prompt", "math/aime24.jsonl", 30),
        ("prompt", "models/verl-arithmetic-sequence/train.parquet", 800),
    ],
)
def test_real_files(kind, name, count):
    rows = load_rows(DatasetConfig(path=real(name)), kind)
    assert len(rows) == count


def test_real_tool_calls_are_rendered(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    rows = load_rows(DatasetConfig(path=real("toolcall/glaive_toolcall_en_demo.json")), "sft")
    row = next(row for row in rows if any("tool_calls" in message for message in row["messages"]))
    sequences = sft_item(tokenizer, row).rows
    trained = [t for each in sequences for t, masked in zip(each.tokens, each.prompt_mask, strict=True) if not masked]
    call = next(m for m in row["messages"] if "tool_calls" in m)["tool_calls"][0]["function"]
    assert "<tool_call>" in tokenizer.decode(trained)
    assert call["name"] in tokenizer.decode(trained)
    assert "<tool_response>" in tokenizer.decode(sequences[-1].tokens)
    assert "<tool_response>" not in tokenizer.decode(trained)


def test_columns(tmp_path):
    path = tmp_path / "sums.csv"
    path.write_text("task,result,question\n1+1=,2,no\n3+4=,7,no\n")
    config = DatasetConfig(path=str(path), columns=ColumnsConfig(prompt="task", solutions="result"))
    rows = load_rows(config, "prompt")
    assert [(rows[n]["prompt"], rows[n]["solutions"], rows[n]["question"]) for n in range(2)] == [
        ("1+1=", "2", "no"),
        ("3+4=", "7", "no"),
    ]


def test_columns_that_cannot_be(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "x"}\n')
    wrong = DatasetConfig(path=str(path), columns=ColumnsConfig(prompt="task", solutions="question"))
    with pytest.raises(DataError, match=r"^train_dataset.columns: .*there is no column 'task'; the data has question"):
        load_rows(wrong, "prompt")
    of_pairs = DatasetConfig(path=str(path), columns=ColumnsConfig(prompt="question", chosen="a"))
    expected = (
        r"train_dataset.columns.chosen: is set, but the rows of this training have the fields prompt, solutions, tools"
    )
    with pytest.raises(ConfigError, match=expected):
        load_rows(of_pairs, "prompt")
    with pytest.raises(
        ConfigError,
        match=r"columns\.prompt: is .*, but loader is l\.py, so its rows are taken as they are; set loader to null",
    ):
        DatasetConfig(path=str(path), loader="l.py", columns=ColumnsConfig(prompt="question"))


@pytest.mark.parametrize(
    ("kind", "row", "named"),
    [
        ("prompt", {"prompts": "a", "anwser": 1}, ["prompt=prompts", "solutions=anwser"]),
        ("prompt", {"dialogue": [], "Dialog": [{"role": "user", "content": "a"}]}, ["prompt=Dialog"]),
        ("sft", {"conversation": [{"role": "user", "content": "a"}], "functions": "[]"}, ["messages=conversation"]),
        ("dpo", {"promt": "a", "choosen": "b", "rejected": "c"}, ["prompt=promt", "chosen=choosen"]),
        ("prompt", {"text": "a", "prompt_id": "b"}, ["prompt=COLUMN"]),
    ],
)
def test_columns_that_look_like_a_missing_field_are_named(kind, row, named):
    with pytest.raises(DataError) as error:
        prepare_rows([row], kind, "train_dataset.path", "rows.jsonl", key="train_dataset")
    for each in named:
        assert f"train_dataset.columns.{each}" in str(error.value)


def test_all_faulty_rows_are_reported(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "" if n % 3 == 0 else "x"}) + "\n" for n in range(30)))
    with pytest.raises(DataError) as caught:
        load_rows(DatasetConfig(path=str(path)), "prompt")
    lines = str(caught.value).splitlines()[1:]
    assert [line.split("row ")[1].split(":")[0] for line in lines[:5]] == ["0", "3", "6", "9", "12"]
    assert lines[5].endswith("10 of 30 rows are faulty; the first 5 are above")
    path.write_text('{"prompt": "x"}\n' + "{x\n" * 7)
    with pytest.raises(DataError, match=r"line 2: not JSON: .*; line 6: .*; and 2 more lines$"):
        load_rows(DatasetConfig(path=str(path)), "prompt")


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("sft", {"conversations": "x"}, "conversations is str 'x', not a list"),
        ("sft", {"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\] is dict .*, not a turn"),
        (
            "sft",
            {"conversations": [{"from": "function_call", "value": "{x"}]},
            r"conversations\[0\] is a tool call, but not JSON",
        ),
        (
            "sft",
            {"conversations": [{"from": "function_call", "value": "3"}]},
            r"conversations\[0\] is str '3', not a tool call",
        ),
        ("sft", {"instruction": 3, "output": "x"}, "instruction is int 3, not text"),
        ("sft", {"prompt": "x", "completion": 3}, "completion is int 3, not a list"),
        (
            "sft",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"content\[0\] is dict .*, not a part",
        ),
        (
            "prm",
            {"input": "x Step 1: 4 ки", "label": True},
            "field label is bool True and field input str .*, not text",
        ),
        ("prm", {"input": "x Step 1: 4", "label": "x Step 1: 4"}, "field label is not the text of field input"),
        ("prm", {"input": "x Step 1: 4 ки", "label": "x Step 1: 4 *"}, "field label is not the text of field input"),
        ("prm", {"input": "x Step 1: 4 ки", "label": "x Step 1: 4 +-"}, "field label is not the text of field input"),
        ("prm", {"input": "x 4 ки", "label": "x 4 +"}, "field input has no 'Step 1:', at which the question ends"),
    ],
)
def test_rows_that_are_not_of_their_form(kind, row, message):
    with pytest.raises(DataError, match=message):
        prepare_script_rows([row], kind)


def test_parts_of_a_content_are_joined(chatml):
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    question = [{"role": "user", "content": parts}]
    in_lines = [{**MESSAGES[0], "content": "2+\n2?"}, MESSAGES[1]]
    item, plain = (prompt_item(chatml, {"prompt": prompt}, 0) for prompt in (question, in_lines[:1]))
    assert item == prompt_item(chatml, {"prompt": question}, 0)
    assert (item.text, item.tokens, item.messages) == (plain.text, plain.tokens, plain.messages)
    answer = [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    parted, whole = (sft_sequence(chatml, {"messages": each}) for each in ([*question, *answer], in_lines))
    assert plain_values(parted) == plain_values(whole)


def test_rows_of_a_script_reach_the_reward_with_all_fields(plain):
    rows = prepare_script_rows([{"question": "12", "answer": "3", "level": 5}], "prompt")
    loader = row_loader("prompt", rows, plain, DatasetConfig(batch_size=1))
    [item] = next(loader.batches()).items
    assert (item.prompt, item.solutions, item.record["level"]) == ("12", "3", 5)
