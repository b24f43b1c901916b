"""A terminal for tests: a pseudo-terminal, and what its screen shows of what a program writes to it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
import threading
from typing import TextIO

_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
_BEGUN_CODE = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Terminal:
    """stream: for the program. After `close`, `lines` are those of screen and scrollback, without spaces at their end.

    Knows the codes that move the cursor up, that erase, and that colour; any other is an error.
    """

    def __init__(self, width: int = 120, height: int = 40):
        self.width, self.height = width, height
        self._reads, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.end = end
        self.stream: TextIO = os.fdopen(end, "w", encoding="utf-8")
        self._bytes = b""
        self._stay, self._leave = os.pipe()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._stay not in select.select([self._reads, self._stay], [], [])[0]:
            try:
                chunk = os.read(self._reads, 65536)
            except OSError:  # nobody has the other end any more
                return
            if not chunk:
                return
            self._bytes += chunk

    @property
    def written(self) -> str:
        """The text so far, up to the last whole character and code: a program may be killed between two bytes."""
        return _BEGUN_CODE.sub("", codecs.getincrementaldecoder("utf-8")().decode(self._bytes))

    def close(self) -> None:
        """Nothing more will be written."""
        self.stream.close()
        self._thread.join(60)
        self._end()

    def vanish(self) -> None:
        """Who writes from now on gets an error."""
        os.write(self._leave, b".")
        self._thread.join()  # while it reads, the terminal is there
        self._end()

    def _end(self) -> None:
        for number in (self._reads, self._stay, self._leave):
            os.close(number)

    @property
    def lines(self) -> list[str]:
        rows, row, column, at, text = [""], 0, 0, 0, self.written
        while at < len(text):
            if code := _CODE.match(text, at):
                number, letter = code[1], code[2]
                if letter == "A":
                    top = max(0, len(rows) - self.height)
                    row = max(top, row - int(number or 1))
                elif letter == "J":
                    rows[row:] = [rows[row][:column]]
                elif letter == "K":
                    rows[row] = rows[row][:column]
                else:
                    assert letter == "m", code[0]
                at = code.end()
                continue
            char, at = text[at], at + 1
            if char == "\r":
                column = 0
            elif char == "\n":
                row += 1  # the pseudo-terminal has put a return in front
                rows += [""] * (row == len(rows))
            else:
                assert char.isprintable(), repr(char)
                if column == self.width:
                    row, column = row + 1, 0
                    rows += [""] * (row == len(rows))
                rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in rows]
