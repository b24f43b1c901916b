"""Runs in bfloat16, where rollout and training differ by rounding: ratios and clips by recipe, variant and task."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.files.paths import find_file
from areno.launch.compose import load
from tests.helpers.policy_runs import Played, play
from tests.helpers.variant_runs import Variant, player

BF16 = "actor.dtype=bfloat16"
VARIANTS = sorted(path.stem for path in find_file("conf/variant").glob("*.yaml"))
SOLVED = ["train_dataset.loader=examples/quickstart/dataset_loader.py:with_responses"]
NEEDED = {
    "reinforce_pp": ["gconfig.n_samples=1", "train_dataset.batch_size=16", "actor.kl_ctl=0.1"],
    "maxrl": ["actor.reward_bias=10.0"],
    "gdpo": ["reward.fn=[math,examples/quickstart/reward.py]"],
    "rlsd": SOLVED,
    "sdar": SOLVED,
    "sdpg": SOLVED,
}
FROZEN = ["actor.optimizer.lr=1e-30", "actor.ppo_n_minibatches=4"]


@pytest.fixture
def runs(tmp_path: Path, models: dict[str, Path]) -> dict[str, Variant]:
    """A reward model gives every completion a reward of its own, so that all groups have a gradient."""
    ppo = partial(player("ppo", tmp_path, models["reward"], "critic.warmup_steps=0"), task="quickstart_ppo")
    return {recipe: player(recipe, tmp_path, models["reward"]) for recipe in ("gspo", "grpo")} | {"ppo": ppo}


def assert_no_ratio_from_rounding(run: Played, rounds: bool = True) -> None:
    """Every ratio is 1 to the bit, nothing is clipped, and the mismatch is logged. rounds: whether there is one."""
    steps = len(run.series("train/ratio_mean"))
    assert steps > 0
    assert run.series("train/ratio_mean") == run.series("train/ratio_max") == [1.0] * steps
    assert run.series("train/ratio_std") == [0.0] * steps
    assert run.series("train/approx_kl") == [0.0] * steps
    for name in ("train/clip_frac", "train/clip_frac_dual"):
        assert name not in run.names() or run.series(name) == [0.0] * steps
    mismatch = run.series("train/logp_abs_diff_mean")
    assert max(mismatch) < 0.02
    assert min(mismatch) > 0 or not rounds


@pytest.mark.parametrize("recipe", ["gspo", pytest.param("grpo", marks=pytest.mark.slow), "ppo"])
def test_the_only_update_of_a_batch(runs: dict[str, Variant], recipe: str) -> None:
    run = runs[recipe](BF16)
    assert_no_ratio_from_rounding(run)
    assert all(norm > 0 for norm in run.series("train/grad_norm"))


@pytest.mark.parametrize("recipe", ["gspo", pytest.param("grpo", marks=pytest.mark.slow), "ppo"])
def test_several_updates_with_unchanged_weights(runs: dict[str, Variant], recipe: str) -> None:
    assert_no_ratio_from_rounding(runs[recipe](BF16, *FROZEN))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(runs: dict[str, Variant], variant: str) -> None:
    run = runs["ppo" if variant == "sao" else "grpo"](BF16, f"variant={variant}", *NEEDED.get(variant, []))
    if "recompute_logprob: false" in find_file(f"conf/variant/{variant}.yaml").read_text():  # ratios to the rollout
        assert all(0 < std < 0.02 for std in run.series("train/ratio_std"))
        return
    assert_no_ratio_from_rounding(run)
    if "train/weights_mean" in run.names():
        assert run.series("train/weights_std")[0] > 0, "the rollout has a ratio of its own"


def test_a_ratio_to_the_rollout_clips_by_rounding(runs: dict[str, Variant], caplog: pytest.LogCaptureFixture) -> None:
    settings = ["gconfig.temperature=1.0", "train_dataset.batch_size=16", "total_train_steps=1"]
    run = runs["gspo"](BF16, *settings, "actor.recompute_logprob=false")
    assert run.series("train/clip_frac")[0] > 0.02
    assert run.series("train/ratio_std")[0] > 3e-4
    told = [record.getMessage() for record in caplog.records if "before any update" in record.getMessage()]
    assert len(told) == 1
    assert "clipped at 0.0003 (actor.eps_clip)" in told[0]


def test_the_warning_names_what_would_help(runs: dict[str, Variant], caplog: pytest.LogCaptureFixture) -> None:
    """Interpolated log-probabilities compare with the rollout in later updates, however the batch is cut into them."""
    narrow = ["variant=decoupled", "actor.prox_logp_method=loglinear", "actor.eps_clip=1e-5", "actor.mb_spec.mini_bs=4"]
    cut = ["actor.mb_spec.max_tokens_per_mb=null", "actor.gradient_accumulation_steps=2", "total_train_steps=1"]
    runs["grpo"](BF16, *narrow, *cut)
    [told] = [record.getMessage() for record in caplog.records if "before any update" in record.getMessage()]
    assert "set actor.prox_logp_method=recompute, or engine.exact=true" in told


def test_tokens_that_are_not_trained_have_no_training_log_probability(runs: dict[str, Variant]) -> None:
    run = runs["grpo"](BF16, "gconfig.max_new_tokens=3", "actor.mask_no_eos_with_zero=true", "total_train_steps=1")
    samples = run.samples(1)
    cut = [sample for sample in samples if sample["finish_reason"] == "length"]
    assert 0 < len(cut) < len(samples)
    for sample in samples:
        assert all((value is None) == (sample in cut) for value in sample["train_logprobs"])


@pytest.mark.slow
def test_exact_mode_needs_no_scoring_pass(runs: dict[str, Variant]) -> None:
    run = runs["gspo"](BF16, "engine.exact=true", *FROZEN)
    assert_no_ratio_from_rounding(run, rounds=False)
    assert run.series("train/logp_abs_diff_max") == [0.0, 0.0]


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path: Path) -> None:
    algorithm = get_algorithm("gspo")
    config = load(
        algorithm.config, "quickstart", [BF16, "engine.device=cpu", "reward.workers=1", "total_train_steps=60"]
    )
    with algorithm.trainer(config, tmp_path) as trainer:
        trainer.fit()
    run = Played(tmp_path)
    assert_no_ratio_from_rounding(run)
    rewards = run.series("rollout/rewards_mean")
    assert sum(rewards[-5:]) / 5 > 0.85
    assert run.series("eval/accuracy")[-1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "task"), [("sft", "quickstart_base"), ("dpo", "quickstart_dpo")])
def test_losses_without_a_ratio(tmp_path: Path, recipe: str, task: str) -> None:
    small = ["total_train_steps=2", "train_dataset.batch_size=8", "valid_dataset=null", "engine.device=cpu"]
    algorithm = get_algorithm(recipe)
    with algorithm.trainer(load(algorithm.config, task, [BF16, *small]), tmp_path) as trainer:
        trainer.fit()
    run = Played(tmp_path)
    assert all(norm > 0 for norm in run.series("train/grad_norm"))
    assert not {"train/ratio_mean", "train/clip_frac", "train/logp_abs_diff_mean"} & run.names()
    if recipe == "dpo":  # the policy is the reference, but for rounding
        assert abs(run.series("train/margin")[0]) < 0.02
        assert run.series("train/loss")[0] == pytest.approx(math.log(2), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "task"), [("gspo", "tictactoe"), ("grpo", "tools")])
def test_tasks_of_agents(tmp_path: Path, recipe: str, task: str) -> None:
    small = ["total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=2", "gconfig.max_new_tokens=16"]
    processes = ["reward.workers=1", "agent.workers=1", "saver.freq_steps=null"]
    run = play(recipe, tmp_path, *small, "gconfig.max_tokens=null", *processes, BF16, task=task)
    assert_no_ratio_from_rounding(run)
