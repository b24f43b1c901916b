"""The checkpoints of a run. A checkpoint is either complete or absent.

`Saver` writes checkpoints, names and links them, and removes old ones. `CheckpointRanking` orders them by
saver.best_metric. `HubUpload` uploads them to a model repository of the Hugging Face hub, in a thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno import heartbeat
from areno.config.experiments import ExperimentConfig
from areno.config.run import SaverConfig
from areno.errors import ConfigError, Problem, did_you_mean
from areno.files.durable import (
    REPLACED,
    UNFINISHED,
    as_checkpoint_error,
    atomic_folder,
    atomic_remove,
    atomic_write_text,
    locked,
    make_folders,
    remove,
    remove_empty,
    sync,
)
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import gpu_by_name, local_cpu
from areno.run.progress import Trigger

if TYPE_CHECKING:
    from areno.api.trainer import Trainer
    from areno.engine.engine import Engine

logger = logging.getLogger("areno.saver")

_KEY = "saver.path"
_POLL_S = 0.05
_UPLOAD_POLL_S = 1.0
OWNER = ".owner"  # file beside the checkpoints, with the path of the run that writes them
TOKEN = "HF_TOKEN"  # environment variable


class SavedModels:
    """The models of a run. Set `trainer` after they are loaded. The run is opened before that."""

    trainer: Trainer

    def __init__(self, config: ExperimentConfig, also_saved: Sequence[str]):
        self._config, self._saver, self._also_saved = config, config.saver, also_saved

    def engine(self) -> Engine:
        return self.trainer.engine

    def write_checkpoint(self, folder: Path) -> None:
        on_cuda = self.engine().spec.devices[0].startswith("cuda")
        background = self._saver.mode == "async" or (self._saver.mode == "auto" and on_cuda)
        self.trainer.write_checkpoint(folder, background=background, merge_adapters=self._saver.merge_adapters)
        for role in self._also_saved:
            self.trainer.write_checkpoint(folder / role, role, background)

    def checkpoint_written(self) -> bool:
        return self.trainer.checkpoint_written()

    def forecast(self, prompt_tokens: int, answer_tokens: int) -> Forecast:
        engine = self.engine()
        info = engine.info
        hardware = gpu_by_name(info.device_name, info.device_bytes) if info.device_name else local_cpu()
        return forecast(self._config, hardware, len(engine.spec.devices), prompt_tokens, answer_tokens)


class CheckpointRanking:
    """Orders the saved checkpoints by the value of saver.best_metric at their steps."""

    def __init__(self, config: SaverConfig):
        self.config = config
        self.mode = config.best_mode or ("min" if (config.best_metric or "").endswith("loss") else "max")
        self.values: dict[int, float | None] = {}
        self._last: tuple[int, float | None] = (-1, None)  # the last step that had a value, saved or not
        self._names: set[str] = set()  # names of all scalars so far
        self._warned = False

    def record(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Record saver.best_metric if `scalars` has it. Return whether the value of a checkpoint was set."""
        self._names |= scalars.keys()
        metric = self.config.best_metric
        if metric is None or metric not in scalars:
            return False
        value = float(scalars[metric])
        self._last = (step, value if math.isfinite(value) else None)
        if step in self.values:
            self.values[step] = self._last[1]
        return step in self.values

    def add(self, step: int) -> None:
        """Add the checkpoint of a step. The metric of the step may be recorded before or after this call."""
        self.warn_of_wrong_name()
        self.values[step] = self._last[1] if self._last[0] == step else None

    def warn_of_wrong_name(self) -> None:
        """Warn once if a checkpoint was added but no step so far has recorded saver.best_metric.

        Call this only after the step of the checkpoint has ended, because the metric may be recorded after the
        checkpoint is added.
        """
        metric = self.config.best_metric
        if metric is not None and self.values and metric not in self._names and not self._warned:
            self._warned = True
            hint = did_you_mean(metric, self._names, "; there are " + ", ".join(sorted(self._names)))
            logger.warning("saver.best_metric: no step has recorded %s, so no checkpoint is the best%s", metric, hint)

    def best_first(self, steps: Iterable[int]) -> list[int]:
        """Return the steps that have a value, the best first. Of equal values, the earlier step comes first."""
        sign = -1 if self.mode == "max" else 1
        valued = [(sign * value, step) for step in steps if (value := self.values.get(step)) is not None]
        return [step for _, step in sorted(valued)]

    def steps_to_keep(self, steps: Iterable[int]) -> set[int]:
        """Return the steps of the checkpoints to keep: the newest `saver.keep` and the best `saver.keep_best`.

        All are kept if saver.keep is null, or if saver.best_metric is set and no step has a value yet.
        """
        known = sorted(step for step in steps if step in self.values)
        best = self.best_first(known)
        if self.config.keep is None or (self.config.best_metric is not None and not best):
            return set(known)
        return {*known[-self.config.keep :], *best[: self.config.keep_best]}

    def record_text(self, best: int | None) -> str:
        values = {str(step): value for step, value in sorted(self.values.items())}
        record = {"best_metric": self.config.best_metric, "best_mode": self.mode, "best_step": best, "values": values}
        return json.dumps(record, indent=2) + "\n"

    def state_dict(self) -> dict[str, Any]:
        return {"values": [[step, value] for step, value in self.values.items()], "last": list(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state["values"])
        self._last = (state["last"][0], state["last"][1])


class HubUpload:
    """Uploads checkpoints to the Hugging Face hub in a thread, one at a time.

    During an upload, only the newest of the waiting checkpoints stays in the queue. A failed upload causes a warning.
    """

    def __init__(self, repo: str, private: bool):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import disable_progress_bars, validate_repo_id

        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            text = "is {!r}, which is no name of a repository; expected owner/name ({})"
            raise ConfigError(Problem("saver.push_to_hub", text, repo, error)) from error
        if not os.environ.get(TOKEN):
            text = "is {!r}, but the environment has no {}; set it to a token that may write to the repository"
            raise ConfigError(Problem("saver.push_to_hub", text, repo, TOKEN))
        disable_progress_bars()
        self.repo, self.private = repo, private
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._uploading: Path | None = None
        self._thread: threading.Thread | None = None  # None if no checkpoint waits

    def start_upload(self, folder: Path) -> None:
        """Start to upload a checkpoint, or queue it until the current upload ends. Does not block."""
        with self._lock:
            if self._waiting is not None:
                logger.warning("%s is not pushed to the hub: a newer checkpoint has overtaken it", self._waiting.name)
            self._waiting = folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._upload_all, name="areno-hub", daemon=True)
                self._thread.start()

    @property
    def folders_in_use(self) -> set[Path]:
        """Folders of the checkpoints that are being uploaded or are queued. They must not be removed."""
        with self._lock:
            return {folder for folder in (self._waiting, self._uploading) if folder is not None}

    def wait_for_uploads(self) -> None:
        """Block until the current and the queued upload have ended, successfully or not."""
        thread = self._thread
        if thread is not None:
            logger.info("waiting for the upload to %s", self.repo)
            while thread.is_alive():  # without a limit: the client ends a dead connection itself
                thread.join(_UPLOAD_POLL_S)
                heartbeat.beat()

    def _upload_all(self) -> None:
        while True:
            with self._lock:
                folder, self._waiting = self._waiting, None
                self._uploading = folder
                if folder is None:
                    self._thread = None
                    return
            self._upload(folder)

    def _upload(self, folder: Path) -> None:
        token = os.environ.get(TOKEN, "")
        try:
            from huggingface_hub import HfApi

            api = HfApi(token=token)
            repo = api.create_repo(self.repo, private=self.private, exist_ok=True).repo_id
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=f"areno: {folder.name}",
                delete_patterns=[
                    "*.safetensors",
                    "*.safetensors.index.json",
                ],  # of an earlier model
            )
            logger.info("checkpoint pushed: %s to %s", folder.name, repo)
        except Exception as error:  # the client passes on any error of its transport
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if token:  # a server may have sent it back
                reason = reason.replace(token, "***")
            text = "%s could not be pushed to %s; the run continues (%s)"
            logger.warning(text, folder.name, self.repo, reason)


class _CheckpointDropped(Exception):
    """Makes the context manager that writes a checkpoint remove the unfinished folder."""


class Saver:
    """Writes the checkpoints of one run, and removes checkpoints that the settings do not keep.

    `is_written()` returns whether the files of the last `save` are complete. It raises CheckpointError
    if they cannot be written.
    """

    def __init__(self, config: SaverConfig, default_dir: str | Path, is_written: Callable[[], bool] = lambda: True):
        self.config, self._is_written = config, is_written
        self.folder = Path(default_dir if config.path is None else config.path).expanduser()
        self._is_chosen = config.path is not None
        self.trigger = Trigger(config)
        self.due = self.trigger.is_due
        self.saved_step: int | None = None
        self._unfinished_step: int | None = None
        self._unfinished = ExitStack()  # leaving it renames the folder of that step to its final name
        self._interrupted_step: int | None = None  # step whose checkpoint was unfinished in the loaded state
        self.ranking = CheckpointRanking(config)
        self._hub = HubUpload(config.push_to_hub, config.hub_private) if config.push_to_hub is not None else None
        self._claim = ExitStack()

    def lock_folder(self, run_dir: Path) -> None:
        """Make the folder of the checkpoints, and lock it for this run until `unlock_folder`.

        If an earlier process of the same run has crashed, unfinished checkpoints are removed. If a checkpoint was being
        replaced, the old one is restored. Raises ConfigError if another process or run owns the folder.
        """
        with as_checkpoint_error(self.folder, "be written", _KEY), ExitStack() as claim:
            claim.callback(remove_empty, make_folders(self.folder))
            # A folder inside the run's folder belongs to the run. After a copy, the owner file may name the original.
            is_inside = self.folder.absolute().is_relative_to(run_dir.absolute())
            if not is_inside and self._read_owner() != str(run_dir.absolute()):
                self.refuse_checkpoints()
            try:
                claim.enter_context(locked(self.folder / OWNER))
            except BlockingIOError:
                if self._read_owner() == str(run_dir.absolute()):
                    text = "the run in {} is still running, in another process"
                    raise ConfigError(Problem("trial_name", text, run_dir.absolute())) from None
                raise self._in_use_error("belongs to {}, which is still running; choose another folder") from None
            claim.callback(self._remove_owner)
            (self.folder / OWNER).write_text(f"{run_dir.absolute()}\n", encoding="utf-8")
            for replaced in self.folder.glob(f"{REPLACED}step-*"):
                final = self.folder / replaced.name.removeprefix(REPLACED)
                if final.exists():
                    remove(replaced)
                else:  # the crash came before the new checkpoint was renamed
                    replaced.rename(final)
            for unfinished in self.folder.glob(f"{UNFINISHED}step-*"):
                remove(unfinished)
            self._claim = claim.pop_all()

    def refuse_checkpoints(self) -> None:
        """Raise ConfigError if the folder has checkpoints. A new run calls this: they are from another run."""
        if self._has_checkpoints():
            raise self._in_use_error("holds the checkpoints of {}; choose another folder, or move that one away")

    def unlock_folder(self) -> None:
        """Unlock the folder of the checkpoints, and remove an unfinished checkpoint."""
        self._drop_unfinished()
        self._claim.close()

    def save(self, write: Callable[[Path], object], step: int) -> Path:
        """Write the checkpoint of a step, and return its final path. Waits for the previous checkpoint first.

        With saver.mode async or auto, this may return before the files are complete. A later `poll` or
        `wait_for_checkpoint` then gives the folder its final name. A Ctrl-C or SIGTERM is raised before the renaming,
        or after the link `latest` and `self.saved_step` name the new checkpoint. After a CheckpointError, no partial
        files remain.
        """
        self.wait_for_checkpoint()
        final = self._path(step)
        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY), ExitStack() as stack:
            write(stack.enter_context(atomic_folder(final, partial(self._on_saved, step))))
            self._unfinished_step, self._unfinished = step, stack.pop_all()
        self.ranking.add(step)
        if self.config.mode == "sync":
            self.wait_for_checkpoint()
        elif self.config.mode == "auto":  # the files may be complete already
            self.poll()
        return final

    def poll(self) -> bool:
        """Return whether the last checkpoint is complete, and if so, give it its final name. Does not block."""
        step, self._unfinished_step = self._unfinished_step, None
        if step is None:
            return True
        with as_checkpoint_error(self.folder, "hold the checkpoint", _KEY), self._unfinished as stack:
            if not self._is_written():
                self._unfinished_step, self._unfinished = step, stack.pop_all()
                return False
        logger.info("checkpoint saved: %s", self._path(step))
        if self._hub is not None:
            self._hub.start_upload(self._path(step))
        self._prune_checkpoints()
        return True

    def wait_for_checkpoint(self) -> None:
        """Block until the files of the last checkpoint are complete."""
        while not self.poll():
            time.sleep(_POLL_S)

    def wait_for_all(self) -> None:
        """Block until the last checkpoint and all uploads are complete. Called at the end of a run."""
        self.wait_for_checkpoint()
        self.ranking.warn_of_wrong_name()
        if self._hub is not None:
            self._hub.wait_for_uploads()
            self._prune_checkpoints()

    def has_checkpoint(self, step: int) -> bool:
        """Return whether the checkpoint of a step is the newest complete one, or is being written."""
        return step in (self.saved_step, self._unfinished_step)

    @property
    def newest_checkpoint(self) -> Path | None:
        return None if self.saved_step is None else self._path(self.saved_step)

    def was_interrupted(self, step: int) -> bool:
        """Return whether the previous process of this run ended before it had written this step's checkpoint."""
        return step == self._interrupted_step and not self.has_checkpoint(step)

    @property
    def needs_evaluation(self) -> bool:
        """Whether every checkpoint must be evaluated, because saver.best_metric is an eval/* scalar."""
        return self.config.best_metric is not None and self.config.best_metric.startswith("eval/")

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        if self.ranking.record(step, scalars):
            self._prune_checkpoints()

    def state_dict(self) -> dict[str, Any]:
        return {
            "saved_step": self.saved_step,
            "under_way": self._unfinished_step,
            "trigger": self.trigger.state_dict(),
            "ranking": self.ranking.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. A checkpoint that this process has not finished writing is removed."""
        self._drop_unfinished()
        self.saved_step, self._interrupted_step = state["saved_step"], state["under_way"]
        if (
            self._interrupted_step is not None and self._path(self._interrupted_step).exists()
        ):  # it was finished after the state was taken
            self.saved_step = self._interrupted_step
        self.trigger.load_state_dict(state["trigger"])
        self.ranking.load_state_dict(state["ranking"])

    def _drop_unfinished(self) -> None:
        self._unfinished_step = None
        with suppress(_CheckpointDropped), self._unfinished:
            raise _CheckpointDropped

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def _on_saved(self, step: int) -> None:
        self.saved_step = step
        self._set_link("latest", step)

    def _prune_checkpoints(self) -> None:
        """Update the link `best` and the file metrics.json, and remove checkpoints that the settings do not keep.

        After a resume, the folder may have checkpoints of steps that the run will repeat. Such a checkpoint is kept
        until the run has saved one of a later step.
        """
        newest = self.saved_step
        if newest is None or (self.config.keep is None and self.config.best_metric is None):
            return
        steps = {step for step in self._steps() if self._path(step).exists()}
        best = next(iter(self.ranking.best_first(steps)), None)
        kept = {self._path(step) for step in self.ranking.steps_to_keep(steps)} | {self._path(newest)}
        kept |= set() if self._hub is None else self._hub.folders_in_use
        try:
            if self.config.best_metric is not None:
                atomic_write_text(self.folder / "metrics.json", self.ranking.record_text(best))
            if best is not None:
                self._set_link("best", best)
            for step in sorted(steps) if self.config.keep is not None else ():
                if step <= newest and self._path(step) not in kept:
                    atomic_remove(self._path(step))
                    logger.info("checkpoint removed: %s", self._path(step))
        except OSError as error:  # the checkpoints themselves are there
            logger.warning("%s could not be put in order: %s", self.folder, error.strerror)

    def _steps(self) -> list[int]:
        return [int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]

    def _has_checkpoints(self) -> bool:
        replaced = (path.name.removeprefix(f"{REPLACED}step-") for path in self.folder.glob(f"{REPLACED}step-*"))
        return bool(self._steps()) or any(step.isdecimal() for step in replaced)

    def _read_owner(self) -> str | None:
        owner = self.folder / OWNER
        return owner.read_text(encoding="utf-8").strip() if owner.exists() else None

    def _in_use_error(self, how: str) -> ConfigError:
        owner = self._read_owner()
        run = f"the run in {owner}" if owner else "an earlier run"
        return ConfigError(Problem(_KEY if self._is_chosen else "", f"{{}} {how}", self.folder, run))

    def _remove_owner(self) -> None:
        if not self._has_checkpoints():
            (self.folder / OWNER).unlink(missing_ok=True)

    def _set_link(self, name: str, step: int) -> None:
        link, target = self.folder / f"{UNFINISHED}{name}", self._path(step).name
        try:
            remove(link)
            link.symlink_to(target, target_is_directory=True)
            if not (self.folder / name).is_symlink():
                remove(self.folder / name)  # a copy that followed links made it a folder
            link.replace(self.folder / name)
        except OSError as error:  # some file systems have no links; the checkpoint itself is there
            logger.warning("%s could not be linked to %s: %s", self.folder / name, target, error.strerror)
        sync(self.folder)
