"""The server process that starts commands in boxes for one client (box.py), watches their time and ends them.

It has one thread and little memory, so that a fork takes a millisecond or two. Each command leads a process group that
none of its processes can leave, so killing the group ends them all. If the kernel cannot limit signals otherwise, the
server and all commands are in a PID namespace of their own.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import os
import select
import signal
import time
from dataclasses import dataclass
from socket import AF_UNIX, MSG_CMSG_CLOEXEC, SOCK_SEQPACKET, recv_fds, socket
from typing import Any, NoReturn

from areno.sandbox import kernel

_N_FDS = 4  # of a request: the socket for the answer, the request, standard input, output
_END_S = 5.0  # a process that waits for a dead disk cannot be killed


def main(fd: int, abi: int, read: list[str], write: list[str]) -> None:
    """Answer requests until the client has ended. `read` and `write` are paths for all commands, with * as wildcard."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    limited = ["files"] if abi else []
    if abi >= kernel.ABI_OF_SIGNALS:
        limited.append("signals")
    elif kernel.enter_pid_namespace():
        limited.append("signals")
        if init := os.fork():
            os.close(fd)
            os.waitpid(init, 0)
            return
    kernel.adopt_orphans()
    kernel.drop_privileges()
    rules = [kernel.open_path_rule(path, kernel.READ) for name in read for path in glob.glob(name)]
    rules += [kernel.open_path_rule(path, kernel.DEVICE) for name in write for path in glob.glob(name)]
    with socket(AF_UNIX, SOCK_SEQPACKET, fileno=fd) as requests:
        _Server(requests, abi, rules, limited).serve()


@dataclass(eq=False)
class _Command:
    answer: socket  # at its end, the process that asks has gone
    request: dict[str, Any]
    ends_at: float
    pid: int = 0  # of its first process, and of its process group


class _Server:
    def __init__(self, requests: socket, abi: int, rules: list[tuple[int, int]], limited: list[str]):
        self._requests, self._abi, self._rules, self._limited = requests, abi, rules, limited
        self._calls = kernel.seccomp_program(abi)
        self._commands: dict[int, _Command] = {}  # by pid
        self._child_ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        gc.freeze()
        while self._requests.fileno() >= 0:
            answers = {command.answer: command for command in self._commands.values()}
            first = min((command.ends_at for command in answers.values()), default=None)
            left = None if first is None else max(0.0, first - time.monotonic())
            readable, _, _ = select.select([self._child_ended, self._requests, *answers], [], [], left)
            if self._child_ended in readable:
                os.read(self._child_ended, 1 << 10)
                self._reap_processes()
            for command in answers.values():
                if command.answer in readable or time.monotonic() >= command.ends_at:
                    self._end_command(command, timed_out=True)
            if self._requests in readable:
                self._accept()
        for command in list(self._commands.values()):
            self._end_command(command, timed_out=True)

    def _accept(self) -> None:
        """Start the next command, or close the socket for requests if the client has ended."""
        _, fds, _, _ = recv_fds(self._requests, 1, _N_FDS, MSG_CMSG_CLOEXEC)
        if not fds:
            return self._requests.close()
        answer, asked, given, output = fds
        with open(asked, encoding="utf-8") as file:
            request = json.load(file)
        command = _Command(socket(fileno=answer), request, time.monotonic() + request["seconds"])
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, given)
            opened.callback(os.close, output)
            try:
                limits = self._landlock_ruleset(request, opened) if self._abi else None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(request["temporary"])
                command.pid = os.fork()
            except OSError as error:
                return self._send_answer(command, error=str(error))
            if command.pid == 0:
                _execute_limited(request, limits, self._calls, given, output)
        self._commands[command.pid] = command

    def _landlock_ruleset(self, request: dict[str, Any], opened: contextlib.ExitStack) -> int:
        """Return a Landlock ruleset for a command. Called before the fork, so that the fork copies fewer pages."""
        rules = [kernel.open_path_rule(path, kernel.READ) for path in request["read"]]
        rules.append(kernel.open_path_rule(request["folder"], kernel.WRITE))
        limits = kernel.make_landlock_ruleset(self._abi, [*self._rules, *rules])
        for fd in (limits, *(fd for fd, _ in rules)):
            opened.callback(os.close, fd)
        return limits

    def _reap_processes(self) -> None:
        """End the commands whose first process has ended, and reap adopted processes."""
        with contextlib.suppress(ChildProcessError):
            # The process remains until its group is killed: its number would be free for another one.
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if command := self._commands.get(ended.si_pid):
                    self._end_command(command)
                else:
                    os.waitpid(ended.si_pid, 0)

    def _end_command(self, command: _Command, timed_out: bool = False) -> None:
        """Kill all processes of a command, and send its answer. A second call does nothing."""
        if self._commands.pop(command.pid, None) is None:
            return
        status, give_up = None, time.monotonic() + _END_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)  # it may not lead its group yet
            os.killpg(command.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < give_up:
                pid, code = os.waitpid(-command.pid, os.WNOHANG)
                if pid == command.pid:
                    status = None if timed_out else os.waitstatus_to_exitcode(code)
                elif pid == 0:
                    time.sleep(0.001)
        with contextlib.suppress(OSError):
            os.rmdir(command.request["temporary"])  # it stays if something is in it
        self._send_answer(command, status=status)

    def _send_answer(self, command: _Command, **answer: Any) -> None:
        with command.answer, contextlib.suppress(OSError):
            command.answer.send(json.dumps({"limited": self._limited, **answer}).encode())


def _execute_limited(request: dict[str, Any], limits: int | None, calls: bytes, given: int, output: int) -> NoReturn:
    """Limit this process, which was forked for the command, and execute the command. `given` is its standard input."""
    try:
        os.setsid()
        kernel.end_with_parent()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        errors = output if request["stderr"] else os.open(os.devnull, os.O_WRONLY)
        for number, fd in enumerate((given, output, errors)):
            os.dup2(fd, number)
        _maximize_oom_score()
        os.chdir(request["folder"])
        kernel.limit_resources(int(request["seconds"]) + 1, request["megabytes"])
        if limits is not None:
            kernel.apply_landlock_ruleset(limits)
        kernel.apply_seccomp_program(calls)
        os.execvpe(request["command"][0], request["command"], request["environment"])
    except FileNotFoundError:
        os.write(2, f"there is no command {request['command'][0]}\n".encode(errors="replace"))
    except (OSError, ValueError) as error:
        os.write(2, f"{request['command'][0]} cannot be run: {error}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def _maximize_oom_score() -> None:
    """Let the kernel kill this process, and not the training, if the machine runs out of memory."""
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
