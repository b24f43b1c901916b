"""`python ...` in a process that has imported what takes seconds: for command lines and for Triton's interpreter.

The processes of pytest-xdist share these: see `share`.
On two cores tests/launch takes 27 s with such a process and 39 s without; tests of whole runs, as in tests/docs, take
less than half of the time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import itertools
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).parents[2]


class Started:
    """A command under way, the leader of a process group. What it has of subprocess.Popen is the same there."""

    def __init__(self, pipe: Connection, words: Sequence[str]):
        self._pipe, self.args, self.returncode = pipe, list(words), None
        self.pid: int = pipe.recv()

    def poll(self) -> int | None:
        if self.returncode is None and self._pipe.poll(0):
            self.returncode = self._pipe.recv()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._pipe.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._pipe.recv()
        return self.returncode


class WarmPython:
    """A process that forks for each command; it ends with this one. One command at a time.

    pipe: to a process that serves.
    """

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def start(
        self, words: Sequence[str], cwd: Path | str, environment: Mapping[str, str], out: Path | str, err: Path | str
    ) -> Started:
        """`python WORDS`, which begin with a script, -c or -m. What it says is appended to these files."""
        self._pipe.send(([str(word) for word in words], str(cwd), dict(environment), [str(out), str(err)]))
        return Started(self._pipe, words)

    def run(
        self, words: Sequence[str], cwd: Path | str, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does it."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, "out"), Path(folder, "err")]
            started = self.start(words, cwd, environment, *files)
            try:
                code = started.wait(timeout)
            finally:
                if started.returncode is None:
                    os.killpg(started.pid, signal.SIGKILL)
                    started.wait()
            return subprocess.CompletedProcess(started.args, code, *(file.read_text() for file in files))


# By its name: what such a process imports, before it knows of the environment of a command, and when it imports these.
_KINDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "commands": (
        [
            "areno.engine.worker",
            "areno.engine.state.transfer",
            "areno.trainers.policy_only",
            "areno.server.app",
            "areno.launch.compose",
            "tensorboard.plugins.hparams.summary_v2",
            "transformers.models.auto.tokenization_auto",
        ],
        {},
    ),
    "interpreting": (
        [
            "pytest",
            "torch.distributed.tensor",
            "transformers",
            "tests.helpers.interpreted",
        ],
        {"TRITON_INTERPRET": "1"},
    ),
}
_SHARED = "ARENO_TESTS_WARM"  # in the environment: the folder of the sockets
WARM_WORKERS = "ARENO_TESTS_WARM_WORKERS"  # in the environment of a command: its workers and runs start at once, too
WORKERS_NAME = "warm workers"  # of the process that forks them, and theirs


@cache
def interpreting() -> WarmPython:
    """Kernels of Triton are interpreted in it."""
    return _warm("interpreting")


@cache
def commands() -> WarmPython:
    """For our own command lines, the libraries of which read their environment later."""
    return _warm("commands")


def _warm(kind: str) -> WarmPython:
    if _SHARED in os.environ:
        place = socket.socket(socket.AF_UNIX)
        place.connect(str(Path(os.environ[_SHARED], kind)))
        return WarmPython(Connection(place.detach()))
    ours, theirs = Pipe()
    _launch(kind, "serve", theirs.fileno())
    theirs.close()
    return WarmPython(ours)


def _launch(kind: str, function: str, fd: int) -> subprocess.Popen[bytes]:
    imports, environment = _KINDS[kind]
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.helpers.warm_python import {function}; {function}({fd}, {tuple(imports)})"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        stdin=subprocess.PIPE,
        pass_fds=[fd],
        start_new_session=True,
    )


def share() -> Callable[[], None]:
    """Processes that this one starts have one warm process of each kind for all of them; returns what ends these."""
    folder = tempfile.TemporaryDirectory()
    started = []
    for kind in _KINDS:
        with socket.socket(socket.AF_UNIX) as place:
            place.bind(str(Path(folder.name, kind)))
            place.listen()
            started.append(_launch(kind, "serve_all", place.fileno()))
    os.environ[_SHARED] = folder.name

    def end() -> None:
        del os.environ[_SHARED]
        for process in started:
            process.communicate()  # closes its stdin
        folder.cleanup()

    return end


@contextlib.contextmanager
def said_by(words: Sequence[str]) -> Iterator[tuple[Started, TextIO]]:
    """A command of ours under way, and what it writes to stderr, line by line as it comes; it ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder, "stderr")
        os.mkfifo(pipe)
        command = commands().start(words, os.getcwd(), os.environ, os.devnull, pipe)
        with pipe.open(encoding="utf-8") as said:
            try:
                yield command, said
            finally:  # before the pipe is closed, which would wait for a thread that reads
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)
                command.wait()


def serve_all(fd: int, imports: Sequence[str]) -> None:
    """What a process that is shared does until stdin is closed: it forks for each that connects to the socket `fd`.

    They are few: one for each process of pytest-xdist.
    """
    ready = False
    with socket.socket(fileno=fd) as place:
        while place in select.select([place, sys.stdin], [], [])[0]:
            client, _ = place.accept()
            if not ready:  # many runs of pytest need none
                _prepare(imports)
                ready = True
            if os.fork() == 0:
                place.close()
                _serve(client.detach())
            client.close()
    os._exit(0)  # libraries report what is left of their objects


def serve(fd: int, imports: Sequence[str]) -> None:
    """What a process of one other does."""
    _prepare(imports)
    _serve(fd)


def _prepare(imports: Sequence[str]) -> None:
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # or each child would copy the memory of all objects


def _serve(fd: int) -> NoReturn:
    with Connection(fd) as pipe, contextlib.suppress(EOFError, OSError):  # until nobody is there any more
        while True:
            given = pipe.recv()
            pid = os.fork()
            if pid == 0:
                os.close(fd)
                _become(*given)
            pipe.send(pid)
            pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _become(words: list[str], cwd: str, environment: dict[str, str], files: list[str]) -> NoReturn:
    """Run the command in this process, and end it."""
    os.setsid()
    for descriptor, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in files)]
    ):
        os.dup2(os.open(path, flags), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.pop(WARM_WORKERS, None):
        _fork_workers()
    code = 1
    try:
        _run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_workers() -> None:
    """Let workers and runs of the command be forked from a child that is as this process is now: see warm.py."""
    from multiprocessing import forkserver
    from unittest import mock

    from areno.engine.processes import local
    from areno.launch import side_by_side
    from tests.helpers import warm

    def fork(path: bytes, args: list[bytes], fds: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            Path("/proc/self/comm").write_text(WORKERS_NAME)
            kept = sorted({0, 1, 2, *fds})
            for before, after in itertools.pairwise([*kept, 1024]):
                os.closerange(before + 1, after)  # such as the end of the pipe that says that the command lives
            try:
                forkserver.main(*fds, [])
            finally:  # it ends by SystemExit
                os._exit(0)
        return pid

    with mock.patch.object(forkserver.util, "spawnv_passfds", fork):
        forkserver.ensure_running()
    for module in (local, side_by_side):
        vars(module)["multiprocessing"] = warm.workers()


def _run(words: list[str]) -> None:
    first, *rest = words
    python_path = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    known = [path for path in sys.path if path not in python_path]
    if first == "-c":
        sys.argv, sys.path[:] = ["-c", *rest[1:]], ["", *python_path, *known]
        main: dict[str, Any] = sys.modules["__main__"].__dict__
        exec(compile(rest[0], "<string>", "exec"), main)
    elif first == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *python_path, *known]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = words, [str(Path(first).resolve().parent), *python_path, *known]
        runpy.run_path(first, run_name="__main__")
