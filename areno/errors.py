"""What areno raises. A message says what was wrong, what was expected and which setting to change.

ArenoError
├── ConfigError (ValueError)        a setting is missing, unknown, mistyped or does not fit the others
├── DataError (ValueError)          a dataset cannot be read or a row does not have the expected form
├── GrammarError (ValueError)       a grammar for constrained decoding cannot be compiled
├── CheckpointError (OSError)       a model folder cannot be read or written
└── EngineError (RuntimeError)      the engine ran out of memory, or was used out of order
    └── WorkerLost                  a worker died, hangs or lost its device: Engine.restart brings it back

An error knows which settings it is about: they are `Key`s in it, not words of its text. So a caller whose users know a
setting under another name can rename it (`keys_renamed`).

    raise EngineError("a prompt of {} tokens does not fit; raise {}", 900, Key("rollout.max_kv_tokens"))
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Rename = Callable[[str], "str | None"]
"""Setting -> what it is called instead; None keeps its name."""


@dataclass(frozen=True)
class Key:
    """A setting that a message mentions, by its dotted name."""

    name: str

    def __str__(self) -> str:
        return self.name


class Problem:
    """One thing that is wrong. key: the setting it is about, or "". message: a text with {} for each of `args`."""

    def __init__(self, key: str, message: str, *args: Any):
        self.key, self.template, self.args = key, message, args

    @property
    def message(self) -> str:
        """The text, without the key."""
        # A text without args is taken as it is: it may hold braces of a user's own.
        return self.template.format(*self.args) if self.args else self.template

    def under(self, prefix: str) -> Problem:
        """The same problem seen from the section that holds this one."""
        return type(self)(f"{prefix}.{self.key}" if self.key else prefix, self.template, *self.args)

    def of_node(self, host: str) -> Problem:
        """The same problem, which one machine of several has."""
        template = self.template if self.args else self.template.replace("{", "{{").replace("}", "}}")
        return type(self)(self.key, template + " (on node {})", *self.args, host)

    def mentions(self) -> set[str]:
        """The settings that it names."""
        return {self.key, *(arg.name for arg in self.args if isinstance(arg, Key))} - {""}

    def renamed(self, rename: Rename) -> Problem:
        """The same problem with its settings under other names."""
        args = (Key(rename(arg.name) or arg.name) if isinstance(arg, Key) else arg for arg in self.args)
        return type(self)(rename(self.key) or self.key if self.key else "", self.template, *args)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and (self.key, self.message) == (other.key, other.message)

    def __hash__(self) -> int:
        return hash((self.key, self.message))


class ArenoError(Exception):
    """Base of every error meant for the user. `str(error)` is complete without a traceback.

    what: a text, with a {} for each of `args`, or one or several Problems. `problems` has them all.
    """

    def __init__(self, what: str | Problem | Iterable[Problem], *args: Any):
        if isinstance(what, str):
            what = Problem("", what, *args)
        self.problems = [what] if isinstance(what, Problem) else list(what)
        lines = [str(problem) for problem in self.problems]
        heading = f"{len(lines)} problems in the configuration:"
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([heading, *lines]))

    def renamed(self, rename: Rename) -> ArenoError:
        """The same error with its settings under other names."""
        return type(self)([problem.renamed(rename) for problem in self.problems])


class ConfigError(ArenoError, ValueError):
    """One or more settings are wrong."""


class DataError(ArenoError, ValueError):
    """A dataset, or a row of one, is not what the algorithm needs."""


class GrammarError(ArenoError, ValueError):
    """Constrained decoding cannot do what was asked: no grammar, an unknown feature of a schema, no library for it."""


class CheckpointError(ArenoError, OSError):
    """A model folder cannot be read or written."""


class EngineError(ArenoError, RuntimeError):
    """The engine cannot go on: a lost worker, no memory left, or a call out of order."""


class WorkerLost(EngineError):
    """A worker died, hangs or lost its device, and the models with it. `Engine.restart` loads them anew."""


def non_finite_logits() -> EngineError:
    """Return the error of a model that cannot be sampled from."""
    return EngineError(
        "the model produced non-finite logits; expected finite weights: a training step may have diverged (lower "
        "actor.optimizer.lr) or the checkpoint at actor.path is damaged"
    )


def all_of(*steps: Callable[[], Any]) -> list[Any]:
    """What the functions return. Where some raise ArenoErrors, one error with the problems of all.

    Errors of different classes become a ConfigError.
    """
    results, errors = [], []
    for step in steps:
        try:
            results.append(step())
        except ArenoError as error:
            errors.append(error)
    if len(errors) > 1:
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        raise kind(dict.fromkeys(problem for error in errors for problem in error.problems)) from errors[0]
    if errors:
        raise errors[0]
    return results


_OF_A_PLACE = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
}  # fmt: skip


def of_a_place(error: BaseException) -> ArenoError | None:
    """What to tell of a file or folder that may not be read or written, or is full; None for any other error.

    Such an error of the operating system is about the user's machine, so its traceback would help nobody.
    """
    if not isinstance(error, OSError) or error.errno not in _OF_A_PLACE or error.filename is None:
        return None
    return ArenoError("{}: {}", os.fsdecode(error.filename), error.strerror)


_OBEYED = (range(0x09), range(0x0A, 0x20), range(0x7F, 0xA0), range(0x2028, 0x202F), range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {code: repr(chr(code))[1:-1] for codes in (*_OBEYED, _SURROGATES) for code in codes}


def printable(text: str) -> str:
    """Return the text with escapes in place of what a terminal obeys: control characters, line ends, text direction.

    Halves of surrogate pairs, which cannot be encoded, are escaped too. Tabs stay.
    """
    return text.translate(_ESCAPES)


def did_you_mean(word: str, names: Iterable[str], otherwise: str = "") -> str:
    """`; did you mean a or b?` for the end of a message, or `otherwise` if none of `names` is like `word`."""
    return question(difflib.get_close_matches(word, list(names))) or otherwise


def question(names: list[str]) -> str:
    """`; did you mean a or b?`; nothing where there are no names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


@contextmanager
def keys_renamed(rename: Rename) -> Iterator[None]:
    """Around code whose errors speak of settings by names that its caller does not use."""
    try:
        yield
    except ArenoError as error:
        raise error.renamed(rename).with_traceback(error.__traceback__) from error.__cause__
