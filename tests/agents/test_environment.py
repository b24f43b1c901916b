"""Environments: areno's loop between a task with tools and a model, and the tools of MCP servers."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areno.agents.environment import Call, Environment, agent_of, replay, reward_of, run_episode
from areno.errors import ConfigError, DataError
from areno.types import RewardRecord
from tests.helpers.scripted_client import ScriptedClient

ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"n": {"type": "integer"}}}}}


class Counter(Environment):
    """Make 10 of the number by adding."""

    tools = (ADD,)

    def __init__(self, item: Any = None):
        self.total, self.closed = item.record["start"] if item else 0, 0

    def reset(self) -> Any:
        return [{"role": "user", "content": f"Make 10 of {self.total}."}]

    def step(self, tool_calls: list[Call]) -> Any:
        self.total += sum(call.arguments["n"] for call in tool_calls)
        return [call.result(str(self.total)) for call in tool_calls], float(self.total == 10), self.total >= 10

    def close(self) -> None:
        self.closed += 1


class AsyncCounter(Counter):
    async def reset(self) -> Any:
        return super().reset()

    async def step(self, tool_calls: list[Call]) -> Any:
        await asyncio.sleep(0)
        return super().step(tool_calls)

    async def close(self) -> None:
        super().close()


def episode_of(environment: Environment, said: Any, finish_reason: str | None = None, **how: Any) -> Any:
    client = ScriptedClient(said, finish_reason)
    return asyncio.run(run_episode(environment, client, **how)), client


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
def test_the_loop(kind: type[Counter]) -> None:
    environment = kind()
    episode, client = episode_of(
        environment, [[("add", {"n": 3}), ("add", {"n": 4})], [("add", {"n": 3})]], temperature=0.5
    )
    assert (episode.reward, episode.rewards, episode.ended, environment.closed) == (1.0, [0.0, 1.0], "done", 1)
    assert [message["role"] for message in episode.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]
    assert [each["tool_call_id"] for each in episode.messages if each["role"] == "tool"] == [
        "call_0_0",
        "call_0_1",
        "call_1_0",
    ]
    assert client.requests[1]["messages"] == episode.messages[:4] == episode.turns[1].messages
    assert client.requests[0]["temperature"] == 0.5
    assert client.requests[0]["tools"] == [ADD] == episode.turns[0].tools
    assert asyncio.run(replay(kind(), episode.messages)) == 1.0


def test_why_episodes_end() -> None:
    assert episode_of(Counter(), ["I give up"])[0].ended == "done"
    cut_off = episode_of(Counter(), ["cut off"], "length")[0]
    assert (cut_off.ended, cut_off.rewards) == ("length", [0.0])
    episode, client = episode_of(Counter(), [[("add", {"n": 0})]] * 3, max_turns=3)
    assert (episode.ended, len(client.requests), len(episode.turns)) == ("max_turns", 3, 3)


def test_calls_that_are_none_are_told_to_the_model() -> None:
    said = [[("add", "{n"), ("sub", {}), ("add", "[1]"), ("add", {"n": 1})], [("sub", {})], [("add", {"n": 9})]]
    environment = Counter()
    episode, _ = episode_of(environment, said)
    assert (environment.total, episode.reward) == (10, 1.0)
    assert episode.rewards == [0.0, 0.0, 1.0], "one for each turn"
    results = [message["content"] for message in episode.messages if message["role"] == "tool"]
    object_error, tool_error = (
        "error: the arguments are not a JSON object",
        "error: there is no tool 'sub'; the tools are add",
    )
    assert results == [object_error, tool_error, object_error, "1", tool_error, "10"]


def test_an_answer_in_text_can_go_on() -> None:
    class Asks(Counter):
        def answer(self, text: str) -> Any:
            return [{"role": "user", "content": "Use the tool."}], -0.25, False

    episode, client = episode_of(Asks(), ["10", [("add", {"n": 10})]])
    assert episode.rewards == [-0.25, 1.0]
    assert client.requests[1]["messages"][-1] == {"role": "user", "content": "Use the tool."}


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", "hello", "messages of an environment's reset are 'hello'; expected a list of messages"),
        ("step", ([], 0.0), r"returned \(\[\], 0.0\); expected \(messages, reward, whether it is done\)"),
        ("step", None, "returned None; expected"),
        ("step", (["done"], 0.0, True), "messages of an environment's step are"),
        ("step", ([], "1", True), r"returned the reward '1' \(str\); a reward is a number"),
        ("step", ([], math.nan, True), "returned the reward nan; a reward is a finite number"),
        ("step", ([], 1e39, True), "returned the reward 1e[+]39; a reward is at most"),
        ("step", ([], False, 0.5), r"returned \(\[\], False, 0.5\); expected \(messages, reward, whether"),
    ],
)
def test_environments_that_return_something_else(method: str, value: Any, message: str) -> None:
    environment = Counter()
    setattr(environment, method, lambda *_: value)
    with pytest.raises(DataError, match=message):
        episode_of(environment, [[("add", {"n": 1})]])
    assert environment.closed == 1


def test_an_environment_that_raises_is_closed() -> None:
    environment = Counter()
    with pytest.raises(KeyError):
        episode_of(environment, [[("add", {"m": 1})]])
    assert environment.closed == 1


def test_rewards_by_replay() -> None:
    episode, _ = episode_of(Counter(), [[("add", {"n": 10})]])
    record = RewardRecord(messages=episode.messages, record={"start": 0})
    assert asyncio.run(reward_of(Counter)(record)) == 1.0
    record.record = {"start": 5}
    assert asyncio.run(reward_of(Counter)(record)) == 0.0
    record.record, record.turn_rewards = {"start": 0}, [1.0]
    assert asyncio.run(reward_of(Counter)(record)) == 0.0, "the agent has given them"


def test_as_an_agent_function(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    trajectories = pytest.importorskip("areno.agents.trajectories")

    class Client(ScriptedClient):
        def __init__(self, base_url: str, api_key: str, max_retries: int, timeout: None):
            assert (base_url, api_key, max_retries) == ("http://127.0.0.1:1/v1", "secret", 0)
            super().__init__(lambda messages: [("add", {"n": 10 - int(messages[0]["content"][10:-1])})])

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("openai.AsyncOpenAI", Client)
    ctx = SimpleNamespace(get_base_url=lambda: "http://127.0.0.1:1/v1", api_key="secret")
    batch = trajectories.AgentBatch([{"start": 3}, {"start": 4}, {}], ["a", "b", "c"], [[1], [2], [3]], 2)
    found = asyncio.run(agent_of(Counter)(ctx, batch))
    assert [trajectory.turns[0].item.key for trajectory in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "an episode failed: KeyError: 'start'" in caplog.text
    assert [trajectory.turn_rewards for trajectory in found] == [None] * 4
    rewarded = asyncio.run(agent_of(Counter, turn_rewards=True)(ctx, batch))
    assert [(trajectory.turn_rewards, trajectory.reward) for trajectory in rewarded] == [([1.0], None)] * 4
    with pytest.raises(KeyError):
        asyncio.run(agent_of(Counter)(ctx, trajectories.AgentBatch([{}], ["c"], [[3]], 1)))


# Tools of MCP servers -----------------------------------------------------------------------------------------------

SERVER = '''
from mcp.server import MCPServer

server = MCPServer("toy")

@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b

@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no luck")

if __name__ == "__main__":
    server.run()
'''
USER = [{"role": "user", "content": "6 * 7?"}]
SAID = [[("multiply", {"a": 6, "b": 7}), ("fail", {})], [("multiply", {"a": "six"})], "42"]


def server_here() -> Any:
    namespace: dict[str, Any] = {"__name__": "toy"}
    exec(SERVER, namespace)
    return namespace["server"]


@pytest.fixture(params=["stdio", "in this process"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    mcp = pytest.importorskip("mcp", reason="needs the mcp extra")
    if request.param == "stdio":
        (tmp_path / "server.py").write_text(SERVER)
        return mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "server.py")])
    return server_here()


@pytest.mark.slow
def test_tools_of_an_mcp_server(server: Any) -> None:
    from areno.agents.mcp_tools import McpEnvironment

    episode, client = episode_of(McpEnvironment(USER, server), SAID)
    [multiply, fail] = [tool["function"] for tool in client.requests[0]["tools"]]
    assert (multiply["name"], multiply["description"], fail["name"]) == ("multiply", "Multiply two numbers.", "fail")
    assert multiply["parameters"]["properties"]["a"]["type"] == "integer"
    results = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert results[0] == "42"
    assert results[1].startswith("error: ")
    assert results[2].startswith("error: ")
    assert (episode.ended, episode.reward, episode.messages[-1]["content"]) == ("done", 0.0, "42")


def test_two_mcp_tools_of_one_name() -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    from areno.agents.mcp_tools import McpEnvironment

    server = server_here()
    with pytest.raises(ConfigError, match="two MCP servers have a tool 'multiply'"):
        episode_of(McpEnvironment(USER, server, server), SAID)


def test_without_the_mcp_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from areno.agents.mcp_tools import McpEnvironment

    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"need the mcp package: pip install 'areno\[mcp\]'"):
        episode_of(McpEnvironment(USER, "http://127.0.0.1:1/mcp"), SAID)
