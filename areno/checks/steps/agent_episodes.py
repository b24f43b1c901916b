"""The episodes of agents in a watched run: what the engine sampled for each request, and what agents returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.agents.running import AgentOutcome
from areno.types import GenerationOutput, GenerationRequest


@dataclass(frozen=True)
class Turn:
    """A request as the engine has decoded it: what the model read, and what it wrote."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    temperature: float
    is_forced: bool  # a grammar allowed one call alone, so its tokens are not trained
    is_greedy: bool

    def begins(self, tokens: Sequence[int]) -> bool:
        whole = [*self.prompt, *self.tokens]
        return list(tokens[: len(whole)]) == whole

    @property
    def span(self) -> slice:
        return slice(len(self.prompt), len(self.prompt) + len(self.tokens))


@dataclass
class Episodes:
    """The turns of each step, and the reward that each agent returned, by (index of its prompt, of its sample).

    A reward of None: the agent returned none, so one that its session was told counts.
    """

    turns: dict[int, list[Turn]] = field(default_factory=dict)
    rewards: dict[int, dict[tuple[int, int], float | None]] = field(default_factory=dict)
    turn_rewards: dict[int, dict[tuple[int, int], list[float] | None]] = field(default_factory=dict)


@contextmanager
def recorded_episodes(setup: Any, step: Callable[[], int]) -> Iterator[Episodes]:
    """Record what the engine samples and what agents return inside of a `with` block. `step` returns the run's step."""
    engine, agents, found = setup.trainer.engine, setup.agents, Episodes()
    submit, deliver, run_agents = engine.submit, engine._deliver, agents.submit
    asked: dict[int, GenerationRequest] = {}

    def watched_submit(requests: Iterable[GenerationRequest]) -> None:
        requests = list(requests)
        asked.update({request.request_id: request for request in requests})
        submit(requests)

    def watched_deliver(outputs: Iterable[GenerationOutput]) -> None:
        def seen() -> Iterator[GenerationOutput]:
            for output in outputs:
                if output.finish_reason is not None and output.request_id in asked:
                    found.turns.setdefault(step(), []).append(_turn(asked[output.request_id], output))
                yield output

        deliver(seen())

    def watched_agents(items: Sequence[Any], context: Any, on_done: Callable[[int, AgentOutcome], object]) -> None:
        def done(index: int, outcome: AgentOutcome) -> None:
            found.rewards.setdefault(step(), {})[items[index].key] = _returned_reward(outcome)
            found.turn_rewards.setdefault(step(), {})[items[index].key] = _returned_turn_rewards(outcome)
            on_done(index, outcome)

        run_agents(items, context, done)

    engine.submit, engine._deliver, agents.submit = watched_submit, watched_deliver, watched_agents
    try:
        yield found
    finally:
        del engine.submit, engine._deliver, agents.submit


def _turn(request: GenerationRequest, output: GenerationOutput) -> Turn:
    return Turn(
        list(request.prompt),
        np.asarray(output.tokens).tolist(),
        np.asarray(output.logprobs).tolist(),
        request.params.logprob_temperature,
        request.grammar is not None,
        request.params.is_greedy,
    )


def _returned_reward(outcome: AgentOutcome) -> float | None:
    if outcome.turns:
        given = outcome.turns[-1].get("outcome")
        return 0.0 if given is None else given[0]
    return None if outcome.reward is None else outcome.reward[0]


def _returned_turn_rewards(outcome: AgentOutcome) -> list[float] | None:
    if outcome.turns:
        return [turn.get("reward", 0.0) for turn in outcome.turns]
    return list(outcome.turn_rewards) if isinstance(outcome.turn_rewards, list) else None
