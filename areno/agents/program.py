"""The agent of `agent.command`: a program that samples through the session of its sample.

The program gets a working folder, a home directory and, in a box, a Unix socket as its only way out. When it has ended,
the tests of its task run in the working folder, in a box of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, BadTrajectory, ProgramTrajectory
from areno.config.rollout import AgentConfig
from areno.data.task_folders import Task
from areno.errors import ConfigError, Problem
from areno.files.paths import existing_path
from areno.sandbox import box
from areno.scoring.records import reward_number
from areno.types import ProgramEnd

MODEL = "policy"
APP, HOME, TESTS, LOGS = (
    "/app",
    "/home/agent",
    "/tests",
    "/logs/verifier",
)  # paths in a box, as Harbor's tasks have them
_COMMAND = "agent.command"
_MAX_FILE, _MAX_FILES = 1 << 16, 1 << 20  # characters of one file, and of all, that reward functions get
_SEVERAL_FILES = 4096  # that a program in a box may open
_FILE_MB = 1024
_GRADE_S = 120.0


class _Running(Protocol):
    def wait(self) -> box.Result: ...

    def cancel(self) -> object: ...


def program_agent(settings: AgentConfig) -> Callable[[AgentContext, AgentBatch], Any]:
    """Return an agent function that runs the program of `agent.command` for one sample."""
    assert settings.command is not None
    words, files = _with_files(shlex.split(settings.command))
    places = [*find_program(words[0]), *files]

    async def run_agent(ctx: AgentContext, batch: AgentBatch) -> ProgramTrajectory:
        [item] = batch
        with box.temporary_folder("areno-agent-") as folder:
            return await _Attempt(settings, words, places, ctx, item, Path(folder)).run()

    return run_agent


def _with_files(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words with the absolute paths of files, and these files, which the program may read."""
    found = [(existing_path(word) if "/" in word or "." in word else None) for word in words]
    files = [file if file is not None and file.is_file() else None for file in found]
    shown = [word if file is None else str(file) for word, file in zip(words, files, strict=True)]
    return shown, [str(file) for file in files[1:] if file is not None]


def find_program(name: str) -> list[str]:
    """Return the paths of a program and of what it needs to run, as a box has to show them. The first is the program.

    These are its folder, or the package or environment that it belongs to, and the same of its interpreter. Raises
    ConfigError if there is no such program.
    """
    path = shutil.which(name)
    if path is None:
        raise ConfigError(Problem(_COMMAND, f"names {name!r}, which is no program on the PATH"))
    found, waiting = [os.path.abspath(path)], [os.path.abspath(path)]
    while waiting:
        link = waiting.pop()
        for one in (link, os.path.realpath(link)):
            if (root := _root_of(Path(one))) not in found:
                found.append(root)
        interpreter = _interpreter_of(os.path.realpath(link))
        if interpreter is not None and interpreter not in found:
            found.append(interpreter)
            waiting.append(interpreter)
    return found


def _root_of(program: Path) -> str:
    """Return the folder with all files of a program."""
    for parent in program.parents:
        if parent.name == "node_modules":
            return str(parent)
    for parent in list(program.parents)[:3]:
        if (parent / "pyvenv.cfg").is_file() or (parent / "lib/node_modules").is_dir() or _is_python_home(parent):
            return str(parent)
    return str(program)


def _is_python_home(folder: Path) -> bool:
    return any((folder / "lib").glob("python3.*/os.py"))


def _interpreter_of(program: str) -> str | None:
    """Return the path of the interpreter in the first line of a script, or None."""
    with open(program, "rb") as file:
        first = file.readline(256)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(words[0]) if words else None
    return words[0] if words and os.path.exists(words[0]) else None


def box_problem(settings: AgentConfig) -> str:
    """Return why the program cannot run in a box on this machine, or ""."""
    return box.network_problem() if settings.command is not None and settings.box else ""


class _Attempt:
    """One run of the program, for one sample."""

    def __init__(
        self,
        settings: AgentConfig,
        words: Sequence[str],
        places: Sequence[str],
        ctx: AgentContext,
        item: AgentItem,
        folder: Path,
    ):
        self._settings, self._words, self._places, self._ctx, self._item = settings, words, places, ctx, item
        self._work, self._home, self._folder = folder / "work", folder / "home", folder
        self._task = Task.of_row(item.record)
        url = f"http://127.0.0.1:{box.PORT}" if settings.box else ctx.base_url.removesuffix("/v1")
        # In a box the socket identifies the sample, and the key is a word that judges or graders may not mistake.
        key = "areno" if settings.box else ctx.api_key
        home = HOME if settings.box else str(self._home)
        self._values = {"prompt": item.prompt, "url": url, "key": key, "model": MODEL, "home": home}

    async def run(self) -> ProgramTrajectory:
        self._work.mkdir()
        self._home.mkdir()
        if self._task is not None:
            self._task.copy_files(self._work)
        for path, text in self._settings.files.items():
            file = self._home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._filled(text), encoding="utf-8")
        before = _texts(self._work)
        result = await _wait(self._start())
        end = ProgramEnd(result.status, result.output, result.why, before, _texts(self._work))
        reward, parts = await self._grade()
        return ProgramTrajectory([], reward, parts, end)

    def _filled(self, text: str) -> str:
        for name, value in self._values.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _start(self) -> _Running:
        command = [self._places[0], *map(self._filled, self._words[1:])]
        environment = {name: self._filled(value) for name, value in self._settings.environment.items()}
        environment["PATH"] = os.pathsep.join([os.path.dirname(self._places[0]), *_path_of(self._places)])
        stdin = "" if "{prompt}" in self._settings.command else self._item.prompt  # type: ignore[operator]
        if not self._settings.box:
            return _Unboxed(command, self._work, {**environment, "HOME": str(self._home)}, stdin)
        limits = box.Box(
            self._work,
            seconds=86_400,  # the agent process ends it at agent.timeout_s, which does not count while models train
            megabytes=self._settings.memory_mb,
            read=[*self._places[1:], *self._settings.read],
            write=[self._home],
            shown_at={str(self._work): APP, str(self._home): HOME},
            socket=self._ctx.socket,
            environment={**environment, "HOME": HOME},
            file_megabytes=_FILE_MB,
            files=_SEVERAL_FILES,
        )
        return box.start(command, limits, stdin=stdin)

    async def _grade(self) -> tuple[float | None, Mapping[str, float]]:
        """Run the tests of the task. Returns (None, {}) if it has none. Raises BadTrajectory if they give no reward."""
        if self._task is None or self._task.tests is None:
            return None, {}
        logs = self._folder / "logs"
        logs.mkdir()
        limits = box.Box(
            self._work,
            seconds=_GRADE_S,
            megabytes=self._settings.memory_mb,
            read=[self._task.tests],
            write=[logs],
            shown_at={str(self._work): APP, str(self._task.tests): TESTS, str(logs): LOGS},
            file_megabytes=_FILE_MB,
            files=_SEVERAL_FILES,
        )
        result = await _wait(box.start(["bash", f"{TESTS}/test.sh"], limits))
        return _reward_in(logs, result)


def _path_of(places: Sequence[str]) -> list[str]:
    folders = [place if os.path.isdir(place) else os.path.dirname(place) for place in places]
    bins = [os.path.join(folder, "bin") for folder in folders]
    return [*[folder for folder in (*bins, *folders) if os.path.isdir(folder)], "/usr/local/bin", "/usr/bin", "/bin"]


def _reward_in(logs: Path, result: box.Result) -> tuple[float, dict[str, float]]:
    """Return the reward that tests have written, as (reward, its parts): reward.json or reward.txt."""
    start = f"its tests (exit code {result.status}{', ended by ' + result.why if result.why else ''})"
    try:
        if (file := logs / "reward.json").is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            parts = {name: reward_number(value, f"{start}: {name}") for name, value in values.items()}
            if "reward" not in parts:
                raise BadTrajectory(f"{start} wrote reward.json without the key reward")
            return parts.pop("reward"), parts
        if (file := logs / "reward.txt").is_file():
            return reward_number(float(file.read_text(encoding="utf-8")), f"{start}: reward.txt"), {}
    except (ValueError, AttributeError, OSError) as error:
        raise BadTrajectory(f"{start} wrote {file.name}, which cannot be read: {error}") from error
    raise BadTrajectory(f"{start} wrote no reward.json and no reward.txt to {LOGS}: {result.output[-300:]!r}")


async def _wait(running: _Running) -> box.Result:
    """Wait in a thread. If this is cancelled, the command is ended."""
    waiting = asyncio.get_running_loop().run_in_executor(None, running.wait)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        raise


def _texts(folder: Path) -> dict[str, str]:
    """Return the text of the files in a folder by path."""
    found: dict[str, str] = {}
    left = _MAX_FILES
    for file in sorted(folder.rglob("*")):
        if file.is_symlink() or not file.is_file() or file.stat().st_size > min(left, _MAX_FILE):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        found[str(file.relative_to(folder))] = text
        left -= len(text)
    return found


class _Unboxed:
    """A program that runs with all rights of the user. It leads a process group, which ends with it."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stdin: str):
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={"LANG": "C.UTF-8", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._stdin = stdin.encode()
        self._ending = threading.Lock()

    def wait(self) -> box.Result:
        output, _ = self._process.communicate(self._stdin)
        self._kill_group()
        return box.Result(self._process.returncode, box.shorten(output.decode(errors="replace")), "")

    def cancel(self) -> None:
        self._kill_group()

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
