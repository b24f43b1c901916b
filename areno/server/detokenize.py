"""Incremental conversion of sampled tokens into text.

`TextStream` decodes a completion while its tokens arrive. It returns whole characters only, and holds back text that
may be the beginning of a stop string. `TokenTextCache` and `TokenTextStream` find the text and the bytes of each single
token for `logprobs`, such that the texts of all tokens add up to the text of the completion. Each token is decoded
together with the tokens before it, because a tokenizer that decodes a token alone may drop a space (SentencePiece) or
part of a character.
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
_MAX_BYTES = 4  # of a character in UTF-8
_CONTEXT = 8  # tokens that are decoded together with new ones


class TextStream:
    """Incremental detokenizer of one completion.

    The concatenation of the returned texts does not depend on how the tokens are split into calls of `feed`.

    Args:
        tokenizer: Tokenizer of transformers.
        hidden: Ids of tokens without text, such as special tokens.
        stops: Stop strings. The text ends before the first stop string.
        before: Token ids of the prompt, which are context for decoding. Their text is not returned.
        partial: Token ids between `before` and the completion that form an incomplete character. The character is
            returned as part of the completion's text.

    Attributes:
        stopped: Whether a stop string was found. Later text is dropped.
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
        self._tokens = self._end_of(before)
        # The text of the first `_n_returned` tokens was returned. Each call decodes only the tokens from `_context` on.
        self._n_returned, self._context = len(self._tokens), 0
        self._tokens += partial
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the new text that later tokens cannot change.

        Args:
            tokens: The next token ids.
        """
        self._add(tokens)
        return self._cut(self._new_text(final=False), final=False)

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """Add the last tokens, and return the rest of the text. No tokens may follow.

        Args:
            tokens: The last token ids.
        """
        self._add(tokens)
        return self._cut(self._new_text(final=True), final=True)

    def _add(self, tokens: Sequence[int]) -> None:
        """Add tokens, except hidden ones."""
        has_hidden = not self._hidden.isdisjoint(tokens)
        self._tokens += [token for token in tokens if token not in self._hidden] if has_hidden else tokens

    @property
    def is_settled(self) -> bool:
        """Whether all tokens have been decoded, so that no token waits for the rest of its character."""
        return self._n_returned == len(self._tokens)

    def _end_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the last 8 or more of `tokens`, beginning at the start of a character. Hidden tokens are left out.

        If there are fewer than 8 tokens that are not hidden, all of them are returned.
        """
        last: list[int] = []
        for token in reversed(tokens):
            if len(last) >= _CONTEXT and not self._is_byte(last[-1]):
                break
            if token not in self._hidden:
                last.append(token)
        return last[::-1]

    def _new_text(self, final: bool) -> str:
        """Decode the tokens whose text was not returned yet, and return their text.

        Returns "" if later tokens may change this text. With `final`, no tokens follow, so the text is returned in
        any case.
        """
        if self._n_returned == len(self._tokens) or (not final and self._ends_in_byte()):
            return ""
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

    def _ends_in_byte(self) -> bool:
        """Return whether the last token stands for a single byte (byte fallback).

        Consecutive byte tokens are decoded together, so the text of such a token is not certain until another token
        follows.
        """
        return self._is_byte(self._tokens[-1])

    def _is_byte(self, token: int) -> bool:
        """Return whether a token stands for a single byte."""
        return is_byte(self._tokenizer.convert_ids_to_tokens(token) or "")

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return decode(self._tokenizer, tokens) if tokens else ""

    def _cut(self, new: str, final: bool) -> str:
        """Append `new` to the held-back text, and return the text up to the first stop string.

        Text at the end that may be the beginning of a stop string is held back for the next call. With `final`,
        nothing is held back. After a stop string was found, the result is always "".
        """
        if self.stopped:
            return ""
        text = self._held + new
        # Several stop strings: take the one that ends first, as if the text arrived one character at a time.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) if final else partial_tag(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def n_partial(tokenizer: Any, tokens: Sequence[int]) -> int:
    """Return the number of tokens at the end of a text that form an incomplete character.

    Args:
        tokenizer: Tokenizer of transformers.
        tokens: Token ids of the text.
    """
    tail = list(tokens[-_CONTEXT:])
    places = range(len(tail), max(len(tail) - _MAX_BYTES, 0), -1)
    ends = (end for end in places if not decode(tokenizer, tail[:end]).endswith(PART_OF_A_CHARACTER))
    return len(tail) - next(ends, len(tail))


def is_byte(name: str) -> bool:
    """Return whether a token stands for a single byte, such as <0x0A> in a vocabulary with byte fallback.

    Args:
        name: Name of the token in the vocabulary.
    """
    return len(name) == 6 and name.startswith("<0x")


def special_ids(tokenizer: Any, keep: Collection[str] = ()) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens.

    Args:
        tokenizer: Tokenizer of transformers.
        keep: Texts of special tokens whose ids are left out of the result.
    """
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*added, *tokenizer.all_special_ids}
    return frozenset(number for number in ids if number not in added or str(added[number]) not in keep)


_KEPT = 64  # tokens of context before those whose text is not certain


class TokenText(NamedTuple):
    """The text of one token.

    Attributes:
        text: Text that the token adds. Empty if the character ends in a later token.
        data: Bytes of the token, which may be part of a character.
        is_first: Whether no text precedes the token.
    """

    text: str
    data: bytes
    is_first: bool


def _byte_of_character() -> dict[str, int]:
    """Return the dictionary of byte-level BPE (GPT-2) that maps each character used in the vocabulary to its byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTextCache:
    """LRU cache of the text and the bytes of vocabulary tokens.

    Args:
        tokenizer: Tokenizer of transformers.

    Attributes:
        of: Function `of(token, is_first)` that returns (text, bytes) of a token id. Set `is_first` if no text precedes
            the token, because SentencePiece drops the space of a first token.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.of = lru_cache(maxsize=100_000)(self._of)
        self._letter = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def _of(self, token: int, is_first: bool) -> tuple[str, bytes]:
        """Return the text and the bytes of a token id, without the cache."""
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
        """Return whether a token stands for a single byte in a vocabulary with byte fallback.

        Args:
            token: Token id.
        """
        return is_byte(self.tokenizer.convert_ids_to_tokens(token) or "")

    def key(self, token: int, is_first: bool, taken: Sequence[str] | dict[str, Any]) -> str:
        r"""Return a name for a token at a position where other tokens may have the same text.

        Args:
            token: Token id.
            is_first: Whether no text precedes the token.
            taken: Names of the other tokens at this position.

        Returns:
            The token's text. A token that is part of a character is named by its bytes as "bytes:\xNN...". A token
            whose name is empty or taken is named "token_id:N". The notation is vLLM's.
        """
        text, data = self.of(token, is_first)
        if PART_OF_A_CHARACTER in text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text if text and text not in taken else f"token_id:{token}"


class TokenTextStream:
    """Incremental decoder that splits the text of one completion into the text of each token.

    If a character takes several tokens, the last token gets the character, and the text of the other tokens is empty.
    The text of hidden tokens, such as end-of-sequence, is empty too.

    Args:
        texts: Texts of the vocabulary's tokens.
        hidden: Ids of tokens without text.
        before: Token ids of the prompt, which are context for decoding.
        partial: Token ids between `before` and the completion that form an incomplete character.
    """

    def __init__(
        self, texts: TokenTextCache, hidden: frozenset[int], before: Sequence[int] = (), partial: Sequence[int] = ()
    ):
        self._texts, self._hidden = texts, hidden
        self._stream = TextStream(texts.tokenizer, hidden, before=before, partial=partial)
        self._before, self._partial = list(before[-_KEPT:]), partial
        self._waiting: list[int] = []  # tokens whose text is not certain
        self._known: list[TokenText] = []  # tokens not yet returned by `take`
        self._n_taken = 0  # characters of the returned tokens

    def feed(self, tokens: Sequence[int]) -> None:
        """Add token ids.

        Args:
            tokens: The next token ids.
        """
        self._waiting += tokens
        text = self._stream.feed(tokens)
        if self._stream.is_settled:
            self._settle(text)

    def take(self, n_characters: int) -> list[TokenText]:
        """Return the next tokens whose text lies within the first `n_characters` of the completion's text.

        Args:
            n_characters: Length, in characters, of the completion's text so far that later tokens cannot change.

        Returns:
            Text and bytes of each of these tokens, in order. Tokens that an earlier call returned are left out.
        """
        end, n = self._n_taken, 0
        while n < len(self._known) and end + len(self._known[n].text) <= n_characters:
            end, n = end + len(self._known[n].text), n + 1
        taken, self._known, self._n_taken = self._known[:n], self._known[n:], end
        return taken

    def finish(self, n_characters: int) -> list[TokenText]:
        """Return the remaining tokens, with their texts cut to the first `n_characters` of the completion's text.

        The texts are cut because a stop string may have ended the text within a token.

        Args:
            n_characters: Length of the completion's whole text.

        Returns:
            Text and bytes of each token, in order.
        """
        self._settle(self._stream.finish())
        taken = self.take(n_characters)
        for token_text in self._known:
            text = token_text.text[: n_characters - self._n_taken]
            self._n_taken += len(text)
            taken.append(token_text if text == token_text.text else TokenText(text, text.encode(), token_text.is_first))
        return taken

    def _settle(self, text: str) -> None:
        """Split `text` into the texts of the waiting tokens, so that `take` can return these tokens.

        `text` is the decoded text of all waiting tokens together.
        """
        if self._waiting:
            found = self._by_bytes(self._waiting)
            self._known += found if _text_of(found) == text else self._by_groups()
            self._before, self._partial = [*self._before, *self._partial, *self._waiting][-_KEPT:], ()
            self._waiting = []

    def _by_bytes(self, tokens: Sequence[int]) -> list[TokenText]:
        """Return the text of each token, decoded from the bytes of the tokens.

        The result is wrong if the tokenizer inserts text between tokens, so callers compare it with the decoded
        text.
        """
        found, is_first = list[TokenText](), self._hidden.issuperset(self._before)
        data = list[bytes]()
        for token in tokens:
            data.append(b"" if token in self._hidden else self._texts.of(token, is_first)[1])
            found.append(TokenText("", b"", is_first))
            is_first = is_first and token in self._hidden
        decoder, at = codecs.getincrementaldecoder("utf-8")("replace"), 0
        for is_run, run in itertools.groupby(map(self._texts.is_byte, tokens)):
            end = at + len(list(run))
            if is_run and not _is_utf8(b"".join(data[at:end])):  # the tokenizer replaces each byte, too
                data[at:end] = [PART_OF_A_CHARACTER.encode()] * (end - at)
            at = end
        found = [one._replace(text=decoder.decode(each), data=each) for one, each in zip(found, data, strict=True)]
        found[-1] = found[-1]._replace(text=found[-1].text + decoder.decode(b"", True))
        return _with_replaced_bytes(found)

    def _by_groups(self) -> list[TokenText]:
        """Split the waiting tokens into the smallest groups that can be decoded, and return the text of each token.

        Within a group, each token gets the text of its bytes. If these texts differ from the decoded text of the group,
        the last token gets the whole text.
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
            found = self._by_bytes(group)
            if _text_of(found) != text:
                found = [TokenText("", b"", one.is_first) for one in found]
                found[-1] = TokenText(text, text.encode(), found[-1].is_first)
            known, group = known + found, []
        return known


def _text_of(tokens: Iterable[TokenText]) -> str:
    """Join the texts of tokens."""
    return "".join(one.text for one in tokens)


def _with_replaced_bytes(tokens: list[TokenText]) -> list[TokenText]:
    """Return the tokens with `data` replaced where the bytes of the tokens are not valid UTF-8.

    The new `data` of such a token is the UTF-8 encoding of its `text`.
    """
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
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def prompt_token_texts(tokenizer: Any, prompt: str) -> list[TokenText]:
    """Return the text of each token in a prompt.

    Args:
        tokenizer: A fast tokenizer of transformers, since only fast tokenizers report offsets.
        prompt: Text of the prompt.

    Returns:
        One entry for each token. Their texts add up to `prompt`.
    """
    places = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    ends, end = list[int](), 0
    for number, place in enumerate(places):
        is_amid = number + 1 < len(places) and place == places[number + 1] and place[1] > place[0]
        end = end if is_amid else max(end, place[1])
        ends.append(end)
    ends = [len(prompt) if each == end else each for each in ends]  # spaces at the end may belong to no token
    texts = [prompt[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    return [TokenText(text, text.encode(), not start) for text, start in zip(texts, [0, *ends], strict=False)]
