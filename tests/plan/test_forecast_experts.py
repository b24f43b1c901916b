"""The memory and time predicted for adapters on models with experts, against what was measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areno.api.algorithms import get_algorithm
from areno.cost.time import launch_seconds
from areno.launch.compose import load
from areno.models.known_shapes import resolve_model_config
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


QWEN3, QWEN3_5 = "actor.path=Qwen/Qwen3-30B-A3B", "actor.path=Qwen/Qwen3.5-35B-A3B"
LORA = "actor.use_lora=true"


@pytest.mark.parametrize(
    ("settings", "gib", "peak", "seconds"),
    [
        ([QWEN3, *ON_ATTENTION], None, 94.57, (5.48, 4.91)),
        ([QWEN3, LORA], None, 115.66, (6.05, 5.92)),
        ([QWEN3_5, LORA], None, 123.47, (8.53, 8.34)),
        ([QWEN3_5, LORA, "actor.lora_rank=16"], None, 122.81, (8.42, 6.82)),
        ([QWEN3_5, LORA, "actor.optimizer.type=adam_8bit"], None, 124.23, (8.54, 7.28)),
        (["actor.path=openai/gpt-oss-20b", LORA], 78.5, 69.02, (4.07, 4.98)),
        ([QWEN3, *ON_ATTENTION, "engine.tp_size=2"], None, 52.0, (3.3, None)),
    ],
    ids=[
        *("30b-a3b attention", "30b-a3b", "35b-a3b", "35b-a3b rank 16", "35b-a3b 8 bits", "gpt-oss-20b, 78.5 GiB"),
        "30b-a3b attention, two GPUs",
    ],
)
def test_adapters_on_models_with_experts_against_measurements_on_an_h200(
    settings: list[str], gib: float | None, peak: float, seconds: tuple[float, float | None]
) -> None:
    found = predicted(*settings, gib=gib)
    assert found.fits
    assert found.peak_memory_bytes / 2**30 == pytest.approx(peak, rel=0.02)
    for phase, measured in zip(found.phases, seconds, strict=True):
        assert measured is None or phase.seconds == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("path", "n_kernels"),
    [("Qwen/Qwen3-30B-A3B", 69_311), ("Qwen/Qwen3.5-35B-A3B", 98_977), ("openai/gpt-oss-20b", 50_050)],
)
def test_the_host_launches_about_as_many_kernels_as_were_counted(path: str, n_kernels: int) -> None:
    """In 16 micro-batches, without recomputation. A kernel takes the host 40 us."""
    config = resolve_model_config(path, "actor.path")
    assert 16 * launch_seconds(config, trains=True) == pytest.approx(40e-6 * n_kernels, rel=0.2)


def test_adapters_on_experts_take_what_they_hold_and_cost_little_time() -> None:
    on_attention = predicted(QWEN3, *ON_ATTENTION)
    on_all = predicted(QWEN3, LORA)
    n_params = 48 * 128 * 32 * (2048 + 2 * 768 + 768 + 2048)  # layers, experts, rank, sizes
    assert on_all.peak_memory_bytes - on_attention.peak_memory_bytes == pytest.approx(18 * n_params, rel=1e-3)
    assert 1.05 < on_all.step_seconds / on_attention.step_seconds < 1.3
