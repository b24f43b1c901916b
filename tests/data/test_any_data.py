"""Whatever bytes lie in a data file, reading ends with rows or with lines that name the file and what is wrong."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.config.datasets import DatasetConfig
from areno.data.dataset_formats import prepare_rows
from areno.data.sources import load_rows
from areno.errors import ArenoError, printable
from tests.helpers.damaged_files import damaged, examples

KINDS = st.sampled_from(["prompt", "sft", "dpo"])
FORMS = [
    ("prompt", "solutions", "tools"),
    ("prompt", "response"),
    ("messages",),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("question", "answer"),
    ("instruction", "input", "output", "history", "system"),
    ("prompt", "completion"),
    ("conversations", "system", "tools"),
    ("conversations", "chosen", "rejected"),
    ("prompt", "reward_model"),
]
DEEP = json.loads("[" * 500 + "]" * 500)
VALUES = st.sampled_from(
    [
        None,
        True,
        3,
        float("nan"),
        "x",
        "",
        "text",
        "user",
        "assistant",
        "human",
        "gpt",
        "function_call",
        "\x1b[2J",
        "\ud800",
        '{"name": "f"}',
        "[" * 200_000,
        "9" * 5000,
        [],
        ["x"],
        [["x", "y"]],
        {},
        {"\n": "x"},
        DEEP,
    ]
)
TURNS = st.fixed_dictionaries({"from": VALUES, "value": VALUES}).map(dict) | st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("role", "content", "tool_calls", "type", "text"), VALUES)
)
FIELD = st.lists(TURNS, min_size=1, max_size=2) | VALUES | TURNS
GOOD = [{"prompt": "What is 1+1?", "solutions": "2", "response": "2"}, {"prompt": 'ä,\n"b"', "response": "c"}]
FILES = {
    "a.json": json.dumps(GOOD).encode(),
    "a.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in GOOD).encode(),
    "a.csv": 'prompt,solutions,response\nWhat is 1+1?,2,2\n"ä,\n""b""",,c\n'.encode(),
    "a.tsv": b"prompt\tresponse\nWhat\t2\n",
}
FILES |= {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in FILES.items()}


def ends_well(name: str, load) -> None:
    """Load rows. Fails for an error that is not of areno, or that is not in printable lines with the file's name."""
    try:
        rows = load()
        assert len([rows[number] for number in range(len(rows))]) > 0
    except ArenoError as error:
        for line in map(str, error.problems):
            assert name in line
            assert printable(line) == line


def read(name: str, data: bytes, kind="prompt") -> None:
    """Read a file of these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(data)
        ends_well(name, lambda: load_rows(DatasetConfig(path=str(file)), kind))


@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name):
    @given(damaged(FILES[name]), KINDS)
    @settings(examples, max_examples=40)
    def run(data: bytes, kind) -> None:
        read(name, data, kind)

    run()


@given(st.sampled_from(sorted(FILES)), st.binary(max_size=40))
@settings(examples, max_examples=100)
def test_any_bytes(name, data):
    read(name, data)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_shape(form):
    @given(st.fixed_dictionaries(dict.fromkeys(form, FIELD)), KINDS)
    @settings(examples, max_examples=150)
    def run(row, kind) -> None:
        ends_well("a.jsonl", lambda: prepare_rows([row], kind, "train_dataset.path", "a.jsonl", key="train_dataset"))

    run()


@given(FIELD)
@settings(examples, max_examples=40)
def test_any_json(value):
    read("a.json", json.dumps(value).encode())
