"""The sessions of external programs (agent.mode=online): which samples wait, are open and have ended.

A session is for one sample. Programs start sessions from the threads of a server, and the run looks at their limits
from its own thread. Without a task id, sessions get the samples of the groups in order. Sessions with the same task id
get samples of the same group.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areno import trace
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentContext, AgentItem
from areno.config.agent import AgentConfig
from areno.engine.output_streams import RunningClock
from areno.server.errors import ApiError
from areno.server.sample_sessions import ended_error

_MAX_ENDED = 100_000  # keys that are remembered
_MAX_NAME = 200  # characters of a task id or a key

Group = tuple[int, int]  # number of the submission, index of the prompt


@dataclass(eq=False)
class OpenSample:
    """A sample that waits for a session, or has one. Times are those of the clock of the run."""

    item: AgentItem
    context: AgentContext
    group: Group
    finish: Callable[[AgentOutcome], object]
    id: str = ""  # of its session
    key: str = ""
    n_requests: int = 0  # in progress
    n_answers: int = 0
    used_at: float = 0.0
    begun_at: int = 0  # time of areno.trace
    has_reward: bool = False
    is_closing: bool = False  # takes only rewards


@dataclass
class OnlineSessions:
    config: AgentConfig
    clock: RunningClock

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[Group, deque[OpenSample]] = {}
        self._open: dict[str, OpenSample] = {}  # by key
        self._ended: dict[str, None] = {}
        self._group_of_task: dict[str, Group] = {}
        self._used_at: dict[Group, float] = {}  # groups with a session

    def add(self, samples: list[OpenSample]) -> None:
        with self._lock:
            for sample in samples:
                self._waiting.setdefault(sample.group, deque()).append(sample)

    def clear(self) -> None:
        with self._lock:
            for key in list(self._open):
                self._forget(key)
            self._waiting.clear()
            self._group_of_task.clear()
            self._used_at.clear()

    @property
    def n_waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def start(self, task_id: str | None, key: str | None) -> OpenSample | None:
        """Start a session, after ending the one that has this key. None if no sample waits for a session."""
        for name, value in (("task_id", task_id), ("api_key", key)):
            if value is not None and not 0 < len(value) <= _MAX_NAME:
                raise ApiError(400, f"{name} has {len(value)} characters; 1 to {_MAX_NAME} are expected", param=name)
        with self._lock:
            if key in self._open:
                self._finish(self._open[key])
            sample = self._next_sample(task_id)
            if sample is None:
                return None
            sample.key = key or f"sk-sess-{secrets.token_urlsafe(32)}"
            sample.id = f"{sample.group[1] if task_id is None else task_id}-{next(self._numbers)}"
            self._open[sample.key], sample.begun_at = sample, trace.now()
            self._ended.pop(sample.key, None)
            self._use(sample)
            return sample

    def _next_sample(self, task_id: str | None) -> OpenSample | None:
        """Take the next sample that waits: of the group of a task, or of the first group without a task."""
        of_tasks = set(self._group_of_task.values())
        if task_id is None:
            free = [group for group in self._waiting if group not in of_tasks] or list(self._waiting)
        elif self._group_of_task.get(task_id) in self._waiting:
            free = [self._group_of_task[task_id]]
        else:
            free = [group for group in self._waiting if group not in self._used_at]
        if not free:
            return None
        group = free[0]
        if task_id is not None:
            self._group_of_task[task_id] = group
        samples = self._waiting[group]
        sample = samples.popleft()
        if not samples:
            self._remove_group(group)
        return sample

    def _remove_group(self, group: Group) -> None:
        del self._waiting[group]
        self._used_at.pop(group, None)
        for task_id in [name for name, own in self._group_of_task.items() if own == group]:
            del self._group_of_task[task_id]

    def _use(self, sample: OpenSample) -> None:
        sample.used_at = self.clock.now()
        if sample.group in self._waiting:
            self._used_at[sample.group] = sample.used_at

    def find(self, key: str, may_be_closing: bool = False) -> OpenSample:
        """Return the session with a key. Raises ApiError 410 if it has ended, 401 if there was none."""
        with self._lock:
            sample = self._open.get(key)
            if sample is None and key not in self._ended:
                raise ApiError(401, "there is no session with this key", code="invalid_api_key")
            if sample is None or (sample.is_closing and not may_be_closing):
                raise ended_error()
            self._use(sample)
            return sample

    def begin_request(self, sample: OpenSample) -> None:
        with self._lock:
            sample.n_requests += 1

    def end_request(self, sample: OpenSample, *, is_answered: bool = False, sets_reward: bool = False) -> None:
        with self._lock:
            sample.n_requests -= 1
            sample.n_answers += is_answered
            sample.has_reward = sample.has_reward or sets_reward
            self._use(sample)

    def end(self, key: str) -> OpenSample:
        sample = self.find(key)
        with self._lock:
            self._close(sample)
        return sample

    def _close(self, sample: OpenSample) -> None:
        sample.is_closing = True
        if not self.config.set_reward_finish_timeout:
            self._finish(sample)

    def _finish(self, sample: OpenSample, outcome: AgentOutcome | None = None) -> None:
        if self._open.get(sample.key) is sample:
            self._forget(sample.key)
            outcome = outcome or AgentOutcome("ok")
            outcome.span = sample.begun_at, trace.now()
            sample.finish(outcome)

    def _forget(self, key: str) -> None:
        del self._open[key]
        self._ended[key] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def look_at_limits(self) -> None:
        """End the sessions that have all their rewards, and those that nobody uses."""
        reward_s, idle_s = self.config.set_reward_finish_timeout, self.config.session_timeout_seconds
        with self._lock:
            now = self.clock.now()
            for sample in list(self._open.values()):
                unused_s = 0.0 if sample.n_requests else now - sample.used_at
                if sample.is_closing or (sample.has_reward and reward_s):
                    if unused_s >= reward_s:
                        self._finish(sample)
                elif unused_s > idle_s:
                    self._finish(sample, _timeout(f"its session had no request for {idle_s:g} s"))
            self._drop_rest_of_tasks(now - idle_s)

    def _drop_rest_of_tasks(self, before: float) -> None:
        """End the samples of a task for which no session was started since `before`."""
        open_groups = {sample.group for sample in self._open.values()}
        for group in set(self._group_of_task.values()) - open_groups:
            if self._used_at[group] < before:
                for sample in self._waiting[group]:
                    sample.finish(_timeout("its task has fewer sessions than gconfig.n_samples"))
                self._remove_group(group)


def _timeout(message: str) -> AgentOutcome:
    return AgentOutcome("timeout", None, f"{message} (agent.session_timeout_seconds)")


def session_data(sample: OpenSample) -> dict[str, Any]:
    """Return what a program is told of its sample."""
    item = sample.item
    messages = item.messages or [{"role": "user", "content": item.prompt}]
    numbered = {"sample_index": item.sample_index, "source": item.source}
    return {"messages": messages, "row": dict(item.record), **numbered}
