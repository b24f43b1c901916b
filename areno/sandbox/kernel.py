"""The calls of the Linux kernel that limit a process and all processes that it starts. None of them needs root."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import stat
import struct

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number (AUDIT_ARCH_...) in seccomp filters."""
_CALLS = {  # name -> its number on the machines of AUDIT
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
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
    "io_uring_setup",
    # What outlives a command, or is shared with others: keys, System V and POSIX IPC.
    *("add_key", "request_key", "keyctl", "mq_open", "mq_unlink"),
    *("shmget", "shmctl", "shmat", "semget", "semctl", "semtimedop", "semop", "msgget", "msgctl", "msgrcv", "msgsnd"),
)
# Landlock does not limit the extended attributes of files, where commands could leave data for each other.
_UNSUPPORTED = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
_MISSING = ("memfd_create", "memfd_secret")  # memory that belongs to no process, so that nothing would limit it
# Calls that could limit or slow down another process -> the argument that names it. 0 is the caller.
_OF_CALLER = {
    **dict.fromkeys(("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr"), 0),
    **dict.fromkeys(("setpriority", "ioprio_set"), 1),
}
_EACCES, _ENOSYS, _ENOTSUP, _SOCK_DGRAM, _SOCK_TYPES = 13, 38, 95, 2, 0xF
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_BPF = 0x20, 0x15, 0x35, 0x54, 0x06  # load a word, compare: equal, at least, "and", return
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_MNT_DETACH = 2
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

_libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the interpreter's lock, which a fork has to hold


def system_call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises OSError."""
    number = _CALLS[name][list(AUDIT).index(os.uname().machine)]
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


def forbid_inspection() -> None:
    """Let no other process without privileges trace this one, or read its memory and open files."""
    _prctl(_PR_SET_DUMPABLE, 0)


def landlock_abi() -> int:
    """Return the version of Landlock, 0 if there is none."""
    try:
        return system_call("landlock_create_ruleset", None, 0, 1)
    except (OSError, KeyError, ValueError):
        return 0


def unshare(flags: int) -> None:
    """Put this process into new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str | None, path: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system."""
    names = [each if each is None else os.fsencode(each) for each in (source, path, kind, options)]
    _checked(_libc.mount(*names[:3], ctypes.c_ulong(flags), names[3]), f"mount of {path}")


def unmount(path: str) -> None:
    """Detach a file system and all that are below."""
    _checked(_libc.umount2(os.fsencode(path), _MNT_DETACH), "umount")


def limit_resources(n_files: int, file_megabytes: int, each_megabytes: int | None, seconds: float) -> None:
    """Limit the size and number of files of each process, and its address space and CPU time if the first is given."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_megabytes << 20, file_megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = n_files if most == resource.RLIM_INFINITY else min(n_files, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files))
    if each_megabytes is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (each_megabytes << 20, each_megabytes << 20))


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
    scopes = _ABSTRACT_SOCKETS_AND_SIGNALS if abi >= ABI_OF_SIGNALS else 0
    made = system_call("landlock_create_ruleset", struct.pack("QQQ", _all_rights(abi), 0, scopes), 24, 0)
    add_landlock_rules(made, abi, rules)
    return made


def add_landlock_rules(ruleset: int, abi: int, rules: list[tuple[int, int]]) -> None:
    """Allow further access to files."""
    for fd, rights in rules:
        system_call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights & _all_rights(abi), fd), 0)


def _all_rights(abi: int) -> int:
    return (1 << _N_RIGHTS[min(abi, len(_N_RIGHTS) - 1)]) - 1


def apply_landlock_ruleset(fd: int) -> None:
    """Apply a Landlock ruleset to this process."""
    system_call("landlock_restrict_self", fd, 0)


def seccomp_program(abi: int, *, groups: bool, network: bool) -> bytes:
    """Return a seccomp program for `apply_seccomp_program`.

    It refuses the calls in the tables above, and calls that change the limits of other processes. Connected pairs of
    Unix sockets are allowed. `abi` is the version of Landlock. `groups` allows new groups of processes, and `network`
    sockets, which need namespaces.
    """
    numbers = {name: each[list(AUDIT).index(os.uname().machine)] for name, each in _CALLS.items()}
    load, equal, at_least, _, give = _BPF
    allow, refuse, unsupported, end = 0x7FFF0000, 0x00050000 | _EACCES, 0x00050000 | _ENOTSUP, 0x80000000
    missing = 0x00050000 | _ENOSYS
    answers = dict.fromkeys(_REFUSED, refuse) | dict.fromkeys(_UNSUPPORTED, unsupported)
    answers |= dict.fromkeys(_MISSING, missing)
    if not groups:
        answers |= dict.fromkeys(("setpgid", "setsid"), refuse)
    if abi < _ABI_OF_TRUNCATE:
        answers["truncate"] = refuse
    # Offsets in struct seccomp_data: 0 the number of the call, 4 the architecture, 16 + 8 n argument n.
    program = [
        # Kill the process if it uses another architecture, or the x32 interface. Their calls have other numbers.
        (load, 0, 0, 4),
        (equal, 1, 0, AUDIT[os.uname().machine]),
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
    program += _network_rules(numbers, allow, refuse) if network else _pair_rules(numbers, allow, refuse)
    return b"".join(struct.pack("HBBI", *each) for each in [*program, (give, 0, 0, allow)])


def _network_rules(numbers: dict[str, int], allow: int, refuse: int) -> list[tuple[int, int, int, int]]:
    load, equal, _, _, give = _BPF
    return [
        (equal, 0, 9, numbers["socket"]),
        (load, 0, 0, 16),
        (equal, 5, 0, _AF_UNIX),
        (equal, 4, 0, _AF_INET),
        (equal, 3, 0, _AF_INET6),
        (equal, 0, 3, _AF_NETLINK),  # only its protocol 0, which lists the interfaces and routes
        (load, 0, 0, 32),
        (equal, 0, 1, 0),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]


def _pair_rules(numbers: dict[str, int], allow: int, refuse: int) -> list[tuple[int, int, int, int]]:
    load, equal, _, common, give = _BPF
    return [
        (equal, 0, 1, numbers["socket"]),
        (give, 0, 0, refuse),
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
    ]


def apply_seccomp_program(program: bytes) -> None:
    """Apply a seccomp program to this process. Refused calls fail with "permission denied" or "not supported"."""
    address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("HxxxxxxP", len(program) // 8, address))
