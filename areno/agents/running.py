"""What all ways to run agents share: the outcome of an item, and waiting for outcomes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from areno import heartbeat
from areno.agents.trajectories import AgentContext, AgentItem, PlainTurn, TurnRewards
from areno.config.agent import AgentConfig
from areno.engine.output_streams import RunningClock
from areno.types import ProgramEnd
from areno.user_processes.worker import OutputLogger

_POLL_S = 0.3


@dataclass(slots=True)
class AgentOutcome:
    """The result of running the agent for one item.

    If the status is "ok" and `turns` is None, those that the session of the sample has recorded count, with `reward`
    and `turn_rewards`. "filtered" means that the agent failed at a refused request: the context is full, or its budget
    is spent. `span` is (start, end) of the run, as times of areno.trace.
    """

    status: Literal["ok", "error", "timeout", "filtered"]
    turns: list[PlainTurn] | None = None
    message: str = ""  # why the status is not "ok"
    reward: tuple[float, dict[str, float]] | None = None
    program: ProgramEnd | None = None
    turn_rewards: TurnRewards = None
    span: tuple[int, int] | None = None  # None: the process gave no answer


OnDone = Callable[[int, AgentOutcome], object]
"""Receives the index of an item and its outcome."""

ContextFor = Callable[[Sequence[AgentItem]], AgentContext]
"""Makes the context for a call of the agent with these items. It is called again if the call starts again."""


def calls_of(items: Sequence[AgentItem], agents: Mapping[str, AgentConfig]) -> list[Sequence[AgentItem]]:
    """Return the items of each call of an agent function. `agents` has the settings of each source."""
    if items and agents[items[0].source].whole_batch:
        return [items]
    calls: list[Sequence[AgentItem]] = []
    for (source, _), group in itertools.groupby(items, key=lambda item: (item.source, item.prompt_index)):
        samples = list(group)
        calls += [samples] if agents[source].whole_group else [[item] for item in samples]
    return calls


class AgentRunner(ABC):
    """Runs the agents of items. `output` logs what they print."""

    output: OutputLogger

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until agents can run. Raises ConfigError if they cannot."""

    def announce(self, folder: Path) -> None:
        """Tell the user where agents are reached, if that is so. `folder` is that of the run."""
        return

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def submit(self, items: Sequence[AgentItem], context: ContextFor, on_done: OnDone) -> None:
        """Queue items. `on_done` is called only during `run_until` and `run`."""

    @abstractmethod
    def run_until(self, is_enough: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        """Run agents until `is_enough` returns True. The unfinished agents continue after that.

        `on_wait` is called at least every half second, and whenever an agent has ended. If an exception ends this
        method, all unfinished items are stopped.
        """

    @abstractmethod
    def suspend(self) -> None:
        """Pause the time limits of the agents until `resume`. Outcomes before that are collected later."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def restart_busy_workers(self) -> None:
        """Stop all unfinished items, which get no outcome."""

    def run(
        self,
        items: Sequence[AgentItem],
        context: ContextFor,
        on_wait: Callable[[int], object] = lambda n: None,
        on_done: OnDone = lambda index, outcome: None,
    ) -> list[AgentOutcome]:
        """Run the agent for all items, and return their outcomes in order. Items that `submit` queued also run.

        `on_wait` gets the number of finished items, at least every half second. If `on_done` raises an exception, all
        unfinished items are stopped.
        """
        found: dict[int, AgentOutcome] = {}

        def store_outcome(index: int, outcome: AgentOutcome) -> None:
            found[index] = outcome
            on_done(index, outcome)

        self.submit(items, context, store_outcome)
        self.run_until(lambda: len(found) == len(items), lambda: on_wait(len(found)))
        return [found[index] for index in range(len(items))]


class RunnerWithThreads(AgentRunner):
    """Base class for runners whose agents are in threads of this process, or outside of the run.

    A thread passes each outcome to `finish`. `clock` counts the time limits.
    """

    def __init__(self) -> None:
        self.output = OutputLogger("agent")
        self.clock = RunningClock()
        self._finished: SimpleQueue[tuple[int, Callable[[], object]]] = SimpleQueue()
        self.round = 0  # outcomes of an earlier one are ignored

    def wait_ready(self) -> None:
        pass

    def finish(self, of_round: int, on_done: OnDone, index: int, outcome: AgentOutcome) -> None:
        """Let `run_until` call `on_done`. `of_round` is `self.round` at the time of `submit`."""
        self._finished.put((of_round, lambda: on_done(index, outcome)))

    def look_at_limits(self) -> None:
        """End what is over its limit. This is called every fraction of a second while agents run."""

    def run_until(self, is_enough: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        try:
            while not is_enough():
                try:
                    of_round, call = self._finished.get(timeout=_POLL_S)
                    if of_round == self.round:
                        call()
                except Empty:
                    pass
                self.look_at_limits()
                heartbeat.beat()  # waiting is no hang
                on_wait()
        except BaseException:
            self.restart_busy_workers()
            raise

    def suspend(self) -> None:
        self.clock.pause()

    def resume(self) -> None:
        self.clock.resume()

    def restart_busy_workers(self) -> None:
        self.round += 1
        self.resume()
