"""Incremental conversion of sampled tokens into text.

Only whole characters are returned, and text that may begin a stop string is held back. For `logprobs`, the texts of
single tokens add up to the text of the completion. Tokens are decoded together with tokens before them, because a
tokenizer that decodes a token alone may drop a space (SentencePiece) or part of a character.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from areno.data.encode import decode
from areno.server.parsers.partial_text import partial_tag_start

PART_OF_A_CHARACTER = "\ufffd"
_MAX_BYTES = 4  # of a character in UTF-8
_CONTEXT = 8  # tokens that are decoded together with new ones


class TextStream:
    """Incremental detokenizer of one completion. Its text does not depend on how the tokens are split into calls.

    `hidden` tokens have no text. The text ends before the first stop string, and `stopped` is then True. `before` are
    prompt tokens for context, whose text is not returned. `partial` are the last prompt tokens if they form an
    incomplete character. The completion's text then begins with that character.
    """

    def __init__(
        self,
        tokenizer: Any,
        hidden: frozenset[int],
        stops: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
        partial: Sequence[int] = (),
    ):
        self._tokenizer, self._hidden, self._stops = tokenizer, hidden, tuple(stops)
        self._tokens = self._last_tokens(before)
        # The text of the first `_n_returned` tokens was returned. Each call decodes only the tokens from `_context` on.
        self._n_returned, self._context = len(self._tokens), 0
        self._tokens += partial
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def feed(self, tokens: Sequence[int], final: bool = False) -> str:
        """Return the new text that later tokens cannot change. If `final`, no more tokens follow."""
        has_hidden = not self._hidden.isdisjoint(tokens)
        self._tokens += [token for token in tokens if token not in self._hidden] if has_hidden else tokens
        return self._cut_at_stop_string(self._new_text(final), final)

    def finish(self, tokens: Sequence[int] = ()) -> str:
        return self.feed(tokens, final=True)

    @property
    def is_settled(self) -> bool:
        """Whether no token waits for the rest of its character."""
        return self._n_returned == len(self._tokens)

    def _last_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the last 8 or more tokens that are not hidden. They begin at the start of a character."""
        last: list[int] = []
        for token in reversed(tokens):
            if len(last) >= _CONTEXT and not is_byte(self._tokenizer, last[-1]):
                break
            if token not in self._hidden:
                last.append(token)
        return last[::-1]

    def _new_text(self, final: bool) -> str:
        """Decode the waiting tokens. Return "" if later tokens may change their text, unless `final`."""
        if self._n_returned == len(self._tokens) or (not final and is_byte(self._tokenizer, self._tokens[-1])):
            return ""  # a byte is decoded together with further ones
        before = self._decode(self._tokens[self._context : self._n_returned])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(before) or (text.endswith(PART_OF_A_CHARACTER) and not final):
            return ""
        self._context, self._n_returned = self._n_returned, len(self._tokens)
        if self._n_returned - self._context > _CONTEXT and not final:
            # The last tokens of a long piece are context enough, unless they begin within a character.
            shorter = self._n_returned - _CONTEXT
            if text.endswith(self._decode(self._tokens[shorter:])):
                self._context = shorter
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens) if tokens else ""

    def _cut_at_stop_string(self, new: str, final: bool) -> str:
        """Return the text up to the first stop string. Unless `final`, hold back text that may begin a stop string."""
        if self.stopped:
            return ""
        text = self._held + new
        # Several stop strings: take the one that ends first, as if the text arrived one character at a time.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) if final else partial_tag_start(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def n_partial_tokens(tokenizer: Any, tokens: Sequence[int]) -> int:
    """Return how many tokens at the end form an incomplete character."""
    tail = list(tokens[-_CONTEXT:])
    candidates = range(len(tail), max(len(tail) - _MAX_BYTES, 0), -1)
    ends = (end for end in candidates if not decode(tokenizer, tail[:end]).endswith(PART_OF_A_CHARACTER))
    return len(tail) - next(ends, len(tail))


def is_byte(tokenizer: Any, token: int) -> bool:
    """Return whether a token stands for a single byte, such as <0x0A> in a vocabulary with byte fallback."""
    name = tokenizer.convert_ids_to_tokens(token) or ""
    return len(name) == 6 and name.startswith("<0x")


def special_ids(tokenizer: Any, keep: Collection[str] = ()) -> frozenset[int]:
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*added, *tokenizer.all_special_ids}
    return frozenset(number for number in ids if number not in added or str(added[number]) not in keep)


_KEPT = 64  # tokens of context before those whose text is not certain


class TokenText(NamedTuple):
    """The text that a token adds, or "" if its character ends in a later token. `data` are the token's own bytes."""

    text: str
    data: bytes
    is_first: bool  # no text precedes the token


def _byte_of_character() -> dict[str, int]:
    """Map each character used in the vocabulary of byte-level BPE (GPT-2) to its byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTextCache:
    """LRU cache: `lookup(token, is_first)` returns (text, bytes).

    `is_first` means that no text precedes the token. SentencePiece then drops the token's space.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.lookup = lru_cache(maxsize=100_000)(self._lookup)
        self._letter = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def _lookup(self, token: int, is_first: bool) -> tuple[str, bytes]:
        before = [] if is_first else self._letter
        text = decode(self.tokenizer, [*before, token]).removeprefix(decode(self.tokenizer, before) if before else "")
        if PART_OF_A_CHARACTER not in text:
            return text, text.encode()
        name = self.tokenizer.convert_ids_to_tokens(token) or ""
        if is_byte(self.tokenizer, token):
            return text, bytes([int(name[1:5], 16)])
        is_spelled = all(character in _BYTES for character in name)
        return text, bytes(_BYTES[character] for character in name) if is_spelled else text.encode()

    def token_name(self, token: int, is_first: bool, taken: Sequence[str] | dict[str, Any]) -> str:
        r"""Return a name for a token, in vLLM's notation. The name is not in `taken`.

        It is the text, or "bytes:\xNN..." for a part of a character. If that is empty or taken, it is "token_id:N".
        """
        text, data = self.lookup(token, is_first)
        if PART_OF_A_CHARACTER in text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text if text and text not in taken else f"token_id:{token}"


class TokenTextStream:
    """Incremental decoder of the text of each token. `before` and `partial` mean the same as for `TextStream`.

    If a character takes several tokens, the last token gets it. The other tokens, and hidden ones, have no text.
    """

    def __init__(
        self, texts: TokenTextCache, hidden: frozenset[int], before: Sequence[int] = (), partial: Sequence[int] = ()
    ):
        self._texts, self._hidden = texts, hidden
        self._stream = TextStream(texts.tokenizer, hidden, before=before, partial=partial)
        self._before, self._partial = list(before[-_KEPT:]), partial
        self._waiting: list[int] = []  # tokens whose text is not certain
        self._known: list[TokenText] = []  # tokens not yet returned by `pop_tokens`
        self._n_taken = 0  # characters of the returned tokens

    def feed(self, tokens: Sequence[int]) -> None:
        self._waiting += tokens
        text = self._stream.feed(tokens)
        if self._stream.is_settled:
            self._split_waiting(text)

    def pop_tokens(self, n_characters: int) -> list[TokenText]:
        """Return the next tokens whose text is completely within the first `n_characters` of the completion."""
        end, n = self._n_taken, 0
        while n < len(self._known) and end + len(self._known[n].text) <= n_characters:
            end, n = end + len(self._known[n].text), n + 1
        taken, self._known, self._n_taken = self._known[:n], self._known[n:], end
        return taken

    def finish(self, n_characters: int) -> list[TokenText]:
        """Return the remaining tokens. Cut the text to `n_characters`, as a stop string may begin inside a token."""
        self._split_waiting(self._stream.finish())
        taken = self.pop_tokens(n_characters)
        for token_text in self._known:
            text = token_text.text[: n_characters - self._n_taken]
            self._n_taken += len(text)
            taken.append(token_text if text == token_text.text else TokenText(text, text.encode(), token_text.is_first))
        return taken

    def _split_waiting(self, text: str) -> None:
        if self._waiting:
            found = self._split_by_bytes(self._waiting)
            self._known += found if _join_texts(found) == text else self._split_into_groups()
            self._before, self._partial = [*self._before, *self._partial, *self._waiting][-_KEPT:], ()
            self._waiting = []

    def _split_by_bytes(self, tokens: Sequence[int]) -> list[TokenText]:
        """Decode each token from its bytes. The result is wrong if the tokenizer inserts text, so callers check it."""
        found, is_first = list[TokenText](), self._hidden.issuperset(self._before)
        data = list[bytes]()
        for token in tokens:
            data.append(b"" if token in self._hidden else self._texts.lookup(token, is_first)[1])
            found.append(TokenText("", b"", is_first))
            is_first = is_first and token in self._hidden
        decoder, at = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for is_run, run in itertools.groupby(is_byte(self._texts.tokenizer, token) for token in tokens):
            end = at + len(list(run))
            if is_run and not _is_utf8(b"".join(data[at:end])):  # the tokenizer replaces each byte, too
                data[at:end] = [PART_OF_A_CHARACTER.encode()] * (end - at)
            at = end
        found = [one._replace(text=decoder.decode(each), data=each) for one, each in zip(found, data, strict=True)]
        found[-1] = found[-1]._replace(text=found[-1].text + decoder.decode(b"", True))
        return _with_replaced_bytes(found)

    def _split_into_groups(self) -> list[TokenText]:
        """Split the waiting tokens into the smallest groups that can be decoded.

        Each token gets the text of its bytes. If that differs from the text of the group, the last token gets the whole
        text.
        """
        stream = TextStream(self._texts.tokenizer, self._hidden, before=self._before, partial=self._partial)
        known, group = list[TokenText](), list[int]()
        for number, token in enumerate(self._waiting, start=1):
            group.append(token)
            text = stream.feed([token])
            if number == len(self._waiting):
                text += stream.finish()
            elif not stream.is_settled:
                continue
            found = self._split_by_bytes(group)
            if _join_texts(found) != text:
                found = [TokenText("", b"", one.is_first) for one in found]
                found[-1] = TokenText(text, text.encode(), found[-1].is_first)
            known, group = known + found, []
        return known


def _join_texts(tokens: Iterable[TokenText]) -> str:
    return "".join(one.text for one in tokens)


def _with_replaced_bytes(tokens: list[TokenText]) -> list[TokenText]:
    """Where the bytes of the tokens are not valid UTF-8, replace `data` by the encoded `text`."""
    start, data, text = 0, b"", ""
    for end, token in enumerate(tokens, start=1):
        data, text = data + token.data, text + token.text
        is_whole = data == text.encode()
        if is_whole or data.decode("utf-8", "replace") == text or end == len(tokens):
            if not is_whole:
                tokens[start:end] = [one._replace(data=one.text.encode()) for one in tokens[start:end]]
            start, data, text = end, b"", ""
    return tokens


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def prompt_token_texts(tokenizer: Any, prompt: str) -> list[TokenText]:
    """Return the text of each token in a prompt. The texts add up to the prompt. Needs a fast tokenizer."""
    spans = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    ends, end = list[int](), 0
    for number, span in enumerate(spans):
        is_amid = number + 1 < len(spans) and span == spans[number + 1] and span[1] > span[0]
        end = end if is_amid else max(end, span[1])
        ends.append(end)
    ends = [len(prompt) if each == end else each for each in ends]  # spaces at the end may belong to no token
    texts = [prompt[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    return [TokenText(text, text.encode(), not start) for text, start in zip(texts, [0, *ends], strict=False)]
