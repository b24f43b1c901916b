"""Checkpoints that are uploaded to a model repository: a server on this machine stands in for the hub."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areno.config.run import SaverConfig
from areno.errors import ConfigError
from areno.run.checkpoints import HubUpload, Saver

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


class Hub(ThreadingHTTPServer):
    """The few calls of the hub that an upload makes. Large files travel by LFS, small ones in the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: list[tuple[str, str]] = []  # made, and who may see them
        self.files: dict[str, bytes] = {"model-00001-of-00009.safetensors": b"of another run", "notes.txt": b"mine"}
        self.commits: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.refused = ""  # what it says where it answers nothing else
        self.opened = threading.Event()  # commits wait for it
        self.opened.set()
        self.reached = threading.Event()  # a commit has begun
        self.tokens: set[str] = set()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub.tokens.add(self.headers["Authorization"] or "none")
        if hub.refused:
            self._say({"error": hub.refused}, 403)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            hub.repositories.append((name, asked.get("visibility") or ("public", "private")[asked["private"]]))
            self._say({"url": f"{hub.url}/{name}"})
        elif path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {True: "lfs", False: "regular"}
            files = [{"path": name, "uploadMode": modes["tensors" in name], "shouldIgnore": False} for name in names]
            self._say({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}} for item in objects]
            self._say({"transfer": "basic", "objects": uploads})
        elif path.endswith("/commit/main"):
            hub.reached.set()
            assert hub.opened.wait(30)
            self._commit([json.loads(line) for line in body.splitlines()])
            self._say({"success": True, "commitUrl": f"{hub.url}/me/model/commit/1", "commitOid": "1"})
        else:
            self._say({}, 404)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self._say({})

    def do_GET(self) -> None:
        if "/tree/main" in self.path:
            files = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files]
            self._say(files)
        else:
            self._say({"id": "me/model", "sha": "0"})

    def _say(self, answer: Any, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # HF_ENDPOINT is read once, at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # plain uploads over HTTP
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.opened.set()
    server.shutdown()
    server.server_close()


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(folder.name.encode() * 10)
    (folder / "critic").mkdir()
    (folder / "critic/model.safetensors").write_bytes(b"critic")


def saver(folder: Path, **settings: Any) -> Saver:
    return Saver(SaverConfig(push_to_hub="me/model", **settings), folder)


def test_a_checkpoint_is_a_commit(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    made = saver(tmp_path)
    with caplog.at_level(logging.INFO, "areno"):
        made.save(write_model, 7)
        made.wait_for_all()
    assert hub.repositories == [("me/model", "private")]
    assert hub.commits == ["areno: step-000007"]
    assert hub.files == {
        "config.json": b"{}",
        "model.safetensors": b".tmp-step-000007" * 10,
        "critic/model.safetensors": b"critic",
        "notes.txt": b"mine",
    }
    assert "checkpoint pushed: step-000007 to me/model" in caplog.text
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text


def test_a_public_repository_on_request(tmp_path: Path, hub: Hub) -> None:
    made = saver(tmp_path, hub_private=False)
    made.save(write_model, 1)
    made.wait_for_all()
    assert hub.repositories == [("me/model", "public")]


def test_a_run_goes_on_while_its_checkpoint_is_uploaded(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """What is being uploaded is not removed; of those that wait, the newest is uploaded."""
    made = saver(tmp_path, keep=1)
    hub.opened.clear()
    made.save(write_model, 1)
    assert hub.reached.wait(30)
    with caplog.at_level(logging.WARNING, "areno"):
        for step in (2, 3, 4):
            made.save(write_model, step)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000004"]
    assert "step-000002 is not pushed to the hub: a newer checkpoint has overtaken it" in caplog.text
    hub.opened.set()
    made.wait_for_all()
    assert hub.commits == ["areno: step-000001", "areno: step-000004"]
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000004"]


def test_a_refused_upload_is_told_without_the_token(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.refused = f"the token {TOKEN} may not write"
    made = saver(tmp_path)
    with caplog.at_level(logging.DEBUG):
        made.save(write_model, 1)
        made.wait_for_all()
    assert "step-000001 could not be pushed to me/model; the run continues (" in caplog.text
    assert "the token *** may not write" in caplog.text
    assert TOKEN not in caplog.text
    hub.refused = ""
    made.save(write_model, 2)
    made.wait_for_all()
    assert hub.commits == ["areno: step-000002"]


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("me/model", None, "is 'me/model', but the environment has no HF_TOKEN; set it to a token that may write"),
        ("a/b/c", TOKEN, "is 'a/b/c', which is no name of a repository; expected owner/name"),
    ],
)
def test_what_cannot_work_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch, repo, token, message) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=f"^saver.push_to_hub: {message}"):
        HubUpload(repo, private=True)


def test_the_endpoint_is_that_of_the_environment(tmp_path: Path, hub: Hub) -> None:
    script = f"""
from areno.run.checkpoints import Saver
from areno.config.run import SaverConfig
saver = Saver(SaverConfig(push_to_hub="me/model"), {str(tmp_path)!r})
saver.save(lambda folder: (folder / "config.json").write_text("of a process"), 1)
saver.wait_for_all()
"""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert hub.files["config.json"] == b"of a process", done.stderr
    assert "could not" not in done.stderr
