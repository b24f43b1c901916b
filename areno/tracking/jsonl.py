"""Scalars in a file of JSON lines: logs/metrics.jsonl of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from areno.tracking.growing_file import GrowingFile
from areno.tracking.tracker import Tracker


class Jsonl(Tracker):
    """Writes {"step", "time" (seconds since 1970), and the scalars} as one line for each call of `log`.

    A value that is not finite becomes null. ArenoError, with the setting, if the file cannot be written.
    """

    def __init__(self, path: str | Path):
        self._file = GrowingFile(Path(path), "cluster.fileroot")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in scalars.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n"
        self._file.append(line.encode())

    def finish(self) -> None:
        self._file.close()
