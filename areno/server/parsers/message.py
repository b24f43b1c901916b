"""Parsing of a model's text, whole or streamed, into reasoning, content and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.data.chat_template import END_THINK, THINK
from areno.errors import GrammarError
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.partial_text import Cursor, Reading, Schema, partial_tag_start, schemas_by_name
from areno.server.parsers.schemas import SchemaDocument


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str  # which the tool's result refers to
    name: str
    arguments: str  # text of a JSON object


@dataclass(slots=True)
class ParsedMessage:
    """`content` is None if there is only reasoning or a tool call, and "" for an empty message."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """An increment of a streamed message. Exactly one attribute is set. A tool call is sent once it is complete."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_call: ToolCall | None = None


Tools = dict[str, Schema]
RawCall = tuple[str, str]  # name, arguments as the text of a JSON object


class ToolCallParser:
    """Base class of the tool-call parsers. The base class itself finds reasoning, but no calls.

    The parsed text has its special tokens, but not the stop token. Reasoning is the text between `<think>` and
    `</think>` at the start. A call that is malformed or cut off counts as text. Whitespace next to a call is content
    only if there is text before and after it. Parsing never raises an exception because of the text, and never executes
    code in it.

    `tools` are those offered to the model, in OpenAI's form. If it is [], calls count as text. If it is None, any
    function name is accepted. `in_reasoning` means that the prompt ended with `<think>`. Ids of calls are
    call_<message_id>_<number>. If `message_id` is None, it is random.
    """

    name = "text"
    tags: tuple[str, ...] = ()  # texts that may begin a call
    reads_reasoning = True  # if False, reasoning is content

    def parse(
        self,
        text: str,
        tools: Sequence[Any] | None = None,
        *,
        in_reasoning: bool = False,
        message_id: str | None = None,
    ) -> ParsedMessage:
        stream = self.stream(tools, in_reasoning=in_reasoning, message_id=message_id)
        return join_deltas(stream.feed(text) + stream.finish())

    def stream(
        self, tools: Sequence[Any] | None = None, *, in_reasoning: bool = False, message_id: str | None = None
    ) -> MessageStream:
        """Return an incremental parser, whose deltas add up to the result of `parse`."""
        return self.make_stream(schemas_by_name(tools), in_reasoning, message_id or uuid.uuid4().hex)

    def make_stream(self, tools: Tools | None, in_reasoning: bool, message_id: str) -> MessageStream:
        return MessageStream(self, tools, in_reasoning, message_id)

    def first_call_index(self, text: str) -> int:
        """Return the index of the character at which the first tool call begins, or len(text) if there is none."""
        for index in range(len(text)):
            if not text.startswith(self.tags, index):
                continue
            if self.parse(text[index:]).tool_calls and not self.parse(text[:index]).tool_calls:
                return index
        return 0 if self.parse(text).tool_calls else len(text)

    def meaning(self, message: ParsedMessage) -> tuple[str, str, list[Any]]:
        """Return the parts of a message that two renderings of the same turn must have in common."""
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        return (message.content or "").strip(), (message.reasoning_content or "").strip(), calls

    def find_opening(self, text: str, at: int, at_boundary: bool, after_call: bool) -> tuple[int, int | None]:
        """Search from `at`, and return (index of the next opening tag, index after this tag).

        Without a complete tag, return (index, None), where the text from this index on may be the beginning of a tag.
        `at_boundary` means that `at` is the start of the content or directly after a call, `after_call` the latter.
        """
        found = [(start, -len(tag)) for tag in self.tags if (start := text.find(tag, at)) >= 0]
        if found:
            start, length = min(found)
            return start, start - length
        return partial_tag_start(text, self.tags, at), None

    def read_calls(self, source: Cursor, tag: str, tools: Tools | None) -> Reading[list[RawCall] | None]:
        """Read the calls after an opening tag, which may be "", and move the cursor past them.

        `tools` are function name -> JSON schema. If it is None, any name is accepted. Return None if the text is no
        call.
        """
        raise NotImplementedError("the family has tags but does not read calls")

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        """Add rules for calls to a grammar and return the name of the rule that matches them.

        `functions` are function name -> schema of the arguments, and `many` allows several calls. Raises GrammarError
        if the format cannot express a call.
        """
        raise GrammarError("models of this family have no format for tool calls, so none can be required")

    def answer_rule(self, lark: LarkBuilder, content: str | None, calls: str | None, reasoning: str) -> str:
        """Return the expression of a whole answer: of the rules `content` and `calls`, at least one is not None.

        `reasoning` before the answer is "none", the rest of what the prompt opened ("open"), or "optional".
        """
        answers = [each for each in (content, calls) if each is not None]
        answer = answers[0] if len(answers) == 1 else f"({' | '.join(answers)})"
        if reasoning == "none":
            return answer
        thought = f"{lark.until(END_THINK)} /\\n{{0,2}}/"
        return f"{thought} {answer}" if reasoning == "open" else f"({lark.literal(THINK)} {thought})? {answer}"


class MessageStream:
    """Incremental parser of one message, made by `ToolCallParser.stream`."""

    def __init__(self, family: ToolCallParser, tools: Tools | None, in_reasoning: bool, message_id: str):
        self._reads_reasoning = family.reads_reasoning
        self._family = family if tools is None or tools else ToolCallParser()
        self._tools, self._message_id = tools, message_id
        self._source, self._deltas = Cursor(), list[MessageDelta]()
        self._n_calls, self._has_content = 0, False
        self._space = ""  # whitespace around calls, which belongs to the next text, if there is any
        self._reading = self._read_message(in_reasoning)

    def feed(self, delta: str) -> list[MessageDelta]:
        """Return the new deltas that later text cannot change."""
        self._source.text += delta
        next(self._reading, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, delta: str = "") -> list[MessageDelta]:
        self._source.ended = True
        return self.feed(delta)

    def _read_message(self, in_reasoning: bool) -> Reading[None]:
        """Parse the whole message. This and the methods it uses append to `self._deltas`."""
        source = self._source
        if not self._reads_reasoning:
            yield from self._read_content()
            return
        if not in_reasoning:
            yield from source.skip_space()
            in_reasoning = yield from source.accept(THINK)
        if in_reasoning:
            source.drop_read_text()
            yield from self._read_reasoning()
        else:
            source.at = 0  # the whitespace is part of the content
        yield from self._read_content()

    def _read_reasoning(self) -> Reading[None]:
        source = self._source
        yield from source.skip_newlines()
        while True:
            end = source.text.find(END_THINK, source.at)
            border = end if end >= 0 else partial_tag_start(source.text, (END_THINK,), source.at)
            if source.ended and end < 0:
                border = len(source.text)
            # Newlines before the closing tag belong to the tag.
            border = source.at + len(source.text[source.at : border].rstrip("\n"))
            self._emit_until(border, reasoning=True)
            if end >= 0 or source.ended:
                break
            yield
        source.at = len(source.text) if end < 0 else source.text.find(END_THINK) + len(END_THINK)
        yield from source.skip_newlines()
        source.drop_read_text()

    def _read_content(self) -> Reading[None]:
        source, at_boundary = self._source, True
        while True:
            if self._n_calls and at_boundary:
                at = source.at
                yield from source.skip_space()
                self._space += source.text[at : source.at]
            after_call = bool(self._n_calls) and at_boundary
            start, after_tag = self._family.find_opening(source.text, source.at, at_boundary, after_call)
            if after_tag is None and source.ended:
                start = len(source.text)
            words_end = source.at + len(source.text[source.at : start].rstrip())
            at_boundary = at_boundary and words_end == source.at
            self._emit_until(words_end)
            if after_tag is None and source.ended:
                if not self._n_calls:
                    self._emit_until(len(source.text))
                return
            if after_tag is None:
                yield
                continue
            # `_emit_until` dropped the text before the cursor, so positions have moved.
            at_boundary = yield from self._read_calls(start - words_end, after_tag - words_end)

    def _read_calls(self, start: int, after_tag: int) -> Reading[bool]:
        """Read the calls after the tag, which is text[start:after_tag]. If there are none, the tag becomes content."""
        source = self._source
        source.at = after_tag
        tag = source.text[start:after_tag]
        calls = yield from self._family.read_calls(source, tag, self._tools)
        if not calls:
            source.at = 0
            self._emit_until(max(after_tag, start + 1))
            return False
        self._space += source.text[:start]
        for name, arguments in calls:
            self._add_call(name, arguments)
        source.drop_read_text()
        return True

    def _add_call(self, name: str, arguments: str) -> None:
        call = ToolCall(f"call_{self._message_id}_{self._n_calls}", name, arguments)
        self._deltas.append(MessageDelta(tool_call=call))
        self._n_calls += 1

    def _emit_until(self, end: int, reasoning: bool = False) -> None:
        """Append the text from the cursor to index `end` as a delta, and remove it from the cursor's text."""
        source = self._source
        if text := source.text[source.at : end]:
            if not reasoning:
                text = self._space + text if self._has_content else text
                self._space, self._has_content = "", True
            self._deltas.append(MessageDelta(reasoning_content=text) if reasoning else MessageDelta(content=text))
        source.at = end
        source.drop_read_text()


def join_deltas(deltas: Iterable[MessageDelta]) -> ParsedMessage:
    deltas = list(deltas)
    content = "".join(delta.content or "" for delta in deltas)
    reasoning = "".join(delta.reasoning_content or "" for delta in deltas)
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    is_empty = not content and not calls and not reasoning
    return ParsedMessage(content if content or is_empty else None, reasoning or None, calls)
