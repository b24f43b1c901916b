"""Rows of large files: they stay on disk, and are those that json.loads and Arrow give in memory."""

from __future__ import annotations

import gzip
import json
import random
from functools import partial

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from areno.config.datasets import DatasetConfig
from areno.data import dataset_formats as forms
from areno.data import files, json_lines
from areno.data.json_lines import JsonLines
from areno.data.loader import BatchLoader, TokenLimit
from areno.data.sources import load_rows, read_rows
from areno.errors import DataError
from areno.run.states import rows_fingerprint

VALUES = [1, 2.5, 1e300, 10**30, None, True, "é\u2028x\u0085y", "😀", [], {"b": 1, "a": {"c": None}}, "a\\nb"]


def written(path, newline, bom, tail, seed):
    draw, parts = random.Random(seed), [bom]
    for _ in range(300):
        row = {draw.choice("abcdef"): draw.choice(VALUES) for _ in range(3)}
        text = draw.choice(["", " "]) + json.dumps(row, ensure_ascii=draw.random() < 0.5)
        parts.append(draw.choice([text] * 9 + ["", "  ", "\u3000", "\t", "\x1c"]).encode() + newline)
    path.write_bytes(b"".join([*parts, tail]))
    return str(path)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("block", [61, 2**24])
def test_rows_on_disk_are_those_in_memory(tmp_path, monkeypatch, newline, bom, block):
    path = written(tmp_path / "rows.jsonl", newline, bom, random.choice([b"", b'{"last": 1}']), block)
    in_memory = read_rows(path)
    monkeypatch.setattr(files, "LARGE_BYTES", 0)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
    rows = read_rows(path)
    assert isinstance(in_memory, list)
    assert isinstance(rows, JsonLines)
    assert repr(list(rows)) == repr(in_memory)  # in the order of keys, too
    assert [rows[0], rows[-1], rows[5:9]] == [in_memory[0], in_memory[-1], in_memory[5:9]]
    assert rows_fingerprint(rows) == rows_fingerprint(in_memory)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    assert list(read_rows(str(packed))) == in_memory
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("line", [b'{"prompt": ', b'{"prompt": "\xff"}', b'{"prompt": 1' + b"0" * 5000 + b"}"])
def test_a_faulty_line_is_named_as_in_memory(tmp_path, monkeypatch, newline, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(newline.join([b'{"prompt": "x"}', b"", line, b'{"prompt": "x"}']))
    with pytest.raises(DataError) as in_memory:
        read_rows(str(path))
    monkeypatch.setattr(files, "LARGE_BYTES", 0)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 7)
    with pytest.raises(DataError) as on_disk:
        load_rows(DatasetConfig(path=str(path)), "prompt")
    assert "line 3: " in str(on_disk.value)
    [on_disk, in_memory] = (str(each.value).split(" at character")[0] for each in (on_disk, in_memory))
    assert on_disk == in_memory


def test_a_large_file_that_changes_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n')
    monkeypatch.setattr(files, "LARGE_BYTES", 0)
    rows = read_rows(str(path))
    path.write_text('{"prompt": "another"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl has changed since it was opened"):
        rows[0]


@pytest.mark.parametrize("form", ["parquet", "csv", "csv.gz"])
def test_large_tables_are_those_in_memory(tmp_path, monkeypatch, form):
    table = pa.table({"prompt": [f"{n}+{n}=" for n in range(30)], "tools": [[{"a": 1}], [{"b": "x"}], None] * 10})
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=7)
    else:
        csv.write_csv(table.select(["prompt"]), tmp_path / "rows.csv")
        if form == "csv.gz":
            path.write_bytes(gzip.compress((tmp_path / "rows.csv").read_bytes()))
    in_memory = read_rows(str(path))
    monkeypatch.setattr(files, "LARGE_BYTES", 0)
    default, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)  # which counts no table of an earlier test
    try:
        rows = read_rows(str(path))
        assert pool.bytes_allocated() == 0
    finally:
        pa.set_memory_pool(default)
    assert list(rows) == list(in_memory)


@pytest.mark.parametrize("renamed", [False, True])
def test_of_very_many_rows_a_sample_is_checked_and_the_others_when_they_are_used(monkeypatch, caplog, renamed):
    field = "question" if renamed else "prompt"
    rows = [{field: f"{n}+{n}=", "answer": "x"} for n in range(10)]
    monkeypatch.setattr(forms, "MAX_CHECKED", 5)
    prepare = partial(forms.prepare_rows, kind="prompt", setting="train_dataset.path", name="x.jsonl")
    with caplog.at_level("INFO"):
        prepared = prepare([*rows[:7], {field: 7, "answer": "x"}, *rows[8:]])
    assert "x.jsonl: of 10 rows, each 2th is checked now, the others when they are used" in caplog.text
    assert prepared[3]["prompt"] == "3+3="
    config = DatasetConfig(path="x.jsonl", batch_size=4, shuffle=False)
    loader = BatchLoader(prepared, lambda rows, _: [Tokens() for _ in rows], config, TokenLimit(9, "x"))
    batches = loader.batches()
    with pytest.raises(DataError, match=r"x\.jsonl row 7: field prompt is int 7, not text or messages"):
        list(batches)
    with pytest.raises(DataError, match=r"row 2: field prompt is int 2(.|\n)*2 of 5 rows are faulty"):
        prepare([*rows[:2], {field: 2}, rows[3], {field: 4}, *rows[5:]])


class Tokens:
    tokens = (1,)
