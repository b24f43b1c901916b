"""The tokens with which a chat template ends an assistant's turn.

Training teaches these tokens, rollout and serving stop at them, and a checkpoint's generation_config.json lists them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from areno.data.chat_template import render
from areno.data.control_tokens import control_token_texts, random_mark
from areno.data.row_schema import common_prefix_length
from areno.errors import DataError

_MARK = random_mark()
_CACHED = "_turn_ends"  # attribute of a tokenizer
_QUESTION = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """What a chat template writes after an assistant's turn, found by rendering example conversations.

    `end` is `closing` up to the end of its first control tokens. Some templates write no token that ends a turn. There
    the first control token of the next message ends it: `follows` maps the role of the next message, "user" or "tool",
    to this token.
    """

    closing: str = ""  # after an answer that ends a conversation, such as "<|im_end|>" and a line break
    end: str = ""
    call_closing: str = ""  # after tool calls
    call_end: str = ""
    marks: bool = False  # the template marks what is trained with {% generation %}
    reads_reasoning: bool = False  # the template reads the reasoning of messages
    follows: dict[str, str] | None = None

    def end_token_before(self, role: str) -> str:
        """Return the first token of a message of this role, if it ends the turn before the message. Otherwise ""."""
        return (self.follows or {}).get("tool" if role == "tool" else "user", "")


def set_model_end_ids(tokenizer: Any, ids: Iterable[int]) -> None:
    """Store in the tokenizer the end tokens that a model's config.json and generation_config.json list."""
    tokenizer.model_end_ids = frozenset(ids)


def is_model_end_token(tokenizer: Any, token: str) -> bool:
    return tokenizer.convert_tokens_to_ids(token) in vars(tokenizer).get("model_end_ids", ())


def stop_token_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all tokens that end a completion: those of the model's files, eos, and the template's."""
    own = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    return own | template_end_ids(tokenizer) | set(vars(tokenizer).get("model_end_ids", ()))


def template_end_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokens with which the chat template ends the assistant's turns."""
    ends, names = turn_ends(tokenizer), control_token_texts(tokenizer)
    texts = [ends.end, ends.call_end, *(ends.follows or {}).values()]
    last = (max((name for name in names if text.endswith(name)), key=len, default=None) for text in texts if text)
    return {tokenizer.convert_tokens_to_ids(name) for name in last if name is not None}


def turn_ends(tokenizer: Any) -> TurnEnds:
    """Return what the chat template writes after an assistant's turn. Cached until template or vocabulary change."""
    made_of = tokenizer.chat_template, len(tokenizer), vars(tokenizer).get("model_end_ids")
    cached = vars(tokenizer).get(_CACHED)
    if cached is None or cached[0] != made_of:
        cached = vars(tokenizer)[_CACHED] = made_of, _find_turn_ends(tokenizer)
    return cached[1]


def _find_turn_ends(tokenizer: Any) -> TurnEnds:
    if tokenizer.chat_template is None:
        return TurnEnds()
    names, follows = control_token_texts(tokenizer), dict[str, str]()
    answer = {"role": "assistant", "content": _MARK}
    closing, continued = (
        _text_after_mark(tokenizer, answer),
        _text_after_mark(tokenizer, answer, {"role": "user", "content": "c"}),
    )
    end = closing[: end_of_control_tokens(closing, names, common_prefix_length(closing, continued))]
    if not end and (token := first_control_token(continued, names)):
        follows["user"] = token
    function = {"name": "f", "arguments": {"a": _MARK}}
    calls = [{"id": "f00000000", "type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "name": "f", "tool_call_id": "f00000000", "content": "c"}
    call_closing, answered = _text_after_mark(tokenizer, call), _text_after_mark(tokenizer, call, result)
    call_end = end
    if end and call_closing.endswith(closing):
        call_closing = closing
    else:
        last = max((name for name in names if call_closing.rstrip().endswith(name)), key=len, default="")
        n_shared = common_prefix_length(call_closing.rstrip(), answered)
        following = first_control_token(answered[n_shared:], names)
        if following and (
            not last or (is_model_end_token(tokenizer, following) and not is_model_end_token(tokenizer, last))
        ):
            follows["tool"], last = following, ""
        call_closing, call_end = call_closing[call_closing.rfind(last) :] if last else "", last
    source = re.sub(r"\{#.*?#\}|enable_thinking", "", tokenizer.chat_template, flags=re.DOTALL)
    reads_reasoning = "reasoning" in source or "thinking" in source
    marks = re.search(r"\{%-?\s*generation\b", source) is not None
    return TurnEnds(closing, end, call_closing, call_end, marks, reads_reasoning, follows)


def _text_after_mark(tokenizer: Any, answer: dict[str, Any], *later: dict[str, Any]) -> str:
    """Render a conversation, and return the text after the mark in `answer`. "" if the template refuses it."""
    for tools in (None, [_TOOL]):
        try:
            _, mark, after = render(tokenizer, [_QUESTION, answer, *later], tools).partition(_MARK)
        except DataError:
            continue
        if mark and _MARK not in after:
            return after
    return ""


def end_of_control_tokens(text: str, names: Collection[str], n_shared: int) -> int:
    """Return the index after the first run of adjacent control tokens in a text. 0 if there is no control token.

    The second and later tokens count only if they end within the first `n_shared` characters.
    """
    occurrences = [(at, name) for name in names if (at := text.find(name)) >= 0]
    if not occurrences:
        return 0
    at, name = min(occurrences, key=lambda found: (found[0], -len(found[1])))
    end = at + len(name)
    while (more := first_control_token(text[end:], names, skip_space=False)) and end + len(more) <= n_shared:
        end += len(more)
    return end


def first_control_token(text: str, names: Collection[str], *, skip_space: bool = True) -> str:
    """Return the control token with which a text begins, "" if there is none."""
    text = text.lstrip() if skip_space else text
    return max((name for name in names if text.startswith(name)), key=len, default="")
