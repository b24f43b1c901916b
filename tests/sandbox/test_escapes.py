"""What programs in a box try, as root and as a user without rights. All of it fails, or is ended within a second."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from socket import AF_INET, AF_UNIX, socket

import pytest

from areno.sandbox import box
from tests.helpers.processes import is_running, started

REPO = Path(__file__).parents[2]
PYTHON = "/usr/bin/python3"  # everybody can start it
NETWORK_PROBLEM = box.network_problem()
pytestmark = [
    pytest.mark.skipif(bool(NETWORK_PROBLEM), reason=NETWORK_PROBLEM),
    pytest.mark.skipif(os.getuid() != 0, reason="becomes another user"),
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="there is no Python that everybody can start"),
]
DRIVER = f"""
import json, os, sys, time
sys.path.append({str(REPO)!r})
from areno.sandbox.box import Box, run
command, settings, stdin = json.loads(sys.stdin.read())
run(["true"], Box(settings["folder"]))
begin = time.monotonic()
result = run(command, Box(**settings), stdin=stdin, max_output=100000)
print(json.dumps([os.getuid(), result.status, result.output, result.why, time.monotonic() - begin]))
"""
TRY = """
import ctypes, glob, json, mmap, os, shutil, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "")
def attempt(**tries):
    done = []
    for name, each in tries.items():
        try:
            if each() is not False: done.append(name)
        except (OSError, ValueError, subprocess.SubprocessError): pass
    print(json.dumps(done))
"""


class Inside:
    """Runs programs in a box, as a user."""

    def __init__(self, user, folder):
        self.user, self.folder = user, folder
        self.seconds = 0.0  # that the last program took

    def run(self, command, stdin="", **settings):
        asked = json.dumps([command, {"folder": str(self.folder), "seconds": 30.0, **settings}, stdin])
        ran = subprocess.run(
            [PYTHON, "-c", DRIVER], input=asked, user=self.user, group=self.user, extra_groups=[], cwd="/", env={},
            text=True, capture_output=True,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        user, status, output, why, self.seconds = json.loads(ran.stdout)
        assert user == self.user
        return status, output, why

    def succeeds(self, tries, *arguments, **settings):
        """The names of those of `tries` (arguments of `attempt`) that succeed in a box."""
        code = f"{TRY}\nattempt({tries})"
        status, output, why = self.run([PYTHON, "-I", "-c", code, *arguments], **settings)
        assert (status, why) == (0, ""), output
        return json.loads(output)


@pytest.fixture(params=[0, 65534], ids=["root", "nobody"])
def inside(request, tmp_path):
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        os.chmod(folder, 0o755)
    if subprocess.run([PYTHON, "-c", f"open({box.__file__!r})"], user=request.param, stderr=-3, cwd="/").returncode:
        pytest.skip("this user cannot read this folder")
    folder = tmp_path / "inside"
    folder.mkdir()
    os.chown(folder, request.param, request.param)
    return Inside(request.param, folder)


@pytest.fixture
def services(tmp_path):
    """Outside: a port of 127.0.0.1, an abstract socket and a socket in a folder, which anybody may connect to."""
    with socket(AF_INET) as tcp, socket(AF_UNIX) as abstract, socket(AF_UNIX) as path:
        tcp.bind(("127.0.0.1", 0))
        abstract.bind(f"\0areno-test-{os.getpid()}")
        path.bind(str(tmp_path / "outside.socket"))
        os.chmod(tmp_path / "outside.socket", 0o777)
        for each in (tcp, abstract, path):
            each.listen()
        yield str(tcp.getsockname()[1]), f"areno-test-{os.getpid()}", str(tmp_path / "outside.socket")


CONNECTIONS = """
tcp=lambda: socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5),
abstract=lambda: socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[2]),
path=lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[3]),
outside=lambda: socket.create_connection(("192.0.2.1", 80), 5),
outside6=lambda: socket.create_connection(("2001:db8::1", 80), 5),
names=lambda: socket.getaddrinfo("example.com", 80),
udp=lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
raw=lambda: socket.socket(type=socket.SOCK_RAW, proto=1),
packet=lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
vsock=lambda: socket.socket(socket.AF_VSOCK),
interfaces=lambda: len(socket.if_nameindex()) > 1,
"""


@pytest.mark.parametrize("network", [False, True])
def test_connections_to_outside(network, inside, services, tmp_path):
    settings = {}
    if network:
        with socket(AF_UNIX) as listener:
            listener.bind(str(tmp_path / "bridge"))
        settings["socket"] = str(tmp_path / "bridge")
    assert inside.succeeds(CONNECTIONS, *services, **settings) == []
    assert inside.seconds < 5


FILES = """
read=lambda: open(sys.argv[1]),
write=lambda: open(sys.argv[1], "a"),
folder=lambda: os.listdir(os.path.dirname(sys.argv[1])),
link=lambda: (os.symlink(sys.argv[1], "link"), open("link")),
folder_link=lambda: (os.symlink("/root", "home"), os.listdir("home/.ssh")),
beside=lambda: os.listdir("..") != ["inside"],
home=lambda: os.listdir("/home"),
root_home=lambda: [each for each in os.listdir("/root") if each != ".pyenv"] != [],
above=lambda: "work" in os.listdir("/..") and os.path.exists("/work/shared"),
etc=lambda: open("/etc/shadow"),
tmp=lambda: os.listdir("/tmp") != [sys.argv[1].split("/")[2]],
shm=lambda: os.listdir("/dev/shm") != [],
init_root=lambda: os.listdir("/proc/1/root"),
init_folder=lambda: os.listdir("/proc/1/cwd/"),
init_files=lambda: any([os.readlink(each) for each in glob.glob("/proc/1/fd/*")]),
init_memory=lambda: open("/proc/1/mem"),
init_environment=lambda: open("/proc/1/environ").read(),
disk=lambda: open("/dev/vda"),
memory=lambda: open("/dev/mem"),
make_device=lambda: os.mknod("device", 0o60666, 0xFE00),
new_root=lambda: os.chroot("."),
setting=lambda: open("/proc/sys/kernel/hostname", "w"),
trigger=lambda: open("/proc/sysrq-trigger", "w").write("x"),
score=lambda: open("/proc/1/oom_score_adj", "w"),
change_system=lambda: os.chmod("/usr/bin/true", 0o755),
change_times=lambda: os.utime("/etc/passwd"),
make_in_root=lambda: open("/made", "w"),
mount=lambda: checked(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)),
remount=lambda: checked(libc.mount(None, b"/usr", None, 32 | 4096, None)),
unmount=lambda: checked(libc.umount2(b"/proc/keys", 2)),
users=lambda: checked(libc.unshare(0x10000000)),
mounts=lambda: checked(libc.unshare(0x20000)),
memory_file=lambda: os.memfd_create("x"),
"""


def test_files_outside(inside, tmp_path):
    secret = tmp_path / "outside" / "secret"
    secret.parent.mkdir()
    secret.write_text("x")
    os.chmod(secret, 0o666)
    assert inside.succeeds(FILES, str(secret)) == []
    assert secret.read_text() == "x"


def test_the_same_programs_succeed_without_a_box(services, tmp_path):
    """The tests before would not see an attempt that fails everywhere."""

    def done(tries, *arguments):
        code = f"{TRY}\nattempt({tries})"
        command = [PYTHON, "-I", "-c", code, *arguments]
        return set(json.loads(subprocess.check_output(command, text=True, cwd=inside)))

    inside, secret = tmp_path / "inside", tmp_path / "secret"
    inside.mkdir()
    secret.write_text("x")
    assert done(CONNECTIONS, *services) >= {"tcp", "abstract", "path"}
    expected = ["read", "write", "folder", "link", "beside", "etc", "users", "memory_file"]
    harmless = [line for line in FILES.splitlines() if line.partition("=")[0] in expected]
    assert done("\n".join(harmless), str(secret)) == set(expected)


def test_files_of_a_grader(inside, tmp_path):
    grader = tmp_path / "grader"
    grader.mkdir()
    (grader / "test.py").write_text("assert True")
    for path in (grader, grader / "test.py"):
        os.chown(path, inside.user, inside.user)
    tries = """
    write=lambda: open(sys.argv[1] + "/test.py", "a"),
    truncate=lambda: os.truncate(sys.argv[1] + "/test.py", 0),
    mode=lambda: os.chmod(sys.argv[1] + "/test.py", 0o777),
    times=lambda: os.utime(sys.argv[1] + "/test.py"),
    remove=lambda: os.unlink(sys.argv[1] + "/test.py"),
    rename=lambda: os.rename(sys.argv[1], sys.argv[1] + "x"),
    hide=lambda: os.symlink("/tmp", sys.argv[1] + "/conftest.py"),
    hard_link=lambda: os.link(sys.argv[1] + "/test.py", "linked"),
    attribute=lambda: os.setxattr(sys.argv[1] + "/test.py", "user.x", b"x"),
    """
    assert inside.succeeds(tries, str(grader), read=[str(grader)]) == []
    assert inside.succeeds("read=lambda: open(sys.argv[1] + '/test.py')", str(grader), read=[str(grader)]) == ["read"]
    within = inside.folder / "tests"
    (grader / "test.py").rename(inside.folder / "test.py")
    within.mkdir()
    os.chown(within, inside.user, inside.user)
    assert inside.succeeds(tries, str(within), read=[str(within)]) == []


def test_other_processes(inside):
    with started(["sleep", "1000"], user=inside.user, cwd="/") as victim:
        tries = """
        kill=lambda: os.kill(int(sys.argv[1]), 9),
        seen=lambda: os.path.exists("/proc/" + sys.argv[1]),
        all=lambda: len([each for each in os.listdir("/proc") if each.isdigit()]) != 2,
        trace=lambda: checked(libc.ptrace(16, 1, None, None)),
        limit=lambda: __import__("resource").prlimit(1, 0, (1, 1)),
        priority=lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
        group=lambda: os.kill(0, 0) or os.getpgid(1) == os.getpgid(0),
        """
        assert inside.succeeds(tries, str(victim.pid)) == []
        # Signals to all, and to the process that watches: neither ends anything but the program.
        inside.run(["sh", "-c", "kill -9 1; kill -STOP 1; kill -9 -1"])
        assert is_running(victim.pid)
    assert inside.run(["sh", "-c", "kill -9 1; kill -STOP 1; sleep 0.2; echo on"])[1].endswith("on\n")


def test_processes_that_leave_the_command(inside):
    code = """
import os, signal, time
for number in range(20):
    if os.fork() == 0:
        os.setsid() if number % 2 else os.setpgid(0, 0)
        for each in (1, 2, 15): signal.signal(each, signal.SIG_IGN)
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
"""
    assert inside.run([PYTHON, "-c", code])[0] == 0
    assert not [
        link for link in Path("/proc").glob("[0-9]*/cwd") if link.is_symlink() and str(inside.folder) == _target(link)
    ]


def _target(link):
    try:
        return os.readlink(link)
    except OSError:
        return ""


BOMBS = {
    "python": [PYTHON, "-c", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"],
    "shell": ["sh", "-c", "b() { b | b & }; b; sleep 100"],
    "threads": [
        PYTHON, "-c", "import threading, time\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(100,)).start()\n    except RuntimeError: pass",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_fork_bomb(bomb, inside):
    most, over = 0, threading.Event()

    def count():
        nonlocal most
        while not over.wait(0.02):
            most = max(most, int(Path("/proc/loadavg").read_text().split()[3].split("/")[1]))

    before = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    watch = threading.Thread(target=count)
    watch.start()
    try:
        status, _, why = inside.run(BOMBS[bomb], processes=100)
        assert (status, why) == (None, "processes") or (status != 0 and bomb == "shell")  # it may give up by itself
    finally:
        over.set()
        watch.join()
    assert most - before < 500
    assert inside.seconds < 5  # about 0.1 on an idle machine


MEMORY = {
    "processes": "import os, time\nfor _ in range(7):\n    if os.fork() == 0: break\n"
    "x = bytearray(512 << 20)\ntime.sleep(60)",
    "shared": "import mmap, os, time\nfor _ in range(7):\n    if os.fork() == 0: break\n"
    "x = mmap.mmap(-1, 512 << 20)\nfor n in range(0, len(x), 4096): x[n] = 1\ntime.sleep(60)",
    "files": "import time\nx = bytes(16 << 20)\n"
    "for n in range(40):\n    for place in ('/tmp', '/dev/shm'): open(f'{place}/{n}', 'wb').write(x)\ntime.sleep(60)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEMORY)
def test_memory_of_all_processes_together(kind, inside):
    assert inside.run([PYTHON, "-c", MEMORY[kind]], megabytes=1024)[2] == "memory"
    assert inside.seconds < 10  # about 0.5 on an idle machine


@pytest.mark.slow
def test_memory_that_processes_share_counts_once(inside):
    code = """
import os, time
x = bytearray(300 << 20)
for _ in range(7):
    if os.fork() == 0: time.sleep(1); os._exit(0)
for _ in range(7): os.wait()
"""
    assert inside.run([PYTHON, "-c", code], megabytes=1024) == (0, "", "")


def test_long_output(inside):
    begin = time.monotonic()
    status, output, why = inside.run(["yes"], output_megabytes=1, file_megabytes=1 << 14)
    assert (status, why) == (None, "output")
    assert len(output) < 200000
    assert time.monotonic() - begin < 200
