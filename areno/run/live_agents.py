"""Agents whose samples live across steps, with rollout.max_head_offpolicyness above 0.

`LiveAgents` holds one rollout session, from the first step to the last. While models are trained, the session is
suspended: requests in progress are interrupted, new requests wait, and the time limits of agents and requests stand.
Each batch of prompts has a server of its own in the session, with the seed of the batch. An evaluation has one, too,
with its own sampling settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from areno.agents.pool import AgentOutcome, AgentPool
from areno.agents.proxy import SessionProxy
from areno.agents.trajectories import AgentContext, AgentItem
from areno.api.session import ProxySettings, RolloutSession
from areno.api.trainer import Trainer
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import GenerationConfig
from areno.plan.plan import sampling_params


class LiveAgents:
    """The rollout session of agents that live across steps, with its servers.

    Args:
        config: Settings of the run.
        trainer: The loaded models.
        pool: The agent processes.
        resources: Is closed when the steps of the run end, and ends the session.

    Attributes:
        finished: The outcomes that have not been read yet, as the arguments of `on_done` of `begin`.
        parked: The number of tokens of each sample that the last suspension has interrupted.
    """

    def __init__(self, config: PolicyExperimentConfig, trainer: Trainer, pool: AgentPool, resources: ExitStack):
        self._config, self._trainer, self._pool, self._resources = config, trainer, pool, resources
        self._session: RolloutSession | None = None
        self._servers: dict[int, SessionProxy] = {}  # by batch
        self.finished: deque[Any] = deque()
        self.parked: list[int] = []
        self._n_recomputed = 0

    @property
    def is_open(self) -> bool:
        """Whether the session is open."""
        return self._session is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let agents and their requests go on for the time of a `with` block. Opens the session if it is not open."""
        if self._session is None:
            session = self._trainer.rollout_session(sampling_params=sampling_params(self._config.gconfig), proxy=False)
            self._session = self._resources.enter_context(session)
            self._resources.callback(self._end)
        else:
            self._n_recomputed += sum(self.parked)
            self._session.resume()
            self._pool.resume()
        yield
        # After an exception, the agents and the session end.
        self._pool.suspend()
        self.parked = self._session.suspend()

    def _end(self) -> None:
        """Stop all agents. The session ends after that."""
        self._session = None
        self._servers.clear()
        self.finished.clear()
        self.parked, self._n_recomputed = [], 0
        self._pool.drop_calls()

    def take_recomputed(self) -> int:
        """Return how many tokens of interrupted samples were computed again since the last call."""
        n_recomputed, self._n_recomputed = self._n_recomputed, 0
        return n_recomputed

    def _serve(self, gconfig: GenerationConfig, seed: int) -> SessionProxy:
        """Start a server for agents."""
        assert self._session is not None
        settings = ProxySettings(params=sampling_params(gconfig), timeout_s=self._config.agent.timeout_s, seed=seed)
        context = self._trainer.engine.info.context_len
        both = [self._config.gconfig, self._config.eval_gconfig or self._config.gconfig]
        return self._session.serve(settings, max(each.max_tokens or context for each in both))

    @contextmanager
    def serving(self, gconfig: GenerationConfig, seed: int) -> Iterator[SessionProxy]:
        """Run a server for agents besides those that are under way, for the time of a `with` block.

        Args:
            gconfig: Sampling settings of requests that set none.
            seed: Seed of the requests.
        """
        server = self._serve(gconfig, seed)
        try:
            yield server
        finally:
            if self._session is not None:
                self._session.end_server(server)

    def server(self, batch: int, seed: int) -> SessionProxy:
        """Return the server of a batch of prompts, which is started if it does not run.

        Args:
            batch: Number of the batch.
            seed: Seed of the batch.
        """
        if batch not in self._servers:
            self._servers[batch] = self._serve(self._config.gconfig, seed)
        return self._servers[batch]

    def begin(self, server: SessionProxy, items: Sequence[AgentItem], read: Callable[[int, AgentOutcome], Any]) -> None:
        """Start agents.

        Args:
            server: The server for their requests.
            items: Their items.
            read: Is called with the index of an item and the outcome of its agent. The result is added to `finished`.
        """
        server.prefetch(items)
        context = AgentContext(server.base_url, server.api_key, server.session, self._config.agent.timeout_s)
        self._pool.begin(items, context, lambda place, outcome: self.finished.append(read(place, outcome)))

    def run_until(self, is_enough: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        """Run agents until `is_enough` returns True, inside a block of `running`.

        Args:
            is_enough: Function that returns whether enough agents have finished.
            on_wait: Function that is called at least every half second, and after agents have finished.
        """
        self._pool.run_until(is_enough, on_wait)

    def keep_servers(self, batches: Collection[int]) -> None:
        """Stop the servers of all other batches.

        Args:
            batches: Numbers of the batches that still have prompts under way.
        """
        assert self._session is not None
        for batch in self._servers.keys() - batches:
            self._session.end_server(self._servers.pop(batch))
