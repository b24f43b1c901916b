"""The pool of agent processes, which the driver (the main process of the training run) uses to run agents.

An item is the task for one sample of a prompt. Each process runs many items at once (areno/agents/process.py). Items
can be added while others run, and continue while the driver trains. The user's code can print, hang, crash or leak
memory in its process without harm to the training run. An item has no trajectory if its agent fails or exceeds the time
limit. The other items continue.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno import heartbeat
from areno.agents.process import DEFAULT_FUNCTION, RESUME, SUSPEND
from areno.agents.running import AgentOutcome, AgentRunner, ContextFor, OnDone, calls_of
from areno.agents.trajectories import AgentItem
from areno.config.agent import COMMAND, COMPLETION, AgentConfig
from areno.config.sources import agent_key
from areno.errors import EngineError
from areno.files.user_code import is_import_path, resolve_spec
from areno.user_processes.pool import Failure, WorkerPool, default_workers
from areno.user_processes.worker import Worker

_MAX_DEFAULT_WORKERS = 16  # each process imports the user's code and a client
# The largest number of items that a process gets at once: at first, then after one and after two lost processes.
_GROUPS = (math.inf, 8, 1)


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the agent function that has no outcome yet. Its items are one, a group or a batch."""

    items: Sequence[AgentItem]
    context: ContextFor
    first_index: int  # index of its first item among those queued together
    on_done: OnDone
    n_losses: int = 0  # processes that died or hung while they ran it


def loadable_agents(agents: Mapping[str, AgentConfig]) -> dict[str, tuple[str, str, AgentConfig]]:
    """Return source -> (agent.fn, with an absolute path if it names a file, the setting that names it, the section).

    Raises ConfigError if there is no such file.
    """
    found = {}
    for source, agent in agents.items():
        key, name = agent_key(source), str(agent.fn)
        is_name = name in (COMMAND, COMPLETION) or agent.is_environment or is_import_path(name)
        found[source] = name if is_name else resolve_spec(name, DEFAULT_FUNCTION, key), key, agent
    return found


class AgentPool(WorkerPool[AgentConfig], AgentRunner):
    """A pool of processes that run the agents of all sources. Use it in a `with` block.

    `agents` has the settings of each source, or of "" if there is one. Each of `n_devices` device workers needs a CPU
    core, so the default number of processes is lower.
    """

    section, module = "agent", "areno.agents.process"
    ended_text, late_text = "its process ended ({})", "its process did not answer within {:g} s (agent.timeout_s)"
    import_text = "importing: {}"

    def __init__(self, agents: Mapping[str, AgentConfig], n_devices: int = 0):
        config, names = next(iter(agents.values())), [agent.fn or "" for agent in agents.values()]
        n_workers = config.workers or min(_MAX_DEFAULT_WORKERS, default_workers(n_devices))
        super().__init__(config, " + ".join(dict.fromkeys(names)), n_workers)
        self._agents, self._longest_s = agents, max(agent.timeout_s for agent in agents.values())
        self._running = _PendingCalls(self.n_workers)
        self._suspended_at: float | None = None

    def _build_first_message(self) -> dict[str, tuple[str, str, AgentConfig]]:
        return loadable_agents(self._agents)

    def submit(self, items: Sequence[AgentItem], context: ContextFor, on_done: OnDone) -> None:
        self._running.add(calls_of(items, self._agents), context, on_done)

    def run_until(self, is_enough: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        if not self.workers:
            raise EngineError("the {} processes are not running; call start() first", self.section)
        try:
            while not is_enough():
                self._send_items()
                self.wait_for_answers(self._running)
                heartbeat.beat()  # this loop enforces the time limit of the agents, so waiting is no hang
                on_wait()
        except BaseException:
            self.restart_busy_workers()  # a late answer would be taken for the answer to a later item
            raise

    def _send_items(self) -> None:
        """Send the queued items to the processes, also to processes that run other items."""
        while (found := self._running.pop_ready_group(self.workers)) is not None:
            worker, numbers = found
            worker.send_calls(self._running.payloads(numbers), self._longest_s)

    def suspend(self) -> None:
        self._suspended_at = time.monotonic()
        for worker in self.workers:
            worker.send_message((SUSPEND, self._suspended_at))

    def resume(self) -> None:
        if self._suspended_at is None:
            return
        now = time.monotonic()
        for worker in self.workers:
            worker.postpone_deadlines(now - self._suspended_at)
            worker.send_message((RESUME, now))
        self._suspended_at = None

    def restart_busy_workers(self) -> None:
        super().restart_busy_workers()
        self._running = _PendingCalls(self.n_workers)
        self.resume()


class _PendingCalls:
    """The queued and the running calls. `groups` has the queued ones. All calls of a group go to the same process."""

    def __init__(self, n_workers: int):
        self._n_workers, self._next = n_workers, 0
        self._calls: dict[int, _Call] = {}  # the calls without an outcome
        self.groups: deque[list[int]] = deque()

    def add(self, calls: Sequence[Sequence[AgentItem]], context: ContextFor, on_done: OnDone) -> None:
        """Queue calls, each given as a list of items. The calls are divided into one group for each process."""
        if not self._calls:
            self._next = 0
        first, index = self._next, 0
        for items in calls:
            self._calls[self._next] = _Call(items, context, index, on_done)
            self._next, index = self._next + 1, index + len(items)
        shares = [list(range(first + start, self._next, self._n_workers)) for start in range(self._n_workers)]
        self.groups += [share for share in shares if share]

    def pop_ready_group(self, workers: Sequence[Worker]) -> tuple[Worker, list[int]] | None:
        """Remove a group that can be sent now, and return it with its process. None if all groups have to wait.

        A group of calls that were in a process that died or hung is only sent to an idle process, so that the call at
        fault is found. Other groups are sent to the process with the fewest calls, which may be busy.
        """
        idle = [worker for worker in workers if worker.is_idle]
        suspects = next((group for group in self.groups if self._was_in_lost_process(group)), None)
        if suspects is not None and idle:
            self.groups.remove(suspects)
            return idle[0], suspects
        fresh = next((group for group in self.groups if not self._was_in_lost_process(group)), None)
        free = [worker for worker in workers if not self._was_in_lost_process(worker.chunk)]
        if fresh is None or not free:
            return None
        worker = min(free, key=lambda worker: len(worker.chunk))
        if worker.is_starting:
            return None
        self.groups.remove(fresh)
        return worker, fresh

    def _was_in_lost_process(self, numbers: Iterable[int]) -> bool:
        return any(self._calls[number].n_losses for number in numbers)

    def payloads(self, numbers: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return (number, pickled (context, items)) of each call. Leaves out calls that cannot be pickled."""
        # Pickled only now, so that the first process begins while the items of the others are pickled.
        payloads = [(number, self._payload(number)) for number in numbers]
        return [(number, payload) for number, payload in payloads if payload is not None]

    def _payload(self, number: int) -> bytes | None:
        """Return the pickled call. If that fails, record an error as the outcome of its items."""
        try:
            call = self._calls[number]
            return pickle.dumps((call.context(call.items), call.items), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object of the dataset may raise anything when it is pickled
            text = f"its item cannot be sent to the agent process: {type(error).__name__}: {error}"
            self._fail(number, AgentOutcome("error", None, text))
            return None

    def record_answer(self, position: int, answer: Any, span: tuple[int, int]) -> None:
        """Record the answer to a call: the fields of an outcome for all its items, or a list with one for each."""
        answers = answer if isinstance(answer, list) else [answer] * len(self._calls[position].items)
        self._finish_call(position, [AgentOutcome(*each, span=span) for each in answers])

    def handle_lost_worker(self, worker: Worker, status: Failure, text: str) -> None:
        """Requeue the unfinished items of a process that ended or hung, or record that they failed."""
        if worker.chunk and worker.has_left:
            self.groups.appendleft(list(worker.chunk))
        elif worker.chunk:
            self._requeue(list(worker.chunk), AgentOutcome(status, None, text))

    def _finish_call(self, number: int, outcomes: Sequence[AgentOutcome]) -> None:
        call = self._calls.pop(number)
        for index, outcome in enumerate(outcomes, call.first_index):
            call.on_done(index, outcome)

    def _fail(self, number: int, outcome: AgentOutcome) -> None:
        self._finish_call(number, [outcome] * len(self._calls[number].items))

    def _requeue(self, numbers: list[int], outcome: AgentOutcome) -> None:
        """Requeue the unfinished items of a process that died or hung, in smaller groups.

        An item is not requeued, but gets `outcome`, if it was the only unfinished item of the process, or if this is
        the third process that died or hung while it ran the item.
        """
        again: list[int] = []
        for number in numbers:
            self._calls[number].n_losses += 1
            if self._calls[number].n_losses == len(_GROUPS) or len(numbers) == 1:
                self._fail(number, outcome)
            else:
                again.append(number)
        if again:
            size = int(min(len(again), *(_GROUPS[self._calls[number].n_losses] for number in again)))
            self.groups.extend(again[at : at + size] for at in range(0, len(again), size))
