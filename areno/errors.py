"""The exceptions of areno. A message says what was wrong, what was expected and which setting to change.

ArenoError
├── ConfigError (ValueError)        a setting is missing, unknown or mistyped, or contradicts another setting
├── DataError (ValueError)          a dataset cannot be read or a row does not have the expected form
├── GrammarError (ValueError)       a grammar for constrained decoding cannot be compiled
├── CheckpointError (OSError)       a model folder cannot be read or written
└── EngineError (RuntimeError)      the engine ran out of memory, or its methods were called out of order
    └── WorkerLost                  a worker died, hangs or lost its device: Engine.restart starts new workers

Settings in a message are `Key` objects instead of text. So a caller whose users know a setting by another name can
rename it (`keys_renamed`).

    raise EngineError("a prompt of {} tokens does not fit; raise {}", 900, Key("rollout.max_kv_tokens"))
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Rename = Callable[[str], "str | None"]
"""Function that returns the new name of a setting, or None to keep its name."""


@dataclass(frozen=True)
class Key:
    """A setting that a message mentions.

    Attributes:
        name: Dotted name of the setting.
    """

    name: str

    def __str__(self) -> str:
        return self.name


class Problem:
    """One wrong setting, argument or file. An ArenoError holds one or several problems.

    Args:
        key: Dotted name of the setting that is wrong, or "" if the problem is not about a setting.
        message: Text with one {} for each value in `args`. Without `args`, the text is not formatted, so it may contain
            braces.
        *args: Values that fill the {} of the text. The name of a setting is passed as a `Key`, so that it can be
            renamed.
    """

    def __init__(self, key: str, message: str, *args: Any):
        self.key, self.template, self.args = key, message, args

    @property
    def message(self) -> str:
        """The text with its values filled in, without `key`."""
        # A text without args is not formatted, since it may contain braces from user input.
        return self.template.format(*self.args) if self.args else self.template

    def under(self, prefix: str) -> Problem:
        """Return a copy whose key is inside of a section, such as "tp_size" -> "engine.tp_size"."""
        return type(self)(f"{prefix}.{self.key}" if self.key else prefix, self.template, *self.args)

    def on_node(self, host: str) -> Problem:
        """Return a copy whose message ends with the name of a machine, for runs on several machines."""
        template = self.template if self.args else self.template.replace("{", "{{").replace("}", "}}")
        return type(self)(self.key, template + " (on node {})", *self.args, host)

    def mentions(self) -> set[str]:
        """Return the names of the settings in the problem: its key, and each `Key` in its text."""
        return {self.key, *(arg.name for arg in self.args if isinstance(arg, Key))} - {""}

    def renamed(self, rename: Rename) -> Problem:
        """Return a copy in which the settings have other names, both in the key and in the text."""
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
    """Base class of all errors meant for the user. `str(error)` can be shown without a traceback.

    Args:
        what: Text with one {} for each value in `args`, one Problem, or several Problems.
        *args: Values that fill the {} of the text.

    Attributes:
        problems: The Problems of the error. An error made from a text has one Problem without a key.
    """

    def __init__(self, what: str | Problem | Iterable[Problem], *args: Any):
        if isinstance(what, str):
            what = Problem("", what, *args)
        self.problems = [what] if isinstance(what, Problem) else list(what)
        lines = [str(problem) for problem in self.problems]
        heading = f"{len(lines)} problems in the configuration:"
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([heading, *lines]))

    def renamed(self, rename: Rename) -> ArenoError:
        """Return a copy of the error in which the settings have other names."""
        return type(self)([problem.renamed(rename) for problem in self.problems])


class ConfigError(ArenoError, ValueError):
    """One or more settings are wrong."""


class DataError(ArenoError, ValueError):
    """A dataset or one of its rows does not have the form that the algorithm needs."""


class GrammarError(ArenoError, ValueError):
    """A grammar is invalid, a schema uses an unknown feature, or the library for constrained decoding is missing."""


class CheckpointError(ArenoError, OSError):
    """A model folder cannot be read or written."""


class EngineError(ArenoError, RuntimeError):
    """The engine cannot continue: a worker is lost, memory ran out, or a method was called out of order."""


class WorkerLost(EngineError):
    """A worker died, hangs or lost its device. `Engine.restart` starts new workers and loads the models again."""


def non_finite_logits() -> EngineError:
    """Return an EngineError which says that the model computed NaN or infinite logits."""
    return EngineError(
        "the model produced non-finite logits; expected finite weights: a training step may have diverged (lower "
        "actor.optimizer.lr) or the checkpoint at actor.path is damaged"
    )


def all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Call every function even if an earlier function fails, and raise the problems of all of them together.

    Args:
        *steps: Functions without arguments.

    Returns:
        The results of the functions, in the order of `steps`.

    Raises:
        ArenoError: A function raised an ArenoError. If several did, the error has all their problems, and it is a
            ConfigError if their classes differ.
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


_FILE_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}


def as_file_error(error: BaseException) -> ArenoError | None:
    """Return an ArenoError for an error of the file system, such as a missing permission or a full disk.

    Such an error comes from the user's machine, so a traceback would not help. None for other errors, and without a
    file's name.
    """
    if not isinstance(error, OSError) or error.errno not in _FILE_ERRORS or error.filename is None:
        return None
    return ArenoError("{}: {}", os.fsdecode(error.filename), error.strerror)


_CONTROLS = (range(0x09), range(0x0A, 0x20), range(0x7F, 0xA0), range(0x2028, 0x202F), range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)
_ESCAPES = {code: repr(chr(code))[1:-1] for codes in (*_CONTROLS, _SURROGATES) for code in codes}


def printable(text: str) -> str:
    """Escape the characters of a text that control a terminal, so that it can be printed safely.

    These are control characters, line ends and changes of the text direction. Halves of surrogate pairs, which cannot
    be encoded, are escaped too. Tabs are kept.
    """
    return text.translate(_ESCAPES)


def did_you_mean(word: str, names: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message about an unknown word, such as `; did you mean a or b?`, or `otherwise`."""
    import difflib  # most commands make no suggestion

    return suggestion(difflib.get_close_matches(word, list(names))) or otherwise


def suggestion(names: list[str]) -> str:
    """Return the end of a message, such as `; did you mean a or b?`, or "" if `names` is empty."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


@contextmanager
def keys_renamed(rename: Rename) -> Iterator[None]:
    """Rename the settings in an ArenoError that the `with` block raises.

    This is for callers whose users know a setting by another name, such as the arguments of a script.
    """
    try:
        yield
    except ArenoError as error:
        raise error.renamed(rename).with_traceback(error.__traceback__) from error.__cause__
