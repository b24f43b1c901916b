"""Opens the trackers of a run. Services such as W&B work in a thread each.

So a slow service does not delay the run, and an error in a service does not end the run.
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

from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.config.run import StatsLoggerConfig
from areno.errors import ConfigError, Problem
from areno.files.durable import atomic_write_text
from areno.services import SERVICES
from areno.services.service import RunInfo, Service
from areno.tracking.console import Console
from areno.tracking.run_folder import RunFiles, is_sweep
from areno.tracking.samples import EvalSampleFiles, SampleFiles, SampleLog
from areno.tracking.scalar_files import Jsonl, TensorBoard
from areno.tracking.tracker import END_OF_STEP, Tracker, Trackers

logger = logging.getLogger("areno")

FILE = "trackers.json"  # in the run's folder, with the id that each service has given to the run
RESUMED = "run/resumed_after"
"""The scalar that marks where a run resumed. Its value is the last step that is kept of the earlier session."""
_END_S = 60.0  # how long the end of a run waits for scalars that are still being sent


def check_services(config: StatsLoggerConfig) -> None:
    """Raise ConfigError if a service is enabled whose package is not installed."""
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
    """Sends the scalars of a run to a service from a thread. The thread starts at the first complete step.

    An exception of the service is logged as a warning. After that the service receives nothing more. `name` is the
    section of the service in the settings, as in stats_logger.<name>.
    """

    def __init__(self, name: str, service: Service, run: RunInfo):
        self._name, self._service, self._run = name, service, run
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._step, self._scalars = 0, {}  # the step and its scalars so far

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Collect the finite scalars of a step, and queue them when the step is complete or another step begins."""
        if step != self._step:
            self._queue_step()
        self._step = step
        self._scalars |= {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        if END_OF_STEP in scalars:
            self._queue_step()

    def resume(self, step: int) -> None:
        """Drop the scalars of the incomplete step, and send the scalar RESUMED."""
        self._scalars = {}
        self.log(step, {RESUMED: step})
        self._queue_step()

    def finish(self) -> None:
        """Send the remaining scalars, and wait at most _END_S seconds until the service has received them."""
        self._queue_step()
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            text = "stats_logger.%s: is still sending after %.0f s; the run ends without waiting for it"
            logger.warning(text, self._name, _END_S)
        self._thread = None

    def _queue_step(self) -> None:
        scalars, self._scalars = self._scalars, {}
        if not scalars or self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_in_thread, name=f"areno-{self._name}", daemon=True)
            self._thread.start()
        step = self._step
        self._calls.put(lambda: self._service.log(step, scalars))

    def _run_in_thread(self) -> None:
        """Start the service, make the queued calls in order, and finish the service. This runs in the thread."""
        try:
            self._start()
            while call := self._calls.get():
                call()
            self._service.finish()
        except BaseException as error:  # a service may raise even SystemExit
            self._failed = True
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            logger.warning("stats_logger.%s: %s; the run goes on without it", self._name, text)

    def _start(self) -> None:
        """Start the service with its run id from trackers.json, if any. Store the id that the service returns there."""
        file = self._run.folder / FILE
        ids: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found = self._service.start(self._run, ids.get(self._name))
        if ids.get(self._name) != found:
            with _FILE_LOCK:
                ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
                atomic_write_text(file, json.dumps({**ids, self._name: found}, indent=2) + "\n")


_FILE_LOCK = threading.Lock()  # several services write their ids to one file


def open_trackers(
    config: ExperimentConfig,
    run_dir: Path,
    headline: Sequence[str] = (),
    total_steps: Callable[[], int] | None = None,
    display: Tracker | None = None,
    token_text: Callable[[int], str] = str,
    given: Sequence[Tracker] = (),
) -> Trackers:
    """Open the trackers of a run's settings, and return a tracker that passes each call to all of them.

    It passes calls also to `given`, the trackers of a script. `headline` names the scalars in the summary line of a
    step. `total_steps` returns the number of steps of the run as currently known. `token_text` returns the text for a
    token id.
    """
    files, run = RunFiles(run_dir, config.stats_logger.tensorboard.path), _run_info(config, run_dir)
    trackers: list[Tracker] = [
        Console(headline, total_steps),
        TensorBoard(files.events, files.event_suffix, run.flat()),
        Jsonl(run_dir / "logs" / "metrics.jsonl"),
    ]
    if isinstance(config, PolicyExperimentConfig):
        trackers += [SampleLog(), EvalSampleFiles(run_dir / "eval", token_text)]
        most = None if config.rollout.dump_to_file else config.rollout.dump_n_samples
        if most != 0:
            trackers.append(SampleFiles(run_dir / "rollouts", most, token_text))
    trackers += [ServiceTracker(name, service, run) for name, service in config.stats_logger.services().items()]
    trackers += given
    return Trackers(trackers if display is None else [*trackers, display])


def _run_info(config: ExperimentConfig, run_dir: Path) -> RunInfo:
    sweep = run_dir.parent.name if is_sweep(run_dir.parent) else None
    return RunInfo(
        folder=run_dir,
        experiment=config.experiment_name,
        name=f"{sweep}-{run_dir.name}" if sweep else run_dir.name,
        group=sweep,
        settings=asdict(config),
        fileroot=Path(config.cluster.fileroot).expanduser(),
    )
