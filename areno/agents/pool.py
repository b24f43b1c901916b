"""The pool of agent processes, which the driver (the main process of the training run) uses to run agents.

`AgentPool` starts the processes, sends items to them and collects the trajectories. An item is the task for one
sample of a prompt. Each process runs many items at once (areno/agents/process.py). The user's code can print, hang,
crash or leak memory in its process without harm to the training run. An item has no trajectory if its agent fails or
exceeds the time limit. The other items continue.
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
# The largest number of items that a process gets at once: at first, then after one and after two lost processes.
_GROUPS = (math.inf, 8, 1)


@dataclass(slots=True)
class AgentOutcome:
    """The result of running the agent for one item.

    Attributes:
        status: "ok", "error", "timeout" or "filtered". "filtered" means that the agent failed because its conversation
            fills the model's context.
        turns: The turns of the trajectory, or None unless the status is "ok".
        message: The reason for any status other than "ok". "" for "ok".
        span: (start, end) of the agent's run, as times of areno.trace. None if its process gave no answer.
    """

    status: Literal["ok", "error", "timeout", "filtered"]
    turns: list[PlainTurn] | None = None
    message: str = ""
    span: tuple[int, int] | None = None


class AgentPool(WorkerPool[AgentConfig]):
    """A pool of processes that run the user's agent. Use it in a `with` block.

    Args:
        config: The section `agent` of the settings.
    """

    section, module = "agent", "areno.agents.process"
    ended_text, late_text = "its process ended ({})", "its process did not answer within {:g} s (agent.timeout_s)"
    import_text = "importing: {}"

    def __init__(self, config: AgentConfig):
        assert config.fn is not None
        super().__init__(config, config.fn)

    def _build_first_message(self) -> tuple[Any, ...]:
        """Return the first message to each process: (agent function, setting, time limit in seconds).

        The agent function is the text "FILE:FUNCTION" or "verifiers:NAME". The second element is the name of the
        setting, for error messages. Raises ConfigError if the file of the agent function does not exist or is not
        valid Python.
        """
        found = self.name if self.name.startswith(VERIFIERS) else resolve_spec(self.name, DEFAULT_FUNCTION, _KEY)
        return found, _KEY, self.config.timeout_s

    def run(
        self,
        items: Sequence[AgentItem],
        context: AgentContext,
        on_wait: Callable[[int], object] = lambda n: None,
        on_done: Callable[[int, AgentOutcome], object] = lambda place, outcome: None,
    ) -> list[AgentOutcome]:
        """Run the agent for all items, and wait until each item has an outcome.

        Args:
            items: The items to run.
            context: The address and the key of the session's endpoint, to which the agent sends its requests.
            on_wait: Function that is called with the number of finished items, at least every half second.
            on_done: Function that is called with the index of an item in `items` and its outcome, as soon as the item
                is finished. If `on_done` raises an exception, all unfinished items are stopped and the exception is
                passed on.

        Returns:
            The outcome of each item, in the order of `items`.

        Raises:
            EngineError: The processes are not running.
            ConfigError: A process cannot import the agent.
        """
        running = _Running(items, context, self.n_workers, on_done)
        self._run_calls(running, lambda: on_wait(len(items) - running.n_open))
        return running.outcomes


class _Running:
    """The state of one call of `AgentPool.run`.

    Attributes:
        outcomes: The outcome of each item, or None while the item is not finished.
        n_open: The number of items without an outcome.
        groups: Lists of item indices that must be sent to a process, for the first time or again. All items of a
            list are sent to the same process.
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
        """Take the next group of items to send to a process. Both arguments are ignored.

        Returns a tuple (index of the item, pickled (context, item)) for each item of the group that can be pickled.
        Returns an empty list if no group is left.
        """
        chunk: list[tuple[int, bytes]] = []
        while self.groups and not chunk:
            # Pickled only now, so that the first process begins while the items of the others are pickled.
            payloads = [(position, self._payload(position)) for position in self.groups.popleft()]
            chunk = [(position, payload) for position, payload in payloads if payload is not None]
        return chunk

    def _payload(self, position: int) -> bytes | None:
        """Return the pickled tuple (context, item) for the item with index `position`.

        If the item cannot be pickled, record an error as its outcome and return None.
        """
        try:
            return pickle.dumps((self._context, self._items[position]), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # an object of the dataset may raise anything when it is pickled
            text = f"its item cannot be sent to the agent process: {type(error).__name__}: {error}"
            self._settle(position, AgentOutcome("error", None, text))
            return None

    def answered(self, position: int, answer: tuple[Any, ...], span: tuple[int, int]) -> None:
        """Record the outcome that a process sent for the item with index `position`.

        `answer` is the tuple (status, turns, message), and `span` is (start, end) of the call, see `AgentOutcome`.
        """
        self._settle(position, AgentOutcome(*answer, span=span))

    def lost(self, worker: Worker, status: Failure, text: str) -> None:
        """Handle a process that died or hung, by sending its unfinished items again or recording that they failed.

        Args:
            worker: The process. `worker.chunk` has the indices of its unfinished items.
            status: The status of items that are not sent again.
            text: The message of items that are not sent again.
        """
        if worker.chunk:
            self._run_again(list(worker.chunk), AgentOutcome(status, None, text))

    def _settle(self, position: int, outcome: AgentOutcome) -> None:
        """Record the outcome of the item with index `position`, and report it to `self._on_done`."""
        self.outcomes[position] = outcome
        self.n_open -= 1
        self._on_done(position, outcome)

    def _run_again(self, positions: list[int], outcome: AgentOutcome) -> None:
        """Requeue the unfinished items of a process that died or hung, in smaller groups.

        `positions` are the indices of these items. An item gets `outcome` instead if it was the only unfinished item
        of the process, or if this is the third process that died or hung while it ran the item.
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
