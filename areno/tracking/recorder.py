"""Opens trackers: those of a run (`open_trackers`) and those of a script that writes its own scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.tracking.console import Console
from areno.tracking.run_files import RunFiles
from areno.tracking.samples import EvalFiles, SampleFiles, SampleLog
from areno.tracking.scalar_files import Jsonl, TensorBoard
from areno.tracking.tracker import Tracker, Trackers


def open_trackers(
    config: ExperimentConfig, run_dir: Path, headline: Sequence[str] = (), total_steps: Callable[[], int] | None = None
) -> Trackers:
    """The trackers that a run asks for. Raises ArenoError, with the setting, if a folder cannot be written.

    headline: the scalars that the summary line of a step shows, if the step has them, such as "train/loss".
    total_steps: how many steps the run has, as far as is known.
    """
    files = RunFiles(run_dir, config.stats_logger.tensorboard.path)
    trackers: list[Tracker] = [
        Console(headline, total_steps),
        TensorBoard(files.events, files.event_suffix),
        Jsonl(run_dir / "logs" / "metrics.jsonl"),
    ]
    if isinstance(config, PolicyExperimentConfig):
        trackers += [SampleLog(), EvalFiles(run_dir / "eval")]
        if config.rollout.dump_to_file:
            trackers.append(SampleFiles(run_dir / "rollouts"))
    return Trackers(trackers)


class MetricsRecorder(Trackers):
    """Writes scalars. path: folder of TensorBoard event files. jsonl: file with one line for each call. None: neither.

    The files appear with the first scalars. ArenoError, with the setting, if they cannot be written.
    """

    def __init__(self, path: str | Path | None = None, jsonl: str | Path | None = None):
        files: list[Tracker] = [] if path is None else [TensorBoard(path)]
        super().__init__(files if jsonl is None else [*files, Jsonl(jsonl)])

    record, close = Trackers.log, Trackers.finish

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
