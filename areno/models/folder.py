"""From what the user wrote in `path` to a local folder, downloading from the Hugging Face hub where needed.

A JSON file of a model folder with typed look-ups. What is wrong with it is gathered, so that all of it is told.

The weight files of a model folder: which there are and which tensors they hold, from their headers alone.

The files of a model folder beside weights and config.json: tokenizer, chat template, generation settings.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError, safe_open

from areno.errors import CheckpointError, Key, Problem, printable

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


T = TypeVar("T")
MOST = 2**31 - 1  # of every int: no size of a model comes near, and kernels count so far


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in the file. CheckpointError where it cannot be read or is something else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values


class RawConfig:
    """The fields of a file, or of a section in it. Every problem names the file and the field.

    A look-up that fails adds to `problems` and returns something of the right type, so that reading goes on.
    """

    def __init__(self, values: dict[str, Any], origin: str, problems: list[Problem] | None = None):
        self.values, self.origin = values, origin
        self.problems: list[Problem] = [] if problems is None else problems
        self._read: set[str] = set()
        self._assumed: dict[str, Any] = {}

    def assume(self, **values: Any) -> None:
        """What transformers takes for fields of a family that are absent, where it is not what `get` is asked for."""
        self._assumed.update(values)

    def section(self, name: str) -> RawConfig:
        """The object in a field; without fields where it is absent or null."""
        return RawConfig(self.get(name, dict, {}), f"{self.origin}: {name}", self.problems)

    def get(
        self,
        name: str,
        kind: type[T],
        default: T | None = None,
        *,
        ge: float | None = None,
        gt: float | None = None,
        le: float | None = None,
    ) -> T:
        """The field, or `default` where it is absent or null. Without a default the field is required.

        ge, gt, le: bounds of a number: at least, more than, at most. An int is at most MOST, a float is finite.
        """
        self._read.add(name)
        value: Any = self.values.get(name, self._assumed.get(name))
        if value is None and default is not None:
            return default
        if kind is int and le is None:
            le = MOST
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 1e300 else math.inf
        if _holds(value, kind, ge, gt, le):
            return cast(T, value)
        bounds = [("at least", ge), ("more than", gt), ("at most", le)]
        expected = ", ".join([kind.__name__, *(f"{words} {bound}" for words, bound in bounds if bound is not None)])
        found = "missing" if value is None else reprlib.repr(value)
        self.wrong(f"{name} is {found}, expected {expected}")
        if default is not None:
            return default
        return cast(T, kind(1) if kind in (int, float) else kind())  # type: ignore[call-arg]

    def wrong(self, what: str) -> None:
        """Add a problem."""
        self.problems.append(Problem("", f"{self.origin}: {what}"))

    def refuse(self, name: str, supported: str, found: object = None) -> None:
        """Add the problem of a field whose value this code would compute wrongly. found: what to show of the value."""
        shown = reprlib.repr(self.values.get(name) if found is None else found)
        self.wrong(f"{name} is {shown}, which is not supported; expected {supported}")

    def refuse_unknown(self, harmless: Collection[str], where: str = "") -> None:
        """Add a problem for each field that nothing has looked up, unless it is harmless or says nothing.

        Names that start with an underscore are a library's own notes. where: for the message.
        """
        for name, value in self.values.items():
            if name in self._read or name in harmless or name.startswith("_") or not value:
                continue
            advice = "remove it if the model computes the same without it"
            name = name if name.isidentifier() and len(name) < 60 else reprlib.repr(name)
            self.wrong(f"{name} is {reprlib.repr(value)}, a field that areno does not know{where}; {advice}")

    def error(self) -> CheckpointError:
        """All problems in one error, each told once."""
        return CheckpointError(dict.fromkeys(self.problems))


def _holds(value: Any, kind: type, ge: float | None, gt: float | None, le: float | None) -> bool:
    """Whether the value has the type, a bool being no int, and is finite and within the bounds if it is a number."""
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        return False
    if kind not in (int, float):
        return True
    is_within = (ge is None or value >= ge) and (gt is None or value > gt) and (le is None or value <= le)
    return is_within and (kind is int or math.isfinite(value))


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return the name of each tensor with the file that holds it.

    Raises:
        CheckpointError: if there are no weights, or with all files that are missing, cut off or damaged.
    """
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        files = [folder / name for name in _indexed_files(folder / INDEX)]
    elif any(folder.glob("pytorch_model*.bin")):
        advice = "convert them to safetensors, for example by loading and saving the model once with transformers"
        raise CheckpointError(f"{folder} has its weights in pytorch_model.bin only; {advice}")
    else:
        wrong = f"has no weights: looked for {SINGLE} and {INDEX}; download the model again "
        advice = "(actor and critic can start from random weights in the shape of config.json: {}=true, {}=true)"
        keys = (Key("actor.init_from_scratch"), Key("critic.init_from_scratch"))
        raise CheckpointError("{} " + wrong + advice, folder, *keys)
    file_of: dict[str, Path] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, though {INDEX} lists it; download the model again")
            with opened(file) as tensors:
                file_of.update(dict.fromkeys(tensors.keys(), file))
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return file_of


def _indexed_files(index: Path) -> list[str]:
    """Return the files that an index names. Raises CheckpointError unless all are plain names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is not a safetensors index; expected weight_map, an object of file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if not _is_plain(name)]:
        wrong = f"{index}: weight_map names {', '.join(repr(name[:80]) for name in outside[:5])}; "
        raise CheckpointError(wrong + "expected plain names of .safetensors files in this folder")
    return names


def _is_plain(name: str) -> bool:
    """Return whether a name is one of a safetensors file in the same folder, which file systems can have."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0") and len(os.fsencode(name)) <= 255


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises CheckpointError, which names the file, for all that is wrong with it."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        said = printable(str(error))
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({said}); download it again") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
GENERATION = ("generation_config.json",)
ADAPTER_CONFIG = "adapter_config.json"


def copy_companions(
    sources: Sequence[Path], folder: Path, sets: Sequence[Sequence[str]] = (TOKENIZER, GENERATION)
) -> list[Path]:
    """Copy them to `folder`. A set is taken from the first source that has any file of it, never mixed from several.

    Returns the copies: files and folders in `folder`.
    """
    copies = []
    for names in sets:
        for source in sources:
            found = [source / name for name in names if (source / name).exists()]
            for path in found:
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                else:
                    # Content only: a read-only source or a link into a download cache must not make the copy so.
                    shutil.copyfile(path, folder / path.name)
                copies.append(folder / path.name)
            if found:
                break
    return copies


def is_replaceable(folder: Path) -> bool:
    """Whether what stands there is an empty folder, or a model's files and nothing else that could be of value."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    configs = {"config.json", ADAPTER_CONFIG}
    others = {name for name in names - {*configs, *TOKENIZER, *GENERATION} if ".safetensors" not in name}
    return not names or (not configs.isdisjoint(names) and not others)
