"""The server process that starts commands in boxes for one client (box.py), watches their time and ends them.

It has one thread and little memory, so that a fork takes a millisecond or two. For each command it forks a supervisor
(supervisor.py), if possible as the init of new namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import marshal
import os
import resource
import select
import signal
import time
from selectors import EVENT_READ, DefaultSelector
from socket import AF_UNIX, MSG_CMSG_CLOEXEC, MSG_DONTWAIT, SHUT_WR, SOCK_SEQPACKET, recv_fds, socket, socketpair
from typing import Any

from areno.sandbox import kernel, namespaces
from areno.sandbox.supervisor import Machine, supervise

_N_FDS = 4  # of a request: the socket for the answer, the request, standard input, output
_END_S = 5.0  # a process that waits for a dead disk cannot be killed


def main(fd: int, abi: int, without: str, read: list[str], write: list[str], port: int) -> None:
    """Answer requests until the client has ended. `read` and `write` are paths for all commands, with * as wildcard.

    `without` says why there shall be no namespaces, or is "".
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    paths = [(path, namespaces.READ) for name in read for path in glob.glob(name)]
    paths += [(path, namespaces.DEVICE) for name in write for path in glob.glob(name)]
    paths = [each for each in paths if os.path.exists(each[0])]  # no broken links
    mounts, links = namespaces.plan(paths)
    without = without or _try_namespaces(mounts, links)
    if without:
        kernel.drop_privileges()
        rights = {namespaces.READ: kernel.READ, namespaces.DEVICE: kernel.DEVICE}
        rules = [kernel.open_path_rule(path, rights[use]) for path, use in paths] if abi else []
        machine = Machine(abi, None, rules, port)
    else:
        namespaces.enter_user_namespace()
        namespaces.prepare_root(mounts, links)
        machine = Machine(abi, mounts, [], port)
    with socket(AF_UNIX, SOCK_SEQPACKET, fileno=fd) as requests:
        _Server(requests, machine, without).serve()


def _try_namespaces(mounts: namespaces.Mounts, links: dict[str, str]) -> str:
    """Enter namespaces in another process. Returns the reason why this is not possible, or ""."""
    said, say = os.pipe()
    if (trial := os.fork()) == 0:
        try:
            namespaces.enter_user_namespace()
            namespaces.prepare_root(mounts, links)
            if (init := namespaces.fork()) == 0:
                namespaces.start_loopback()
                namespaces.enter_root(mounts, {}, {}, "/tmp", 1, 1 << 10)
                os._exit(0)
            if os.waitpid(init, 0)[1] == 0:
                os.write(say, b"-")
        except Exception as error:
            os.write(say, str(error).encode(errors="replace"))
        finally:
            os._exit(1)
    os.close(say)
    with open(said, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(trial, 0)
    return "" if text == "-" else f"no namespaces can be made: {text or 'a process ended'}"


class _Command:
    """A command that runs. Its answer's socket is at its end when the process that asks has gone, or cancels it."""

    def __init__(self, answer: socket, channel: socket, request: dict[str, Any]):
        self.answer, self.channel, self.request = answer, channel, request
        self.ends_at = time.monotonic() + request["seconds"]
        self.pid = 0  # of the supervisor
        self.process = -1  # its file descriptor


class _Server:
    def __init__(self, requests: socket, machine: Machine, without: str):
        self._requests, self._machine, self._without = requests, machine, without
        self._commands: list[_Command] = []
        self._selector = DefaultSelector()
        self._selector.register(requests, EVENT_READ)

    def serve(self) -> None:
        gc.freeze()
        while self._requests.fileno() >= 0:
            first = min((command.ends_at for command in self._commands), default=None)
            left = None if first is None else max(0.0, first - time.monotonic())
            for key, _ in self._selector.select(left):
                if key.fileobj is self._requests:
                    self._accept()
                elif key.data in self._commands:
                    self._end(key.data, "" if key.fd == key.data.process else "cancelled")
            now = time.monotonic()
            for command in [each for each in self._commands if each.ends_at <= now]:
                self._end(command, "time")
        for command in list(self._commands):
            self._end(command, "cancelled")

    def _accept(self) -> None:
        """Start the next command, or close the socket for requests if the client has ended."""
        _, fds, _, _ = recv_fds(self._requests, 1, _N_FDS, MSG_CMSG_CLOEXEC)
        if not fds:
            self._selector.unregister(self._requests)
            return self._requests.close()
        answer, asked, given, output = fds
        with open(asked, "rb") as file:
            request = marshal.load(file)
        ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        command = _Command(socket(fileno=answer), ours, request)
        try:
            with theirs:
                if self._without and request["socket"] is not None:
                    raise OSError(f"a box with a network is not possible here: {self._without}")
                with contextlib.suppress(FileExistsError):
                    os.mkdir(request["temporary"])
                command.pid = os.fork() if self._machine.mounts is None else namespaces.fork()
                if command.pid == 0:
                    self._close_all(command)
                    supervise(request, self._machine, theirs, given, output)
            command.process = os.pidfd_open(command.pid)
        except OSError as error:
            ours.close()
            return self._send_answer(command, error=str(error))
        finally:
            os.close(given)
            os.close(output)
        self._commands.append(command)
        self._selector.register(command.process, EVENT_READ, command)
        self._selector.register(command.answer, EVENT_READ, command)

    def _close_all(self, started: _Command) -> None:
        """Close what a supervisor inherits from this process but does not need."""
        self._selector.close()
        self._requests.close()
        for command in (*self._commands, started):
            command.answer.close()
            command.channel.close()
            if command.process >= 0:
                os.close(command.process)

    def _end(self, command: _Command, why: str) -> None:
        """End a command, and send its answer. `why` is "" if its supervisor has ended."""
        self._commands.remove(command)
        self._selector.unregister(command.process)
        self._selector.unregister(command.answer)
        if why:
            if self._machine.mounts is None:
                command.channel.shutdown(SHUT_WR)  # the supervisor ends the others before itself
            else:
                os.kill(command.pid, signal.SIGKILL)
        ended = select.poll()
        ended.register(command.process, select.POLLIN)
        if not ended.poll(_END_S * 1000):
            os.kill(command.pid, signal.SIGKILL)
        os.waitpid(command.pid, os.WNOHANG)
        os.close(command.process)
        with contextlib.suppress(OSError):
            os.rmdir(command.request["temporary"])  # it stays if something is in it
        with command.channel:
            if why:
                return self._send_answer(command, status=None, why=why)
            if found := command.channel.recv(1 << 16, MSG_DONTWAIT):
                return self._send_answer(command, **marshal.loads(found))
        self._send_answer(command, error="the process that watches the command was killed")

    def _send_answer(self, command: _Command, **answer: Any) -> None:
        with command.answer, contextlib.suppress(OSError):
            command.answer.send(marshal.dumps({"without": self._without, **answer}))
