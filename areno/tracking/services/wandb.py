"""Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from areno.config.tracking import WandbConfig
from areno.tracking.services.service import RunAbout, Service


class Wandb(Service):
    """The steps are the scalar `step`, which is the axis of all charts: a step that comes again is drawn again."""

    package = "wandb"

    def __init__(self, config: WandbConfig):
        self.config = config
        self._run: Any = None

    def start(self, about: RunAbout, run_id: str | None) -> str:
        import wandb

        config = self.config
        if config.mode in ("online", "shared") and not wandb.login(prompt=False, host=config.wandb_base_url):
            raise RuntimeError("there is no key; set WANDB_API_KEY in the environment, or call wandb login")
        # Not what goes to the console: that is the run's own, and several runs may share a process.
        options: dict[str, Any] = {"console": "off", "silent": True}
        if config.wandb_base_url is not None:
            options["base_url"] = config.wandb_base_url
        self._run = wandb.init(
            mode=config.mode, dir=str(about.folder), id=run_id or secrets.token_hex(4), resume="allow",
            entity=config.entity, project=config.project or about.experiment, name=config.name or about.name,
            group=config.group or about.group, job_type=config.job_type, notes=config.notes, tags=config.tags,
            config=dict(about.settings), settings=wandb.Settings(**options), reinit="create_new",
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def finish(self) -> None:
        self._run.finish()
