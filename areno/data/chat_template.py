"""The chat template: messages to the text that a model reads, and where the assistant speaks in that text."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from areno.data.control_tokens import BREAK, control_tokens
from areno.data.row_schema import shared_length
from areno.errors import DataError, Key
from areno.types import Message

Prompt = str | Sequence[Message]

# Stands for a place in a rendered text. Private-use characters, which no template and no content has.
_MARK = "\ue000areno-end\ue001"


def render_generation_prompt(
    tokenizer: Any, prompt: Prompt, enable_thinking: bool | None = None, tools: list[Any] | None = None
) -> str:
    """Render the text that a model is given to continue, with a break in each control token that others wrote.

    `ControlTokens` encodes it. Raises DataError for messages without a chat template.
    """
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt
        said = "messages need a tokenizer with a chat template; set {} to one that has it, or give the prompt as text"
        raise DataError(said, Key("tokenizer_path"))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    control = control_tokens(tokenizer)
    return render(tokenizer, control.shield_messages(messages), control.shield(tools), enable_thinking, True)


def render(
    tokenizer: Any, messages: list[Any], tools: Any, thinking: bool | None = None, opened: bool = False, /, **more: Any
) -> str:
    """The text of the messages. opened: it goes on to where the assistant's next turn begins. more: the template's."""
    how = {"tools": tools, "tokenize": False, "add_generation_prompt": opened, **more}
    apply = partial(tokenizer.apply_chat_template, messages, **how)
    try:
        if thinking is not None:
            # Some tokenizers bring a method of their own that does not know the switch; there it has no meaning.
            with contextlib.suppress(TypeError):
                return apply(enable_thinking=thinking)
        return apply()
    except Exception as error:  # whatever the template's author raises
        said = f"the chat template refuses these messages: {type(error).__name__}: {error}"
        raise DataError(said.replace(BREAK, "")) from None  # whoever knows a break could make control tokens


def assistant_spans(
    tokenizer: Any, messages: list[Any], text: str, thinking: bool | None = None, tools: Any = None
) -> list[tuple[int, int]]:
    """Where in `text`, the rendered conversation, the assistant's turns stand: (first, past the end-of-turn token).

    Templates may render a message differently once others follow it (Qwen3 drops earlier reasoning), so places are
    found by marks put behind the contents. Raises DataError where one cannot be found for certain: a wrong span would
    train on the wrong words.
    """
    contents = _content_ends(tokenizer, messages, text, tools)
    end_token = _end_of_turn(tokenizer, messages, tools)
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _turn_start(tokenizer, messages[:turn], text, contents.get(turn - 1), thinking, tools)
        if start is None or start < (spans[-1][1] if spans else 1) or start > contents.get(turn, start):
            said = f"where messages[{turn}] begins cannot be found in the chat template's output"
            raise DataError(said + "; give the rows as {prompt, response}")
        content_end = contents.get(turn, start)
        later = [end for other, end in contents.items() if other > turn]
        end_at = text.find(end_token, content_end, min(later, default=len(text))) if end_token else -1
        if end_at < 0 and turn not in contents:
            raise DataError(f"where messages[{turn}], which has no text, ends cannot be found; leave it out")
        if message.get("tool_calls") and not text[start : max(content_end, end_at)].strip():
            raise DataError(f"the chat template leaves out the tool calls of messages[{turn}]; use one that has tools")
        spans.append((start, end_at + len(end_token) if end_at >= 0 else content_end))
    return spans


def _end_of_turn(tokenizer: Any, messages: list[Any], tools: Any) -> str:
    """The special token that the template puts behind an assistant's text; the tokenizer's own end where it has none.

    The two differ in base models (Qwen2.5: <|im_end|> and <|endoftext|>), and a turn must teach the former.
    """
    answers = ((i, message) for i, message in enumerate(messages) if message["role"] == "assistant")
    texts = [i for i, answer in answers if not answer.get("tool_calls") and str(answer["content"]).strip()]
    if texts:
        behind = _split_behind(tokenizer, messages[: texts[-1] + 1], texts[-1:], tools)[-1].lstrip()
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        if found := [token for token in special if behind.startswith(token)]:
            return max(found, key=len)
    return tokenizer.eos_token or ""


def _content_ends(tokenizer: Any, messages: list[Any], text: str, tools: Any) -> dict[int, int]:
    """Message number -> where in `text` its content ends. Has all of the assistant, others where possible."""
    with_text = [i for i, message in enumerate(messages) if message.get("content") and str(message["content"]).strip()]
    of_assistant = [i for i in with_text if messages[i]["role"] == "assistant"]
    for numbers in (with_text, of_assistant):
        pieces = _split_behind(tokenizer, messages, numbers, tools)
        if len(pieces) == len(numbers) + 1 and "".join(pieces) == text:
            return dict(zip(numbers, itertools.accumulate(len(piece) for piece in pieces), strict=False))
    said = "the chat template rewrites assistant messages, so the trained words cannot be found in its output"
    raise DataError(said + "; give the rows as {prompt, response}")


def _split_behind(tokenizer: Any, messages: list[Any], numbers: list[int], *how: Any) -> list[str]:
    """The rendered text, split where the contents of the messages of these numbers end. how: as for `render`."""
    marked = list(messages)
    for number in numbers:
        content = messages[number]["content"]
        if not isinstance(content, str):
            raise DataError(f"messages[{number}].content is a list; only text can be trained on")
        # Before trailing space: many templates trim it.
        body = content.rstrip()
        marked[number] = {**messages[number], "content": body + _MARK + content[len(body) :]}
    return render(tokenizer, marked, *how).split(_MARK)


def _turn_start(
    tokenizer: Any, before: list[Any], text: str, content_end: int | None, thinking: bool | None, tools: Any
) -> int | None:
    """Where in `text` the turn behind `before` starts, or None. content_end: where the last of these ends, if known."""
    if not before:
        return None
    prompts = [render(tokenizer, before, tools, switch, True) for switch in {thinking, None}]
    if fitting := [len(prompt) for prompt in prompts if text.startswith(prompt)]:
        return max(fitting)
    if content_end is None:
        return None
    # What stands between the last content and the turn: as much as the generation prompt has of it. The prompt may open
    # more than this turn has, such as an empty block of reasoning where the turn has a full one; then the rest is the
    # turn's own.
    history, *tails = (
        _split_behind(tokenizer, before, [len(before) - 1], tools, switch, opened)[-1]
        for switch, opened in [(None, False), (None, True), (thinking, True)]
    )
    after = text[content_end:]
    shared = max(shared_length(tail, after) for tail in tails)
    return content_end + shared if after.startswith(history) and shared > len(history) else None
