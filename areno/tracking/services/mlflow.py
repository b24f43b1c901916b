"""MLflow."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Mapping
from pathlib import Path

from areno.config.tracking import MlflowConfig
from areno.tracking.services.service import RunAbout, Service

_ALLOWED = {*string.ascii_letters, *string.digits, *"_-./ :"}
_MOST_PARAMS = 100  # of one request
_LONGEST = 6000  # characters of a parameter


class Mlflow(Service):
    """An experiment of MLflow is a project elsewhere. A step that comes again has its new values beside the old."""

    package = "mlflow"

    def __init__(self, config: MlflowConfig):
        self.config = config

    def start(self, about: RunAbout, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri(about))
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._id = run_id
            return run_id
        project = self.config.project or about.experiment
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        tags = {"sweep": about.group} if about.group else {}
        self._id = self._client.create_run(experiment, run_name=self.config.name or about.name, tags=tags).info.run_id
        params = [Param(name, str(value)[:_LONGEST]) for name, value in about.flat().items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])
        return self._id

    def _uri(self, about: RunAbout) -> str | None:
        given = self.config.tracking_uri
        if self.config.mode == "online" or (given is not None and "://" in given):
            return given
        # MLflow 3.7 wants to be told that files are meant.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        folder = about.fileroot / "mlruns" if given is None else Path(given).expanduser()
        return folder.absolute().as_uri()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(allowed(n), v, now, step) for n, v in scalars.items()])

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def allowed(name: str) -> str:
    """A name in the letters that MLflow takes: pass_at_4 for pass@4."""
    return "".join(letter if letter in _ALLOWED else "_" for letter in name.replace("@", "_at_"))
