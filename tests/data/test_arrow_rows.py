"""Rows from Arrow are those of the same data as JSON lines: the nulls that Arrow adds to objects are left out."""

from __future__ import annotations

import copy
import json

import datasets
import pyarrow.feather
import pytest

from areno.config.datasets import DatasetConfig
from areno.data.arrow_rows import without_nulls
from areno.data.sources import load_rows, prepare_script_rows, read_rows


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": parameters}}}


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


ROWS = [
    {
        "messages": [{"role": "user", "content": "Weather?"}, call("weather", city="Paris")],
        "tools": [tool("weather", city={"type": "string", "enum": ["Paris", None]})],
        "schema": {"type": "object", "required": ["a"]},
        "note": None,
    },
    {
        "messages": [
            {"role": "user", "content": "Sum?", "name": "eve"},
            call("sum", of={"terms": [{"x": 1}, {"y": "two"}]}, digits=3),
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": "3", "reasoning_content": "One and two."},
        ],
        "tools": [tool("sum", digits={"type": "integer", "minimum": 0})],
        "schema": {"type": "string"},
        "note": "kept",
    },
]


@pytest.mark.parametrize("source", ["jsonl", "parquet", "arrow", "saved", "dataset", "formatted", "transformed"])
def test_all_sources_give_the_rows_of_json_lines(tmp_path, source):
    table, path = datasets.Dataset.from_list(ROWS), tmp_path / f"rows.{source}"
    if source == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    elif source == "parquet":
        table.to_parquet(path)
    elif source == "arrow":
        pyarrow.feather.write_feather(table.data.table, path, compression="uncompressed")
    elif source == "saved":
        table.save_to_disk(path)
    if path.exists():
        rows = load_rows(DatasetConfig(path=str(path)), "sft")
        assert list(read_rows(str(path))) == ROWS  # as a loader of the user reads them
    else:
        as_given = {"dataset": table, "formatted": table.with_format("numpy")}
        as_given["transformed"] = table.with_transform(lambda columns: copy.deepcopy(columns))
        rows = prepare_script_rows(as_given[source], "sft")
    assert list(rows) == ROWS
    if source != "jsonl":
        assert rows.__getitems__([1, 0]) == ROWS[::-1]


def test_a_transform_of_the_user_is_applied_and_tables_without_objects_are_unchanged():
    table = datasets.Dataset.from_list(ROWS).with_transform(lambda columns: {"n": [len(x) for x in columns["schema"]]})
    assert without_nulls(table)[0] == {"n": 2}
    assert without_nulls(without_nulls(table))[1] == {"n": 1}
    flat = datasets.Dataset.from_dict({"prompt": ["a", None], "answers": [["x", None], []]})
    assert without_nulls(flat) is flat
    assert without_nulls(ROWS) is ROWS
