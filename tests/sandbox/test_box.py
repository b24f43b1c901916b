"""Commands in a box: what they cannot do to the rest of the machine, what they can do, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from socket import AF_UNIX, socket

import pytest

from areno.sandbox import box, kernel
from areno.sandbox.box import Box, Result, run
from tests.helpers.processes import is_running, started
from tests.helpers.waiting import until

REPO = Path(__file__).parents[2]
PROBLEM, MEANS = box.try_box()
UNLIMITED = {"files", "signals"} - MEANS.keys()
pytestmark = pytest.mark.skipif(bool(PROBLEM or UNLIMITED), reason=PROBLEM or f"{UNLIMITED} cannot be limited here")

# What a program may try: it prints the names of what succeeds.
ATTACK = """
import ctypes, json, os, resource, signal, socket, sys
victim, file, folder, listener = int(sys.argv[1]), *sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), "")
def connect():
    with socket.socket(socket.AF_UNIX) as other: other.connect(listener)
def trace():
    checked(libc.ptrace(16, victim, None, None))
    os.waitpid(victim, 0)
    libc.ptrace(17, victim, None, None)
def system_v(made, remove):
    checked(made)
    remove(made)
def queue():
    checked(libc.mq_open(b"/box-test", os.O_CREAT | os.O_RDWR, 0o600, None))
    checked(libc.mq_unlink(b"/box-test"))
def leave():
    if (child := os.fork()) == 0:
        try: os.setsid()
        except OSError: os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]: raise OSError
tries = {
    "read": lambda: open(file).read(),
    "read by a link": lambda: (os.symlink(folder, "link"), open("link/" + os.path.basename(file)).read()),
    "list": lambda: os.listdir(folder),
    "append": lambda: open(file, "a").write("x"),
    "truncate": lambda: os.truncate(file, 0),
    "make": lambda: open(folder + "/made", "w"),
    "make a folder": lambda: os.mkdir(folder + "/folder"),
    "link": lambda: os.link(file, "linked"),
    "rename": lambda: os.rename(file, file + ".renamed"),
    "rename back": lambda: os.rename(file + ".renamed", file),
    "environment": lambda: open(f"/proc/{victim}/environ").read(),
    "command line": lambda: open(f"/proc/{victim}/cmdline").read(),
    "shared memory": lambda: (open("/dev/shm/box-test", "w"), os.unlink("/dev/shm/box-test")),
    "segment": lambda: system_v(libc.shmget(0, 4096, 0o1600), lambda number: libc.shmctl(number, 0, None)),
    "semaphores": lambda: system_v(libc.semget(0, 1, 0o1600), lambda number: libc.semctl(number, 0, 0)),
    "messages": lambda: system_v(libc.msgget(0, 0o1600), lambda number: libc.msgctl(number, 0, None)),
    "queue": lambda: queue(),
    "attribute": lambda: os.setxattr(file, "user.box", b"x"),
    "remove attribute": lambda: os.removexattr(file, "user.box"),
    "socket": lambda: socket.socket().close(),
    "connect": lambda: connect(),
    "leave the group": lambda: leave(),
    "trace": lambda: trace(),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, victim, 10),
    "limit": lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1000, 1000)),
    "look": lambda: os.kill(victim, 0),
    "kill": lambda: os.kill(victim, signal.SIGKILL),
    "remove": lambda: os.unlink(file),
}
done = []
for name, attempt in tries.items():
    try:
        attempt()
        done.append(name)
    except (OSError, ValueError):
        pass
print(json.dumps(done))
"""
N_TRIES = ATTACK.count(": lambda:")
HARMLESS = {"shared memory", "leave the group"}  # in namespaces of its own


@pytest.fixture(params=["this kernel", 5, 1, 0, "no namespaces"])
def abi(request, monkeypatch):
    """The kernel as it is, with an older Landlock: without limits for signals, the first one and none, and without
    namespaces."""
    if request.param == "this kernel":
        yield request.param
        return
    if request.param == "no namespaces":
        monkeypatch.setattr(box, "_WITHOUT", "none in this test")
    elif kernel.landlock_abi() < request.param:
        pytest.skip("Landlock is older")
    else:
        monkeypatch.setattr(kernel, "landlock_abi", lambda: request.param)
    if {"files", "signals"} - box.try_box()[1].keys():
        pytest.skip("there are no namespaces")
    starter = box._CommandServer()
    monkeypatch.setattr(box, "_starter", starter)
    yield request.param
    starter.close()


@pytest.fixture
def outside(tmp_path):
    """A process, a file and a socket of the same user: (process, arguments of the attack)."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("of the user")
    with started(["sleep", "1000"]) as victim, socket(AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        yield victim, [str(victim.pid), str(folder / "file"), str(folder), str(folder / "socket")]


@pytest.fixture
def inside(tmp_path):
    folder = tmp_path / "inside"
    folder.mkdir()
    return Box(folder, seconds=30.0)


def ran(command, box, **options):
    """(status, output) of a command that was not ended."""
    result = run(command, box, **options)
    assert not result.why
    return result.status, result.output


def python(code, box, *arguments, **options):
    return ran([sys.executable, "-I", "-c", code, *arguments], box, **options)


def test_what_is_outside_is_safe(abi, outside, inside):
    victim, arguments = outside
    status, output = python(ATTACK, inside, *arguments)
    assert (status, set(json.loads(output)) - (HARMLESS if abi != "no namespaces" else set())) == (0, set())
    assert is_running(victim.pid)
    assert Path(arguments[1]).read_text() == "of the user"


def test_the_same_program_does_it_all_without_a_box(outside, inside):
    command = [sys.executable, "-I", "-c", ATTACK, *outside[1]]
    output = subprocess.run(command, cwd=inside.folder, capture_output=True, text=True, check=True).stdout
    # The test before would not see an attack that fails everywhere. These may be closed to all.
    closed = {"shared memory", "trace", "queue", "attribute", "remove attribute"}
    assert len({*json.loads(output), *closed}) == N_TRIES


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_what_is_outside_is_safe_from_a_user_without_rights(tmp_path, monkeypatch):
    """As nobody, where the interpreter of the system can be started by everybody."""
    reader = ["/usr/bin/python3", "-S", "-c", f"open({str(REPO / 'areno/sandbox/box.py')!r}); import json"]
    if (
        not Path(reader[0]).exists()
        or subprocess.run(reader, user=65534, stderr=subprocess.DEVNULL, cwd="/").returncode
    ):
        pytest.skip("nobody can read neither this folder nor a Python")
    script = f"""
import os, subprocess, sys, tempfile
sys.path.append({str(REPO)!r})
from areno.sandbox.box import Box, run
with tempfile.TemporaryDirectory() as folder:
    os.mkdir(folder + "/inside"); os.mkdir(folder + "/outside")
    open(folder + "/outside/file", "w").write("x")
    victim = subprocess.Popen(["sleep", "1000"])
    arguments = [str(victim.pid), folder + "/outside/file", folder + "/outside", "/nothing"]
    result = run([sys.executable, "-I", "-c", {ATTACK!r}, *arguments], Box(folder + "/inside"))
    print(os.getuid(), result.status, result.output)
    assert victim.poll() is None
    victim.kill()
    victim.wait()
"""
    ran = subprocess.run(
        [*reader[:2], "-c", script],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        env={},
        text=True,
        capture_output=True,
    )
    user, status, output = ran.stdout.split(" ", 2)
    assert (user, status, set(json.loads(output)) - HARMLESS) == ("65534", "0", set()), ran.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="gives up rights of root")
def test_root_has_no_privileges_in_a_box(inside):
    code = "import socket; socket.sethostname(socket.gethostname())"
    assert "PermissionError" in python(code, inside)[1]


def test_a_command_uses_its_folder_and_the_system(abi, inside):
    script = """
echo given > here && mkdir sub && mv here sub/there && cat sub/there
cat /dev/stdin
cat /dev/null; head -c 3 /dev/urandom | wc -c
[ "$HOME" = "$PWD" ] && dirname "$TMPDIR" | grep -qx "$PWD" && echo x > "$TMPDIR/file" && rm "$TMPDIR/file"
sleep 0.01 & wait && wc -l < /etc/passwd > /dev/null && kill -TERM $$
"""
    assert ran(["sh", "-c", script], inside, stdin="in\n") == (-signal.SIGTERM, "given\nin\n3\n")
    assert sorted(os.listdir(inside.folder)) == ["sub"]  # the empty folder for temporary files is gone


def test_a_program_of_python_starts_others_and_makes_temporary_files(abi, inside):
    code = """
import asyncio, multiprocessing, os, socket, subprocess, sys, tempfile, threading
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout.strip())
with tempfile.NamedTemporaryFile("w") as file: file.write("x")
process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
process.start()
process.join()
async def main():
    return await (await asyncio.create_subprocess_exec("echo", "2", stdout=-1)).communicate()
print(process.exitcode, asyncio.run(main())[0])
socket.socketpair()
sys.stdout.flush()
os.abort()
"""
    assert python(code, inside) == (-signal.SIGABRT, "1\n3 b'2\\n'\n")


def test_further_folders_can_be_read_and_executed(tmp_path, outside, inside):
    file = outside[1][1]
    assert "Error: [Errno " in python(f"print(open({file!r}).read())", inside)[1]
    more = Box(inside.folder, read=[Path(file).parent])
    assert python(f"print(open({file!r}).read())", more) == (0, "of the user\n")
    assert "Error: [Errno " in python(f"print(open({file!r}, 'a'))", more)[1]
    with pytest.raises(OSError, match="nothing"):
        run(["true"], Box(inside.folder, read=[tmp_path / "nothing"]))


def test_paths_are_seen_at_other_paths(tmp_path, inside):
    if "mount namespace" not in MEANS["files"]:
        pytest.skip("needs namespaces")
    tool = tmp_path / "tool"
    tool.write_text("tool\n")
    moved = replace(inside, read=[tool], shown_at={str(inside.folder): "/areno/work", str(tool): "/areno/tool"})
    script = f"pwd; cat /areno/tool; echo x > made; ls {tmp_path}"
    status, output = ran(["sh", "-c", script], moved)
    assert (status != 0, output.splitlines()[:2]) == (True, ["/areno/work", "tool"])
    assert (inside.folder / "made").read_text() == "x\n"


def test_a_command_that_cannot_start_says_so(inside):
    assert ran(["nothing-of-this-name"], inside) == (1, "there is no command nothing-of-this-name\n")
    status, output = ran([str(REPO / "Makefile")], replace(inside, read=[REPO / "Makefile"]))
    assert status == 1
    assert "cannot be run" in output
    with pytest.raises(OSError, match="missing"):
        run(["true"], Box("/missing"))


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nif pid := os.fork(): print(pid)\nelse: time.sleep(1000)",
        "import os, time\nif os.fork(): os.wait()\nelif pid := os.fork(): print(pid)\nelse: time.sleep(1000)",
        "import subprocess as s\nprint(s.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; nohup sleep 1000 & wait']).pid)",
    ],
)
def test_nothing_is_left_behind(code, abi, inside):
    status, output = python(code, inside)
    assert (status, output.strip().isdigit()) == (0, True)
    assert not running_in(inside.folder)


def running_in(folder):
    """Processes with this working directory. Their number differs in a namespace."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(folder):
                found.append(link.parent.name)
    return found


def test_time_limit(abi, inside):
    for seconds in (0.3, 3.0, 30.0):  # on a busy machine the command may begin late
        result = run(["sh", "-c", "echo begun; sleep 1000 & wait"], Box(inside.folder, seconds=seconds))
        assert result.why == "time"
        assert not running_in(inside.folder)
        if result.output:
            break
    assert result == Result(None, "begun\n", "time")


@pytest.mark.parametrize(
    "code",
    [
        # a path that is too long for the kernel, and deeper than Python may recurse
        "for n in range(2100): os.mkdir('d'); n % 100 or [open('f', 'w').close(), os.symlink('/', 'l')]; os.chdir('d')",
        "os.makedirs('a/b/c'); open('a/b/f', 'w'); os.chmod('a/b/c', 0); os.chmod('a/b', 0); os.chmod('a', 0)",
        "os.makedirs('a/b'); os.chmod('a/b', 0o500); os.chmod('.', 0)",
        "for each in range(150): os.makedirs(f'{each}/a/b')",
    ],
)
def test_a_temporary_folder_is_removed_whatever_is_in_it(code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = tmp_path / "kept"
    kept.write_text("x")
    with box.temporary_folder("areno-") as folder:
        status, output = python(f"import os\n{code}\nos.symlink({str(tmp_path)!r}, 'link')", Box(folder))
        assert (status, os.listdir(folder)) != (0, []), output
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("without", ["", "no namespaces"])
@pytest.mark.parametrize("of", ["the process that asks", "the process that starts commands"])
def test_commands_end_with(of, without, inside):
    script = f"""
import sys; sys.path.append({str(REPO)!r})
from areno.sandbox import box
box._WITHOUT = {without!r}
box.run(["true"], box.Box({str(inside.folder)!r}))
print(box._starter._process.pid, flush=True)
box.run(["sh", "-c", "sleep 1000 & echo x > begun; sleep 1000"], box.Box({str(inside.folder)!r}, seconds=600.0))
"""
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as asks:
        starts = int(asks.stdout.readline())
        until((Path(inside.folder) / "begun").exists)
        os.kill(asks.pid if of == "the process that asks" else starts, signal.SIGKILL)
        until(lambda: not running_in(inside.folder))
        until(lambda: not is_running(starts))


def test_the_next_command_starts_after_somebody_has_ended_the_process_that_starts_them(inside):
    assert ran(["true"], inside) == (0, "")
    box._starter._process.kill()
    box._starter._process.wait()
    box._starter._process.wait()
    assert ran(["true"], inside) == (0, "")


def test_a_supervisor_in_reserve_that_was_killed_is_replaced(inside):
    assert run(["true"], inside) == Result(0, "", "")
    reserve = Path(f"/proc/{box._starter._process.pid}/task/{box._starter._process.pid}/children")
    until(reserve.read_text)
    for _ in range(2):
        pid = int(reserve.read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_running(pid))
        assert run(["true"], inside) == Result(0, "", "")
        until(lambda pid=pid: reserve.read_text().strip() not in ("", str(pid)))


def test_commands_at_the_same_time_have_their_own_output(tmp_path):
    def echo(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        return ran(["sh", "-c", f"sleep 0.1; cat; echo {number} > file; cat file"], Box(folder), stdin=f"in {number}\n")

    with ThreadPoolExecutor(8) as beside:
        assert list(beside.map(echo, range(8))) == [(0, f"in {number}\n{number}\n") for number in range(8)]


@pytest.mark.slow
def test_limits_of_all_processes_together(abi, inside):
    def why(code, **limits):
        return run([sys.executable, "-I", "-c", code], replace(inside, **limits)).why

    forks = "import os, time\nfor _ in range(7):\n    if os.fork() == 0: break\n"
    assert why(f"{forks}x = bytearray(512 << 20); time.sleep(60)", megabytes=1024) == "memory"
    assert why("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", processes=100) == "processes"
    assert why("while True: print('x' * 1000)", output_megabytes=1, file_megabytes=1 << 10) == "output"
    assert not running_in(inside.folder)


def test_terminals(inside):
    if "PID namespace" not in MEANS["signals"]:
        pytest.skip("needs namespaces")
    code = "import os, pty; pty.spawn(['sh', '-c', 'tty; test -t 0 && ls /dev/pts'], lambda fd: os.read(fd, 100))"
    assert python(code, inside)[1].split() == ["/dev/pts/0", "0", "ptmx"]


@pytest.mark.slow
def test_limits(inside):
    def limited(code, **limits):
        return python(code, Box(inside.folder, **limits))

    assert "MemoryError" in limited("bytearray(2 << 30)", each_megabytes=1024)[1]
    assert run([sys.executable, "-c", "while True: pass"], Box(inside.folder, seconds=1.0)).why == "time"
    assert "File too large" in limited("open('big', 'wb').write(bytes(32 << 20))")[1]
    assert len(limited("print('x' * 10**6)")[1]) < 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("needs", "script", "expected"),
    [
        ("gcc", "echo 'int puts(char*); int main(){puts(\"hi\");}' > a.c; gcc -w a.c && ./a.out", "hi\n"),
        (
            "javac",
            "echo 'class A {public static void main(String[] a) {System.out.println(1);}}' > A.java && javac A.java "
            "&& java A",
            "1\n",
        ),
        ("node", 'node -e \'console.log(require("child_process").execSync("echo hi").toString())\'', "hi\n\n"),
        (
            "git",
            "git init -q . && git -c user.name=a -c user.email=b commit -qm x --allow-empty && git log --format=%s",
            "x\n",
        ),
        ("perl", "perl -e 'print 1 + 1'", "2"),
    ],
)
def test_languages(needs, script, expected, inside):
    found = shutil.which(needs, path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip(f"{needs} is not installed")
    assert ran(["sh", "-c", script], Box(inside.folder, seconds=60.0, megabytes=8192)) == (0, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "limit"), [(["sh", "-c", "true"], 20), ([os.path.realpath(sys.executable), "-I", "-c", "pass"], 4)]
)
def test_a_start_takes_little(command, limit, inside):
    """On a quiet machine about 5 and 1.2 times a bare start. Others at work make a start slow, but not each one."""

    def seconds(call):
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    run(command, inside)
    bare = boxed = float("inf")
    for _ in range(500):
        bare = min(bare, seconds(lambda: subprocess.run(command)))
        boxed = min(boxed, seconds(lambda: run(command, inside)))
        if boxed < limit * bare:
            return
    pytest.fail(f"{boxed:.4f} s in a box, {bare:.4f} s without")


def test_a_command_has_no_other_open_files_than_the_standard_ones() -> None:
    is_open = "os.path.lexists(f'/proc/self/fd/{fd}')"
    script = f"import os; found = os.listdir('/proc/self/fd'); print(sorted(fd for fd in found if {is_open}))"
    with tempfile.TemporaryDirectory() as folder:
        assert run([sys.executable, "-I", "-c", script], Box(folder)).output == "['0', '1', '2']\n"
