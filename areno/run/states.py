"""The training states of a run on disk: folders from which the run can resume.

Each folder is either complete or absent.

<run>/state/step-000012/engine/        weights and optimizers with their checksums, written by Engine.save_state
                        run.json       state dict, settings and fingerprints of the run, see Recovery.keep_run_state
                        manifest.json  the sizes of these files and the checksum of run.json; it is written last
<run>/state/latest                     the name of the newest state
            finished.json              only if the run has finished: last step, result, and the setting that ended it

This file also computes the fingerprints of models and data that a state records. recovery.py writes and loads states.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areno.environments.package import LazyRows
from areno.errors import CheckpointError
from areno.files.durable import REPLACED, UNFINISHED, atomic_remove, atomic_write_text, remove, sync, sync_tree

logger = logging.getLogger("areno.recover")

FORMAT = 2
ENGINE, RECORD, MANIFEST = "engine", "run.json", "manifest.json"
DAMAGED = "damaged-"
_PREFIX = "step-"

_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
_ROWS = 64
_SAMPLE = 1 << 16  # bytes at the start, the middle and the end of a file


def folder_fingerprint(folder: str | Path) -> str:
    """Return a hash of 16 hexadecimal digits over names, sizes and parts of the model files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start in {0, max(0, size // 2), max(0, size - _SAMPLE)}:
                    file.seek(start)
                    digest.update(hashlib.sha256(file.read(_SAMPLE)).digest())
    return digest.hexdigest()[:16]


def rows_fingerprint(rows: Any) -> str:
    """Return the number of rows and a hash of up to 65 of them, such as "1000 rows, 0123456789abcdef"."""
    count = len(rows)
    digest = hashlib.sha256(str(count).encode())
    if isinstance(rows, LazyRows):
        digest.update(rows.fingerprint.encode())
        return f"{count} rows, {digest.hexdigest()[:16]}"
    for index in sorted({count * n // _ROWS for n in range(_ROWS)} | {count - 1}):
        # Only the type of a value that is not JSON counts: the text of a set, for example, differs between processes.
        row = json.dumps(rows[index], default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(row.encode(errors="surrogatepass"))
    return f"{count} rows, {digest.hexdigest()[:16]}"


class TrainingState(NamedTuple):
    """A complete training state, from which a run can resume."""

    folder: Path
    step: int
    record: dict[str, Any]  # content of run.json

    @property
    def engine_folder(self) -> Path:
        return self.folder / ENGINE


class StateFolder:
    """The folder <run>/state with the training states of one run. The newest `keep` states are kept.

    `retire` gets each older state, as (step, folder). It returns True if it has moved the folder away. Otherwise the
    state is removed.
    """

    def __init__(self, folder: Path, keep: int, retire: Callable[[int, Path], bool] = lambda step, folder: False):
        self.folder, self.keep, self.retire = folder, keep, retire

    @property
    def has_begun(self) -> bool:
        """Whether the folder exists. A run makes it at its start, unless recover.mode is off."""
        return self.folder.is_dir()

    def steps(self) -> list[int]:
        numbers = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def clean_up(self) -> None:
        """Clean up after a crash: remove unfinished states, and restore a state that was being replaced."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            remove(replaced) if final.exists() else replaced.rename(final)
        for unfinished in self.folder.glob(f"{UNFINISHED}*"):
            remove(unfinished)

    def newest(self) -> TrainingState | None:
        """Return the newest complete state, or None if the run never wrote a state. Rename damaged newer states.

        Raises CheckpointError if all states are damaged. Checksums of weights and optimizers are checked later, when
        the engine loads them.
        """
        for step in self.steps():
            if damage := find_damage(self.path_of(step)):
                self.set_aside(step, damage)
            else:
                return self._read_record(step)
        last = self.folder / "latest"
        damaged = sorted(path.name for path in self.folder.glob(f"{DAMAGED}*"))
        if not damaged and not last.exists():
            return None
        why = f"are damaged ({', '.join(damaged)})" if damaged else f"are gone; the last was {_read_text(last)}"
        raise CheckpointError(
            "the states of this run in {} {}. Put one back, or start a run with another trial_name, for example from "
            "a checkpoint of this one (actor.path)",
            self.folder,
            why,
        )

    def _read_record(self, step: int) -> TrainingState:
        folder = self.path_of(step)
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            record = record if isinstance(record, dict) else {}
            raise CheckpointError(
                "{} has format {}, of areno {}; this areno reads format {}. Resume with the version that wrote it, or "
                "start a run from a checkpoint of this one (actor.path)",
                folder,
                record.get("format"),
                record.get("areno"),
                FORMAT,
            )
        return TrainingState(folder, step, record)

    def set_aside(self, step: int, damage: str) -> None:
        """Rename a damaged state to damaged-step-<step>, with a warning."""
        names = [f"{DAMAGED}{_PREFIX}{step:06d}{more}" for more in ("", *(f"-{n}" for n in range(2, 100)))]
        aside = next(path for name in names if not (path := self.folder / name).exists())
        logger.warning("the state of step %d is damaged: %s. It is kept as %s", step, damage, aside)
        self.path_of(step).rename(aside)

    def begin(self, step: int) -> Path:
        """Make a new empty folder for the state of a step. The caller fills it and calls `finish`."""
        folder = self.folder / f"{UNFINISHED}{_PREFIX}{step:06d}-{os.getpid()}"
        remove(folder)
        (folder / ENGINE).mkdir(parents=True)
        return folder

    def begin_again(self, step: int) -> Path | None:
        """Make a new folder for a step that already has a state, with hard links to its weights and optimizers.

        The caller can then write a new run.json without writing the weights again. Returns None if the file system has
        no hard links.
        """
        source, folder = self.path_of(step) / ENGINE, self.begin(step)
        try:
            for path in (path for path in source.rglob("*") if path.is_file()):
                link = folder / ENGINE / path.relative_to(source)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, link)
        except OSError:  # a file system without links
            remove(folder)
            return None
        return folder

    def finish(self, folder: Path, step: int, record: Mapping[str, Any]) -> Path:
        """Sync a filled folder to disk, make it the state of its step, and remove old states."""
        text = json.dumps({"format": FORMAT, **record})
        (folder / RECORD).write_text(text, encoding="utf-8")
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = {"crc32": zlib.crc32(text.encode()), "sizes": sizes}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        sync_tree(folder)
        final, replaced = self.path_of(step), self.folder / f"{REPLACED}{self.path_of(step).name}"
        if final.exists():
            remove(replaced)
            final.rename(replaced)
        folder.rename(final)
        sync(self.folder)
        atomic_write_text(self.folder / "latest", f"{final.name}\n")
        remove(replaced)
        for old in self.steps()[self.keep :]:
            if not self.retire(old, self.path_of(old)):
                self.remove(old)
        return final

    def remove(self, step: int) -> None:
        atomic_remove(self.path_of(step))

    def newest_size_bytes(self) -> int:
        newest = next(iter(self.steps()), None)
        files = [] if newest is None else self.path_of(newest).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    def path_of(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    @property
    def finished_record(self) -> dict[str, Any] | None:
        """The content of finished.json: "step", "result" and "ended_by". None without it, or if it is damaged."""
        try:
            found = json.loads((self.folder / "finished.json").read_text(encoding="utf-8"))
            ended_by = found.get("ended_by", "total_train_steps")
            return {"step": int(found["step"]), "result": float(found["result"]), "ended_by": str(ended_by)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    @property
    def is_run_unfinished(self) -> bool:
        return bool(self.steps()) and self.finished_record is None

    def set_finished(self, step: int | None, result: float | None = None, ended_by: str = "") -> None:
        """Write finished.json. If `step` is None, remove the file, because the run trains further."""
        if step is None:
            (self.folder / "finished.json").unlink(missing_ok=True)
        else:
            record = {"step": step, "result": result, "ended_by": ended_by}
            atomic_write_text(self.folder / "finished.json", json.dumps(record) + "\n")


def find_damage(folder: Path) -> str:
    """Describe what in a state contradicts its manifest, or return "". Checksums of weights are not checked."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, size in manifest["sizes"].items():
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
        if zlib.crc32((folder / RECORD).read_bytes()) != manifest["crc32"]:
            return f"{RECORD} does not have its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(folder)} is missing"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return ""


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "damaged"
