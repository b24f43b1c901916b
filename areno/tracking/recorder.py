"""Opens the trackers of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from areno.config.experiments import ExperimentConfig, PolicyExperimentConfig
from areno.tracking.console import Console
from areno.tracking.files.run_files import RunFiles
from areno.tracking.files.samples import EvalFiles, SampleFiles, SampleLog
from areno.tracking.files.scalar_files import Jsonl, TensorBoard
from areno.tracking.new_run import is_sweep
from areno.tracking.services.service import RunAbout
from areno.tracking.services.tracker import ServiceTracker, services
from areno.tracking.tracker import Tracker, Trackers


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
    trackers += [ServiceTracker(name, service, about) for name, service in services(config.stats_logger).items()]
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
