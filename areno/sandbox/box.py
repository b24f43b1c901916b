"""Run a command in a sandbox, here called a box. Linux only. Any program: code of a model, a grader, an agent.

- **Files.** The command sees the folders of the system, of Python and in `Box.read`, and can write in `Box.folder` and
  `Box.write`. Everything else is hidden by a mount namespace, and refused by Landlock.
- **Signals.** It sees and reaches only processes that it has started (PID namespace, Landlock).
- **Network.** None: it cannot open a socket (seccomp). With `Box.socket`, it has a network of its own, in which
  127.0.0.1:PORT leads to a Unix socket outside, and nothing else to anywhere (network namespace).
- **Limits.** Time, output, the memory and the number of all processes together, the size and number of open files. It
  has no privileges, even if the user is root.
- **Others.** Outside its folders, it leaves nothing that a later command could find: no System V or POSIX IPC, keys, or
  attributes of files (seccomp).

Where the kernel allows no namespaces, Landlock and seccomp alone limit commands, and there is no `Box.socket`. A
command can then change permissions and times of the user's files. Before Linux 6.12, it can send signals to the user's
processes. `try_box` says what a machine can limit.

When the command or the process that called `run` ends, all processes of the command are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import platform
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from socket import AF_UNIX, SHUT_WR, SOCK_SEQPACKET, send_fds, socket, socketpair
from tempfile import mkdtemp
from typing import Any, BinaryIO

from areno.sandbox import kernel, namespaces

PORT = 8999  # of 127.0.0.1, at which a command with a network reaches Box.socket
MAX_OUTPUT = 4000  # characters that are kept, half from the beginning and half from the end

# Of /etc and /proc only what programs need. Both hold secrets, such as keys of services and command lines of processes.
SYSTEM = [
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store", "/run/current-system"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/java-*", "/etc/python3*"),
    *("/etc/localtime", "/etc/timezone", "/etc/locale.alias", "/etc/locale.conf", "/etc/default/locale", "/etc/fonts"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/hosts", "/etc/hostname", "/etc/os-release"),
    *("/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/tls/openssl.cnf"),
    *("/etc/crypto-policies", "/etc/terminfo", "/etc/mime.types", "/etc/gitconfig", "/etc/perl", "/etc/R"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/version"),
    *("/proc/filesystems", "/proc/sys", "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/fs/cgroup"),
    "/sys/kernel/mm/transparent_hugepage",
]
"""Paths that every command may read and execute. * is a wildcard."""
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
"""Paths that every command may read and write."""


@dataclass(frozen=True)
class Box:
    """The files, the network and the limits of a command."""

    folder: str | Path  # the working and home directory, which the command may change
    seconds: float = 20.0  # limit of time
    megabytes: int = 4096  # MiB of memory of all processes together, with files in /tmp and /dev/shm
    read: Sequence[str | Path] = ()  # further files and folders that the command may read and execute
    write: Sequence[str | Path] = ()  # further files and folders that the command may change
    shown_at: Mapping[str, str] = field(default_factory=dict)  # of the paths above -> path at which they are seen
    socket: str | Path | None = None  # a Unix socket that the command reaches at PORT. None: no network
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables
    processes: int = 1024  # of which each thread counts
    each_megabytes: int | None = None  # MiB of address space of each process, which then also has `seconds` of CPU time
    output_megabytes: int = 16  # MiB of output
    file_megabytes: int = 16  # MiB of a file
    files: int = 256  # that a process may open


@dataclass(frozen=True)
class Result:
    """How a command has ended."""

    status: int | None  # its exit status, or -n if signal n killed it. None if it was ended for `why`
    output: str  # without the middle if it is long
    why: str  # "time", "memory", "processes", "output", "cancelled", or "" if it has ended by itself


class Running:
    """A command that runs in a box. One thread may wait for it while another one cancels it."""

    def __init__(self, answer: socket, output: BinaryIO, max_bytes: int):
        self._answer, self._output, self._max_bytes = answer, output, max_bytes

    def wait(self, max_output: int = MAX_OUTPUT) -> Result:
        """Wait for the end of the command. Called once.

        Raises OSError if the box has failed, for example because the machine has no memory for a process.
        """
        answer = self._wait_for_answer()
        with self._output:
            self._output.seek(0)
            text = self._output.read(self._max_bytes).decode(errors="replace")
        return Result(answer["status"], shorten(text, max_output), answer["why"])

    def cancel(self) -> None:
        """End the command, if it has not ended."""
        with contextlib.suppress(OSError):
            self._answer.shutdown(SHUT_WR)

    def _wait_for_answer(self) -> dict[str, Any]:
        with self._answer:
            answer = self._answer.recv(1 << 16)
        if not answer:
            raise OSError("the process that starts commands in a box has ended")
        answer = marshal.loads(answer)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer


def run(
    command: Sequence[str], box: Box, *, stdin: str = "", stderr: bool = True, max_output: int = MAX_OUTPUT
) -> Result:
    """Run a command in a box, and wait for its end.

    The middle of an output of more than `max_output` characters is left out. Raises OSError if the box has failed, and
    never if the command has.
    """
    return start(command, box, stdin=stdin, stderr=stderr).wait(max_output)


def start(command: Sequence[str], box: Box, *, stdin: str = "", stderr: bool = True) -> Running:
    """Start a command in a box."""
    return _starter.start(command, box, stdin, stderr)


def try_box() -> tuple[str, dict[str, str]]:
    """Run a command in a box, to see what this machine can limit.

    Returns (problem, means). The problem is the reason why no command can run in a box, or "". The means say by what
    "files", "signals", "network", "processes" and "memory" are limited. What cannot be limited is left out.
    """
    problem, without = _try_box()
    if problem:
        return problem, {}
    abi, spaces = kernel.landlock_abi(), not without
    counts = spaces and namespaces.has_own_pid_max()
    means = {
        "files": ["mount namespace"] * spaces + ["Landlock"] * (abi > 0),
        "signals": ["PID namespace"] * spaces + ["Landlock"] * (abi >= kernel.ABI_OF_SIGNALS),
        "network": ["network namespace"] * spaces + ["seccomp"],
        "processes": ["pid_max of the PID namespace"] * counts + ["counting"],
        "memory": ["measuring"],
    }
    return "", {what: ", ".join(by) for what, by in means.items() if by}


def network_problem() -> str:
    """Return the reason why this machine can have no box with a `socket`, or ""."""
    problem, without = _try_box()
    return problem or without


def _try_box() -> tuple[str, str]:
    """Return the reasons why there can be no box, and no namespaces."""
    if sys.platform != "linux" or platform.machine() not in kernel.AUDIT:
        return f"needs Linux on {' or '.join(kernel.AUDIT)}, for a process without a network", ""
    answer, output = {}, ""
    try:
        with contextlib.closing(_CommandServer()) as starter, temporary_folder("areno-box-") as folder:
            running = starter.start(["true"], Box(folder, seconds=10.0))
            with running._output as text:
                answer = running._wait_for_answer()
                output = text.read().decode(errors="replace")
    except OSError as error:
        output = str(error)
    if answer.get("status") != 0:
        return f"cannot start a process without a network: {output.strip()[-200:]}", ""
    return "", answer["without"]


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Make a folder for a command, and remove it at the end, even if it is deeply nested or partly unreadable."""
    path = mkdtemp(prefix=prefix)
    try:
        yield path
    finally:
        os.chmod(path, 0o700)
        folder = os.open(path, os.O_DIRECTORY)
        try:
            while names := os.listdir(folder):
                for name in names:
                    _remove_file_or_tree(name, folder)
        finally:
            os.close(folder)
        os.rmdir(path)


def _remove_file_or_tree(name: str, parent: int) -> None:
    """Remove `name` in the open folder `parent`. Subfolders are moved to `parent`, which removes them later."""
    with contextlib.suppress(IsADirectoryError):
        return os.unlink(name, dir_fd=parent)
    os.chmod(name, 0o700, dir_fd=parent)
    folder = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        for inner in os.listdir(folder):
            try:
                os.unlink(inner, dir_fd=folder)
            except IsADirectoryError:
                os.chmod(inner, 0o700, dir_fd=folder)
                os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=parent)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=parent)


def shorten(text: str, max_output: int = MAX_OUTPUT) -> str:
    """Return a text without its middle if it has more than `max_output` characters."""
    if len(text) <= max_output:
        return text
    half = max_output // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


class _CommandServer:
    """The server process that starts commands (server.py). It is started with the first command.

    The calling process does not fork itself: it may be large, which makes a fork slow, and other threads may hold
    locks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], box: Box, stdin: str = "", stderr: bool = True) -> Running:
        request = marshal.dumps(_request(command, box, stderr))
        given = stdin.encode("utf-8", "replace")
        # In memory. Processes of the command could keep a pipe open, or not read it, and could not open /dev/stdin.
        output = _memory_file(b"")
        with _memory_file(request) as asked, _memory_file(given) as text:
            try:
                answer = self._send([asked.fileno(), text.fileno(), output.fileno()])
                return Running(answer, output, box.output_megabytes << 20)
            except BaseException:
                output.close()
                raise

    def _send(self, fds: list[int]) -> socket:
        """Send a request. Returns the socket on which the answer comes."""
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs, self._lock:
            for is_last in (False, True):
                try:
                    send_fds(self._connection(), [b"."], [theirs.fileno(), *fds])
                    break
                except (BrokenPipeError, ConnectionResetError):  # somebody has ended the process
                    self.close()
                    if is_last:
                        ours.close()
                        raise
        return ours

    def _connection(self) -> socket:
        if self._socket is None:
            self._socket, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
            system = [path for name in SYSTEM for path in glob(name)]
            read = [*system, sys.prefix, sys.base_prefix, sys.executable]
            options = {"abi": kernel.landlock_abi(), "without": _WITHOUT, "read": read, "write": DEVICES, "port": PORT}
            # Without areno/__init__.py: a process forks the faster, the fewer modules it has.
            path = "import sys; areno = sys.modules['areno'] = type(sys)('areno')"
            path = f"{path}; areno.__path__ = [{str(Path(__file__).parents[1])!r}]"
            start = f"from areno.sandbox.server import main; main({theirs.fileno()}, **{options!r})"
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", f"{path}; {start}"],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C does not reach it
                )
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
        self._socket = self._process = None


_WITHOUT = ""  # for tests: the reason why there shall be no namespaces
_starter = _CommandServer()
atexit.register(_starter.close)


def _memory_file(content: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("box"), "r+b")
    file.write(content)
    file.seek(0)
    return file


def _request(command: Sequence[str], box: Box, stderr: bool) -> dict[str, Any]:
    shown = {os.path.abspath(path): at for path, at in box.shown_at.items()}

    def seen(path: str | Path) -> str:
        return shown.get(os.path.abspath(path), os.path.abspath(path))

    folder = seen(box.folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {"PATH": path, "HOME": folder, "TMPDIR": f"{folder}/.tmp", "LANG": "C.UTF-8"}
    return {
        "command": list(command),
        "folder": folder,
        "temporary": os.path.join(os.path.abspath(box.folder), ".tmp"),
        "environment": environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"} | dict(box.environment),
        "read": list(map(seen, box.read)),
        "write": list(map(seen, box.write)),
        "sources": {at: path for path, at in shown.items()},
        "socket": None if box.socket is None else os.path.abspath(box.socket),
        "seconds": max(box.seconds, 0.0),
        "megabytes": box.megabytes,
        "output": box.output_megabytes << 20,
        "stderr": stderr,
        "processes": box.processes,
        "each_megabytes": box.each_megabytes,
        "file_megabytes": box.file_megabytes,
        "files": box.files,
    }
