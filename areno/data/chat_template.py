"""Render messages with the chat template. `render_generation_prompt` renders the prompts of rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from areno.data.control_tokens import BREAK, control_tokens
from areno.errors import DataError, Key
from areno.types import Message

Prompt = str | Sequence[Message]

_CACHED = "_reads_only_parts"  # attribute of a tokenizer
THINK, END_THINK = "<think>", "</think>"


def opens_reasoning(rendered: str) -> bool:
    """Return whether a rendered prompt ends with <think>, so that a reply begins with reasoning."""
    return rendered.rstrip().endswith(THINK)


def render_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> str:
    """Render a prompt, up to the start of the assistant's next turn. `ControlTokens.encode` encodes the result.

    If the tokenizer has a chat template, a plain text becomes one user message. Control tokens inside messages are
    escaped, see control_tokens.py.
    """
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt
        text = "messages need a tokenizer with a chat template; set {} to one that has it, or give the prompt as text"
        raise DataError(text, Key("tokenizer_path"))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    control = control_tokens(tokenizer)
    return render(tokenizer, control.escape_messages(messages), control.escape(tools), enable_thinking, True)


def render(
    tokenizer: Any,
    messages: list[Any],
    tools: Any = None,
    thinking: bool | None = None,
    opened: bool = False,
    /,
    **variables: Any,
) -> str:
    """Render messages. The template gets `thinking` as enable_thinking and `opened` as add_generation_prompt."""
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": opened, **variables}
    apply = partial(tokenizer.apply_chat_template, with_content_parts(tokenizer, messages), **options)
    try:
        if thinking is not None:
            # The `apply_chat_template` of some tokenizers does not have this argument, which then has no effect.
            with contextlib.suppress(TypeError):
                return apply(enable_thinking=thinking)
        return apply()
    except Exception as error:  # a template may raise any error
        text = f"the chat template refuses these messages: {type(error).__name__}: {error}"
        raise DataError(text.replace(BREAK, "")) from None  # anyone who knows a break could write control tokens


def with_content_parts(tokenizer: Any, messages: list[Any]) -> list[Any]:
    """If the chat template reads only lists of text parts, convert plain text contents to such lists."""
    cached = vars(tokenizer).get(_CACHED)
    if cached is None or cached[0] != tokenizer.chat_template:
        cached = vars(tokenizer)[_CACHED] = tokenizer.chat_template, _reads_only_parts(tokenizer)
    if not cached[1]:
        return messages
    return [{**each, "content": _as_content_parts(each["content"])} if "content" in each else each for each in messages]


def _as_content_parts(content: Any) -> Any:
    return [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content


def _reads_only_parts(tokenizer: Any) -> bool:
    """Return whether the template renders a list of text parts as content, but not a plain text."""
    written = []
    for content in (BREAK, _as_content_parts(BREAK)):
        text = ""
        with contextlib.suppress(Exception):  # a template may raise any error
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        written.append(BREAK in text)
    return written == [False, True]
