"""Sessions of samples: what a program that knows nothing of training may do, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from areno.agents.proxy import SampleServer
from areno.agents.trajectories import LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.server.sample_sessions import SampleSession
from areno.types import SamplingParams
from tests.helpers.scripted_engine import ScriptedEngine, scripted_server
from tests.helpers.waiting import until

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASK: list[Any] = [{"role": "user", "content": "Begin."}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def say(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "<think>\nI have seen it.\n</think>\n\ndone"
    return f"<think>\nI should look.\n</think>\n\n{CALL}" if "look" in prompt else "a title"


@pytest.fixture
def served() -> Iterator[tuple[SampleServer, ScriptedEngine]]:
    with scripted_server(say, params=SamplingParams(max_new_tokens=64)) as served:
        yield served


def session_of(server: SampleServer, **settings: Any) -> tuple[SampleSession, str]:
    session = SampleSession(**{"max_requests": 20, "uses_run_sampling": True, "returns_tokens": False, **settings})
    return session, server.open_sample(session)


def post(url: str, timeout: float = 20, **body: Any) -> Any:
    return httpx2.post(f"{url}/v1/chat/completions", json={"model": "any", "messages": ASK, **body}, timeout=timeout)


def rows_of(server: SampleServer, session: SampleSession) -> Any:
    server.end_sample(session)  # then its record is complete
    prompts = server.server.chat.prompts
    return RowBuilder(prompts, LossMaskPolicy(), len(prompts.tokenizer)).build_trajectory(session.turns).rows


def test_a_session_is_found_by_its_path_and_by_its_key(served: Any) -> None:
    server, _ = served
    session, url = session_of(server)
    body = {"model": "gpt-100", "messages": ASK}
    named = {"Authorization": "Bearer none", "X-Session-ID": f"{session.id}.0"}  # the id of a trace of verifiers
    keys = ({"Authorization": f"Bearer {session.id}"}, {"x-api-key": session.id}, named)
    plain = [httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=key) for key in keys]
    assert [post(url).status_code, *(answer.status_code for answer in plain)] == [200] * 4
    until(lambda: len(session.turns) == 4)
    assert httpx2.head(url).status_code == 200
    assert [httpx2.get(f"{url}/v1/models").status_code, httpx2.get(f"{server.url}/v1/models").status_code] == [200, 401]
    unknown = f"{server.url}/s/{'0' * 32}"
    assert [post(unknown).status_code, httpx2.get(f"{server.url}/nothing").status_code] == [401, 401]
    assert httpx2.get(f"{server.url}/metrics").status_code == 200
    assert session.id not in httpx2.get(f"{server.url}/metrics").text
    assert session.id not in repr(session)


def test_after_its_end_a_session_refuses_and_samples_nothing(served: Any) -> None:
    server, engine = served
    session, url = session_of(server)
    assert post(url).status_code == 200
    server.end_sample(session)
    answers = [post(url), post(server.url, timeout=200)]
    assert [answer.status_code for answer in answers] == [410, 401]
    assert answers[0].json()["error"]["code"] == "session_ended"
    keyed = httpx2.post(f"{server.url}/v1/messages", json={}, headers={"x-api-key": session.id})
    assert keyed.status_code == 410
    assert keyed.json()["type"] == "error"
    assert len(engine.prompts) == 1


def test_a_sub_agent_that_is_still_asking_is_ended_with_the_session(served: Any) -> None:
    server, engine = served
    session, url = session_of(server)
    engine.before_tokens = lambda: asyncio.sleep(60)
    thread = threading.Thread(target=lambda: post(url), daemon=True)
    thread.start()
    until(lambda: engine.n_running == 1)
    server.end_sample(session)
    until(lambda: engine.n_running == 0)
    thread.join(10)
    assert not thread.is_alive()
    assert (session.turns, engine.n_aborted) == ([], 1)


def test_only_the_session_of_an_external_program_takes_rewards(served: Any) -> None:
    server, _ = served
    (session, url), (online, online_url) = session_of(server), session_of(server, takes_rewards=True)
    for one in (url, online_url):
        assert post(one).status_code == 200
    until(lambda: session.turns and online.turns)
    answers = [httpx2.post(f"{one}/rl/set_reward", json={"reward": 2}) for one in (url, online_url)]
    assert [answer.status_code for answer in answers] == [403, 200]
    assert (session.reward, online.reward) == (None, (2.0, {}))


def test_the_settings_of_the_run_hold(served: Any) -> None:
    server, engine = served
    _, url = session_of(server)
    asked: Any = {"temperature": 0, "top_p": 0.1, "seed": 3, "logit_bias": {"5": 9}, "max_tokens": 32_000}
    answer = post(url, **asked, reasoning_effort="high", frequency_penalty=1, verbosity="low", unknown=[1])
    assert answer.status_code == 200
    params = engine.requests[-1].params
    assert (params.temperature, params.greedy, params.top_p, params.max_new_tokens) == (1.0, False, 1.0, 64)
    assert (params.frequency_penalty, engine.requests[-1].logit_bias) == (0.0, {})
    assert post(url, max_tokens=1, stop=["e"]).json()["choices"][0]["finish_reason"] == "length"
    assert engine.requests[-1].params.stop == ["e"]


def test_a_prompt_that_nearly_fills_the_context_leaves_room_for_one_token() -> None:
    with scripted_server(say, context=40, params=SamplingParams(max_new_tokens=64)) as (server, engine):
        _, url = session_of(server)
        words = [{"role": "user", "content": "a " * 20}]
        assert post(url, messages=words, max_tokens=32_000).status_code == 200
        assert engine.requests[-1].params.max_new_tokens == 41 - len(engine.requests[-1].prompt)
        assert post(url, messages=[{"role": "user", "content": "a " * 60}]).json()["error"]["code"] == (
            "context_length_exceeded"
        )


def test_requests_are_capped(served: Any) -> None:
    server, engine = served
    session, url = session_of(server, max_requests=2)
    assert [post(url).status_code for _ in range(4)] == [200, 200, 410, 410]
    assert (len(engine.prompts), session.counts["refused"]) == (2, 2)
    assert "agent.max_requests" in post(url).json()["error"]["message"]


def test_sampled_tokens_are_capped(served: Any) -> None:
    """A turn that reaches the budget is finished; a stream counts as well."""
    server, _ = served
    session, url = session_of(server, max_tokens=5)
    sizes = []
    while (answer := post(url, stream=bool(sizes))).status_code == 200:
        until(lambda: len(session.turns) > len(sizes))  # the client may be faster than the record
        sizes.append(len(session.turns[-1]["tokens"].sampled))
        assert sum(sizes) == session.n_sampled
    assert sum(sizes[:-1]) < 5 <= sum(sizes)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "token_budget_exceeded")
    assert "agent.max_total_completion_tokens" in answer.json()["error"]["message"]
    assert (session.spent, session.counts["refused"]) == ("agent.max_total_completion_tokens", 1)


def test_a_full_queue_is_waited_for() -> None:
    with scripted_server(say, max_samples=1) as (server, engine):
        _, url = session_of(server)
        gate = threading.Event()

        async def wait() -> None:
            while not gate.is_set():
                await asyncio.sleep(0.01)

        engine.before_tokens = wait
        answers: list[int] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(post(url, user=f"{n}", stop=f"{n}").status_code))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        until(lambda: engine.n_running == 1)
        gate.set()
        for thread in threads:
            thread.join(20)
        assert answers == [200] * 3


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_stream_that_waits_for_its_place_is_kept_alive(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    from areno.server import app

    monkeypatch.setattr(app, "_KEEP_ALIVE_S", 0.05)
    with scripted_server(say, max_samples=1) as (server, engine):
        _, url = session_of(server)
        body = {"model": "a", "messages": ASK, "input": ASK, "stream": True}
        if path != "chat/completions":
            del body["input" if path == "messages" else "messages"]
        with server.server.sampler.reserve(1):
            stream = httpx2.stream("POST", f"{url}/v1/{path}", json=body)
            answer = stream.__enter__()
            lines = answer.iter_lines()
            assert sum(line.startswith("data: ") for _, line in zip(range(16), lines, strict=False)) > 4
            assert engine.requests == []
        assert sum(line.startswith("data: ") for line in lines) > 2
        stream.__exit__(None, None, None)
        assert len(engine.requests) == 1


def test_a_repeated_request_gets_the_answer_that_was_not_delivered(served: Any) -> None:
    server, engine = served
    session, url = session_of(server)
    gate = threading.Event()

    async def wait() -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    engine.before_tokens = wait
    with pytest.raises(httpx2.TimeoutException):
        post(url, timeout=3.0)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(post(url).json())) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: session.counts["repeated"] == 2)
    gate.set()
    for thread in threads:
        thread.join(20)
    assert found[0]["id"] == found[1]["id"]
    assert (len(engine.prompts), len(session.turns), session.counts["repeated"]) == (1, 1, 2)
    assert post(url).json()["id"] != found[0]["id"], "an answer that was delivered is not given again"
    until(lambda: len(session.turns) == 2)


def test_a_client_that_leaves_in_mid_stream_leaves_nothing_behind(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from areno.server import sample_sessions

    monkeypatch.setattr(sample_sessions, "_GRACE_S", 0.2)
    server, engine = served
    session, url = session_of(server)
    engine.before_tokens = lambda: asyncio.sleep(60)
    body = {"model": "a", "messages": ASK, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
        until(lambda: engine.n_running == 1)
    until(lambda: engine.n_running == 0)
    assert (session.turns, engine.n_aborted) == ([], 1)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_idle_streams_are_kept_alive(served: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    from areno.server import app

    monkeypatch.setattr(app, "_KEEP_ALIVE_S", 0.05)
    server, engine = served
    session, url = session_of(server)
    engine.before_tokens = lambda: asyncio.sleep(0.4)
    body: Any = {"model": "a", "messages": ASK, "input": ASK, "max_tokens": 9, "stream": True}
    if path != "chat/completions":
        del body["input" if path == "messages" else "messages"]
    with httpx2.stream("POST", f"{url}/v1/{path}", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    kinds = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    idle = {"chat/completions": {"delta": {}}, "messages": "content_block_delta", "responses": "response.in_progress"}
    shown = [
        event.get("type") if path != "chat/completions" else {"delta": event["choices"][0]["delta"]} for event in kinds
    ]
    assert shown.count(idle[path]) >= 4
    assert session.counts["repeated"] == 0
    assert len(session.turns) == 1


def turn(url: str, messages: list[Any], **more: Any) -> Any:
    answer = post(url, messages=messages, tools=TOOLS, **more).json()
    return answer["choices"][0]["message"]


@pytest.mark.parametrize("dropped", [(), ("reasoning_content",), ("reasoning_content", "content")])
def test_what_a_client_drops_from_its_history_is_restored(served: Any, dropped: tuple[str, ...]) -> None:
    server, engine = served
    session, url = session_of(server)
    answer = turn(url, ASK)
    kept = {name: value for name, value in answer.items() if name not in dropped}
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "a cat"}
    last = turn(url, [*ASK, kept, result])
    assert last["content"] == "done"
    assert session.counts["restored"] == bool(dropped)
    [row] = rows_of(server, session)
    first, second = engine.requests
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert "I should look." in engine.prompts[1]
    assert row.trained.sum() == sum(len(turn["tokens"].sampled) for turn in session.turns)


def test_an_edited_turn_is_a_new_row_and_is_counted(served: Any) -> None:
    server, _ = served
    session, url = session_of(server)
    answer = turn(url, ASK)
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "a cat"}
    turn(url, [*ASK, {**answer, "content": "I look again."}, result])
    assert (session.counts["edited"], session.counts["restored"]) == (1, 0)
    assert len(rows_of(server, session)) == 2


def test_no_token_of_the_agent_is_forced(served: Any) -> None:
    server, engine = served
    session, url = session_of(server)
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    turn(url, ASK, tool_choice="required")
    post(url, response_format=form, messages=[*ASK, {"role": "assistant", "content": "x"}, *ASK])
    assert [request.grammar for request in engine.requests] == [None, None]
    title = [{"role": "user", "content": "Write a title."}]
    post(url, response_format=form, messages=title)
    assert engine.requests[-1].grammar is not None
    assert session.counts["not_forced"] == 2


# Unix sockets


def over_socket(path: str, url: str, **headers: str) -> httpx2.Response:
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=path)) as client:
        return client.post(url, json={"model": "a", "messages": ASK}, headers=headers)


def test_a_socket_leads_to_its_session_and_to_no_other(served: Any) -> None:
    server, _ = served
    (mine, my_url), (other, _) = session_of(server), session_of(server)
    path = server.open_socket(mine)
    plain = "http://127.0.0.1:8999/v1/chat/completions"
    assert over_socket(path, plain).status_code == 200
    assert over_socket(path, plain, Authorization="Bearer anything").status_code == 200
    assert over_socket(path, f"{my_url}/v1/chat/completions").status_code == 200
    foreign = [
        over_socket(path, plain, Authorization=f"Bearer {other.id}"),
        over_socket(path, plain, **{"x-api-key": other.id}),
        over_socket(path, f"http://a/s/{other.id}/v1/chat/completions"),
    ]
    assert [answer.status_code for answer in foreign] == [403] * 3
    server.end_sample(mine)
    assert (len(mine.turns), other.turns) == (3, [])
    with pytest.raises(httpx2.ConnectError):
        over_socket(path, plain)
    server.end_sample(other)


def test_no_answer_shows_the_id_of_a_session(served: Any) -> None:
    server, _ = served
    session, url = session_of(server)
    wrong = [httpx2.get(f"{url}/nothing"), httpx2.get(f"{url}/v1/messages"), httpx2.post(f"{url}/v1/messages", json={})]
    found = [post(url), *wrong]
    assert [answer.status_code for answer in found] == [200, 401, 401, 400]
    assert all(session.id not in answer.text for answer in found)
