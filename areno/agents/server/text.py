"""Completion tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from areno.agents.parsers.cursor import partial_tag
from areno.data.tokens.decode import decode

_PART_OF_A_CHARACTER = "\ufffd"
_CONTEXT = 8  # tokens before those that are decoded


class TextStream:
    """The text of one completion. hidden: tokens without text, such as special ones. stops: strings that end it.

    However the tokens are cut into pieces, the texts add up to the same.
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int], stops: Sequence[str] = ()):
        self._tokenizer, self._hidden, self._stops = tokenizer, hidden, tuple(stops)
        self._tokens: list[int] = []
        # Tokens whose text was returned; where decoding begins, so that it depends on few.
        self._told = self._context = 0
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

    def _new_text(self, final: bool) -> str:
        if self._told == len(self._tokens) or (not final and self._ends_in_byte()):
            return ""
        before = self._decode(self._tokens[self._context : self._told])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(before) or (text.endswith(_PART_OF_A_CHARACTER) and not final):
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
        return _is_byte(self._tokenizer.convert_ids_to_tokens(self._tokens[-1]) or "")

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


def _is_byte(name: str) -> bool:
    """Whether a vocabulary that falls back to bytes names one so, such as <0x0A>."""
    return len(name) == 6 and name.startswith("<0x")


def special_ids(tokenizer: Any, keep: Collection[str] = ()) -> frozenset[int]:
    """The special tokens of a tokenizer, but for those with a text in `keep`."""
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*added, *tokenizer.all_special_ids}
    return frozenset(number for number in ids if number not in added or str(added[number]) not in keep)


def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in vocabularies of byte-level BPE (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTexts:
    """Single tokens as log-probabilities name them: their text, and the bytes of it."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=100_000)(self._of)

    def _of(self, token: int) -> tuple[str, list[int]]:
        text = decode(self._tokenizer, [token])
        if _PART_OF_A_CHARACTER not in text:
            return text, list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if all(character in _BYTES for character in name):
            return text, [_BYTES[character] for character in name]
        if _is_byte(name):
            return text, [int(name[1:5], 16)]
        return text, list(text.encode())
