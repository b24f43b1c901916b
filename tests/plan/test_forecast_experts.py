"""The memory and time predicted for adapters on models with experts, against what was measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areno.api.algorithms import get_algorithm
from areno.launch.compose import load
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import hardware_of

WORK = [
    *("train_dataset.batch_size=32", "gconfig.n_samples=8", "gconfig.max_new_tokens=256", "valid_dataset=null"),
    *("train_dataset.max_length=256", "actor.gradient_checkpointing=true", "actor.share_prefixes=off"),
    "actor.mb_spec.max_tokens_per_mb=8192",
]
ON_ATTENTION = ["actor.use_lora=true", "actor.target_modules=[q_proj,k_proj,v_proj,o_proj]"]


def predicted(*settings: str, gib: float | None = None) -> Forecast:
    config, device = load(get_algorithm("grpo").config, "quickstart", [*WORK, *settings]), hardware_of("h200")
    device = replace(device, memory=int(gib * 2**30)) if gib else device
    return forecast(config, device, config.engine.tp_size, 256, 256)


@pytest.mark.parametrize(
    ("settings", "gib", "peak", "seconds"),
    [
        (["actor.path=Qwen/Qwen3-30B-A3B", *ON_ATTENTION], None, 94.56, (5.21, 5.73)),
        (["actor.path=Qwen/Qwen3-30B-A3B", "actor.use_lora=true"], None, 115.66, (5.74, 5.89)),
        (["actor.path=Qwen/Qwen3.5-35B-A3B", "actor.use_lora=true"], None, 123.46, (8.63, 9.20)),
        (["actor.path=openai/gpt-oss-20b", "actor.use_lora=true"], 78.5, 69.02, (4.06, 5.07)),
        (["actor.path=Qwen/Qwen3-30B-A3B", *ON_ATTENTION, "engine.tp_size=2"], None, 52.0, (3.3, 6.2)),
    ],
    ids=["30b-a3b attention", "30b-a3b", "35b-a3b", "gpt-oss-20b, 78.5 GiB", "30b-a3b attention, two GPUs"],
)
def test_adapters_on_models_with_experts_against_measurements_on_an_h200(
    settings: list[str], gib: float | None, peak: float, seconds: tuple[float, float]
) -> None:
    """In micro-batches of 8,192 tokens, two GPUs wait for their hosts, which launch as many kernels as of one GPU."""
    found = predicted(*settings, gib=gib)
    assert found.fits
    assert found.peak_memory_bytes / 2**30 == pytest.approx(peak, rel=0.02)
    assert found.step_seconds == pytest.approx(sum(seconds), rel=0.08)
    for phase, measured in zip(found.phases, seconds, strict=True):
        assert phase.seconds == pytest.approx(measured, rel=0.19)


def test_adapters_on_experts_take_what_they_hold_and_cost_little_time() -> None:
    on_attention = predicted("actor.path=Qwen/Qwen3-30B-A3B", *ON_ATTENTION)
    on_all = predicted("actor.path=Qwen/Qwen3-30B-A3B", "actor.use_lora=true")
    n_params = 48 * 128 * 32 * (2048 + 2 * 768 + 768 + 2048)  # layers, experts, rank, sizes
    assert on_all.peak_memory_bytes - on_attention.peak_memory_bytes == pytest.approx(18 * n_params, rel=1e-3)
    assert 1.05 < on_all.step_seconds / on_attention.step_seconds < 1.3
