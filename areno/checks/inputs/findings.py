"""What checks find, and how they are run."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from areno.errors import ArenoError, Problem

if TYPE_CHECKING:
    from areno.checks.inputs.subject import Subject

_WAIT_S = 20.0

Verdict = Literal["green", "red", "not checked"]


@dataclass(frozen=True)
class MarkedText:
    """A text of which some pieces are trained, shown in colour or between brackets."""

    caption: str
    pieces: list[tuple[str, bool]]  # (text, whether it is trained)


Detail = str | MarkedText


@dataclass(frozen=True)
class Finding:
    """One result of a check. Only red findings fail."""

    name: str  # of what is found, such as "prompt-end"; the same in every run
    verdict: Verdict
    line: str
    details: list[Detail] = field(default_factory=list)
    group: str = ""  # set when the check has run

    def record(self) -> dict[str, Any]:
        return asdict(self)


def green(name: str, line: str, details: Iterable[Detail] = ()) -> Finding:
    return Finding(name, "green", line, list(details))


def red(name: str, line: str, details: Iterable[Detail] = ()) -> Finding:
    return Finding(name, "red", line, list(details))


def not_checked(name: str, why: str, details: Iterable[Detail] = ()) -> Finding:
    return Finding(name, "not checked", why, list(details))


def examples(faults: Iterable[str], most: int = 3) -> list[str]:
    """Return the first faults that differ: one of each row, if they begin with their row, as in "row 3: ..."."""
    firsts = dict[str, str]()
    for fault in faults:
        firsts.setdefault(fault.partition(":")[0] if fault.startswith("row ") else fault, fault)
    return [*firsts.values()][:most]


def shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def quoted(text: str, most: int = 60) -> str:
    return repr(shortened(text, most))


class NotChecked(Exception):
    """Raised inside of a check if this run does not have what it checks. The text is the reason."""


Check = Callable[["Subject"], Iterable[Finding]]


def run_checks(
    checks: Mapping[str, Sequence[Check]], subject: Subject, only: Collection[str] | None = None
) -> Iterator[Finding]:
    """Run the checks of the groups in `only` (None: all), and yield their findings as they come.

    An ArenoError in a check is a red finding, because it is what the run would end with. After any other exception,
    the check counts as not checked. Both are named after the function. An error that was reported is not repeated, nor
    is a red line.
    """
    red_lines = set[tuple[str, str]]()
    reported: dict[tuple[Problem, ...], str] = {}  # problems of an error -> name of the finding
    for group, members in checks.items():
        for check in members if only is None or group in only else ():
            name = check.__name__.replace("_", "-")
            try:
                with _told_if_slow(subject, name):
                    for finding in check(subject):
                        if finding.verdict != "red" or (finding.name, finding.line) not in red_lines:
                            yield replace(finding, group=group)
                        red_lines |= {(finding.name, finding.line)} if finding.verdict == "red" else set()
            except NotChecked as reason:
                yield replace(not_checked(name, str(reason)), group=group)
            except ArenoError as error:
                if (before := reported.setdefault(tuple(error.problems), name)) != name:
                    yield replace(not_checked(name, f"see {before}"), group=group)
                else:
                    yield replace(red(name, str(error)), group=group)
            except Exception as error:
                said = f"the check itself failed: {type(error).__name__}: {error}"
                yield replace(not_checked(name, said, traceback.format_exc().splitlines()), group=group)


@contextmanager
def _told_if_slow(subject: Subject, name: str) -> Iterator[None]:
    """Announce what is being waited for every `_WAIT_S` seconds inside of a `with` block."""
    ended = threading.Event()

    def tell() -> None:
        seconds = 0.0
        while not ended.wait(_WAIT_S):
            seconds += _WAIT_S
            part = f" ({subject.doing})" if subject.doing else ""
            subject.announce(f"has waited {seconds:.0f} s for {name}{part}")

    subject.doing = ""
    threading.Thread(target=tell, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
