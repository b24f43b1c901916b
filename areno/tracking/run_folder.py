"""The folder of a run or a sweep: functions that make it, write its settings and versions, and read them again.

The files may come from another machine or another version of areno, or be damaged. So each function that reads a file
checks its content, and raises ArenoError with the name of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from areno.config.experiments import ExperimentConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.durable import UNFINISHED, atomic_write_text, locked, make_folders, remove, remove_empty, sync
from areno.files.paths import data_root, read_first_bytes, read_if_exists
from areno.files.small_yaml import YamlFault, describe_error, load_yaml
from areno.schema.fields import Section
from areno.version import __version__

SETTINGS, OVERRIDES, VERSIONS = "config.yaml", "overrides.yaml", "versions.json"
METRICS = "logs/metrics.jsonl"  # made at the beginning of the first step
FORECAST = "logs/forecast.json"  # predicted and measured time and memory of each phase, written at the end
TUNED = "tuned.yaml"  # settings that were chosen before the run, see tune.enabled
SWEEP = "multirun.yaml"  # written by Hydra
RECIPE = "# Recipes: "  # the first line of config.yaml begins like the files of conf/
SCRIPT = "# Script: "  # then the file of the user that defines the algorithm, or that started the run
CLASS = "# Settings: "  # of a run that a script started: the class of its settings


def settings_of(folder: Path, name: str = SETTINGS) -> dict[str, Any]:
    """Return the settings in config.yaml or tuned.yaml as nested dictionaries, {} without the file."""
    found = _checked_mapping(folder / name, _read_yaml(folder / name))
    return {name: value for name, value in found.items() if name != "defaults"}  # an entry of Hydra, and no setting


def overrides_of(folder: Path) -> list[str]:
    """Return the settings given on the command line, such as "seed=2"."""
    return _checked_lines(folder / OVERRIDES, _read_yaml(folder / OVERRIDES))


def sweep_of(folder: Path) -> list[str]:
    """Return the settings given on the command line of a sweep, as Hydra received them, such as "seed=1,2"."""
    found = _read_yaml(folder / SWEEP)
    for name in ("hydra", "overrides", "task"):
        found = _checked_mapping(folder / SWEEP, found).get(name)
    return _checked_lines(folder / SWEEP, found)


def versions_of(folder: Path) -> dict[str, str | None]:
    """Return the version of each package, None where it was not known, and the git commit of areno."""
    path = folder / VERSIONS
    content = read_if_exists(path)
    try:
        found = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArenoError("{} cannot be read: {}", path, describe_error(error)) from error
    return {name: None if value is None else str(value) for name, value in _checked_mapping(path, found).items()}


def recipe_of(folder: Path) -> str:
    """Return the algorithm that a run was started with, such as "grpo". "" if a script started the run."""
    first, _, _ = read_first_bytes(folder / SETTINGS).decode("utf-8", "replace").partition("\n")
    return first.removeprefix(RECIPE).strip() if first.startswith(RECIPE) else ""


def script_of(folder: Path) -> str:
    """Return the user's file that defines the algorithm of a run or started the run, or ""."""
    lines = read_first_bytes(folder / SETTINGS).decode("utf-8", "surrogateescape").splitlines()[:2]
    return next((line.removeprefix(SCRIPT).strip() for line in lines if line.startswith(SCRIPT)), "")


def algorithm_label(folder: Path) -> str:
    """Return the name of a run's algorithm or, if a script started the run, of its configuration class."""
    lines = read_first_bytes(folder / SETTINGS).decode("utf-8", "replace").splitlines()[:2]
    return recipe_of(folder) or next((line.removeprefix(CLASS) for line in lines if line.startswith(CLASS)), "")


def _read_yaml(path: Path) -> Any:
    try:
        return load_yaml(path)
    except YamlFault as error:
        raise ArenoError("{} cannot be read: {}", path, error) from error


def _checked_mapping(path: Path, found: Any) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ArenoError("{} cannot be read: it holds a {}, where a mapping is expected", path, _type_name(found))
    return {str(name): value for name, value in found.items()}


def _checked_lines(path: Path, found: Any) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or any(isinstance(line, (list, dict)) for line in found):
        raise ArenoError("{} cannot be read: it holds a {}, where a list of texts is expected", path, _type_name(found))
    return [str(line) for line in found]


def _type_name(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text"}.get(type(value), "single value")


_FILES = (VERSIONS, OVERRIDES, SETTINGS)  # in the order of writing
_NO_RESULTS = (*_FILES, TUNED, "run.log", "dropped.log")  # the lines of the log were on stderr too
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
class NewRunFolder:
    """A folder that was made for a new run or a sweep."""

    path: Path
    before: frozenset[Path]  # paths that existed: the folder, its parents or entries, which `discard` keeps

    def for_run(self, run_dir: Path) -> NewRunFolder:
        """Return the folder of one run: this folder itself or, in a sweep, a folder inside it, made if needed."""
        if run_dir == self.path:
            return self
        found = make_run_folder(run_dir)
        assert found is not None
        return NewRunFolder(run_dir, frozenset(p for p in found.before if p in self.before or run_dir in p.parents))

    def write_description(
        self, config: Section, overrides: list[str], recipe: str = "", script: str | Path | None = None
    ) -> None:
        """Write config.yaml, overrides.yaml and versions.json. `script` is the user's file with the algorithm.

        The same run can then be started again with `--config-dir=<path> --config-name=config` and another trial_name.
        """
        try:
            with locked(self.path):
                if has_description(self.path):  # `make_run_folder` has seen that it was not
                    raise BlockingIOError
                for name, content in _description(config, overrides, recipe, script).items():
                    atomic_write_text(self.path / name, content)
        except BlockingIOError as error:
            raise ConfigError(Problem("trial_name", "another run has just started in {}", self.path)) from error
        except OSError as error:
            self.discard()
            raise _unwritable_error(self.path, error) from error

    def discard(self) -> None:
        """Remove the files and folders of a run that failed before its first step.

        Does nothing if the run has begun a step, or has other files.
        """
        entries = [path for path in self.path.glob("*") if path not in self.before]
        try:
            made = [*entries, *(path for entry in entries if entry.is_dir() for path in _all_paths_below(entry))]
        except OSError:  # a thread is still writing or removing a state, so there are results
            return
        files = [path for path in made if path.is_file()]
        if any(path.name not in _NO_RESULTS for path in files):
            return
        with contextlib.suppress(OSError):
            for path in files:
                path.unlink()
        folders = [path for path in sorted(made, reverse=True) if path not in files]
        remove_empty([*folders, *(path for path in (self.path, *self.path.parents) if path not in self.before)])


def _all_paths_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(folder, onerror=refuse)  # rglob would leave such a folder out, or not, by the version of Python
    return [Path(parent, name) for parent, folders, files in walk for name in (*folders, *files)]


def make_run_folder(run_dir: Path, new: bool = False) -> NewRunFolder | None:
    """Make the folder of a run or a sweep. Raises ConfigError if it holds an earlier one.

    With `new`, None is returned if the folder exists. The caller can then try another name, so that two runs that start
    in the same second get different folders.
    """
    try:
        if not new and (has_description(run_dir) or is_sweep(run_dir)):
            text = "{} holds an earlier {}; choose another name or move that folder away"
            raise ConfigError(Problem("trial_name", text, run_dir, "sweep" if is_sweep(run_dir) else "run"))
        before = frozenset(path for path in (run_dir, *run_dir.parents, *run_dir.glob("*")) if path.exists())
        make_folders(run_dir, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            return None
        raise ConfigError(Problem("cluster.fileroot", "cannot make {}: {}", run_dir, error.strerror)) from error
    return NewRunFolder(run_dir, before)


def make_folder_for_script(config: ExperimentConfig) -> Path:
    """Make the folder <fileroot>/<experiment_name>/<trial_name or time>, and write settings and versions into it."""
    name = config.trial_name or time.strftime("%Y%m%d-%H%M%S")
    run_dir, count = run_folder_path(config, name), 1
    while (folder := make_run_folder(run_dir, new=config.trial_name is None)) is None:
        count += 1
        run_dir = run_folder_path(config, f"{name}-{count}")
    script = vars(sys.modules["__main__"]).get("__file__")
    folder.write_description(config, [], script=script and os.path.abspath(script))
    return run_dir


def run_folder_path(config: ExperimentConfig, name: str) -> Path:
    return Path(config.cluster.fileroot).expanduser().absolute() / config.experiment_name / name


def has_description(folder: Path) -> bool:
    """Return whether a folder holds a run. Its config.yaml is written last."""
    return os.path.exists(folder / SETTINGS)  # unlike Path.exists, no error for a name that is too long


def is_sweep(folder: Path) -> bool:
    return os.path.exists(folder / SWEEP)


def start_time(folder: Path) -> float:
    """Return the time (seconds since 1970) at which a run or a sweep started, or last resumed with changed settings."""
    return (folder / (SWEEP if is_sweep(folder) else SETTINGS)).stat().st_mtime


def has_results(folder: Path) -> bool:
    """Return whether a run has any file besides its settings, versions and log."""
    files = (path for path in _all_paths_below(folder) if path.is_file() and not path.name.startswith(UNFINISHED))
    return any(path.name not in _NO_RESULTS for path in files)


def has_metrics(folder: Path) -> bool:
    """Return whether a run has metrics, which is the case after its first step or evaluation."""
    return bool(read_first_bytes(folder / METRICS))


def rewrite_description(folder: Path, config: Section, overrides: list[str] | None = None) -> None:
    """Overwrite the settings and versions of a run that resumes. `overrides` None keeps overrides.yaml."""
    try:
        for name, content in _description(config, overrides or [], recipe_of(folder), script_of(folder)).items():
            if overrides is not None or name != OVERRIDES:
                atomic_write_text(folder / name, content)
    except OSError as error:
        raise _unwritable_error(folder, error) from error


def _unwritable_error(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(Problem("cluster.fileroot", "cannot write to {}: {}", folder, error.strerror))


def _description(config: Section, overrides: list[str], recipe: str, script: str | Path | None) -> dict[str, str]:
    config_yaml = OmegaConf.to_yaml(OmegaConf.create({"defaults": ["recipe", "_self_"]} | asdict(config)))
    header = f"{RECIPE}{recipe}\n" if recipe else f"{CLASS}{type(config).__name__}\n"
    header += f"{SCRIPT}{script}\n" if script else ""
    # Quoted, so that each is read back as text.
    overrides_yaml = "".join(f"- {json.dumps(line, ensure_ascii=False)}\n" for line in overrides) or "[]\n"
    contents = (json.dumps(versions(), indent=2) + "\n", overrides_yaml, header + config_yaml)
    return dict(zip(_FILES, contents, strict=True))


def versions() -> dict[str, str | None]:
    """Return the versions of areno, Python and important packages, and "git", which is None without a clone."""
    from importlib import metadata  # its import takes long, and --cfg does not need it

    found: dict[str, str | None] = {"areno": __version__, "git": git_revision(), "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {"platform": platform.platform()}


def git_revision() -> str | None:
    """Return the git commit of areno's clone, with `-dirty` after local changes. None without a clone."""
    if not (data_root() / ".git").exists():
        return None
    command = ["git", "-C", str(data_root()), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class RunFiles:
    """The log, metrics, event and sample files of a run, which can be truncated to an earlier step.

    Several runs may share a folder `tensorboard`. The names of this run's event files there end with `event_suffix`.
    """

    def __init__(self, folder: Path, tensorboard: str | Path | None = None):
        self.folder = folder
        self.events = folder / "tensorboard" if tensorboard is None else Path(tensorboard).expanduser()
        self._synced_at = 0
        # Several runs may share a folder of event files. The suffix names the run of a file.
        self.event_suffix = "" if tensorboard is None else f".{zlib.crc32(os.fsencode(folder.absolute())):08x}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of metrics.jsonl, run.log and each event file, by file name."""
        return {name: path.stat().st_size for name, path in self._growing_files()}

    def sync(self) -> None:
        """Flush to disk (fsync) the files that `sizes` lists, and the sample files that changed since the last call."""
        for _, path in self._growing_files():
            sync(path)
        for path in self._sample_files(unfinished=False):  # the next step may be writing unfinished ones
            if (changed_at := path.stat().st_mtime_ns) > self._synced_at:
                self._synced_at = changed_at
                sync(path)
                sync(path.parent)

    def truncate_to_step(self, step: int, sizes: Mapping[str, int], until: Mapping[str, int]) -> None:
        """Remove everything that was written after a step, so that the run can repeat the later steps.

        `sizes` are the file sizes at the end of this step. `until` are the file sizes at the start of the current
        session, which begins when the process starts or restarts lost workers. In run.log, the lines between the two
        sizes move to logs/dropped.log, and later lines stay.
        """
        for name, path in list(self._growing_files()):
            size = sizes.get(name, 0)
            if name == "run.log":
                _drop_lines(path, size, until.get(name, 0))
            elif path.stat().st_size > size:
                os.truncate(path, size)  # even to 0 bytes: TensorBoard stops reading if a file is gone
        for path in self._sample_files():
            if path.suffix == ".tmp" or (path.suffix == ".jsonl" and path.stem.isdecimal() and int(path.stem) > step):
                remove(path)

    def _sample_files(self, unfinished: bool = True) -> list[Path]:
        """Return the sample files, oldest first. With `unfinished`, include files that are still being written."""
        found = (*self.folder.glob("rollouts/*"), *self.folder.glob("eval/**/*"))
        found = [path for path in found if (unfinished or path.suffix != ".tmp") and path.is_file()]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)

    def _growing_files(self) -> Iterator[tuple[str, Path]]:
        for path in (self.folder / METRICS, self.folder / "logs" / "run.log"):
            if path.exists():
                yield path.name, path
        for path in sorted(self.events.glob(f"events.out.tfevents.*{self.event_suffix}")):
            yield path.name, path


def _drop_lines(log: Path, start: int, end: int) -> None:
    """Move the bytes from `start` to `end` of a log to dropped.log. The log may be open for appending."""
    text = log.read_bytes()
    if start < end:
        with (log.parent / "dropped.log").open("ab") as dropped:
            dropped.write(text[start:end])
        with log.open("r+b") as file:
            file.truncate(start)
            file.seek(start)
            file.write(text[end:])
