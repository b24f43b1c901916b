"""Settings of what the console shows of a run, and of where its metrics go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areno.config.schema.fields import Section, forbid, setting
from areno.config.schema.values import is_no_folder
from areno.config.tracking.services import MlflowConfig, SwanlabConfig, TrackioConfig, WandbConfig


@dataclass(kw_only=True)
class TensorBoardConfig(Section):
    """TensorBoard event files."""

    path: str | None = setting(
        None,
        help="Folder of the event files. In a sweep, each run has a subfolder. null: tensorboard/ in the run's folder",
        flag="--metrics-log-dir",
    )

    @forbid("path", "is {self.path!r}; the path of a folder is expected")
    def no_path(self) -> bool:
        return is_no_folder(self.path)


@dataclass(kw_only=True)
class StatsLoggerConfig(Section):
    """What the console shows, and where metrics go besides logs/metrics.jsonl."""

    console: Literal["auto", "live", "lines", "full", "quiet"] = setting(
        "auto",
        help="What stderr shows. live: a display that is kept up to date on a terminal. lines: one line for each step. "
        "full: all lines of logs/run.log. quiet: only warnings and errors. auto is live on a terminal, lines elsewhere",
    )
    tensorboard: TensorBoardConfig = setting(factory=TensorBoardConfig, help="TensorBoard")
    wandb: WandbConfig = setting(factory=WandbConfig, help="Weights & Biases")
    swanlab: SwanlabConfig = setting(factory=SwanlabConfig, help="SwanLab")
    trackio: TrackioConfig = setting(factory=TrackioConfig, help="Trackio")
    mlflow: MlflowConfig = setting(factory=MlflowConfig, help="MLflow")
