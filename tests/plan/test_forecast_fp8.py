"""The time predicted for FP8: against bf16 as measured on an H200 (docs/fp8.md), and which products count."""

from __future__ import annotations

from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.launch.compose import load
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import hardware_of

FP8, KEYS = "actor.fp8_config.mode=e4m3", "rollout.kv_cache_dtype=fp8"
QWEN = {size: f"actor.path=Qwen/Qwen3-{size}" for size in ("0.6B", "4B", "8B")}
TRAIN = [QWEN["4B"], "train_dataset.batch_size=16", "train_dataset.max_length=2048"]


def predicted(recipe: str, settings: list[str], lengths: tuple[int, int], device: str = "h200") -> Forecast:
    task = "quickstart_base" if recipe == "sft" else "quickstart"
    config: Any = load(get_algorithm(recipe).config, task, ["valid_dataset=null", *settings])
    return forecast(config, hardware_of(device), 1, *lengths)


def step(
    *settings: str, size: str = "8B", prompts: int = 32, lengths: tuple[int, int] = (1024, 256), device: str = "h200"
) -> Forecast:
    words = [QWEN[size], f"train_dataset.batch_size={prompts}", "gconfig.n_samples=8", "actor.share_prefixes=off"]
    words += [f"train_dataset.max_length={lengths[0]}", f"gconfig.max_new_tokens={lengths[1]}"]
    return predicted("gspo", [*words, *settings], lengths, device)


def rollout(*settings: str, **how: Any) -> float:
    return step("actor.use_lora=true", *settings, **how).phases[0].seconds


def train(*settings: str, device: str = "h200") -> float:
    return predicted("sft", [*TRAIN, *settings], (1024, 1024), device).phases[-1].seconds


def test_the_gain_is_about_that_measured() -> None:
    short: dict[str, Any] = {"prompts": 16, "lengths": (256, 256)}
    small: dict[str, Any] = {"size": "0.6B", "prompts": 128, "lengths": (256, 256)}
    lora = "actor.use_lora=true"
    gains = {
        1.23: train() / train(FP8),
        1.32: rollout() / rollout(FP8, KEYS),
        1.26: rollout(**small) / rollout(KEYS, **small),
        1.27: step(lora, **short).step_seconds / step(lora, FP8, KEYS, **short).step_seconds,
        1.17: step(size="4B", **short).step_seconds / step(FP8, KEYS, size="4B", **short).step_seconds,
    }
    assert [*gains.values()] == pytest.approx([*gains], rel=0.06)


def test_each_gradient_in_fp8_counts() -> None:
    plain, forward, dgrad, both = (
        train(*settings)
        for settings in (
            [],
            [FP8, "actor.fp8_config.dgrad=false"],
            [FP8],
            [FP8, "actor.fp8_config.wgrad=true"],
        )
    )
    assert plain > forward > dgrad > both
    assert train(FP8, "actor.fp8_config.exclude_modules=[mlp]") > dgrad


def test_emulated_products_are_no_faster() -> None:
    assert train(FP8, "actor.dtype=float32") == train("actor.dtype=float32")
    assert train(FP8, device="cpu") == train(device="cpu")


def test_weights_in_int8_are_slower_to_read_and_need_no_units() -> None:
    int8 = "actor.fp8_config.mode=int8"
    assert 1.1 < rollout(int8) / rollout() < 2.5
    assert rollout(int8, device="a100-80gb") > rollout(device="a100-80gb")
    plain, codes = (step("actor.use_lora=true", *more) for more in ([], [int8]))
    saved = plain.phases[0].terms["weights"] - codes.phases[0].terms["weights"]
    assert saved > 6.9e9  # of 8.2e9 parameters, those in linear layers of attention and MLPs, and stacked adapters
