"""Fingerprints of what a run began with, to tell whether a resumed run has the same model and the same data.

The states of a run: folders to go on from, each whole or absent.

<run>/state/step-000012/engine/        weights and optimizers with their checksums: see Engine.save_state
                        run.json       the format, and the record of the driver
                        manifest.json  the sizes of these files and the checksum of run.json; it is written last
<run>/state/latest                     the name of the last one that was written
            finished.json              of a run that came to its end: its last step, its result, and what ended it

Writes the states of a run in the background: begun at the end of a step, made whole while the next one goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from areno.config.run import RecoverConfig
from areno.errors import ArenoError, CheckpointError
from areno.files.durable import REPLACED, UNFINISHED, atomic_remove, atomic_write_text, remove, sync, sync_tree

_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
_ROWS = 64
_SAMPLE = 1 << 16  # bytes at the start, the middle and the end of a file


def folder_fingerprint(folder: str | Path) -> str:
    """Of a model or tokenizer folder: the names and sizes of its files, and samples of their bytes."""
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
    """Of a dataset, anything with a length and indexing: the number of its rows, and a sample of them."""
    count = len(rows)
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({count * n // _ROWS for n in range(_ROWS)} | {count - 1}):
        # Of what is not JSON only the type: its text may differ between processes, as that of a set does.
        row = json.dumps(rows[index], default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(row.encode(errors="surrogatepass"))
    return f"{count} rows, {digest.hexdigest()[:16]}"


logger = logging.getLogger("areno.recover")

FORMAT = 2
ENGINE, RECORD, MANIFEST = "engine", "run.json", "manifest.json"
DAMAGED = "damaged-"
_PREFIX = "step-"


class State(NamedTuple):
    """One state that is whole. record: what the driver gave with it."""

    folder: Path
    step: int
    record: dict[str, Any]

    @property
    def engine(self) -> Path:
        """The part of the engine."""
        return self.folder / ENGINE


class States:
    """The folder of a run's states, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    @property
    def has_begun(self) -> bool:
        """Whether a run that writes states has used the folder."""
        return self.folder.is_dir()

    def steps(self) -> list[int]:
        """The steps that have a state, newest first."""
        numbers = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def tidy(self) -> None:
        """Put in order what a crash left: an unfinished state goes, one that was being replaced gets its name back."""
        for replaced in self.folder.glob(f"{REPLACED}*"):
            final = self.folder / replaced.name.removeprefix(REPLACED)
            remove(replaced) if final.exists() else replaced.rename(final)
        for unfinished in self.folder.glob(f"{UNFINISHED}*"):
            remove(unfinished)

    def newest(self) -> State | None:
        """The newest state that is whole as far as the driver can tell; None where none was ever written.

        A damaged one is set aside. CheckpointError if all are damaged, if those that were there are gone, or for a
        state of another format.
        """
        for step in self.steps():
            if damage := find_damage(self._of(step)):
                self.set_aside(step, damage)
            else:
                return self._read(step)
        last = self.folder / "latest"
        damaged = sorted(path.name for path in self.folder.glob(f"{DAMAGED}*"))
        if not damaged and not last.exists():
            return None
        why = f"are damaged ({', '.join(damaged)})" if damaged else f"are gone; the last was {_text(last)}"
        raise CheckpointError(
            "the states of this run in {} {}. Put one back, or start a run with another trial_name, for example from "
            "a checkpoint of this one (actor.path)", self.folder, why,
        )  # fmt: skip

    def _read(self, step: int) -> State:
        folder = self._of(step)
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            record = record if isinstance(record, dict) else {}
            raise CheckpointError(
                "{} has format {}, of areno {}; this areno reads format {}. Go on with the version that wrote it, or "
                "start a run from a checkpoint of this one (actor.path)",
                folder, record.get("format"), record.get("areno"), FORMAT,
            )  # fmt: skip
        return State(folder, step, record)

    def set_aside(self, step: int, damage: str) -> None:
        """Give a damaged state another name, with a warning."""
        names = [f"{DAMAGED}{_PREFIX}{step:06d}{more}" for more in ("", *(f"-{n}" for n in range(2, 100)))]
        aside = next(path for name in names if not (path := self.folder / name).exists())
        logger.warning("the state of step %d is damaged: %s. It is kept as %s", step, damage, aside)
        self._of(step).rename(aside)

    def begin(self, step: int) -> Path:
        """A new folder for the state of a step, to be filled and given to `finish`."""
        folder = self.folder / f"{UNFINISHED}{_PREFIX}{step:06d}-{os.getpid()}"
        remove(folder)
        (folder / ENGINE).mkdir(parents=True)
        return folder

    def begin_again(self, step: int) -> Path | None:
        """Like `begin` for a step that has a state: the engine's part is linked from there. None if it cannot be."""
        source, folder = self._of(step) / ENGINE, self.begin(step)
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
        """Make a filled folder the state of its step, on the disk for good, and remove those that are too old.

        What the engine wrote is there for good already.
        """
        text = json.dumps({"format": FORMAT, **record})
        (folder / RECORD).write_text(text, encoding="utf-8")
        sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = {"crc32": zlib.crc32(text.encode()), "sizes": sizes}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        sync_tree(folder)
        final, replaced = self._of(step), self.folder / f"{REPLACED}{self._of(step).name}"
        if final.exists():
            remove(replaced)
            final.rename(replaced)
        folder.rename(final)
        sync(self.folder)
        atomic_write_text(self.folder / "latest", f"{final.name}\n")
        remove(replaced)
        for old in self.steps()[self.keep :]:
            atomic_remove(self._of(old))
        return final

    def size(self) -> int:
        """Bytes of the newest state; 0 without one."""
        newest = next(iter(self.steps()), None)
        files = [] if newest is None else self._of(newest).rglob("*")
        return sum(path.stat().st_size for path in files if path.is_file())

    def _of(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    @property
    def finished(self) -> dict[str, Any] | None:
        """{"step", "result", "ended_by": the setting that ended it} of a run that came to its end.

        None for another run, and where the file is damaged.
        """
        try:
            found = json.loads((self.folder / "finished.json").read_text(encoding="utf-8"))
            ended_by = found.get("ended_by", "total_train_steps")
            return {"step": int(found["step"]), "result": float(found["result"]), "ended_by": str(ended_by)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    @property
    def are_unfinished(self) -> bool:
        """Whether there is one to go on from, of a run that has not come to its end."""
        return bool(self.steps()) and self.finished is None

    def set_finished(self, step: int | None, result: float | None = None, ended_by: str = "") -> None:
        """Note the end of the run. step: None for a run that goes on after all."""
        if step is None:
            (self.folder / "finished.json").unlink(missing_ok=True)
        else:
            record = {"step": step, "result": result, "ended_by": ended_by}
            atomic_write_text(self.folder / "finished.json", json.dumps(record) + "\n")


def find_damage(folder: Path) -> str:
    """What is wrong with the files of a state, as far as the driver can tell; "" if nothing is."""
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


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "damaged"


class StatefulEngine(Protocol):
    """What is asked of the engine; see areno.engine.engine."""

    def save_state(self, folder: str | Path, with_moments: bool = True) -> None: ...

    def state_written(self, wait: bool = False) -> bool: ...


@dataclass
class _Write:
    """A state that is being written. thread: finishes its folder when the engine has written its part."""

    step: int
    folder: Path
    record: Mapping[str, Any]
    alarm: threading.Timer
    thread: threading.Thread | None = None
    error: Exception | None = None


class StateWriter:
    """Of one run. before: called, in another thread, before a state becomes whole. slow_s: when writing takes longer,
    that is told; None: never.

    A state that cannot be written is told in a warning, and the run goes on: what was written before stays.
    """

    def __init__(
        self,
        config: RecoverConfig,
        states: States,
        engine: Callable[[], StatefulEngine],
        before: Callable[[], object],
        slow_s: float | None = None,
    ):
        self.config, self.states, self._slow_s = config, states, slow_s
        self._engine, self._before = engine, before
        self._write: _Write | None = None
        self.written_step: int | None = None  # of the newest whole state, where this run wrote or loaded it

    def begin(self, step: int, record: Mapping[str, Any]) -> bool:
        """Begin to write the state as it is now. False if the one before is still under way."""
        self.poll()
        if self._write is not None:
            return False
        try:
            folder = self.states.begin_again(step) if step == self.written_step else None
            if folder is not None:
                self._write = _Write(step, folder, record, self._alarm(step))
                self._finish(self._write)
                return True
            self._check_room()
            folder = self.states.begin(step)
            self._write = _Write(step, folder, record, self._alarm(step))
            self._engine().save_state(folder / ENGINE, not self.config.no_save_optim)
        except (CheckpointError, OSError) as error:
            self._failed(step, error)
        except ArenoError:  # the engine cannot go on, and nothing will ever be whole
            self.drop()
            raise
        return True

    def poll(self, wait: bool = False) -> None:
        """Bring what is under way to its end as far as that can be without waiting, or entirely."""
        write = self._write
        if write is None:
            return
        try:
            if write.thread is None:
                if not self._engine().state_written(wait):
                    return
                self._finish(write)
            assert write.thread is not None
            if wait:
                write.thread.join()
            if write.thread.is_alive():
                return
            if write.error is not None:
                raise write.error
        except (CheckpointError, OSError) as error:
            self._failed(write.step, error)
        except ArenoError:
            self.drop()
            raise
        else:
            write.alarm.cancel()
            self._write, self.written_step = None, write.step

    def _alarm(self, step: int) -> threading.Timer:
        """A disk that does not answer is no error, and only a thread waits for it: nobody else would notice."""

        def tell() -> None:
            logger.warning(
                "the state of step %d has been under way for %.0f s: the disk of %s is slow, or does not answer. There "
                "is no newer state until it is written", step, self._slow_s, self.states.folder,
            )  # fmt: skip

        timer = threading.Timer(self._slow_s or 0.0, tell)
        timer.daemon = True
        if self._slow_s is not None:
            timer.start()
        return timer

    def _finish(self, write: _Write) -> None:
        def finish() -> None:
            try:
                self._before()
                self.states.finish(write.folder, write.step, write.record)
            except Exception as error:
                write.error = error

        write.thread = threading.Thread(target=finish, daemon=True, name="areno-state")
        write.thread.start()

    def write(self, step: int, record: Mapping[str, Any]) -> bool:
        """Write the state as it is now, and wait until it is whole. Whether it is."""
        self.poll(wait=True)
        self.begin(step, record)
        self.poll(wait=True)
        return self.written_step == step

    def drop(self) -> None:
        """Forget what is under way, and remove it unless it has just become whole."""
        write, self._write = self._write, None
        if write is not None:
            write.alarm.cancel()
            if write.thread is not None:
                write.thread.join()
            remove(write.folder)

    def _check_room(self) -> None:
        """A full disk is seen before it is full, so that what else the run writes has its room."""
        needed, free = self.states.size(), shutil.disk_usage(self.states.folder).free
        if free < needed:
            text = "{} has {:.3g} GiB free, and it needs {:.3g}"
            raise CheckpointError(text, self.states.folder, free / 2**30, needed / 2**30)

    def _failed(self, step: int, error: Exception) -> None:
        with suppress(OSError):
            self.drop()
        last = "there is no other" if self.written_step is None else f"that of step {self.written_step} stays"
        logger.warning("the state of step %d could not be written: %s. The run goes on; %s", step, error, last)
