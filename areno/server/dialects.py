"""Other APIs for the same samples: requests become chat completions, and answers are written as each API has them."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from areno.data.row_schema import json_value_problem
from areno.schema.values import format_value
from areno.server.chat import OpenChat
from areno.server.errors import ApiError, invalid_field_error
from areno.server.json_bodies import RequestFields
from areno.server.parsers import MessageDelta
from areno.server.response_bodies import END, server_sent_event

logger = logging.getLogger("areno.server")
Json = dict[str, Any]
_logged: set[tuple[str, str]] = set()
_MAX_LOGGED = 256


class Answer(ABC):
    """Encodes one answer of an endpoint, as the body of a response or as server-sent events.

    `is_finished` is True from the last piece on.
    """

    is_finished = False

    @abstractmethod
    def pieces(self, chat: OpenChat) -> AsyncIterator[bytes]:
        """Sample, and yield the pieces of the response's body."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Return an event that clients skip."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first piece."""


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions itself."""

    async def pieces(self, chat: OpenChat) -> AsyncIterator[bytes]:
        if not chat.request.options.stream:
            body = await chat.create_response()
            self.is_finished = True
            yield body
            return
        last = b""
        async with aclosing(chat.chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chat.is_finished:  # what follows is one piece, so that a client that has its end has all of it
                    last += server_sent_event(chunk)
                else:
                    yield server_sent_event(chunk)
        self.is_finished = True
        yield last + END

    def keep_alive(self) -> bytes:
        empty = {"index": 0, "delta": {}, "finish_reason": None}
        return server_sent_event({"id": "", "object": "chat.completion.chunk", "created": 0, "choices": [empty]})

    def failure(self, error: ApiError) -> bytes:
        return server_sent_event(error.body())


class EventAnswer(Answer):
    """An answer in typed events: JSON objects whose field `type` names them."""

    async def pieces(self, chat: OpenChat) -> AsyncIterator[bytes]:
        is_stream = chat.request.options.stream
        first = self.start(chat)
        if is_stream:
            yield _encoded(first)
        async with aclosing(chat.deltas()) as deltas:  # type: ignore[type-var]
            async for _, delta in deltas:
                events = list(self.feed(delta)) if delta is not None else []
                if is_stream and events:
                    yield _encoded(events)
        last = list(self.finish(chat))
        self.is_finished = True
        # A model may write half of a surrogate pair into the arguments of a call.
        yield _encoded(last) if is_stream else json.dumps(self.body(chat)).encode()

    def keep_alive(self) -> bytes:
        return _encoded(self.idle_events())

    def failure(self, error: ApiError) -> bytes:
        return _encoded([self.error_event(error)])

    @abstractmethod
    def start(self, chat: OpenChat) -> Iterable[Json]: ...

    @abstractmethod
    def feed(self, delta: MessageDelta) -> Iterator[Json]: ...

    @abstractmethod
    def finish(self, chat: OpenChat) -> Iterator[Json]: ...

    @abstractmethod
    def body(self, chat: OpenChat) -> Json:
        """Return the whole answer, after `finish`."""

    @abstractmethod
    def idle_events(self) -> Iterable[Json]: ...

    @abstractmethod
    def error_event(self, error: ApiError) -> Json: ...


def _encoded(events: Iterable[Json]) -> bytes:
    return b"".join(server_sent_event(event, event["type"]) for event in events)


@dataclass(frozen=True)
class Dialect:
    """An API for chat completions.

    `read(values, takes_later_system)` converts a body to one of /v1/chat/completions, and returns it with the encoder
    of the answer. `takes_later_system` is whether the chat template renders system messages after the first message.
    """

    read: Callable[[Any, bool], tuple[Json, Answer]]
    error_body: Callable[[ApiError], Json] = ApiError.body


CHAT = Dialect(lambda values, takes_later_system: (values, ChatAnswer()))


def log_ignored(where: str, what: str) -> None:
    """Log what a client asks for and does not get, once for each text. Programs send more with every version."""
    if (where, what) not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add((where, what))
        logger.warning("%s: %s has no effect on this server", where, what)


def ignore_unread(fields: RequestFields, where: str, ignored: Iterable[str] = ()) -> None:
    for name in sorted(fields.unread() - set(ignored)):
        log_ignored(where, f"field {format_value(name)}")


def text_of(value: Any, where: str, texts: Iterable[str] = ("text",), separator: str = "\n") -> str:
    """Return the text of a content: a string, or a list of blocks of the types `texts`.

    Other blocks, such as images, are replaced by a note, since the model reads text only.
    """
    if value is None or isinstance(value, str):
        text = value or ""
    elif isinstance(value, list):
        text = separator.join(_block_text(block, f"{where}[{number}]", texts) for number, block in enumerate(value))
    else:
        raise invalid_field_error(where, f"is {format_value(value)}; text or a list of blocks is expected")
    if problem := json_value_problem(text):
        raise invalid_field_error(where, problem)
    return text


def _block_text(block: Any, where: str, texts: Iterable[str]) -> str:
    if isinstance(block, str):
        return block
    fields = RequestFields(block, where)
    kind = block_type(fields)
    if kind in texts:
        return fields.text("refusal" if kind == "refusal" else "text") or ""
    source = block.get("source") or block.get("file") or {}
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return source["data"]
    what = source.get("media_type")
    return f"[{kind}{f' ({what})' if isinstance(what, str) else ''}: not shown, since this model reads text only]"


def block_type(fields: RequestFields) -> str:
    kind = fields.text("type")
    if not kind:
        raise invalid_field_error(fields.path("type"), "is missing; the type of a block is expected")
    return kind


def messages_for_template(messages: list[Json], takes_later_system: bool) -> list[Json]:
    """Turn system messages after the first message into text of the user, if the template would not render them."""
    if takes_later_system:
        return messages
    found: list[Json] = []
    for message in messages:
        if not found or message["role"] not in ("system", "developer"):
            found.append(message)
        elif all(one["role"] in ("system", "developer") for one in found) or found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": "user"})
    return found


def json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
