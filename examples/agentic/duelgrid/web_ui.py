"""A page in the browser that replays recorded duels, and on which you or a model play against the scripted user.

    python examples/agentic/duelgrid/web_ui.py
    python examples/agentic/duelgrid/web_ui.py --games outputs/duelgrid/*/rollouts/*.jsonl
    python examples/agentic/duelgrid/web_ui.py --base-url http://127.0.0.1:8000/v1 --model policy --api-key SECRET

It listens on this machine only.
"""

import argparse
import contextlib
import json
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from duelgrid import COSTS, DIRECTIONS, SIZE, arenas
from duelgrid_task import DuelGrid

PAGE = Path(__file__).with_name("web_ui.html")
MOST_BODY = 100_000


def frame(content, said=""):
    """What to show of a message to the model: what happened, the grid, who has what. said: the answer before it."""
    lines = content.splitlines()
    return {"said": said, "log": lines[: -SIZE - 1], "grid": lines[-SIZE - 1 : -1], "status": lines[-1]}


def recorded(files):
    """The duels in the lines of rollouts/<step>.jsonl: {title, frames, end}."""
    games = []
    for file in files:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            turns = (sample.get("trajectory") or {}).get("turns")
            if not turns:
                continue
            messages = [each for each in turns[-1]["messages"] if each["role"] != "system"]
            answers = ["", *(each.get("content") or "" for each in messages if each["role"] == "assistant")]
            asked = [each["content"] for each in messages if each["role"] == "user"]
            reward = "none" if sample.get("reward") is None else f"{sample['reward']:.2f}"
            games.append(
                {
                    "title": f"step {sample['step']}, game {len(games) + 1}, reward {reward}",
                    "frames": [frame(content, said) for content, said in zip(asked, answers, strict=True)],
                    "end": f"Last answer: {turns[-1]['message'].get('content') or ''}",
                }
            )
    return games


class Duel:
    """One game that is being played. A is you or the model."""

    def __init__(self, seed):
        [row] = arenas(1, seed)
        self.environment = DuelGrid(SimpleNamespace(record=row))
        self.messages = list(self.environment.reset())

    def state(self):
        said = self.messages[-2]["content"] if len(self.messages) > 2 else ""
        return {**frame(self.messages[-1]["content"], said), "winner": self.environment.game.winner}

    def answer(self, text):
        if self.environment.game.winner is None:
            messages, _, _ = self.environment.answer(text)
            self.messages += [{"role": "assistant", "content": text}, *messages]
        return self.state()

    def ask(self, endpoint):
        from openai import OpenAI

        client = OpenAI(base_url=endpoint["base_url"], api_key=endpoint["api_key"], max_retries=0, timeout=120)
        with client:
            answer = client.chat.completions.create(model=endpoint["model"], messages=self.messages, max_tokens=256)
        return self.answer(answer.choices[0].message.content or "")


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /games what is recorded; POST /new {seed}, /play {actions} and /ask {} play one game."""

    def do_GET(self):
        if self.path == "/":
            self._send(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.path == "/games":
            can_ask = self.server.endpoint is not None
            self._send(200, {"games": self.server.games, "can_ask": can_ask, "costs": COSTS, "ways": [*DIRECTIONS]})
        else:
            self._send(404, {"error": "there is no such page"})

    def do_POST(self):
        try:
            # Pages of other sites cannot send JSON here without asking first, which is never allowed.
            if self.headers.get_content_type() != "application/json":
                raise ValueError("the body has to be JSON")
            size = int(self.headers.get("Content-Length") or 0)
            if size > MOST_BODY:
                raise ValueError("the body is too long")
            body = json.loads(self.rfile.read(size) or b"{}")
            self._send(200, self._play(body))
        except Exception as error:  # also one of the endpoint
            self._send(400, {"error": f"{type(error).__name__}: {error}"})

    def _play(self, body):
        server = self.server
        if self.path == "/new":
            server.duel = Duel(int(body.get("seed", random.randrange(10**6))))
            return server.duel.state()
        if server.duel is None:
            raise ValueError("start a game first")
        if self.path == "/play":
            return server.duel.answer(json.dumps(body["actions"]))
        if self.path == "/ask" and server.endpoint is not None:
            return server.duel.ask(server.endpoint)
        raise ValueError("there is no such command, or no model: start with --base-url")

    def _send(self, status, body, kind="application/json"):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def make_server(port=0, games=(), endpoint=None):
    """The server, which `serve_forever()` starts. endpoint: base_url, model and api_key of who may play A."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.games, server.endpoint, server.duel = recorded(games), endpoint, None
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="*", default=[], help="files rollouts/<step>.jsonl of runs")
    parser.add_argument("--port", type=int, default=8080, help="where to listen (8080)")
    parser.add_argument("--base-url", help="an OpenAI-compatible endpoint that may play")
    parser.add_argument("--model", default="policy", help="its model (policy)")
    parser.add_argument("--api-key", default="none", help="its key")
    given = parser.parse_args()
    endpoint = {"base_url": given.base_url, "model": given.model, "api_key": given.api_key} if given.base_url else None
    server = make_server(given.port, given.games, endpoint)
    print(f"open http://127.0.0.1:{server.server_port} in a browser; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
