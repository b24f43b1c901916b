"""Makes the folder of a new run and writes down its settings and versions. What is in it later: see reader.py."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

from areno import __version__
from areno.config.experiments import ExperimentConfig
from areno.config.fields import Section
from areno.errors import ConfigError, Problem
from areno.files.paths import root

_FILES = ("config.yaml", "overrides.yaml", "versions.json")
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
    """Create the folder of a run or a sweep. Raises ConfigError if it cannot be made or holds an earlier run.

    new: the folder must not be there yet, and the result is False if it is. So two runs that start in the same second
    do not share a folder.
    """
    if not new and any((run_dir / name).exists() for name in ("config.yaml", "multirun.yaml")):
        text = "{} holds an earlier run; choose another name or move that folder away"
        raise ConfigError(Problem("trial_name", text, run_dir))
    try:
        run_dir.mkdir(parents=True, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            return False
        raise ConfigError(Problem("cluster.fileroot", "cannot make {}: {}", run_dir, error.strerror)) from error
    return True


def for_script(config: ExperimentConfig) -> Path:
    """Make and describe the folder of a run that a script starts: <fileroot>/<experiment_name>/<trial_name or time>.

    Raises ConfigError if it cannot be made, or if the trial is there already.
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
    config_yaml = OmegaConf.to_yaml(OmegaConf.create({"defaults": ["recipe", "_self_"]} | asdict(config)))
    # Quoted, so that each is read back as text.
    overrides_yaml = "".join(f"- {json.dumps(line, ensure_ascii=False)}\n" for line in overrides) or "[]\n"
    contents = (config_yaml, overrides_yaml, json.dumps(versions(), indent=2) + "\n")
    try:
        for name, content in zip(_FILES, contents, strict=True):
            with (run_dir / name).open("x", encoding="utf-8") as file:
                file.write(content)
    except FileExistsError as error:  # `make` has seen that it was not there
        raise ConfigError(Problem("trial_name", "another run has just started in {}", run_dir)) from error
    except OSError as error:
        discard(run_dir)
        raise ConfigError(Problem("cluster.fileroot", "cannot write to {}: {}", run_dir, error.strerror)) from error


def discard(run_dir: Path) -> None:
    """Remove the folder of a run that failed before it had results. A folder with other files stays."""
    no_results = (*_FILES, "run.log")  # the lines of the log were on stderr too
    if not run_dir.is_dir() or any(path.is_file() and path.name not in no_results for path in run_dir.rglob("*")):
        return
    with contextlib.suppress(OSError):  # stops at the first folder that holds other runs
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for folder in (run_dir, *run_dir.parents[:2]):
            folder.rmdir()


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
