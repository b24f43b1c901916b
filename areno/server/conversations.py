"""What a server remembers of conversations, within a bound for all of it.

Messages to exact tokens: the next turn of a conversation goes on from the tokens of its earlier ones.

Text is never made into tokens twice. A turn that was sampled here is remembered by the messages that led to it. When
these come back with others behind them, the new prompt is the old one, what was sampled, and only then new tokens for
what the chat template writes after the turn. Where the template writes the history otherwise than the model saw it
(it drops earlier reasoning, say), the prompt is made from its text alone, as the template's author meant it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from areno.data.chat_template import render
from areno.data.control_tokens import BREAK, control_tokens
from areno.data.row_schema import bad_text
from areno.errors import DataError
from areno.server.errors import has_more_tokens, is_larger
from areno.server.host import Threads
from areno.server.parsers import ParsedMessage, ToolCallParser
from areno.server.parsers.message import END_THINK, THINK
from areno.server.tokens import OF_ROLE, Runs, Source, digest_of, runs_at
from areno.types import Message

Key = tuple[str, str]
"""Of the form of a prompt, and of a conversation."""
_OF_AN_ENTRY = 256  # tokens that take about as much memory as an entry without its tokens: 1 to 2 KB


class Remembered:
    """Entries by key. Those that were not used for the longest time are forgotten. Any thread may use it.

    Args:
        most_tokens: Limit on the sum over all entries. Each entry counts its tokens plus 256 for its own overhead.
    """

    def __init__(self, most_tokens: int):
        self._most, self.n_tokens = most_tokens, 0
        self._entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Any:
        """Return the entry of a key, or None."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, entry: Any, n_tokens: int, text: str = "") -> None:
        """Remember an entry in the place of an earlier one.

        Args:
            key: Of the entry.
            entry: Any object.
            n_tokens: Number of tokens that the entry keeps.
            text: Text that the entry keeps. A long one may have few tokens, where unknown letters become one token.
        """
        size = n_tokens + len(text) // 8 + _OF_AN_ENTRY
        with self._lock:
            self._forget(key)
            self._entries[key] = entry, size
            self.n_tokens += size
            while self.n_tokens > self._most:
                self._forget(next(iter(self._entries)))

    def _forget(self, key: Key) -> None:
        _, n_tokens = self._entries.pop(key, (None, 0))
        self.n_tokens -= n_tokens


# Around the words of a message. Private-use characters, which no template and no content has.
_OPEN, _CLOSE = "\ue002", "\ue003"
_LONG = 1000  # characters: to make their tokens takes about a millisecond
_LARGE = 20_000  # characters of messages and tools: to render them takes about as long


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

    places: (start, end, source) of words in the text.
    """

    text: str
    form: str
    keys: list[str]
    places: list[tuple[int, int, int]] = field(default_factory=list)
    start: int = 0
    turn: _Turn | None = None


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


@dataclass
class _Making:
    """A prompt that a thread makes. n_waiting: requests for it."""

    task: asyncio.Task[Prompt]
    n_waiting: int = 0


class PromptTooLong(DataError):
    """A prompt surely has more tokens than there is room for. It was not made."""


class Conversations:
    """Prompts of one tokenizer, and the turns sampled for them. `prompt_beside` is for one event loop.

    Args:
        tokenizer: Of transformers.
        parser: Of the tool calls of the model's family.
        thinking: Passed to the chat template; None is its own default.
        most_tokens: Of the prompts that are remembered, see `Remembered`.
        most_prompt: Tokens of a prompt that there is room for; longer ones are not remembered. None has no bound.
        threads: Work for `prompt_beside`.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolCallParser,
        *,
        thinking: bool | None = None,
        most_tokens: int = 64_000_000,
        most_prompt: int | None = None,
        threads: Threads | None = None,
    ):
        self.tokenizer, self.parser, self._thinking, self._most_prompt = tokenizer, parser, thinking, most_prompt
        # Turns by the conversation that each ends, and prompts of first turns, which the samples of one share.
        self._remembered = Remembered(most_tokens)
        self._making: dict[Key, _Making] = {}
        self._threads = threads or prompt_threads(tokenizer)
        self._expected, self._has_others = set[str](), False  # by `expect`; a prompt of a first turn was none of them
        # The first call turns off truncation and padding of tokenizer.json. No thread may do so while another encodes.
        self.tokenizer("", add_special_tokens=False)
        control_tokens(tokenizer).encode(BREAK)  # the first takes long

    def prompt(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> Prompt:
        """Return the prompt for the assistant's next turn.

        Raises DataError where the template refuses the messages, PromptTooLong where there is no room for the prompt.
        """
        form, keys = _form_of(tools, template), conversation_keys(messages)
        if (known := self._remembered.get((form, keys[-1]))) is not None:
            return known
        return self._keep(self._finished(self._draft(messages, tools, template, form, keys)), messages)

    async def prompt_beside(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> Prompt:
        """Return the same as `prompt`, without blocking the event loop: long prompts are made in threads.

        Requests for a prompt that is being made share it. When all of them are cancelled, it is given up.
        """
        is_large = is_larger([list(messages), tools, template], _LARGE)

        def named() -> tuple[str, list[str]]:
            return _form_of(tools, template), conversation_keys(messages)

        form, keys = await self._threads.run(named) if is_large else named()
        key = form, keys[-1]
        if (known := self._remembered.get(key)) is not None:
            return known
        if (making := self._making.get(key)) is None:
            is_expected = form == "" and keys[-1] in self._expected
            self._has_others = self._has_others or (_is_first(messages) and not is_expected)
            draft = None if is_large else self._draft(messages, tools, template, form, keys)
            if draft is not None and len(draft.text) - draft.start < _LONG and self.tokenizer.is_fast:
                return self._keep(self._finished(draft), messages)
            work = partial(self._made, draft, messages, tools, template, form, keys)
            making = self._making[key] = _Making(asyncio.ensure_future(self._make(work, messages)))
        making.n_waiting += 1
        try:
            return await asyncio.shield(making.task)  # a cancelled request must not end it for the others
        finally:
            making.n_waiting -= 1
            if not making.n_waiting:
                making.task.cancel()
                del self._making[key]
            del making  # an error has this frame in its traceback: a cycle would keep the prompt's text

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

    async def _make(self, work: Callable[[], Prompt], messages: Sequence[Message]) -> Prompt:
        return self._keep(await self._threads.run(work), messages)

    def _made(self, draft: _Draft | None, *asked: Any) -> Prompt:
        """Return a prompt in a thread. draft: if it is there already; else it is made of `asked`."""
        prompt = self._finished(draft or self._draft(*asked))
        _ = prompt.digest  # takes long in the event loop, too
        return prompt

    def _keep(self, prompt: Prompt, messages: Sequence[Message]) -> Prompt:
        """Remember the prompt of a first turn if there is room for it, and return it."""
        if _is_first(messages) and (self._most_prompt is None or len(prompt.tokens) <= self._most_prompt):
            self._remembered.put((prompt.form, prompt.keys[-1]), prompt, len(prompt.tokens), prompt.text)
        return prompt

    def text(self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None) -> str:
        """What the chat template makes of the messages. Raises DataError where it refuses them. Any thread may ask."""
        if self.tokenizer.chat_template is None:
            raise DataError("the model's tokenizer has no chat template, so messages cannot be rendered")
        variables = dict(template or {})
        thinking = variables.pop("enable_thinking", self._thinking)
        text = render(self.tokenizer, list(messages), tools or None, thinking, True, **variables)
        if problem := bad_text(text):
            raise DataError(f"what the chat template makes of these messages {problem}")
        return text

    def _draft(self, messages: Sequence[Message], tools: Any, template: Any, form: str, keys: list[str]) -> _Draft:
        """Return a prompt but for the tokens of its new text. Raises PromptTooLong where they would be too many."""
        control = control_tokens(self.tokenizer)
        shielded = control.shield_messages(messages), control.shield(tools), control.shield(template)
        text = self.text(*shielded)
        draft = self._behind_a_turn(text, messages, form, keys) or _Draft(text, form, keys)
        n_before = 0 if draft.turn is None else len(draft.turn.prompt.tokens) + len(draft.turn.tokens)
        if self._most_prompt is not None:
            most = max(self._most_prompt - n_before, 0)
            if has_more_tokens(self.tokenizer, text[draft.start :].replace(BREAK, ""), most):
                raise PromptTooLong("the prompt has more than {} tokens", self._most_prompt)
        draft.places = self._places(text, *shielded)
        return draft

    def _behind_a_turn(self, text: str, messages: Sequence[Message], form: str, keys: list[str]) -> _Draft | None:
        """Return the draft of a text that goes on from the last of its turns that is remembered, if there is one."""
        for number in range(len(messages) - 1, 0, -1):
            key = form, keys[number - 1]
            if messages[number - 1]["role"] == "assistant" and (turn := self._remembered.get(key)):
                start = self._continues(turn, text)
                if start is not None:
                    return _Draft(text, form, keys, start=start, turn=turn)
        return None

    def _finished(self, draft: _Draft) -> Prompt:
        """Return the prompt with the tokens of its new text."""
        tokens, sources = self._encode(draft)
        if (turn := draft.turn) is not None:
            tokens = turn.prompt.tokens + turn.tokens + tokens
            sources = [*turn.prompt.sources, (int(Source.SAMPLED), len(turn.tokens)), *sources]
        return Prompt(draft.text, tokens, sources, draft.keys, draft.form)

    def remember(self, prompt: Prompt, tokens: list[int], end_ids: frozenset[int], message: Message) -> None:
        """A turn that was sampled for a prompt. message: as clients send it back. end_ids: may be its last token."""
        key = prompt.form, _next_key(prompt.keys[-1], message)
        turn = _Turn(self.tokenizer, prompt, tokens, bool(tokens) and tokens[-1] in end_ids)
        self._remembered.put(key, turn, len(prompt.tokens) + len(tokens), prompt.text)

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
        tokens, span_of = control.encode_with_spans(text[start:])
        return tokens, runs_at(places, len(tokens), span_of, start)

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


def prompt_threads(tokenizer: Any) -> Threads:
    """Return threads that make prompts: one for a tokenizer in Python, which several threads must not use at once."""
    return Threads(2 if tokenizer.is_fast else 1, "areno-prompts")


def _is_first(messages: Sequence[Message]) -> bool:
    """Return whether the assistant has not spoken yet."""
    return not any(message["role"] == "assistant" for message in messages)


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
    long: dict[str, str] = {}
    if isinstance(value, dict):  # JSON of long texts would take long, and no other thread would run meanwhile
        long = {name: text for name, text in value.items() if isinstance(text, str) and len(text) > _LONG}
    short = {**value, **{name: [len(text)] for name, text in long.items()}} if long else value
    hashed = hashlib.blake2b(f"{key}{_as_text(short)}".encode(), digest_size=16)
    for _, text in sorted(long.items()):
        hashed.update(text.encode())
    return hashed.hexdigest()
