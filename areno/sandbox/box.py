"""Run a command in a sandbox, here called a box. Linux only. These are its limits.

- **Files.** The command can read the folders of the system, of Python and in `Box.read`, and write in `Box.folder`
  (Landlock).
- **Signals.** It can send signals only to processes that it has started (Landlock). Before Linux 6.12, a PID namespace
  limits signals instead, so they can also reach other commands that this process runs at the same time.
- **Limits.** Time, CPU time, memory, file size and open files. It has no privileges, even if the user is root.
- **Network.** None: it cannot open a socket (seccomp).
- **Others.** Outside its folder, it leaves nothing that a later command could find: no System V or POSIX IPC, keys, or
  attributes of files (seccomp). It can still change permissions and times of the user's files.

When the command or the process that called `run` ends, all processes of the command are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from tempfile import mkdtemp
from typing import Any, BinaryIO

from areno.sandbox import kernel

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
    """The folder and the limits of a command."""

    folder: str | Path  # the working and home directory, which the command may change
    seconds: float = 20.0  # limit of time
    megabytes: int = 1024  # MiB of memory of each process
    read: Sequence[str | Path] = ()  # further files and folders that the command may read and execute


def run(
    command: Sequence[str], box: Box, *, stdin: str = "", stderr: bool = True, max_output: int = MAX_OUTPUT
) -> tuple[int | None, str]:
    """Run a command in a box, and wait for its end.

    Returns (exit status, output). The status is None if the command exceeded the time limit, and -n if signal n killed
    the command. The middle of a long output is left out. Raises OSError if no process can be started.
    """
    answer, output = _starter.run(command, box, stdin, stderr)
    return answer["status"], shorten(output, max_output)


def try_box() -> tuple[str, list[str]]:
    """Run a command in a box, to see what this machine can limit.

    Returns (problem, unlimited). The problem is the reason why no command can run in a box, or "". `unlimited` lists
    what this machine cannot limit: "files" (of the user), "signals" (to the user's processes).
    """
    if sys.platform != "linux" or platform.machine() not in kernel.AUDIT:
        return f"needs Linux on {' or '.join(kernel.AUDIT)}, for a process without a network", []
    answer, output = {}, ""
    try:
        with contextlib.closing(_CommandServer()) as starter, temporary_folder("areno-box-") as folder:
            answer, output = starter.run(["true"], Box(folder, seconds=10.0))
    except OSError as error:
        output = str(error)
    if answer.get("status") != 0:
        return f"cannot start a process without a network: {output.strip()[-200:]}", []
    return "", [each for each in ("files", "signals") if each not in answer["limited"]]


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

    def run(self, command: Sequence[str], box: Box, stdin: str = "", stderr: bool = True) -> tuple[dict[str, Any], str]:
        """Run a command. Return (answer of the server process, output of the command)."""
        request = json.dumps(_request(command, box, stderr)).encode()
        given = stdin.encode("utf-8", "replace")
        # In memory. Processes of the command could keep a pipe open, or not read it, and could not open /dev/stdin.
        with _memory_file(request) as asked, _memory_file(given) as text, _memory_file(b"") as output:
            answer = self._ask([asked.fileno(), text.fileno(), output.fileno()])
            output.seek(0)
            return answer, output.read().decode(errors="replace")

    def _ask(self, fds: list[int]) -> dict[str, Any]:
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with ours:
            with theirs, self._lock:
                for is_last in (False, True):
                    try:
                        send_fds(self._connection(), [b"."], [theirs.fileno(), *fds])
                        break
                    except (BrokenPipeError, ConnectionResetError):  # somebody has ended the process
                        self.close()
                        if is_last:
                            raise
            answer = ours.recv(1 << 16)
        if not answer:
            raise OSError("the process that starts commands in a box has ended")
        answer = json.loads(answer)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def _connection(self) -> socket:
        if self._socket is None:
            self._socket, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
            read = [*SYSTEM, sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]
            options = {"abi": kernel.landlock_abi(), "read": read, "write": DEVICES}
            path = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"
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


_starter = _CommandServer()
atexit.register(_starter.close)


def _memory_file(content: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("box"), "r+b")
    file.write(content)
    file.seek(0)
    return file


def _request(command: Sequence[str], box: Box, stderr: bool) -> dict[str, Any]:
    folder = os.path.abspath(box.folder)
    temporary = os.path.join(folder, ".tmp")
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {"PATH": path, "HOME": folder, "TMPDIR": temporary, "LANG": "C.UTF-8"}
    return {
        "command": list(command),
        "folder": folder,
        "temporary": temporary,
        "environment": environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        "read": [os.path.abspath(each) for each in box.read],
        "seconds": max(box.seconds, 0.0),
        "megabytes": box.megabytes,
        "stderr": stderr,
    }
