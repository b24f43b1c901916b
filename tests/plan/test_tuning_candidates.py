"""The candidates of the tuner: which settings they change, which fit, and what is said if none does."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from areno.api.algorithms import get_algorithm
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import Hardware, hardware_of, local_cpu
from areno.plan.tuning_candidates import (
    AT_ONCE,
    BATCH,
    BUDGET,
    DROP,
    RECOMPUTE,
    Candidate,
    LengthLimits,
    candidates,
    given_candidate_settings,
    shortlist,
)

WORK = ["valid_dataset=null", "train_dataset.max_length=256", "gconfig.max_new_tokens=256"]
SMALL, LARGE = "actor.path=Qwen/Qwen3-0.6B", ("actor.path=Qwen/Qwen3-4B", "actor.optimizer.type=adam_8bit")
H100 = hardware_of("h100-80gb")


def config(*settings: str, recipe: str = "grpo") -> Any:
    return load(get_algorithm(recipe).config, "quickstart", [*WORK, "tune.enabled=true", *settings])


def found(
    *settings: str, given: Collection[str] = (BATCH,), device: Hardware = H100, recipe: str = "grpo"
) -> list[Candidate]:
    return candidates(config(*settings, recipe=recipe), device, 1, given)


def values(of: Collection[Candidate], key: str) -> set[Any]:
    return {candidate.settings.get(key) for candidate in of}


def test_candidates_differ_in_samples_at_once_cache_recomputation_and_micro_batches() -> None:
    of = found(SMALL)
    assert values(of, AT_ONCE) == {256, 128, 64, 32}
    assert values(of, DROP) == values(of, RECOMPUTE) == {True, False}
    assert values(of, BUDGET) >= {None, 1024, 8192, 32768}
    assert values(of, BATCH) == {None}
    prices = [candidate.seconds_per_sample(candidate.usual.step_seconds) for candidate in of]
    assert prices == sorted(prices)


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_every_candidate_fits_the_share_of_the_memory(share: float) -> None:
    of = found(*LARGE, f"tune.mem_frac={share}", given=())
    assert of
    assert all(candidate.peak_memory_bytes <= share * H100.memory for candidate in of)
    assert all(candidate.full.fits and candidate.usual.fits for candidate in of)


@pytest.mark.slow
def test_settings_that_are_given_are_kept() -> None:
    kept = [f"{AT_ONCE}=64", f"{DROP}=false", f"{RECOMPUTE}=true", f"{BUDGET}=4096"]
    [only] = found(SMALL, *kept, given={BATCH, AT_ONCE, DROP, RECOMPUTE, BUDGET})
    assert not only.settings
    for key in (AT_ONCE, DROP, RECOMPUTE):
        assert values(found(SMALL, given={BATCH, key}), key) == {None}
    assert values(found(SMALL, "actor.mb_spec.mini_bs=4", given={BATCH, "actor.mb_spec.mini_bs"}), BUDGET) == {None}
    assert given_candidate_settings(["actor.mb_spec", "train_dataset.path"]) == {BUDGET, "actor.mb_spec.mini_bs"}


@pytest.mark.slow
def test_the_batch_size_follows_from_the_samples_at_once() -> None:
    of = found(*LARGE, given=())
    assert all(candidate.settings[BATCH] == candidate.settings[AT_ONCE] // 8 for candidate in of)
    # The memory has no room for the KV cache of 512 samples at a good speed, so that steps are smaller.
    assert of[0].n_rows == 256
    assert {candidate.n_rows for candidate in shortlist(of)} == {256}
    [given] = values(found(*LARGE, f"{AT_ONCE}=100", given={AT_ONCE}), BATCH)
    assert given == 12
    assert max(values(found(SMALL, "tune.max_samples=50", given=()), BATCH)) == 6


def test_a_batch_divides_into_the_updates_of_a_step() -> None:
    of = found(SMALL, "actor.ppo_n_minibatches=3", "train_dataset.batch_size=3", given=())
    assert of
    assert all(candidate.n_rows % 3 == 0 for candidate in of)


@pytest.mark.slow
def test_no_more_samples_at_once_than_a_step_has() -> None:
    assert max(values(found(SMALL, "train_dataset.batch_size=5"), AT_ONCE)) == 40
    assert max(values(found(SMALL, "train_dataset.batch_size=128"), AT_ONCE)) == 256


def test_counted_micro_batches_are_kept_as_they_decide_what_is_learned() -> None:
    assert values(found(SMALL, "actor.gradient_accumulation_steps=2"), BUDGET) == {None}


def test_a_long_row_has_a_micro_batch_of_its_own() -> None:
    of = found(SMALL, "gconfig.max_new_tokens=20000", "tune.mem_frac=1")
    assert min(size for size in values(of, BUDGET) if size is not None) == 32768
    for candidate in of:
        assert all(phase.budget is None or phase.budget >= 20256 for phase in candidate.full.phases)


@pytest.mark.slow
@pytest.mark.parametrize("device", [H100, local_cpu()], ids=["h100", "cpu"])
@pytest.mark.parametrize("exact", [False, True])
def test_deterministic_runs_keep_what_changes_bits(exact: bool, device: Hardware) -> None:
    settings = [SMALL, "engine.deterministic=true", f"engine.exact={exact}".lower(), "tune.mem_frac=1"]
    of, limits = found(*settings, device=device), LengthLimits.from_config(config(*settings))
    untuned = forecast(config(*settings), device, 1, limits.prompt, limits.answer)
    assert {phase.name: phase.budget for phase in untuned.phases} == {
        phase.name: phase.budget for candidate in of for phase in candidate.full.phases
    }
    assert values(of, BUDGET) == {None}
    if not exact:  # then the results of a sample depend on the samples that are decoded with it
        assert values(of, AT_ONCE) == {None}
    elif not device.is_cuda:  # there, the KV cache has no influence on the size of micro-batches
        assert values(of, AT_ONCE) == {256, 128, 64, 32}
    assert values(found(*settings, given=(), device=device), BUDGET) > {None}  # the batch size changes every bit


@pytest.mark.slow
def test_the_fastest_are_tried_with_one_that_can_adapt() -> None:
    of = found(*LARGE)
    tried = shortlist(of)
    assert tried[0].settings_without_budget == of[0].settings_without_budget
    assert len(tried) <= 7
    assert any(candidate.settings[BUDGET] is None for candidate in tried)
    recomputes = [candidate.config.actor.gradient_checkpointing for candidate in tried]
    assert sum(one != other for one, other in itertools.pairwise(recomputes)) <= 1


@pytest.mark.slow
def test_what_does_not_fit_gets_ways_that_fit() -> None:
    with pytest.raises(ConfigError) as error:
        found("actor.path=Qwen/Qwen3-8B", f"{DROP}=true")
    told = str(error.value)
    assert told.startswith("tune.mem_frac: is 0.9, and no candidate fits into 71.3 of the 79.2 GiB of a device; set ")
    assert "actor.use_lora=true" in told
    assert "engine.world_size=" in told
    with pytest.raises(ConfigError, match=r"raise it to 0\.\d\d, or set "):
        found(*LARGE, "tune.mem_frac=0.4")


def test_a_cpu_has_no_cache_to_drop_and_no_context() -> None:
    of = found("gconfig.max_new_tokens=96", device=replace(local_cpu(), memory=2**34))
    assert values(of, DROP) == {None}
    assert min(candidate.peak_memory_bytes for candidate in of) < 2**30
