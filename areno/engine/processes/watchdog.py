"""Detects workers and drivers that hang.

Each worker counts its progress in memory that it shares with the driver (Heartbeat). This costs neither a message nor a
system call. Counters on another machine are copied to the driver about once a second. A thread of the driver reads the
counters (WorkerHeartbeats, Watchdog).

A rank hangs if it has work and its counters have not changed for `engine.stall_timeout_s`. Then the stack traces of all
processes are logged, the workers are killed, and calls that wait for them raise WorkerLost. If the driver hangs in its
own work, an exception is raised in its main thread. If the main thread does not react, the process ends.
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
from areno.config.layout import Layout
from areno.engine.processes import stack_traces
from areno.errors import EngineError, Key, WorkerLost

logger = logging.getLogger("areno")

_CHECK_EVERY_S = 1.0
_RAISE_S = 5.0  # for the main thread to react to an exception
_LOG_TIMEOUT_S = 10.0  # for writing the log, whose disk or pipe may hang, too
_LOCKED_S = 2.0  # after which faulthandler shows the stacks if this thread cannot
_INTERRUPT = signal.SIGUSR2
_DEBUGGERS = {"pdb", "bdb", "code", "IPython", "_pydevd_bundle"}  # debuggers wait for a person
_KEY = Key("engine.stall_timeout_s")
# Counters of a rank: heartbeats, finished commands, and whether there are requests to decode.
_BEATS, _DONE, _DECODES = range(3)
FIELDS = 3


class WorkerHeartbeats:
    """The driver's view of the progress counters of all workers, and the number of commands sent to each.

    `together` is True while all ranks execute a command and the driver waits for it. Ranks may then wait for each other
    in collectives, so if one rank makes progress, none of them hangs.
    """

    def __init__(self, counters: Any, layout: Layout):
        self.counters = counters
        self.world_size, self._layout = layout.world_size, layout
        self._sent = [1] * layout.world_size  # number of commands sent to each rank, including the start
        self._commands = ["start"] * layout.world_size  # name of the last command sent to each rank
        self.together = True

    def record_command(self, leader: int, command: str) -> None:
        for rank in self._layout.replica_ranks(leader):
            self._sent[rank] += 1
            self._commands[rank] = command

    def is_due(self, rank: int) -> bool:
        """Return whether a rank should make progress now, because of a command or requests to decode."""
        leader = self._layout.replica_ranks(rank).start  # other ranks have no requests: they wait for the leader
        return self._has_open_command(rank) or bool(self.counters[FIELDS * leader + _DECODES])

    def _has_open_command(self, rank: int) -> bool:
        return self.counters[FIELDS * rank + _DONE] < self._sent[rank]

    def progress_counters(self, rank: int) -> list[int]:
        """Return the counters of a rank. Any progress changes at least one of the FIELDS integers."""
        return self.counters[FIELDS * rank : FIELDS * (rank + 1)]

    def current_command(self, rank: int) -> str:
        """Return the name of the method that a rank executes, or "decoding"."""
        return self._commands[rank] if self._has_open_command(rank) else "decoding"


class Heartbeat:
    """The worker's view of its own progress counters. `areno.heartbeat.beat()` increments one of them."""

    def __init__(self, counters: Any, rank: int):
        self._counters, self._at = counters, FIELDS * rank
        heartbeat.count_in(counters, self._at + _BEATS)

    def finish_command(self, decodes: bool) -> None:
        self.set_decoding(decodes)
        self._counters[self._at + _DONE] += 1

    def set_decoding(self, decodes: bool) -> None:
        """Record whether this worker must make progress by decoding. It need not while it waits for the driver."""
        self._counters[self._at + _DECODES] = decodes


class WatchedGroup(Protocol):
    """The interface that the watchdog needs. `command` is the method that a worker in this process executes, if any."""

    command: str

    @property
    def heartbeats(self) -> WorkerHeartbeats | None:
        """Progress counters of the worker processes. None for a group without worker processes."""
        ...

    def stack_traces(self) -> dict[int, tuple[str, str]]: ...

    def worker_name(self, rank: int) -> str: ...

    def mark_lost(self, error: WorkerLost) -> None:
        """Kill the worker processes, and raise `error` in pending and later calls of the group."""
        ...


class Watchdog:
    """A thread that watches the progress of a group of workers and of the driver, unless `limit_s` is None."""

    def __init__(self, limit_s: float | None, group: WatchedGroup):
        self.limit_s, self._group = limit_s, group
        self._stopped = threading.Event()
        self._quiet: dict[int, float] = {}  # seconds without progress, by rank
        self._seen: dict[int, list[int]] = {}
        self._driver_quiet, self._driver_seen = 0.0, -1
        self._interrupted_at = -1
        self._lost = False
        if limit_s is not None:
            _install_handler()
            # The thread does not keep a group alive that was dropped without being closed.
            args = (weakref.ref(self), self._stopped)
            threading.Thread(target=_check_periodically, args=args, daemon=True, name="areno-watchdog").start()

    def stop(self) -> None:
        self._stopped.set()

    def check(self, elapsed: float) -> None:
        """Check the counters `elapsed` seconds after the last check, and end workers or the driver if they hang."""
        assert self.limit_s is not None
        due, work = self._ranks_due(elapsed), heartbeat.work()
        if work:
            # If C code keeps the interpreter's lock, this thread hangs as well. faulthandler still shows stacks.
            faulthandler.dump_traceback_later(self.limit_s + _LOCKED_S, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()
        if due:
            self._driver_quiet = 0.0
            quiet = [self._quiet[rank] for rank in due]
            assert self._group.heartbeats is not None
            # Ranks that execute one command may wait for each other. Then progress of a single rank is enough.
            if (min if self._group.heartbeats.together else max)(quiet) >= self.limit_s:
                self._kill_workers(due)
            return
        beats = heartbeat.count()
        if beats != self._driver_seen or not work or _is_debugged(work[-1][1]):
            self._driver_seen, self._driver_quiet = beats, 0.0
            return
        self._driver_quiet += elapsed
        if self._driver_quiet >= self.limit_s:
            self._driver_quiet = 0.0
            self._end_driver(work)

    def _ranks_due(self, elapsed: float) -> list[int]:
        """Return the ranks that should make progress now. Also counts the time since the last progress of each rank."""
        heartbeats, due = self._group.heartbeats, []
        if heartbeats is None or self._lost:
            return due
        for rank in range(heartbeats.world_size):
            progress = heartbeats.progress_counters(rank)
            if not heartbeats.is_due(rank) or progress != self._seen.get(rank):
                self._quiet[rank] = 0.0
            else:
                self._quiet[rank] += elapsed
            self._seen[rank] = progress
            if heartbeats.is_due(rank):
                due.append(rank)
        return due

    def _kill_workers(self, due: list[int]) -> None:
        """Log the stacks of all processes, kill the workers, and raise WorkerLost in the driver's calls.

        The error names the ranks to blame: those whose processes are stopped or wait for a disk, or else those that do
        not wait for other ranks.
        """
        assert self._group.heartbeats is not None
        traces, name = self._group.stack_traces(), self._group.worker_name
        # A rank that waits in a collective is not to blame, unless all ranks do.
        guilty = [rank for rank in due if not stack_traces.waits_for_other_ranks(traces[rank][1])] or due
        stopped = [rank for rank in guilty if traces[rank][0]]
        first = (stopped or guilty)[0]
        command, seconds = self._group.heartbeats.current_command(first), self._quiet[first]
        who = ", ".join(name(rank) for rank in stopped or guilty)
        how = f", since it {traces[first][0]}," if stopped else ""
        text = "{} made no progress for {:.0f} s in {}{} and was ended; raise {} ({:g}) if this can take longer"
        error = WorkerLost(text, who, seconds, command, how, _KEY, self.limit_s)
        what = f"{who} made no progress for {seconds:.0f} s, command {command}{_phase_text(heartbeat.work())}"
        notes = dict.fromkeys(traces, "has nothing to do")
        notes |= {rank: f"no progress for {self._quiet[rank]:.0f} s" for rank in due}
        self._log_stack_traces(what, traces, notes)
        self._lost = True
        self._group.mark_lost(error)

    def _end_driver(self, work: list[tuple[str, int]]) -> None:
        """Raise an exception in the main thread of the driver, which hangs in the nested phases `work`.

        If the main thread does not react, the process ends. Does nothing if the driver makes progress while its stacks
        are logged.
        """
        group, beats = self._group, heartbeat.count()
        kind = WorkerLost if group.heartbeats is None and group.command else EngineError
        what = f"worker 0, which lives in the driver ({group.command})," if kind is WorkerLost else "the driver"
        text = "{} made no progress for {:g} s{}; raise {} if this can take longer"
        error = kind(text, what, self.limit_s, _phase_text(work), _KEY)
        traces = {} if self._lost else group.stack_traces()
        self._log_stack_traces(f"{what} made no progress for {self.limit_s:g} s{_phase_text(work)}", traces, {})
        is_main = work[-1][1] == threading.main_thread().ident
        if heartbeat.count() != beats:
            return  # the driver has made progress since
        if is_main and beats != self._interrupted_at and _raise_in_main(error):
            self._interrupted_at = beats  # if the exception is caught without progress, the driver hangs again
            return
        group.mark_lost(WorkerLost("the driver hangs, and ends"))
        _call_with_limit(
            _LOG_TIMEOUT_S, lambda: print(f"error: {error}; the process ends", file=sys.stderr, flush=True)
        )
        _call_with_limit(_LOG_TIMEOUT_S, logging.shutdown)
        os._exit(1)

    def _log_stack_traces(self, what: str, traces: dict[int, tuple[str, str]], notes: Mapping[int, str]) -> None:
        faulthandler.cancel_dump_traceback_later()
        alike: dict[tuple[str, ...], list[str]] = {}  # many ranks hang at the same line
        for rank, (state, shown) in traces.items():
            title = "; ".join(word for word in (notes.get(rank), state and f"it {state}") if word)
            alike.setdefault((title, shown), []).append(self._group.worker_name(rank))
        found = [(f"{', '.join(names)}: {title}", shown) for (title, shown), names in alike.items()]
        found.append(("driver:", stack_traces.driver_stack_traces(threading.get_ident())))
        text = "\n".join([what, *(f"{title}\n{textwrap.indent(shown, '    ')}" for title, shown in found)])
        _call_with_limit(_LOG_TIMEOUT_S, lambda: logger.error("%s", text))


def _check_periodically(ref: weakref.ref[Watchdog], stopped: threading.Event) -> None:
    """Call `check` at least once a second, until the watchdog is stopped or garbage-collected."""
    before = time.monotonic()
    try:
        while (watchdog := ref()) is not None and watchdog.limit_s is not None:
            pause = min(_CHECK_EVERY_S, watchdog.limit_s / 10)
            del watchdog
            if stopped.wait(pause):
                return
            now = time.monotonic()
            if (watchdog := ref()) is not None:
                # If this process was stopped (Ctrl-Z), that time does not count.
                watchdog.check(min(now - before, 2 * pause))
                del watchdog
            before = now
    finally:
        faulthandler.cancel_dump_traceback_later()


def _phase_text(work: list[tuple[str, int]]) -> str:
    names = dict.fromkeys(name for name, _ in work)
    return f" in {' > '.join(names)}" if names else ""


def _is_debugged(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _call_with_limit(limit_s: float, act: Callable[[], Any]) -> None:
    """Call a function that may hang, in a thread, and stop waiting for it after `limit_s` seconds."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit_s)


# An exception for the main thread, and whether it was raised there. A signal also interrupts a pending system call.
_exception: Exception | None = None
_taken = threading.Event()


def _install_handler() -> None:
    """Install `_on_signal`, unless the process has another handler or this is not the main thread."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_INTERRUPT) is signal.SIG_DFL:
        signal.signal(_INTERRUPT, _on_signal)


def _on_signal(number: int, frame: object) -> None:
    global _exception
    error, _exception = _exception, None
    if error is None:  # the signal comes from another program: apply its default action
        signal.signal(_INTERRUPT, signal.SIG_DFL)
        os.kill(os.getpid(), _INTERRUPT)
        return
    _taken.set()
    raise error


def _raise_in_main(error: Exception) -> bool:
    """Raise an exception in the main thread by a signal, and return whether it was raised within seconds."""
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
