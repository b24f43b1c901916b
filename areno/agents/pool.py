"""Run agents in processes of their own, on the driver's side.

`AgentPool` starts the processes, sends them items and collects trajectories. A process runs many items at once
(process.py). User code in it can print, hang, crash or leak without harm to the run. An item whose agent fails or takes
too long has no trajectory, and the other items continue.
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
from areno.files.user_code import resolve_spec
from areno.user_processes.pool import Failure, WorkerPool
from areno.user_processes.worker import Worker

_KEY = "agent.fn"
_GROUPS = (math.inf, 8, 1)  # items sent to a process at once: at first, then after each process that died on them


@dataclass(slots=True)
class AgentOutcome:
    """The result of one item.

    Attributes:
        status: "ok", "error", "timeout", or "filtered" if the agent gave up because its conversation filled the
            context.
        turns: The turns of the trajectory. None unless the status is "ok".
        message: The reason for any other status.
    """

    status: Literal["ok", "error", "timeout", "filtered"]
    turns: list[PlainTurn] | None = None
    message: str = ""


class AgentPool(WorkerPool[AgentConfig]):
    """The processes that run the agent.

    Args:
        config: The section `agent` of the configuration.
    """

    section, module = "agent", "areno.agents.process"
    ended_text, late_text = "its process ended ({})", "its process did not answer within {:g} s (agent.timeout_s)"
    import_text = "importing: {}"

    def __init__(self, config: AgentConfig):
        assert config.fn is not None
        super().__init__(config, config.fn)

    def _build_first_message(self) -> tuple[Any, ...]:
        """Return the agent, its setting and its time limit, for each process."""
        found = self.name if self.name.startswith(VERIFIERS) else resolve_spec(self.name, DEFAULT_FUNCTION, _KEY)
        return found, _KEY, self.config.timeout_s

    def run(
        self,
        items: Sequence[AgentItem],
        context: AgentContext,
        on_wait: Callable[[int], object] = lambda n: None,
        on_done: Callable[[int, AgentOutcome], object] = lambda place, outcome: None,
    ) -> list[AgentOutcome]:
        """Run the agent for all items.

        Args:
            items: The items.
            context: Address and key of the session's endpoint.
            on_wait: Called with the number of finished items, at least every half second.
            on_done: Called with the index of an item and its outcome as soon as it is finished. Its exception ends the
                call.

        Returns:
            The outcome of each item, in order.
        """
        running = _Running(items, context, self.n_workers, on_done)
        self._run_calls(running, lambda: on_wait(len(items) - running.n_open))
        return running.outcomes


class _Running:
    """The items of one call of `run`.

    Attributes:
        outcomes: Outcome of each item, None while it is missing.
        n_open: Number of items without an outcome.
        groups: Groups of item indices that wait to be sent to a process.
    """

    def __init__(
        self,
        items: Sequence[AgentItem],
        context: AgentContext,
        n_workers: int,
        on_done: Callable[[int, AgentOutcome], object],
    ):
        self._on_done = on_done
        self.outcomes: list[Any] = [None] * len(items)
        self.n_open = len(items)
        self._n_losses = [0] * len(items)  # number of processes that died while they ran the item
        self._items, self._context = items, context
        shares = [list(range(first, len(items), n_workers)) for first in range(n_workers)]
        self.groups = deque(share for share in shares if share)

    def next_chunk(self, n_workers: int, is_async: bool) -> list[tuple[int, bytes]]:
        """Return the next group of items to send, see `Work`."""
        chunk: list[tuple[int, bytes]] = []
        while self.groups and not chunk:
            # Pickled only now, so that the first process begins while the items of the others are pickled.
            payloads = [(position, self._payload(position)) for position in self.groups.popleft()]
            chunk = [(position, payload) for position, payload in payloads if payload is not None]
        return chunk

    def _payload(self, position: int) -> bytes | None:
        """Pickle an item, or record an error if it cannot be pickled."""
        try:
            return pickle.dumps((self._context, self._items[position]), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object of the dataset may raise anything when it is pickled
            text = f"its item cannot be sent to the agent process: {type(error).__name__}: {error}"
            self._settle(position, AgentOutcome("error", None, text))
            return None

    def answered(self, position: int, answer: tuple[Any, ...]) -> None:
        """Record the outcome that a process sent."""
        self._settle(position, AgentOutcome(*answer))

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        """Send the items of a process that died to another one, or record the failure."""
        if worker.chunk:
            self._run_again(list(worker.chunk), AgentOutcome(status, None, text))

    def _settle(self, position: int, outcome: AgentOutcome) -> None:
        """Record the outcome of an item."""
        self.outcomes[position] = outcome
        self.n_open -= 1
        self._on_done(position, outcome)

    def _run_again(self, positions: list[int], outcome: AgentOutcome) -> None:
        """Queue the items of a process that died in smaller groups.

        An item that killed too many processes gets `outcome`.
        """
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
