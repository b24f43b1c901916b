"""Completion tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from areno.data.tokens.decode import decode
from areno.server.parsers.cursor import partial_tag

PART_OF_A_CHARACTER = "\ufffd"
_LONGEST = 4  # bytes of a character
_CONTEXT = 8  # tokens before those that are decoded


class TextStream:
    """The text of one completion. However the tokens are cut into pieces, the texts add up to the same.

    Args:
        tokenizer: Of transformers.
        hidden: Tokens without text, such as special ones.
        stops: Strings that end the text.
        before: Tokens that the completion goes on from. Its text is what it adds to theirs.
        begun: Tokens after these that are the beginning of a character, which is the completion's.
    """

    def __init__(
        self,
        tokenizer: Any,
        hidden: frozenset[int],
        stops: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
        begun: Sequence[int] = (),
    ):
        self._tokenizer, self._hidden, self._stops = tokenizer, hidden, tuple(stops)
        self._tokens = self._end_of(before)
        # Tokens whose text was returned; where decoding begins, so that it depends on few.
        self._told, self._context = len(self._tokens), 0
        self._tokens += begun
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False  # a stop string has come; what follows is dropped

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain with these tokens and was not before."""
        has_hidden = not self._hidden.isdisjoint(tokens)
        self._tokens += [token for token in tokens if token not in self._hidden] if has_hidden else tokens
        return self._cut(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._cut(self._new_text(final=True), final=True)

    @property
    def is_settled(self) -> bool:
        """Whether the text of all tokens is known."""
        return self._told == len(self._tokens)

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the last visible tokens, beginning where a character may."""
        last: list[int] = []
        for token in reversed(tokens):
            if len(last) >= _CONTEXT and not self._is_byte(last[-1]):
                break
            if token not in self._hidden:
                last.append(token)
        return last[::-1]

    def _new_text(self, final: bool) -> str:
        if self._told == len(self._tokens) or (not final and self._ends_in_byte()):
            return ""
        before = self._decode(self._tokens[self._context : self._told])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(before) or (text.endswith(PART_OF_A_CHARACTER) and not final):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        if self._told - self._context > _CONTEXT and not final:
            # Of a long piece the end will do, unless it begins amid a character.
            shorter = self._told - _CONTEXT
            if text.endswith(self._decode(self._tokens[shorter:])):
                self._context = shorter
        return text[len(before) :]

    def _ends_in_byte(self) -> bool:
        """Of tokens that stand for a byte each, a run is decoded as one: none of it is certain before its end."""
        return self._is_byte(self._tokens[-1])

    def _is_byte(self, token: int) -> bool:
        return is_byte(self._tokenizer.convert_ids_to_tokens(token) or "")

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens) if tokens else ""

    def _cut(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        # Of several the one that is whole first, as it would be if the text came one character at a time.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) if final else partial_tag(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def n_begun(tokenizer: Any, tokens: Sequence[int]) -> int:
    """Return how many tokens at the end are the beginning of a character."""
    tail = list(tokens[-_CONTEXT:])
    places = range(len(tail), max(len(tail) - _LONGEST, 0), -1)
    ends = (end for end in places if not decode(tokenizer, tail[:end]).endswith(PART_OF_A_CHARACTER))
    return len(tail) - next(ends, len(tail))


def is_byte(name: str) -> bool:
    """Whether a vocabulary that falls back to bytes names one so, such as <0x0A>."""
    return len(name) == 6 and name.startswith("<0x")


def special_ids(tokenizer: Any, keep: Collection[str] = ()) -> frozenset[int]:
    """The special tokens of a tokenizer, but for those with a text in `keep`."""
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*added, *tokenizer.all_special_ids}
    return frozenset(number for number in ids if number not in added or str(added[number]) not in keep)
