"""The lines that a run prints at its start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from areno.config.models import ModelConfig
from areno.config.run import EngineConfig
from areno.plan.startup_log import startup_facts
from areno.recipes.sft import SFTConfig
from areno.specs.role import RoleSpec
from tests.helpers.started_runs import loader


@pytest.mark.parametrize(
    ("n_devices", "text"),
    [(2, "cpu, cpu: one copy over 2 devices, float32"), (4, "4 devices: 2 copies over 2 devices each, float32")],
)
def test_the_layout_is_told_in_words(n_devices: int, text: str) -> None:
    rows = loader(2)
    config = SFTConfig(experiment_name="e", actor=ModelConfig(path="m"), train_dataset=rows.config)
    plan = SimpleNamespace(
        spec=SimpleNamespace(
            devices=["cpu"] * n_devices,
            n_nodes=1,
            layout=EngineConfig(device="cpu", tp_size=2).layout(n_devices),
            dtype="float32",
            actor=RoleSpec(path="m"),
        )
    )
    assert startup_facts(config, cast("Any", plan), {}, rows)["layout"] == text
