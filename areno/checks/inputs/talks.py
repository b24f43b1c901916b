"""The answers of a row as the file has them, and the text in which the chat template writes them.

Nothing here uses the code that encodes rows: texts come from `apply_chat_template` of transformers alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_TAGS = ("<think>", "</think>")

_SHORTEST_MARK = 4  # characters


@dataclass(frozen=True)
class Answer:
    """A message of the assistant that is to be trained."""

    before: list[Message]
    message: Message
    tools: Any = None
    talk: list[Message] = field(default_factory=list)  # the whole conversation

    @property
    def words(self) -> list[str]:
        return words_of(self.message)

    @property
    def reasoning(self) -> str:
        text = text_of(self.message)
        return text.partition(_TAGS[1])[0].replace(_TAGS[0], "") if _TAGS[1] in text else _own_reasoning(self.message)


def answers_of(kind: str, row: Mapping[str, Any]) -> list[list[Answer]]:
    """Return the answers of a row: a list for each answer of the row, with one entry for each turn in it."""
    prompt, tools = _messages(row.get("prompt"), "user"), _parsed(row.get("tools"))
    if kind == "sft" and row.get("response") is None:
        return [_turns([], row["messages"], tools)]
    if kind in ("sft", "kto"):
        return [_turns(prompt, _messages(row["response"], "assistant"), tools)]
    if kind == "rw" and row.get("answers") is not None:
        given = list(zip(row["answers"], row.get("ratings") or range(len(row["answers"]), 0, -1), strict=True))
        ranked = sorted(given, key=lambda pair: -pair[1])
        return [_turns(prompt, _messages(answer, "assistant"), tools) for answer, _ in ranked]
    pair = [_messages(row[name], "assistant") for name in ("chosen", "rejected")]
    if prompt and all(each[: len(prompt)] == prompt for each in pair):
        pair = [each[len(prompt) :] for each in pair]
    elif row.get("prompt") is None:
        n_same = 0
        while n_same < min(map(len, pair)) and pair[0][n_same] == pair[1][n_same]:
            n_same += 1
        prompt, pair = pair[0][:n_same], [each[n_same:] for each in pair]
    return [_turns(prompt, each, tools) for each in pair]


def text_of_row(kind: str, row: Mapping[str, Any], is_asked: bool | None = None) -> str:
    """Return the text of all messages of a row. `is_asked`: only of those that are trained (False), or not (True)."""
    given = row.get("prompt")
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    answered: list[Mapping[str, Any]] = []
    if kind not in ("prompt", "prm"):
        turns = [turn for answer in answers_of(kind, row) for turn in answer]
        answered = [turn.message for turn in turns]
        asked = [message for turn in turns[:1] for message in turn.talk if message not in answered] or asked
    chosen = [*(asked if is_asked is not False else ()), *(answered if is_asked is not True else ())]
    return "\n".join(map(text_of, chosen))


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part.get("text") or "" for part in content)


def words_of(message: Mapping[str, Any]) -> list[str]:
    """Return the texts that a rendered message contains: content, reasoning, and the parts of tool calls."""
    content = text_of(message)
    for tag in _TAGS:
        content = content.replace(tag, "\n\n\n")
    found = [*content.split("\n\n\n"), _own_reasoning(message)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        found += [str(function.get("name") or ""), *leaves(_parsed(function.get("arguments")))]
    return [text.strip() for text in found if text.strip()]


def tool_names(tools: Any) -> set[str]:
    """Return the names of the functions that definitions of tools declare."""
    given = _parsed(tools)
    found = (
        [each.get("function") or each for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []
    )
    return {str(each["name"]) for each in found if isinstance(each, Mapping) and each.get("name")}


def without_think_tags(text: str) -> str:
    return text.replace("<think>", "").replace("</think>", "")


def squeezed(text: str) -> str:
    """Return a text without white space, which templates and tokenizers change."""
    return "".join(text.split())


def contains(text: str, words: str) -> bool:
    """Whether a squeezed text has these words, as they are or as JSON or markup writes them."""
    quoted = {words, json.dumps(words)[1:-1], json.dumps(words, ensure_ascii=False)[1:-1]}
    quoted.add(words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))
    return any(squeezed(each) in text for each in quoted)


def rendered(tokenizer: Any, messages: Sequence[Message], tools: Any, opened: bool, **variables: Any) -> str | None:
    """Return what the chat template writes, None if it refuses the messages.

    Arguments of tool calls may be JSON text, as in OpenAI's API. Servers parse it for the template, and so does this.
    Some templates take only text there, and some read contents only as lists of parts. They get such messages.
    """
    how = {"tools": tools, "tokenize": False, "add_generation_prompt": opened, **variables}
    messages = [_with_arguments(message, as_text=False) for message in messages]
    text = _applied(tokenizer, messages, how)
    if text is None and any(message.get("tool_calls") for message in messages):
        messages = [_with_arguments(message, as_text=True) for message in messages]
        text = _applied(tokenizer, messages, how)
    first = next((text_of(message).strip() for message in messages if message.get("role") == "user"), "")
    if text is None or (first and first not in text):
        parts = [{**each, "content": [{"type": "text", "text": text_of(each)}]} for each in messages]
        other = _applied(tokenizer, parts, how)
        return other if other is not None and first in other else text
    return text


def _with_arguments(message: Message, as_text: bool) -> Message:
    """Return a message in which the arguments of tool calls are objects, or their JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        given = function.get("arguments")
        found = _parsed(given)
        if isinstance(found, Mapping):
            given = json.dumps(found, ensure_ascii=False) if as_text else found
        function = {**function, "arguments": given} if "arguments" in function else function
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


def _applied(tokenizer: Any, messages: list[Message], how: Mapping[str, Any]) -> str | None:
    with suppress(Exception):  # a template may raise anything
        text = tokenizer.apply_chat_template(messages, **how)
        return text if isinstance(text, str) else None
    return None


def markers_of(tokenizer: Any) -> list[str]:
    """Return the texts with which a chat template begins and ends the turns of a conversation."""
    words = ["first areno question", "first areno answer", "second areno question"]
    roles = ("user", "assistant", "user")
    talk = [{"role": role, "content": text} for role, text in zip(roles, words, strict=True)]
    text = rendered(tokenizer, talk, None, True)
    if text is None or any(word not in text for word in words):
        return []
    parts = [text.partition(words[0])[0].splitlines()[-1:]]
    for one, other in zip(words, [*words[1:], None], strict=True):
        after = text.partition(one)[2]
        parts.append((after.partition(other)[0] if other else after).splitlines())
    marks = [without_think_tags(line).strip() for part in parts for line in part]
    tokens = [str(token) for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())]
    marks += [token for token in tokens if token in text and without_think_tags(token)]
    # A mark such as "Assistant:" may stand in any text.
    return [
        mark for mark in dict.fromkeys(marks) if len(mark) >= _SHORTEST_MARK and any(char in "<[|" for char in mark)
    ]


def expected_text(tokenizer: Any, answer: Answer, **variables: Any) -> str | None:
    """Return what the template writes for an answer after its prompt. None if it does not write it there."""
    asked = rendered(tokenizer, answer.before, answer.tools, True, **variables)
    whole = rendered(tokenizer, [*answer.before, answer.message], answer.tools, False, **variables)
    return whole[len(asked) :] if asked and whole and whole.startswith(asked) else None


def _turns(before: Sequence[Message], after: Sequence[Message], tools: Any) -> list[Answer]:
    talk = [*before, *after]
    first = len(before)
    return [
        Answer(talk[:at], message, tools, talk)
        for at, message in enumerate(talk)
        if at >= first and message.get("role") == "assistant" and message.get("weight") != 0
    ]


def _messages(given: Any, role: str) -> list[Message]:
    if given is None:
        return []
    return [{"role": role, "content": given}] if isinstance(given, str) else [dict(message) for message in given]


def _own_reasoning(message: Mapping[str, Any]) -> str:
    return next((message[name] for name in _REASONING if isinstance(message.get(name), str)), "")


def _parsed(value: Any) -> Any:
    with suppress(ValueError, TypeError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, str):
        yield value
