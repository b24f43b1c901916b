"""A sandbox for commands, with limits on time, CPU time, memory and file size, and without a network. Linux only.

    python -I sandbox.py SECONDS MEGABYTES COMMAND ...        (started by `run`)

The limits hold for the command and all processes that it starts. A seccomp filter refuses every socket except Unix
sockets between processes of this machine. It also keeps processes from leaving the process group, which is killed at
the end. Access to files is not limited: the command has the rights of the user who starts the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAX_OUTPUT = 4000  # characters that are kept, half from the beginning and half from the end
_AF_UNIX, _EACCES = 1, 13
# (audit architecture, number of the call socket, numbers of the calls to refuse). The refused calls are io_uring_setup,
# which can also open sockets, setpgid and setsid.
_MACHINES = {"x86_64": (0xC000003E, 41, 425, 109, 112), "aarch64": (0xC00000B7, 198, 425, 154, 157)}


def run(
    command: Sequence[str],
    folder: str | Path,
    seconds: float = 20.0,
    megabytes: int = 1024,
    *,
    stdin: str = "",
    stderr: bool = True,
    max_output: int = MAX_OUTPUT,
) -> tuple[int | None, str]:
    """Run a command in the sandbox, and wait for its end.

    Args:
        command: The command and its arguments.
        folder: The working directory, which is also the home directory.
        seconds: The time limit, in seconds.
        megabytes: The memory limit of each process, in MiB.
        stdin: The text for standard input.
        stderr: Whether the output includes standard error.
        max_output: The largest number of characters of output to return. The middle of a longer output is left out.

    Returns:
        A tuple (exit status, output). The status is None if the command exceeded the time limit, and -n if signal n
        killed the command.
    """
    words = [sys.executable, "-I", __file__, str(int(seconds) + 1), str(megabytes), *command]
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    # Files, not pipes: processes that the command leaves running could keep a pipe open, or not read it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as text:
        text.write(stdin.encode("utf-8", "replace"))
        text.seek(0)
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=text,
            stdout=output,
            stderr=subprocess.STDOUT if stderr else subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, shorten(output.read().decode(errors="replace"), max_output)


def problem() -> str:
    """Return the reason why commands cannot be limited on this machine, or "" if they can."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"needs Linux on {' or '.join(_MACHINES)}, for a process without a network"
    status, output = run(["true"], "/", seconds=10.0)
    return "" if status == 0 else f"cannot start a process without a network: {output.strip()[-200:]}"


def shorten(text: str, max_output: int = MAX_OUTPUT) -> str:
    """Return a text without its middle if it has more than `max_output` characters.

    Args:
        text: The text.
        max_output: The number of characters to keep, half of them from the beginning and half from the end.
    """
    if len(text) <= max_output:
        return text
    half = max_output // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"


def limit(seconds: int, megabytes: int) -> None:
    """Limit this process and all processes that it starts: CPU time, memory, file size, open files and system calls.

    Args:
        seconds: The limit on CPU time of each process, in seconds.
        megabytes: The limit on memory of each process, in MiB.

    Raises:
        OSError: The kernel cannot filter system calls.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    refuse_calls()


def refuse_calls() -> None:
    """Make every socket other than Unix sockets fail with "permission denied", with a seccomp filter.

    The filter also refuses setpgid, setsid and io_uring. It holds for this process and all processes that it starts.

    Raises:
        OSError: The kernel cannot filter system calls.
    """
    if platform.machine() not in _MACHINES:
        raise OSError(f"no list of system calls for {platform.machine()}")
    architecture, socket, *refused = _MACHINES[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # BPF: load a word, compare it, return
    allow, refuse, end = 0x7FFF0000, 0x00050000 | _EACCES, 0x80000000
    # Offsets in struct seccomp_data: 0 the number of the call, 4 the architecture, 16 the call's first argument.
    program = [
        # Kill the process if it uses another architecture, whose calls have other numbers.
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, end),
        # The same for the x32 interface.
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, end),
        *(each for call in refused for each in ((equal, 0, 1, call), (give, 0, 0, refuse))),
        # Allow all other calls than socket, and socket with AF_UNIX.
        (equal, 1, 0, socket),
        (give, 0, 0, allow),
        (load, 0, 0, 16),
        (equal, 0, 1, _AF_UNIX),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

    instructions = (Instruction * len(program))(*[Instruction(*each) for each in program])
    filter_program = Program(len(program), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filter_mode, ctypes.byref(filter_program)):
        raise OSError(ctypes.get_errno(), "the kernel refuses a seccomp filter")


if __name__ == "__main__":
    limit(int(sys.argv[1]), int(sys.argv[2]))
    if shutil.which(sys.argv[3]) is None:
        sys.exit(f"there is no command {sys.argv[3]}")
    os.execvp(sys.argv[3], sys.argv[3:])
