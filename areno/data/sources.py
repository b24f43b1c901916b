"""Read datasets as rows, in the main process of a run.

Sources are files, `save_to_disk` folders, hub references, environments (SCHEME:NAME, see areno/environments), and
loaders that users write. `open_rows` and `load_rows` read a configured dataset and check every row
against areno.data.row_schema.

A loader is a function `load_dataset(path: str, split: str) -> rows` in a Python file. `path` is the configured path.
It is made absolute if it names an existing file, and otherwise may be anything that the loader understands. The
function can call `read_rows(path, split)` for the formats that areno knows. A loader that needs no path has `split`
as its first argument, and then no path may be configured. Every loader also receives the entries of the setting
dataset_kwargs as keyword arguments. A loader returns a `datasets.Dataset`, a list, or any iterable of dictionaries.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from areno.config.datasets import DatasetConfig, ValidDatasetConfig, ValidSetConfig, section_name_problems
from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.arrow_rows import without_nulls
from areno.data.dataset_formats import prepare_rows
from areno.data.files import COMPRESSED, FORMATS, format_of, read_json, read_jsonl, read_table
from areno.data.row_schema import FIELDS, SHARED_FIELDS, RowKind, Rows, describe_value, rows_at, rows_problem
from areno.environments.harbor import HarborTasks, is_task_folder
from areno.environments.packages import package_of
from areno.errors import ArenoError, ConfigError, DataError, Key, Problem, all_of
from areno.files.paths import existing_path, find_file
from areno.files.user_code import (
    describe_error,
    get_user_function,
    load_module,
    resolve_own_name,
    resolve_spec,
    split_spec,
)


def load_rows(config: DatasetConfig, kind: RowKind, key: str = "train_dataset") -> Rows:
    """Read the rows of a configured dataset, convert them to areno's form and check each of them."""
    if config.loader is not None:
        rows = _rows_from_loader(config, config.loader, key)
        return prepare_rows(rows, kind, f"{key}.loader", config.path or config.loader)
    if config.path is None:
        raise ConfigError(_no_rows_problem(key))
    _check_split(config, config.path, key)
    rows, columns = read_rows(config.path, config.split, key, config.dataset_kwargs), config.columns.renamed_columns()
    if wrong := sorted(columns.keys() - {*FIELDS[kind], *SHARED_FIELDS}):
        has = ", ".join((*FIELDS[kind], *SHARED_FIELDS))
        raise ConfigError(
            [
                Problem(f"{key}.columns.{name}", f"is set, but the rows of this training have the fields {has}")
                for name in wrong
            ]
        )
    return prepare_rows(rows, kind, f"{key}.path", config.path, columns=columns, key=key)


def open_rows(config: DatasetConfig, given: Any, kind: RowKind, key: str) -> tuple[Rows, DatasetConfig]:
    """Return checked rows, and the configuration section with which to make a BatchLoader.

    `given` are rows that a script passes in, or None to read the rows of `config`. With `given`, the returned section
    is a copy of `config` without path and loader. Errors name the section `key`.
    """
    if given is None:
        rows = load_rows(config, kind, key)
    else:
        rows = prepare_script_rows(given, kind, key)
        config = replace(config, path=None, loader=None, dataset_kwargs=None)
    if isinstance(config, ValidSetConfig) and config.max_rows is not None and config.max_rows < len(rows):
        rows = rows_at(rows, range(config.max_rows))
    return rows, config


class ValidSet(NamedTuple):
    name: str  # "" if the run has only one set, without a name
    config: ValidSetConfig
    rows: Any  # that a script passes in; None: the configured dataset is read

    @property
    def key(self) -> str:
        return f"valid_dataset.sets.{self.name}" if self.name else "valid_dataset"


def valid_sets(config: ExperimentConfig, given: Any) -> list[ValidSet]:
    """Return the validation sets of a run. A script may pass in `given`: rows of one set, or {name: rows}."""
    train, section = config.train_dataset, config.valid_dataset
    if given is None:
        return [ValidSet(name, of, None) for name, of in (section.by_name() if section else {}).items()]
    if not isinstance(given, Mapping):
        given = {"": given}
    elif problems := [Problem("valid_dataset", text) for text in section_name_problems(given)]:
        raise ConfigError(problems)
    at_once = None if isinstance(config, PolicyExperimentConfig) else train.batch_size
    default = section or ValidSetConfig(batch_size=at_once, max_length=train.max_length)
    configured = (section.sets if section else None) or {}
    if configured and configured.keys() != given.keys():
        text = "has the sets {}; give the trainer a mapping of these names to rows"
        raise ConfigError(Problem("valid_dataset.sets", text, ", ".join(configured)))
    return [ValidSet(name, configured.get(name, default), rows) for name, rows in given.items()]


def check_valid_sources(config: ValidDatasetConfig | None) -> None:
    sets = config.by_name() if config is not None else {}
    all_of(*(partial(check_source, of, ValidSet(name, of, None).key) for name, of in sets.items()))


def prepare_script_rows(rows: Any, kind: RowKind, key: str = "train_dataset") -> Rows:
    """Check rows that a script passes in, and convert them to areno's form."""
    if problem := rows_problem(rows):
        raise DataError(Problem(key, problem))
    return prepare_rows(rows, kind, "", Key(key))


def read_rows(
    path: str, split: str = "train", key: str = "train_dataset", kwargs: Mapping[str, Any] | None = None
) -> Rows:
    """Read the rows of a data file, a folder, an environment or a dataset on the hub, without checking them.

    Args:
        path: Path of a data file or folder, an environment SCHEME:NAME, or a hub reference repo[:config[:split]]. JSON,
            JSON lines, CSV and TSV files may be compressed (.gz).
        split: Name of the split to read, if the source has several splits and `path` names none.
        key: Name of the configuration section, which errors quote.
        kwargs: Options of an environment, or further arguments for datasets.load_dataset, which reads hub datasets and
            folders of data files.

    Raises:
        DataError: The source does not exist, cannot be read completely, or does not take `kwargs`.
    """
    setting = f"{key}.path"
    if (environment := package_of(path, setting)) is not None:
        return environment.rows(split, kwargs or {})
    file = _find_local(path, key)
    if file is None:
        return _read_hub(path, split, setting, kwargs or {})
    if kwargs and (file.is_file() or _is_saved_dataset(file)):
        text = "is set, but {} is read without datasets.load_dataset; leave it out, or set {} to your own file.py"
        raise DataError(Problem(f"{key}.dataset_kwargs", text, path, Key(f"{key}.loader")))
    if file.is_dir():
        return _read_folder(file, path, split, key, kwargs or {})
    form = format_of(file)
    if form is None:
        expected = f"expected one of {' '.join(FORMATS)}, {' '.join(f'{name}.gz' for name in COMPRESSED)} or a folder"
        raise DataError(Problem(setting, f"{path} has no known format; {expected}"))
    try:
        if form == ".jsonl":
            return read_jsonl(file, path)
        return read_json(file, path, split) if form == ".json" else read_table(file, form, path)
    except (DataError, OSError, EOFError, zlib.error) as error:
        text = str(error) if isinstance(error, DataError) else f"cannot read {path}: {error}"
        raise DataError(Problem(setting, text)) from error


def check_source(config: DatasetConfig | None, key: str) -> None:
    """Check that a local file or loader exists, before anything is read.

    Hub datasets are checked only when they are read, and environments by `check_packages`.
    """
    if config is None:
        return
    if config.loader is not None:
        resolve_spec(config.loader, "load_dataset", f"{key}.loader")
    elif config.path is not None:
        if package_of(config.path) is None:
            _find_local(config.path, key)
    else:
        raise ConfigError(_no_rows_problem(key))


def _no_rows_problem(key: str) -> Problem:
    return Problem(f"{key}.path", "missing; set it, or pass rows to the trainer")


def _find_local(path: str, key: str) -> Path | None:
    """Return the local file or folder at a path. None if there is none and the path may be a hub reference."""
    file = existing_path(path)
    is_reference = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^:/]+){0,2}", path) and path[0] not in "./~"
    if file is None and (not is_reference or format_of(path) is not None):
        looked_for = Path(os.path.expanduser(path)).absolute()
        raise DataError(Problem(f"{key}.path", "there is no file or folder {} (looked for {})", path, looked_for))
    return file


def _check_split(config: DatasetConfig, path: str, key: str) -> None:
    """Raise DataError if `split` is set without effect: the file has no splits, or the hub reference names one."""
    if package_of(path) is not None:
        return
    file = existing_path(path)
    own = file is None and path.count(":") == 2
    if not config.is_default("split") and (own or (file is not None and file.is_file() and format_of(file) != ".json")):
        why = "names one itself" if own else "has no splits"
        raise DataError(Problem(f"{key}.split", "is {!r}, but {} {}; leave it out", config.split, path, why))


# Sources -------------------------------------------------------------------------------------------------------------


def _rows_from_loader(config: DatasetConfig, loader: str, key: str) -> Rows:
    file, name = split_spec(loader, "load_dataset")
    loader_file = find_file(file, f"{key}.loader")
    module = load_module(str(loader_file), f"{key}.loader")
    name = resolve_own_name(module, name)
    function = get_user_function(module, name, str(loader_file), f"{key}.loader")
    arguments = [config.split]
    if _takes_path(function):
        if config.path is None:
            text = f"missing; {name}(path, split) in {file} reads it (a loader that makes its rows takes only split)"
            raise ConfigError(Problem(f"{key}.path", text))
        arguments = [str(existing_path(config.path) or config.path), config.split]
    elif config.path is not None:
        text = "is {!r}, but {}(split) in {} makes its rows itself and reads no path; to read the path, set {}=null"
        raise ConfigError(Problem(f"{key}.path", text, config.path, name, file, Key(f"{key}.loader")))
    try:
        found = function(*arguments, **(config.dataset_kwargs or {}))
        rows = _rows_from_result(found, config.split)
    except ArenoError:
        raise
    except (Exception, SystemExit) as error:
        where = describe_error(error, loader_file.resolve())
        raise DataError(Problem(f"{key}.loader", f"{name} in {file} failed: {where}")) from error
    if rows is None:
        text = f"{name} in {file} returned {describe_value(found)}; expected a list of rows"
        raise DataError(Problem(f"{key}.loader", text))
    return rows


def _takes_path(loader: Any) -> bool:
    try:
        return next(iter(inspect.signature(loader).parameters), None) != "split"
    except ValueError:  # some callables have no signature to inspect
        return True


def _rows_from_result(found: Any, split: str) -> Any:
    """Return the result of a loader as rows, or None if it cannot be rows.

    If it is a mapping that has the key `split`, such as a DatasetDict, only the rows of this split are returned. Other
    iterables become lists unless they are datasets.
    """
    if isinstance(found, Mapping) and split in found:  # such as a DatasetDict
        found = found[split]
    if isinstance(found, Mapping | str | bytes) or not isinstance(found, Iterable):
        return None
    # `list` runs the user's code that makes the rows here, not in the middle of a run.
    found = without_nulls(found)
    return found if isinstance(found, list) or hasattr(found, "column_names") else list(found)


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _read_folder(folder: Path, shown: str, split: str, key: str, kwargs: Mapping[str, Any]) -> Rows:
    if is_task_folder(folder):
        return HarborTasks(str(folder), f"{key}.path").rows(split, kwargs)
    import datasets

    try:
        if _is_saved_dataset(folder):
            found: Any = datasets.load_from_disk(folder)
        else:
            found = without_nulls(datasets.load_dataset(str(folder), split=split, **kwargs))
    except Exception as error:  # the library raises a dozen unrelated kinds of errors
        text = "cannot read folder {}: {}; set it to a data file, or set {} to a file.py that reads it"
        raise DataError(Problem(f"{key}.path", text, shown, _first_line(error), Key(f"{key}.loader"))) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            has = ", ".join(map(str, found))
            raise DataError(Problem(f"{key}.split", f"{shown} has no split {split!r}; it has {has}"))
        found = found[split]
    return without_nulls(found)


def _read_hub(path: str, split: str, setting: str, kwargs: Mapping[str, Any]) -> Rows:
    """Read a dataset from the hub, or from the local cache if the hub cannot be reached."""
    import datasets.config
    import huggingface_hub.constants

    repo, _, rest = path.partition(":")
    name, _, own_split = rest.partition(":")
    offline = datasets.config.HF_HUB_OFFLINE
    reachable = not offline and is_hub_reachable()
    if not reachable:  # the cache can still be used, and offline mode avoids half a minute of retries
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        return without_nulls(datasets.load_dataset(repo, name or None, split=own_split or split, **kwargs))
    except Exception as error:  # the library raises a dozen unrelated kinds of errors
        text, reason = "cannot load {} from the hub: {}", (_first_line(error),)
        if not reachable:
            text = "there is no file {}, and the Hugging Face hub cannot be reached and the dataset is not in its cache"
            reason = ()
        text += "; to use local data, set {} to a file or folder"
        raise DataError(Problem(setting, text, path, *reason, Key(setting))) from error
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline


def is_hub_reachable(timeout_s: float = 5.0) -> bool:
    """Return whether the hub can be reached through the configured proxies."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def send_request() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except OSError:
            return
        answered.set()

    thread = threading.Thread(target=send_request, daemon=True)  # name resolution has no timeout of its own
    thread.start()
    thread.join(timeout_s + 1.0)
    return answered.is_set()


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    # The library wraps the actual error in one that says little.
    return line if error.__cause__ is None else f"{line}: {_first_line(error.__cause__)}"
