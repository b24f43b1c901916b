"""Processes for runs of a sweep at the same time, and the display of their output.

`ParallelJobs` gives each run a process of its own, with a share of the devices and threads. On a terminal,
`JobOutputDisplay` shows one line for each run and updates it. Without a terminal, `JobOutputDisplay` prints all lines
of the runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from types import TracebackType
from typing import Any

from areno.config.run import EngineConfig
from areno.errors import ConfigError, Problem
from areno.files.interrupts import Terminated, raise_terminated
from areno.launch.compose import N_JOBS
from areno.tracking.display.screen import Line, Screen

_TIME = len("hh:mm:ss ")
_STEP = "step="


class JobOutputDisplay:
    """Displays the output of several runs: if `live`, the latest line of each run, otherwise all lines."""

    def __init__(self, live: bool, objective: str):
        self._objective = objective
        self._last_lines: dict[int, str] = {}  # the last line of each run
        self._latest: dict[int, str] = {}  # the latest line of each run in progress
        self._names: dict[int, str] = {}
        self._n_ended = 0
        self._screen = Screen(sys.stderr, self._lines, self._print_plainly) if live else None

    def __enter__(self) -> JobOutputDisplay:
        if self._screen is not None:
            self._screen.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._screen is not None:
            self._screen.close()

    def begin(self, number: int, overrides: Sequence[str]) -> None:
        self._names[number], self._latest[number] = f"[{number}] {' '.join(overrides)}", "starts"
        self._print(self._names[number])

    def show_line(self, number: int, line: str) -> None:
        is_of_log = line[:_TIME:3].isdigit() and line[2:_TIME:3] == ":: "
        if self._screen is None or not is_of_log or line.startswith(("warning", "error"), _TIME):
            self._print(f"[{number}] {line}" if line else "")
            self._last_lines[number] = line
        elif line.startswith(_STEP, _TIME) or not self._latest[number].startswith(_STEP):
            self._latest[number] = line[_TIME:]

    def end(self, number: int, objective: float | None, reason: str) -> None:
        self._n_ended += 1
        self._latest.pop(number, None)
        result = "failed" if objective is None else f"{self._objective}: {objective:.6g}"
        if reason and not self._last_lines.get(number, "").endswith(reason):
            result += f": {reason}"
        self._print(f"[{number}] {result}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # above the lines of the screen, if there is one

    def _lines(self, width: int, height: int) -> list[Line]:
        latest = sorted(dict(self._latest).items())  # other threads change it
        shown = latest[: height - 2]
        more = f", {len(latest) - len(shown)} of them not shown" if len(shown) < len(latest) else ""
        lines: list[Line] = [[(f"{self._n_ended} runs done, {len(latest)} going on{more}"[: width - 1], "bold")]]
        for number, text in shown:
            name = self._names[number][: (width - 1) // 2]
            lines.append([(name, "cyan"), (f"  {text}"[: width - 1 - len(name)], "")])
        return lines

    def _print_plainly(self, error: Exception) -> None:
        """Print all lines from now on, because the live display failed."""
        self._screen = None
        print(f"the live display failed, and lines follow: {type(error).__name__}: {error}", file=sys.stderr)


_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
_MAX_LINE_BYTES = 65536

Work = Callable[[], tuple[float | None, str]]
"""A function that does one run. It returns the objective, or None and the reason of the failure."""


class JobFailed(Exception):
    """Raised if one run of a sweep fails. Hydra's launcher then continues with the next run."""


def job_env_vars(n_jobs: int, engine: EngineConfig) -> list[dict[str, str]]:
    """Return {OMP_NUM_THREADS and, on GPUs, CUDA_VISIBLE_DEVICES} for each of `n_jobs` simultaneous runs."""
    import torch

    n_devices = torch.cuda.device_count() if engine.device != "cpu" else 0
    environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // n_jobs))}
    if not n_devices:
        return [environment] * n_jobs
    each = engine.world_size or max(1, n_devices // n_jobs)
    if n_jobs * each > n_devices:
        devices = "1 device" if each == 1 else f"{each} devices"
        raise ConfigError(Problem(N_JOBS, f"is {n_jobs}, with {devices} for each run; there are {n_devices}"))
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(n_devices)))
    visible = [name.strip() for name in names.split(",")]
    return [
        environment | {"CUDA_VISIBLE_DEVICES": ",".join(visible[each * job : each * (job + 1)])}
        for job in range(n_jobs)
    ]


@dataclass
class _RunningJob:
    process: Any
    share: dict[str, str]
    future: Future[float]
    done: threading.Event


class ParallelJobs:
    """Starts runs in separate processes, at most `len(shares)` at a time. Leaving the context waits for all runs.

    `on_line` is called with (number of the run, line) for each line that a run writes, from any thread.
    """

    def __init__(self, shares: list[dict[str, str]], on_line: Callable[[int, str], None]):
        self._on_line = on_line
        self._free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for share in shares:
            self._free.put(share)
        self._running: list[_RunningJob] = []
        self._context = multiprocessing.get_context("spawn")
        self._lock = threading.Lock()  # of `ended`
        self._is_stopping = False

    def start(self, number: int, work: Work, began: Callable[[], None], ended: Callable[..., None]) -> Future[float]:
        """Wait until a share of devices and threads is free, then start the picklable `work` in a new process.

        `began` is called after the wait. `ended` is called with (objective or None, reason of a failure) when the run
        ends, from any thread, but not from two threads at once. The Future raises JobFailed if the run fails.
        """
        share = self._free.get()
        began()
        output, theirs_out = self._context.Pipe(duplex=False)
        result, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_process_main, args=(theirs_out, theirs, work), name=f"areno-run-{number}"
        )
        running = _RunningJob(process, share, Future(), threading.Event())
        args = (running, number, output, result, ended)
        follower = threading.Thread(target=self._follow_run, args=args, daemon=True, name=f"areno-follow-{number}")
        with _environment_set(share), _signals_blocked():  # a signal comes before or after all of it
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self._free.put(share)  # so that the next runs fail with the same error and do not wait
                text = "is more than 1, but the run cannot be given to another process: {}"
                raise ConfigError(Problem(N_JOBS, text, error)) from error
            self._running.append(running)
            follower.start()
        theirs_out.close()
        theirs.close()
        return running.future

    def _follow_run(
        self, running: _RunningJob, number: int, output: Any, result: Any, ended: Callable[..., None]
    ) -> None:
        """Pass on the output of a run until the run ends. Then set its Future, and free its devices and threads."""
        try:
            found: float | Exception = self._relay_lines(running.process, number, output, result, ended)
        except Exception as error:
            found = error
        output.close()
        result.close()
        if isinstance(found, Exception):
            running.future.set_exception(found)
        else:
            running.future.set_result(found)
        self._running.remove(running)
        self._free.put(running.share)
        running.done.set()

    def _relay_lines(self, process: Any, number: int, output: Any, result: Any, ended: Callable[..., None]) -> float:
        error: Exception | None = None
        for line in _output_lines(output, process.sentinel):
            try:
                if error is None:
                    self._on_line(number, line)
            except Exception as first:  # the run continues, and would block if nobody read its output
                error = first
        process.join()
        objective, reason = None, _describe_exit(process.exitcode)
        with contextlib.suppress(EOFError, OSError):
            if result.poll():
                objective, reason = result.recv()
        if objective is not None or not self._is_stopping:
            with self._lock:
                ended(objective, reason)
        if error is not None:
            raise error
        if objective is None:
            raise JobFailed(reason)
        return objective

    def __enter__(self) -> ParallelJobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the runs in progress. After Ctrl-C or SIGTERM, pass the signal on to the runs first."""
        if isinstance(error, KeyboardInterrupt):
            self._stop(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
        for running in list(self._running):
            running.done.wait()

    def _stop(self, first: int) -> None:
        """Send the signal `first` to all runs, and wait for their end.

        If Ctrl-C interrupts the wait, the signal is sent again. If the second wait is interrupted too, SIGKILL is sent.
        """
        self._is_stopping = True
        for number in (first, first, signal.SIGKILL):
            for running in list(self._running):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.process.pid, number)
            with contextlib.suppress(KeyboardInterrupt):
                for running in list(self._running):
                    running.done.wait()
                return


def _process_main(output: Any, result: Any, work: Work) -> None:
    os.setsid()  # Ctrl-C goes to the driver alone, which passes it on
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_terminate_after, args=(parent,), daemon=True, name="areno-parent-watch").start()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, raise_terminated)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        result.send(work())
    except KeyboardInterrupt as interrupt:
        sys.exit(143 if isinstance(interrupt, Terminated) else 130)


def _terminate_after(parent: Any) -> None:
    """Wait until the parent process has ended. Then send SIGTERM to this process, so that it saves its state."""
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _output_lines(output: Any, sentinel: Any) -> Iterator[str]:
    rest = b""
    # What the run has started may hold its output open when it has ended.
    while output in connection.wait([output, sentinel]) and (chunk := os.read(output.fileno(), _MAX_LINE_BYTES)):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _describe_exit(exitcode: int | None) -> str:
    if exitcode == -signal.SIGKILL:
        return "was killed by SIGKILL, perhaps by the kernel for lack of memory"
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return {130: "was interrupted", 143: "was terminated"}.get(exitcode or 0, f"ended with exit code {exitcode}")


@contextlib.contextmanager
def _environment_set(share: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in share}
    os.environ.update(share)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals within a `with` block. A process that starts in the block later unblocks its own signals."""
    resource_tracker.ensure_running()  # otherwise it starts with the first process, and unblocks some signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
