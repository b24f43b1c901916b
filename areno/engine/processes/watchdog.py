"""How far each worker is, in memory that workers share with the process that started them.

To count takes no message and no system call. Counters of another machine are copied to the driver about once a second.

Ends what hangs: workers that do not get on, and a driver that does not.

A thread looks at counts that only the work itself moves (areno.heartbeat). Where a rank has something to do and its
count has not changed for `engine.stall_timeout_s`, the log shows what every process does, the workers are killed, and
who waits for them gets a WorkerLost. Where the driver hangs in work of its own, its main thread gets an exception; a
thread that does not take it ends with the process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from areno import heartbeat
from areno.engine.processes import stacks
from areno.errors import EngineError, Key, WorkerLost

# For each rank: parts of its work, commands that it has done, whether it decodes.
_BEATS, _DONE, _DECODES = range(3)
FIELDS = 3


class Pulses:
    """The driver's view. It counts the commands that it sends, and looks at what each rank counts.

    counters: FIELDS numbers for each rank. together: the driver waits for an answer of every rank, so they may wait for
    each other.
    """

    def __init__(self, counters: Any, world_size: int, tp_size: int):
        self.counters = counters
        self.world_size, self._tp_size = world_size, tp_size
        self._sent = [1] * world_size  # to the leader of each rank; the start is a command, too
        self._commands = ["start"] * world_size  # the last one
        self.together = True

    def sent(self, leader: int, command: str) -> None:
        """The leader of a tensor-parallel group gets a command, which it passes on."""
        for rank in range(leader, leader + self._tp_size):
            self._sent[rank] += 1
            self._commands[rank] = command

    def is_due(self, rank: int) -> bool:
        """Whether it has something to do."""
        leader = rank - rank % self._tp_size  # it alone knows: others wait for it between two steps
        return self._is_asked(rank) or bool(self.counters[FIELDS * leader + _DECODES])

    def _is_asked(self, rank: int) -> bool:
        return self.counters[FIELDS * rank + _DONE] < self._sent[rank]

    def progress(self, rank: int) -> list[int]:
        """Changes whenever the rank gets on."""
        return self.counters[FIELDS * rank : FIELDS * (rank + 1)]

    def command(self, rank: int) -> str:
        """What it does, or should be doing."""
        return self._commands[rank] if self._is_asked(rank) else "decoding"


class Pulse:
    """The view of one worker, whose beats count there from now on."""

    def __init__(self, counters: Any, rank: int):
        self._counters, self._at = counters, FIELDS * rank
        heartbeat.count_in(counters, self._at + _BEATS)

    def has_done(self, decodes: bool) -> None:
        """One more command is done. decodes: there is something to decode now."""
        self.decodes(decodes)
        self._counters[self._at + _DONE] += 1

    def decodes(self, decodes: bool) -> None:
        """Whether there is something left to decode, and nobody else holds it up."""
        self._counters[self._at + _DECODES] = decodes


logger = logging.getLogger("areno")

_LOOK_S = 1.0
_RAISE_S = 5.0  # for the main thread to take an exception
_TELL_S = 10.0  # for the log, whose disk or pipe may be what hangs
_LOCKED_S = 2.0  # later than this thread would notice, if it could
_INTERRUPT = signal.SIGUSR2
_DEBUGGERS = {"pdb", "bdb", "code", "IPython", "_pydevd_bundle"}  # they wait for a person
_KEY = Key("engine.stall_timeout_s")


class Watched(Protocol):
    """A group of workers. command: what a worker that lives in the driver does, "" for nothing."""

    command: str

    @property
    def pulses(self) -> Pulses | None:
        """Of worker processes; None without any."""
        ...

    def look(self) -> dict[int, tuple[str, str]]:
        """State in words and stacks of each worker process."""
        ...

    def name(self, rank: int) -> str:
        """A worker, for messages."""
        ...

    def lose(self, error: WorkerLost) -> None:
        """Kill the worker processes. Who waits for them, or uses them later, gets the error."""
        ...


class Watchdog:
    """Looks after a group of workers and this process until `stop`. limit_s: longest time without progress, or None."""

    def __init__(self, limit_s: float | None, group: Watched):
        self.limit_s, self._group = limit_s, group
        self._stopped = threading.Event()
        self._quiet: dict[int, float] = {}  # seconds without progress, by rank
        self._seen: dict[int, list[int]] = {}
        self._driver_quiet, self._driver_seen = 0.0, -1
        self._interrupted_at = -1
        self._lost = False
        if limit_s is not None:
            _listen()
            # The thread does not keep a group alive that was dropped without being closed.
            args = (weakref.ref(self), self._stopped)
            threading.Thread(target=_watch, args=args, daemon=True, name="areno-watchdog").start()

    def stop(self) -> None:
        """The group ends, or has ended."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def look(self, elapsed: float) -> None:
        """Once in a while. elapsed: seconds since the last time."""
        assert self.limit_s is not None
        due, work = self._due(elapsed), heartbeat.work()
        if work:
            # Where C code keeps the interpreter's lock, this thread hangs as well. Then at least the stacks are shown.
            faulthandler.dump_traceback_later(self.limit_s + _LOCKED_S, file=2)
        if due:
            self._driver_quiet = 0.0
            quiet = [self._quiet[rank] for rank in due]
            assert self._group.pulses is not None
            # Ranks that answer one command may wait for each other: then one that gets on is enough.
            if (min if self._group.pulses.together else max)(quiet) >= self.limit_s:
                self._lose_workers(due)
            return
        beats = heartbeat.count()
        if beats != self._driver_seen or not work or _is_debugged(work[-1][1]):
            self._driver_seen, self._driver_quiet = beats, 0.0
            return
        self._driver_quiet += elapsed
        if self._driver_quiet >= self.limit_s:
            self._driver_quiet = 0.0
            self._end_driver(work)

    def _due(self, elapsed: float) -> list[int]:
        """The ranks that have something to do, after a look at each."""
        pulses, due = self._group.pulses, []
        if pulses is None or self._lost:
            return due
        for rank in range(pulses.world_size):
            progress = pulses.progress(rank)
            if not pulses.is_due(rank) or progress != self._seen.get(rank):
                self._quiet[rank] = 0.0
            else:
                self._quiet[rank] += elapsed
            self._seen[rank] = progress
            if pulses.is_due(rank):
                due.append(rank)
        return due

    def _lose_workers(self, due: list[int]) -> None:
        assert self._group.pulses is not None
        looks, name = self._group.look(), self._group.name
        # One that waits in a collective is not to blame, unless all do.
        guilty = [rank for rank in due if not stacks.waits_for_others(looks[rank][1])] or due
        stopped = [rank for rank in guilty if looks[rank][0]]
        first = (stopped or guilty)[0]
        command, seconds = self._group.pulses.command(first), self._quiet[first]
        who = ", ".join(name(rank) for rank in stopped or guilty)
        how = f", since it {looks[first][0]}," if stopped else ""
        error = WorkerLost(
            "{} made no progress for {:.0f} s in {}{} and was ended; raise {} ({:g}) if this can take longer",
            who, seconds, command, how, _KEY, self.limit_s,
        )  # fmt: skip
        what = f"{who} made no progress for {seconds:.0f} s, command {command}{_phase(heartbeat.work())}"
        idle = dict.fromkeys(looks, "has nothing to do")
        self._tell(what, looks, idle | {rank: f"no progress for {self._quiet[rank]:.0f} s" for rank in due})
        self._lost = True
        self._group.lose(error)

    def _end_driver(self, work: list[tuple[str, int]]) -> None:
        group, beats = self._group, heartbeat.count()
        kind = WorkerLost if group.pulses is None and group.command else EngineError
        what = f"worker 0, which lives in the driver ({group.command})," if kind is WorkerLost else "the driver"
        error = kind(
            "{} made no progress for {:g} s{}; raise {} if this can take longer",
            what, self.limit_s, _phase(work), _KEY,
        )  # fmt: skip
        looks = {} if self._lost else group.look()
        self._tell(f"{what} made no progress for {self.limit_s:g} s{_phase(work)}", looks, {})
        is_main = work[-1][1] == threading.main_thread().ident
        if heartbeat.count() != beats:
            return  # it went on meanwhile
        if is_main and beats != self._interrupted_at and _raise_in_main(error):
            self._interrupted_at = beats  # if it was caught and nothing follows, it hangs again
            return
        group.lose(WorkerLost("the driver hangs, and ends"))
        _in_time(_TELL_S, lambda: print(f"error: {error}; the process ends", file=sys.stderr, flush=True))
        _in_time(_TELL_S, logging.shutdown)
        os._exit(1)

    def _tell(self, what: str, looks: dict[int, tuple[str, str]], notes: Mapping[int, str]) -> None:
        """Log what every process does. looks: of the workers. notes: more about some of them."""
        faulthandler.cancel_dump_traceback_later()
        alike: dict[tuple[str, ...], list[str]] = {}  # many ranks hang at one place
        for rank, (state, shown) in looks.items():
            title = "; ".join(word for word in (notes.get(rank), state and f"it {state}") if word)
            alike.setdefault((title, shown), []).append(self._group.name(rank))
        found = [(f"{', '.join(names)}: {title}", shown) for (title, shown), names in alike.items()]
        found.append(("driver:", stacks.of_driver(threading.get_ident())))
        text = "\n".join([what, *(f"{title}\n{textwrap.indent(shown, '    ')}" for title, shown in found)])
        _in_time(_TELL_S, lambda: logger.error("%s", text))


def _watch(ref: weakref.ref[Watchdog], stopped: threading.Event) -> None:
    before = time.monotonic()
    while (watchdog := ref()) is not None and watchdog.limit_s is not None:
        pause = min(_LOOK_S, watchdog.limit_s / 10)
        del watchdog
        if stopped.wait(pause):
            return
        now = time.monotonic()
        if (watchdog := ref()) is not None:
            # A process that was stopped itself (Ctrl-Z) has not waited in that time.
            watchdog.look(min(now - before, 2 * pause))
            del watchdog
        before = now


def _phase(work: list[tuple[str, int]]) -> str:
    names = dict.fromkeys(name for name, _ in work)
    return f" in {' > '.join(names)}" if names else ""


def _is_debugged(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _in_time(limit_s: float, act: Callable[[], Any]) -> None:
    """Do something that may hang, and leave it alone if it does."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit_s)


# An exception for the main thread, and whether it has come there. A signal also ends the system call that it waits in.
_exception: Exception | None = None
_taken = threading.Event()


def _listen() -> None:
    """Have the signal raise, unless somebody else uses it. Only the main thread can do so."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_INTERRUPT) is signal.SIG_DFL:
        signal.signal(_INTERRUPT, _on_signal)


def _on_signal(number: int, frame: object) -> None:
    global _exception
    error, _exception = _exception, None
    if error is None:  # sent by somebody else: what it does without us
        signal.signal(_INTERRUPT, signal.SIG_DFL)
        os.kill(os.getpid(), _INTERRUPT)
        return
    _taken.set()
    raise error


def _raise_in_main(error: Exception) -> bool:
    """Raise in the main thread; False where it does not take it in time, or where no signal can be used."""
    global _exception
    ident = threading.main_thread().ident
    if signal.getsignal(_INTERRUPT) is not _on_signal or ident is None:
        return False
    _taken.clear()
    _exception = error
    signal.pthread_kill(ident, _INTERRUPT)
    if _taken.wait(_RAISE_S):
        return True
    _exception = None
    return False
