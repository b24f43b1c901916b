"""Messages to exact tokens: the next turn of a conversation goes on from the tokens of its earlier ones.

Text is never made into tokens twice. A turn that was sampled here is remembered by the messages that led to it. When
these come back with others behind them, the new prompt is the old one, what was sampled, and only then new tokens for
what the chat template writes after the turn. Where the template writes the history otherwise than the model saw it
(it drops earlier reasoning, say), the prompt is made from its text alone, as the template's author meant it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from areno.agents.parsers import ParsedMessage, ToolCallParser
from areno.agents.parsers.message import END_THINK, THINK
from areno.agents.tokens import OF_ROLE, Runs, Source, digest_of, runs_of
from areno.data.chat_template import render
from areno.data.row_schema import bad_text
from areno.data.tokens.shield import BREAK, control_tokens
from areno.errors import DataError
from areno.types import Message

# Around the words of a message. Private-use characters, which no template and no content has.
_OPEN, _CLOSE = "\ue002", "\ue003"
_Key = tuple[str, str]  # of the form of a prompt, and of a conversation
_LONG = 1000  # characters: to make their tokens takes about a millisecond
_MOST_FIRST = 512  # prompts of first turns that are remembered


@dataclass
class Prompt:
    """What the model reads. sources: of the tokens, in runs. keys: of the conversation up to each message.

    text: with a break in each control token that others wrote (see `ControlTokens`).
    form: a key of the tools and the template's arguments, "" without any.
    """

    text: str
    tokens: list[int]
    sources: Runs
    keys: list[str]
    form: str = ""

    @cached_property
    def digest(self) -> int:
        """A number for the tokens, which the samples of a prompt share."""
        return digest_of(self.tokens)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the template has written `<think>` already."""
        return self.text.rstrip().endswith(THINK)


@dataclass
class _Draft:
    """A prompt before text[start:] is made into tokens. What stands before is `turn` and its prompt.

    places: (start, end, source) of words in the text. is_first: no assistant has spoken yet.
    """

    text: str
    form: str
    keys: list[str]
    places: list[tuple[int, int, int]]
    start: int = 0
    turn: _Turn | None = None
    is_first: bool = False


@dataclass
class _Turn:
    """A turn that was sampled. ended: whether its last token is one that ends turns."""

    tokenizer: Any
    prompt: Prompt
    tokens: list[int]
    ended: bool

    @cached_property
    def body(self) -> str:
        """Its text without the token that ended it."""
        return self.tokenizer.decode(self.tokens[:-1] if self.ended else self.tokens, skip_special_tokens=False)

    @cached_property
    def end(self) -> str:
        """The text of that token, "" for a turn that was cut off."""
        return self.tokenizer.decode(self.tokens[-1:], skip_special_tokens=False) if self.ended else ""


class Conversations:
    """Prompts of one tokenizer, and the turns sampled for them. most_tokens: of the turns that are remembered.

    thinking: passed to the chat template; None is its own default. All but `text` is for one thread, or event loop.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolCallParser,
        *,
        thinking: bool | None = None,
        most_tokens: int = 64_000_000,
    ):
        self.tokenizer, self.parser, self._thinking = tokenizer, parser, thinking
        self._turns: OrderedDict[_Key, _Turn] = OrderedDict()  # by the conversation that it ends
        self._first: OrderedDict[_Key, Prompt] = OrderedDict()  # prompts of first turns, which the samples of one share
        self._making: dict[_Key, asyncio.Task[Prompt]] = {}
        self._expected, self._has_others = set[str](), False  # by `expect`; a prompt of a first turn was none of them
        self._n_tokens, self._most_tokens = 0, most_tokens
        # The first call turns off truncation and padding of tokenizer.json. No thread may do so while another encodes.
        self.tokenizer("", add_special_tokens=False)
        control_tokens(tokenizer).encode(BREAK)  # the first takes long

    def prompt(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> Prompt:
        """The prompt for the assistant's next turn. Raises DataError where the template refuses the messages."""
        form, keys = _form_of(tools, template), conversation_keys(messages)
        if (known := self._first.get((form, keys[-1]))) is not None:
            return known
        draft = self._draft(messages, tools, template, form, keys)
        return self._finished(draft, *self._encode(draft))

    async def prompt_beside(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> Prompt:
        """The same for an event loop, which goes on while a thread makes tokens of a long text.

        Who asks for the same prompt meanwhile gets the same.
        """
        form, keys = _form_of(tools, template), conversation_keys(messages)
        if (known := self._first.get((form, keys[-1]))) is not None:
            return known
        if (making := self._making.get((form, keys[-1]))) is None:
            draft = self._draft(messages, tools, template, form, keys)
            self._has_others = self._has_others or (draft.is_first and (form != "" or keys[-1] not in self._expected))
            if len(draft.text) - draft.start < _LONG or not self.tokenizer.is_fast:
                return self._finished(draft, *self._encode(draft))
            making = self._making[form, keys[-1]] = asyncio.ensure_future(self._make(draft))
        return await asyncio.shield(making)  # who no longer waits must not end it for the others

    async def expect(self, conversations: Sequence[Sequence[Message]]) -> None:
        """Make prompts that are likely to be asked for soon, without tools. Those that cannot be made are left out.

        It ends early where somebody begins with another prompt, as then the others may not be asked for either.
        """

        async def one(messages: Sequence[Message]) -> None:
            with suppress(DataError):
                await self.prompt_beside(messages)

        self._expected, self._has_others = {conversation_keys(messages)[-1] for messages in conversations}, False
        making: list[asyncio.Task[None]] = []
        for messages in conversations:
            if self._has_others:
                break
            making.append(asyncio.ensure_future(one(messages)))
            await asyncio.sleep(0)  # requests come between
        await asyncio.gather(*making)

    async def _make(self, draft: _Draft) -> Prompt:
        try:
            return self._finished(draft, *await asyncio.to_thread(self._encode, draft))
        finally:
            del self._making[draft.form, draft.keys[-1]]

    def text(self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None) -> str:
        """What the chat template makes of the messages. Raises DataError where it refuses them. Any thread may ask."""
        if self.tokenizer.chat_template is None:
            raise DataError("the model's tokenizer has no chat template, so messages cannot be rendered")
        how = {"thinking": self._thinking, **(template or {})}
        if "enable_thinking" in how:
            how["thinking"] = how.pop("enable_thinking")
        text = render(self.tokenizer, list(messages), tools or None, opened=True, **how)
        if problem := bad_text(text):
            raise DataError(f"what the chat template makes of these messages {problem}")
        return text

    def _draft(self, messages: Sequence[Message], tools: Any, template: Any, form: str, keys: list[str]) -> _Draft:
        """A prompt but for the tokens of its new text."""
        control = control_tokens(self.tokenizer)
        shielded = control.shield_messages(messages), control.shield(tools), control.shield(template)
        text = self.text(*shielded)
        places = self._places(text, *shielded)
        for number in range(len(messages) - 1, 0, -1):
            key = form, keys[number - 1]
            if messages[number - 1]["role"] == "assistant" and (turn := self._turns.get(key)):
                start = self._continues(turn, text)
                if start is not None:
                    self._turns.move_to_end(key)
                    return _Draft(text, form, keys, places, start=start, turn=turn)
        return _Draft(text, form, keys, places, is_first=not any(one["role"] == "assistant" for one in messages))

    def _finished(self, draft: _Draft, tokens: list[int], sources: Runs) -> Prompt:
        """The prompt with the tokens of its new text."""
        if (turn := draft.turn) is not None:
            tokens = turn.prompt.tokens + turn.tokens + tokens
            sources = [*turn.prompt.sources, (int(Source.SAMPLED), len(turn.tokens)), *sources]
        prompt = Prompt(draft.text, tokens, sources, draft.keys, draft.form)
        if draft.is_first:
            self._first[draft.form, draft.keys[-1]] = prompt
            if len(self._first) > _MOST_FIRST:
                self._first.popitem(last=False)
        return prompt

    def remember(self, prompt: Prompt, tokens: list[int], end_ids: frozenset[int], message: Message) -> None:
        """A turn that was sampled for a prompt. message: as clients send it back. end_ids: may be its last token."""
        key = prompt.form, _next_key(prompt.keys[-1], message)
        if (before := self._turns.pop(key, None)) is not None:
            self._n_tokens -= len(before.prompt.tokens)
        self._turns[key] = _Turn(self.tokenizer, prompt, tokens, bool(tokens) and tokens[-1] in end_ids)
        self._n_tokens += len(prompt.tokens)
        while self._n_tokens > self._most_tokens:
            _, oldest = self._turns.popitem(last=False)
            self._n_tokens -= len(oldest.prompt.tokens)

    def _continues(self, turn: _Turn, text: str) -> int | None:
        """Where in `text` what follows the turn begins, if all before it is as the model saw and said it."""
        said_at = len(turn.prompt.text)
        if not text.startswith(turn.prompt.text):
            return None
        end = turn.end or self._template_end
        at = text.find(end, said_at) if end else -1
        n_written = turn.body.count(end)  # the model may have written it as plain text
        while at >= 0 and text[said_at:at].replace(BREAK, "").count(end) < n_written:
            at = text.find(end, at + len(end))
        if at < 0 or not self._same(turn, text[said_at:at].replace(BREAK, "")):
            return None
        return at + len(turn.end)

    def _same(self, turn: _Turn, body: str) -> bool:
        """Whether a turn that the template wrote says what the model did. Space and the form of JSON may differ."""
        if body == turn.body:
            return True
        if any((tag in body) != (tag in turn.body) for tag in (THINK, END_THINK)):
            return False  # the template has dropped reasoning, if only an empty one
        opened = turn.prompt.opens_reasoning
        written, sampled = (_meaning(self.parser.parse(one, in_reasoning=opened)) for one in (body, turn.body))
        return written == sampled

    @cached_property
    def _template_end(self) -> str:
        """What the template writes behind a turn of the assistant, as far as it is one special token."""
        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" + _CLOSE}]
        _, _, behind = render(self.tokenizer, asked, None).partition(_CLOSE)
        special = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        found = [token for token in special if behind.lstrip().startswith(token)]
        return max(found, key=len, default=self.tokenizer.eos_token or "")

    def _encode(self, draft: _Draft) -> tuple[list[int], Runs]:
        """The tokens of the new text, and where they come from. Any thread may ask."""
        text, start, places = draft.text, draft.start, draft.places
        control = control_tokens(self.tokenizer)
        if not self.tokenizer.is_fast:
            tokens = control.encode(text[start:])
            return tokens, [(int(Source.TEMPLATE), len(tokens))] if tokens else []
        tokens, offsets = control.encode_with_offsets(text[start:])
        sources, spans = [], iter([place for place in places if place[1] > start])
        place = next(spans, None)
        for first, last in offsets:
            while place is not None and start + first >= place[1]:
                place = next(spans, None)
            inside = place is not None and start + last > place[0]
            sources.append(place[2] if inside and place is not None else int(Source.TEMPLATE))
        return tokens, runs_of(sources)

    def _places(self, text: str, messages: Sequence[Message], tools: Any, template: Any) -> list[tuple[int, int, int]]:
        """Where the words of others than the assistant stand in the text: (start, end, source). [] where in doubt."""
        others = [message for message in messages if message["role"] in OF_ROLE and message["content"].strip()]
        if not others:
            return []
        marked = [
            {**message, "content": _marked(message["content"])} if message["role"] in OF_ROLE else message
            for message in messages
        ]
        pieces = self.text(marked, tools, template).split(_OPEN)
        places, at = [], len(pieces[0])
        if len(pieces) != len(others) + 1 or "".join(pieces).replace(_CLOSE, "") != text:
            return []
        for piece, message in zip(pieces[1:], others, strict=True):
            words, _, behind = piece.partition(_CLOSE)
            places.append((at, at + len(words), int(OF_ROLE[message["role"]])))
            at += len(words) + len(behind)
        return places


def _marked(content: str) -> str:
    words = content.strip()
    if not words:
        return content
    before, _, after = content.partition(words)
    return f"{before}{_OPEN}{words}{_CLOSE}{after}"


def _meaning(message: ParsedMessage) -> tuple[Any, ...]:
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return (message.content or "").strip(), (message.reasoning_content or "").strip(), calls


def conversation_keys(messages: Sequence[Message]) -> list[str]:
    """A key for the conversation up to and with each message. Equal keys mean equal messages."""
    key, keys = "", []
    for message in messages:
        key = _next_key(key, message)
        keys.append(key)
    return keys


def _form_of(tools: Any, template: Any) -> str:
    return _next_key("", [tools or None, template or None]) if tools or template else ""


_as_text = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


def _next_key(key: str, value: Any) -> str:
    return hashlib.blake2b(f"{key}{_as_text(value)}".encode(), digest_size=16).hexdigest()
