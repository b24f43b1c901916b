"""Agents in their processes: whatever one of them does, the others go on, and it is told why it has no trajectory."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areno import SamplingParams, Trainer, heartbeat
from areno.agents import process
from areno.agents.pool import AgentPool
from areno.agents.trajectories import AgentBatch, BadTrajectory, LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.api.trainer import RolloutSession
from areno.config.agent import AgentConfig
from areno.errors import ConfigError
from tests.helpers.agent_model import VOCAB, made
from tests.helpers.processes import until_ended
from tests.helpers.waiting import until

FILE = Path(__file__).parents[1] / "agents" / "faulty.py"


@pytest.fixture(scope="module")
def session() -> Iterator[RolloutSession]:
    with (
        made() as trainer,
        trainer.rollout_session(sampling_params=SamplingParams(), max_running_prompts=16) as session,
    ):
        yield session


def batch_of(*prompts: str) -> AgentBatch:
    return AgentBatch([{} for _ in prompts], list(prompts), [[1] for _ in prompts], 1)


def run(
    session: RolloutSession,
    *prompts: str,
    function: str = "run_agent",
    timeout_s: float = 60.0,
    workers: int = 1,
    whole_batch: bool = False,
    **told: Callable[..., object],
) -> Any:
    """told: on_wait, on_done."""
    config = AgentConfig(fn=f"{FILE}:{function}", timeout_s=timeout_s, workers=workers, whole_batch=whole_batch)
    with AgentPool({"": config}) as pool:
        pool.wait_ready()
        return pool.run(list(batch_of(*prompts)), partial(session.proxy.begin_agent, settings=config), **told)


def after(n: int, file: Path) -> Callable[..., object]:
    """Makes the file at the n-th call."""
    calls = itertools.count(1)
    return lambda *_: next(calls) == n and file.touch()


def builder(session: RolloutSession) -> RowBuilder:
    return RowBuilder(session.proxy.server.chat.prompts, LossMaskPolicy(), VOCAB, session.proxy.session)


def test_a_failing_agent_leaves_the_others_alone(session: RolloutSession) -> None:
    wrong = {
        "raise": r"ValueError: no luck \(faulty.py:\d+\)",
        "exit": "SystemExit: 3",
        "empty": "it returned no trajectory",
        "text": "it returned a str; an AgentTrajectory",
        "many": "two trajectories of item",
        "foreign": r"of item \(99, 0\), which it was not given",
        "bare": "does not have its tokens",
    }
    prompts = ["ok", *wrong, "print", "fork", "loose", "thread"]
    outcomes = dict(zip(prompts, run(session, *prompts), strict=True))
    for name in ("ok", "print", "fork", "loose", "thread"):
        assert outcomes[name].status == "ok", outcomes[name]
        [row] = builder(session).build_trajectory(outcomes[name].turns).rows
        assert 1 <= row.trained.sum() <= 4
    for name, message in wrong.items():
        assert outcomes[name].status == "error"
        assert re.search(message, outcomes[name].message), outcomes[name]


@pytest.mark.slow
def test_agents_that_only_wait_are_no_hang(session: RolloutSession, tmp_path: Path) -> None:
    beats: list[int] = []
    over = after(2, tmp_path / "over")
    run(session, f"sleep {tmp_path}/over", on_wait=lambda n: (beats.append(heartbeat.count()), over()))
    assert len(beats) >= 2
    assert sorted(set(beats)) == beats


def test_what_an_agent_prints_is_logged(session: RolloutSession, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "areno.agents"):
        run(session, "print")
    assert "agent: said by the agent" in caplog.text


def test_an_agent_out_of_time_is_a_timeout_and_others_are_done(session: RolloutSession, tmp_path: Path) -> None:
    outcomes = run(session, f"sleep {tmp_path}/over", "ok", "ok again", on_done=after(2, tmp_path / "over"))
    assert [outcome.status for outcome in outcomes] == ["timeout", "ok", "ok"]
    assert re.fullmatch(r"not finished within 60 s \(agent.timeout_s\); it waits at faulty.py:\d+", outcomes[0].message)
    line = int(outcomes[0].message.rpartition(":")[2])
    assert "asyncio.sleep(1_000_000)" in FILE.read_text().splitlines()[line - 1]


@pytest.mark.slow
def test_an_agent_that_holds_the_loop_is_found_and_the_others_run_again(session: RolloutSession) -> None:
    outcomes = run(session, "ok", "block for ever", "ok too", timeout_s=20.0)
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "ok"]
    assert "blocked the event loop" in outcomes[1].message
    assert "faulty.py" in outcomes[1].message


@pytest.mark.slow
def test_each_outcome_is_told_once_and_as_soon_as_it_is_there(session: RolloutSession, tmp_path: Path) -> None:
    told: list[tuple[int, Any]] = []
    over = after(4, tmp_path / "over")
    items = list(batch_of("raise", f"sleep {tmp_path}/over", "ok", "die", "locked"))
    items[4].record["lock"] = threading.Lock()
    with AgentPool({"": AgentConfig(fn=f"{FILE}:run_agent", timeout_s=60.0, workers=2)}) as pool:
        pool.wait_ready()
        context = partial(session.proxy.begin_agent, settings=AgentConfig(fn=str(FILE), timeout_s=60.0))
        done = pool.run(items, context, on_done=lambda *given: (told.append(given), over()))
        assert [outcome.status for outcome in done] == ["error", "timeout", "ok", "error", "error"]
        assert "cannot pickle '_thread.lock'" in done[4].message
        assert sorted(place for place, _ in told) == list(range(5))
        assert all(done[place] is outcome for place, outcome in told)
        assert told[-1][0] == 1, "the one that waited until the others were told"

        def full(place: int, outcome: Any) -> None:
            raise OSError("no space left")  # of who asks, not of the process

        with pytest.raises(OSError, match="no space left"):
            pool.run(list(batch_of("ok", "sleep")), context, on_done=full)
        assert [outcome.status for outcome in pool.run(list(batch_of("ok", "ok")), context)] == ["ok", "ok"]


@pytest.mark.slow
def test_an_agent_that_ends_its_process_costs_only_its_own_sample(session: RolloutSession) -> None:
    prompts = [f"ok {number}" for number in range(10)]
    outcomes = run(session, *prompts[:5], "die", *prompts[5:], workers=2)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 5 + ["error"] + ["ok"] * 5
    assert outcomes[5].message == "its process ended (exit code 7)"


def test_a_process_that_an_agent_leaves_behind_ends_with_the_agents(session: RolloutSession, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert [outcome.status for outcome in run(session, f"stray {file}", "ok")] == ["ok", "ok"]
    until_ended([int(file.read_text())])


def test_a_forked_copy_that_awaits_takes_no_answers(session: RolloutSession, caplog: pytest.LogCaptureFixture) -> None:
    """It would close connections of the agents and, by the epoll that both share, deafen this process."""
    with caplog.at_level(logging.INFO, "areno.agents"):
        outcomes = run(session, "copy", *["ok"] * 10, "copy", timeout_s=10.0)
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [("ok", "")] * 12
    assert caplog.text.count("a process that the agent forked returned or awaited, and was ended") == 2


def test_an_agent_has_sent_its_request_before_the_next_one_begins(session: RolloutSession) -> None:
    [outcome, *_] = run(session, "a", "b", "c", function="in_turns")
    assert "a begins, a sends, b begins, b sends, c begins, c sends" in outcome.message


def test_a_plain_function_runs_in_threads(session: RolloutSession, tmp_path: Path) -> None:
    prompts = [*(f"ok {number}" for number in range(20)), f"sleep {tmp_path}/over"]
    outcomes = run(session, *prompts, function="run_plain", on_done=after(20, tmp_path / "over"))
    assert [outcome.status for outcome in outcomes] == ["ok"] * 20 + ["timeout"]
    assert re.search(r"not finished within 60 s .*; it waits at faulty.py:\d+$", outcomes[-1].message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("stolen", "has a response of another session"),
        ("edited", "its messages are not those of the request .1 messages.: at character .* they say '.*something"),
    ],
)
def test_what_was_not_sampled_here_is_told_when_rows_are_made(
    session: RolloutSession, prompt: str, message: str
) -> None:
    [outcome] = run(session, prompt)
    with pytest.raises(BadTrajectory, match=message):
        builder(session).build_trajectory(outcome.turns)


@pytest.mark.slow
def test_hundreds_of_agents_run_at_once(session: RolloutSession) -> None:
    outcomes = run(session, *(f"ok {number}" for number in range(200)), workers=2)
    assert {outcome.status for outcome in outcomes} == {"ok"}
    told = {turn["tokens"]["conversation"] for outcome in outcomes for turn in outcome.turns}
    assert len(told) == 200
    assert session.proxy.server.sampler.n_samples == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run_agent(ctx): pass", r"run_agent\(ctx, batch\) cannot be called"),
        ("import nothing_of_this_name", "does not import"),
        ("", "has no function run_agent"),
        ("import os; os._exit(4)", "importing: its process ended .exit code 4"),
    ],
)
def test_a_file_that_is_no_agent_is_an_error_of_its_setting(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "agent.py"
    file.write_text(text)
    with (
        AgentPool({"": AgentConfig(fn=str(file), workers=1)}) as pool,
        pytest.raises(ConfigError, match=message) as caught,
    ):
        pool.wait_ready()
    assert caught.value.problems[0].key == "agent.fn"


def test_a_name_that_is_no_file_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"agent.fn: is 'agent'; expected file.py"):
        AgentPool({"": AgentConfig(fn="agent")}).start()


def test_there_are_as_many_processes_as_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.user_processes.pool.usable_cores", lambda _: 12)
    config = AgentConfig(fn=str(FILE))
    assert [AgentPool({"": config}, n).n_workers for n in (1, 4, 20)] == [10, 7, 2]
    assert AgentPool({"": AgentConfig(fn=str(FILE), workers=3)}, 1).n_workers == 3
    monkeypatch.setattr("areno.user_processes.pool.usable_cores", lambda _: 200)
    assert AgentPool({"": config}, 8).n_workers == 16


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_requests_behind(session: RolloutSession) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    context = partial(session.proxy.begin_agent, settings=AgentConfig(fn=str(FILE), timeout_s=60.0))
    with AgentPool({"": AgentConfig(fn=str(FILE), workers=1)}) as pool:
        pool.wait_ready()
        with pytest.raises(KeyboardInterrupt):
            pool.run(list(batch_of("sleep", "ok")), context, interrupt)
        assert [outcome.status for outcome in pool.run(list(batch_of("ok")), context)] == ["ok"]
    until(lambda: not session.proxy.server.sampler.n_samples)


def test_an_agent_that_asks_for_it_gets_the_whole_batch(session: RolloutSession) -> None:
    told: list[int] = []
    prompts = ["ok", "none", "also ok", "edited", "two"]
    outcomes = run(
        session,
        *prompts,
        function="run_whole",
        workers=2,
        whole_batch=True,
        on_done=lambda place, _: told.append(place),
    )
    assert told == list(range(5))
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok", "error", "error"]
    assert [outcomes[place].turns[-1]["outcome"] for place in (0, 2)] == [(515.0, {})] * 2
    assert [outcomes[place].message for place in (1, 3, 4)] == [
        "it returned no trajectory",
        "the response of a turn has 2 choices; keep only the one that the agent went on with, such as "
        "response.choices = [response.choices[2]]; of a streamed response, keep the chunks of one index",
        "it returned two trajectories of item (4, 0); one for each item is expected",
    ]
    assert len({outcome.span for outcome in outcomes}) == 1
    assert run(session, "ok", "ok", function="run_whole")[0].turns[-1]["outcome"] == (111.0, {})
    assert run(session, function="run_whole", whole_batch=True) == []


def test_what_fails_in_a_whole_batch_is_all_of_it(session: RolloutSession) -> None:
    for last, message in (("raise", r"ValueError: no luck \(faulty.py:\d+\)"), ("die", r"its process ended .*7\)")):
        outcomes = run(session, "ok", "ok", last, function="run_whole", whole_batch=True)
        assert [outcome.status for outcome in outcomes] == ["error"] * 3
        assert re.fullmatch(message, outcomes[0].message)


def test_an_agent_that_asks_for_it_gets_the_samples_of_a_prompt(session: RolloutSession) -> None:
    prompts = ["none", "raise", "nan"]
    batch = AgentBatch([{}] * 3, prompts, [[1]] * 3, n_samples=2)
    config = AgentConfig(fn=f"{FILE}:run_group", workers=1, whole_group=True)
    sessions: dict[int, Any] = {}

    def end(index: int, outcome: Any) -> None:
        sessions[index] = session.proxy.end_agent(list(batch)[index])

    with AgentPool({"": config}) as pool:
        pool.wait_ready()
        outcomes = pool.run(list(batch), partial(session.proxy.begin_agent, settings=config), on_done=end)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok", "ok", "error", "ok", "error"]
    assert [outcome.reward for outcome in outcomes[::2]] == [(0.0, {"samples": 2.0})] * 3
    assert outcomes[1].reward is None
    assert re.fullmatch(r"ValueError: no luck.*", outcomes[3].message)
    assert outcomes[5].message.startswith("its trajectory has the reward nan")
    asked = [[turn["messages"][0]["content"] for turn in sessions[index].turns] for index in range(6)]
    assert asked == [[str(item.key)] for item in batch]


def test_a_group_may_have_one_sample(session: RolloutSession) -> None:
    config = AgentConfig(fn=f"{FILE}:run_group", workers=1, whole_group=True)
    batch = list(AgentBatch([{}] * 2, ["none", "raise"], [[1]] * 2, n_samples=1))
    with AgentPool({"": config}) as pool:
        outcomes = pool.run(batch, partial(session.proxy.begin_agent, settings=config))
    assert [(outcome.status, outcome.reward) for outcome in outcomes] == [("ok", (0.0, {"samples": 1.0}))] * 2


def test_a_batch_of_items_knows_its_prompts() -> None:
    whole = AgentBatch([{"a": 1}, {"a": 2}], ["one", "two"], [[1], [2]], n_samples=3)
    assert AgentBatch.of_items(list(whole)) == whole
    part = AgentBatch.of_items(list(whole)[4:5])
    assert (part.prompts, part.records, part.input_tokens, part.n_samples) == (["two"], [{"a": 2}], [[2]], 1)
    assert [item.key for item in part] == [(1, 1)]


def test_items_are_every_prompt_as_often_as_there_are_samples() -> None:
    batch = AgentBatch([{"a": 1}, {"a": 2}], ["one", "two"], [[1], [2]], n_samples=3)
    items = list(batch.iter_samples())
    assert len(batch) == len(items) == 6
    assert [item.key for item in items] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (items[4].prompt, items[4].record, items[4].input_tokens) == ("two", {"a": 2}, [2])


def test_a_trainer_is_of_use_after_an_agent_session() -> None:
    async def main(trainer: Trainer) -> None:
        async with trainer.rollout_session(sampling_params=SamplingParams()) as session:
            assert session.get_base_url().startswith("http://127.0.0.1:")
        async with trainer.rollout_session(sampling_params=SamplingParams(), proxy=False):
            assert trainer.rollout_batch(["hello"], 1, SamplingParams(max_new_tokens=3))

    with made() as trainer:
        asyncio.run(main(trainer))


def test_clients_of_agents_share_what_they_know_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of httpx: a context that an agent makes for itself, it may change."""
    shared = ssl.create_default_context  # conftest.py keeps one context
    own = getattr(shared, "__wrapped__", shared)
    monkeypatch.setattr(ssl, "create_default_context", own)
    process._share_tls_contexts()
    code = "import ssl\nmade = [ssl.create_default_context() for _ in range(2)]"
    of_httpx: dict[str, Any] = {"__name__": "httpx2._config"}
    of_agent: dict[str, Any] = {"__name__": "agent"}
    for names in (of_httpx, of_agent):
        exec(code, names)
    assert of_httpx["made"][0] is of_httpx["made"][1]
    assert len({id(made) for made in [*of_httpx["made"], *of_agent["made"]]}) == 3
