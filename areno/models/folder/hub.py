"""From what the user wrote in `path` to a local folder, downloading from the Hugging Face hub where needed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from areno.errors import CheckpointError, Key

MODEL = Key("actor.path")  # where a model commonly comes from; callers with another setting rename it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
TIMEOUT_S = 5.0  # for the one question asked before a download, so that a machine without network is told quickly


def resolve(path: str | Path, what: str = "model") -> Path:
    """The local folder of a model: `path` itself if it is a folder, else the downloaded (or cached) hub repository.

    what: it is expected to be, for messages: "model" or "adapter".

    CheckpointError where it is neither, or cannot be downloaded.
    """
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder):  # unlike Path.is_dir, no error for a name that is too long
        return folder
    if os.path.exists(folder):
        raise CheckpointError("{} is a file, expected a Hugging Face {} folder ({})", path, what, MODEL)
    if not HUB_ID.fullmatch(str(path)):
        message = "{} does not exist; expected a local {} folder or a hub id `owner/name` ({})"
        raise CheckpointError(message, path, what, MODEL)
    return _download(str(path), what)


def _download(repo: str, what: str) -> Path:
    # Imported here: a local folder needs none of it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api = HfApi()
    try:
        revision = api.model_info(repo, timeout=TIMEOUT_S).sha
    except GatedRepoError as error:
        raise CheckpointError("the hub refuses {}: accept its terms there and set HF_TOKEN", repo) from error
    except RepositoryNotFoundError as error:
        message = "{} is neither a local folder nor a repository that the hub shows us; check {}"
        raise CheckpointError(message, repo, MODEL) from error
    except Exception as error:  # the client raises whatever its transport does
        try:
            return Path(snapshot_download(repo, allow_patterns=FILES, local_files_only=True))
        except Exception:
            message = "{} is not a local folder, is not in the local cache, and the hub cannot be reached ({}); "
            message += "name a local {} folder in {}"
            raise CheckpointError(message, repo, type(error).__name__, what, MODEL) from error
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=FILES))
    except Exception as error:
        message = "download of {} failed: {}; run again to continue it, or pass a local path ({})"
        raise CheckpointError(message, repo, error, MODEL) from error
