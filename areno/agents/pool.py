"""The driver's half of running agents: starts their processes, deals items out, collects trajectories.

A user's agent runs in processes of its own (process.py is what runs there), each with many items at once. So it can
print, hang, crash or leak without harm to the run. An item whose agent fails or takes too long has no trajectory; the
others go on.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areno.agents.process import DEFAULT_FUNCTION
from areno.agents.trajectories import AgentContext, AgentItem, PlainTurn
from areno.config.rollout import VERIFIERS, AgentConfig
from areno.files.user_code import found_file
from areno.user_processes.pool import Failure, WorkerPool
from areno.user_processes.worker import Worker

_KEY = "agent.fn"
_GROUPS = (math.inf, 8, 1)  # items sent at once to a process: at first, and after each process that was lost over them


@dataclass(slots=True)
class AgentOutcome:
    """What came of one item. turns: None unless status is "ok"; `message` then says why.

    filtered: the agent gave up when its conversation had filled the context.
    """

    status: Literal["ok", "error", "timeout", "filtered"]
    turns: list[PlainTurn] | None = None
    message: str = ""


class AgentPool(WorkerPool[AgentConfig]):
    """The processes that run the agent."""

    noun, serves = "agent", "areno.agents.process"
    ended, late = "its process ended ({})", "its process did not answer within {:g} s (agent.timeout_s)"
    importing = "importing: {}"

    def __init__(self, config: AgentConfig):
        assert config.fn is not None
        super().__init__(config, config.fn)

    def _opening(self) -> tuple[Any, ...]:
        found = self.name if self.name.startswith(VERIFIERS) else found_file(self.name, DEFAULT_FUNCTION, _KEY)
        return found, _KEY, self.config.timeout_s

    def run(
        self,
        items: Sequence[AgentItem],
        context: AgentContext,
        on_wait: Callable[[int], object] = lambda n: None,
        on_done: Callable[[int, AgentOutcome], object] = lambda place, outcome: None,
    ) -> list[AgentOutcome]:
        """The outcome of every item, in order.

        on_wait: called with how many are done, at least every half second. on_done: called with the place of an item
        and its outcome, as soon as that is there. What it raises ends the call.
        """
        running = _Running(items, context, self.n_workers, on_done)
        self._do(running, lambda: on_wait(len(items) - running.n_open))
        return running.outcomes


class _Running:
    """The items of one call of `run`. groups: positions of items that wait to be sent to a process."""

    def __init__(
        self, items: Sequence[AgentItem], context: AgentContext, n_workers: int,
        on_done: Callable[[int, AgentOutcome], object],
    ):  # fmt: skip
        self._on_done = on_done
        self.outcomes: list[Any] = [None] * len(items)
        self.n_open = len(items)
        self._n_losses = [0] * len(items)  # processes that were lost while they ran the item
        self._items, self._context = items, context
        shares = [list(range(first, len(items), n_workers)) for first in range(n_workers)]
        self.groups = deque(share for share in shares if share)

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        chunk: list[tuple[int, bytes]] = []
        while self.groups and not chunk:
            # Made when they are sent: the first process begins while those of the others are made.
            payloads = [(position, self._payload(position)) for position in self.groups.popleft()]
            chunk = [(position, payload) for position, payload in payloads if payload is not None]
        return chunk

    def _payload(self, position: int) -> bytes | None:
        try:
            return pickle.dumps((self._context, self._items[position]), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object of the dataset may raise anything when it is pickled
            text = f"its item cannot be sent to the agent process: {type(error).__name__}: {error}"
            self._settle(position, AgentOutcome("error", None, text))
            return None

    def answered(self, position: int, answer: tuple[Any, ...]) -> None:
        self._settle(position, AgentOutcome(*answer))

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        if worker.chunk:
            self._run_again(list(worker.chunk), AgentOutcome(status, None, text))

    def _settle(self, position: int, outcome: AgentOutcome) -> None:
        self.outcomes[position] = outcome
        self.n_open -= 1
        self._on_done(position, outcome)

    def _run_again(self, positions: list[int], outcome: AgentOutcome) -> None:
        """The process of these items was lost over one of them. outcome: of an item that loses one process too many."""
        again: list[int] = []
        for position in positions:
            self._n_losses[position] += 1
            if self._n_losses[position] == len(_GROUPS) or len(positions) == 1:
                self._settle(position, outcome)
            else:
                again.append(position)
        if again:
            size = int(min(len(again), *(_GROUPS[self._n_losses[position]] for position in again)))
            self.groups.extend(again[at : at + size] for at in range(0, len(again), size))
