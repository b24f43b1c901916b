"""Parser for gpt-oss, whose answers are several messages in the harmony format.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": ...}<|call|>

The prompt ends with `<|start|>assistant`. Analysis is reasoning, `final` is content, and so is commentary without a
recipient, which announces calls. Texts of several messages are joined by an empty line. Format:
https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from areno.server.parsers.json_rules import JsonRules, JsonStyle
from areno.server.parsers.lark import LarkBuilder
from areno.server.parsers.message import MessageDelta, MessageStream, ParsedMessage, ToolCallParser, Tools
from areno.server.parsers.partial_text import Reading, dump_json, load_json, partial_tag_start
from areno.server.parsers.schemas import SchemaDocument

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

_ENDS = (END, CALL, RETURN)
_NEXT = f"{START}assistant"
_RECIPIENT, _FUNCTIONS = "to=", "functions."
_HEADER_STARTS = (CHANNEL, CONSTRAIN, MESSAGE, _RECIPIENT)
_CONTENT_CHANNELS = ("final", "commentary", None)
_BETWEEN = "\n\n"  # texts of two messages


class HarmonyParser(ToolCallParser):
    """A call that is malformed or cut off is content, with its header. So is a message of an unknown channel."""

    name = "harmony"
    tags = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)

    def make_stream(self, tools: Tools | None, in_reasoning: bool, message_id: str) -> MessageStream:
        return HarmonyStream(self, tools, in_reasoning, message_id)

    def first_call_index(self, text: str) -> int:
        starts = [0, *(at for at in range(1, len(text)) if text.startswith(_NEXT, at)), len(text)]
        calls = (start for start, end in pairwise(starts) if self.parse(text[start:end]).tool_calls)
        return next(calls, super().first_call_index(text))

    def meaning(self, message: ParsedMessage) -> tuple[str, str, list[Any]]:
        """Join the texts before calls: the chat template writes content before calls as analysis."""
        content, reasoning, calls = super().meaning(message)
        if calls:
            content, reasoning = "", _BETWEEN.join(text for text in (reasoning, content) if text)
        return content, reasoning, calls

    def calls_rule(self, lark: LarkBuilder, functions: dict[str, SchemaDocument], many: bool) -> str:
        """Match one call even if `many`, because the token after a call ends the answer."""
        rules = []
        for name, document in functions.items():
            header = lark.literal(f"{CHANNEL}commentary {_RECIPIENT}{_FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
            rules.append(f"{header} {JsonRules(lark, document, JsonStyle(is_free=True)).root()}")
        return lark.rule(" | ".join(rules))

    def answer_rule(self, lark: LarkBuilder, content: str | None, calls: str | None, reasoning: str) -> str:
        answers = [] if content is None else [f"{lark.literal(f'{CHANNEL}final{MESSAGE}')} {content}"]
        answers += [] if calls is None else [calls]
        analysis = f"{lark.literal(f'{CHANNEL}analysis{MESSAGE}')} {lark.until(END)} {lark.literal(_NEXT)}"
        return f"({analysis})? ({' | '.join(answers)})"


class HarmonyStream(MessageStream):
    """Incremental parser of one answer."""

    def _read_message(self, in_reasoning: bool) -> Reading[None]:
        source, self._joins = self._source, {True: "", False: ""}  # for reasoning and for content
        yield from source.accept(_NEXT)
        while True:
            source.drop_read_text()
            yield from self._read_one()
            if not (yield from source.peek()):
                return

    def _read_one(self) -> Reading[None]:
        """Read one message, from its header to the start of the next message or to the end of the text."""
        source = self._source
        header = yield from self._read_header()
        channel, recipient = ("", None) if header is None else header
        if recipient is not None and self._tools != {}:
            n_header = source.at
            if (yield from self._read_call(recipient)):
                return
            source.at = n_header
        is_text = recipient is None and channel in ("analysis", *_CONTENT_CHANNELS)
        if is_text:
            source.drop_read_text()
        yield from self._read_text(is_text and channel == "analysis" and self._reads_reasoning)

    def _read_header(self) -> Reading[tuple[str | None, str | None] | None]:
        """Return (channel, recipient) and move past the header. If there is none, return None and do not move."""
        source = self._source
        start = source.at
        yield from source.skip_space()
        for tag in _HEADER_STARTS:
            if (yield from source.starts_with(tag)):
                break
        else:
            source.at = start
            return None
        mark = yield from source.skip_past_one_of((MESSAGE, START, *_ENDS))
        header = None if mark != MESSAGE else _parse_header(source.text[start : source.at - len(MESSAGE)])
        if header is None:
            source.at = start
        return header

    def _read_call(self, recipient: str) -> Reading[bool]:
        """Read the arguments of a call and move past its end. Return whether they are the arguments of a call."""
        source, name = self._source, recipient.removeprefix(_FUNCTIONS)
        yield from source.skip_space()
        start = source.at
        if not name or (yield from source.read_json_object()) is None:
            return False
        try:
            name.encode()
            arguments = dump_json(load_json(source.text[start : source.at]))
        except ValueError:
            return False
        yield from source.skip_space()
        n_arguments = source.at
        if not (yield from self._skip_end()) and not (yield from source.accept(_NEXT)):
            for tag in _ENDS:  # what follows its end is another message, even without a header
                if (yield from source.accept(tag)):
                    break
            else:
                source.at = n_arguments
                return False
        self._add_call(name, arguments)
        return True

    def _read_text(self, reasoning: bool) -> Reading[None]:
        """Read a text, and move past its end. The tokens that end a message count as text within the text."""
        source, searched = self._source, self._source.at
        has_text = False
        while True:
            found = [(at, tag) for tag in _ENDS if (at := source.text.find(tag, searched)) >= 0]
            end, tag = min(found, default=(partial_tag_start(source.text, _ENDS, searched), ""))
            if not found and source.ended:
                end = len(source.text)
            has_text |= self._say(source.text[:end], reasoning)
            source.text, source.at, searched = source.text[end:], 0, 0
            if found:
                if (yield from self._skip_end()):
                    break
                source.at, searched = 0, len(tag)
            elif source.ended:
                source.at = 0
                break
            else:
                yield
        if has_text:
            self._joins[reasoning] = _BETWEEN

    def _skip_end(self) -> Reading[bool]:
        """Skip the end of a message and the start of the next one, and return whether they were there.

        The text may end anywhere within them.
        """
        source = self._source
        start = source.at
        for tag in _ENDS:
            if (yield from source.accept(tag)):
                yield from source.skip_space()
                if (yield from source.accept(_NEXT)):
                    return True
                if source.ended and _NEXT.startswith(source.text[source.at :]):
                    source.at = len(source.text)
                    return True
        source.at = start
        return not (yield from source.peek())

    def _say(self, text: str, reasoning: bool) -> bool:
        if not text:
            return False
        text, self._joins[reasoning] = self._joins[reasoning] + text, ""
        self._deltas.append(MessageDelta(reasoning_content=text) if reasoning else MessageDelta(content=text))
        return True


def _parse_header(header: str) -> tuple[str | None, str | None] | None:
    """Return (channel, recipient), each of which may be missing. Returns None for a malformed header.

    The recipient may stand before or after the channel. A word more is the type of the content.
    """
    role, mark, rest = header.replace(CONSTRAIN, f" {CONSTRAIN}").partition(CHANNEL)
    words = rest.split()
    channel = words.pop(0) if words and not words[0].startswith((_RECIPIENT, CONSTRAIN)) else None
    if CHANNEL in rest or (mark and channel is None):
        return None
    words = [word for word in [*role.split(), *words] if word != CONSTRAIN]
    recipients = [word.removeprefix(_RECIPIENT) for word in words if word.startswith(_RECIPIENT)]
    if len(recipients) > 1 or len(words) - len(recipients) > 1:
        return None
    return channel, recipients[0] if recipients else None
