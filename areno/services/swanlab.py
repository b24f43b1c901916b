"""The service that sends scalars to SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from areno.schema.fields import Section, setting
from areno.services.service import RunInfo, Service


@dataclass(kw_only=True)
class SwanlabConfig(Section):
    """Settings of SwanLab (pip install 'areno[swanlab]').

    The API key is read from the environment variable SWANLAB_API_KEY, or from the file that `swanlab login` writes.
    """

    mode: Literal["cloud", "local", "offline", "disabled"] = setting(
        "disabled",
        help="disabled: off. cloud: send to SwanLab. offline: write to logdir, for a later swanlab sync. local: "
        "write to logdir, for swanlab watch (pip install 'swanlab[dashboard]')",
    )
    project: str | None = setting(None, help="Name of the project. null: experiment_name")
    name: str | None = setting(None, help="Name of the run. null: that of its folder")
    logdir: str | None = setting(None, help="Folder of SwanLab's files. null: swanlab/ in the folder of the run")


class Swanlab(Service):
    """If a resumed run repeats a step, SwanLab keeps the earlier values of this step."""

    settings, title, package, install = SwanlabConfig, "SwanLab", "swanlab", "areno[swanlab]"
    config: SwanlabConfig
    _run: Any = None

    def start(self, run: RunInfo, run_id: str | None) -> str:
        import secrets
        import string

        swanlab: Any = import_module(self.package)  # where it is not installed, a type checker finds this file instead

        # The console belongs to the run, and nobody is there to type a key.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        run_id = run_id or "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(21))
        self._run = swanlab.init(
            mode="online" if self.config.mode == "cloud" else self.config.mode,
            project=self.config.project or run.experiment,
            name=self.config.name or run.name,
            group=run.group,
            id=run_id,
            resume="allow",
            config=dict(run.settings),
            settings=settings,
            log_dir=self.config.logdir or str(run.folder / "swanlab"),
        )
        return run_id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._run.finish()
