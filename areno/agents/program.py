"""The agent of `agent.command`: a program that samples through the session of its sample.

The program gets a working folder, a home directory and, in a box, a Unix socket as its only way out. When it has ended,
the tests of its task run in the working folder, in a box of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from areno.agents.trajectories import POLICY, AgentBatch, AgentContext, AgentItem, BadTrajectory, ProgramTrajectory
from areno.config.agent import AgentConfig
from areno.environments.harbor import APP, Task
from areno.errors import ConfigError, Problem
from areno.files.paths import existing_path
from areno.sandbox import box
from areno.scoring.records import reward_number
from areno.types import ProgramEnd

# Paths in a box. The last two are those of Harbor.
HOME, TESTS, LOGS = "/home/agent", "/tests", "/logs/verifier"
_COMMAND = "agent.command"
# For reward functions: bytes of a file, and of all files, and the number of files that are looked at.
_MAX_FILE, _MAX_FILES, _MAX_ENTRIES = 1 << 16, 1 << 20, 10_000
_MAX_REWARD_FILE = 1 << 16  # bytes
_MAX_OPEN_FILES, _FILE_MB, _DAY_S = 4096, 1024, 86_400.0  # limits of a box
# More than the calls of a process: a program that waits for a thread would run into its time limit.
_threads = ThreadPoolExecutor(4096, thread_name_prefix="program")


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
    with open(program, "rb") as file:
        first = file.readline(256)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        return shutil.which(words[0]) if words else None
    return words[0] if words and os.path.exists(words[0]) else None


def check_program(settings: AgentConfig) -> None:
    """Raise ConfigError if the program of `agent.command` cannot be started here."""
    if settings.command is None:
        return
    find_program(shlex.split(settings.command)[0])
    if missing := [path for path in settings.read if existing_path(path) is None]:
        raise ConfigError(Problem("agent.read", "names paths that are not there: {}", ", ".join(missing)))
    if settings.box and (problem := box.network_problem()):
        text = "is true, but this machine cannot run {} in a box: {}; set it to false to run the program with all "
        text += "rights of the user"
        raise ConfigError(Problem("agent.box", text, settings.command, problem))


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
        if item.messages is not None:
            raise BadTrajectory("its row has messages, and a program gets a text: use rows with a text as the prompt")
        url = f"http://127.0.0.1:{box.PORT}" if settings.box else ctx.base_url.removesuffix("/v1")
        # In a box, the socket identifies the sample, so any key will do.
        key = "areno" if settings.box else ctx.api_key
        home = HOME if settings.box else str(self._home)
        self._values = {"prompt": item.prompt, "url": url, "key": key, "model": POLICY, "home": home}

    async def run(self) -> ProgramTrajectory:
        before = await _in_thread(self._prepare)
        result = await _wait(self._start())
        after = await _in_thread(lambda: _texts(self._work))
        end = ProgramEnd(result.status, result.output, result.why, before, after)
        reward, parts = await self._grade()
        return ProgramTrajectory([], reward, parts, end)

    def _prepare(self) -> dict[str, str]:
        """Make the folders of the program. Returns the texts in its working folder."""
        self._work.mkdir()
        self._home.mkdir()
        if self._task is not None:
            self._task.copy_files(self._work)
        for path, text in self._settings.files.items():
            file = self._home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._filled(text), encoding="utf-8")
        return _texts(self._work)

    def _filled(self, text: str) -> str:
        """Replace the placeholders. A value may contain the text of one."""
        first, *parts = text.split("{")
        for part in parts:
            name, close, rest = part.partition("}")
            first += f"{self._values[name]}{rest}" if close and name in self._values else f"{{{part}"
        return first

    def _start(self) -> _Running:
        command = [self._places[0], *map(self._filled, self._words[1:])]
        environment = {} if self._task is None else dict(self._task.environment)
        environment |= {name: self._filled(value) for name, value in self._settings.environment.items()}
        # The agent process ends the program at agent.timeout_s, which does not count while models train.
        seconds = (None if self._task is None else self._task.agent_s) or _DAY_S
        path = [os.path.dirname(self._places[0]), *_path_of(self._places)]
        environment["PATH"] = os.pathsep.join([*path, *filter(None, [environment.get("PATH")])])
        stdin = "" if any("{prompt}" in word for word in self._words) else self._item.prompt
        if not self._settings.box:
            return _Unboxed(command, self._work, {**environment, "HOME": str(self._home)}, stdin, seconds)
        limits = box.Box(
            self._work,
            seconds=seconds,
            megabytes=self._settings.memory_mb,
            read=[*self._places[1:], *filter(None, map(existing_path, self._settings.read))],
            write=[self._home],
            shown_at={str(self._work): APP, str(self._home): HOME},
            socket=self._ctx.socket,
            environment={**environment, "HOME": HOME},
            file_megabytes=_FILE_MB,
            files=_MAX_OPEN_FILES,
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
            seconds=self._task.tests_s,
            megabytes=self._settings.memory_mb,
            read=[self._task.tests],
            write=[logs],
            shown_at={str(self._work): APP, str(self._task.tests): TESTS, str(logs): LOGS},
            environment=self._task.tests_environment,
            file_megabytes=_FILE_MB,
            files=_MAX_OPEN_FILES,
        )
        result = await _wait(box.start(["bash", f"{TESTS}/test.sh"], limits))
        return _reward_in(logs, result)


def _path_of(places: Sequence[str]) -> list[str]:
    folders = [place if os.path.isdir(place) else os.path.dirname(place) for place in places]
    bins = [os.path.join(folder, "bin") for folder in folders]
    return [*[folder for folder in (*bins, *folders) if os.path.isdir(folder)], "/usr/local/bin", "/usr/bin", "/bin"]


def _reward_in(logs: Path, result: box.Result) -> tuple[float, dict[str, float]]:
    """Return the reward that tests have written, as (reward, its parts): in reward.json or else in reward.txt.

    The only number in reward.json may have any name.
    """
    start = f"its tests (exit code {result.status})"
    if result.why:
        raise BadTrajectory(f"its tests were ended for exceeding their limit of {result.why}")
    found = {name: text for name in ("reward.json", "reward.txt") if (text := _small_text(logs / name)) is not None}
    if not found:
        wrote = "no reward.json and no reward.txt"
        raise BadTrajectory(f"{start} wrote {wrote} to {LOGS}: {result.output[-300:]!r}")
    name, text = next(iter(found.items()))
    try:
        values = json.loads(text) if name == "reward.json" else {"reward": float(text)}
        parts = {part: reward_number(value, f"{start}: {part}") for part, value in values.items()}
        return parts.pop("reward" if len(parts) > 1 else next(iter(parts))), parts
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError, StopIteration) as error:
        why = f"{type(error).__name__} in {text[:100]!r}"
        raise BadTrajectory(f"{start} wrote {name}, which holds no reward ({why})") from error


def _small_text(file: Path) -> str | None:
    """Return the text of a small file, or None if there is none. The tests may have left anything there."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as opened:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return opened.read(_MAX_REWARD_FILE).decode(errors="replace")


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


async def _wait(running: _Running) -> box.Result:
    """Wait in a thread. If this is cancelled, the command is ended."""
    waiting = asyncio.get_running_loop().run_in_executor(_threads, running.wait)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        raise


def _texts(folder: Path) -> dict[str, str]:
    """Return the text of the files in a folder by path, without what is large, no text or not readable."""
    found: dict[str, str] = {}
    left, n_entries = _MAX_FILES, 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        n_entries += len(folders) + len(names)
        if n_entries > _MAX_ENTRIES:
            break
        for name in sorted(names):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError, UnicodeDecodeError):
                state = os.lstat(path)
                if stat.S_ISREG(state.st_mode) and state.st_size <= min(left, _MAX_FILE):
                    found[os.path.relpath(path, folder)] = Path(path).read_text(encoding="utf-8")
                    left -= state.st_size
    return found


class _Unboxed:
    """A program that runs with all rights of the user. It leads a process group, which ends with it."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], stdin: str, seconds: float
    ):
        self._seconds = seconds
        # Files and not pipes: what the program leaves running holds a pipe open.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # `wait` closes it
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "replace"))
            given.seek(0)
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={"LANG": "C.UTF-8", **environment},
                stdin=given,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> box.Result:
        status, why = None, ""
        try:
            status = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            why = "time"
        self.cancel()
        self._process.wait()
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_FILE))
            return box.Result(status, box.shorten(output.read().decode(errors="replace")), why)

    def cancel(self) -> None:
        """Kill the program and all processes of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
