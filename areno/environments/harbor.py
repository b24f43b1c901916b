"""Folders of tasks for programs: a subfolder for each task, in Harbor's format.

- instruction.md: the prompt
- task.toml (optional): time limits, variables and metadata
- environment/ (optional): the files that the working folder begins with. A Dockerfile may only copy files
- tests/test.sh (optional): a script that writes reward.json or reward.txt to /logs/verifier

A task that needs the image of a container is refused.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from areno.environments.package import EnvironmentPackage
from areno.errors import DataError, Problem
from areno.files.paths import existing_path

logger = logging.getLogger("areno")

TASK = "task_folder"
"""The field of a row with the path of its task."""
APP = "/app"
"""Path of the working folder, as the program of a task sees it."""
_INSTRUCTION, _TEST, _SETTINGS = "instruction.md", "test.sh", "task.toml"
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_TOOLS = ("docker", "podman")
_IDLE = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER"}  # of a Dockerfile, without effect on files
_TEST_S = 120.0
_SHOWN = 10  # tasks that a message lists

# Settings of task.toml that are honoured, those that mean nothing for a run, and those without which a task is another.
_HONOURED = {"agent.timeout_sec", "verifier.timeout_sec", "verifier.env", "environment.env"}
_MEANINGLESS = {"schema_version", "version", "source", "task", "metadata", "solution", "environment.build_timeout_sec"}
_NEEDED = {
    "environment.docker_image": "an image",
    "environment.mcp_servers": "MCP servers",
    "environment.healthcheck": "a service",
    "environment.skills_dir": "skills",
    "environment.gpus": "GPUs",
    "environment.tpu": "a TPU",
    "verifier.environment": "an image of its tests",
    "verifier.collect": "commands after the agent",
    "steps": "several steps",
}


class HarborTasks(EnvironmentPackage):
    """`harbor:FOLDER`. The agent is the program of agent.command, and the tests of a task give the reward."""

    scheme = "harbor"
    needs_agent = True

    def check(self) -> None:
        """Check that the folder has tasks, and that programs can work on them here."""
        read_tasks(self._folder, self.key)

    def rows(self, split: str, options: Mapping[str, Any]) -> Sequence[Any]:
        """Return a row for each task. A folder has no splits."""
        self.check_split(split)
        self.check_options(options, ())
        tasks = read_tasks(self._folder, self.key)
        warn_of_unused(self.spec, tasks)
        return [task.row() for task in tasks]

    @property
    def _folder(self) -> Path:
        folder = existing_path(self.name)
        if folder is None or not is_task_folder(folder):
            raise self.problem("has no tasks: there is no {}/*/{}", self.name, _INSTRUCTION)
        return folder


def is_task_folder(folder: Path) -> bool:
    return any(folder.glob(f"*/{_INSTRUCTION}"))


def read_tasks(folder: Path, key: str) -> list[Task]:
    """Return the tasks of a folder. Raises DataError if there are any that cannot be used."""
    tasks = [Task(path.parent.resolve()) for path in sorted(folder.glob(f"*/{_INSTRUCTION}"))]
    wrong = {task.folder.name: reason for task in tasks if (reason := next(task.problems(), ""))}
    if wrong:
        text = "{} has {} tasks that cannot be used: {}"
        listed = "; ".join(f"{name} {reason}" for name, reason in list(wrong.items())[:_SHOWN])
        if len(wrong) > _SHOWN:
            listed += f"; and {len(wrong) - _SHOWN} others"
        if tool := next(filter(shutil.which, _TOOLS), None):
            listed += f". {tool} is installed here, but tasks do not run in containers yet"
        raise DataError(Problem(key, text, folder, len(wrong), listed))
    return tasks


def warn_of_unused(name: str, tasks: Sequence[Task]) -> None:
    counts = Counter(unused for task in tasks for unused in task.unused())
    if counts:
        listed = ", ".join(f"{what} ({count} tasks)" for what, count in sorted(counts.items()))
        logger.warning("%s: what a box does not have is ignored: %s", name, listed)


@dataclass(frozen=True)
class Task:
    folder: Path

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Task | None:
        path = row.get(TASK)
        return cls(Path(path)) if isinstance(path, str) else None

    def row(self) -> dict[str, Any]:
        prompt = (self.folder / _INSTRUCTION).read_text(encoding="utf-8").strip()
        given = self.settings.get("metadata")
        given = given if isinstance(given, dict) else {}
        metadata = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
        return {"prompt": prompt, TASK: str(self.folder), **({"metadata": metadata} if metadata else {})}

    @property
    def tests(self) -> Path | None:
        tests = self.folder / "tests"
        return tests if (tests / _TEST).is_file() else None

    @property
    def agent_s(self) -> float | None:
        """Time limit of the program in seconds, or None."""
        return self._setting("agent.timeout_sec")

    @property
    def tests_s(self) -> float:
        return self._setting("verifier.timeout_sec") or _TEST_S

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the program and of the tests."""
        return self._setting("environment.env") or {}

    @property
    def tests_environment(self) -> dict[str, str]:
        return {**self.environment, **(self._setting("verifier.env") or {})}

    def copy_files(self, work: Path) -> None:
        files = self.folder / "environment"
        if not files.is_dir():
            return
        if not (files / "Dockerfile").is_file():
            shutil.copytree(files, work, dirs_exist_ok=True, symlinks=True)
            return
        for sources, target in _Dockerfile(files).copied:
            into = work / target
            for source in sources:
                if source.is_dir():
                    shutil.copytree(source, into, dirs_exist_ok=True, symlinks=True)
                else:
                    file = into / source.name if target.endswith("/") or into.is_dir() else into
                    file.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, file, follow_symlinks=False)

    def problems(self) -> Iterator[str]:
        try:
            _ = self.settings
        except (ValueError, OSError) as error:
            yield f"has a {_SETTINGS} that cannot be read: {error}"
            return
        for key, what in _NEEDED.items():
            if self._setting(key):
                yield f"needs {what} ({key} in {_SETTINGS})"
        if self._setting("environment.os") not in (None, "linux"):
            yield f"needs another system than Linux (environment.os in {_SETTINGS})"
        if (folder := self._setting("environment.workdir")) not in (None, APP):
            yield f"needs the working folder {folder}, and a box has {APP} (environment.workdir in {_SETTINGS})"
        for key in ("agent.timeout_sec", "verifier.timeout_sec"):
            limit = self._setting(key)
            if limit is not None and not (isinstance(limit, int | float) and limit > 0):
                yield f"has {limit!r} as {key} in {_SETTINGS}; a number above 0 is expected"
        for key in ("environment.env", "verifier.env"):
            given = self._setting(key) or {}
            if not isinstance(given, dict):
                yield f"has {given!r} as {key} in {_SETTINGS}; a table is expected"
                continue
            for name, value in given.items():
                if not isinstance(value, str) or "${" in value:
                    yield f"takes {name} from the variables of the machine ({key} in {_SETTINGS}); write its value"
        files = self.folder / "environment"
        if compose := next((name for name in _COMPOSE if (files / name).exists()), None):
            yield f"needs the containers of environment/{compose}"
        if (files / "Dockerfile").is_file():
            yield from _Dockerfile(files).problems

    def unused(self) -> Iterator[str]:
        """Yield what the task asks for and a box does not have, where the task may work all the same."""
        for section, values in self.settings.items():
            if section in _MEANINGLESS or section in _NEEDED:
                continue
            names = values if isinstance(values, dict) else {"": None}
            for key in (f"{section}.{name}".rstrip(".") for name in names):
                if key not in _HONOURED | _MEANINGLESS | _NEEDED.keys() | {"environment.os", "environment.workdir"}:
                    yield key
        file = self.folder / "environment/Dockerfile"
        if file.is_file() and (image := _Dockerfile(file.parent).image) not in ("", "scratch"):
            yield f"the image {image}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of task.toml."""
        file = self.folder / _SETTINGS
        if not file.is_file():
            return {}
        if sys.version_info < (3, 11):
            raise ValueError("reading it needs Python 3.11")
        import tomllib

        return tomllib.loads(file.read_text(encoding="utf-8"))

    def _setting(self, key: str) -> Any:
        value: Any = self.settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


class _Dockerfile:
    """A Dockerfile that does nothing but copy files to the working folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.image, self._work = "", "/"
        self.copied: list[tuple[list[Path], str]] = []  # (files or folders, path below the working folder)
        text = (folder / "Dockerfile").read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        self.problems = [problem for line in lines if (problem := self._read(line))]
        if not self.problems and self._work != APP:
            self.problems = [f"works in {self._work} by its Dockerfile, and a box has {APP}"]

    def _read(self, line: str) -> str:
        """Read an instruction. Returns why it needs an image, or ""."""
        instruction, _, rest = line.partition(" ")
        needs = f"needs an image, for {line[:60]!r} of its Dockerfile"
        try:
            words = shlex.split(rest)
        except ValueError:
            return needs
        match instruction.upper():
            case "FROM" if not self.image and len(words) == 1:
                self.image = words[0]
            case "WORKDIR" if len(words) == 1 and "$" not in rest:
                self._work = os.path.normpath(os.path.join(self._work, words[0]))
            case "COPY" | "ADD" if len(words) > 1 and rest[0] not in "[-" and not {"$", "<", ":"} & set(rest):
                return self._copy(words[:-1], words[-1]) or ""
            case name if name not in _IDLE:
                return needs
        return ""

    def _copy(self, names: Sequence[str], to: str) -> str:
        target = PurePosixPath(os.path.normpath(os.path.join(self._work, to)))
        if not target.is_relative_to(APP):
            return f"copies files to {target} by its Dockerfile, and a box has {APP}"
        sources = []
        for name in names:
            name = os.path.normpath(name.lstrip("/") or ".")
            found = sorted(self._folder.glob(name)) if name != "." else [self._folder]
            if not found or not all(path.resolve().is_relative_to(self._folder.resolve()) for path in found):
                return f"copies {name} by its Dockerfile, which is not in its folder environment"
            sources += found
        into = str(target.relative_to(APP))
        self.copied.append((sources, f"{into}/" if to.endswith("/") or len(sources) > 1 else into))
        return ""
