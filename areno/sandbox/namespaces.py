"""The namespaces of a command: a root folder that holds only what the command may see, and a network without others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterable
from socket import AF_INET, SOCK_DGRAM, socket

from areno.sandbox import kernel

READ, WRITE, DEVICE = "read", "write", "device"  # what a command may do with a path
Mounts = dict[str, str]  # path without symbolic links -> READ, WRITE or DEVICE

_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_IPC, _NEW_USERS = 0x20000, 0x4000000, 0x8000000, 0x10000000  # linux/sched.h
_NEW_PIDS, _NEW_NETWORK = 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # sys/mount.h
_ATTRIBUTES = {READ: _RDONLY | _NOSUID | _NODEV, WRITE: _NOSUID | _NODEV, DEVICE: _NOSUID}
_HERE, _EMPTY_PATH, _RECURSIVE, _NO_FOLLOW, _CLONE_TREE, _FROM_FD = -100, 0x1000, 0x8000, 0x100, 0x80001, 4
_MASKED = ("cmdline", "kcore", "keys", "kmsg", "sysrq-trigger", "timer_list")  # of /proc, if a program needs them not
_LINKS = {"/dev/fd": "/proc/self/fd", "/var/tmp": "/tmp"} | {
    f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))
}
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_RESERVED_PIDS = 300  # the kernel uses those below only once


def enter_user_namespace() -> None:
    """Put this process into a user namespace, where it has all privileges, but none outside.

    It keeps the ids of users and groups: as root all, else its own. Programs cannot make further user namespaces.
    """
    user, group, process = os.geteuid(), os.getegid(), os.getpid()
    entered, enter = os.pipe()
    helper = os.fork()  # only a process outside may name the ids of others
    if helper == 0:
        try:
            os.close(enter)
            os.read(entered, 1)
            try:
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/self/{name}", "rb") as file:
                        ranges = [line.split() for line in file]
                    _write(f"/proc/{process}/{name}", b"".join(b"%b %b %b\n" % (a, a, n) for a, _, n in ranges))
            except OSError:
                _write(f"/proc/{process}/setgroups", b"deny")
                _write(f"/proc/{process}/uid_map", b"%d %d 1" % (user, user))
                _write(f"/proc/{process}/gid_map", b"%d %d 1" % (group, group))
            os._exit(0)
        finally:
            os._exit(1)
    try:
        kernel.unshare(_NEW_USERS)
    finally:
        os.close(entered)
        os.close(enter)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        raise OSError("the ids of users cannot be set in a user namespace")
    _write("/proc/sys/user/max_user_namespaces", b"0")  # of this namespace


def fork() -> int:
    """Fork a process that is the init of new namespaces. Needs a user namespace."""
    flags = _NEW_PIDS | _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_HOST_NAME
    return kernel.system_call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)


def start_loopback() -> None:
    """Let processes in this network namespace reach each other."""
    with socket(AF_INET, SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def resolve(path: str) -> tuple[str, dict[str, str]]:
    """Return a path without symbolic links, and the links on the way: path -> text of the link."""
    found, links, left = "/", {}, path.split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        here = os.path.dirname(found) if name == ".." else os.path.join(found, name)
        if name == ".." or not os.path.islink(here):
            found = here
        elif len(links) > 40:
            raise OSError(f"{path} has too many symbolic links")
        else:
            links[here] = os.readlink(here)
            left += links[here].split("/")[::-1]
            found = "/" if links[here].startswith("/") else found
    os.stat(found)
    return found, links


def plan(paths: Iterable[tuple[str, str]]) -> tuple[Mounts, dict[str, str]]:
    """Return the mounts and links that make paths visible, from pairs (path, what a command may do with it)."""
    mounts: Mounts = {}
    links: dict[str, str] = {}
    for path, use in paths:
        found, on_the_way = resolve(path)
        mounts[found] = use
        links |= on_the_way
    return mounts, links


def enter_root(mounts: Mounts, links: dict[str, str], folder: str, megabytes: int, processes: int) -> bool:
    """Replace the root folder of this process, the init of new namespaces, by one with nothing but `mounts`.

    It also has empty folders /tmp and /dev/shm in memory, and if possible /proc of these namespaces. Returns whether it
    has the latter.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    trees = {path: _open_tree(path, mounts[path]) for path in _outermost(mounts)}
    _mount("tmpfs", folder, "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m")
    os.chdir(folder)
    kernel.system_call("pivot_root", b".", b".")
    for path in ("/tmp", "/dev/shm"):
        os.makedirs(path)
        _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={megabytes}m,nr_inodes=100000")
    os.mkdir("/proc")
    has_proc = _mount_proc()
    for path, tree in trees.items():
        if not (has_proc and path.startswith("/proc/")):
            _attach(tree, path)
        os.close(tree)
    for path, target in (_LINKS | links).items():
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
    if has_proc:
        for name in _MASKED:
            if os.path.exists(f"/proc/{name}"):
                tree = _open_tree("/dev/null", DEVICE)
                _move(tree, f"/proc/{name}")
                os.close(tree)
        if has_own_pid_max():
            _write("/proc/sys/kernel/pid_max", b"%d" % (_RESERVED_PIDS + processes))
        _mount(None, "/proc", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    kernel.unmount(".")  # the former root, which lies on top
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    return has_proc


def _outermost(mounts: Mounts) -> list[str]:
    """Return the paths in the order in which they are mounted, without those that another one already shows."""
    kept: list[str] = []
    for path in sorted(mounts):
        around = [each for each in kept if path.startswith(f"{each}/")]
        if not around or mounts[around[-1]] != mounts[path]:
            kept.append(path)
    return kept


def _mount_proc() -> bool:
    with contextlib.suppress(PermissionError):  # in a container where parts of /proc are hidden
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        return True
    return False


def has_own_pid_max() -> bool:
    """Whether pid_max belongs to a PID namespace (Linux 6.14). Before, it would be that of the whole machine."""
    version = os.uname().release.split(".")[:2]
    return all(each.isdigit() for each in version) and tuple(map(int, version)) >= (6, 14)


def _open_tree(path: str, use: str) -> int:
    flags = _CLONE_TREE | _RECURSIVE | _NO_FOLLOW
    tree = kernel.system_call("open_tree", _HERE, os.fsencode(path), flags)
    attributes = struct.pack("QQQQ", _ATTRIBUTES[use], 0, 0, 0)
    kernel.system_call("mount_setattr", tree, b"", _EMPTY_PATH | _RECURSIVE, attributes, len(attributes))
    return tree


def _attach(tree: int, path: str) -> None:
    if not os.path.lexists(path):
        if stat.S_ISDIR(os.fstat(tree).st_mode):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o444))
    _move(tree, path)


def _move(tree: int, path: str) -> None:
    kernel.system_call("move_mount", tree, b"", _HERE, os.fsencode(path), _FROM_FD)


def _mount(source: str | None, path: str, kind: str | None, flags: int, options: str | None = None) -> None:
    kernel.mount(*(each if each is None else os.fsencode(each) for each in (source, path, kind)), flags, options)


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
