"""agent.mode=online over HTTP, with clients that exist: sessions, rewards, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

from areno.agents.online import OnlineAgents
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentContext, AgentItem
from areno.config.agent import AgentConfig
from areno.errors import ConfigError
from areno.server.sample_sessions import SampleSession
from areno.types import SamplingParams
from tests.helpers import policy_runs
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play
from tests.helpers.resumed import lost_in
from tests.helpers.scripted_engine import scripted_server
from tests.helpers.waiting import until

ADMIN = "the key of the admin"


class Online:
    """Two prompts with two samples each, whose agents are outside. `found` has (outcome, session) of each sample."""

    def __init__(self, server: Any, engine: Any, agents: OnlineAgents):
        self.engine = engine
        self.agents, self.found = agents, dict[int, tuple[AgentOutcome, SampleSession]]()
        self._sessions: dict[str, SampleSession] = {}
        self._server = server
        items = [
            AgentItem(f"prompt {n // 2}", {"prompt": f"prompt {n // 2}", "solutions": n}, [1], n // 2, n % 2)
            for n in range(4)
        ]
        self.thread = threading.Thread(target=self._run, args=(items,), daemon=True)
        self.thread.start()

    def context(self, items: Any) -> AgentContext:
        session = SampleSession(max_requests=9, uses_run_sampling=True, returns_tokens=False, takes_rewards=True)
        url = f"{self._server.open_sample(session)}/v1"
        self._sessions[str(items[0].key)] = session
        return AgentContext(url, session.id, "session", 60.0)

    def _run(self, items: list[AgentItem]) -> None:
        def done(index: int, outcome: AgentOutcome) -> None:
            session = self._sessions[str(items[index].key)]
            self._server.end_sample(session)
            self.found[index] = outcome, session

        self.agents.run(items, self.context, on_done=done)

    def post(self, path: str, key: str = ADMIN, **body: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx2.post(f"{self.agents.url}{path}", json=body, headers=headers, timeout=200)

    def start(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/rl/start_session", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ended(self, index: int) -> tuple[AgentOutcome, SampleSession]:
        until(lambda: index in self.found)
        return self.found[index]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Online]]:
    monkeypatch.setenv("ARENO_ADMIN_API_KEY", ADMIN)
    opened: list[OnlineAgents] = []
    with scripted_server(lambda prompt: "an answer", params=SamplingParams(max_new_tokens=64)) as (server, engine):

        def make(**settings: Any) -> Online:
            opened.append(OnlineAgents(AgentConfig(mode="online", **settings)).__enter__())
            online = Online(server, engine, opened[-1])
            until(lambda: opened[-1]._sessions.n_waiting == 4)
            return online

        yield make
        for agents in opened:
            agents.close()


def ask(session: dict[str, Any], **more: Any) -> Any:
    client = OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
    return client.chat.completions.create(model="any", messages=session["messages"], **more)


def test_a_program_gets_a_row_queries_the_policy_and_reports_the_reward(made: Callable[..., Online]) -> None:
    online = made()
    assert online.post("/grant_capacity").json() == {"capacity": 4}
    session = online.start()
    assert (session["row"], session["sample_index"]) == ({"prompt": "prompt 0", "solutions": 0}, 0)
    assert session["messages"] == [{"role": "user", "content": "prompt 0"}]
    assert ask(session).choices[0].message.content == "an answer"
    assert online.post("/rl/set_reward", session["api_key"], reward=0.5).json() == {"message": "success"}
    ended = online.post("/rl/end_session", session["api_key"])
    assert ended.json() == {"message": "success", "interaction_count": 1}
    outcome, recorded = online.ended(0)
    assert (outcome.status, recorded.reward, len(recorded.turns)) == ("ok", (0.5, {}), 1)
    assert online.engine.requests[0].params.temperature == 1.0


def test_all_dialects_stream_and_take_rewards_by_the_ids_of_responses(made: Callable[..., Online]) -> None:
    online = made()
    session = online.start()
    key, root = session["api_key"], online.agents.url
    chunks = list(ask(session, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "an answer"
    client = anthropic.Anthropic(base_url=root, api_key=key, max_retries=0)
    message = client.messages.create(model="any", max_tokens=9, messages=[{"role": "user", "content": "and"}])
    plain = OpenAI(base_url=root, api_key=key, max_retries=0)  # AReaL's address has no /v1
    response = plain.responses.create(model="any", input="more")
    assert plain.models.list().data[0].id == "policy"
    for number, name in enumerate((chunks[0].id, message.id, response.id)):
        answer = online.post("/rl/set_reward", key, reward=2**number, interaction_id=name)
        assert answer.status_code == 200, answer.text
    online.post("/rl/end_session", key)
    _, recorded = online.ended(0)
    assert list(recorded.rewards.values()) == [1, 2, 4]
    assert list(recorded.rewards) == [turn["choice"][0] for turn in recorded.turns]


def test_a_second_reward_of_a_response_replaces_the_first(made: Callable[..., Online]) -> None:
    online = made(set_reward_finish_timeout=0.5)
    session = online.start()
    first = ask(session).id
    ask(session)
    for body in ({"reward": 1}, {"reward": 0.25}, {"reward": 0.5, "interaction_id": first}):
        assert online.post("/rl/set_reward", session["api_key"], **body).status_code == 200
    online.post("/rl/end_session", session["api_key"])
    assert online.post("/rl/set_reward", session["api_key"], reward=4).status_code == 200  # within the timeout
    with pytest.raises(openai.APIStatusError, match="this session has ended"):
        ask(session)
    _, recorded = online.ended(0)
    assert recorded.reward == (4.5, {})
    assert online.post("/rl/set_reward", session["api_key"], reward=8).status_code == 410


def test_wrong_requests_are_told_and_change_nothing(made: Callable[..., Online]) -> None:
    online = made()
    session = online.start()
    key = session["api_key"]
    refused = [
        (online.post("/rl/start_session", key), 403, "not the admin key"),
        (online.post("/rl/start_session", ""), 401, "send the admin key"),
        (online.post("/grant_capacity", "other"), 403, "not the admin key"),
        (online.post("/rl/start_session", api_key=ADMIN), 400, "api_key is the admin key"),
        (online.post("/rl/start_session", task_id=5), 400, "task_id"),
        (online.post("/v1/chat/completions", messages=[]), 401, "the admin key starts sessions"),
        (online.post("/rl/set_reward", "other", reward=1), 401, "no session with this key"),
        (online.post("/rl/end_session", "other"), 401, "no session with this key"),
        (online.post("/rl/set_reward", key, reward=1), 400, "has no response"),
        (online.post("/rl/nothing", key), 404, "Not Found"),
    ]
    ask(session)
    until(lambda: online._sessions["(0, 0)"].turns)
    headers = {"Authorization": f"Bearer {key}"}
    for text, words in (("NaN", "NaN"), ("1e999", "inf; a reward is a finite number"), ('"1"', "a reward is a number")):
        answer = httpx2.post(f"{online.agents.url}/rl/set_reward", content=f'{{"reward": {text}}}', headers=headers)
        refused.append((answer, 400, words))
    refused += [
        (online.post("/rl/set_reward", key), 400, "reward is None"),
        (online.post("/rl/set_reward", key, reward=1, interaction_id="chatcmpl-1"), 400, "no response 'chatcmpl-1'"),
        (online.post("/rl/start_session", task_id="a" * 70_000), 413, "more than 65536 bytes"),
    ]
    for answer, status, words in refused:
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text
    with pytest.raises(openai.AuthenticationError):
        ask({**session, "api_key": "other"})
    online.post("/rl/end_session", key)
    assert online.ended(0)[1].reward is None
    for path in ("/rl/end_session", "/rl/set_reward", "/v1/chat/completions", "/v1/messages"):
        assert online.post(path, key, reward=1).status_code == 410


@pytest.mark.slow
def test_a_client_that_is_killed_loses_its_sample(made: Callable[..., Online]) -> None:
    online = made(session_timeout_seconds=6)
    online.engine.before_tokens = lambda: asyncio.sleep(60)
    code = """
import json
from openai import OpenAI
client = OpenAI(base_url="unknown", api_key="unknown")
print("ready", flush=True)
session = json.loads(input())
client = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
client.chat.completions.create(model="any", messages=session["messages"])
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        client.stdin.write(json.dumps(online.start()) + "\n")
        client.stdin.flush()
        until(lambda: online.engine.n_running == 1)
        time.sleep(6.5)
        assert not online.found  # a request that takes long is no idle session
        client.kill()
    assert online.ended(0)[0].status == "timeout"
    until(lambda: online.engine.n_running == 0)


@pytest.mark.slow
def test_clients_that_never_end_lose_their_samples(made: Callable[..., Online]) -> None:
    online = made(session_timeout_seconds=3.0)
    silent, busy = online.start(), online.start()
    ends_at = time.monotonic() + 5.0
    while time.monotonic() < ends_at:
        ask(busy)
        time.sleep(1.0)
    assert {index: outcome.status for index, (outcome, _) in online.found.items()} == {0: "timeout"}
    with pytest.raises(openai.APIStatusError, match="this session has ended"):
        ask(silent)
    answers = [online.post("/rl/set_reward", busy["api_key"], reward=1).status_code for _ in range(10)]
    assert answers == [200] * 9 + [410]  # as many as requests (agent.max_requests), beside these


@pytest.mark.slow
def test_a_program_with_one_key_starts_a_new_session_by_the_same_request(made: Callable[..., Online]) -> None:
    online = made()
    for index in range(4):
        session = online.start(api_key="my own key", task_id="a" if index < 2 else "b")
        assert session["sample_index"] == index % 2
        ask(session)
        assert online.post("/rl/set_reward", "my own key", reward=index).status_code == 200
    full = online.post("/rl/start_session", api_key="my own key")
    assert (full.status_code, full.headers["Retry-After"]) == (429, "1")
    online.thread.join(20)
    assert [online.found[index][1].reward for index in range(4)] == [(float(index), {}) for index in range(4)]


def test_the_admin_key_is_random_and_readable_by_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARENO_ADMIN_API_KEY", raising=False)
    with OnlineAgents(AgentConfig(mode="online")) as agents:
        agents.announce(tmp_path)
        file = tmp_path / "online.json"
        told = json.loads(file.read_text())
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        assert told["url"] == agents.url
        headers = {"Authorization": f"Bearer {told['admin_api_key']}"}
        assert httpx2.post(f"{agents.url}/grant_capacity", headers=headers).json() == {"capacity": 0}
        taken = AgentConfig(mode="online", port=int(agents.url.rpartition(":")[2]))
        with pytest.raises(ConfigError, match=r"agent\.port: the server cannot listen"):
            OnlineAgents(taken).__enter__()
    assert not file.exists()
    monkeypatch.setenv("ARENO_ADMIN_API_KEY", ADMIN)
    with OnlineAgents(AgentConfig(mode="online")) as agents:
        agents.announce(tmp_path)
        assert json.loads(file.read_text()) == {"url": agents.url}
    monkeypatch.setenv("ARENO_ADMIN_API_KEY", "areal-admin-key")
    with pytest.raises(ConfigError, match="ARENO_ADMIN_API_KEY: is areal-admin-key, which everybody knows"):
        OnlineAgents(AgentConfig(mode="online"))


SETTINGS = [
    f"actor.path={model_folder()}",
    "engine.dummy_load=true",
    "agent.mode=online",
    "reward.fn=null",
    "train_dataset.max_length=50",
    "gconfig.max_tokens=400",
    "gconfig.temperature=1",
    "saver.freq_steps=null",
]
ROWS = [{"prompt": f"hello {number}", "solutions": number} for number in range(8)]


class Program(threading.Thread):
    """An external program: waits for the address of a run, then works on one session after another."""

    def __init__(self, folder: Path, work: Callable[[dict[str, Any], Callable[..., Any]], object]):
        super().__init__(daemon=True)
        self.file, self.work = folder / "online.json", work
        self.errors: list[Exception] = []

    def run(self) -> None:
        try:
            until(self.file.exists, 120)
            until(lambda: self.file.read_text().endswith("}"))
            told = json.loads(self.file.read_text())
            while self.file.exists():
                with suppress(httpx2.TransportError, openai.APIConnectionError):  # the run has ended
                    self.work_on_session(told["url"], told["admin_api_key"])
        except Exception as error:
            self.errors.append(error)

    def work_on_session(self, url: str, admin: str) -> None:
        def post(path: str, key: str, **body: Any) -> httpx2.Response:
            return httpx2.post(f"{url}/rl/{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)

        answer = post("start_session", admin)
        if answer.status_code == 200:
            session = answer.json()
            self.work(session, lambda path, **body: post(path, session["api_key"], **body))
        else:
            assert answer.status_code in (429, 503), answer.text  # 503: the run has ended


def two_turns(session: dict[str, Any], post: Callable[..., Any]) -> None:
    client = OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0, timeout=60)
    messages = session["messages"]
    for _ in range(2):
        response = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages.append(response.choices[0].message.model_dump(exclude_none=True))
        post("set_reward", reward=len(response.choices[0].message.content or "") % 3 + session["row"]["solutions"])
        messages.append({"role": "user", "content": "again"})
    assert post("end_session").json()["interaction_count"] == 2


def trained(folder: Path, *settings: str, n_programs: int = 3, work: Any = two_turns) -> Played:
    programs = [Program(folder, work) for _ in range(n_programs)]
    for program in programs:
        program.start()
    played = play("gspo", folder, *SETTINGS, *settings, train_dataset=ROWS)
    for program in programs:
        program.join(90)  # longer than a request of it waits
        assert not program.errors
        assert not program.is_alive()
    return played


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_trains_what_external_programs_have_done(tmp_path: Path, ahead: int) -> None:
    played = trained(tmp_path, f"rollout.max_head_offpolicyness={ahead}", "engine.exact=true")
    assert [len(rows) for rows in played.rows] == [16, 16]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert played.series("rollout/agent_turns_mean") == [2.0, 2.0]
    assert played.series("train/logp_abs_diff_max") == [0.0, 0.0] or ahead
    assert max(row.staleness for rows in played.rows for row in rows) <= ahead
    for sample in (sample for step in (1, 2) for sample in played.samples(step)):
        said = [turn["message"].get("content") or "" for turn in sample["trajectory"]["turns"]]
        number = int(sample["prompt"].partition("hello ")[2][0])
        rewards = [turn["reward"] for turn in sample["trajectory"]["turns"]]
        assert rewards == [len(text) % 3 + number for text in said]
        assert sample["reward"] == sum(rewards)
    assert max(played.series("train/grad_norm")) > 0


@pytest.mark.slow
def test_programs_that_fail_cost_their_samples_and_the_run_goes_on(tmp_path: Path) -> None:
    numbers = iter(range(1000))

    def sometimes(session: dict[str, Any], post: Callable[..., Any]) -> None:
        number = next(numbers) % 4
        if number == 0:
            post("end_session")  # without a request
        elif number == 1:
            pass  # it never ends
        elif number == 2:
            ask(session, max_tokens=4)
            post("end_session")  # without a reward
        else:
            two_turns(session, post)

    played = trained(tmp_path, "agent.session_timeout_seconds=3", n_programs=1, work=sometimes)
    assert [len(rows) for rows in played.rows] == [4, 4]
    assert played.series("rollout/agent_errors") == [4.0, 4.0]
    assert played.series("rollout/agent_timeouts") == [4.0, 4.0]
    assert np.isfinite(played.series("train/grad_norm")).all()


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_sessions_start_anew_after_a_worker_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    lost_in(monkeypatch, "rollout_stats", 3)
    broken: list[int] = []

    def persistent(session: dict[str, Any], post: Callable[..., Any]) -> None:
        try:
            two_turns(session, post)
        except (openai.APIStatusError, KeyError):  # KeyError: an answer to end_session that is an error
            broken.append(1)

    settings = ["engine.workers=spawn", "recover.retries=1", f"rollout.max_head_offpolicyness={ahead}"]
    played = trained(tmp_path, *settings, work=persistent)
    assert [len(rows) for rows in played.rows][-2:] == [16, 16]
    assert played.series("rollout/agent_errors") == [0.0, 0.0]
    assert broken


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_evaluation_hands_out_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    monkeypatch.setattr(policy_runs, "SMALL", [each for each in policy_runs.SMALL if each != "valid_dataset=null"])
    data = tmp_path / "valid.jsonl"
    data.write_text("".join(f'{{"prompt": "way {number}", "solutions": {number}}}\n' for number in range(1, 4)))
    settings = [f"valid_dataset.path={data}", "valid_dataset.loader=null", "valid_dataset.max_length=50"]
    settings += ["evaluator.freq_steps=1", "eval_gconfig.n_samples=2", f"rollout.max_head_offpolicyness={ahead}"]
    played = trained(tmp_path / "run", *settings)
    assert [len(rows) for rows in played.rows] == [16, 16]
    assert set(played.series("eval/num_sequences")) == {6.0}
    assert min(played.series("eval/rewards_mean")) >= 4  # twice the mean of the solutions
