"""The files that grow while a run goes on, and how to cut them back to an earlier step of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from areno.files.durable import remove, sync


class RunFiles:
    """Of the run in a folder. tensorboard: the folder of its event files where that is not in the run's own."""

    def __init__(self, folder: Path, tensorboard: str | Path | None = None):
        self.folder = folder
        self.events = folder / "tensorboard" if tensorboard is None else Path(tensorboard).expanduser()
        self._synced_at = 0
        # In a folder of several runs the name of an event file tells whose it is.
        self.event_suffix = "" if tensorboard is None else f".{zlib.crc32(os.fsencode(folder.absolute())):08x}"

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of the files that lines and records are appended to, as they are now."""
        return {name: path.stat().st_size for name, path in self._growing()}

    def sync(self) -> None:
        """Put on the disk for good what `sizes` counts, and the samples since the last call."""
        for _, path in self._growing():
            sync(path)
        for path in self._samples(unfinished=False):  # which the next step may be writing meanwhile
            if (changed_at := path.stat().st_mtime_ns) > self._synced_at:
                self._synced_at = changed_at
                sync(path)
                sync(path.parent)

    def cut_back(self, step: int, sizes: Mapping[str, int], until: Mapping[str, int]) -> None:
        """Take away what was written after `sizes` were taken, at the end of a step.

        Log lines go to logs/dropped.log; those of the session that goes on, which began at the sizes `until`, stay.
        """
        for name, path in list(self._growing()):
            size = sizes.get(name, 0)
            if name == "run.log":
                _drop_lines(path, size, until.get(name, 0))
            elif path.stat().st_size > size:
                os.truncate(path, size)  # also to nothing: a TensorBoard that reads a file stops where it is gone
        for path in self._samples():
            if path.suffix == ".tmp" or (path.suffix == ".jsonl" and path.stem.isdecimal() and int(path.stem) > step):
                remove(path)

    def _samples(self, unfinished: bool = True) -> list[Path]:
        """The files of a step each, oldest first. unfinished: also those that have not got their name yet."""
        found = (*self.folder.glob("rollouts/*"), *self.folder.glob("eval/**/*"))
        found = [path for path in found if (unfinished or path.suffix != ".tmp") and path.is_file()]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def _growing(self) -> Iterator[tuple[str, Path]]:
        for path in (self.folder / "logs" / "metrics.jsonl", self.folder / "logs" / "run.log"):
            if path.exists():
                yield path.name, path
        for path in sorted(self.events.glob(f"events.out.tfevents.*{self.event_suffix}")):
            yield path.name, path


def _drop_lines(log: Path, start: int, end: int) -> None:
    """Move what a log has from byte `start` to `end` to another file. It may be open for appending."""
    text = log.read_bytes()
    if start < end:
        with (log.parent / "dropped.log").open("ab") as dropped:
            dropped.write(text[start:end])
        with log.open("r+b") as file:
            file.truncate(start)
            file.seek(start)
            file.write(text[end:])
