"""Checkpoints to a model repository of the Hugging Face hub, in a thread beside the run."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from areno import heartbeat
from areno.errors import ConfigError, Problem

logger = logging.getLogger("areno.saver")

_LOOK_S = 1.0
TOKEN = "HF_TOKEN"  # environment variable


class HubUpload:
    """Uploads one checkpoint at a time, each as a commit. Of those that wait, only the newest is uploaded.

    What goes wrong is a warning: a run does not end because of it. ConfigError for a name that cannot be a
    repository's, and where there is no token. private: of the repository, if it is made.
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
        self._thread: threading.Thread | None = None  # while there is something to upload

    def push(self, folder: Path) -> None:
        """Upload a checkpoint when those before it are done."""
        with self._lock:
            if self._waiting is not None:
                logger.warning("%s is not pushed to the hub: a newer checkpoint has overtaken it", self._waiting.name)
            self._waiting = folder
            if self._thread is None:
                self._thread = threading.Thread(target=self._upload_all, name="areno-hub", daemon=True)
                self._thread.start()

    @property
    def needed(self) -> set[Path]:
        """The checkpoints that must stay for now."""
        with self._lock:
            return {folder for folder in (self._waiting, self._uploading) if folder is not None}

    def wait(self) -> None:
        """Return when everything is uploaded."""
        thread = self._thread
        if thread is not None:
            logger.info("waiting for the upload to %s", self.repo)
            while thread.is_alive():  # however long that takes: the client has limits of its own for a dead connection
                thread.join(_LOOK_S)
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
                delete_patterns=["*.safetensors", "*.safetensors.index.json"],  # of a model in other files
            )
            logger.info("checkpoint pushed: %s to %s", folder.name, repo)
        except Exception as error:  # the client raises whatever its transport does
            reason = f"{type(error).__name__}: {error}"
            _warn(f"{folder.name} could not be pushed to {self.repo}; the run goes on ({reason})", token)


def _warn(text: str, token: str) -> None:
    """As one line, and without the token, which a server may send back."""
    logger.warning("%s", " ".join(text.split()).replace(token, "***") if token else " ".join(text.split()))
