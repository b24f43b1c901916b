"""The service that sends scalars to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.schema.fields import Section, require, setting
from areno.services.service import RunInfo, Service

_PUNCTUATION = "_-./ :"
_MAX_PARAMS = 100  # of one request
_LONGEST = 6000  # characters of a parameter


@dataclass(kw_only=True)
class MlflowConfig(Section):
    """Settings of MLflow (pip install 'areno[mlflow]')."""

    mode: Literal["disabled", "local", "online"] = setting(
        "disabled",
        help="disabled: off. local: write to a folder or database, for the command mlflow ui. online: send to a "
        "tracking server",
    )
    tracking_uri: str | None = setting(
        None,
        help="local: a folder, or sqlite:///file.db, which needs the full mlflow package. online: address of the "
        "server. null: mlruns/ in cluster.fileroot, or MLFLOW_TRACKING_URI",
    )
    project: str | None = setting(None, help="Name of the MLflow experiment. null: experiment_name")
    name: str | None = setting(None, help="Name of the run. null: that of its folder")

    @require("tracking_uri", "is {self.tracking_uri}, but mode is local; set mode=online for a server")
    def local_mode_has_no_server(self) -> bool:
        return self.mode != "local" or not (self.tracking_uri or "").startswith("http")


class Mlflow(Service):
    """If a resumed run repeats a step, MLflow keeps the earlier and the later values of this step."""

    settings, title, package, install = MlflowConfig, "MLflow", "mlflow", "areno[mlflow]"
    config: MlflowConfig
    _client: Any = None
    _id = ""

    def start(self, run: RunInfo, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri(run))
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        project = self.config.project or run.experiment
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        tags = {"sweep": run.group} if run.group else {}
        self._id = self._client.create_run(experiment, run_name=self.config.name or run.name, tags=tags).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.flat().items()]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS])
        return self._id

    def _uri(self, run: RunInfo) -> str | None:
        """Return the tracking URI. None lets MLflow read MLFLOW_TRACKING_URI, or use its own default."""
        given = self.config.tracking_uri
        if self.config.mode == "online" or (given is not None and "://" in given):
            return given
        # MLflow 3.7 writes to a folder only with this variable.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        folder = run.fileroot / "mlruns" if given is None else Path(given).expanduser()
        return folder.absolute().as_uri()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, metrics=[Metric(allowed_metric_name(n), v, now, step) for n, v in scalars.items()]
        )

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def allowed_metric_name(name: str) -> str:
    """Replace the characters of a scalar's name that MLflow refuses. For example, pass@4 becomes pass_at_4."""
    plain = name.replace("@", "_at_")
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in _PUNCTUATION) else "_" for letter in plain
    )
