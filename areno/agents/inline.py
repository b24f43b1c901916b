"""Agents in a thread of the run itself (agent.mode=inline)."""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any

from areno import trace
from areno.agents.pool import loadable_agents
from areno.agents.process import THREADS, Agent, answer_of_exception, answers_of, load_agent, wait_within
from areno.agents.running import AgentOutcome, ContextFor, OnDone, RunnerWithThreads, calls_of
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem
from areno.config.agent import AgentConfig
from areno.errors import EngineError

_END_S = 5.0


class InlineAgents(RunnerWithThreads):
    """Runs agents in the event loop of a thread. Use it in a `with` block."""

    def __init__(self, agents: Mapping[str, AgentConfig]):
        super().__init__()
        self._given = agents
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._running: set[Future[Any]] = set()
        self._cancelled: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def __enter__(self) -> InlineAgents:
        self._agents = {source: load_agent(*each) for source, each in loadable_agents(self._given).items()}
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="areno-agents")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.restart_busy_workers()
        if self._thread.is_alive():
            with suppress(TimeoutError, FutureTimeout):
                asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop).result(2 * _END_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end_tasks(self) -> None:
        """Cancel what runs, and wait until it has cleaned up."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            self._cancel(task)
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task not in self._cancelled:  # a second time would interrupt its cleaning up
            self._cancelled.add(task)
            task.cancel()

    def look_at_limits(self) -> None:
        if not self._thread.is_alive():
            raise EngineError("the thread of the agents has ended: one of them has stopped its event loop")

    def submit(self, items: Sequence[AgentItem], context: ContextFor, on_done: OnDone) -> None:
        index = 0
        for call in calls_of(items, self._given):
            done = partial(self.finish, self.round, on_done)
            work = self._run_call(call, context(call), index, done)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            index += len(call)

    def restart_busy_workers(self) -> None:
        super().restart_busy_workers()
        for future in list(self._running):
            future.cancel()

    async def _run_call(self, items: Sequence[AgentItem], context: AgentContext, first: int, done: OnDone) -> None:
        agent = self._agents[items[0].source]
        begun_at = trace.now()
        ends_at = self.clock.now() + agent.timeout_s
        has_sessions = bool(context.sessions)
        work = answers_of(agent, lambda: self._returned(agent, context, items), items, has_sessions)
        task = asyncio.ensure_future(work)
        try:
            await wait_within(task, self.clock, ends_at)
            limit = f"not finished within {agent.timeout_s:g} s (agent.timeout_s)"
            answers: Any = task.result() if task.done() else ("timeout", None, limit)
        except asyncio.CancelledError as error:
            if not task.cancelled():  # the run stops this call
                raise
            answers = answer_of_exception(error, agent.path)
        finally:
            self._cancel(task)
        span = begun_at, trace.now()
        for index in range(len(items)):
            done(first + index, AgentOutcome(*(answers[index] if isinstance(answers, list) else answers), span=span))

    async def _returned(self, agent: Agent, context: AgentContext, items: Sequence[AgentItem]) -> Any:
        batch = AgentBatch.of_items(items)
        if agent.is_async:
            return await agent.function(context, batch)
        returned = await self._loop.run_in_executor(self._threads, agent.function, context, batch)
        return await returned if inspect.isawaitable(returned) else returned
