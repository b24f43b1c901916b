"""The states of a run: folders to go on from, each whole or absent.

<run>/state/step-000012/engine/        weights and optimizers with their checksums: see Engine.save_state
                        run.json       the format, and the record of the driver
                        manifest.json  the sizes of these files and the checksum of run.json; it is written last
<run>/state/latest                     the name of the last one that was written
            finished.json              of a run that came to its end: its last step, its result, and what ended it
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areno.errors import CheckpointError
from areno.files.durable import REPLACED, UNFINISHED, remove, remove_whole, sync, sync_tree, write_text_whole

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
        write_text_whole(self.folder / "latest", f"{final.name}\n")
        remove(replaced)
        for old in self.steps()[self.keep :]:
            remove_whole(self._of(old))
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
            write_text_whole(self.folder / "finished.json", json.dumps(record) + "\n")


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
