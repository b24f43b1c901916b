"""From `train_dataset.path` to rows: files, save_to_disk folders, hub references, and loaders that users bring.

A loader is a function `load_dataset(path: str, split: str) -> rows` in a Python file. `path` is the configured path
(absolute where such a file exists) and may be anything the loader understands: it can call `read_rows(path, split)` for
the formats that areno knows, or make its rows from nothing. It returns a list (or any iterable) of dictionaries, or a
`datasets.Dataset`.

After loading, every row has a form of row_forms.py; what else is in it is carried along to reward functions. Rows that
a script holds already go through `check_rows` alone.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from areno.api.row_forms import EXPECTED, FIELDS, Row, RowKind, brief, row_problem
from areno.api.user_code import describe, load_function, split_spec
from areno.config.experiments import ExperimentConfig
from areno.config.paths import existing_path, find_file
from areno.config.run import DatasetConfig, ValidDatasetConfig
from areno.errors import ArenoError, ConfigError, DataError, Problem


class Rows(Protocol):
    """What a dataset must offer: a list of dictionaries does, and so does a `datasets.Dataset`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


_FORMATS = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow")


def load_rows(config: DatasetConfig, kind: RowKind, key: str = "train_dataset") -> Rows:
    """The rows of a configured dataset, each checked against `kind`. `key` is the section's name, for messages.

    Raises DataError (missing, unreadable, empty, or a row that does not fit) and ConfigError (no path, a loader without
    its function).
    """
    if config.path is None:
        raise ConfigError([Problem(f"{key}.path", "missing; set it, or hand rows to the trainer")])
    if config.loader is not None:
        rows, setting, hint = _rows_from_loader(config, config.path, key), "loader", ""
    else:
        rows, setting = read_rows(config.path, config.split, key), "path"
        hint = f"; set {key}.loader to a file.py that makes such rows"
    _check(rows, kind, f"{key}.{setting}: {config.path}", hint)
    return rows


def open_rows(config: DatasetConfig, given: Any, kind: RowKind, key: str) -> tuple[Rows, DatasetConfig]:
    """The rows of a run, those that a script has `given` or else those configured, and the section to go on with."""
    if given is None:
        return load_rows(config, kind, key), config
    return check_rows(given, kind, key), replace(config, path=None)  # messages should not speak of a path


def valid_section(config: ExperimentConfig, given: Any) -> ValidDatasetConfig | None:
    """The section of valid_dataset; rows `given` by a script need none. None where there is no evaluation."""
    if config.valid_dataset is not None or given is None:
        return config.valid_dataset
    train = config.train_dataset
    return ValidDatasetConfig(batch_size=train.batch_size, max_length=train.max_length)


def check_rows(rows: Any, kind: RowKind, key: str = "train_dataset") -> Rows:
    """Rows that a script hands over: a list of dictionaries, or anything with a length and indexing. Returns them.

    Raises DataError for what is nothing of the kind, for no rows, and for the first that is not of `kind`. `key` is the
    argument's name, for messages.
    """
    if problem := rows_problem(rows):
        raise DataError(f"{key}: {problem}")
    _check(rows, kind, key)
    return rows


def rows_problem(rows: Any) -> str | None:
    """What keeps `rows` from being a list of dictionaries, or the like, at the first look; or None."""
    expected = "a list of dictionaries, or a dataset, is expected"
    if hasattr(rows, "iloc"):  # its brackets choose columns
        return f'is a pandas {type(rows).__name__}; {expected}: write .to_dict("records")'
    if isinstance(rows, Mapping | str | bytes) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        return f"is {brief(rows)}; {expected}"
    return None


def read_rows(path: str, split: str = "train", key: str = "train_dataset") -> Rows:
    """Rows of a json, jsonl, parquet, csv, tsv or arrow file, a folder, or a hub reference repo[:config[:split]].

    `split` chooses where the source has several. Raises DataError.
    """
    file = existing_path(path)
    if file is not None and file.is_dir():
        return _read_folder(file, path, split, key)
    if file is not None:
        if file.suffix not in _FORMATS:
            raise DataError(f"{key}.path: {path} has no known format; expected one of {' '.join(_FORMATS)} or a folder")
        try:
            return _read_file(file, path, split)
        except DataError as error:
            raise DataError(f"{key}.path: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{key}.path: cannot read {path}: {error}") from error
    if Path(path).suffix in _FORMATS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^:/]+){0,2}", path) or path[0] in "./~":
        raise DataError(
            f"{key}.path: there is no file or folder {path} (looked for {Path(path).expanduser().absolute()})"
        )
    return _read_hub(path, split, key)


def _check(rows: Rows, kind: RowKind, source: str, hint: str = "") -> None:
    """Raise DataError for the first row that is not of `kind`, or if there is none."""
    if len(rows) == 0:
        raise DataError(f"{source} has no rows")
    for number, row in enumerate(_iter_fields(rows, FIELDS[kind])):
        problem = row_problem(row, kind)
        if problem is None:
            continue
        found = (
            "" if not isinstance(row, Mapping) else f"; the row has {', '.join(map(str, rows[number])) or 'no fields'}"
        )
        raise DataError(f"{source} row {number}: {problem}; expected {EXPECTED[kind]}{found}{hint}")


def _iter_fields(rows: Rows, fields: Sequence[str]) -> Iterator[Row]:
    """Every row, reduced to `fields` where that is cheaper: columns of an Arrow table are read in batches."""
    columns = getattr(rows, "column_names", None)
    if columns is None:
        yield from (rows[number] for number in range(len(rows)))
        return
    table: Any = rows
    present = [name for name in fields if name in columns]
    if not present:  # one row is enough to report that the fields are missing
        yield {}
        return
    for batch in table.select_columns(present).with_format(None).iter(1000):
        for values in zip(*(batch[name] for name in present), strict=True):
            yield dict(zip(present, values, strict=True))


# Sources -------------------------------------------------------------------------------------------------------------


def _rows_from_loader(config: DatasetConfig, path: str, key: str) -> Rows:
    spec = str(config.loader)
    file, name = split_spec(spec, "load_dataset")
    loader_file = find_file(file, f"{key}.loader")
    function = load_function(f"{loader_file}:{name}", "load_dataset", f"{key}.loader")
    try:
        found = function(str(existing_path(path) or path), config.split)
        rows = _as_rows(found, config.split)
    except ArenoError:
        raise
    except Exception as error:
        where = describe(error, loader_file.resolve())
        raise DataError(f"{key}.loader: {name}(path, split) in {file} failed: {where}") from error
    if rows is None:
        raise DataError(f"{key}.loader: {name} in {file} returned {brief(found)}; expected a list of rows")
    return rows


def _as_rows(found: Any, split: str) -> Any:
    """What a loader returned, as rows; None if it is nothing of the kind."""
    if isinstance(found, Mapping) and split in found:  # a DatasetDict, or the like
        found = found[split]
    if isinstance(found, Mapping | str | bytes) or not isinstance(found, Iterable):
        return None
    return found if isinstance(found, Sequence) or hasattr(found, "column_names") else list(found)


def _read_file(file: Path, shown: str, split: str) -> Rows:
    if file.suffix == ".jsonl":
        return _read_jsonl(file, shown)
    if file.suffix == ".json":
        return _read_json(file, shown, split)
    return _read_table(file, shown)


def _read_json(file: Path, shown: str, split: str) -> list[Row]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one JSON value on each line, under the wrong name
            return _read_jsonl(file, shown)
        raise DataError(f"{shown} line {error.lineno}: not JSON: {error.msg}") from error
    if isinstance(content, dict):
        for name in ("data", split):
            if isinstance(content.get(name), list):
                return content[name]
    if not isinstance(content, list):
        raise DataError(f'{shown}: holds {brief(content)}; expected a list of rows, or {{"data": [rows]}}')
    return content


def _read_jsonl(file: Path, shown: str) -> list[Row]:
    rows = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{shown} line {number}: not JSON: {error.msg}") from error
    return rows


def _read_table(file: Path, shown: str) -> Rows:
    import pyarrow as pa
    from datasets import Dataset

    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import read_table

            return Dataset(read_table(file))
        if file.suffix == ".arrow":
            # The stream form is what `datasets` writes, the file form what pyarrow calls Feather.
            with pa.memory_map(str(file)) as source:
                is_file = source.read(6) == b"ARROW1"
            with pa.memory_map(str(file)) as source:
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                return Dataset(reader.read_all())
        from pyarrow.csv import ConvertOptions, ParseOptions, open_csv, read_csv

        parse = ParseOptions(delimiter="\t" if file.suffix == ".tsv" else ",", newlines_in_values=True)
        with open_csv(file, parse_options=parse) as reader:
            names = reader.schema.names
        # Cells are text, as they stand in the file: a solution "10" must not become the number 10.
        convert = ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        return Dataset(read_csv(file, parse_options=parse, convert_options=convert))
    except pa.ArrowException as error:
        raise DataError(f"{shown}: not a readable {file.suffix[1:]} file: {error}") from error


def _read_folder(folder: Path, shown: str, split: str, key: str) -> Rows:
    import datasets

    is_saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        if is_saved:
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder), split=split)
    except Exception as error:  # the library raises a dozen kinds, none of them shared
        raise DataError(
            f"{key}.path: cannot read folder {shown}: {_first_line(error)}; "
            f"set it to a data file, or set {key}.loader to a file.py that reads it"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"{key}.split: {shown} has no split {split!r}; it has {', '.join(map(str, found))}")
        found = found[split]
    return found


def _read_hub(path: str, split: str, key: str) -> Rows:
    import datasets.config
    import huggingface_hub.constants

    repo, _, rest = path.partition(":")
    name, _, own_split = rest.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    reachable = not offline and _hub_answers()
    if not reachable:  # what is in the cache can still be used, and the library's own retries take half a minute
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(repo, name or None, split=own_split or split)
    except Exception as error:  # the library raises a dozen kinds, none of them shared
        local = f"to use local data, set {key}.path to a file or folder"
        if not reachable:
            why = "the Hugging Face hub cannot be reached and the dataset is not in its cache"
            raise DataError(f"{key}.path: there is no file {path}, and {why}; {local}") from error
        raise DataError(f"{key}.path: cannot load {path} from the hub: {_first_line(error)}; {local}") from error
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline


def _hub_answers(timeout_s: float = 5.0) -> bool:
    """Whether the hub's web server can be reached, by way of the proxies that are set; at most about `timeout_s`."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except OSError:
            return
        answered.set()

    asking = threading.Thread(target=ask, daemon=True)  # name resolution knows no timeout, so wait from outside
    asking.start()
    asking.join(timeout_s + 1.0)
    return answered.is_set()


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    # The library wraps what was wrong in an error that says next to nothing.
    return line if error.__cause__ is None else f"{line}: {_first_line(error.__cause__)}"
