"""Which tokens control the form of a prompt: turn markers, bos, eos, pad; and where a text has one of them.

Text stays text: control tokens in the words of messages are encoded like any other words.

A chat template writes control tokens as text, and the tokenizer finds them anywhere in the rendered text. A user or a
tool could thus end its turn and begin another one. So `ControlTokens.shield` puts a break into each control token of a
message before it is rendered. `ControlTokens.encode` reads a rendered text with such breaks: only control tokens
without a break, which the template wrote, become control tokens.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
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


BREAK = str(secrets.randbits(80) + 10**25)
"""Nobody can guess it. It has digits only, which templates neither trim nor escape nor write in upper case."""

_ALIAS = str(secrets.randbits(80) + 10**25)  # another number, so that no text without breaks can make one
_OF_ASSISTANT = frozenset({"content", "reasoning_content", "reasoning", "thinking"})
_SLICE = 50_000  # characters: to look through them takes some milliseconds at worst
_KEPT = "_control_tokens"  # attribute of a tokenizer

Offsets = list[tuple[int, int]]


class ControlTokens:
    """The control tokens of a tokenizer and its chat template. `control_tokens` makes it.

    Attributes:
        names: Their texts; empty if messages may contain control tokens.
        made_of: The chat template and the size of the vocabulary.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.made_of = tokenizer, _made_of(tokenizer)
        self.names = () if getattr(tokenizer, "allows_control_tokens", False) else control_names(tokenizer)
        self._found = first_characters(self.names) if self.names else None

    def shield(self, value: Any) -> Any:
        """Put a break into each control token in the texts of a value, however deep.

        An unfinished control token at the end of a text gets one, too, as the template may go on with the rest.
        """
        if self._found is None:
            return value
        if isinstance(value, str):
            return self._shield_text(value)
        if isinstance(value, Mapping):
            return {self.shield(key): self.shield(each) for key, each in value.items()}
        return [self.shield(each) for each in value] if isinstance(value, list | tuple) else value

    def _shield_text(self, text: str) -> str:
        # In slices, between which other threads run. A name that two of them share is unfinished in the first.
        slices = [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
        assert self._found is not None
        if not any(map(self._found.search, slices)):
            return text
        return "".join([self._found.sub(rf"\g<0>{BREAK}", each) for each in slices])

    def shield_messages(self, messages: Sequence[Any]) -> list[Any]:
        """Put breaks into messages, but not into the text and the reasoning of the assistant."""
        shielded = []
        for message in messages:
            own = _OF_ASSISTANT if message["role"] == "assistant" else frozenset()
            shielded.append({key: value if key in own else self.shield(value) for key, value in message.items()})
        return shielded

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered text. Without breaks they are those of the tokenizer."""
        if BREAK not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._encode_apart(text)[0] if self._tokenizer.is_fast else self._encode_slowly(text)

    def encode_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """Return the token ids, and (start, end) of each token in the text with its breaks. For fast tokenizers."""
        if BREAK in text:
            return self._encode_apart(text)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], found["offset_mapping"]

    def encode_with_spans(self, text: str) -> tuple[list[int], Callable[[int], tuple[int, int]]]:
        """Return the token ids, and a function from the number of a token to its (start, end) in the text.

        For fast tokenizers. The offsets of all tokens at once would stop other threads: 50 ms for 200,000 tokens.
        """
        if BREAK in text:
            tokens, offsets = self._encode_apart(text)
            return tokens, offsets.__getitem__
        found = self._tokenizer(text, add_special_tokens=False)
        return found["input_ids"], found.encodings[0].token_to_chars

    def _encode_apart(self, text: str) -> tuple[list[int], Offsets]:
        """Encode a text with breaks, by the tokenizer to which only aliases are control tokens."""
        tokenizer, aliases, ids = self._plain
        pieces, starts, origins, size = list[str](), list[int](), list[int](), 0
        for piece, origin in self._pieces(text):
            starts.append(size)
            origins.append(origin)
            pieces.append(aliases.get(piece, piece))
            size += len(pieces[-1])
        whole = "".join(pieces)
        found = tokenizer.encode(whole, add_special_tokens=False)

        def place(at: int) -> int:
            number = bisect_right(starts, at) - 1
            return origins[number] + at - starts[number]

        tokens, offsets = list[int](), Offsets()
        for token, (first, last) in zip(found.ids, found.offsets, strict=True):
            name, own = ids.get(token, ("", [token]))
            if name and whole[first:last] != name:  # an unknown letter, which is no control token in words
                own = [token]
            tokens += own
            offsets += [(place(first), place(last))] * len(own)
        return tokens, offsets

    def _encode_slowly(self, text: str) -> list[int]:
        """Encode a text with breaks, by a tokenizer that is written in Python."""
        ids = {str(token): number for number, token in added_tokens(self._tokenizer).items()}
        tokens, words = list[int](), ""
        for piece, _ in self._pieces(text):
            words += "" if piece in ids else piece
            if words and (piece in ids or piece == ""):
                tokens += self._tokenizer.encode(words, add_special_tokens=False, split_special_tokens=True)
                words = ""
            tokens += [ids[piece]] if piece in ids else []
        return tokens

    def _pieces(self, text: str) -> Iterator[tuple[str, int]]:
        """Cut a text at the tokens without a break. Yields each piece and where in the text it begins."""
        at = 0
        for match in self._borders.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], at
            if match.group() != BREAK:
                yield match.group(), match.start()
            at = match.end()
        if at < len(text):
            yield text[at:], at
        yield "", len(text)

    @cached_property
    def _borders(self) -> Any:
        names = self.names if self._tokenizer.is_fast else map(str, added_tokens(self._tokenizer).values())
        return whole_names([BREAK, *names])

    @cached_property
    def _plain(self) -> tuple[Any, dict[str, str], dict[int, tuple[str, list[int]]]]:
        """Return a tokenizer to which control tokens are ordinary text, their aliases, and what its own ids stand for.

        It shares the vocabulary of the tokenizer, so it takes no memory.
        """
        from tokenizers import AddedToken, Tokenizer

        backend = self._tokenizer.backend_tokenizer
        plain: Any = Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        n_words, aliases, added = backend.get_vocab_size(with_added_tokens=False), dict[str, str](), dict[int, Any]()
        ids: dict[int, tuple[str, list[int]]] = {}
        for number, token in sorted(added_tokens(self._tokenizer).items()):
            added[number], name = token, str(token)
            if name in self.names:
                aliases[name] = f"{_ALIAS}:{number};"
                added[number] = AddedToken(aliases[name], normalized=False, lstrip=token.lstrip, rstrip=token.rstrip)
                if number < n_words:  # some kinds of vocabulary find it there: it is spelled then
                    ids[number] = name, [part.id for letter in name for part in backend.model.tokenize(letter)]
        plain.add_tokens(list(added.values()))
        return plain, aliases, ids | {plain.token_to_id(str(token)): ("", [number]) for number, token in added.items()}


def control_tokens(tokenizer: Any) -> ControlTokens:
    """Return the control tokens of a tokenizer. They stay with it until its template or its vocabulary changes."""
    kept = vars(tokenizer).get(_KEPT)
    if kept is None or kept.made_of != _made_of(tokenizer):
        kept = vars(tokenizer)[_KEPT] = ControlTokens(tokenizer)
    return kept


def allow_control_tokens(tokenizer: Any) -> None:
    """Let everything that is made with a tokenizer read control tokens in messages as such."""
    tokenizer.allows_control_tokens = True
    vars(tokenizer).pop(_KEPT, None)


def _made_of(tokenizer: Any) -> tuple[Any, int]:
    return tokenizer.chat_template, len(tokenizer) if hasattr(tokenizer, "__len__") else 0
