"""The result of `areno check --` for a run: which result belongs to it, and what has changed since the check.

A check writes its result into the folder of the experiment, under a key: hashes of the settings, the model, the rows,
the user's code and the versions. A run copies the result with the closest key into its own folder when it starts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig
from areno.files.durable import atomic_write_text
from areno.files.paths import existing_path, read_if_exists
from areno.tracking.run_folder import versions

CHECK = "check.json"
_FOLDER = ".checks"  # in the folder of the experiment
# Settings that do not change what is trained.
_SIDE = {"trial_name", "stats_logger", "perf_tracer", "memory_profiler", "cluster", "scheduler", "saver", "recover"}
_SIDE |= {"recorder", "tune"}
_PACKAGES = ("areno", "torch", "transformers")

Key = dict[str, str]
"""Part, such as "settings", "code" or "actor.path" -> hash. A part that is unknown is absent."""


def key_of(config: ExperimentConfig, inputs: Mapping[str, str]) -> Key:
    """Return the key of a run. `inputs` has fingerprints of models and rows: name of the setting -> fingerprint."""
    settings = {name: value for name, value in asdict(config).items() if name not in _SIDE}
    code = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in _python_files(settings)}
    used = versions()
    found = {"settings": settings, "code": code, "versions": {name: used.get(name) for name in _PACKAGES}, **inputs}
    return {part: _hash(value) for part, value in found.items()}


def write_result(config: ExperimentConfig, key: Key, command: str, findings: Sequence[Mapping[str, Any]]) -> Path:
    record = {"command": command, "time": time.strftime("%Y-%m-%d %H:%M"), "key": key, "findings": list(findings)}
    folder = _experiment(config) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_hash(key)}.json"
    atomic_write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return path


def copy_result(config: ExperimentConfig, key: Key, run: Path) -> None:
    """Copy the result with the closest key into the folder of a run, with the names of the parts that differ.

    Of several, the newest counts. A run without one is left as it is.
    """
    files = [*(_experiment(config) / _FOLDER).glob("*.json"), *run.glob(CHECK)]
    found = [
        (len(differing), -file.stat().st_mtime, {**record, "differs": differing})
        for file in files
        if (record := _read(file)) is not None
        for differing in [[part for part, value in record["key"].items() if key.get(part, value) != value]]
    ]
    if found:
        *_, record = min(found, key=lambda entry: entry[:2])
        atomic_write_text(run / CHECK, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def result_of(run: Path) -> dict[str, Any] | None:
    """Return the result in the folder of a run, with "differs": the parts of its key that the run does not have."""
    return _read(run / CHECK)


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(ValueError):
        record = json.loads(read_if_exists(file) or b"null")
        return record if isinstance(record, dict) and isinstance(record.get("key"), dict) else None
    return None


def _experiment(config: ExperimentConfig) -> Path:
    return Path(config.cluster.fileroot).expanduser() / config.experiment_name


def _python_files(value: Any) -> Iterator[Path]:
    """Yield the files of Python that settings name, as file.py or file.py:function."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _python_files(each)
    elif isinstance(value, str) and ".py" in value and "\n" not in value:
        path = existing_path(value.rpartition(":")[0] if value.partition(".py")[2].startswith(":") else value)
        if path is not None and path.suffix == ".py" and path.is_file():
            yield path


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
