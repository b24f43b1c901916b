"""Processes of agents that live across steps: time limits while they are suspended, long answers, and their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from areno.agents.pool import AgentOutcome, AgentPool
from areno.agents.trajectories import AgentBatch, AgentContext
from areno.config.agent import AgentConfig
from areno.config.rollout import GenerationConfig
from areno.errors import ArenoError, WorkerLost
from areno.run.agents_across_steps import LiveAgents
from tests.agents.waiting import LONG
from tests.helpers.agent_runs import AGENTS
from tests.helpers.processes import children, reads_proc


@pytest.fixture
def pool() -> Iterator[AgentPool]:
    with AgentPool({"": AgentConfig(fn=f"{AGENTS}/waiting.py", timeout_s=4.0, workers=1)}) as pool:
        pool.wait_ready()
        yield pool


class Begun:
    """Agents of tests/agents/waiting.py in a pool, and the outcomes of those that have ended."""

    def __init__(self, pool: AgentPool):
        self._pool, self.found = pool, dict[str, AgentOutcome]()

    def begin(self, *words: str) -> None:
        batch = AgentBatch([{} for _ in words], list(words), [[1] for _ in words], 1)
        context = AgentContext("http://127.0.0.1:1/v1", "", "", 2.0)
        self._pool.submit(
            list(batch), lambda items: context, lambda place, outcome: self.found.setdefault(words[place], outcome)
        )

    def run_for(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        self._pool.run_until(lambda: time.monotonic() > ends_at, lambda: None)

    def run_until(self, n_found: int) -> None:
        self._pool.run_until(lambda: len(self.found) == n_found, lambda: None)

    @property
    def messages(self) -> dict[str, str]:
        return {name: outcome.message for name, outcome in self.found.items()}


NOTHING = "it returned no trajectory"


@pytest.mark.slow
def test_time_limits_of_agents_are_paused_while_they_are_suspended(pool: AgentPool, tmp_path: Path) -> None:
    agents = Begun(pool)
    agents.begin("for ever", f"until {tmp_path}/over")
    agents.run_for(0.3)
    pool.suspend()
    (tmp_path / "over").touch()
    time.sleep(4.5)
    assert not agents.found
    pool.resume()
    agents.begin("at once")  # while the others run
    agents.run_for(0.1)
    assert agents.messages == {f"until {tmp_path}/over": NOTHING, "at once": NOTHING}
    agents.run_until(3)
    assert agents.found["for ever"].status == "timeout"


@pytest.mark.slow
def test_an_answer_that_the_driver_does_not_read_costs_the_other_agents_no_time(
    pool: AgentPool, tmp_path: Path
) -> None:
    agents, long, other = Begun(pool), f"long {tmp_path}/long", f"until {tmp_path}/over"
    agents.begin(long, other)
    agents.run_for(0.3)
    (tmp_path / "long").touch()
    time.sleep(0.3)
    pool.suspend()
    time.sleep(4.5)
    pool.resume()
    agents.run_until(1)
    [turn] = agents.found[long].turns or []
    assert len(turn["messages"][0]["content"]) == LONG
    (tmp_path / "over").touch()
    agents.run_until(2)
    assert agents.messages[other] == NOTHING


@pytest.mark.slow
def test_an_agent_that_blocks_its_event_loop_has_no_less_time_while_it_is_suspended(
    pool: AgentPool, tmp_path: Path
) -> None:
    agents, blocking, other = Begun(pool), f"block {tmp_path}/blocked", f"until {tmp_path}/over"
    agents.begin(blocking, other)
    agents.run_for(0.3)
    pool.suspend()
    time.sleep(4.5)
    pool.resume()
    agents.run_for(0.3)
    assert not agents.found
    for name in ("blocked", "over"):
        (tmp_path / name).touch()
    agents.run_until(2)
    assert agents.messages == {blocking: NOTHING, other: NOTHING}


@pytest.mark.slow
def test_plain_agents_are_suspended_and_their_process_ends_without_a_loss(tmp_path: Path) -> None:
    """After its time limit, an agent keeps its thread, so that the process ends as soon as no other agent runs."""
    with AgentPool({"": AgentConfig(fn=f"{AGENTS}/waiting.py:run_plain", timeout_s=4.0, workers=1)}) as pool:
        pool.wait_ready()
        agents, other = Begun(pool), f"until {tmp_path}/over"
        agents.begin("for ever", other)
        agents.run_for(0.3)
        pool.suspend()
        time.sleep(4.5)
        pool.resume()
        agents.run_for(0.1)
        assert not agents.found
        (worker,) = pool.workers  # another one takes its place as soon as it has ended
        (tmp_path / "over").touch()
        agents.run_until(2)
        assert agents.messages[other] == NOTHING
        assert agents.found["for ever"].status == "timeout"
        worker.process.wait(20.0)
        agents.begin("at once")
        agents.run_until(3)
        assert agents.messages["at once"] == NOTHING


@pytest.mark.slow
def test_a_process_that_leaves_is_known_after_an_error_about_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with AgentPool({"": AgentConfig(fn=f"{AGENTS}/waiting.py:run_plain", timeout_s=0.5, workers=1)}) as pool:
        pool.wait_ready()
        receive = pool._receive
        monkeypatch.setattr(pool, "_receive", lambda *args: (time.sleep(0.3), receive(*args)))  # answer and "left"
        agents = Begun(pool)
        with monkeypatch.context() as patch:
            patch.setattr(agents, "found", MagicMock(**{"setdefault.side_effect": ZeroDivisionError}))
            agents.begin("for ever")
            with pytest.raises(ZeroDivisionError):
                agents.run_until(1)
        agents.begin("at once")
        agents.run_until(1)
        assert agents.messages["at once"] == NOTHING


def test_the_time_limit_of_an_import_is_not_paused() -> None:
    with AgentPool({"": AgentConfig(fn=f"{AGENTS}/waiting.py", workers=1)}) as pool:
        deadline = pool.workers[0].deadline
        pool.suspend()
        time.sleep(0.01)
        pool.resume()
        assert pool.workers[0].deadline == deadline
        pool.wait_ready()
        (worker,) = pool.workers
        agents = Begun(pool)
        agents.begin("for ever")
        agents.run_for(0.1)
        deadline = worker.deadline
        pool.suspend()
        time.sleep(0.01)
        pool.resume()
        assert worker.deadline > deadline


@pytest.mark.parametrize(
    ("error", "calls"),
    [(ArenoError("no"), ["close"]), (WorkerLost("it"), ["restart_busy_workers"]), (None, ["restart_busy_workers"])],
)
def test_an_error_ends_the_session_and_starts_no_processes(error: ArenoError | None, calls: list[str]) -> None:
    told = list[str]()

    class Session(contextlib.nullcontext[Any]):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exc: object) -> None:
            told.append("session")

        def suspend(self) -> list[int]:
            return []

    pool = SimpleNamespace(suspend=list)
    pool.close, pool.restart_busy_workers = (
        (lambda: told.append("close")),
        (lambda: told.append("restart_busy_workers")),
    )
    config, trainer = (
        SimpleNamespace(gconfig=GenerationConfig()),
        SimpleNamespace(rollout_session=lambda **_: Session()),
    )
    with contextlib.ExitStack() as resources:
        live = LiveAgents(cast(Any, config), cast(Any, trainer), cast(Any, pool), resources)
        with contextlib.suppress(ArenoError), live.running():
            assert live.is_open
            if error is not None:
                raise error
        assert live.is_open == (error is None)
    assert told == [*calls, "session"]


@pytest.mark.slow
@reads_proc
def test_a_process_that_reads_nothing_does_not_block_the_driver(pool: AgentPool) -> None:
    agents = Begun(pool)
    agents.begin("for ever")
    agents.run_for(0.3)
    [process] = children(pool.workers[0].process.pid)

    def often() -> None:
        for _ in range(300):
            pool.suspend()
            pool.resume()

    os.kill(process, signal.SIGSTOP)
    thread = threading.Thread(target=often, daemon=True)
    thread.start()
    thread.join(20.0)
    is_blocked = thread.is_alive()
    os.kill(process, signal.SIGCONT)
    assert not is_blocked


@pytest.mark.slow
def test_agents_of_a_lost_process_start_again_while_others_run(tmp_path: Path) -> None:
    context, found = AgentContext("http://127.0.0.1:1/v1", "", "", 60.0), list[str]()

    def begin(*words: str) -> None:
        batch = AgentBatch([{} for _ in words], list(words), [[1] for _ in words], 1)
        pool.submit(
            list(batch),
            lambda items: context,
            lambda place, outcome: found.append(f"{words[place]}: {outcome.message}"),
        )

    with AgentPool({"": AgentConfig(fn=f"{AGENTS}/waiting.py", timeout_s=60.0, workers=2)}) as pool:
        pool.wait_ready()
        begin(f"until {tmp_path}/over")
        begin("end", f"until {tmp_path}/over too", "at once")
        pool.run_until(lambda: len(found) == 2, lambda: None)
        assert sorted(found) == ["at once: it returned no trajectory", "end: its process ended (exit code 3)"]
        for name in ("over", "over too"):
            (tmp_path / name.replace(" too", "")).touch()
        pool.run_until(lambda: len(found) == 4, lambda: None)
    assert {text.partition(": ")[2] for text in found[2:]} == {"it returned no trajectory"}
