"""The code of an agent process, which runs the user's agent for many items at once.

The pool in the driver (areno/agents/pool.py) exchanges pickled messages with this process over one socket. The process
first receives, for each source, (agent as "file:function", name of its setting, configuration section). Then it
receives chunks, which are lists of (position, pickled (context, items)). Each element is a call of the agent function,
for one item or for those of a group or a batch (agent.whole_group, agent.whole_batch). `position` is its number in the
driver.

The process sends ("ready", True) or ("failed", problems) once. Then it sends (position, answer) for each call as soon
as the call is finished. The answer is a list with an element for each item, or a tuple that is for all of them. If the
process exits by itself, while none of its agents runs, it first sends ("left", None).

Between the messages (SUSPEND, time) and (RESUME, time), the driver trains. Agents continue, but their time limits are
paused. Both times are those of time.monotonic in the driver. Threads read and send the messages, so that an agent that
blocks the event loop, or a driver that does not read, delays neither. The supervisor (areno.user_processes.supervisor)
ends this process together with all processes that the agent started. Nothing large is imported here, so that the
process starts quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import os
import pickle
import ssl
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from areno.agents.completion import completion_agent
from areno.agents.program import program_agent
from areno.agents.trajectories import (
    AgentBatch,
    AgentContext,
    AgentItem,
    BadTrajectory,
    PlainTurn,
    Reward,
    plain_results,
    recorded_results,
    with_chosen_turns,
)
from areno.agents.workflows import agent_function
from areno.config.agent import COMMAND, COMPLETION, AgentConfig
from areno.engine.output_streams import RunningClock
from areno.environments.packages import package_of
from areno.errors import ConfigError, Problem
from areno.files.user_code import describe_error, is_import_path, load_function, load_import_path, split_spec
from areno.server.errors import CONTEXT_FULL, REQUESTS_SPENT, TOKENS_SPENT
from areno.user_processes.process import MAX_TEXT, ForkedChildren, is_async, new_event_loop

DEFAULT_FUNCTION = "run_agent"
SUSPEND, RESUME = "suspend", "resume"
THREADS = 64  # largest number of concurrent agents if run_agent is a plain function
# Iterations of the event loop between the starts of two agents. Building a request takes milliseconds, and a client
# sends it in two writes. If all agents started at once, no second write would happen before the last request is built.
_START_ITERATIONS = 3
_TICK_S = 0.25
_LOOK_S = 0.05  # least time between looks at a paused clock
_END_S = 5.0  # for a cancelled agent
_BLOCKED_S = 5.0  # an agent that blocks the event loop for longer is reported
_BLOCKS = (
    "the agent blocks its event loop{}, so that the other agents of this process wait; await its requests, or make "
    "run_agent a plain function, which runs in threads"
)

Answer = tuple[str, "list[PlainTurn] | None", str] | tuple[str, None, str, Reward, Any, Any]  # fields of AgentOutcome
Answers = Answer | list[Answer]  # of all items of a call, or of each item

_position: contextvars.ContextVar[int | None] = contextvars.ContextVar("position", default=None)


def _share_tls_contexts() -> None:
    """Make all HTTP clients in this process share one TLS context.

    Each client of `openai` loads the system's certificates when it is made, even for plain http. That takes 20 ms, and
    most agents make a client for each sample. Only the contexts for httpx and httpcore are shared.
    """
    own, shared = ssl.create_default_context, cache(ssl.create_default_context)

    def create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (shared if caller.startswith(("httpx", "httpcore")) else own)(*args, **options)

    ssl.create_default_context = create_default_context


def serve(connection: Connection) -> None:
    """Run agents until the driver closes the connection (EOFError). Raises ArenoError for a wrong agent function."""
    _share_tls_contexts()
    given = connection.recv()
    copies = ForkedChildren(connection, reports=False)
    with copies.guard_user_code():
        agents = {source: load_agent(*each) for source, each in given.items()}
    runner = _Runner(connection, agents, copies)
    gc.freeze()  # without it, each garbage collection scans all imported modules and blocks the agents for 50 ms
    connection.send(("ready", True))
    runner.serve()


def load_agent(spec: str, key: str, settings: AgentConfig) -> Agent:
    """Load what `agent.fn` names. Raises ConfigError about the setting `key` if it cannot be called as an agent."""
    environment, (file, name) = package_of(spec, key), split_spec(spec, DEFAULT_FUNCTION)
    own = {COMMAND: program_agent, COMPLETION: completion_agent}
    if spec in own:
        function = own[spec](settings)
    elif environment is not None:
        function = environment.agent()
    else:
        loaded = load_import_path(spec, key) if is_import_path(spec) else load_function(file, name, key)
        function = agent_function(loaded, key, settings.whole)
    try:
        with contextlib.suppress(ValueError):  # some callables have no signature to inspect
            inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(Problem(key, f"{name}(ctx, batch) cannot be called: {error}")) from error
    return Agent(function, Path(file), settings.timeout_s, is_async(function), settings.whole_group)


async def answers_of(
    agent: Agent, call: Callable[[], Awaitable[Any]], items: Sequence[AgentItem], has_sessions: bool
) -> Answers:
    """Return an answer (status, turns, message) for each item of a call of the agent, or one for all.

    `has_sessions`: each item has a session of its own.
    """
    path = agent.path  # whose lines errors name
    try:
        returned = await call()
        if agent.gets_group and isinstance(returned, list | tuple) and len(returned) == len(items) == 1:
            returned = returned[0]
        if isinstance(returned, Exception):
            return answer_of_exception(returned, path)
        if len(items) == 1:
            returned = with_chosen_turns(returned, items[0])
        recorded = recorded_results(returned, len(items)) if has_sessions or len(items) == 1 else None
        if recorded is not None:
            return [
                answer_of_exception(one, path) if isinstance(one, Exception) else ("ok", None, "", *one)
                for one in recorded
            ]
        return [
            ("error", None, str(turns)) if isinstance(turns, BadTrajectory) else ("ok", turns, "")
            for turns in plain_results(returned, items)
        ]
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a SystemExit would end the event loop
        return answer_of_exception(error, path)


def answer_of_exception(error: BaseException, path: Path) -> Answer:
    """Return the answer for an exception: "filtered" if it is the refusal of a request beyond a limit."""
    is_refusal = vars(error).get("code") in (CONTEXT_FULL, REQUESTS_SPENT, TOKENS_SPENT)
    text = str(error) if isinstance(error, BadTrajectory) else describe_error(error, path)
    return "filtered" if is_refusal else "error", None, text[:MAX_TEXT]


async def wait_within(task: asyncio.Future[Any], clock: RunningClock, ends_at: float) -> None:
    """Wait until a task is done, but at most until the time `ends_at` of a clock."""
    left_s = ends_at - clock.now()
    while not task.done() and left_s > 0:
        await asyncio.wait({task}, timeout=max(left_s, _LOOK_S) if clock.is_paused else left_s)
        left_s = ends_at - clock.now()


@dataclass(frozen=True)
class Agent:
    function: Callable[..., Any]
    path: Path  # of the user's file
    timeout_s: float
    is_async: bool
    gets_group: bool  # all samples of a prompt, perhaps one


class _Runner:
    """Runs the agents of all sources for chunks of calls, several at the same time, and sends their answers."""

    def __init__(self, connection: Connection, agents: Mapping[str, Agent], copies: ForkedChildren):
        self._connection, self._agents, self._copies = connection, agents, copies
        self._longest_s = max(agent.timeout_s for agent in agents.values())
        self._loop = new_event_loop(copies.exit_if_child)
        # The item of each task, to find the one that blocks the loop.
        self._positions: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._loop.set_task_factory(self._task_factory)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._thread_of: dict[int, int] = {}  # position -> the thread that runs a plain function
        self._open: set[int] = set()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._n_ending = 0  # cancelled agents that have not ended
        self._clock = RunningClock()  # which the time limits count
        self._inbox: SimpleQueue[list[tuple[int, bytes]] | None] = SimpleQueue()  # chunks; None at the end
        self._outbox: SimpleQueue[memoryview | None] = SimpleQueue()  # pickled answers; None ends the sender
        self._answering = threading.Lock()
        self._stuck_threads = False
        self._ticked: float | None = None  # time (of the clock) of the loop's last iteration; None while no agent runs
        self._idle: asyncio.Future[None] | None = None  # is done when no agent runs
        self._sender = threading.Thread(target=self._send_answers, daemon=True, name="agent-answers")
        self._sender.start()
        for target in (self._receive_messages, self._watch_event_loop):
            threading.Thread(target=target, daemon=True, name=f"agent{target.__name__}").start()

    def serve(self) -> None:
        """Run the agents of all chunks that the driver sends.

        If an agent still runs in a thread after its time limit, it keeps a thread that later items need. So the process
        exits as soon as no other agent runs. Another process runs the chunks that this process has not started.
        """
        while True:
            try:
                self._loop.run_until_complete(self._run_until_idle(self._inbox.get()))
            except EOFError:
                self._loop.run_until_complete(self._cancel_agents())
                raise
            self._ticked = None
            if self._stuck_threads:
                self._outbox.put(ForkingPickler.dumps(("left", None)))
                self._send_answers_and_exit()

    async def _cancel_agents(self) -> None:
        """Cancel all agents, and wait a while until they have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_END_S)

    async def _run_until_idle(self, chunk: list[tuple[int, bytes]] | None) -> None:
        """Run the agents of a chunk, and of the chunks that arrive meanwhile, until no agent runs."""
        idle = self._idle = self._loop.create_future()
        ticking = asyncio.ensure_future(self._record_ticks())
        try:
            self._start_chunk(chunk)
            await idle
        finally:
            self._idle = None
            ticking.cancel()

    def _receive_messages(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if isinstance(message, list):
                    self._inbox.put(message)
                    self._loop.call_soon_threadsafe(self._start_arrived_chunks)
                elif message[0] == SUSPEND:
                    self._clock.pause(message[1])
                else:
                    self._clock.resume(message[1])
        self._inbox.put(None)
        self._loop.call_soon_threadsafe(self._start_arrived_chunks)

    def _send_answers(self) -> None:
        """Send the answers. This runs in a thread, which blocks while the driver trains and does not read."""
        with contextlib.suppress(OSError):  # the driver has closed the connection
            while (answer := self._outbox.get()) is not None:
                self._connection.send_bytes(answer)

    def _send_answers_and_exit(self) -> NoReturn:
        self._outbox.put(None)
        self._sender.join()
        os._exit(0)

    def _start_arrived_chunks(self) -> None:
        """Start the agents of the chunks that have arrived. If no agent runs, leave the chunks to `serve`."""
        with contextlib.suppress(Empty):
            while self._idle is not None and not self._idle.done():
                self._start_chunk(self._inbox.get_nowait())

    def _start_chunk(self, chunk: list[tuple[int, bytes]] | None) -> None:
        if chunk is None:
            assert self._idle is not None
            self._idle.set_exception(EOFError("the driver has closed the connection"))
        else:
            self._open.update(position for position, _ in chunk)
            self._spawn(self._start_calls(chunk))
            self._wake_if_idle()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    def _wake_if_idle(self) -> None:
        """End `_run_until_idle` if no agent runs."""
        if not self._open and not self._n_ending and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _start_calls(self, chunk: list[tuple[int, bytes]]) -> None:
        """Start all calls of a chunk, with _START_ITERATIONS iterations of the event loop after each."""
        began_at = self._clock.now()
        for position, payload in chunk:
            self._spawn(self._run_call(position, payload, began_at))
            for _ in range(_START_ITERATIONS):
                await asyncio.sleep(0)

    async def _run_call(self, position: int, payload: bytes, began_at: float) -> None:
        """Run a call and send its answer, or a timeout. `began_at` is a time of `self._clock`."""
        _position.set(position)
        task: asyncio.Future[Any] | None = None
        agent = next(iter(self._agents.values()))  # for an error of unpickling
        try:
            context, items = pickle.loads(payload)
            agent = self._agents[items[0].source]
            task = asyncio.ensure_future(self._call_agent(agent, context, items))
            await wait_within(task, self._clock, began_at + agent.timeout_s)
            if task.done():
                answer = task.result()
            else:
                task.cancel()
                self._stuck_threads = self._stuck_threads or not agent.is_async
                place = self._describe_waiting_line(task, position, agent.path)
                answer = "timeout", None, f"not finished within {agent.timeout_s:g} s (agent.timeout_s){place}"
        except BaseException as error:
            answer = answer_of_exception(error, agent.path)
        self._send_answer(position, answer)
        if task is not None and not task.done():  # it may have files to remove
            self._n_ending += 1
            await asyncio.wait({task}, timeout=_END_S)
            self._n_ending -= 1
        self._wake_if_idle()

    async def _call_agent(self, agent: Agent, context: AgentContext, items: list[AgentItem]) -> Answers:
        """Call the agent, and return an answer (status, turns, message) for each item, or one for all."""
        batch, has_sessions = AgentBatch.of_items(items), bool(context.sessions)
        return await answers_of(agent, lambda: self._returned(agent, context, batch), items, has_sessions)

    async def _returned(self, agent: Agent, context: AgentContext, batch: AgentBatch) -> Any:
        with self._copies.guard_user_code():
            if agent.is_async:
                return await agent.function(context, batch)
            here, call = contextvars.copy_context(), partial(self._call_in_thread, agent.function, context, batch)
            returned = await self._loop.run_in_executor(self._threads, lambda: here.run(call))
            return await returned if inspect.isawaitable(returned) else returned

    def _call_in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function that is not async. During the call, `self._thread_of` has the id of its thread."""
        position = _position.get()
        assert position is not None
        self._thread_of[position] = threading.get_ident()
        try:
            return function(*given)
        finally:
            del self._thread_of[position]

    def _describe_waiting_line(self, task: asyncio.Task[Any], position: int, path: Path) -> str:
        """Return the line in the user's file at which an agent waits, such as "; it waits at agent.py:12", or ""."""
        lines = []
        at: Any = task.get_coro()
        while at is not None:  # from the coroutine of the task to the one that it waits for
            frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None)
            lines += [frame.f_lineno] if frame is not None and frame.f_code.co_filename == str(path) else []
            at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None)
        frame = sys._current_frames().get(self._thread_of.get(position, 0))
        if frame is not None:
            stack = traceback.extract_stack(frame)
            lines = [line.lineno for line in stack if line.filename == str(path)]
        return f"; it waits at {path.name}:{lines[-1]}" if lines else ""

    def _send_answer(self, position: int, answer: Answers) -> None:
        """Send the answer to a call, unless one was sent already."""
        with self._answering:
            if position in self._open:
                self._open.discard(position)
                self._outbox.put(ForkingPickler.dumps((position, answer)))

    # -- detection of an agent that blocks the event loop -----------------------------------------------------------

    def _task_factory(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """Create a task of the event loop, and record the call to which the task belongs."""
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._positions[task] = _position.get()
        return task

    async def _record_ticks(self) -> None:
        """Record the time every _TICK_S seconds, as a sign that the event loop is not blocked."""
        while True:
            self._ticked = self._clock.now()
            await asyncio.sleep(_TICK_S)

    def _watch_event_loop(self) -> None:
        """Watch in a thread whether an agent blocks the event loop.

        The first time that an async agent blocks the loop for _BLOCKED_S seconds, a message is printed. If an agent
        blocks the loop for longer than its time limit, "timeout" is sent as the answer for its item, and the process
        ends. While the time limits are paused, it does not end.
        """
        is_reported = False
        main_thread = threading.main_thread().ident
        while True:
            time.sleep(_TICK_S)
            ticked = self._ticked
            blocked_s = 0.0 if ticked is None else self._clock.now() - ticked
            if blocked_s < _BLOCKED_S and blocked_s < self._longest_s:
                continue
            frame = sys._current_frames().get(main_thread or 0)
            where = traceback.extract_stack(frame)[-1] if frame is not None else None
            place = "" if where is None else f" at {Path(where.filename).name}:{where.lineno}"
            if not is_reported and any(agent.is_async for agent in self._agents.values()):
                is_reported = True
                print(_BLOCKS.format(place), flush=True)
            # Code that does not release the GIL also delays the thread that reads messages.
            if blocked_s < self._longest_s or self._clock.is_paused or self._connection.poll():
                continue
            task = asyncio.current_task(self._loop)
            position = None if task is None else self._positions.get(task)
            if position is not None:
                text = f"it blocked the event loop for {self._longest_s:g} s (agent.timeout_s){place}"
                self._send_answer(position, ("timeout", None, text))
            self._send_answers_and_exit()
