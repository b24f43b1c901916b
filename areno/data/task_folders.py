"""Folders of tasks for programs: a subfolder for each task, in a part of Harbor's format.

- instruction.md: the prompt
- environment/ (optional): the files that the working folder begins with
- tests/test.sh (optional): a script that writes reward.txt or reward.json to /logs/verifier
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import DataError, Problem

TASK = "task_folder"
"""The field of a row with the path of its task."""
_INSTRUCTION, _TEST = "instruction.md", "test.sh"
_IMAGE = ("Dockerfile", "docker-compose.yaml")  # of a container, in environment/


def is_task_folder(folder: Path) -> bool:
    return any(folder.glob(f"*/{_INSTRUCTION}"))


def read_tasks(folder: Path, key: str) -> list[dict[str, Any]]:
    """Return a row for each task: prompt, and the path of the task. Raises DataError for tasks that cannot be used."""
    tasks = sorted(path.parent for path in folder.glob(f"*/{_INSTRUCTION}"))
    images = [task.name for task in tasks if any((task / "environment" / name).exists() for name in _IMAGE)]
    if images:
        text = "{} has tasks that need the image of a container, which a box does not have: {}"
        raise DataError(Problem(f"{key}.path", text, folder, ", ".join(images[:10])))
    return [
        {"prompt": (task / _INSTRUCTION).read_text(encoding="utf-8").strip(), TASK: str(task.resolve())}
        for task in tasks
    ]


@dataclass(frozen=True)
class Task:
    folder: Path

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Task | None:
        path = row.get(TASK)
        return Task(Path(path)) if isinstance(path, str) else None

    @property
    def tests(self) -> Path | None:
        tests = self.folder / "tests"
        return tests if (tests / _TEST).is_file() else None

    def copy_files(self, work: Path) -> None:
        """Copy the files that the working folder begins with."""
        files = self.folder / "environment"
        if files.is_dir():
            shutil.copytree(files, work, dirs_exist_ok=True, symlinks=True)
