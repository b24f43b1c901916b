"""Sessions of external programs: which sample each gets, and when they end. Without a server, at times that are set."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from areno.agents.online_sessions import OnlineSessions, OpenSample
from areno.agents.running import AgentOutcome
from areno.agents.trajectories import AgentContext, AgentItem
from areno.config.agent import AgentConfig
from areno.server.errors import ApiError


class Made:
    """Sessions with groups of samples. `outcomes` are those of finished samples, by (group, sample)."""

    def __init__(self, n_groups: int, n_samples: int, **settings: Any):
        clock: Any = SimpleNamespace(now=lambda: self.now)
        self.now = 0.0
        self.sessions = OnlineSessions(AgentConfig(mode="online", **settings), clock)
        self.outcomes: dict[tuple[int, int], AgentOutcome] = {}
        self.add(1, n_groups, n_samples)

    def add(self, batch: int, n_groups: int, n_samples: int) -> None:
        keys = [(group, sample) for group in range(n_groups) for sample in range(n_samples)]
        context = AgentContext("http://127.0.0.1:1/s/x/v1", "x", "session", 1.0)
        samples = [
            OpenSample(
                AgentItem("a", {}, [1], *key),
                context,
                (batch, key[0]),
                lambda outcome, key=key: self.took(key, outcome),
            )
            for key in keys
        ]
        self.sessions.add(samples)

    def took(self, key: tuple[int, int], outcome: AgentOutcome) -> None:
        assert key not in self.outcomes
        self.outcomes[key] = outcome

    def start(self, task: str | None = None, key: str | None = None) -> tuple[tuple[int, int], str]:
        sample = self.sessions.start(task, key)
        assert sample is not None
        return sample.item.key, sample.key

    def look(self, now: float) -> dict[tuple[int, int], str]:
        self.now = now
        self.sessions.look_at_limits()
        return {key: outcome.status for key, outcome in self.outcomes.items()}


def refusal(made: Made, key: str, **how: Any) -> int:
    with pytest.raises(ApiError) as caught:
        made.sessions.find(key, **how)
    return caught.value.status


def test_without_a_task_the_samples_of_a_group_are_given_in_order() -> None:
    made = Made(2, 2)
    assert [made.start()[0] for _ in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert made.sessions.start(None, None) is None


def test_sessions_of_a_task_are_a_group() -> None:
    made, found = Made(4, 2), defaultdict(list)
    for task in ("a", "b", None, "a", "b", None, "a"):
        found[task].append(made.start(task)[0])
    assert found == {"a": [(0, 0), (0, 1), (3, 0)], "b": [(1, 0), (1, 1)], None: [(2, 0), (2, 1)]}
    assert made.sessions.start("c", None) is None  # the last group is that of task a
    assert made.start()[0] == (3, 1)  # rather than none


def test_each_session_has_a_key_of_its_own() -> None:
    made = Made(2, 2)
    keys = [made.start()[1] for _ in range(4)]
    assert len(set(keys)) == 4
    assert all(made.sessions.find(key).key == key for key in keys)
    assert refusal(made, "sk-sess-other") == 401
    for name, given in (("task_id", ("a" * 201, None)), ("api_key", (None, ""))):
        with pytest.raises(ApiError, match=f"{name} has"):
            made.sessions.start(*given)


def test_a_key_that_is_used_again_ends_its_session_even_if_no_sample_waits() -> None:
    made = Made(1, 2)
    assert [made.start(key="mine"), made.start(key="mine")] == [((0, 0), "mine"), ((0, 1), "mine")]
    assert made.sessions.start(None, "mine") is None
    assert made.look(0.0) == {(0, 0): "ok", (0, 1): "ok"}
    assert refusal(made, "mine") == 410
    made.add(2, 1, 1)
    made.start(key="mine")
    assert made.sessions.find("mine").group == (2, 0)


def test_a_session_ends_once_and_refuses_after_that() -> None:
    made = Made(1, 1)
    _, key = made.start()
    made.sessions.end(key)
    assert made.look(0.0) == {(0, 0): "ok"}
    assert refusal(made, key) == 410
    with pytest.raises(ApiError) as caught:
        made.sessions.end(key)
    assert caught.value.status == 410


def test_further_rewards_are_awaited_after_the_end() -> None:
    made = Made(1, 1, set_reward_finish_timeout=5.0)
    _, key = made.start()
    made.now = 1.0
    made.sessions.end(key)
    assert refusal(made, key) == 410
    made.now = 4.0
    assert made.sessions.find(key, may_be_closing=True)  # a further reward
    assert made.look(8.9) == {}
    assert made.look(9.0) == {(0, 0): "ok"}
    assert refusal(made, key, may_be_closing=True) == 410


def test_a_session_with_a_reward_ends_by_itself_only_with_a_timeout() -> None:
    for timeout_s, expected in ((0.0, {}), (5.0, {(0, 0): "ok"})):
        made = Made(1, 1, set_reward_finish_timeout=timeout_s)
        sample = made.sessions.find(made.start()[1])
        made.sessions.begin_request(sample)
        made.sessions.end_request(sample, sets_reward=True)
        assert made.look(4.9) == {}
        assert made.look(6.0) == expected


def test_a_session_that_nobody_uses_is_lost() -> None:
    made = Made(1, 3, session_timeout_seconds=10.0)
    (_, idle), (_, busy) = made.start(), made.start()
    made.sessions.begin_request(made.sessions.find(busy))  # takes longer than the limit
    assert made.look(10.0) == {}
    assert made.look(10.1) == {(0, 0): "timeout"}
    assert "no request for 10 s (agent.session_timeout_seconds)" in made.outcomes[0, 0].message
    assert refusal(made, idle) == 410
    made.sessions.end_request(made.sessions.find(busy))
    assert made.look(20.2) == {(0, 0): "timeout", (0, 1): "timeout"}
    assert made.sessions.n_waiting == 1  # the sample that no program has begun waits


def test_a_task_with_too_few_sessions_loses_the_rest_of_its_group() -> None:
    made = Made(2, 3, session_timeout_seconds=10.0)
    _, key = made.start("a")
    made.now = 5.0
    made.sessions.end(key)
    assert made.look(10.0) == {(0, 0): "ok"}
    assert made.look(15.1) == {(0, 0): "ok", (0, 1): "timeout", (0, 2): "timeout"}
    assert "its task has fewer sessions than gconfig.n_samples" in made.outcomes[0, 1].message
    assert made.start("a")[0] == (1, 0)


def test_nothing_is_left_after_clearing() -> None:
    made = Made(2, 2)
    _, key = made.start("a")
    made.sessions.clear()
    assert (made.sessions.n_waiting, made.outcomes, refusal(made, key)) == (0, {}, 410)
    made.add(2, 1, 1)
    assert made.start("a")[0] == (0, 0)
