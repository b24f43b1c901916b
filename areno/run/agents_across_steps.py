"""Agents whose samples live across steps, with rollout.max_head_offpolicyness above 0.

`LiveAgents` holds one rollout session, from the first step to the last. While models are trained, the session is
suspended: requests in progress are interrupted, new requests wait, and the time limits of agents and requests pause. In
the session, each batch of prompts has its own server, with the seed of the batch. An evaluation also has a server, with
its own sampling settings.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from areno.agents.proxy import SessionProxy
from areno.agents.running import AgentOutcome, AgentRunner, ContextFor
from areno.agents.trajectories import AgentItem
from areno.api.session import ProxySettings, RolloutSession
from areno.api.trainer import Trainer
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.rollout import GenerationConfig
from areno.errors import WorkerLost
from areno.plan.plan import sampling_params


class LiveAgents:
    """The rollout session of agents that live across steps, with its servers.

    `finished` holds the results of ended agents until a rollout takes them (see `submit`). `parked` holds the number of
    tokens of each sample that the last suspension interrupted. `resources` is closed when the steps end.
    """

    def __init__(self, config: PolicyExperimentConfig, trainer: Trainer, pool: AgentRunner, resources: ExitStack):
        self._config, self._trainer, self._pool, self._resources = config, trainer, pool, resources
        self._session: RolloutSession | None = None
        self._servers: dict[int, SessionProxy] = {}  # by batch
        self.finished: deque[Any] = deque()
        self.parked: list[int] = []
        self._n_recomputed = 0

    @property
    def is_open(self) -> bool:
        return self._session is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let agents and requests run inside the `with` block. An exception ends the agents and the session."""
        if self._session is None:
            session = self._trainer.rollout_session(sampling_params=sampling_params(self._config.gconfig), proxy=False)
            self._session = self._resources.enter_context(session)
            self._resources.push(self._stop_agents)
        else:
            self._n_recomputed += sum(self.parked)
            self._session.resume()
            self._pool.resume()
        try:
            yield
            self._pool.suspend()
            self.parked = self._session.suspend()
        except BaseException:
            self._resources.__exit__(*sys.exc_info())
            raise

    def _stop_agents(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Stop all agents before the session ends. If the run fails, close their processes for good."""
        self._session = None
        self._servers.clear()
        self.finished.clear()
        self.parked, self._n_recomputed = [], 0
        if error is None or isinstance(error, WorkerLost):
            self._pool.restart_busy_workers()
        else:
            self._pool.close()

    def pop_recomputed_tokens(self) -> int:
        """Return how many tokens of interrupted samples were computed again since the last call."""
        n_recomputed, self._n_recomputed = self._n_recomputed, 0
        return n_recomputed

    def _start_server(self, gconfig: GenerationConfig, seed: int) -> SessionProxy:
        assert self._session is not None
        settings = ProxySettings(params=sampling_params(gconfig), timeout_s=self._config.agent.timeout_s, seed=seed)
        context = self._trainer.engine.info.context_len
        both = [self._config.gconfig, self._config.eval_gconfig or self._config.gconfig]
        return self._session.serve(settings, max(each.max_tokens or context for each in both))

    @contextmanager
    def serving(self, gconfig: GenerationConfig, seed: int) -> Iterator[SessionProxy]:
        """Run a server inside the `with` block, in addition to those of the batches."""
        server = self._start_server(gconfig, seed)
        try:
            yield server
        finally:
            if self._session is not None:
                self._session.end_server(server)

    def server_for(self, batch: int, seed: int) -> SessionProxy:
        if batch not in self._servers:
            self._servers[batch] = self._start_server(self._config.gconfig, seed)
        return self._servers[batch]

    def start_agents(
        self,
        server: SessionProxy,
        items: Sequence[AgentItem],
        context: ContextFor,
        read: Callable[[int, AgentOutcome], Any],
    ) -> None:
        """Start agents. At the end of each, the result of `read(index of its item, outcome)` goes to `finished`."""
        server.prefetch(items)
        self._pool.submit(items, context, lambda index, outcome: self.finished.append(read(index, outcome)))

    def stop_other_servers(self, batches: Collection[int]) -> None:
        assert self._session is not None
        for batch in self._servers.keys() - batches:
            self._session.end_server(self._servers.pop(batch))
