"""The checkpoints of a run, each whole or absent: their names, the `latest` link, and the folder that they share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from areno.checkpoint.trigger import Trigger
from areno.config.run import SaverConfig
from areno.errors import ConfigError, Problem
from areno.files.durable import (
    REPLACED,
    UNFINISHED,
    as_checkpoint_error,
    locked,
    make_folders,
    remove,
    remove_empty,
    sync,
    write_whole,
)

logger = logging.getLogger("areno.saver")

_KEY = "saver.path"
OWNER = ".owner"  # a file beside the checkpoints: the folder of the run whose they are


class Saver:
    """Writes the checkpoints of one run. default_dir: their folder if saver.path is not set."""

    def __init__(self, config: SaverConfig, default_dir: str | Path):
        self.folder = Path(default_dir if config.path is None else config.path).expanduser()
        self._is_chosen = config.path is not None
        self.trigger = Trigger(config)
        self.due = self.trigger.due  # whether to save after a step
        self.saved_step: int | None = None
        self._claim = ExitStack()

    def claim(self, run_dir: Path) -> None:
        """Make the folder, and make it that of one run until `release`. What a crash of the run left is put in order.

        Raises CheckpointError if it cannot be written, and ConfigError if it belongs to another run: to one that still
        goes on, or to one that has left checkpoints.
        """
        with as_checkpoint_error(self.folder, "be written", _KEY), ExitStack() as claim:
            claim.callback(remove_empty, make_folders(self.folder))
            if self._owner() != str(run_dir.absolute()):
                self.refuse_checkpoints()
            try:
                claim.enter_context(locked(self.folder / OWNER))
            except BlockingIOError:
                raise self._belongs("belongs to {}, which still goes on; choose another folder") from None
            claim.callback(self._disown)
            (self.folder / OWNER).write_text(f"{run_dir.absolute()}\n", encoding="utf-8")
            for replaced in self.folder.glob(f"{REPLACED}step-*"):
                final = self.folder / replaced.name.removeprefix(REPLACED)
                if final.exists():
                    remove(replaced)
                else:  # the crash came before the new one had its place
                    replaced.rename(final)
            for unfinished in self.folder.glob(f"{UNFINISHED}step-*"):
                remove(unfinished)
            self._claim = claim.pop_all()

    def refuse_checkpoints(self) -> None:
        """Raise ConfigError if the folder has checkpoints. A run that starts at its beginning cannot have any."""
        if self._has_checkpoints():
            raise self._belongs("holds the checkpoints of {}; choose another folder, or move that one away")

    def release(self) -> None:
        """Leave the folder to other runs, unless there are checkpoints; without them nothing of the run stays in it."""
        self._claim.close()

    def save(self, write: Callable[[Path], object], step: int) -> Path:
        """Let `write` fill a folder, and give it the name step-<n>. If it raises CheckpointError, nothing stays.

        Ctrl-C and SIGTERM come before the folder has its name, or after `latest` and `saved_step` speak of it.
        """
        final = self.folder / f"step-{step:06d}"

        def then() -> None:
            self.saved_step = step
            self._link(final)

        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY):
            write_whole(final, write, then)
        logger.info("checkpoint saved: %s", final)
        return final

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to save when this one would have."""
        return {"saved_step": self.saved_step, "trigger": self.trigger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.saved_step = state["saved_step"]
        self.trigger.load_state_dict(state["trigger"])

    def _has_checkpoints(self) -> bool:
        steps = (path.name.removeprefix(REPLACED).removeprefix("step-") for path in self.folder.glob("*step-*"))
        return any(step.isdecimal() for step in steps)

    def _owner(self) -> str | None:
        owner = self.folder / OWNER
        return owner.read_text(encoding="utf-8").strip() if owner.exists() else None

    def _belongs(self, how: str) -> ConfigError:
        owner = self._owner()
        run = f"the run in {owner}" if owner else "an earlier run"
        return ConfigError(Problem(_KEY if self._is_chosen else "", f"{{}} {how}", self.folder, run))

    def _disown(self) -> None:
        if not self._has_checkpoints():
            (self.folder / OWNER).unlink(missing_ok=True)

    def _link(self, final: Path) -> None:
        link = self.folder / f"{UNFINISHED}latest"
        try:
            remove(link)
            link.symlink_to(final.name, target_is_directory=True)
            link.replace(self.folder / "latest")
        except OSError as error:  # some file systems have no links; the checkpoint itself is there
            logger.warning("%s could not be linked to %s: %s", self.folder / "latest", final.name, error.strerror)
        sync(self.folder)
