"""Episodes on servers of OpenEnv: one of our own that also behaves badly, and those of the real package."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem
from areno.environments import openenv
from areno.environments.openenv import OpenEnv
from areno.environments.packages import check_packages
from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.recipes.gspo import GSPOConfig
from areno.server.sample_sessions import SampleSession
from areno.server.threads import ServerThread
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play
from tests.helpers.scripted_engine import scripted_server

needs_openenv = pytest.mark.skipif(find_spec("openenv") is None, reason="needs the openenv extra")

TEXT = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "string"}}, "required": ["guess"]}
MOVE = {
    "description": "A move",
    "properties": {"metadata": {"type": "object"}, "x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x"],
}
MCP = {"properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
ADD = {"name": "add", "description": "Add.", "inputSchema": {"type": "object", "properties": {"a": {}, "b": {}}}}
Step = Callable[[dict[str, Any], dict[str, Any]], Any]
"""(arguments of reset, action) -> answer as JSON, text that is sent as it is, or None to drop the connection."""


def observation(reward: float | None = None, done: bool = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


def idle(given: Any, action: Any) -> Any:
    return observation(hint="go on")


def failure(code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": "no luck", **more}}


def replying(found: Any) -> Callable[[web.Request], Any]:
    async def reply(request: web.Request) -> web.Response:
        return web.json_response(found)

    return reply


class Fake:
    """A server that records what it is asked. `most` limits its sessions."""

    def __init__(self, step: Step, action: Any = TEXT, most: int = 1000, n_tasks: int | None = None):
        self.step, self.action, self.most, self.n_tasks = step, action, most, n_tasks
        self.n_open = self.most_open = 0
        self.asked: list[dict[str, Any]] = []
        self._thread = ServerThread(self._make)
        self.url = self._thread.start()
        self.stop = self._thread.stop

    def _make(self) -> web.Application:
        action, n_tasks, app = self.action, self.n_tasks, web.Application()
        app.router.add_get("/schema", replying({"action": action}))
        app.router.add_get("/metadata", replying({"description": "A game"}))
        app.router.add_get("/ws", self._session)
        if n_tasks is not None:
            app.router.add_get("/list_environments", replying(["game"]))
            app.router.add_get("/game/splits", replying([{"name": "train"}, {"name": "dev"}]))
            app.router.add_post("/game/num_tasks", replying({"num_tasks": n_tasks}))
        return app

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.n_open == self.most:
            await socket.send_json(failure("CAPACITY_REACHED", max_sessions=self.most))
            await socket.close()
            return socket
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        given: dict[str, Any] = {}
        try:
            async for message in socket:
                asked = json.loads(message.data)
                self.asked.append(asked)
                kind, data = asked["type"], asked.get("data")
                answer: Any = {"type": "state", "data": {}}
                if kind == "reset":
                    given, answer = data, observation(hint="Begin.")
                elif kind == "mcp":
                    answer = {"type": "mcp", "data": {"result": {"tools": [ADD]}}}
                elif kind == "step":
                    answer = self.step(given, data)
                    answer = await answer if asyncio.iscoroutine(answer) else answer
                if kind == "close" or answer is None:
                    break
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            self.n_open -= 1
            await socket.close()
        return socket

    def actions(self) -> list[Any]:
        return [each["data"] for each in self.asked if each["type"] == "step"]


@contextmanager
def fake(step: Step, **more: Any) -> Iterator[Fake]:
    server = Fake(step, **more)
    try:
        yield server
    finally:
        server.stop()


def environment(server: Fake) -> OpenEnv:
    return OpenEnv(server.url, "train_dataset.path")


def episode(server: Fake, *answers: str, **row: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Play one episode. Returns (what the agent returns, the recorded turns)."""
    said = iter(answers)
    item = AgentItem("Play.", row, [1])
    with scripted_server(lambda prompt: next(said)) as (policy, _):
        session = SampleSession(max_requests=20, returns_tokens=False)
        ctx = AgentContext(f"{policy.open_sample(session)}/v1", session.id, "s", 60.0)
        returned = asyncio.run(environment(server).agent()(ctx, AgentBatch.of_items([item])))  # type: ignore[arg-type]
    return returned, session.turns


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_answer_is_the_only_text_of_an_action() -> None:
    with fake(lambda given, action: observation(0.5, done=action["guess"] == "two", hint="no")) as server:
        returned, turns = episode(server, "one", "two", "three", reset={"seed": 7})
    assert returned == [0.5, 0.5]
    assert server.actions() == [{"guess": "one"}, {"guess": "two"}]
    assert server.asked[0] == {"type": "reset", "data": {"seed": 7}}
    assert [message["content"] for message in turns[1]["messages"]] == ["Play.\n\nBegin.", "one", "no"]
    assert not turns[0]["tools"]


def test_other_actions_are_a_tool() -> None:
    with fake(lambda given, action: observation(1.0, True, board=[[0]], turn="x"), action=MOVE) as server:
        returned, turns = episode(server, call("move"), call("act", x=1), "so it is")
    [tool] = turns[0]["tools"]
    assert tool["function"]["name"] == "act"
    assert tool["function"]["description"] == "A move"
    assert tool["function"]["parameters"]["properties"].keys() == {"x", "y"}
    assert server.actions() == [{"x": 1}]
    assert turns[1]["messages"][-1]["content"].startswith("error: there is no such tool")
    assert returned == [0.0, 1.0]


def test_tools_of_mcp() -> None:
    def step(given: Any, action: Any) -> Any:
        result = {"content": [{"type": "text", "text": "3"}], "data": 3}
        is_known = action["tool_name"] == "add" and action["arguments"]["a"] == 1
        error = None if is_known else {"error_type": "execution_error", "message": "not that"}
        return observation(0.25, tool_name="add", result=result if is_known else None, error=error)

    with fake(step, action=MCP) as server:
        returned, turns = episode(server, call("add", a=1, b=2), call("add", a=2), "It is 3.")
    assert [tool["function"]["name"] for tool in turns[0]["tools"]] == ["add"]
    assert server.actions()[0] == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 2}}
    results = [message["content"] for message in turns[2]["messages"] if message["role"] == "tool"]
    assert results == ["3", "error: not that"]
    assert returned == [0.25, 0.25, 0.0]


def test_the_model_is_told_of_an_action_that_is_refused() -> None:
    errors = [{"loc": ["x"], "msg": "Input should be a valid integer"}]

    def step(given: Any, action: Any) -> Any:
        return observation(1.0, True) if action["x"] == 1 else failure("VALIDATION_ERROR", errors=errors)

    with fake(step, action=MOVE) as server:
        returned, turns = episode(server, call("act", x="a"), call("act", x=1))
    assert turns[1]["messages"][-1]["content"] == "error: x: Input should be a valid integer"
    assert returned == [0.0, 1.0]


def test_the_first_observation_follows_the_messages_of_a_row() -> None:
    begin = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]
    shown = {"role": "user", "content": "Play.\n\nBegin."}
    row = AgentItem("Play.", {}, [1], messages=begin)
    assert openenv._first_messages(row, "Begin.") == [begin[0], shown]
    assert openenv._first_messages(row, "") == begin
    row.messages = begin[:1]
    assert openenv._first_messages(row, "Begin.") == [begin[0], {"role": "user", "content": "Begin."}]


def test_an_episode_ends_after_its_turns() -> None:
    with fake(idle) as server:
        returned, turns = episode(server, *"abcd", max_turns=3)
    assert returned == [0.0] * 3
    assert len(turns) == 3


def test_an_environment_without_rewards_gives_none() -> None:
    """It is not a reward of 0."""
    with fake(lambda given, action: observation(done=True)) as server:
        assert episode(server, "a")[0] is None
    with fake(lambda given, action: observation(tool_name="add"), action=MCP) as server:
        assert episode(server, "It is 3.")[0] is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"the server of OpenEnv has closed the session \(code \d+\)"),
        ('{"data": {"observation": {"hint": "' + "a" * (10 << 20) + '"}}}', "an observation has more than 4 MiB"),
        (failure("EXECUTION_ERROR"), r"the environment failed: no luck \(EXECUTION_ERROR\)"),
    ],
)
def test_failures_of_a_server(answer: Any, message: str) -> None:
    with fake(lambda given, action: answer) as server:
        with pytest.raises(DataError, match=message):
            episode(server, "a")
        assert environment(server).rows("train", {"size": 1}), "it answers others"


def test_rows_are_tasks_or_seeds() -> None:
    with fake(idle, n_tasks=3) as server:
        rows = environment(server).rows("dev", {"reset": {"level": 2}, "max_turns": 4})
        assert rows[2] == {"prompt": "A game", "max_turns": 4, "reset": {"level": 2, "split": "dev", "index": 2}}
        assert len(rows) == 3
        assert len(environment(server).rows("dev", {"size": 2})) == 2
        with pytest.raises(ConfigError, match=r"train_dataset\.split: is 'test'; openenv:http.* has train and dev"):
            environment(server).rows("test", {})
    with fake(idle) as server:
        train, test = (environment(server).rows(split, {"prompt": "Go."}) for split in ("train", "test"))
    assert (len(train), len(test)) == (1000, 100)
    assert train[1] == {"prompt": "Go.", "max_turns": 16, "reset": {"seed": 1}}
    assert not {str(row) for row in train} & {str(row) for row in test}


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"size": 0, "max_turns": True}, ["size: is 0; a whole number", "max_turns: is True; a whole number"]),
        ({"prompt": 3, "reset": "a"}, ["prompt: is 3; a text is expected", "reset: is 'a'; a mapping is expected"]),
        ({"sise": 3}, ["sise: is no option of openenv:http"]),
    ],
)
def test_wrong_options_are_told_together(options: dict[str, Any], messages: list[str]) -> None:
    with fake(idle) as server, pytest.raises(ConfigError) as raised:
        environment(server).rows("train", options)
    for problem, message in zip(raised.value.problems, messages, strict=True):
        assert str(problem).startswith(f"train_dataset.dataset_kwargs.{message}")


def test_room_for_one_session_is_too_little() -> None:
    message = r"room for 1 sessions.*set max_concurrent_envs .* SUPPORTS_CONCURRENT"
    with fake(idle, most=1) as server, pytest.raises(ConfigError, match=message):
        check_packages([("train_dataset.path", f"openenv:{server.url}")])
    with fake(idle, most=2) as server:
        check_packages([("train_dataset.path", f"openenv:{server.url}")])
        check_packages([("train_dataset.path", f"openenv:{server.url}")])  # the places are free again
    assert server.most_open == 2


def test_what_is_no_server() -> None:
    with pytest.raises(ConfigError, match=r"openenv:http://127.0.0.1:1 does not answer as a server of OpenEnv does: "):
        OpenEnv("http://127.0.0.1:1", "train_dataset.path").check()
    with pytest.raises(ConfigError, match=r"openenv:game is neither the address of a server .* nor openenv:MODULE:APP"):
        OpenEnv("game", "train_dataset.path").check()


def test_an_episode_is_one_sample() -> None:
    given = ["actor.path=folder", "train_dataset.path=openenv:http://127.0.0.1:1", "agent.whole_group=true"]
    with pytest.raises(ConfigError, match=r"agent\.whole_group: is true, but openenv:http.* runs one sample at a time"):
        load(GSPOConfig, "environment", given)


def test_verifiers_is_excluded_by_an_app_alone() -> None:
    others = ("agent.fn", "verifiers:sums")
    with pytest.raises(ConfigError, match=r"^train_dataset\.path: openenv:game:app excludes verifiers:sums"):
        check_packages([("train_dataset.path", "openenv:game:app"), others])
    assert not OpenEnv("http://127.0.0.1:1", "train_dataset.path").excludes


# Training ------------------------------------------------------------------------------------------------------------


def train(folder: Path, name: str, *overrides: str) -> Played:
    settings = [
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        f"train_dataset.path={name}",
        "train_dataset.loader=null",
        "reward.fn=null",
        "agent.workers=1",
        "train_dataset.max_length=400",
        "gconfig.max_tokens=900",
        "gconfig.temperature=1",
        "saver.freq_steps=null",
    ]
    return play("gspo", folder / "run", *settings, *overrides)


@pytest.mark.slow
def test_bad_environments_lose_their_samples_alone(tmp_path: Path) -> None:
    async def hang() -> None:
        await asyncio.sleep(1000)

    answers: list[Callable[[], Any]] = [
        lambda: observation(1.0, True),
        hang,
        lambda: None,
        lambda: '{"type": "observation", "data": {"reward": NaN, "done": true}}',
        lambda: json.dumps(observation(1.0, True, hint="a" * (10 << 20))),
    ]
    with fake(lambda given, action: answers[given["seed"]]()) as server:
        options = ["train_dataset.dataset_kwargs={size:5}", "train_dataset.batch_size=5", "gconfig.n_samples=2"]
        played = train(tmp_path, f"openenv:{server.url}", "agent.timeout_s=8", "total_train_steps=2", *options)
    assert played.series("rollout/agent_errors") == [6.0, 6.0]
    assert played.series("rollout/agent_timeouts") == [2.0, 2.0]
    assert played.series("rollout/rewards_mean") == [1.0, 1.0]


APP = Path(__file__).parent / "guess_app.py"


@needs_openenv
@pytest.mark.slow
def test_an_app_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(APP.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(APP.parent), os.environ.get("PYTHONPATH", "")]))
    played = train(tmp_path, "openenv:guess_app:app", "train_dataset.dataset_kwargs={size:8}")
    assert played.series("rollout/agent_turns_mean") == [3.0, 3.0]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    for sample in played.samples(1):
        turns = sample["trajectory"]["turns"]
        answers = [turn["message"].get("content") or "" for turn in turns]
        assert sample["reward"] == pytest.approx(sum(len(answer) / 100 for answer in answers))
        assert turns[0]["messages"][-1]["content"].endswith("Guess a digit.")


@needs_openenv
@pytest.mark.slow
def test_a_server_with_256_sessions_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import guess_app; guess_app.serve()"]
    server = subprocess.Popen(command, cwd=APP.parent, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        options = ["train_dataset.batch_size=32", "gconfig.n_samples=8", "agent.workers=2", "gconfig.max_new_tokens=4"]
        played = train(tmp_path, f"openenv:{url}", *options)
    finally:
        server.terminate()
        server.communicate()
    assert played.series("rollout/num_sequences") == [256.0, 256.0]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert min(played.series("train/grad_norm")) > 0
