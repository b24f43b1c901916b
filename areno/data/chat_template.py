"""Render messages with the chat template, and find the assistant's turns in the rendered text.

`render_generation_prompt` renders the prompts of rollouts. `assistant_spans` finds the trained parts of rows for
supervised fine-tuning.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from areno.data.control_tokens import BREAK, control_tokens
from areno.data.row_schema import shared_length
from areno.errors import DataError, Key
from areno.types import Message

Prompt = str | Sequence[Message]

# A mark in a rendered text. The mark is random, so that no message contains it.
_MARK = f"\ue000areno-end-{secrets.randbits(128)}\ue001"


def render_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> str:
    """Render a prompt as text, up to the start of the assistant's next turn.

    A control token inside a message, such as a turn marker, gets a break: a random text that keeps the tokenizer from
    recognising the control token. `ControlTokens.encode` removes the breaks, so encode the rendered text with that
    method.

    Args:
        tokenizer: Tokenizer of the transformers library.
        prompt: A text or a list of chat messages. If the tokenizer has a chat template, a text becomes one user
            message.
        enable_thinking: Value of the variable enable_thinking in the chat template. None keeps the template's default.
        tools: Tool definitions in OpenAI's format. None for a prompt without tools.

    Returns:
        The rendered text.

    Raises:
        DataError: Messages are given but the tokenizer has no chat template, or the template raises an error for the
            messages.
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
    tools: Any,
    thinking: bool | None = None,
    opened: bool = False,
    /,
    **variables: Any,
) -> str:
    """Render messages with the chat template.

    Args:
        tokenizer: Tokenizer of the transformers library.
        messages: The messages.
        tools: Tool definitions in OpenAI's format, or None.
        thinking: Value of the variable enable_thinking. None keeps the template's default.
        opened: Whether the text ends with the start of the assistant's next turn (`add_generation_prompt`).
        **variables: Further variables of the template.

    Returns:
        The rendered text.

    Raises:
        DataError: The template raises an error for the messages.
    """
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": opened, **variables}
    apply = partial(tokenizer.apply_chat_template, messages, **options)
    try:
        if thinking is not None:
            # The `apply_chat_template` of some tokenizers does not have this argument, which then has no effect.
            with contextlib.suppress(TypeError):
                return apply(enable_thinking=thinking)
        return apply()
    except Exception as error:  # a template may raise any error
        text = f"the chat template refuses these messages: {type(error).__name__}: {error}"
        raise DataError(text.replace(BREAK, "")) from None  # anyone who knows a break could write control tokens


def assistant_spans(
    tokenizer: Any, messages: list[Any], text: str, thinking: bool | None = None, tools: Any = None
) -> list[tuple[int, int]]:
    """Find the assistant's turns in a rendered conversation.

    A template may render a message differently if further messages follow it (Qwen3 drops earlier reasoning). So the
    conversation is rendered again with marks after the contents of messages, and turns are found by the marks. A turn
    that cannot be found for certain is an error, since a wrong span would train on wrong words.

    Args:
        tokenizer: Tokenizer of the transformers library.
        messages: The messages.
        text: The conversation rendered by `render`, without a generation prompt.
        thinking: Value of the variable enable_thinking with which generation prompts are rendered. None keeps the
            template's default.
        tools: Tool definitions in OpenAI's format, or None.

    Returns:
        (start, end) of each assistant turn, as character indices in `text`. The end-of-turn token is included.

    Raises:
        DataError: A turn cannot be found for certain.
    """
    contents = _content_ends(tokenizer, messages, text, tools)
    end_token = _end_of_turn(tokenizer, messages, text, contents, tools)
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _turn_start(tokenizer, messages[:turn], text, contents.get(turn - 1), thinking, tools)
        if start is None or start < (spans[-1][1] if spans else 1) or start > contents.get(turn, start):
            message_text = f"the start of messages[{turn}] cannot be found in the chat template's output"
            raise DataError(message_text + "; give the rows as {prompt, response}")
        content_end = contents.get(turn, start)
        later = [end for other, end in contents.items() if other > turn]
        end_at = text.find(end_token, content_end, min(later, default=len(text))) if end_token else -1
        if end_at < 0 and turn not in contents:
            raise DataError(f"the end of messages[{turn}], which has no text, cannot be found; leave it out")
        if message.get("tool_calls") and not text[start : max(content_end, end_at)].strip():
            raise DataError(f"the chat template leaves out the tool calls of messages[{turn}]; use one that has tools")
        spans.append((start, end_at + len(end_token) if end_at >= 0 else content_end))
    return spans


def _end_of_turn(tokenizer: Any, messages: list[Any], text: str, contents: dict[int, int], tools: Any) -> str:
    """Return the special token that the chat template writes after an assistant's text.

    If no such token is found, return the tokenizer's end-of-sequence token, or "" if the tokenizer has none. In base
    models the template's token is not the end-of-sequence token (Qwen2.5: <|im_end|> and <|endoftext|>), and training
    must teach the template's token.

    Args:
        tokenizer: Tokenizer of the transformers library.
        messages: The messages.
        text: The conversation rendered by `render`, without a generation prompt.
        contents: Index of a message -> character index in `text` after its content, from `_content_ends`.
        tools: Tool definitions in OpenAI's format, or None.
    """
    answers = ((i, message) for i, message in enumerate(messages) if message["role"] == "assistant")
    texts = [i for i, answer in answers if not answer.get("tool_calls") and str(answer["content"]).strip()]
    if texts:
        last = texts[-1]
        # If the conversation ends with this answer, the rest of `text` is known to be the text after the answer.
        is_end = last == len(messages) - 1
        after = text[contents[last] :] if is_end else _split_after(tokenizer, messages[: last + 1], [last], tools)[-1]
        after = after.lstrip()
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        if found := [token for token in special if after.startswith(token)]:
            return max(found, key=len)
    return tokenizer.eos_token or ""


def _content_ends(tokenizer: Any, messages: list[Any], text: str, tools: Any) -> dict[int, int]:
    """Find where the contents of messages end in a rendered conversation.

    Returns:
        Index of the message -> character index in `text` after its content. All assistant messages with text are
        included. The other messages with text are included only if all contents can be found.

    Raises:
        DataError: The contents of assistant messages cannot be found, because the template rewrites them.
    """
    with_text = [i for i, message in enumerate(messages) if message.get("content") and str(message["content"]).strip()]
    of_assistant = [i for i in with_text if messages[i]["role"] == "assistant"]
    for numbers in (with_text, of_assistant):
        pieces = _split_after(tokenizer, messages, numbers, tools)
        if len(pieces) == len(numbers) + 1 and "".join(pieces) == text:
            return dict(zip(numbers, itertools.accumulate(len(piece) for piece in pieces), strict=False))
    why = "the chat template rewrites assistant messages, so the trained words cannot be found in its output"
    raise DataError(why + "; give the rows as {prompt, response}")


def _split_after(tokenizer: Any, messages: list[Any], numbers: list[int], *options: Any) -> list[str]:
    """Render messages, and split the text after the content of each message that `numbers` names.

    Args:
        tokenizer: Tokenizer of the transformers library.
        messages: The messages.
        numbers: Indices of the messages, ascending.
        *options: Positional arguments of `render`, from `tools` on.

    Returns:
        The substrings of the rendered text. Each substring except the last ends with the content of a message, before
        trailing spaces. If the template drops or repeats a content, there are not len(numbers) + 1 substrings.

    Raises:
        DataError: The content of a message in `numbers` is not a text, or the template raises an error.
    """
    marked = list(messages)
    for number in numbers:
        content = messages[number]["content"]
        if not isinstance(content, str):
            raise DataError(f"messages[{number}].content is a list; only text can be trained on")
        # The mark goes before trailing spaces, since many templates trim them.
        body = content.rstrip()
        marked[number] = {**messages[number], "content": body + _MARK + content[len(body) :]}
    return render(tokenizer, marked, *options).split(_MARK)


def _turn_start(
    tokenizer: Any, before: list[Any], text: str, content_end: int | None, thinking: bool | None, tools: Any
) -> int | None:
    """Return the character index at which the assistant's turn after the messages `before` starts.

    Args:
        tokenizer: Tokenizer of the transformers library.
        before: The messages before the turn.
        text: The rendered conversation that contains the turn.
        content_end: Character index in `text` after the content of the last message in `before`. None if unknown.
        thinking: Value of the variable enable_thinking with which generation prompts are rendered. None keeps the
            template's default.
        tools: Tool definitions in OpenAI's format, or None.

    Returns:
        The index in `text`. None if the start of the turn cannot be found.
    """
    if not before:
        return None
    prompts = [render(tokenizer, before, tools, switch, True) for switch in {thinking, None}]
    if fitting := [len(prompt) for prompt in prompts if text.startswith(prompt)]:
        return max(fitting)
    if content_end is None:
        return None
    # The text between the last content and the turn is the prefix shared with the generation prompt. The prompt may add
    # text that this turn does not have, such as an empty block of reasoning before a turn with reasoning of its own.
    history, *tails = (
        _split_after(tokenizer, before, [len(before) - 1], tools, switch, opened)[-1]
        for switch, opened in [(None, False), (None, True), (thinking, True)]
    )
    after = text[content_end:]
    shared = max(shared_length(tail, after) for tail in tails)
    return content_end + shared if after.startswith(history) and shared > len(history) else None
