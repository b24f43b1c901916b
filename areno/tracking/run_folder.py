"""Reads the files that describe a run or a sweep: settings, command line, versions and algorithm.

`new_run.py` writes them. They may come from another machine or another version, or be damaged, so each reader checks
the form of its file. All of them raise ArenoError with the name of the file.

Makes the folder of a new run and writes down its settings and versions. description.py reads these again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areno import __version__
from areno.config.experiments import ExperimentConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.durable import UNFINISHED, locked, make_folders, remove, remove_empty, sync, write_text_whole
from areno.files.paths import beginning_of, content_of, root
from areno.files.small_yaml import YamlFault, fault, plain_yaml
from areno.schema.fields import Section

SETTINGS, OVERRIDES, VERSIONS = "config.yaml", "overrides.yaml", "versions.json"
SWEEP = "multirun.yaml"  # written by Hydra
RECIPE = "# Recipes: "  # as in the files of conf/


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run as nested dictionaries; {} without config.yaml."""
    found = _mapping(folder / SETTINGS, _yaml(folder / SETTINGS))
    return {name: value for name, value in found.items() if name != "defaults"}  # Hydra's, not a setting


def overrides_of(folder: Path) -> list[str]:
    """Return the settings of the command lines that a run was started with, such as "seed=2"."""
    return _lines(folder / OVERRIDES, _yaml(folder / OVERRIDES))


def sweep_of(folder: Path) -> list[str]:
    """Return the settings of the command line that a sweep was started with, in the form that Hydra got them."""
    found = _yaml(folder / SWEEP)
    for name in ("hydra", "overrides", "task"):
        found = _mapping(folder / SWEEP, found).get(name)
    return _lines(folder / SWEEP, found)


def versions_of(folder: Path) -> dict[str, str | None]:
    """Return package -> version, and the git revision of areno; {} without versions.json."""
    path = folder / VERSIONS
    content = content_of(path)
    try:
        found = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArenoError("{} cannot be read: {}", path, fault(error)) from error
    return {name: None if value is None else str(value) for name, value in _mapping(path, found).items()}


def recipe_of(folder: Path) -> str:
    """Return the recipe that a command has written into config.yaml; "" for the run of a script."""
    first, _, _ = beginning_of(folder / SETTINGS).decode("utf-8", "replace").partition("\n")
    return first.removeprefix(RECIPE).strip() if first.startswith(RECIPE) else ""


def _yaml(path: Path) -> Any:
    try:
        return plain_yaml(path)
    except YamlFault as error:
        raise ArenoError("{} cannot be read: {}", path, error) from error


def _mapping(path: Path, found: Any) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ArenoError("{} cannot be read: it holds a {}, where a mapping is expected", path, _kind(found))
    return {str(name): value for name, value in found.items()}


def _lines(path: Path, found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or any(isinstance(line, (list, dict)) for line in found):
        raise ArenoError("{} cannot be read: it holds a {}, where a list of texts is expected", path, _kind(found))
    return [str(line) for line in found]


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text"}.get(type(value), "single value")


_FILES = (VERSIONS, OVERRIDES, SETTINGS)  # in the order of writing
_NO_RESULTS = (*_FILES, "run.log", "dropped.log")  # the lines of the log were on stderr too
_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "datasets",
    "numpy",
    "triton",
    "flash-attn",
    "hydra-core",
    "omegaconf",
)


@dataclass(frozen=True)
class NewFolder:
    """The folder of a run or a sweep. before: what was there already: the folder, its parents, what was in it."""

    path: Path
    before: frozenset[Path]

    def of_run(self, run_dir: Path) -> NewFolder:
        """This folder or, if it is that of a sweep, the one of a run in it, which Hydra may have made already."""
        if run_dir == self.path:
            return self
        found = make(run_dir)
        assert found is not None
        return NewFolder(run_dir, frozenset(p for p in found.before if p in self.before or run_dir in p.parents))

    def describe(self, config: Section, overrides: list[str], recipe: str = "") -> None:
        """Write config.yaml, overrides.yaml and versions.json.

        `--config-dir=<path> --config-name=config` starts the same run again, under another trial_name.
        """
        try:
            with locked(self.path):
                if is_described(self.path):  # `make` has seen that it was not
                    raise BlockingIOError
                for name, content in _description(config, overrides, recipe).items():
                    write_text_whole(self.path / name, content)
        except BlockingIOError as error:
            raise ConfigError(Problem("trial_name", "another run has just started in {}", self.path)) from error
        except OSError as error:
            self.discard()
            raise _unwritable(self.path, error) from error

    def discard(self) -> None:
        """Remove what a run has made that failed before it had results. With results, all of it stays."""
        entries = [path for path in self.path.glob("*") if path not in self.before]
        try:
            made = [*entries, *(path for entry in entries if entry.is_dir() for path in _below(entry))]
        except OSError:  # a state is still being written or removed, so there are results
            return
        files = [path for path in made if path.is_file()]
        if any(path.name not in _NO_RESULTS for path in files):
            return
        with contextlib.suppress(OSError):
            for path in files:
                path.unlink()
        folders = [path for path in sorted(made, reverse=True) if path not in files]
        remove_empty([*folders, *(path for path in (self.path, *self.path.parents) if path not in self.before)])


def _below(folder: Path) -> list[Path]:
    """All files and folders in it. OSError for a folder that cannot be read, or is gone before it is."""

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)  # rglob would leave such a folder out, or not, by the version of Python
    return [Path(parent, name) for parent, folders, files in walk for name in (*folders, *files)]


def make(run_dir: Path, new: bool = False) -> NewFolder | None:
    """Create the folder of a run or a sweep. Raises ConfigError if it cannot be made or holds an earlier run.

    new: the folder must not be there yet, and the result is None if it is. So two runs that start in the same second
    do not share a folder.
    """
    try:
        if not new and (is_described(run_dir) or is_sweep(run_dir)):
            text = "{} holds an earlier {}; choose another name or move that folder away"
            raise ConfigError(Problem("trial_name", text, run_dir, "sweep" if is_sweep(run_dir) else "run"))
        before = frozenset(path for path in (run_dir, *run_dir.parents, *run_dir.glob("*")) if path.exists())
        make_folders(run_dir, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            return None
        raise ConfigError(Problem("cluster.fileroot", "cannot make {}: {}", run_dir, error.strerror)) from error
    return NewFolder(run_dir, before)


def for_script(config: ExperimentConfig) -> Path:
    """Make and describe the folder of a run that a script starts: <fileroot>/<experiment_name>/<trial_name or time>.

    Raises ConfigError if it cannot be made, or if the trial is there already.
    """
    name = config.trial_name or time.strftime("%Y%m%d-%H%M%S")
    run_dir, count = folder_of(config, name), 1
    while (folder := make(run_dir, new=config.trial_name is None)) is None:
        count += 1
        run_dir = folder_of(config, f"{name}-{count}")
    folder.describe(config, [])
    return run_dir


def folder_of(config: ExperimentConfig, name: str) -> Path:
    """The folder of the run of this name."""
    return Path(config.cluster.fileroot).expanduser().absolute() / config.experiment_name / name


def is_described(folder: Path) -> bool:
    """Whether a run has begun there. Of the files that describe it, config.yaml is written last."""
    return os.path.exists(folder / SETTINGS)  # False, and no error, also for a name that is too long


def is_sweep(folder: Path) -> bool:
    """Whether a sweep has begun there."""
    return os.path.exists(folder / SWEEP)


def begun_at(folder: Path) -> float:
    """When the run or the sweep of a folder began, or went on with other settings; seconds since the epoch."""
    return (folder / (SWEEP if is_sweep(folder) else SETTINGS)).stat().st_mtime


def has_results(folder: Path) -> bool:
    """Whether a run has left more than its description and its log."""
    files = (path for path in _below(folder) if path.is_file() and not path.name.startswith(UNFINISHED))
    return any(path.name not in _NO_RESULTS for path in files)


def describe_again(folder: Path, config: Section, overrides: list[str] | None = None) -> None:
    """Write new settings, and the versions of this session. overrides: None leaves those that are there.

    Raises ConfigError if they cannot be written.
    """
    try:
        for name, content in _description(config, overrides or [], recipe_of(folder)).items():
            if overrides is not None or name != OVERRIDES:
                write_text_whole(folder / name, content)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(Problem("cluster.fileroot", "cannot write to {}: {}", folder, error.strerror))


def _description(config: Section, overrides: list[str], recipe: str) -> dict[str, str]:
    """File name -> content."""
    config_yaml = OmegaConf.to_yaml(OmegaConf.create({"defaults": ["recipe", "_self_"]} | asdict(config)))
    header = f"{RECIPE}{recipe}\n" if recipe else ""
    # Quoted, so that each is read back as text.
    overrides_yaml = "".join(f"- {json.dumps(line, ensure_ascii=False)}\n" for line in overrides) or "[]\n"
    contents = (json.dumps(versions(), indent=2) + "\n", overrides_yaml, header + config_yaml)
    return dict(zip(_FILES, contents, strict=True))


def versions() -> dict[str, str | None]:
    """Versions of areno, Python and the packages that matter, and the git revision if areno runs from a clone."""
    found: dict[str, str | None] = {"areno": __version__, "git": _git_revision(), "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"platform": platform.platform()}


def _git_revision() -> str | None:
    """Commit of the clone areno runs from, with `-dirty` if files differ from it."""
    if not (root() / ".git").exists():
        return None
    command = ["git", "-C", str(root()), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


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
