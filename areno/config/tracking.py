"""Settings of the services that follow a run. Their keys are taken from the environment, and are no settings.

Settings of what the console shows of a run, and of where its metrics go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.errors import Problem
from areno.schema.fields import Section, check, forbid, setting
from areno.schema.values import is_no_folder

_PROJECT = "Name of the project. null: experiment_name"
_NAME = "Name of the run. null: that of its folder"


@dataclass(kw_only=True)
class WandbConfig(Section):
    """Weights & Biases (pip install 'areno[wandb]'). Its key is WANDB_API_KEY in the environment, or of wandb login."""

    mode: Literal["online", "offline", "disabled", "shared"] = setting(
        "disabled",
        help="online sends the scalars. offline writes them to wandb/ in the run's folder, for wandb sync. shared is "
        "online, and other processes may write to the same run meanwhile (its id is in trackers.json)",
    )
    wandb_base_url: str | None = setting(None, help="Address of a server of your own. null: that of wandb")
    entity: str | None = setting(None, help="User or team that the run belongs to. null: that of the key")
    project: str | None = setting(None, help=_PROJECT)
    name: str | None = setting(None, help=_NAME)
    job_type: str | None = setting(None, help="Kind of run, to sort by")
    group: str | None = setting(None, help="Group of runs that it is shown with. null: its sweep, if it is part of one")
    notes: str | None = setting(None, help="A longer description")
    tags: list[str] | None = setting(None, help="Words to filter by")


@dataclass(kw_only=True)
class TrackioConfig(Section):
    """Trackio of Hugging Face (pip install 'areno[trackio]')."""

    mode: Literal["disabled", "local", "online"] = setting(
        "disabled",
        help="local keeps the scalars on this machine, for trackio show; online also sends them to a Space",
    )
    project: str | None = setting(None, help=_PROJECT)
    name: str | None = setting(None, help=_NAME)
    space_id: str | None = setting(None, help="Space of the Hugging Face hub (owner/name) that mode=online sends to")

    @check
    def space_of_the_mode(self) -> Iterator[Problem]:
        if self.mode == "online" and self.space_id is None:
            yield Problem("space_id", "is null, but mode is online; name the Space that gets the scalars")
        if self.mode == "local" and self.space_id is not None:
            yield Problem("space_id", f"is {self.space_id}, but mode=local sends nothing; set mode=online")


@dataclass(kw_only=True)
class SwanlabConfig(Section):
    """SwanLab (pip install 'areno[swanlab]'). Its key is SWANLAB_API_KEY in the environment, or of swanlab login."""

    mode: Literal["cloud", "local", "offline", "disabled"] = setting(
        "disabled",
        help="cloud sends the scalars. offline writes them to logdir, for swanlab sync. local writes them to logdir, "
        "for swanlab watch (pip install 'swanlab[dashboard]')",
    )
    project: str | None = setting(None, help=_PROJECT)
    name: str | None = setting(None, help=_NAME)
    logdir: str | None = setting(None, help="Folder of its files. null: swanlab/ in the run's folder")


@dataclass(kw_only=True)
class MlflowConfig(Section):
    """MLflow (pip install 'areno[mlflow]')."""

    mode: Literal["disabled", "local", "online"] = setting(
        "disabled", help="local writes to a folder or a database, for mlflow ui. online sends to a server"
    )
    tracking_uri: str | None = setting(
        None,
        help="local: the folder, or sqlite:///file.db, which needs the whole package mlflow; null is mlruns/ in "
        "cluster.fileroot. online: address of the server; null is MLFLOW_TRACKING_URI in the environment",
    )
    project: str | None = setting(None, help="Name of the experiment. null: experiment_name")
    name: str | None = setting(None, help=_NAME)

    @forbid("tracking_uri", "is {self.tracking_uri}, but mode is local; set mode=online for a server")
    def server_of_local(self) -> bool:
        return self.mode == "local" and (self.tracking_uri or "").startswith("http")


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
