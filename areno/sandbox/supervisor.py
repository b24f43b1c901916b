"""The parent process of one command: it starts it, watches what it uses and forwards its connections.

Where there are namespaces, it is the init of the PID namespace, so that the command can neither end it nor outlive it.
Else the command leads a process group that none of its processes can leave, and killing the group ends them all.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import time
from selectors import EVENT_READ, DefaultSelector
from socket import AF_UNIX, MSG_CMSG_CLOEXEC, SOCK_SEQPACKET, recv_fds, send_fds, socket, socketpair

from areno.sandbox import kernel, namespaces
from areno.sandbox.bridge import Bridge
from areno.sandbox.usage import descendants, measure, processes_here

TYPE_CHECKING = False  # as in `typing`, whose import would make each fork slower by a fifth
if TYPE_CHECKING:
    from typing import Any, NoReturn

N_FDS = 3  # of a request: the request, standard input, output
_MAX_FD = 1 << 16
_LOOK_S = 0.05  # between two looks at what a command uses
_LOOK_SHARE = 5  # a look takes at most one part in so many of the time


class Machine:
    """What every command gets on this machine.

    `mounts` is None if there are no namespaces. `rules` of Landlock are those without namespaces.
    """

    def __init__(self, abi: int, mounts: namespaces.Mounts | None, rules: list[tuple[int, int]], port: int):
        self.abi, self.mounts, self.rules, self.port = abi, mounts, rules, port
        self.seccomp_programs = [
            kernel.seccomp_program(abi, groups=mounts is not None, network=network) for network in (False, True)
        ]


def supervise(machine: Machine, channel: socket) -> NoReturn:
    """Wait for a command on `channel`, start it, send how it ended, and end this process, which was forked for it."""
    status = 1
    try:
        supervisor = _Supervisor(machine, channel)
        if supervisor.start():
            supervisor.run()
        status = 0
    except Exception as error:  # a failure of the box
        _send(channel, error=str(error) or type(error).__name__)
    finally:
        os._exit(status)


class _Supervisor:
    def __init__(self, machine: Machine, channel: socket):
        self._machine, self._channel = machine, channel
        self._selector = DefaultSelector()
        self._bridge: Bridge | None = None
        self._proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _maximize_oom_score()
        kernel.forbid_inspection()
        self._root = None
        if machine.mounts is None:
            kernel.adopt_orphans()
        else:
            kernel.end_with_parent()
            namespaces.start_loopback()
            self._root = namespaces.Root(machine.mounts)
        self._ruleset = kernel.make_landlock_ruleset(machine.abi, self._common_rules()) if machine.abi else None
        self._begin, begin = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self._command = os.fork()
        if self._command == 0:
            self._begin.close()
            _execute(begin, channel, self._ruleset, machine.seccomp_programs)
        begin.close()

    def start(self) -> bool:
        """Wait for a command and start it. Returns False if there will be none."""
        paths, fds, _, _ = recv_fds(self._channel, 1 << 16, N_FDS, MSG_CMSG_CLOEXEC)
        if not fds:
            return False
        asked, given, self._output = fds
        self._request = _read_request(asked)
        if self._root is not None:
            self._complete_root(self._root, *marshal.loads(paths))
        if self._ruleset is not None:
            kernel.add_landlock_rules(self._ruleset, self._machine.abi, self._own_rules())
        send_fds(self._begin, [b"."], [asked, given, self._output])
        for fd in (asked, given):
            os.close(fd)
        return True

    def _complete_root(
        self,
        root: namespaces.Root,
        mounts: namespaces.Mounts,
        links: dict[str, str],
        sources: dict[str, str],
        outside: str,
    ) -> None:
        request = self._request
        if request["socket"] is not None:
            self._bridge = Bridge(self._selector, self._machine.port, os.path.basename(request["socket"]))
        # The path of the socket may be too long for the kernel, and is not in the new root.
        root.complete(mounts, links, sources, request["megabytes"], request["processes"], outside)
        if root.has_proc:
            os.close(self._proc)
            self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)

    def _common_rules(self) -> list[tuple[int, int]]:
        """Return the rules of Landlock that every command gets."""
        if self._machine.mounts is None:
            return self._machine.rules
        paths = [("/", kernel.READ)]  # others than those that may be read are not there
        paths += [(path, kernel.DEVICE) for path, use in self._machine.mounts.items() if use == namespaces.DEVICE]
        return [kernel.open_path_rule(*each) for each in paths]

    def _own_rules(self) -> list[tuple[int, int]]:
        write, read = [*self._request["write"], self._request["folder"]], self._request["read"]
        if self._root is not None:
            write, read = [*write, "/tmp", "/dev/shm"], []
        paths = [(path, kernel.READ) for path in read] + [(path, kernel.WRITE) for path in write]
        paths += [("/dev/pts", kernel.DEVICE)] * (self._root is not None)
        return [kernel.open_path_rule(*each) for each in paths]

    def run(self) -> None:
        """Wait for the end of the command, and end all its processes."""
        why = self._wait()
        status = None
        if not why:
            ended = os.waitid(os.P_PID, self._command, os.WEXITED | os.WNOWAIT)  # its number, that of the group, stays
            assert ended is not None
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if self._machine.mounts is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._command, signal.SIGKILL)  # it may not lead its group yet
                os.killpg(self._command, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        _send(self._channel, status=status, why=why)

    def _wait(self) -> str:
        """Wait for the end of the command, or for what ends it early. Returns the reason for the latter."""
        command = os.pidfd_open(self._command)
        self._selector.register(command, EVENT_READ)
        self._selector.register(self._channel, EVENT_READ)
        look_at = time.monotonic() + _LOOK_S
        while True:
            for key, events in self._selector.select(max(0.0, look_at - time.monotonic())):
                if key.fd == command:
                    return "output" if self._exceeds_output() else ""
                if key.fileobj is self._channel:  # the server does not want it to go on, or has ended
                    return "cancelled"
                assert self._bridge is not None
                self._bridge.handle(key.data, events)
            if (begin := time.monotonic()) >= look_at:
                if why := self._exceeded():
                    return why
                self._reap_orphans()
                if self._bridge is not None:
                    self._bridge.retry()
                end = time.monotonic()
                look_at = end + max(_LOOK_S, (_LOOK_SHARE - 1) * (end - begin))

    def _exceeded(self) -> str:
        if self._exceeds_output():
            return "output"
        own_proc = self._root is not None and self._root.has_proc
        processes, in_memory = (
            processes_here() if own_proc else descendants(self._proc),
            self._bytes_of_files_in_memory(),
        )
        threads, memory = measure(self._proc, processes)
        if threads > self._request["processes"]:
            return "processes"
        limit = self._request["megabytes"] << 20
        if memory + in_memory > limit and measure(self._proc, processes, exact=True)[1] + in_memory > limit:
            return "memory"
        return ""

    def _exceeds_output(self) -> bool:
        return os.fstat(self._output).st_size > self._request["output"]

    def _bytes_of_files_in_memory(self) -> int:
        if self._machine.mounts is None:
            return 0
        found = [os.statvfs(path) for path in ("/tmp", "/dev/shm")]
        return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in found)

    def _reap_orphans(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == self._command:
                    break
                os.waitpid(ended.si_pid, 0)


def _send(channel: socket, **answer: Any) -> None:
    with contextlib.suppress(OSError):
        channel.send(marshal.dumps(answer))


def _read_request(asked: int) -> dict[str, Any]:
    with open(asked, "rb", closefd=False) as file:
        file.seek(0)  # others have read it, too
        return marshal.load(file)


def _execute(begin: socket, channel: socket, ruleset: int | None, seccomp_programs: list[bytes]) -> NoReturn:
    """Limit this process, which was forked for a command, wait for the command and execute it."""
    try:
        os.setsid()
        kernel.end_with_parent()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        kernel.drop_privileges()
        _, fds, _, _ = recv_fds(begin, 1, N_FDS, MSG_CMSG_CLOEXEC)
        if not fds:
            os._exit(0)
        asked, given, output = fds
        request = _read_request(asked)
        errors = output if request["stderr"] else os.open(os.devnull, os.O_WRONLY)
        for number, fd in enumerate((given, output, errors)):
            os.dup2(fd, number)
        os.chdir(request["folder"])
        kernel.limit_resources(
            request["files"], request["file_megabytes"], request["each_megabytes"], request["seconds"]
        )
        if ruleset is not None:
            kernel.apply_landlock_ruleset(ruleset)
        kernel.apply_seccomp_program(seccomp_programs[request["socket"] is not None])
    except Exception as error:  # a failure of the box
        _send(channel, error=str(error) or type(error).__name__)
        os._exit(1)
    command = request["command"][0]
    try:
        # Not every kernel closes files that were received by MSG_CMSG_CLOEXEC. The output is one of them.
        os.closerange(3, _MAX_FD)
        os.execvpe(command, request["command"], request["environment"])
    except FileNotFoundError:
        os.write(2, f"there is no command {command}\n".encode(errors="replace"))
    except (OSError, ValueError) as error:
        os.write(2, f"{command} cannot be run: {error}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def _maximize_oom_score() -> None:
    """Let the kernel kill the command, and not the training, if the machine runs out of memory."""
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
