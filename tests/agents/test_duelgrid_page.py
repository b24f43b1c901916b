"""The browser page of DuelGrid: replays recorded duels, and plays. In a real browser, without a network."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples/agentic/duelgrid"
ATTACKS = '[{"action": "MOVE", "direction": "up"}]'


class Model(BaseHTTPRequestHandler):
    """An endpoint that always says the same."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": ATTACKS}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("web_ui")


def started(server: Any) -> str:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def address(play: Any, tmp_path: Path) -> Iterator[str]:
    """The page with one recorded duel and a model."""
    duel = play.Duel(7)
    for _ in range(3):
        game = duel.environment.game
        duel.answer(json.dumps(import_module("duelgrid_opponent").scripted_turn(game, 1)))
    turn = {"messages": duel.messages, "message": {"role": "assistant", "content": "[]"}}
    sample = {"step": 4, "reward": 0.5, "trajectory": {"turns": [turn]}}
    (tmp_path / "000004.jsonl").write_text(json.dumps(sample) + "\n")
    model = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    endpoint = {"base_url": f"{started(model)}/v1", "model": "m", "api_key": "x"}
    server = play.make_server(0, [tmp_path / "000004.jsonl"], endpoint)
    yield started(server)
    for one in (server, model):
        one.shutdown()
        one.server_close()


def test_frames_of_a_recorded_duel(play: Any) -> None:
    task = import_module("duelgrid_task")
    [row] = import_module("duelgrid").arenas(1, 3)
    environment = task.DuelGrid(SimpleNamespace(record=row))
    first = play.frame(environment.reset()[-1]["content"])
    assert (len(first["grid"]), {len(line) for line in first["grid"]}, first["log"]) == (7, {7}, [])
    assert first["status"].startswith("A: health")
    messages, _, _ = environment.answer("nonsense")
    assert play.frame(messages[0]["content"])["log"][0] == "Your turn ended: the answer is no JSON list of actions."


@pytest.mark.slow
def test_the_page_in_a_browser(address: str, tmp_path: Path) -> None:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium to open the page in")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as here:
        browser = here.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page, said = browser.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if address not in request.url else None)
        page.goto(address)
        page.wait_for_selector("#grid div.A")
        assert page.locator("#grid div").count() == 49
        page.click("text=SHIELD (2)")
        assert page.locator("#plan li").all_text_contents() == ["SHIELD"]
        page.click("#end")
        page.wait_for_function("document.getElementById('said').textContent.includes('SHIELD')")
        assert "A: SHIELD" in page.text_content("#log")
        page.click("#ask")
        page.wait_for_function("document.getElementById('said').textContent.includes('up')")
        page.select_option("#games", label="step 4, game 1, reward 0.50")
        assert page.text_content("#where") == "1 of 4"
        for _ in range(3):
            page.click("#next")
        assert page.text_content("#where") == "4 of 4"
        assert "Last answer: []" in page.text_content("#log")
        assert [text for text in said if not text.startswith("data:")] == []
        browser.close()
