"""Files, folders, loaders and hub names to rows."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from areno.config.datasets import DatasetConfig, ValidDatasetConfig
from areno.data.sources import load_rows, read_rows
from areno.errors import ConfigError, DataError
from areno.files.user_code import load_function

ROWS = [{"prompt": f"What is {n}+{n}?", "solutions": str(2 * n), "level": n} for n in range(5)]
GOOD = '{"prompt": "x"}\n'


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


# Sources -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "data.json", "split.json", "lines.json", "jsonl", "parquet", "csv", "tsv"])
def test_file_formats(tmp_path, form):
    path = tmp_path / f"rows.{form}"
    if form == "json":
        path.write_text(json.dumps(ROWS))
    elif form == "data.json":
        path.write_text(json.dumps({"version": 1, "data": ROWS}))
    elif form == "split.json":
        path.write_text(json.dumps({"train": ROWS, "test": ROWS[:1]}))
    elif form in ("lines.json", "jsonl"):
        path.write_text("\ufeff" + "\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    else:
        import pandas

        frame = pandas.DataFrame(ROWS)
        if form == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, sep="\t" if form == "tsv" else ",", index=False)
    rows = load_rows(DatasetConfig(path=str(path)), "prompt")
    assert len(rows) == 5
    assert rows[3]["prompt"] == "What is 3+3?"
    assert int(rows[3]["solutions"]) == 6
    is_text = form in ("csv", "tsv")
    assert [row["level"] for row in rows] == [str(level) if is_text else level for level in range(5)]
    in_capitals = tmp_path / f"ROWS.{form.upper()}"
    path.rename(in_capitals)
    assert list(read_rows(str(in_capitals))) == list(rows)
    if form != "parquet":
        packed = tmp_path / f"rows.{form}.gz"
        packed.write_bytes(gzip.compress(in_capitals.read_bytes()))
        assert list(load_rows(DatasetConfig(path=str(packed)), "prompt")) == list(rows)


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files(tmp_path, form):
    import pyarrow as pa

    path = str(tmp_path / "rows.arrow")

    def write_table(table: pa.Table) -> None:
        with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)

    write_table(pa.Table.from_pylist(ROWS))
    assert list(load_rows(DatasetConfig(path=path), "prompt")) == ROWS
    write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]))
    with pytest.raises(DataError, match=r"rows.arrow has the column 'prompt' 2 times"):
        load_rows(DatasetConfig(path=path), "prompt")


def test_save_to_disk_folders(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "two")
    assert list(read_rows(str(tmp_path / "one"), "train")) == ROWS
    assert list(read_rows(str(tmp_path / "two"), "test")) == [ROWS[1]]
    with pytest.raises(DataError, match=r"train_dataset\.split.*no split 'dev'; it has train, test"):
        read_rows(str(tmp_path / "two"), "dev")


def test_folder_of_data_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repo"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    assert [row["prompt"] for row in read_rows(str(folder), "train")] == [row["prompt"] for row in ROWS]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"train_dataset\.path: cannot read folder .*empty"):
        read_rows(str(tmp_path / "empty"))


def test_hub_name_without_network(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    import datasets  # noqa: F401  # takes seconds

    start = time.monotonic()
    for path in ("openai/gsm8k:main", "gsm8k", "org/repo:config:split"):
        with pytest.raises(DataError, match=r"hub cannot be reached.*set train_dataset\.path to a file or folder"):
            load_rows(DatasetConfig(path=path), "prompt")
    assert time.monotonic() - start < 200.0, "nothing is tried again and again"


@pytest.mark.parametrize("path", ["nowhere.jsonl", "/no/such/folder", "./here", "a/b/c"])
def test_missing_files(path):
    with pytest.raises(DataError, match=r"valid_dataset\.path: there is no file or folder"):
        load_rows(ValidDatasetConfig(path=path), "prompt", "valid_dataset")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.txt", "hello", "has no known format"),
        ("a.parquet.gz", "hello", "has no known format; expected one of .json .* .tsv.gz or a folder"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ', "a.jsonl line 2: not JSON"),
        ("a.json", '[{"prompt": "x"', "not JSON"),
        ("a.json", '{"rows": []}', "expected a list of rows"),
        ("a.parquet", "no parquet", "not a readable parquet file"),
        ("a.arrow", "no arrow", "not a readable arrow file"),
        ("a.csv", 'prompt,x\n"a,1\n', "csv"),
        ("a.jsonl", GOOD + '{"x": ' + "1" * 5000, "a.jsonl line 2: a number has 5,000 digits, more than 4,300"),
        ("a.json", '[{"prompt": "' + "1" * 5000 + '"},\n' + "1" * 5001, "a.json line 2: a number has 5,001 digits"),
        ("a.jsonl", GOOD + "[" * 200_000, "a.jsonl line 2: lists or objects are nested too deeply"),
        ("a.json", '[{"prompt": "x"},\n' + "[" * 200_000, "a.json line 2: lists or objects are nested too deeply"),
        (
            "a.jsonl",
            GOOD[:-2] + ', "solutions": ' + "[" * 500 + "]" * 500 + "}",
            "row 0: field solutions is nested more",
        ),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}', "a.jsonl line 2: byte 0xff at character 13 is not UTF-8"),
        ("a.json", b'[{"prompt": "x"},\n{"prompt": "\xff"}]', "a.json line 2: byte 0xff at character 13 is not UTF-8"),
        ("a.jsonl", '{"prompt": "x"}'.encode("utf-16"), "a.jsonl is UTF-16 text; expected UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}', mtime=0)[:-9], "cannot read .*a.jsonl.gz"),
        ("a.csv.gz", b"prompt\nx\n", "cannot read .*a.csv.gz: Not a gzipped file"),
        ("a.csv", "prompt,x,y,x\na,1,2,3\n", "a.csv has the column 'x' 2 times; give each column a name of its own"),
        ("a.csv", "prompt,,\na,1,2\n", "a.csv has the column '' 2 times"),
        ("a.csv", "prompt,x\na,1\nb\n", "a.csv row 1: has 1 cells, but the file has 2 columns"),
        ("a.csv", b"prompt,x\na,1\nb,\xff\n", "a.csv line 3: byte 0xff at character 3 is not UTF-8"),
        ("a.csv", b"prompt,\xff\na,1\n", "a.csv line 1: byte 0xff at character 8 is not UTF-8"),
    ],
)
def test_unreadable_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"train_dataset.path: .*{message}"):
        load_rows(DatasetConfig(path=str(path)), "prompt")


def test_a_cell_of_megabytes(tmp_path):
    text = "word " * 600_000
    assert load_rows(DatasetConfig(path=write(tmp_path / "a.csv", f"prompt\n{text}\n")), "prompt")[0]["prompt"] == text


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (
            "prompt",
            {"question": "x", "answer": "y"},
            r"prompt is missing; text or messages are expected.*has question, answer.*loader",
        ),
        ("prompt", {"prompt": ""}, "prompt is empty"),
        ("prompt", {"prompt": 3}, "prompt is int 3"),
        ("prompt", {"prompt": None}, "prompt is null"),
        ("prompt", {"prompt": []}, "prompt is an empty list of messages"),
        ("prompt", {"prompt": [{"role": "user"}]}, r"prompt \[0\].content is missing"),
        ("prompt", {"prompt": ["hello"]}, r"prompt \[0\] is str 'hello', not a message"),
        ("prompt", {"prompt": [{"role": "assistant", "content": "x"}]}, "ends with an assistant message"),
        ("prompt", "text", "is str 'text', not a dictionary"),
        ("sft", {"prompt": "x"}, "response is missing"),
        ("sft", {"prompt": "x", "response": 3}, "response is int 3"),
        ("sft", {"response": "x"}, "prompt is missing"),
        ("sft", {"messages": "x"}, "messages is str 'x', not a list of messages"),
        ("sft", {"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ],
)
def test_row_that_does_not_fit(tmp_path, kind, row, message):
    good = {"prompt": "x", "response": "y"}
    path = write(tmp_path / "rows.jsonl", json.dumps(good) + "\n" + json.dumps(row))
    with pytest.raises(DataError, match=f"rows.jsonl row 1: .*{message}"):
        load_rows(DatasetConfig(path=path), kind)


def test_columns_of_a_table_are_checked_too(tmp_path):
    import datasets

    rows = [{"prompt": "x", "n": 1}] * 1500 + [{"prompt": None, "n": 2}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"row 1500: field prompt is null.*has prompt, n"):
        load_rows(DatasetConfig(path=str(tmp_path / "rows.parquet")), "prompt")
    with pytest.raises(DataError, match=r"row 0: field response is missing"):
        load_rows(DatasetConfig(path=str(tmp_path / "rows.parquet")), "sft")


# Loaders -------------------------------------------------------------------------------------------------------------


def test_loader_makes_rows(tmp_path):
    loader = write(
        tmp_path / "loader.py",
        "from areno.data.sources import read_rows\n"
        "def load_dataset(path, split):\n"
        "    return ({'prompt': row['q'] + split} for row in read_rows(path, split))\n"
        "def made(path, split):\n"
        "    return [{'prompt': f'{path} {split} {n}'} for n in range(3)]\n",
    )
    path = write(tmp_path / "rows.jsonl", '{"q": "a"}\n{"q": "b"}')
    rows = load_rows(DatasetConfig(path=path, loader=loader), "prompt")
    assert list(rows) == [{"prompt": "atrain"}, {"prompt": "btrain"}]
    rows = load_rows(ValidDatasetConfig(path="arithmetic?seed=1", loader=f"{loader}:made"), "prompt")
    assert rows[2]["prompt"] == "arithmetic?seed=1 test 2"


def test_a_loader_may_stream_its_rows(tmp_path):
    source = """
import datasets
def load_dataset(path, split):
    rows = datasets.Dataset.from_list([{"prompt": "a", "of": {"x": 1}}, {"prompt": "b", "of": {"y": 2}}])
    rows = rows.to_iterable_dataset()
    return rows if path == "x" else datasets.IterableDatasetDict({split: rows})
"""
    expected = [{"prompt": "a", "of": {"x": 1}}, {"prompt": "b", "of": {"y": 2}}]
    for path in ("x", "y"):
        config = DatasetConfig(path=path, loader=write(tmp_path / "loader.py", source))
        assert load_rows(config, "prompt") == expected
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", "\n".join(map(json.dumps, expected)))
    streams = DatasetConfig(path=str(tmp_path / "folder"), dataset_kwargs={"streaming": True})
    assert load_rows(streams, "prompt") == expected


@pytest.mark.parametrize(
    ("source", "suffix", "error", "message"),
    [
        ("def load_datasets(p, s): return []", "", ConfigError, r"no function load_dataset; did you mean"),
        ("def f(p, s): return []", ":g", ConfigError, "no function g; it has f"),
        ("import nowhere_at_all", "", ConfigError, "ModuleNotFoundError.*loader.py:1"),
        ("x = (", "", ConfigError, "SyntaxError"),
        ("def load_dataset(p, s): return None", "", DataError, "returned null; expected a list of rows"),
        ("def load_dataset(p, s): return 'rows'", "", DataError, "returned str 'rows'"),
        ("def load_dataset(p, s):\n    return {}['x']", "", DataError, "KeyError: 'x' .loader.py:2"),
        ("import sys\ndef load_dataset(p, s):\n    sys.exit(3)", "", DataError, "SystemExit: 3 .loader.py:3"),
        ("def load_dataset(p, s):\n    yield {'prompt': 'a'}\n    exit()", "", DataError, "SystemExit.* .loader.py:3"),
        ("raise SystemExit", "", ConfigError, "does not import: SystemExit .loader.py:1"),
        (
            "def load_dataset(split): return []",
            "",
            ConfigError,
            "path: is 'x.jsonl', but load_dataset.split. in .*=null",
        ),
        ("def load_dataset(p): return []", "", DataError, "takes 1 positional argument"),
        ("def load_dataset(p, s): return []", "", DataError, "has no rows"),
        ("def load_dataset(p, s): return [1]", "", DataError, "row 0: is int 1"),
    ],
)
def test_bad_loader(tmp_path, source, suffix, error, message):
    loader = write(tmp_path / "loader.py", source) + suffix
    with pytest.raises(error, match=f"{message}"):
        load_rows(DatasetConfig(path="x.jsonl", loader=loader), "prompt")


def test_a_loader_is_a_function_of_its_own_file(tmp_path):
    imported = "from datasets import load_dataset\n"
    rows = "return [{'prompt': path}]"

    def load(source, name="loader.py"):
        return load_rows(DatasetConfig(path="x", loader=write(tmp_path / name, source)), "prompt")

    assert load(f"{imported}def made(path, split): {rows}") == [{"prompt": "x"}]
    assert load(f"def load_dataset(path, split): {rows}\ndef other(path): ...") == [{"prompt": "x"}]
    write(tmp_path / "beside.py", f"def load_dataset(path, split): {rows}")
    assert load("from beside import load_dataset\ndef other(path): ...") == [{"prompt": "x"}]
    shown = "load_dataset in .* is imported from datasets.load, and .* defines one, two; name one, as in"
    with pytest.raises(ConfigError, match=rf"train_dataset\.loader: {shown} .*loader\.py:one"):
        load(f"{imported}def one(path, split): {rows}\ndef two(path, split): {rows}")


def test_an_imported_function_beside_own_ones_is_no_reward(tmp_path):
    file = write(
        tmp_path / "reward.py", "from json import loads\nfrom json import dumps as told\ndef score(record): ..."
    )
    with pytest.raises(ConfigError, match=r"loads in .*reward.py is imported from json, and .* defines score"):
        load_function(file, "loads", "reward.fn")
    assert load_function(file, "told", "reward.fn")({}) == "{}"
    assert callable(load_function(write(tmp_path / "again.py", "from json import loads"), "loads", "reward.fn"))


def test_a_loader_that_makes_its_rows_needs_no_path(tmp_path):
    loader = write(tmp_path / "loader.py", "def load_dataset(split): return [{'prompt': split}]\ndef other(p, s): ...")
    assert load_rows(DatasetConfig(loader=loader), "prompt") == [{"prompt": "train"}]
    with pytest.raises(
        ConfigError, match=r"train_dataset\.path: missing; other\(path, split\) in .*loader.py reads it"
    ):
        load_rows(DatasetConfig(loader=f"{loader}:other"), "prompt")


def test_a_split_that_is_not_read(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"prompt": "a"}')
    with pytest.raises(
        DataError, match=r"train_dataset\.split: is 'test', but .*rows.jsonl has no splits; leave it out"
    ):
        load_rows(DatasetConfig(path=path, split="test"), "prompt")
    with pytest.raises(DataError, match=r"split: is 'test', but a/b:c:train names one itself"):
        load_rows(DatasetConfig(path="a/b:c:train", split="test"), "prompt")


def test_more_arguments_for_what_loads_the_data(tmp_path, monkeypatch):
    loader = write(tmp_path / "loader.py", "def load_dataset(split, n): return [{'prompt': f'{split} {n[0]}'}]")
    given = DatasetConfig(loader=loader, dataset_kwargs={"n": [3]})
    assert load_rows(given, "prompt") == [{"prompt": "train 3"}]
    for name, text in (("easy", "a"), ("hard", "b")):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "train.jsonl").write_text(f'{{"prompt": "{text}"}}')
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    kwargs = {"data_dir": "hard", "cache_dir": str(tmp_path / "cache")}
    rows = load_rows(DatasetConfig(path=str(tmp_path / "folder"), dataset_kwargs=kwargs), "prompt")
    assert [row["prompt"] for row in rows] == ["b"]
    asked = {}
    monkeypatch.setattr("areno.data.sources.is_hub_reachable", lambda: True)
    monkeypatch.setattr("datasets.load_dataset", lambda *at, **how: asked.update(at=at, how=how) or [{"prompt": "c"}])
    load_rows(DatasetConfig(path="some/where:main", dataset_kwargs={"revision": "v2"}), "prompt")
    assert asked == {"at": ("some/where", "main"), "how": {"split": "train", "revision": "v2"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"path": "rows.jsonl"},
            r"train_dataset\.dataset_kwargs: is set, but .*rows.jsonl is read without datasets.load",
        ),
        (
            {"loader": "verifiers:gsm8k"},
            "loader: is verifiers:gsm8k, which is no function; set it as",
        ),
        ({}, "dataset_kwargs: is set, but path and loader are null, so nothing is loaded"),
        ({"path": "a/b", "dataset_kwargs": {"split": "x"}}, "dataset_kwargs.split: cannot be given here; set split"),
        ({"path": "a/b", "dataset_kwargs": {"name": "x"}}, "dataset_kwargs.name: cannot be given here; set path"),
        ({"path": "a/b", "dataset_kwargs": [1]}, "dataset_kwargs: is .1.; a mapping of names is expected"),
    ],
)
def test_arguments_that_nothing_takes(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", '{"prompt": "a"}')
    with pytest.raises((ConfigError, DataError), match=message):
        load_rows(DatasetConfig(**{"dataset_kwargs": {"revision": "v2"}, **given}), "prompt")


def test_missing_loader():
    with pytest.raises(ConfigError, match=r"train_dataset\.loader"):
        load_rows(DatasetConfig(path="x", loader="nowhere.py"), "prompt")


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,solutions\n1+9=,10\n2+9=,011\n3,\n", encoding="utf-8")
    rows = read_rows(str(tmp_path / "a.csv"))
    assert [row["solutions"] for row in rows] == ["10", "011", ""]
