"""The calls of the Linux kernel that limit a process and all processes that it starts. None of them needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import stat
import struct

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number (AUDIT_ARCH_...) in seccomp filters."""
_CALLS = {  # name -> its number on the machines of AUDIT
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "semop": (65, 193),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
    "prlimit64": (302, 261),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "capget": (125, 90),
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
_REFUSED = (
    *("socket", "io_uring_setup", "setpgid", "setsid"),
    # What outlives a command, or is shared with others: keys, System V and POSIX IPC.
    *("add_key", "request_key", "keyctl", "mq_open", "mq_unlink"),
    *("shmget", "shmctl", "shmat", "semget", "semctl", "semtimedop", "semop", "msgget", "msgctl", "msgrcv", "msgsnd"),
)
# Landlock does not limit the extended attributes of files, where commands could leave data for each other.
_UNSUPPORTED = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
# Calls that could limit or slow down another process -> the argument that names it. 0 is the caller.
_OF_CALLER = {
    **dict.fromkeys(("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr"), 0),
    **dict.fromkeys(("setpriority", "ioprio_set"), 1),
}
_EACCES, _ENOTSUP, _AF_UNIX, _SOCK_DGRAM, _SOCK_TYPES = 13, 95, 1, 2, 0xF
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38  # linux/prctl.h
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000  # linux/sched.h
_CAPABILITIES_V3, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 0x20080522, 1, 2  # linux/capability.h

# linux/landlock.h. Each version of Landlock, called ABI, adds rights.
_N_RIGHTS = (0, 13, 14, 15, 15, 16)  # over files, by ABI. A later ABI has those of 5
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE, _IOCTL = (
    1 << bit for bit in (0, 1, 2, 3, 6, 11, 14, 15)
)
READ = _EXECUTE | _READ_FILE | _READ_DIR
DEVICE = _WRITE_FILE | _READ_FILE | _IOCTL
WRITE = 0xFFFF & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL)
_OF_NO_FOLDER = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_ABI_OF_TRUNCATE, ABI_OF_SIGNALS = 3, 6  # Linux 6.2, 6.12
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

_libc = ctypes.CDLL(None, use_errno=True)


def system_call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises OSError."""
    number = _CALLS[name][list(AUDIT).index(platform.machine())]
    typed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *typed), name)


def _prctl(option: int, first: int, second: bytes | None = None) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(first), second, *[ctypes.c_ulong(0)] * 2), "prctl")


def _checked(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def adopt_orphans() -> None:
    """If a descendant's parent ends, let the descendant become a child of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let this process be killed when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def landlock_abi() -> int:
    """Return the version of Landlock, 0 if there is none."""
    try:
        return system_call("landlock_create_ruleset", None, 0, 1)
    except (OSError, KeyError, ValueError):
        return 0


def enter_pid_namespace() -> bool:
    """Put future children of this process into a PID namespace, the first as its init. Returns False on failure."""
    trial = os.fork()  # half-way into a namespace a process could make no files
    if trial == 0:
        try:
            _enter_pid_namespace()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(trial, 0)[1]:
        return False
    _enter_pid_namespace()
    return True


def _enter_pid_namespace() -> None:
    with contextlib.suppress(OSError):
        _checked(_libc.unshare(_CLONE_NEWPID), "unshare")
        return  # root needs no namespace for users
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID), "unshare")
    for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def limit_resources(seconds: int, megabytes: int) -> None:
    """Limit CPU time and memory of each process, and the size and number of its files."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def drop_privileges() -> None:
    """Give up all privileges of root for good, except for access to files of other users."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # without it, a program of root gets all privileges again
    header, kept = struct.pack("Ii", _CAPABILITIES_V3, 0), 1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH
    sets = ctypes.create_string_buffer(
        24
    )  # effective, permitted, inheritable: of capabilities 0 to 31, then the others
    system_call("capget", header, sets)
    effective, permitted, *_ = struct.unpack("6I", sets.raw)
    system_call("capset", header, struct.pack("6I", effective & kept, permitted & kept, 0, 0, 0, 0))


def open_path_rule(path: str, rights: int) -> tuple[int, int]:
    """Open a path as a rule (file descriptor, rights) of a Landlock ruleset. A file gets only rights of files."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return fd, rights if stat.S_ISDIR(os.stat(fd).st_mode) else rights & _OF_NO_FOLDER


def make_landlock_ruleset(abi: int, rules: list[tuple[int, int]]) -> int:
    """Return the file descriptor of a Landlock ruleset for `apply_landlock_ruleset`.

    It allows only the access to files that `rules` give. From ABI 6 on, it also forbids signals to processes outside.
    """
    all_rights = (1 << _N_RIGHTS[min(abi, len(_N_RIGHTS) - 1)]) - 1
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= ABI_OF_SIGNALS else 0
    made = system_call("landlock_create_ruleset", struct.pack("QQQ", all_rights, 0, scopes), 24, 0)
    for fd, rights in rules:
        system_call("landlock_add_rule", made, 1, struct.pack("=Qi", rights & all_rights, fd), 0)
    return made


def apply_landlock_ruleset(fd: int) -> None:
    """Apply a Landlock ruleset to this process."""
    system_call("landlock_restrict_self", fd, 0)


def seccomp_program(abi: int) -> bytes:
    """Return a seccomp program for `apply_seccomp_program`.

    It refuses the calls in the tables above, and calls that change the limits of other processes. Connected pairs of
    Unix sockets are allowed. `abi` is the version of Landlock.
    """
    numbers = {name: each[list(AUDIT).index(platform.machine())] for name, each in _CALLS.items()}
    load, equal, at_least, common, give = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF: load a word, compare, "and", return
    allow, refuse, unsupported, end = 0x7FFF0000, 0x00050000 | _EACCES, 0x00050000 | _ENOTSUP, 0x80000000
    answers = dict.fromkeys(_REFUSED, refuse) | dict.fromkeys(_UNSUPPORTED, unsupported)
    if abi < _ABI_OF_TRUNCATE:
        answers["truncate"] = refuse
    # Offsets in struct seccomp_data: 0 the number of the call, 4 the architecture, 16 + 8 n argument n.
    program = [
        # Kill the process if it uses another architecture, or the x32 interface. Their calls have other numbers.
        (load, 0, 0, 4),
        (equal, 1, 0, AUDIT[platform.machine()]),
        (give, 0, 0, end),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, end),
    ]
    for name, answer in answers.items():
        program += [(equal, 0, 1, numbers[name]), (give, 0, 0, answer)]
    for name, argument in _OF_CALLER.items():
        program += [(equal, 0, 4, numbers[name]), (load, 0, 0, 16 + 8 * argument)]
        program += [(equal, 0, 1, 0), (give, 0, 0, allow), (give, 0, 0, refuse)]
    program += [
        (equal, 1, 0, numbers["socketpair"]),
        (give, 0, 0, allow),
        (load, 0, 0, 16),
        (equal, 1, 0, _AF_UNIX),
        (give, 0, 0, refuse),
        # A datagram socket could also send to a socket outside.
        (load, 0, 0, 24),
        (common, 0, 0, _SOCK_TYPES),
        (equal, 0, 1, _SOCK_DGRAM),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *each) for each in program)


def apply_seccomp_program(program: bytes) -> None:
    """Apply a seccomp program to this process. Refused calls fail with "permission denied" or "not supported"."""
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("HxxxxxxP", len(program) // 8, address))
