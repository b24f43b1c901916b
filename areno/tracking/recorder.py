"""Opens trackers: those of a run (`open_trackers`) and those of a script that writes its own scalars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.tracking.console import Console
from areno.tracking.jsonl import Jsonl
from areno.tracking.samples import SampleFiles, SampleLog
from areno.tracking.tensorboard import TensorBoard
from areno.tracking.tracker import Tracker, Trackers


def open_trackers(config: ExperimentConfig, run_dir: Path, headline: Sequence[str] = ()) -> Trackers:
    """The trackers that the configuration of a run asks for.

    headline: the scalars that the summary line of a step shows, if the step has them, such as "train/loss".
    Raises ArenoError, with the setting, if a folder cannot be written.
    """
    trackers: list[Tracker] = [
        Console(headline, config.total_train_steps),
        TensorBoard(config.stats_logger.tensorboard.path or run_dir / "tensorboard"),
        Jsonl(run_dir / "logs" / "metrics.jsonl"),
    ]
    if isinstance(config, PolicyExperimentConfig):
        trackers.append(SampleLog())
        if config.rollout.dump_to_file:
            trackers.append(SampleFiles(run_dir / "rollouts"))
    return Trackers(trackers)


class MetricsRecorder:
    """Writes scalars. path: folder of TensorBoard event files. jsonl: file with one line for each call. None: neither.

    The files appear with the first scalars. ArenoError, with the setting, if they cannot be written.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        self._trackers: list[Tracker] = [] if path is None else [TensorBoard(path)]
        if jsonl is not None:
            self._trackers.append(Jsonl(jsonl))

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step, named <namespace>/<name>. They are on the disk when this returns."""
        Trackers(self._trackers).log(step, scalars)

    def close(self) -> None:
        """Close the files. What is recorded after this is not written. A second call does nothing."""
        trackers, self._trackers = self._trackers, []
        Trackers(trackers).finish()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
