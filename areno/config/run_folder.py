"""The folder of one run: what it was told and which code it ran."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import areno
from areno.config.build import to_dict
from areno.config.compose import to_yaml
from areno.config.fields import Section
from areno.config.paths import root
from areno.errors import ConfigError, Problem

_FILES = ("config.yaml", "overrides.yaml", "versions.json")
_LOG = "run.log"  # its lines were on the console too
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


def make(run_dir: Path, new: bool = False) -> bool:
    """Create the folder of a run or a sweep. Raises ConfigError if an earlier one's is there, or if it cannot be.

    False if it is there but must be `new`: runs that start in the same second do not share one.
    """
    if not new and any((run_dir / name).exists() for name in ("config.yaml", "multirun.yaml")):
        raise ConfigError(
            [Problem("trial_name", f"{run_dir} holds an earlier run; choose another name or move that folder away")]
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            return False
        raise ConfigError([Problem("cluster.fileroot", f"cannot make {run_dir}: {error.strerror}")]) from error
    return True


def for_script(config: Any) -> Path:
    """The folder of a run that a script starts, made and described: <fileroot>/<experiment_name>/<trial_name or time>.

    config: an ExperimentConfig. Raises ConfigError where it cannot be made, or if the trial is there already.
    """
    folder = Path(config.cluster.fileroot).expanduser().absolute() / config.experiment_name
    name = config.trial_name or time.strftime("%Y%m%d-%H%M%S")
    run_dir, count = folder / name, 1
    while not make(run_dir, new=config.trial_name is None):
        count += 1
        run_dir = folder / f"{name}-{count}"
    describe(run_dir, config, [])
    return run_dir


def describe(run_dir: Path, config: Section, overrides: list[str]) -> None:
    """Write config.yaml, overrides.yaml and versions.json.

    `--config-dir=<run_dir> --config-name=config` starts the same run again, under another trial_name.
    """
    config_yaml = to_yaml({"defaults": ["recipe", "_self_"]} | to_dict(config))
    contents = (config_yaml, to_yaml_list(overrides), json.dumps(versions(), indent=2) + "\n")
    try:
        for name, content in zip(_FILES, contents, strict=True):
            with (run_dir / name).open("x", encoding="utf-8") as file:
                file.write(content)
    except FileExistsError as error:  # it was not there a moment ago
        raise ConfigError([Problem("trial_name", f"another run has just started in {run_dir}")]) from error
    except OSError as error:
        discard(run_dir)
        raise ConfigError([Problem("cluster.fileroot", f"cannot write to {run_dir}: {error.strerror}")]) from error


def discard(run_dir: Path) -> None:
    """Remove the folder of a run that came to nothing: it holds what `describe` wrote and perhaps a log, no results."""
    if not run_dir.is_dir() or any(path.is_file() and path.name not in (*_FILES, _LOG) for path in run_dir.rglob("*")):
        return
    with contextlib.suppress(OSError):  # until a folder that holds other runs
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for folder in (run_dir, *run_dir.parents[:2]):
            folder.rmdir()


def versions() -> dict[str, str | None]:
    """Version of areno, Python and what matters beneath, and the git revision where there is one."""
    found: dict[str, str | None] = {
        "areno": areno.__version__,
        "git": _git_revision(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"platform": platform.platform()}


def to_yaml_list(lines: list[str]) -> str:
    """One YAML list item for each line, quoted so that it is read back as text."""
    return "".join(f"- {json.dumps(line, ensure_ascii=False)}\n" for line in lines) or "[]\n"


def _git_revision() -> str | None:
    """Commit of the clone areno runs from, with `-dirty` if files differ from it."""
    if not (root() / ".git").exists():
        return None
    command = ["git", "-C", str(root()), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
