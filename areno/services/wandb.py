"""The service that sends scalars to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areno.schema.fields import Section, setting
from areno.services.service import RunInfo, Service


@dataclass(kw_only=True)
class WandbConfig(Section):
    """Settings of Weights & Biases (pip install 'areno[wandb]').

    The API key is read from the environment variable WANDB_API_KEY, or from the file that `wandb login` writes.
    """

    mode: Literal["online", "offline", "disabled", "shared"] = setting(
        "disabled",
        help="disabled: off. online: send to the server. offline: write to wandb/ in the folder of the run, for a "
        "later wandb sync. shared: as online, and other processes may write to the same wandb run (its id is in "
        "trackers.json)",
    )
    wandb_base_url: str | None = setting(None, help="Address of your own wandb server. null: wandb's default server")
    entity: str | None = setting(None, help="User or team that owns the wandb run. null: the default of the API key")
    project: str | None = setting(None, help="Name of the project. null: experiment_name")
    name: str | None = setting(None, help="Name of the run. null: that of its folder")
    job_type: str | None = setting(None, help="Job type of the wandb run, by which wandb can group runs. null: none")
    group: str | None = setting(None, help="Group of the wandb run. null: the name of the sweep, if any")
    notes: str | None = setting(None, help="Description of the wandb run. null: none")
    tags: list[str] | None = setting(None, help="Tags of the wandb run. null: none")


class Wandb(Service):
    """The horizontal axis of all charts is the scalar `step`.

    If a resumed run repeats a step, its later values are drawn in addition to the earlier ones.
    """

    settings, title, package, install = WandbConfig, "Weights & Biases", "wandb", "areno[wandb]"
    config: WandbConfig
    _run: Any = None

    def start(self, run: RunInfo, run_id: str | None) -> str:
        import secrets

        import wandb

        config = self.config
        if config.mode in ("online", "shared") and not wandb.login(prompt=False, host=config.wandb_base_url):
            raise RuntimeError("there is no key; set WANDB_API_KEY in the environment, or call wandb login")
        # The console belongs to the run. wandb must not capture it, since several runs may share a process.
        options: dict[str, Any] = {"console": "off", "silent": True}
        if config.wandb_base_url is not None:
            options["base_url"] = config.wandb_base_url
        self._run = wandb.init(
            mode=config.mode,
            dir=str(run.folder),
            id=run_id or secrets.token_hex(4),
            resume="allow",
            entity=config.entity,
            project=config.project or run.experiment,
            name=config.name or run.name,
            group=config.group or run.group,
            job_type=config.job_type,
            notes=config.notes,
            tags=config.tags,
            config=dict(run.settings),
            settings=wandb.Settings(**options),
            reinit="create_new",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def finish(self) -> None:
        self._run.finish()
