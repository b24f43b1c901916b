"""What `areno plan` refuses, as a run does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areno.api.algorithms import get_algorithm
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import hardware_of, local_devices

QWEN = ["actor.path=Qwen/Qwen3-0.6B", "valid_dataset=null"]


@pytest.mark.parametrize(
    ("settings", "device", "n", "key", "told"),
    [
        (["actor.fp8_config.mode=e4m3"], "a100-80gb", 1, "actor.fp8_config", "actor.fp8_config.mode=int8"),
        (["rollout.kv_cache_dtype=fp8"], "a100-80gb", 1, "rollout.kv_cache_dtype", "A100 80 GB has no FP8 units"),
        (
            ["actor.fp8_config.mode=e4m3", "actor.path=Qwen/Qwen3-30B-A3B"],
            *("h200", 4, "actor.fp8_config", "experts have no products in FP8"),
        ),
        (
            ["actor.fp8_config.exclude_modules=[v_pro]"],
            *("h200", 1, "actor.fp8_config.exclude_modules", "has v_pro, which is no whole part of the name"),
        ),
        (
            ["actor.fp8_config.mode=e4m3", "engine.exact=true", "actor.dtype=float32"],
            *("h200", 1, "actor.dtype", "FP8 products are emulated"),
        ),
        (["gconfig.max_new_tokens=50000"], "h200", 1, "gconfig.max_new_tokens", "must also hold a prompt"),
        (["train_dataset.batch_size=4", "gconfig.n_samples=2"], "h200", 16, "train_dataset.batch_size", "lower"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(settings: list[str], device: str, n: int, key: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forecast(load(get_algorithm("gspo").config, "quickstart", [*QWEN, *settings]), hardware_of(device), n)
    [problem] = caught.value.problems
    assert problem.key == key
    assert told in problem.message


@pytest.mark.parametrize(("capability", "has_units"), [("8.6", False), ("8.9", True), ("12.0", True), ("[N/A]", True)])
def test_the_driver_tells_which_gpus_have_fp8_units(
    capability: str, has_units: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "nvidia-smi"
    lists.write_text(f"#!/bin/sh\necho 'GPU-aa1, NVIDIA GeForce RTX 9999, 24576, {capability}'\n")
    lists.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device.has_fp8_units for device in local_devices()] == [has_units]
