"""Which tokens control the form of a prompt: turn markers, bos, eos, pad; and where a text has one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

_ROLES = (("system", "user", "assistant", "user"), ("user", "assistant"), ("user", "assistant", "tool"))


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """Return the tokens that a tokenizer finds in any text as they are, by their ids."""
    return getattr(tokenizer, "added_tokens_decoder", {})


def control_names(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of the control tokens of a tokenizer and its chat template.

    They are bos, eos, pad and the like, all special tokens, and the added tokens in brackets that the template writes.
    Tags that come in pairs, such as `<think>` and `</think>`, are no control tokens, whether they are flagged as
    special or not. `<s>` and `</s>` are, as bos and eos.
    """
    added = [token for token in added_tokens(tokenizer).values() if len(str(token)) > 1]
    names, named = {str(token) for token in added}, set(getattr(tokenizer, "special_tokens_map", {}).values())
    special = named | {str(token) for token in added if token.special}
    special |= set(getattr(tokenizer, "all_special_tokens", ()))
    markers = {name for name in names - special if re.fullmatch(r"[<\[{(].*\w.*[>\]})]", name)}
    written = _written(tokenizer) if markers else ""
    special |= {name for name in markers if name in written}
    found = []
    for name in sorted(names):
        partner = f"<{name[2:]}" if name.startswith("</") else f"</{name[1:]}"
        is_tag = name.startswith("<") and name.endswith(">") and partner in names
        if {name, partner} & named if is_tag else name in special:
            found.append(name)
    return tuple(found)


def _written(tokenizer: Any) -> str:
    """Return the chat template, and what it writes around messages."""
    texts = [str(tokenizer.chat_template)]
    for roles in _ROLES:
        messages = [{"role": role, "content": "a"} for role in roles]
        with suppress(Exception):  # whatever the template's author raises for roles that it does not have
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return "\n".join(texts)


def first_characters(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first character of each name in a text, also of an unfinished one at the text's end."""
    heads = sorted(_by_first(names).items())
    return re.compile("|".join(f"{re.escape(first)}(?={_one_of(rests)})" for first, rests in heads))


def whole_names(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the names, of which the longest counts."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def _one_of(names: set[str]) -> str:
    """Return an expression of the names as a tree, so that a thousand names take no longer than one."""
    if "" in names:
        return ""
    branches = [f"{re.escape(first)}{_one_of(rests)}" for first, rests in sorted(_by_first(names).items())]
    return f"(?:{'|'.join(branches)}|\\s*\\Z)"


def _by_first(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the rests of names by their first characters."""
    rests: dict[str, set[str]] = {}
    for name in names:
        rests.setdefault(name[0], set()).add(name[1:])
    return rests
