"""The time predicted for FP8: against bf16 as measured on an H200 (docs/fp8.md), and which products count."""

from __future__ import annotations

from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.launch.compose import load
from areno.plan.forecast import Forecast, forecast
from areno.plan.hardware import hardware_of

FP8, KEYS = "actor.fp8_config.mode=e4m3", "rollout.kv_cache_dtype=fp8"
ROLLOUT = ["actor.path=Qwen/Qwen3-8B", "train_dataset.batch_size=32", "gconfig.n_samples=8", "actor.use_lora=true"]
ROLLOUT += ["train_dataset.max_length=1024", "gconfig.max_new_tokens=256"]
TRAIN = ["actor.path=Qwen/Qwen3-4B", "train_dataset.batch_size=16", "train_dataset.max_length=2048"]


def predicted(recipe: str, settings: list[str], lengths: tuple[int, int], device: str = "h200") -> Forecast:
    task = "quickstart_base" if recipe == "sft" else "quickstart"
    config: Any = load(get_algorithm(recipe).config, task, ["valid_dataset=null", *settings])
    return forecast(config, hardware_of(device), 1, *lengths)


def rollout(*settings: str, device: str = "h200") -> float:
    return predicted("gspo", [*ROLLOUT, *settings], (1024, 256), device).phases[0].seconds


def train(*settings: str, device: str = "h200") -> float:
    return predicted("sft", [*TRAIN, *settings], (1024, 1024), device).phases[-1].seconds


def test_the_gain_is_about_that_measured() -> None:
    assert rollout() / rollout(FP8, KEYS) == pytest.approx(1.18, rel=0.05)
    assert train() / train(FP8) == pytest.approx(1.17, rel=0.05)
    assert rollout() > rollout(KEYS) > rollout(FP8, KEYS)


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
    plain, codes = (predicted("gspo", [*ROLLOUT, *more], (1024, 256)) for more in ([], [int8]))
    saved = plain.phases[0].terms["weights"] - codes.phases[0].terms["weights"]
    assert saved > 6.9e9  # of 8.2e9 parameters, those in linear layers of attention and MLPs, and stacked adapters
