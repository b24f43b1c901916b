"""The text and the bytes of single tokens, as log-probabilities name them.

The texts of a completion's tokens add up to its text. A tokenizer that decodes a token by itself may drop a space
(SentencePiece) or a part of a character, so a token is read behind the tokens before it.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from areno.data.tokens.decode import decode
from areno.server.stream import PART_OF_A_CHARACTER, TextStream, is_byte

_KEPT = 64  # tokens before those that wait


class Spelled(NamedTuple):
    """A token of a text.

    Attributes:
        text: What it adds to the text.
        data: Its bytes. Those of several tokens make up a character.
        is_first: Whether there is no text before it.
    """

    text: str
    data: bytes
    is_first: bool


def _byte_of_character() -> dict[str, int]:
    """Return the characters that stand for bytes in vocabularies of byte-level BPE (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTexts:
    """Text and bytes of the tokens of a vocabulary. `of(token, is_first)` returns both, and remembers them."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.of = lru_cache(maxsize=100_000)(self._of)
        self._letter = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def _of(self, token: int, is_first: bool) -> tuple[str, bytes]:
        before = [] if is_first else self._letter
        text = decode(self.tokenizer, [*before, token]).removeprefix(decode(self.tokenizer, before) if before else "")
        if PART_OF_A_CHARACTER not in text:
            return text, text.encode()
        name = self.tokenizer.convert_ids_to_tokens(token) or ""
        if is_byte(name):
            return text, bytes([int(name[1:5], 16)])
        is_spelled = all(character in _BYTES for character in name)
        return text, bytes(_BYTES[character] for character in name) if is_spelled else text.encode()

    def is_byte(self, token: int) -> bool:
        """Return whether a token is one of those that stand for a byte in a vocabulary that falls back to bytes."""
        return is_byte(self.tokenizer.convert_ids_to_tokens(token) or "")

    def key(self, token: int, is_first: bool, taken: Sequence[str] | dict[str, Any]) -> str:
        """Return a name of a token that is none of `taken`: its text, its bytes, or its id as vLLM writes it."""
        text, data = self.of(token, is_first)
        if PART_OF_A_CHARACTER in text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text if text and text not in taken else f"token_id:{token}"


class Spelling:
    """The text of each token of one completion, found while the tokens arrive in pieces.

    If a character takes several tokens, the last of them has the character and the others are empty. Hidden tokens,
    such as end-of-sequence, are empty, too. The constructor takes the arguments of TextStream.
    """

    def __init__(
        self, texts: TokenTexts, hidden: frozenset[int], before: Sequence[int] = (), begun: Sequence[int] = ()
    ):
        self._texts, self._hidden = texts, hidden
        self._stream = TextStream(texts.tokenizer, hidden, before=before, begun=begun)
        self._before, self._begun = list(before[-_KEPT:]), begun
        self._waiting: list[int] = []  # tokens whose text is not certain
        self._known: list[Spelled] = []  # tokens that were not taken
        self._n_taken = 0  # characters

    def feed(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        self._waiting += tokens
        text = self._stream.feed(tokens)
        if self._stream.is_settled:
            self._settle(text)

    def take(self, n_characters: int) -> list[Spelled]:
        """Return the tokens that were not returned before and end within the first characters of the text."""
        end, n = self._n_taken, 0
        while n < len(self._known) and end + len(self._known[n].text) <= n_characters:
            end, n = end + len(self._known[n].text), n + 1
        taken, self._known, self._n_taken = self._known[:n], self._known[n:], end
        return taken

    def finish(self, n_characters: int) -> list[Spelled]:
        """Return the rest of the tokens, without the text behind the first characters, which a stop string has cut."""
        self._settle(self._stream.finish())
        taken = self.take(n_characters)
        for spelled in self._known:
            text = spelled.text[: n_characters - self._n_taken]
            self._n_taken += len(text)
            taken.append(spelled if text == spelled.text else Spelled(text, text.encode(), spelled.is_first))
        return taken

    def _settle(self, text: str) -> None:
        """Spell the tokens that wait. text: theirs."""
        if self._waiting:
            found = self._by_bytes(self._waiting)
            self._known += found if _text_of(found) == text else self._by_groups()
            self._before, self._begun = [*self._before, *self._begun, *self._waiting][-_KEPT:], ()
            self._waiting = []

    def _by_bytes(self, tokens: Sequence[int]) -> list[Spelled]:
        """Spell tokens by their bytes alone. Tokenizers that add something between tokens read them otherwise."""
        found, is_first = list[Spelled](), self._hidden.issuperset(self._before)
        data = list[bytes]()
        for token in tokens:
            data.append(b"" if token in self._hidden else self._texts.of(token, is_first)[1])
            found.append(Spelled("", b"", is_first))
            is_first = is_first and token in self._hidden
        decoder, at = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for is_run, run in itertools.groupby(map(self._texts.is_byte, tokens)):
            end = at + len(list(run))
            if is_run and not _is_whole(b"".join(data[at:end])):  # then each byte is replaced
                data[at:end] = [PART_OF_A_CHARACTER.encode()] * (end - at)
            at = end
        found = [one._replace(text=decoder.decode(each), data=each) for one, each in zip(found, data, strict=True)]
        found[-1] = found[-1]._replace(text=found[-1].text + decoder.decode(b"", True))
        return _with_replaced_bytes(found)

    def _by_groups(self) -> list[Spelled]:
        """Spell the tokens in the smallest groups whose texts are certain. The last of a group may have all of it."""
        stream = TextStream(self._texts.tokenizer, self._hidden, before=self._before, begun=self._begun)
        known, group = list[Spelled](), list[int]()
        for number, token in enumerate(self._waiting, start=1):
            group.append(token)
            text = stream.feed([token])
            if number == len(self._waiting):
                text += stream.finish()
            elif not stream.is_settled:
                continue
            found = self._by_bytes(group)
            if _text_of(found) != text:
                found = [Spelled("", b"", one.is_first) for one in found]
                found[-1] = Spelled(text, text.encode(), found[-1].is_first)
            known, group = known + found, []
        return known


def _text_of(tokens: Iterable[Spelled]) -> str:
    return "".join(one.text for one in tokens)


def _with_replaced_bytes(tokens: list[Spelled]) -> list[Spelled]:
    """Give tokens that are no UTF-8 the bytes of their texts, in which they are replaced."""
    start, data, text = 0, b"", ""
    for end, token in enumerate(tokens, start=1):
        data, text = data + token.data, text + token.text
        is_whole = data == text.encode()
        if is_whole or data.decode("utf-8", "replace") == text or end == len(tokens):
            if not is_whole:
                tokens[start:end] = [one._replace(data=one.text.encode()) for one in tokens[start:end]]
            start, data, text = end, b"", ""
    return tokens


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def spelled_prompt(tokenizer: Any, prompt: str) -> list[Spelled]:
    """Return the tokens of a text that was sent, each with its part of that text. For fast tokenizers."""
    places = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    ends, end = list[int](), 0
    for number, place in enumerate(places):
        is_amid = number + 1 < len(places) and place == places[number + 1] and place[1] > place[0]
        end = end if is_amid else max(end, place[1])
        ends.append(end)
    ends = [len(prompt) if each == end else each for each in ends]  # space at the end may belong to no token
    texts = [prompt[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    return [Spelled(text, text.encode(), not start) for text, start in zip(texts, [0, *ends], strict=False)]
