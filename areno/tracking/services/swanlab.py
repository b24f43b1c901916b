"""SwanLab."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from areno.config.tracking import SwanlabConfig
from areno.tracking.services.service import RunAbout, Service

_LETTERS = string.ascii_lowercase + string.digits


class Swanlab(Service):
    """Of a step that comes again, SwanLab keeps the first values."""

    package = "swanlab"

    def __init__(self, config: SwanlabConfig):
        self.config = config
        self._run: Any = None

    def start(self, about: RunAbout, run_id: str | None) -> str:
        swanlab: Any = import_module(self.package)  # not installed, it would be this file to a type checker

        # The console is the run's own, and nobody can be asked for a key.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        run_id = run_id or "".join(secrets.choice(_LETTERS) for _ in range(21))
        self._run = swanlab.init(
            mode="online" if self.config.mode == "cloud" else self.config.mode,
            project=self.config.project or about.experiment, name=self.config.name or about.name, group=about.group,
            id=run_id, resume="allow", config=dict(about.settings),
            settings=settings, log_dir=self.config.logdir or str(about.folder / "swanlab"),
        )  # fmt: skip
        return run_id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._run.finish()
