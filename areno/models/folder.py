"""Model folders: finding or downloading them, reading config.json, and listing their weight and tokenizer files.

Functions that read raise CheckpointError if a file or folder is missing or damaged. `what` is the word for the folder
in messages: "model" or "adapter".
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

MODEL = Key("actor.path")  # the usual setting of a model's path; callers with another setting rename it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
TIMEOUT_S = 5.0  # of the request before a download, so that a machine without network fails quickly


def resolve_model_folder(path: str | Path, what: str = "model") -> Path:
    """Return `path` if it is a local folder, else the cached folder of a hub repository, downloaded if needed."""
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
    """Download a hub repository. Without a connection, return the cached folder."""
    # Imported here, as local folders do not need it.
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
    except Exception as error:  # the client also raises exceptions of its HTTP library
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
SHOWN = 5  # names listed in an error
MOST = 2**31 - 1  # the largest int of a field, as kernels index with int32


def read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}, expected a JSON object")
    return values


def write_json(file: Path, values: dict[str, Any]) -> Path:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def join_first_names(names: list[str]) -> str:
    """Join names for an error message. Names after the first few (SHOWN) are only counted."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class RawConfig:
    """The fields of a JSON file, or of a section in it. `origin` names the file and section in messages.

    A failed look-up adds to `problems` and returns a value of the requested type, so that reading can continue. At the
    end, the caller raises `error()` if there are problems.
    """

    def __init__(self, values: dict[str, Any], origin: str, problems: list[Problem] | None = None):
        self.values, self.origin = values, origin
        self.problems: list[Problem] = [] if problems is None else problems
        self._read: set[str] = set()
        self._assumed: dict[str, Any] = {}

    def set_defaults(self, **values: Any) -> None:
        """Set default values of absent fields. They take precedence over the argument `default` of `get`.

        A family uses this for fields whose defaults in transformers differ from those of other families.
        """
        self._assumed.update(values)

    def section(self, name: str) -> RawConfig:
        """Return the JSON object in a field. Its `problems` are the same list.

        An absent or null field has the value of `set_defaults`, else an empty one.
        """
        return RawConfig(self.get(name, dict, self._assumed.get(name, {})), f"{self.origin}: {name}", self.problems)

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
        """Check type and bounds of a field, and return its value. A failed check adds a problem.

        An absent or null field has the value `default`. Without a default, the field is required. An int must be at
        most MOST, and a float must be finite.
        """
        self._read.add(name)
        value: Any = self.values.get(name, self._assumed.get(name))
        if value is None and default is not None:
            return default
        if kind is int and le is None:
            le = MOST
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 1e300 else math.inf
        if _has_type_and_bounds(value, kind, ge, gt, le):
            return cast(T, value)
        bounds = [("at least", ge), ("more than", gt), ("at most", le)]
        expected = ", ".join([kind.__name__, *(f"{words} {bound}" for words, bound in bounds if bound is not None)])
        found = "missing" if value is None else reprlib.repr(value)
        self.add_problem(f"{name} is {found}, expected {expected}")
        if default is not None:
            return default
        return cast(T, kind(1) if kind in (int, float) else kind())  # type: ignore[call-arg]

    def add_problem(self, what: str) -> None:
        """Add a problem. `what` should name the field; the message begins with file and section."""
        self.problems.append(Problem("", f"{self.origin}: {what}"))

    def add_unsupported(self, name: str, supported: str, found: object = None) -> None:
        """Add a problem: a field has a value (in the message: `found`) other than the `supported` ones."""
        shown = reprlib.repr(self.values.get(name) if found is None else found)
        self.add_problem(f"{name} is {shown}, which is not supported; expected {supported}")

    def add_unknown_fields(self, harmless: Collection[str], where: str = "") -> None:
        """Add a problem for each field that is set, was never looked up, and is not `harmless`.

        An empty value, 0 and false count as not set. Names with a leading underscore are ignored. `where` continues the
        phrase "a field that areno does not know".
        """
        for name, value in self.values.items():
            if name in self._read or name in harmless or name.startswith("_") or not value:
                continue
            advice = "remove it if the model computes the same without it"
            name = name if name.isidentifier() and len(name) < 60 else reprlib.repr(name)
            self.add_problem(f"{name} is {reprlib.repr(value)}, a field that areno does not know{where}; {advice}")

    def error(self) -> CheckpointError:
        return CheckpointError(dict.fromkeys(self.problems))


def _has_type_and_bounds(value: Any, kind: type, ge: float | None, gt: float | None, le: float | None) -> bool:
    """Return whether a value has the type `kind` and is within bounds. A bool is not an int. A float must be finite."""
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        return False
    if kind not in (int, float):
        return True
    is_within = (ge is None or value >= ge) and (gt is None or value > gt) and (le is None or value <= le)
    return is_within and (kind is int or math.isfinite(value))


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map the name of each tensor to the weight file that holds it. Raises an error that lists all bad files."""
    file_of: dict[str, Path] = {}
    problems: list[Problem] = []
    for file in weight_files(folder):
        try:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, though {INDEX} lists it; download the model again")
            with open_safetensors(file) as tensors:
                file_of.update(dict.fromkeys(tensors.keys(), file))
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return file_of


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder. Of those that an index lists, some may be missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in _indexed_files(folder / INDEX)]
    if any(folder.glob("pytorch_model*.bin")):
        advice = "convert them to safetensors, for example by loading and saving the model once with transformers"
        raise CheckpointError(f"{folder} has its weights in pytorch_model.bin only; {advice}")
    wrong = f"has no weights: looked for {SINGLE} and {INDEX}; download the model again "
    advice = "(actor and critic can start from random weights in the shape of config.json: {}=true, {}=true)"
    keys = (Key("actor.init_from_scratch"), Key("critic.init_from_scratch"))
    raise CheckpointError("{} " + wrong + advice, folder, *keys)


def has_same_weights(folder: Path, other: Path) -> bool:
    """Return whether the tensors of `folder` equal those of `other`, rounded to the dtypes of `folder`."""
    files, others = tensor_files(folder), tensor_files(other)
    for name, file in files.items():
        if name not in others:
            return False
        with open_safetensors(file) as own, open_safetensors(others[name]) as theirs:
            tensor = own.get_tensor(name)
            if not tensor.equal(theirs.get_tensor(name).to(tensor.dtype)):
                return False
    return True


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the weight files that an index file lists. They must lie in its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is not a safetensors index; expected weight_map, an object of file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if not _is_plain_safetensors_name(name)]:
        wrong = f"{index}: weight_map names {', '.join(repr(name[:80]) for name in outside[:5])}; "
        raise CheckpointError(wrong + "expected plain names of .safetensors files in this folder")
    return names


def _is_plain_safetensors_name(name: str) -> bool:
    """Return whether a name is a valid file name that ends in .safetensors, without a folder in it."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0") and len(os.fsencode(name)) <= 255


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file in a `with` block, and yield the result of `safetensors.safe_open`."""
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
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")  # of images
ADAPTER_CONFIG = "adapter_config.json"


def copy_tokenizer_files(
    sources: Sequence[Path], folder: Path, sets: Sequence[Sequence[str]] = (TOKENIZER, GENERATION)
) -> list[Path]:
    """Copy tokenizer files, chat template and generation settings, and return the paths of the copies.

    Each item of `sets` lists files that belong together. They come from the first source that has one of the files.
    """
    copies = []
    for names in sets:
        for source in sources:
            found = [source / name for name in names if (source / name).exists()]
            for path in found:
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                else:
                    # Copy the content alone: the copy must not be read-only, or a link into a download cache.
                    shutil.copyfile(path, folder / path.name)
                copies.append(folder / path.name)
            if found:
                break
    return copies


def add_eos_token_ids(folder: Path, listed: Collection[int], ends: Collection[int]) -> Path | None:
    """Add the token ids `ends` to eos_token_id in generation_config.json, so that other software stops at them.

    `listed`: the ids in config.json. They are used if generation_config.json has none. Returns the file if it changed.
    """
    (name,) = GENERATION
    values = read_json(folder / name) if (folder / name).is_file() else {}
    own = values.get("eos_token_id")
    own = list(listed) if own is None else own if isinstance(own, list) else [own]
    if not set(ends) - set(own):
        return None
    return write_json(folder / name, {**values, "eos_token_id": list(dict.fromkeys([*own, *ends]))})


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty or has only the files of a model, so that a new model may replace it."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    configs = {"config.json", ADAPTER_CONFIG}
    others = {name for name in names - {*configs, *TOKENIZER, *GENERATION} if ".safetensors" not in name}
    return not names or (not configs.isdisjoint(names) and not others)
