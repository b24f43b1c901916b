"""Completion tokens to text as they come: whole characters only, and nothing of a stop string.

The text and the bytes of single tokens, as log-probabilities name them.

The texts of a completion's tokens add up to its text. A tokenizer that decodes a token by itself may drop a space
(SentencePiece) or a part of a character, so a token is read behind the tokens before it.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from areno.data.encode import decode
from areno.server.parsers.reading import partial_tag

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
