"""Conversion of conversations into exact prompt tokens.

Each sampled turn is cached. When a client sends a conversation that continues the turn, the new prompt consists of the
earlier prompt, the sampled tokens, and newly encoded tokens for the text after the turn. So sampled text is never
encoded a second time, which could give other tokens. If the template now renders earlier turns differently, for example
without their reasoning, the whole prompt is encoded from its text.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

from areno.data.chat_template import opens_reasoning, render
from areno.data.control_tokens import BREAK, control_tokens, warn_of_unknown_tokens
from areno.data.messages import separate_calls, template_messages
from areno.data.row_schema import json_value_problem
from areno.data.template_omissions import check_rendered
from areno.data.turn_ends import turn_ends
from areno.errors import DataError
from areno.server.errors import PromptTooLong, check_prompt_length, exceeds_size
from areno.server.messages import conversation_keys, extended_key, template_inputs_key
from areno.server.parsers import ToolCallParser
from areno.server.parsers.message import END_THINK, THINK
from areno.server.threads import ThreadPool
from areno.server.token_sources import SOURCE_OF_ROLE, Runs, TokenSource, source_runs, token_digest
from areno.types import Message

Key = tuple[str, str]  # of the tools and template variables, of the conversation
_Span = tuple[int, int, int]  # start and end in characters, source
_ENTRY_OVERHEAD = 256  # tokens that take about as much memory as an entry without its tokens: 1 to 2 KB


class ConversationCache:
    """A thread-safe LRU cache. The size of an entry is its number of tokens, plus text characters / 8, plus 256."""

    def __init__(self, max_tokens: int):
        self._max_tokens, self.n_tokens = max_tokens, 0
        self._entries: OrderedDict[Key, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Any:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Key, entry: Any, n_tokens: int, text: str = "") -> None:
        """Add or replace an entry. `text` counts too, because a long text can have few tokens."""
        size = n_tokens + len(text) // 8 + _ENTRY_OVERHEAD
        with self._lock:
            self._remove(key)
            self._entries[key] = entry, size
            self.n_tokens += size
            while self.n_tokens > self._max_tokens:
                self._remove(next(iter(self._entries)))

    def _remove(self, key: Key) -> None:
        _, n_tokens = self._entries.pop(key, (None, 0))
        self.n_tokens -= n_tokens


_LONG = 1000  # characters: encoding them takes about a millisecond
_LARGE = 20_000  # characters of messages and tools: rendering them takes about as long


@dataclass
class EncodedPrompt:
    """A rendered and encoded prompt.

    If a message contains the text of a special token, such as <|im_end|>, `text` has the random marker `BREAK` in it,
    so that it is not encoded as the special token. `keys` is the result of `conversation_keys`, and `inputs_key` of
    `template_inputs_key`.
    """

    text: str
    tokens: list[int]
    sources: Runs
    keys: list[str]
    inputs_key: str = ""

    @cached_property
    def digest(self) -> int:
        """A 64-bit hash of the token ids, computed once for all samples of the prompt."""
        return token_digest(self.tokens)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the chat template ended the prompt with `<think>`."""
        return opens_reasoning(self.text)


@dataclass
class _DraftPrompt:
    """A rendered prompt whose text from character `start` on is not encoded yet."""

    text: str
    inputs_key: str
    keys: list[str]
    spans: list[_Span] = field(default_factory=list)  # of contents, without those of the assistant
    start: int = 0
    turn: _Turn | None = None  # the cached turn that the prompt continues


@dataclass
class _Turn:
    tokenizer: Any
    prompt: EncodedPrompt
    tokens: list[int]
    ended: bool  # False: the turn was cut off
    hidden: frozenset[int] = frozenset()

    @cached_property
    def body(self) -> str:
        """Text as the client got it, without the token that ended the turn."""
        tokens = self.tokens[:-1] if self.ended else self.tokens
        shown = [token for token in tokens if token not in self.hidden]
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    @cached_property
    def end(self) -> str:
        """Text of the token that ended the turn, or "" if the turn was cut off."""
        return self.tokenizer.decode(self.tokens[-1:], skip_special_tokens=False) if self.ended else ""


@dataclass
class _PendingPrompt:
    """A prompt that a worker thread is building, and the number of requests that wait for it."""

    task: asyncio.Task[EncodedPrompt]
    n_waiting: int = 0


class PromptBuilder:
    """Builder of prompts for one tokenizer. `build_prompt` is for any thread, the async methods are for one event loop.

    `cache` maps a conversation (a hash of its messages, tools and template variables) to the sampled turn with which it
    ends. A conversation without assistant messages maps to its prompt, which all samples share. If `thinking` is None,
    the template's default applies.
    """

    def __init__(
        self,
        tokenizer: Any,
        parser: ToolCallParser,
        *,
        thinking: bool | None = None,
        max_cached_tokens: int = 64_000_000,
        max_prompt_tokens: int | None = None,
        threads: ThreadPool | None = None,
    ):
        self.tokenizer, self.parser, self._thinking = tokenizer, parser, thinking
        self._max_prompt_tokens = max_prompt_tokens
        self.cache = ConversationCache(max_cached_tokens)
        self._pending: dict[Key, _PendingPrompt] = {}
        self._threads = threads or prompt_threads(tokenizer)
        # Conversations given to `prefetch`, and whether a first turn of another conversation was requested since.
        self._prefetched, self._has_others = set[str](), False
        # The first call turns off truncation and padding of tokenizer.json. No thread may do so while another encodes.
        self.tokenizer("", add_special_tokens=False)
        control_tokens(tokenizer).encode(BREAK)  # the first call takes long

    def build_prompt(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """Build the prompt for the assistant's next turn after messages from `read_messages`.

        Raises DataError if there is no chat template or it refuses the messages, PromptTooLong if the prompt is too
        long.
        """
        inputs_key, keys = template_inputs_key(tools, template), conversation_keys(messages)
        if isinstance(known := self.cache.get((inputs_key, keys[-1])), EncodedPrompt):  # a cached turn is no prompt
            return known
        return self._cache_prompt(
            self._encode_draft(self._render_draft(messages, tools, template, inputs_key, keys)), messages
        )

    async def build_prompt_async(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> EncodedPrompt:
        """Build the prompt as in `build_prompt`, without blocking the event loop.

        Long prompts are built in threads. Concurrent calls for the same prompt share the work, which is cancelled when
        all of these calls are cancelled.
        """
        is_large = exceeds_size([list(messages), tools, template], _LARGE)

        def key_parts() -> tuple[str, list[str]]:
            return template_inputs_key(tools, template), conversation_keys(messages)

        inputs_key, keys = await self._threads.run(key_parts) if is_large else key_parts()
        key = inputs_key, keys[-1]
        if isinstance(known := self.cache.get(key), EncodedPrompt):  # a cached turn is no prompt
            return known
        if (pending := self._pending.get(key)) is None:
            is_prefetched = inputs_key == "" and keys[-1] in self._prefetched
            self._has_others = self._has_others or (is_first_turn(messages) and not is_prefetched)
            draft = None if is_large else self._render_draft(messages, tools, template, inputs_key, keys)
            if draft is not None and len(draft.text) - draft.start < _LONG and self.tokenizer.is_fast:
                return self._cache_prompt(self._encode_draft(draft), messages)
            work = partial(self._build, draft, messages, tools, template, inputs_key, keys)
            pending = self._pending[key] = _PendingPrompt(asyncio.ensure_future(self._build_in_thread(work, messages)))
        pending.n_waiting += 1
        try:
            return await asyncio.shield(pending.task)  # a cancelled request must not end it for the others
        finally:
            pending.n_waiting -= 1
            if not pending.n_waiting:
                pending.task.cancel()
                del self._pending[key]
            del pending  # the traceback of an error holds this frame: the cycle would keep the prompt's text

    async def prefetch(self, conversations: Sequence[Sequence[Message]]) -> None:
        """Build and cache prompts that are likely to be requested soon. One that cannot be built is skipped.

        Building stops once a client requests a first turn that is not in `conversations`, because clients may then not
        request the rest either.
        """

        async def prefetch_one(messages: Sequence[Message]) -> None:
            with suppress(DataError, PromptTooLong):
                await self.build_prompt_async(messages)

        self._prefetched = {conversation_keys(messages)[-1] for messages in conversations}
        self._has_others = False
        tasks: list[asyncio.Task[None]] = []
        for messages in conversations:
            if self._has_others:
                break
            tasks.append(asyncio.ensure_future(prefetch_one(messages)))
            await asyncio.sleep(0)  # let requests run in between
        await asyncio.gather(*tasks)

    async def _build_in_thread(self, work: Callable[[], EncodedPrompt], messages: Sequence[Message]) -> EncodedPrompt:
        """Call `work` in a thread. If its prompt is for a first turn, cache it."""
        return self._cache_prompt(await self._threads.run(work), messages)

    def _build(self, draft: _DraftPrompt | None, *arguments: Any) -> EncodedPrompt:
        """Encode a draft and hash its tokens. If `draft` is None, make it from `arguments`. Runs in a thread."""
        prompt = self._encode_draft(draft or self._render_draft(*arguments))
        _ = prompt.digest  # computed here, since it would block the event loop
        return prompt

    def _cache_prompt(self, prompt: EncodedPrompt, messages: Sequence[Message]) -> EncodedPrompt:
        """Cache a prompt and return it. It is only cached if it is for a first turn and not too long."""
        limit = self._max_prompt_tokens
        if is_first_turn(messages) and (limit is None or len(prompt.tokens) <= limit):
            self.cache.put((prompt.inputs_key, prompt.keys[-1]), prompt, len(prompt.tokens), prompt.text)
        return prompt

    def render_text(
        self, messages: Sequence[Message], tools: Any = None, template: Mapping[str, Any] | None = None
    ) -> str:
        """Render messages and the beginning of the assistant's turn. Any thread may call it."""
        if self.tokenizer.chat_template is None:
            raise DataError("the model's tokenizer has no chat template, so messages cannot be rendered")
        thinking, variables = self._variables(template)
        messages = separate_calls(self.tokenizer, template_messages(self.tokenizer, messages))
        text = render(self.tokenizer, messages, tools or None, thinking, True, **variables)
        if problem := json_value_problem(text):
            raise DataError(f"the text that the chat template renders {problem}")
        return text

    def _variables(self, template: Mapping[str, Any] | None) -> tuple[bool | None, dict[str, Any]]:
        """Return (enable_thinking, the other variables of the chat template)."""
        variables = {"enable_thinking": self._thinking, **(template or {})}
        return variables.pop("enable_thinking"), variables

    def _render_draft(
        self, messages: Sequence[Message], tools: Any, template: Any, inputs_key: str, keys: list[str]
    ) -> _DraftPrompt:
        """Render the messages, and find the cached turn that they continue. Raises PromptTooLong."""
        control = control_tokens(self.tokenizer)
        in_form = separate_calls(self.tokenizer, template_messages(self.tokenizer, messages))
        escaped = control.escape_messages(in_form), control.escape(tools), control.escape(template)
        text = self.render_text(*escaped)
        thinking, variables = self._variables(template)
        check_rendered(self.tokenizer, in_form, tools or None, thinking, True, **variables)
        draft = self._draft_after_turn(text, messages, inputs_key, keys) or _DraftPrompt(text, inputs_key, keys)
        if self._max_prompt_tokens is not None:
            n_before = 0 if draft.turn is None else len(draft.turn.prompt.tokens) + len(draft.turn.tokens)
            new_text = text[draft.start :].replace(BREAK, "")
            check_prompt_length(self.tokenizer, new_text, self._max_prompt_tokens, n_before)
        draft.spans = self._content_spans(text, *escaped)
        return draft

    def _draft_after_turn(
        self, text: str, messages: Sequence[Message], inputs_key: str, keys: list[str]
    ) -> _DraftPrompt | None:
        """Return a draft that continues the last cached turn that `text` contains unchanged. None if there is none."""
        for number in range(len(messages) - 1, 0, -1):
            key = inputs_key, keys[number - 1]
            if messages[number - 1]["role"] == "assistant" and (turn := self.cache.get(key)):
                start = self._end_of_turn(turn, text)
                if start is not None:
                    return _DraftPrompt(text, inputs_key, keys, start=start, turn=turn)
        return None

    def _encode_draft(self, draft: _DraftPrompt) -> EncodedPrompt:
        tokens, sources = self._encode_new_text(draft)
        if (turn := draft.turn) is not None:
            tokens = turn.prompt.tokens + turn.tokens + tokens
            sources = [*turn.prompt.sources, (int(TokenSource.SAMPLED), len(turn.tokens)), *sources]
        return EncodedPrompt(draft.text, tokens, sources, draft.keys, draft.inputs_key)

    def cache_turn(
        self,
        prompt: EncodedPrompt,
        tokens: list[int],
        end_ids: frozenset[int],
        message: Message,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        """Cache a sampled turn. `message` is the turn as a later request will send it, after `read_messages`.

        `end_ids` are tokens that can end a turn. `hidden` tokens have no text in `message`.
        """
        key = prompt.inputs_key, extended_key(prompt.keys[-1], message)
        turn = _Turn(self.tokenizer, prompt, tokens, bool(tokens) and tokens[-1] in end_ids, hidden)
        self.cache.put(key, turn, len(prompt.tokens) + len(tokens), prompt.text)

    def _end_of_turn(self, turn: _Turn, text: str) -> int | None:
        """Return the index in `text` at which a cached turn ends, or None if the turn is rendered differently there."""
        start = len(turn.prompt.text)
        if not text.startswith(turn.prompt.text):
            return None
        end = turn.end or turn_ends(self.tokenizer).end or self.tokenizer.eos_token or ""
        at = text.find(end, start) if end else -1
        n_written = turn.body.count(end)  # the model may have written the end token as plain text
        while at >= 0 and text[start:at].replace(BREAK, "").count(end) < n_written:
            at = text.find(end, at + len(end))
        if at < 0 or not self._has_same_meaning(turn, text[start:at].replace(BREAK, "")):
            return None
        return at + len(turn.end)

    def _has_same_meaning(self, turn: _Turn, body: str) -> bool:
        """Return whether a rendered turn means what was sampled.

        Whitespace around content and reasoning and the formatting of JSON arguments may differ.
        """
        if body == turn.body:
            return True
        if any((tag in body) != (tag in turn.body) for tag in (THINK, END_THINK)):
            return False  # the template has dropped the reasoning, which may be empty
        opened = turn.prompt.opens_reasoning
        written, sampled = (
            self.parser.meaning(self.parser.parse(one, in_reasoning=opened)) for one in (body, turn.body)
        )
        return written == sampled

    def _encode_new_text(self, draft: _DraftPrompt) -> tuple[list[int], Runs]:
        """Encode the text from character `draft.start` on. Any thread may call it."""
        text, start, spans = draft.text, draft.start, draft.spans
        control = control_tokens(self.tokenizer)
        if not self.tokenizer.is_fast:
            tokens = control.encode(text[start:])
            warn_of_unknown_tokens(self.tokenizer, text[start:], tokens)
            return tokens, [(int(TokenSource.TEMPLATE), len(tokens))] if tokens else []
        n_known = 0
        if draft.turn is not None and draft.turn.ended and not control.adds_no_space:
            start, n_known = start - len(draft.turn.end), 1  # so that no space is added after the end of the turn
        tokens, span_of = control.encode_with_spans(text[start:])
        warn_of_unknown_tokens(self.tokenizer, text[start:], tokens)
        return tokens[n_known:], source_runs(spans, len(tokens) - n_known, lambda at: span_of(at + n_known), start)

    def _content_spans(self, text: str, messages: Sequence[Message], tools: Any, template: Any) -> list[_Span]:
        """Return the spans of the messages' contents in the rendered text, except the assistant's messages.

        They are found by rendering a second time with random marks around each content. The list is empty if the marks
        change the rest of the text.
        """
        others = [message for message in messages if message["role"] in SOURCE_OF_ROLE and message["content"].strip()]
        if not others:
            return []
        texts = [text, *(message["content"] for message in others)]
        opening, closing = _unused_mark(texts), _unused_mark(texts)
        marked = [
            {**each, "content": _mark_content(each["content"], opening, closing)}
            if each["role"] in SOURCE_OF_ROLE
            else each
            for each in messages
        ]
        pieces = self.render_text(marked, tools, template).split(opening)
        spans, at = [], len(pieces[0])
        if len(pieces) != len(others) + 1 or "".join(pieces).replace(closing, "") != text:
            return []
        for piece, message in zip(pieces[1:], others, strict=True):
            words, _, after = piece.partition(closing)
            spans.append((at, at + len(words), int(SOURCE_OF_ROLE[message["role"]])))
            at += len(words) + len(after)
        return spans


@lru_cache
def template_names(template: str | None) -> frozenset[str]:
    """Return all names in the code of a chat template. The variables that the template reads are among them."""
    import jinja2

    with suppress(jinja2.TemplateError):  # a request with messages tells of it
        return frozenset(word for _, kind, word in jinja2.Environment().lex(template or "") if kind == "name")
    return frozenset()


def prompt_threads(tokenizer: Any) -> ThreadPool:
    """Return threads that build prompts: one for a slow tokenizer, which is not thread-safe."""
    return ThreadPool(2 if tokenizer.is_fast else 1, "areno-prompts")


def is_first_turn(messages: Sequence[Message]) -> bool:
    return not any(message["role"] == "assistant" for message in messages)


def _unused_mark(texts: Sequence[str]) -> str:
    """Return a random mark that is in none of the texts. It has no letters, because a template might change them."""
    mark = f"\ue002{secrets.randbits(128)}\ue002"
    while any(mark in text for text in texts):
        mark = f"\ue002{secrets.randbits(128)}\ue002"
    return mark


def _mark_content(content: str, opening: str, closing: str) -> str:
    """Put marks around a content. Surrounding whitespace stays outside, because templates may strip it."""
    words = content.strip()
    if not words:
        return content
    before, _, after = content.partition(words)
    return f"{before}{opening}{words}{closing}{after}"
