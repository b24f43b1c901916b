"""Strings that end a completion, found without decoding every token."""

from __future__ import annotations

from collections.abc import Callable

Detokenize = Callable[[list[int]], str]

# Tokens beyond the bytes of a stop string in which to look for it: special tokens may add no text at all.
_EXTRA_TAIL = 16
_PART_OF_A_CHARACTER = "\ufffd"


class StopStrings:
    """Some stop strings, and which tokens can complete one of them.

    A stop string ends inside the text of the token that completes it. Most tokens have no text that fits, which is
    looked up once for each; only after the others is the text of the completion made.
    """

    def __init__(self, strings: tuple[str, ...], detokenize: Detokenize):
        self._strings = strings
        self._detokenize = detokenize
        self._n_tail = max(len(string.encode()) for string in strings) + _EXTRA_TAIL
        self._can_end: dict[int, bool] = {}

    def are_in(self, tokens: list[int]) -> bool:
        """Whether the end of a completion has one of the strings."""
        text = self._detokenize(tokens[-self._n_tail :])
        return any(string in text for string in self._strings)

    def can_end_with(self, token: int) -> bool:
        """Whether a completion can have the last character of a stop string from this token."""
        can_end = self._can_end.get(token)
        if can_end is None:
            # A token whose text depends on what is before it can always end one; but for a space, which most
            # tokenizers of that kind drop before a first token.
            first, text = self._detokenize([token]), self._detokenize([token, token])
            depends = text not in (first + first, f"{first} {first}")
            can_end = self._can_end[token] = depends or self._fits(first) or self._fits(text[len(first) :])
        return can_end

    def _fits(self, text: str) -> bool:
        if _PART_OF_A_CHARACTER in text:
            return True
        return any(
            string in text or any(string.endswith(text[:n]) for n in range(1, min(len(text), len(string)) + 1))
            for string in self._strings
        )
