"""The sessions of agents: each sample has its own, at an address of its own, which records the turns of its agent.

The program that runs as the agent needs to know nothing about training. Its session belongs to one sample, ends with
it, and keeps what was sampled, so nothing depends on what the program reports.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NoReturn

from areno.scoring.records import reward_number
from areno.server.errors import REQUESTS_SPENT, TOKENS_SPENT, ApiError
from areno.server.returned_responses import index_of_response, message_digest
from areno.types import Message, SamplingParams

_GRACE_S = 10.0  # for which a sample goes on without a reader: a client that lost its connection asks again
_MAX_TOKENS = 2**31 - 1
_OF_CLIENT = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "max_completion_tokens"),
    *("stop", "stream", "stream_options", "response_format", "n", "logprobs", "top_logprobs", "return_token_ids"),
}
"""Fields of a chat request that hold in a session with the run's sampling settings. All others are ignored."""


def ended_error() -> ApiError:
    return ApiError(410, "this session has ended with its sample", code="session_ended")


class SharedAnswer:
    """An answer that is sampled once, and read by every request that repeats the first while it is not delivered.

    `answer` encodes it, and `source` yields the pieces of the response's body. If nobody reads for `grace_s` seconds,
    sampling ends. While nothing is sampled, readers get an event every `idle_s` seconds, since some programs give up a
    stream without events.
    """

    def __init__(
        self,
        answer: Any,
        source: AsyncIterator[bytes],
        on_delivered: Callable[[], object] = lambda: None,
        *,
        grace_s: float = 0.0,
        idle_s: float | None = None,
    ):
        self.answer, self._source, self._on_delivered = answer, source, on_delivered
        self._grace_s, self._idle_s = grace_s, idle_s
        self._pieces: list[bytes] = []
        self._n_readers = 0
        self._more = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._added_at = self._loop.time()
        self.is_delivered = False
        self._task = asyncio.ensure_future(self._collect())
        if idle_s is not None:
            self._loop.call_later(idle_s, self._keep_alive)

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._added_at = self._loop.time()
        self._more.set()

    async def _collect(self) -> None:
        try:
            async with aclosing(self._source) as source:  # type: ignore[type-var]
                async for piece in source:
                    self._add(piece)
        finally:
            self._more.set()

    def _keep_alive(self) -> None:
        assert self._idle_s is not None
        if self._task.done():
            return
        # Before the first piece, an error can still become an error response.
        if self._pieces and self._loop.time() >= self._added_at + self._idle_s:
            self._add(self.answer.keep_alive())
        self._loop.call_at(max(self._added_at, self._loop.time() - self._idle_s / 2) + self._idle_s, self._keep_alive)

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the pieces. Raises the error of the source, or ApiError 410 if the session has ended."""
        self._n_readers += 1
        n_read = 0
        try:
            while True:
                self._more.clear()
                while n_read < len(self._pieces):
                    yield self._pieces[n_read]
                    n_read += 1
                # Checked before anything is awaited: a client may leave as soon as it has the last piece.
                if self.answer.is_finished and n_read == len(self._pieces) and not self.is_delivered:
                    self.is_delivered = True
                    self._on_delivered()
                if self._task.cancelled():
                    raise ended_error()
                if self._task.done():
                    self._task.result()
                    break
                await self._more.wait()
        finally:
            self._n_readers -= 1
            if not self._task.done():
                if self._grace_s:
                    self._loop.call_later(self._grace_s, self._abort_if_unread)
                else:
                    self._abort_if_unread()

    def _abort_if_unread(self) -> None:
        if not self._n_readers:
            self.abort()

    def abort(self) -> None:
        self._task.cancel()

    @property
    def can_be_read(self) -> bool:
        failed = self._task.done() and (self._task.cancelled() or self._task.exception() is not None)
        return not self.is_delivered and not failed


@dataclass(eq=False)
class SampleSession:
    """What one agent asks and gets. `turns` has a turn for each choice that the agent has received completely.

    With `uses_run_sampling`, the sampling settings of the run hold in place of those in requests. A request can only
    lower `max_tokens`. `params` are those of requests that set none, in place of the server's. With `takes_rewards`,
    the client reports the reward of each response, by its id in `rewards`.
    """

    max_requests: int
    max_tokens: int | None = None  # sampled, over all turns
    params: SamplingParams | None = None
    uses_run_sampling: bool = False
    returns_tokens: bool = True
    takes_rewards: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    turns: list[dict[str, Any]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # what a user should know of the requests
    is_ended: bool = False
    n_sampled: int = 0  # tokens
    spent: str = ""  # the setting of the budget for which requests were refused

    def __post_init__(self) -> None:
        self._answers: dict[bytes, SharedAnswer] = {}
        self._sent: dict[str, Message] = {}  # id of a call -> message
        self._edited: set[str] = set()  # ids of calls in turns that the client has edited
        self._has_tools = False  # whether a request offered tools
        self._conversations: set[str] = set()  # keys of the requests that did

    def count_request(self) -> None:
        """Count a request. Raises ApiError 410 if the session has ended, or its budget is spent."""
        self.counts["requests"] += 1
        if self.is_ended:
            raise ended_error()
        if self.counts["requests"] > self.max_requests:
            self._refuse(f"sent {self.max_requests} requests", "agent.max_requests", self.max_requests, REQUESTS_SPENT)
        if self.max_tokens is not None and self.n_sampled >= self.max_tokens:
            key = "agent.max_total_completion_tokens"
            self._refuse(f"sampled {self.n_sampled} tokens", key, self.max_tokens, TOKENS_SPENT)

    def count_reward(self) -> None:
        """Count a request that reports a reward, which the budget of the agent allows beside its other requests."""
        if self.is_ended:
            raise ended_error()
        self.counts["rewards"] += 1
        if self.counts["rewards"] > self.max_requests:
            message = f"{self.max_requests} rewards were reported, which is all that agent.max_requests allows"
            raise ApiError(410, message, code=REQUESTS_SPENT)

    def _refuse(self, done: str, key: str, limit: int, code: str) -> NoReturn:
        self.counts["refused"] += 1
        self.spent = key
        raise ApiError(410, f"the agent has {done}, and {key} allows {limit}", code=code)

    def body_for_run(self, body: Any) -> Any:
        """Return the body of a chat request, without what the run decides."""
        if not self.uses_run_sampling or not isinstance(body, Mapping):
            return body
        kept = {name: value for name, value in body.items() if name in _OF_CLIENT}
        for name in ("max_tokens", "max_completion_tokens"):
            if type(kept.get(name)) is int:
                kept[name] = min(kept[name], _MAX_TOKENS)
        return kept

    def shared_answer(
        self,
        route: str,
        request: bytes,
        answer: Any,
        make: Callable[[], AsyncIterator[bytes]],
        on_delivered: Callable[[], object],
        idle_s: float | None,
    ) -> SharedAnswer:
        """Return the answer to a request: that of an equal one if it was not delivered, else a new one from `make`."""
        key = blake2b(request, key=route.encode()[-64:], digest_size=16).digest()
        known = self._answers.get(key)
        if known is not None and known.can_be_read:
            self.counts["repeated"] += 1
            return known

        def delivered() -> None:
            self._answers.pop(key, None)
            on_delivered()

        shared = SharedAnswer(answer, make(), delivered, grace_s=_GRACE_S, idle_s=idle_s)
        self._answers[key] = shared
        return shared

    def restored_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the reasoning and the content that the client left out of its own turns.

        The id of a tool call finds the turn, which is restored if the rest of the message is what was sent.
        """
        return [self._restored(message) for message in messages]

    def _restored(self, message: Message) -> Message:
        calls = message.get("tool_calls") or []
        sent = self._sent.get(calls[0].get("id", "")) if message["role"] == "assistant" and calls else None
        if sent is None:
            return message
        given, known = message_digest(message), message_digest(sent)
        changed = [name for name in known if given[name] != known[name]]
        if not changed:
            return message
        if "tool_calls" in changed or any(message.get(name) for name in changed):
            self.counts["edited"] += calls[0]["id"] not in self._edited
            self._edited.add(calls[0]["id"])
            return message
        self.counts["restored"] += 1
        return {**message, **{name: sent[name] for name in changed}}

    def is_auxiliary(self, keys: Sequence[str], has_tools: bool) -> bool:
        """Return whether a request without tools continues no conversation with tools, although there are some.

        `keys` is the result of `conversation_keys` for its messages.
        """
        return self._has_tools and not has_tools and not self._conversations.intersection(keys)

    def note_request(self, keys: Sequence[str], has_tools: bool) -> None:
        self._has_tools = self._has_tools or has_tools
        if has_tools:
            self._conversations.add(keys[-1])

    def record(self, turns: Sequence[dict[str, Any]]) -> None:
        for turn in turns:
            self.turns.append(turn)
            self.n_sampled += len(turn["tokens"].sampled)
            for call in turn["message"].get("tool_calls") or []:
                self._sent[call["id"]] = turn["message"]

    def set_reward(self, reward: Any, response_id: Any = None) -> None:
        """Set the reward of a response, by default of the last one. Raises ApiError 400 or 403."""
        if not self.takes_rewards:
            raise ApiError(403, "this session takes no rewards; the run computes them", code="no_rewards")
        index = index_of_response(self.turns, response_id)
        if index is None:
            which = "no response" if response_id is None else f"no response {str(response_id)[:100]!r}"
            raise ApiError(400, f"this session has {which}, so there is nothing to reward", param="interaction_id")
        try:
            self.rewards[self.turns[index]["choice"][0]] = reward_number(reward, "reward is")
        except (TypeError, ValueError, OverflowError) as error:
            raise ApiError(400, str(error), param="reward") from None

    @property
    def reward(self) -> tuple[float, dict[str, float]] | None:
        """The sum of the rewards, without parts. None if the client has reported none."""
        return (math.fsum(self.rewards.values()), {}) if self.rewards else None

    def end(self) -> None:
        self.is_ended = True

    async def abort(self) -> None:
        """End the samples in progress. Called in the server's event loop."""
        for answer in self._answers.values():
            answer.abort()


class SampleSessions:
    """The sessions of a server, by id. Ended ones are known until the server stops."""

    def __init__(self) -> None:
        self._by_id: dict[str, SampleSession | None] = {}
        self.of_sockets: dict[str, SampleSession] = {}  # by the path of a session's own Unix socket

    def __contains__(self, name: str) -> bool:
        return name in self._by_id

    def open(self, session: SampleSession) -> SampleSession:
        self._by_id[session.id] = session
        return session

    def find(self, name: str) -> SampleSession:
        """Return the session with an id. Raises ApiError 410 if it has ended, 401 if there was none."""
        if name not in self._by_id:
            raise ApiError(401, "there is no such session", code="invalid_api_key")
        session = self._by_id[name]
        if session is None:
            raise ended_error()
        return session

    def end(self, session: SampleSession) -> None:
        session.end()
        self._by_id[session.id] = None
