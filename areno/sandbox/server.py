"""The server process that starts commands in boxes for one client (box.py), watches their time and ends them.

It has one thread and little memory, so that a fork takes a millisecond or two. For each command it forks a supervisor
(supervisor.py), if possible as the init of new namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import resource
import select
import signal
import time
from selectors import EVENT_READ, DefaultSelector
from socket import (
    AF_UNIX,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    SHUT_WR,
    SOCK_SEQPACKET,
    recv_fds,
    send_fds,
    socket,
    socketpair,
)

from areno.sandbox import kernel, namespaces
from areno.sandbox.supervisor import N_FDS, Machine, supervise

TYPE_CHECKING = False  # as in `typing`, whose import would make each fork slower by a fifth
if TYPE_CHECKING:
    from typing import Any

_SPARE_AFTER_S = 0.002  # later than the start of a command, which it would slow down
_LONGEST_WAIT_S = 3600.0  # the kernel takes no number of milliseconds that needs more than 31 bits
_END_S = 5.0  # a process that waits for a dead disk cannot be killed


def main(fd: int, abi: int, without: str, read: list[str], write: list[str], port: int) -> None:
    """Answer requests until the client has ended. `read` and `write` are paths for all commands.

    `without` says why there shall be no namespaces, or is "".
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    paths = [(path, namespaces.READ) for path in read] + [(path, namespaces.DEVICE) for path in write]
    paths = [each for each in paths if os.path.exists(each[0])]  # no broken links
    # Those that lie in /tmp, such as an environment of Python, are mounted for each command.
    each_time = [each for each in paths if namespaces.is_in_own_folder(each[0])]
    mounts, links = namespaces.plan(each for each in paths if each not in each_time)
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
        _Server(requests, machine, without, each_time).serve()


def _try_namespaces(mounts: namespaces.Mounts, links: dict[str, str]) -> str:
    """Enter namespaces in another process. Returns the reason why this is not possible, or ""."""
    said, say = os.pipe()
    if (trial := os.fork()) == 0:
        try:
            namespaces.enter_user_namespace()
            namespaces.prepare_root(mounts, links)
            if (init := namespaces.fork()) == 0:
                namespaces.start_loopback()
                namespaces.Root(mounts).complete({}, {}, {}, 1, 1 << 10, "/")
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
    """A supervisor, and the command that it gets. At the end of `answer`, nobody waits for the command any more."""

    def __init__(self, machine: Machine, others: list[socket]):
        self.channel, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self.answer: socket | None = None
        self.temporary, self.ends_at = "", 0.0
        with theirs:
            self.pid = os.fork() if machine.mounts is None else namespaces.fork()
            if self.pid == 0:
                for each in (self.channel, *others):
                    each.close()
                supervise(machine, theirs)
        self.process = os.pidfd_open(self.pid)


class _Server:
    def __init__(self, requests: socket, machine: Machine, without: str, each_time: list[tuple[str, str]]):
        self._requests, self._machine, self._without, self._each_time = requests, machine, without, each_time
        self._commands: list[_Command] = []
        self._spare: _Command | None = None  # its supervisor already waits, so that the next command starts sooner
        self._selector = DefaultSelector()
        self._selector.register(requests, EVENT_READ)

    def serve(self) -> None:
        gc.freeze()
        while self._requests.fileno() >= 0:
            waits = [command.ends_at - time.monotonic() for command in self._commands]
            waits += [_SPARE_AFTER_S if self._spare is None else _LONGEST_WAIT_S]
            found = self._selector.select(max(0.0, min(waits)))
            for key, _ in found:
                if key.fileobj is self._requests:
                    self._accept()
                elif key.data in self._commands:
                    self._end(key.data, "" if key.fd == key.data.process else "cancelled")
            if not found and self._spare is None:
                with contextlib.suppress(OSError):
                    self._spare = self._fork()
            now = time.monotonic()
            for command in [each for each in self._commands if each.ends_at <= now]:
                self._end(command, "time")
        for command in list(self._commands):
            self._end(command, "cancelled")
        if self._spare is not None:
            self._spare.channel.close()
            os.waitpid(self._spare.pid, 0)

    def _accept(self) -> None:
        """Start the next command, or close the socket for requests if the client has ended."""
        _, fds, _, _ = recv_fds(self._requests, 1, 1 + N_FDS, MSG_CMSG_CLOEXEC)
        if not fds:
            self._selector.unregister(self._requests)
            return self._requests.close()
        answer, fds = socket(fileno=fds[0]), fds[1:]
        try:
            with open(fds[0], "rb", closefd=False) as file:
                request = marshal.load(file)
            paths = self._paths(request)
            with contextlib.suppress(FileExistsError):
                os.mkdir(request["temporary"])
            command = self._send_request(marshal.dumps(paths), fds)
        except OSError as error:
            return self._send_answer(answer, error=str(error))
        finally:
            for fd in fds:
                os.close(fd)
        command.answer, command.temporary = answer, request["temporary"]
        command.ends_at = time.monotonic() + request["seconds"]
        self._commands.append(command)
        self._selector.register(command.process, EVENT_READ, command)
        self._selector.register(answer, EVENT_READ, command)

    def _send_request(self, paths: bytes, fds: list[int]) -> _Command:
        if (spare := self._spare) is not None:
            self._spare = None
            try:
                send_fds(spare.channel, [paths], fds)
                return spare
            except BrokenPipeError:  # it was killed, perhaps because the machine ran out of memory
                spare.channel.close()
                os.waitpid(spare.pid, 0)
                os.close(spare.process)
        command = self._fork()
        with contextlib.suppress(BrokenPipeError):  # its answer says why
            send_fds(command.channel, [paths], fds)
        return command

    def _fork(self) -> _Command:
        """Fork a supervisor, without what it does not need of this process."""
        answers = [command.answer for command in self._commands if command.answer is not None]
        return _Command(self._machine, [self._requests, *answers, *(each.channel for each in self._commands)])

    def _paths(self, request: dict[str, Any]) -> tuple[Any, ...]:
        """Return the mounts and links for a command, and the folder of its socket."""
        network = request["socket"]
        if self._machine.mounts is None:
            if network is not None or request["sources"]:
                what = "a network" if network is not None else "other paths"
                raise OSError(f"a box with {what} is not possible here: {self._without}")
            return ()
        paths = [*self._each_time, *((path, namespaces.READ) for path in request["read"])]
        paths += [(path, namespaces.WRITE) for path in (*request["write"], request["folder"])]
        sources = {at: namespaces.resolve(path)[0] for at, path in request["sources"].items()}
        mounts, links = namespaces.plan(pair for pair in paths if pair[0] not in sources)
        mounts |= {path: use for path, use in paths if path in sources}
        namespaces.extend_prepared_root(mounts, links)
        return mounts, links, sources, "/" if network is None else namespaces.resolve(os.path.dirname(network))[0]

    def _end(self, command: _Command, why: str) -> None:
        """End a command, and send its answer. `why` is "" if its supervisor has ended."""
        self._commands.remove(command)
        answer = command.answer
        assert answer is not None
        self._selector.unregister(command.process)
        self._selector.unregister(answer)
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
            os.rmdir(command.temporary)  # it stays if something is in it
        with command.channel:
            if why:
                return self._send_answer(answer, status=None, why=why)
            if found := command.channel.recv(1 << 16, MSG_DONTWAIT):
                return self._send_answer(answer, **marshal.loads(found))
        self._send_answer(answer, error="the process that watches the command was killed")

    def _send_answer(self, asks: socket, **answer: Any) -> None:
        with asks, contextlib.suppress(OSError):
            asks.send(marshal.dumps({"without": self._without, **answer}))
