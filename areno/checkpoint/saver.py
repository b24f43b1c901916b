"""The checkpoints of a run, each whole or absent: their names, the `latest` link, and what an earlier crash left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areno.checkpoint.trigger import Trigger
from areno.config.run import SaverConfig
from areno.files.durable import REPLACED, UNFINISHED, as_checkpoint_error, remove, sync, write_whole

logger = logging.getLogger("areno.saver")

_KEY = "saver.path"


class Saver:
    """Writes the checkpoints of one run. default_dir: their folder if saver.path is not set."""

    def __init__(self, config: SaverConfig, default_dir: str | Path):
        self.folder = Path(default_dir if config.path is None else config.path).expanduser()
        self.trigger = Trigger(config)
        self.due = self.trigger.due  # whether to save after a step
        self.saved_step: int | None = None

    def check_writable(self) -> None:
        """Make the folder, try to write to it, and tidy up after a crash. Raises CheckpointError."""
        with as_checkpoint_error(self.folder, "be written", _KEY):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{UNFINISHED}step-probe").write_bytes(b"x")
            for replaced in self.folder.glob(f"{REPLACED}step-*"):
                final = self.folder / replaced.name.removeprefix(REPLACED)
                if final.exists():
                    remove(replaced)
                else:  # the crash came before the new one had its place
                    replaced.rename(final)
            for unfinished in self.folder.glob(f"{UNFINISHED}step-*"):
                remove(unfinished)

    def save(self, write: Callable[[Path], object], step: int) -> Path:
        """Let `write` fill a folder, and give it the name step-<n>. If it raises CheckpointError, nothing stays."""
        final = self.folder / f"step-{step:06d}"
        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY):
            write_whole(final, write)
            self._link(final)
        self.saved_step = step
        logger.info("checkpoint saved: %s", final)
        return final

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to save when this one would have."""
        return {"saved_step": self.saved_step, "trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.saved_step = state["saved_step"]
        self.trigger.load_state_dict(state["trigger"])

    def _link(self, final: Path) -> None:
        link = self.folder / f"{UNFINISHED}latest"
        try:
            remove(link)
            link.symlink_to(final.name, target_is_directory=True)
            link.replace(self.folder / "latest")
        except OSError as error:  # some file systems have no links; the checkpoint itself is there
            logger.warning("%s could not be linked to %s: %s", self.folder / "latest", final.name, error.strerror)
        sync(self.folder)
