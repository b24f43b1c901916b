"""Ctrl-C while the modules of a command are imported: one line and exit code 130 in place of a traceback."""

from __future__ import annotations

import os
import signal
import sys

_COMMANDS = ("bench", "cli", "recipes")  # packages of areno
_WITH_VALUE = ("-W", "-X")  # options of Python


def begin() -> None:
    """Let Ctrl-C end this process at once, if it has been started as a command of areno."""
    if _is_command(sys.orig_argv[1:]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def end() -> None:
    """Let Ctrl-C raise a KeyboardInterrupt, as usual: the command handles it from here on."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    # An exception could be lost in the import of a library, or become another one.
    os.write(2, b"interrupted\n")
    os._exit(130)


def _is_command(words: list[str]) -> bool:
    """Return whether Python was started as `-m areno.recipes.gspo` or with the script `areno`. words: what follows it.

    sys.argv does not tell: a process that multiprocessing starts has that of its parent.
    """
    while words and words[0].startswith("-"):
        if words[0] == "-m":
            package, _, rest = words[1].partition(".")
            return package == "areno" and rest.partition(".")[0] in _COMMANDS
        words = words[2 if words[0] in _WITH_VALUE else 1 :]
    return bool(words) and os.path.basename(words[0]) == "areno"
