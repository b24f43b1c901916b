"""A place in a text that is still being written.

The methods are generators. They yield while the answer depends on text that has not come yet, and return the answer
with `yield from`. So a reader is written once, as if it had the whole text, and reads a stream with the same result.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Answer = TypeVar("Answer")
Reading = Generator[None, None, Answer]

_JSON_PAIRS = {"}": "{", "]": "["}
_JSON_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsenullE")


def after_space(text: str, at: int) -> int:
    """The first position from `at` on whose character is no whitespace, or the end."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def partial_tag(text: str, tags: tuple[str, ...], at: int = 0) -> int:
    """From where on the end of the text could become one of the tags; the end if it cannot."""
    longest = max(map(len, tags), default=1) - 1
    for start in range(max(at, len(text) - longest), len(text)):
        if any(tag.startswith(text[start:]) for tag in tags):
            return start
    return len(text)


class Cursor:
    """text: all that was written so far. at: the next character to read. ended: no more text comes."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def forget(self) -> None:
        """Drop the text before the cursor."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Reading[None]:
        """Go to the next character that is no whitespace."""
        while (yield from self.peek()).isspace():
            self.at = after_space(self.text, self.at)

    def skip_newlines(self) -> Reading[None]:
        while (yield from self.peek()) == "\n":
            self.at += 1

    def looks_at(self, word: str) -> Reading[bool]:
        """Whether this word comes next."""
        while not self.ended and len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            yield
        return self.text.startswith(word, self.at)

    def accept(self, word: str) -> Reading[bool]:
        """Go past this word if it comes next."""
        found = yield from self.looks_at(word)
        if found:
            self.at += len(word)
        return found

    def until(self, mark: str) -> Reading[str | None]:
        """The text before the next `mark`, past which the cursor goes. None if there is none."""
        start = searched = self.at
        while (found := self.text.find(mark, searched)) < 0:
            if self.ended:
                return None
            searched = max(start, len(self.text) - len(mark) + 1)
            yield
        self.at = found + len(mark)
        return self.text[start:found]

    def json_object(self) -> Reading[str | None]:
        """The text of a JSON object, as far as its brackets and strings tell. None if no object can come of it."""
        start, brackets = self.at, []
        while True:
            char = yield from self.peek()
            self.at += 1
            if char == '"' and brackets:
                if not (yield from self._json_string()):
                    return None
            elif char in ("{", "["):
                brackets.append(char)
            elif char in _JSON_PAIRS:
                if not brackets or brackets.pop() != _JSON_PAIRS[char]:
                    return None
            elif char == "" or char not in _JSON_OUTSIDE_STRINGS:
                return None
            if brackets[:1] != ["{"]:  # closed again, or it never was an object
                return self.text[start : self.at] if char == "}" else None

    def _json_string(self) -> Reading[bool]:
        """Go past a string whose first quote has been read."""
        while (char := (yield from self.peek())) != '"':
            if char < " ":  # the end, or a control character, which JSON does not allow in a string
                return False
            self.at += 1
            if char == "\\":
                if (yield from self.peek()) == "":
                    return False
                self.at += 1
        self.at += 1
        return True
