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
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _MOVE, _REC = 1, 2, 4, 8, 32, 4096, 8192, 16384  # sys/mount.h
_PRIVATE = 1 << 18
_ATTRIBUTES = {READ: _RDONLY | _NOSUID | _NODEV, WRITE: _NOSUID | _NODEV, DEVICE: _NOSUID}
_HERE, _EMPTY_PATH, _RECURSIVE, _NO_FOLLOW, _CLONE_TREE, _FROM_FD = -100, 0x1000, 0x8000, 0x100, 0x80001, 4
_MASKED = ("cmdline", "kcore", "keys", "kmsg", "sysrq-trigger", "timer_list")  # of /proc, if a program needs them not
_LINKS = {"/dev/fd": "/proc/self/fd", "/dev/ptmx": "pts/ptmx", "/var/tmp": "/tmp"} | {
    f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))
}
_OWN_FOLDERS = ("/tmp", "/dev/shm")  # of each command, in memory
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
    with contextlib.suppress(OSError):  # in some containers
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


def is_in_own_folder(path: str) -> bool:
    """Whether a command's own /tmp or /dev/shm hides a path that is in the prepared root."""
    mounts, links = plan([(path, READ)])
    return any(_is_inside(each, folder) for each in (*mounts, *links) for folder in _OWN_FOLDERS)


def prepare_root(mounts: Mounts, links: dict[str, str]) -> None:
    """Make the root folder that all commands get a copy of, and make it the working directory of this process.

    It lies on top of this process's own root folder, where it hides nothing.
    """
    kernel.unshare(_NEW_MOUNTS)
    kernel.mount(None, "/", None, _REC | _PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m")
    os.chdir("/tmp")
    kernel.mount(".", "/", None, _MOVE)
    for path in ("tmp", "proc", "dev/shm", "dev/pts"):
        os.makedirs(path)
    for path in _outermost(mounts):
        _attach(_open_tree(path, mounts[path]), path[1:])
    for path, target in (_LINKS | links).items():
        _link(path[1:], target)


def extend_prepared_root(mounts: Mounts, links: dict[str, str]) -> None:
    """Add folders and links of the first level for paths to the prepared root. Nothing else of them is shared."""
    for top in {path.split("/")[1] for path in (*mounts, *links)}:
        if f"/{top}" in links:
            _link(top, links[f"/{top}"])
        else:
            os.makedirs(top or ".", exist_ok=True)


class Root:
    """The root folder of one command, made in the init of new namespaces. It begins as a copy of the prepared one."""

    def __init__(self, base: Mounts):
        self._base = base
        self._host = os.open("/", os.O_PATH | os.O_CLOEXEC)
        self.has_proc = _mount_proc()  # whether it shows the processes of these namespaces
        kernel.system_call("pivot_root", b".", b".")

    def complete(
        self, more: Mounts, links: dict[str, str], sources: dict[str, str], megabytes: int, processes: int, outside: str
    ) -> None:
        """Add further paths, terminals, and empty /tmp and /dev/shm in memory. Then hide the former root folder.

        A path shows what is outside at the same path, or at the one in `sources`. The folder `outside` of
        the former root becomes the working directory of this process.
        """
        trees = {path: _open_tree(sources.get(path, path)[1:], more[path], self._host) for path in _outermost(more)}
        outside_folder = os.open(outside[1:] or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._host)
        own = self._replace_folders((*more, *links))
        options = f"mode=1777,size={megabytes}m,nr_inodes=100000"
        for path in _OWN_FOLDERS:
            os.makedirs(path, exist_ok=True)
            kernel.mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, options)
        os.makedirs("/dev/pts", exist_ok=True)
        kernel.mount("devpts", "/dev/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,mode=600,ptmxmode=666")
        for path, tree in trees.items():
            _attach(tree, path)
        for path, target in (_LINKS | links).items():
            _link(path, target)
        if self.has_proc:
            if has_own_pid_max():
                _write("/proc/sys/kernel/pid_max", b"%d" % (_RESERVED_PIDS + processes))
            kernel.mount(None, "/proc", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        os.fchdir(self._host)  # it lies on top of the root folder
        kernel.unmount(".")
        for path in ("/", *own):
            kernel.mount(None, path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
        os.fchdir(outside_folder)
        os.close(outside_folder)
        os.close(self._host)

    def _replace_folders(self, paths: Iterable[str]) -> set[str]:
        """Replace the folders of the first level in which a path is missing, since all commands share them."""
        shown = [*self._base, *_OWN_FOLDERS]
        missing = [path for path in paths if not any(_is_inside(path, each) for each in shown)]
        tops = {f"/{path.split('/')[1]}" for path in missing if not os.path.lexists(path)}
        for top in tops:
            inside = [path for path in _outermost(self._base) if _is_inside(path, top)]
            trees = {path: _open_tree(path, self._base[path]) for path in inside}
            kernel.mount("tmpfs", top, "tmpfs", _NOSUID | _NODEV, "mode=755,size=4m")
            for path, tree in trees.items():
                _attach(tree, path)
        return tops


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _link(path: str, target: str) -> None:
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.symlink(target, path)


def _outermost(mounts: Mounts) -> list[str]:
    """Return the paths in the order in which they are mounted, without those that another one already shows."""
    kept: list[str] = []
    for path in sorted(mounts):
        around = [each for each in kept if path.startswith(f"{each}/")]
        if not around or mounts[around[-1]] != mounts[path]:
            kept.append(path)
    return kept


def _mount_proc() -> bool:
    """Mount /proc at proc, where else only some of its files are."""
    try:
        kernel.mount("proc", "proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    except PermissionError:  # in a container where parts of /proc are hidden
        return False
    for name in _MASKED:
        with contextlib.suppress(FileNotFoundError):
            kernel.mount("/dev/null", f"proc/{name}", None, _BIND)
    return True


def has_own_pid_max() -> bool:
    """Whether pid_max belongs to a PID namespace (Linux 6.14). Before, it would be that of the whole machine."""
    version = os.uname().release.split(".")[:2]
    return all(each.isdigit() for each in version) and tuple(map(int, version)) >= (6, 14)


def _open_tree(path: str, use: str, folder: int = _HERE) -> int:
    flags = _CLONE_TREE | _RECURSIVE | _NO_FOLLOW
    tree = kernel.system_call("open_tree", folder, os.fsencode(path), flags)
    attributes = struct.pack("QQQQ", _ATTRIBUTES[use], 0, 0, 0)
    kernel.system_call("mount_setattr", tree, b"", _EMPTY_PATH | _RECURSIVE, attributes, len(attributes))
    return tree


def _attach(tree: int, path: str) -> None:
    """Mount an open tree, and close it."""
    _make_place(path, stat.S_ISDIR(os.fstat(tree).st_mode))
    kernel.system_call("move_mount", tree, b"", _HERE, os.fsencode(path), _FROM_FD)
    os.close(tree)


def _make_place(path: str, is_folder: bool) -> None:
    """Make an empty folder or file, on which something can be mounted."""
    if os.path.lexists(path):
        return
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o444))


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
