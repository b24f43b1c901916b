"""Hydra's own launcher, which also waits for jobs that go on side by side. Hydra takes plugins only from here."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf


class ArenoLauncher(BasicLauncher):
    """A job returns its objective, or a Future of it and goes on. n_jobs: for those who start the jobs."""

    def __init__(self, n_jobs: Any):
        super().__init__()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert self.config is not None
        # Hydra's sweeper has written it; that of Optuna has not. A folder is that of a sweep by this file.
        described = Path(self.config.hydra.sweep.dir) / "multirun.yaml"
        if not described.exists():
            described.parent.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.config, described)
        found = super().launch(job_overrides, initial_job_idx)
        for one in found:
            if one.status == JobStatus.COMPLETED and isinstance(one.return_value, Future):
                future = one.return_value
                try:
                    one.return_value = future.result()
                except Exception as error:
                    one.status, one.return_value = JobStatus.FAILED, error
        return found
