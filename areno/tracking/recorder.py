"""The files that grow while a run goes on, and how to cut them back to an earlier step of it.

Gives a run's scalars to a service, from a thread: what a service does never delays the run and never ends it.

Opens the trackers of a run.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.config.tracking import StatsLoggerConfig
from areno.errors import ConfigError, Problem
from areno.files.durable import write_text_whole
from areno.services import SERVICES
from areno.services.service import RunAbout, Service
from areno.tracking.console import Console
from areno.tracking.run_folder import RunFiles, is_sweep
from areno.tracking.samples import EvalFiles, SampleFiles, SampleLog
from areno.tracking.scalar_files import Jsonl, TensorBoard
from areno.tracking.tracker import END_OF_STEP, Tracker, Trackers

logger = logging.getLogger("areno")

FILE = "trackers.json"
"""In the run's folder: the id of the run at each service."""
RESUMED = "run/resumed_after"
"""A scalar that marks where a run went on: the last step before."""
_END_S = 60.0  # what is left to send is waited for so long


def check_services(config: StatsLoggerConfig) -> None:
    """Raise ConfigError if the package of a service that is on is not installed."""
    missing = {name: service for name, service in config.services().items() if find_spec(service.package) is None}
    text = "needs the package {}: pip install '{}', or {}"
    problems = [
        Problem(f"stats_logger.{name}.mode", text, service.package, service.install, "set it to disabled")
        if name in SERVICES
        else Problem(f"stats_logger.{name}", text, service.package, service.install, "leave it out")
        for name, service in missing.items()
    ]
    if problems:
        raise ConfigError(problems)


class ServiceTracker(Tracker):
    """Follows a run for a service, which starts with the first scalars. What it raises is told once, and ends it."""

    def __init__(self, name: str, service: Service, about: RunAbout):
        self._name, self._service, self._about = name, service, about
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._step, self._scalars = 0, {}  # what has not been handed on yet

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step != self._step:
            self._hand_on()
        self._step = step
        self._scalars |= {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        if END_OF_STEP in scalars:
            self._hand_on()

    def resume(self, step: int) -> None:
        self._scalars = {}  # of a step that comes again
        self.log(step, {RESUMED: step})
        self._hand_on()

    def finish(self) -> None:
        self._hand_on()
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            text = "stats_logger.%s: is still sending after %.0f s; the run ends without waiting for it"
            logger.warning(text, self._name, _END_S)
        self._thread = None

    def _hand_on(self) -> None:
        scalars, self._scalars = self._scalars, {}
        if not scalars or self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"areno-{self._name}", daemon=True)
            self._thread.start()
        step = self._step
        self._calls.put(lambda: self._service.log(step, scalars))

    def _work(self) -> None:
        try:
            self._start()
            while call := self._calls.get():
                call()
            self._service.finish()
        except BaseException as error:  # a service may even raise SystemExit
            self._failed = True
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            logger.warning("stats_logger.%s: %s; the run goes on without it", self._name, text)

    def _start(self) -> None:
        file = self._about.folder / FILE
        ids: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found = self._service.start(self._about, ids.get(self._name))
        if ids.get(self._name) != found:
            with _FILE_LOCK:
                ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
                write_text_whole(file, json.dumps({**ids, self._name: found}, indent=2) + "\n")


_FILE_LOCK = threading.Lock()  # of the ids, which several services write


def open_trackers(
    config: ExperimentConfig,
    run_dir: Path,
    headline: Sequence[str] = (),
    total_steps: Callable[[], int] | None = None,
    display: Tracker | None = None,
    token_text: Callable[[int], str] = str,
) -> Trackers:
    """The trackers that a run asks for. Raises ArenoError, with the setting, if a folder cannot be written.

    headline: the scalars that the summary line of a step shows, if the step has them, such as "train/loss".
    total_steps: how many steps the run has, as far as is known. display: a tracker that shows what the others write.
    token_text: the text of a token id.
    """
    files, about = RunFiles(run_dir, config.stats_logger.tensorboard.path), _about(config, run_dir)
    trackers: list[Tracker] = [
        Console(headline, total_steps),
        TensorBoard(files.events, files.event_suffix, about.flat()),
        Jsonl(run_dir / "logs" / "metrics.jsonl"),
    ]
    if isinstance(config, PolicyExperimentConfig):
        trackers += [SampleLog(), EvalFiles(run_dir / "eval", token_text)]
        most = None if config.rollout.dump_to_file else config.rollout.dump_n_samples
        if most != 0:
            trackers.append(SampleFiles(run_dir / "rollouts", most, token_text))
    trackers += [ServiceTracker(name, service, about) for name, service in config.stats_logger.services().items()]
    return Trackers(trackers if display is None else [*trackers, display])


def _about(config: ExperimentConfig, run_dir: Path) -> RunAbout:
    sweep = run_dir.parent.name if is_sweep(run_dir.parent) else None
    return RunAbout(
        folder=run_dir,
        experiment=config.experiment_name,
        name=f"{sweep}-{run_dir.name}" if sweep else run_dir.name,
        group=sweep,
        settings=asdict(config),
        fileroot=Path(config.cluster.fileroot).expanduser(),
    )
