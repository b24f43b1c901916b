"""The network of a box: connections to its port reach the Unix socket outside, whole and many at the same time."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import pytest

from areno.sandbox import box
from areno.sandbox.box import PORT, Box, Result, run, start
from tests.helpers.waiting import until

PROBLEM = box.network_problem()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


class Http(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self):
        return "box"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if self.path in ("/stream", "/waits"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(5):
                self.wfile.write(b"6\r\nevent%d\r\n" % number)
                self.wfile.flush()
                if self.path == "/waits":
                    self.server.read.acquire()
            self.wfile.write(b"0\r\n\r\n")
        elif self.path == "/read":
            self.server.read.release()
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            time.sleep(0.2)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


class Server(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 3  # more connections at the same time than it takes at once


@pytest.fixture
def serve(tmp_path):
    """Serve at a Unix socket, with a path that is too long to connect to directly."""
    servers = []

    def begin(handler):
        folder = tmp_path / ("long" * 30)
        folder.mkdir()
        os.chdir(folder)
        servers.append(server := Server("socket", handler))
        server.read = threading.Semaphore(0)  # what waits sends its next part when a client says that it read one
        threading.Thread(target=server.serve_forever, daemon=True).start()
        inside = tmp_path / "inside"
        inside.mkdir()
        return Box(inside, seconds=60.0, socket=folder / "socket", file_megabytes=1024)

    here = os.getcwd()
    yield begin
    os.chdir(here)
    for server in servers:
        server.shutdown()
        server.server_close()


def python(code, inside, **options):
    result = run([sys.executable, "-I", "-c", code], inside, **options)
    assert not result.why
    return result.status, result.output


REQUESTS = f"""
import urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(number):
    body = str(number).encode() * 10000
    with urllib.request.urlopen("http://127.0.0.1:{PORT}/", body) as answer: return answer.read() == body
with ThreadPoolExecutor(50) as beside: print(all(beside.map(ask, range(50))))
"""
STREAM = f"""
import urllib.request
with urllib.request.urlopen("http://localhost:{PORT}/waits", b"") as answer:
    while part := answer.read(6):
        print(part.decode())
        urllib.request.urlopen("http://localhost:{PORT}/read", b"").close()
"""
EVENTS = "".join(f"event{number}\n" for number in range(5))


def test_requests_at_the_same_time(serve):
    assert python(REQUESTS, serve(Http)) == (0, "True\n")


def test_parts_of_an_answer_come_when_they_are_sent(serve):
    assert python(STREAM, serve(Http)) == (0, EVENTS)


@pytest.mark.skipif(shutil.which("node", path="/usr/local/bin:/usr/bin") is None, reason="node is not installed")
def test_node(serve):
    code = f"""
const url = "http://127.0.0.1:{PORT}";
const body = "x".repeat(100000);
const ask = async () => (await (await fetch(url, {{method: "POST", body}})).text()) == body;
const asked = Array.from({{length: 50}}, ask);
console.log((await Promise.all(asked)).every(each => each));
const answer = await fetch(url + "/stream", {{method: "POST", body: ""}});
const text = new TextDecoder();
let parts = "";
for await (const part of answer.body) parts += text.decode(part);
console.log(parts);
const {{execSync}} = await import("child_process");
console.log(execSync("echo $HOME; sleep 0.1 & wait", {{encoding: "utf8"}}).trim() == process.cwd());
console.log(Object.keys((await import("os")).networkInterfaces()));
"""
    result = run(["node", "--input-type=module", "-e", code], serve(Http))
    assert result == Result(0, f"true\n{EVENTS.replace(chr(10), '')}\ntrue\n[ 'lo' ]\n", "")


def test_a_side_may_end_its_stream_before_the_other(serve):
    class Sum(StreamRequestHandler):
        def handle(self):
            self.wfile.write(sha256(self.rfile.read()).hexdigest().encode())

    inside = serve(Sum)
    size = 100 << 20
    code = f"""
import socket
with socket.create_connection(("127.0.0.1", {PORT})) as other:
    for number in range({size >> 20}): other.sendall(bytes([number]) * (1 << 20))
    other.shutdown(socket.SHUT_WR)
    print(other.makefile().read())
"""
    expected = sha256(b"".join(bytes([number]) * (1 << 20) for number in range(size >> 20))).hexdigest()
    assert python(code, inside) == (0, f"{expected}\n")


def test_a_side_that_does_not_read_holds_the_other_back(serve):
    sent = 0

    class Endless(StreamRequestHandler):
        def handle(self):
            nonlocal sent
            while True:
                sent += self.request.send(bytes(1 << 16))

    code = f"import socket, time; other = socket.create_connection(('127.0.0.1', {PORT})); time.sleep(1)"
    assert python(code, serve(Endless)) == (0, "")
    assert 0 < sent < 64 << 20


def test_nobody_listens(serve, tmp_path):
    inside = serve(Http)
    code = f"""
import socket, time
begin = time.monotonic()
try: print(socket.create_connection(("127.0.0.1", {PORT})).recv(1))
except ConnectionError: print(b"")
print(time.monotonic() - begin < 30)
"""
    nobody = replace(inside, socket=tmp_path / "nothing")
    assert python(code, nobody) == (0, "b''\nTrue\n")
    with pytest.raises(OSError, match="missing"):
        run(["true"], replace(inside, socket=tmp_path / "missing" / "socket"))


def test_a_machine_without_namespaces_says_why_there_is_no_network(serve, monkeypatch):
    inside = serve(Http)
    monkeypatch.setattr(box, "_WITHOUT", "they are closed")
    assert box.network_problem() == "they are closed"
    starter = box._CommandServer()
    monkeypatch.setattr(box, "_starter", starter)
    with pytest.raises(OSError, match="a box with a network is not possible here: they are closed"):
        run(["true"], inside)
    assert run(["true"], replace(inside, socket=None)) == Result(0, "", "")
    starter.close()


def test_a_command_is_cancelled(serve):
    inside = serve(Http)
    running = start(["sh", "-c", "echo begun; echo x > begun; sleep 1000"], inside)
    until((inside.folder / "begun").exists)
    threading.Timer(0.1, running.cancel).start()
    begin = time.monotonic()
    assert running.wait() == Result(None, "begun\n", "cancelled")
    assert time.monotonic() - begin < 500
    running.cancel()  # nothing is left to end


@pytest.mark.slow
def test_many_commands_at_the_same_time(serve):
    inside = serve(Http)
    with ThreadPoolExecutor(64) as beside:
        results = list(beside.map(lambda _: python(STREAM, inside), range(64)))
    assert [output for _, output in results] == [EVENTS] * 64
