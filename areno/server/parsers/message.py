"""From what a model wrote to a message: its reasoning, its text and its tool calls; all at once or as it comes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.errors import GrammarError
from areno.server.parsers.lark import Lark
from areno.server.parsers.reading import Cursor, Reading, Schema, partial_tag, schemas_of

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedMessage:
    """content: None where there is only reasoning or a call. reasoning_content: None where there is none."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The next piece of a message: one of the three. A call always comes whole."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_call: ToolCall | None = None


Tools = dict[str, Schema]
RawCall = tuple[str, str]
"""Name and arguments (the text of a JSON object)."""


class ToolCallParser:
    """Reads the calls of one model family. This one knows no calls, only reasoning.

    The text is what the model wrote, with the special tokens in it (`skip_special_tokens=False`) but without the token
    that ended it. Reasoning is what stands between `<think>` and `</think>` at the start. A call that is malformed or
    cut off is text like any other. Whitespace next to a call is content only if there is text before and after it. No
    text raises an exception, and nothing in it is ever executed.
    """

    name = "text"
    tags: tuple[str, ...] = ()  # where a call may begin

    def parse(
        self,
        text: str,
        tools: Sequence[Any] | None = None,
        *,
        in_reasoning: bool = False,
        message_id: str | None = None,
    ) -> ParsedMessage:
        """The message of a finished text.

        tools: those that the model was offered, in OpenAI's form. With [] everything is text; with None any name counts
        as that of a tool. in_reasoning: the prompt ended with `<think>`. message_id: the ids of the calls are made of
        it; by default they are random.
        """
        stream = self.stream(tools, in_reasoning=in_reasoning, message_id=message_id)
        return message_of(stream.feed(text) + stream.finish())

    def stream(
        self, tools: Sequence[Any] | None = None, *, in_reasoning: bool = False, message_id: str | None = None
    ) -> MessageStream:
        """The same for a text that comes in pieces. However it is cut, the deltas add up to what `parse` returns."""
        return MessageStream(self, schemas_of(tools), in_reasoning, message_id or uuid.uuid4().hex)

    def opening(self, text: str, at: int, is_fresh: bool, after_call: bool) -> tuple[int, int | None]:
        """Where from `at` on a call may begin, and where the text after its tag does.

        is_fresh: `at` is the start of the content or directly after a call, `after_call` the latter. Without an opening
        it is (from where on one might still be written, None).
        """
        found = [(start, -len(tag)) for tag in self.tags if (start := text.find(tag, at)) >= 0]
        if found:
            start, length = min(found)
            return start, start - length
        return partial_tag(text, self.tags, at), None

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        """The calls that begin at the cursor, which goes past them; None if there are none after all."""
        raise NotImplementedError("the family has tags but does not read calls")

    def call_grammar(self, lark: Lark, functions: dict[str, Schema], many: bool) -> str:
        """The expression of a call to one of these functions, as the family writes it; with `many` of one or more.

        functions: name -> schema of the arguments, from `parameters_of`. Raises GrammarError where the format cannot
        express a call.
        """
        raise GrammarError("models of this family have no format for tool calls, so none can be required")


class MessageStream:
    """A message as it is written. `feed` takes the next text, `finish` says that there is no more, once."""

    def __init__(self, family: ToolCallParser, tools: Tools | None, in_reasoning: bool, message_id: str):
        self._family = family if tools is None or tools else ToolCallParser()
        self._tools, self._message_id = tools, message_id
        self._source, self._deltas = Cursor(), list[MessageDelta]()
        self._n_calls, self._has_content = 0, False
        self._space = ""  # around calls: it belongs to the text that follows, if there is any
        self._reading = self._message(in_reasoning)

    def feed(self, delta: str) -> list[MessageDelta]:
        """What is certain with this text and was not before."""
        self._source.text += delta
        return self._advance()

    def finish(self) -> list[MessageDelta]:
        """What was held back because more text might have changed it."""
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[MessageDelta]:
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _message(self, in_reasoning: bool) -> Reading[None]:
        source = self._source
        if not in_reasoning:
            yield from source.skip_space()
            in_reasoning = yield from source.accept(THINK)
        if in_reasoning:
            source.forget()
            yield from self._reasoning()
        else:
            source.at = 0  # the space belongs to the content
        yield from self._content()

    def _reasoning(self) -> Reading[None]:
        source = self._source
        yield from source.skip_newlines()
        while True:
            end = source.text.find(END_THINK, source.at)
            border = end if end >= 0 else partial_tag(source.text, (END_THINK,), source.at)
            if source.ended and end < 0:
                border = len(source.text)
            # The newlines at its end belong to the tag.
            border = source.at + len(source.text[source.at : border].rstrip("\n"))
            self._emit_to(border, reasoning=True)
            if end >= 0 or source.ended:
                break
            yield
        source.at = len(source.text) if end < 0 else source.text.find(END_THINK) + len(END_THINK)
        yield from source.skip_newlines()
        source.forget()

    def _content(self) -> Reading[None]:
        source, is_fresh = self._source, True
        while True:
            if self._n_calls and is_fresh:
                at = source.at
                yield from source.skip_space()
                self._space += source.text[at : source.at]
            start, after_tag = self._family.opening(source.text, source.at, is_fresh, bool(self._n_calls) and is_fresh)
            if after_tag is None and source.ended:
                start = len(source.text)
            words_end = source.at + len(source.text[source.at : start].rstrip())
            is_fresh = is_fresh and words_end == source.at
            self._emit_to(words_end)
            if after_tag is None and source.ended:
                if not self._n_calls:
                    self._emit_to(len(source.text))
                return
            if after_tag is None:
                yield
                continue
            # The text before the cursor was dropped, so positions have moved.
            is_fresh = yield from self._calls(start - words_end, after_tag - words_end)

    def _calls(self, start: int, after_tag: int) -> Reading[bool]:
        """Read what an opening promised. Whether it was calls; if not, the tag is text."""
        source = self._source
        source.at = after_tag
        tag = source.text[start:after_tag]
        calls = yield from self._family.read_calls(source, tag, self._tools)
        if not calls:
            source.at = 0
            self._emit_to(max(after_tag, start + 1))
            return False
        self._space += source.text[:start]
        for name, arguments in calls:
            call = ToolCall(f"call_{self._message_id}_{self._n_calls}", name, arguments)
            self._deltas.append(MessageDelta(tool_call=call))
            self._n_calls += 1
        source.forget()
        return True

    def _emit_to(self, end: int, reasoning: bool = False) -> None:
        """Give out the text from the cursor to `end`, and drop it."""
        source = self._source
        if text := source.text[source.at : end]:
            if not reasoning:
                text = self._space + text if self._has_content else text
                self._space, self._has_content = "", True
            self._deltas.append(MessageDelta(reasoning_content=text) if reasoning else MessageDelta(content=text))
        source.at = end
        source.forget()


def message_of(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    """What the deltas of a whole message add up to."""
    deltas = list(deltas)
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    is_empty = not content and not calls and not reasoning
    return ParsedMessage(content if content or is_empty else None, reasoning or None, calls)
