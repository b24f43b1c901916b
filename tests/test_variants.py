"""Every variant of the policy losses, run for two steps from its settings: what only that variant does, in numbers.

Formulas are written out over the rows that reached the update. The first update of on-policy rows has the ratio 1, so
there the loss is a weighted mean of advantages. `stale` gives the rows another policy's log-probabilities.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_runs import MODEL, Played, classifier, groups, other_actor, play, trained
from test_algorithms_doc import commands

from areno.api.trainers import update
from areno.loss_fns import grpo_loss_fn
from areno.types import TrainSequence

Variant = Callable[..., Played]
MOVING = ["actor.ppo_n_minibatches=8", "actor.optimizer.lr=1e-2", "total_train_steps=1"]  # ratios leave 1


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_actor(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def grpo(tmp_path: Path, reward_model: Path) -> Variant:
    """Runs GRPO with settings, 16 rows a step, a reward model: nearly any two completions differ in reward."""
    return _player("grpo", tmp_path, reward_model)


@pytest.fixture
def gspo(tmp_path: Path, reward_model: Path) -> Variant:
    return _player("gspo", tmp_path, reward_model)


@pytest.fixture
def ppo(tmp_path: Path, reward_model: Path) -> Variant:
    return partial(_player("ppo", tmp_path, reward_model, "critic.warmup_steps=0"), task="quickstart_ppo")


def _player(recipe: str, folder: Path, reward_model: Path, *settings: str) -> Variant:
    count = iter(range(100))

    def player(*overrides: str, **given: Any) -> Played:
        own = [] if any(text.startswith("reward.") for text in overrides) else ["reward.fn=null"]
        own += [f"reward.path={reward_model}"] if own else []
        return play(recipe, folder / f"{recipe}{next(count)}", *own, *settings, *overrides, **given)

    return player


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come with log-probabilities of a policy two steps old: the sampling one's with noise."""
    rows_of, draw = update.policy_rows, np.random.default_rng(0)

    def policy_rows(*args: Any, **how: Any) -> list[TrainSequence]:
        rows = rows_of(*args, **how)
        for row in rows:
            assert row.logprobs is not None
            assert row.prompt_mask is not None
            noise = draw.normal(0.0, 0.3, len(row.logprobs))
            row.logprobs = [
                0.0 if masked else old + more
                for old, more, masked in zip(row.logprobs, noise.tolist(), row.prompt_mask, strict=True)
            ]
            row.staleness = 2
        return rows

    monkeypatch.setattr(update, "policy_rows", policy_rows)


def rewards(rows: Sequence[TrainSequence]) -> list[float]:
    return [row.reward for row in rows]


def advantages(rows: Sequence[TrainSequence]) -> list[float]:
    """One for each row, which all its tokens have."""
    found = [trained(row, "advantages") for row in rows]
    assert all(len(set(row)) == 1 for row in found)
    return [row[0] for row in found]


def reduced(
    rows: Sequence[TrainSequence], values: Sequence[Sequence[float]], reduction: str, longest: int = 8
) -> float:
    """Token values as one number."""
    counts = [len(row) for row in values]
    assert counts == [len(trained(row, "advantages")) for row in rows]
    if reduction == "token_mean":
        return sum(map(sum, values)) / sum(counts)
    if reduction == "seq_mean_token_mean":
        return sum(sum(row) / n for row, n in zip(values, counts, strict=True)) / len(rows)
    return sum(map(sum, values)) / longest / len(rows)


def on_policy_loss(rows: Sequence[TrainSequence], reduction: str) -> float:
    return -reduced(rows, [trained(row, "advantages") for row in rows], reduction)


def close(expected: Any, within: float = 1e-5) -> Any:
    return pytest.approx(expected, abs=within, rel=1e-4)


# Advantages and reductions -------------------------------------------------------------------------------------------


def test_grpo(grpo: Variant) -> None:
    run = grpo()
    for step, rows in enumerate(run.rows):
        for group in groups(rows):
            r = np.array(rewards(group))
            assert r.std() > 0
            assert advantages(group) == close((r - r.mean()) / (r.std() + 1e-6))
        assert run.series("train/policy_loss")[step] == close(on_policy_loss(rows, "seq_mean_token_mean"))
    assert run.series("train/ratio_std")[0] < 1e-5
    assert not {"rollout/sampling_rounds", "train/kl_loss", "train/weights_mean", "train/clip_frac_dual"} & run.names()


def test_dr_grpo(grpo: Variant) -> None:
    run = grpo("variant=dr_grpo")
    for step, rows in enumerate(run.rows):
        for group in groups(rows):
            assert advantages(group) == close(np.array(rewards(group)) - np.mean(rewards(group)))
        expected = on_policy_loss(rows, "seq_mean_token_sum_norm")
        assert abs(expected) > 1e-4
        assert run.series("train/policy_loss")[step] == close(expected, 1e-6)


def test_token_mean(grpo: Variant) -> None:
    run = grpo("actor.reduction=token_mean")
    expected = [on_policy_loss(rows, "token_mean") for rows in run.rows]
    assert min(map(abs, expected)) > 1e-3
    assert run.series("train/policy_loss") == close(expected)


def test_rloo(grpo: Variant) -> None:
    run = grpo("variant=rloo")
    for rows in run.rows:
        for group in groups(rows):
            r = rewards(group)
            assert advantages(group) == close([x - (sum(r) - x) / 3 for x in r])


def test_reinforce_plus_plus(grpo: Variant, reference: Path) -> None:
    """One sample a prompt; each token is credited with the KL that follows, the last one with the reward too."""
    run = grpo(
        "variant=reinforce_pp", "gconfig.n_samples=1", "train_dataset.batch_size=16", f"ref.path={reference}",
        "actor.kl_ctl=0.5",
    )  # fmt: skip
    assert "train/kl_loss" not in run.names()
    for rows in run.rows:
        returns = []
        for row in rows:
            kl = [old - ref for old, ref in zip(trained(row, "logprobs"), trained(row, "ref_logprobs"), strict=True)]
            returns += [row.reward - 0.5 * sum(kl[t:]) for t in range(len(kl))]
        mean, std = np.mean(returns), np.std(returns)
        found = [a for row in rows for a in trained(row, "advantages")]
        assert found == close((np.array(returns) - mean) / (std + 1e-6))
        assert len(set(trained(rows[0], "advantages"))) > 1


def test_reinforce_plus_plus_with_a_baseline(grpo: Variant, reference: Path) -> None:
    run = grpo(
        "variant=reinforce_pp", "+actor.reward_norm.mean_level=group", "+actor.reward_norm.std_level=null",
        f"ref.path={reference}",
    )  # fmt: skip
    for step, rows in enumerate(run.rows):
        given = [sample["reward"] for sample in run.samples(step + 1)]
        for group, raw in zip(groups(rows), np.reshape(given, (4, 4)), strict=True):
            assert rewards(group) == close(raw - raw.mean())
        found = np.concatenate([trained(row, "advantages") for row in rows])
        assert found.mean() == close(0.0)
        assert found.std() == close(1.0)


def test_rewards_shaped_and_normalised(grpo: Variant) -> None:
    run = grpo(
        "actor.reward_bias=0.5", "actor.reward_scaling=2", "actor.reward_clip=1.5", "actor.adv_norm=null",
        "actor.reduction=token_mean",
    )  # fmt: skip
    raw = [sample["reward"] for sample in run.samples(1)]
    shaped = np.clip((np.array(raw) + 0.5) * 2, -1.5, 1.5)
    assert 0 < sum(abs(value) == 1.5 for value in shaped) < 16
    assert rewards(run.rows[0]) == close(shaped)
    assert advantages(run.rows[0]) == close(shaped)  # adv_norm=null: the reward itself
    assert run.series("rollout/rewards_mean")[0] == close(np.mean(raw))  # the log has them as they were given
    run = grpo("+actor.reward_norm.mean_level=batch", "+actor.reward_norm.std_level=batch", "actor.adv_norm=null")
    raw = np.array([sample["reward"] for sample in run.samples(1)])
    assert rewards(run.rows[0]) == close((raw - raw.mean()) / (raw.std() + 1e-6))


# DAPO ----------------------------------------------------------------------------------------------------------------

RIGHT_OR_WRONG = ["reward.workers=1", "gconfig.n_samples=2"]  # half of the pairs have no difference


def test_dynamic_sampling_fills_the_step_with_other_prompts(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "variant=dapo", "total_train_steps=3")
    rounds, dropped = run.series("rollout/sampling_rounds"), run.series("rollout/dropped_groups")
    assert max(rounds) >= 2
    assert run.series("train/policy_loss")[0] == close(on_policy_loss(run.rows[0], "token_mean"))
    for step, rows in enumerate(run.rows):
        assert len(rows) == 8
        for group in groups(rows, 2):
            assert sorted(rewards(group)) == [0.0, 1.0]
        n_sampled = run.series("rollout/num_sequences")[step]
        assert n_sampled == 8 * rounds[step] == len(run.samples(step + 1))
        assert dropped[step] == n_sampled / 2 - 4
        assert run.series("train/grad_norm")[step] > 0


def test_a_prompt_that_comes_again_makes_a_group_of_its_own(grpo: Variant) -> None:
    """Five prompts for steps of four: what is sampled anew are, epoch after epoch, the same."""
    few = [
        {"prompt": f"{a}+{b}=", "solutions": str(a + b)} for a, b in ((27, 35), (18, 44), (56, 17), (48, 33), (29, 9))
    ]
    run = grpo(*RIGHT_OR_WRONG, "variant=dapo", "total_train_epochs=40", train_dataset=few)
    assert max(run.series("rollout/sampling_rounds")) > 2
    for step, rows in enumerate(run.rows):
        assert [sorted(rewards(group)) for group in groups(rows, 2)] == [[0.0, 1.0]] * 4
        n_groups = run.series("rollout/num_sequences")[step] / 2
        assert run.series("rollout/dropped_groups")[step] == n_groups - 4


def test_dynamic_batch_size_trains_on_what_is_left(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "rollout.dynamic_sampling=true", "dynamic_bs=true", "total_train_steps=4")
    assert run.series("rollout/sampling_rounds") == [1] * 4
    sizes = [len(rows) for rows in run.rows]
    assert min(sizes) < 8
    assert [8 - 2 * n for n in run.series("rollout/dropped_groups")] == sizes
    for rows in run.rows:
        for group in groups(rows, 2):
            assert sorted(rewards(group)) == [0.0, 1.0]


def test_sampling_rounds_have_an_end(grpo: Variant) -> None:
    run = grpo(*RIGHT_OR_WRONG, "rollout.dynamic_sampling=true", "rollout.max_sampling_rounds=1")
    assert run.series("rollout/sampling_rounds") == [1, 1]
    assert [8 - 2 * n for n in run.series("rollout/dropped_groups")] == [len(rows) for rows in run.rows]


def test_nothing_to_prefer_anywhere(grpo: Variant) -> None:
    """All rewards equal, in every round: a step without a gradient, and a warning."""
    rounds = ["rollout.dynamic_sampling=true", "rollout.max_sampling_rounds=3"]
    run = grpo("reward.workers=1", *rounds, reward_fn=lambda record: 1.0)
    assert run.series("rollout/sampling_rounds") == [3, 3]
    assert run.series("rollout/dropped_groups") == [12, 12]
    assert run.series("train/grad_norm") == [0, 0]
    assert (run.folder / "logs/run.log").read_text().count("there is nothing to prefer") == 2


def test_fewer_rows_than_minibatches_are_still_trained(grpo: Variant) -> None:
    run = grpo(
        *RIGHT_OR_WRONG, "rollout.dynamic_sampling=true", "dynamic_bs=true", "actor.ppo_n_minibatches=8",
        "total_train_steps=3",
    )  # fmt: skip
    assert min(len(rows) for rows in run.rows) < 8
    assert all(norm > 0 for norm in run.series("train/grad_norm"))


def test_overlong_completions_are_punished(grpo: Variant) -> None:
    run = grpo(
        "gconfig.max_new_tokens=4", "actor.overlong_reward_penalty=true", "actor.overlong_tokens=2",
        "actor.overlong_penalty_factor=3",
    )  # fmt: skip
    for step, rows in enumerate(run.rows):
        samples = run.samples(step + 1)
        penalties = [{1: 0.0, 2: 0.0, 3: -1.5, 4: -3.0}[sample["response_tokens"]] for sample in samples]
        assert len(set(penalties)) > 1
        assert rewards(rows) == close([s["reward"] + p for s, p in zip(samples, penalties, strict=True)])
        assert np.mean(rewards(rows)) < run.series("rollout/rewards_mean")[step] - 1


def test_clip_higher(grpo: Variant) -> None:
    found = []
    for bound in (0.02, 0.2, 100):
        run = grpo(*MOVING, f"actor.eps_clip_higher={bound}")
        [low], [high], [both] = (run.series(f"train/clip_frac{name}") for name in ("_low", "_high", ""))
        assert low > 0
        assert both == close(low + high)
        found.append(high)
    assert found[0] > found[1] > found[2] == 0


def test_truncated_completions_are_not_trained(grpo: Variant) -> None:
    """With three tokens a sum of three digits has no room for the end of the sequence."""
    short = ["gconfig.max_new_tokens=3", "train_dataset.batch_size=8"]
    whole, masked = grpo(*short), grpo(*short, "actor.mask_no_eos_with_zero=true")
    cut = [sample["finish_reason"] == "length" for sample in masked.samples(1)]
    assert 0 < sum(cut) < len(cut)
    for row, was_cut, other in zip(masked.rows[0], cut, whole.rows[0], strict=True):
        assert len(trained(row, "logprobs")) == (0 if was_cut else len(trained(other, "logprobs")))
        if not was_cut:
            assert trained(row, "advantages") == trained(other, "advantages")  # the cut one still counts in its group
    n_tokens = [sum(len(trained(row, "logprobs")) for row in run.rows[0]) for run in (whole, masked)]
    assert n_tokens[1] < n_tokens[0]
    assert masked.series("train/grad_norm")[0] != whole.series("train/grad_norm")[0]


# The ratio -----------------------------------------------------------------------------------------------------------


def test_later_minibatches_see_true_ratios(grpo: Variant) -> None:
    """The first update of a batch has the ratio 1 everywhere, later ones that to the policy which sampled."""
    seen: list[torch.Tensor] = []

    def loss_fn(pack: Any, logprobs: torch.Tensor) -> Any:
        loss, stats = grpo_loss_fn(pack, logprobs)
        seen.append(stats["ratio"])
        return loss, stats

    run = grpo("actor.ppo_n_minibatches=4", "total_train_steps=1", loss_fn=loss_fn)
    assert len(seen) == 4
    assert sum(map(len, seen)) == sum(len(trained(row, "logprobs")) for row in run.rows[0])
    assert (seen[0] - 1).abs().max() < 1e-4
    assert all(ratios.std() > 1e-3 for ratios in seen[1:])
    assert run.series("train/ratio_std")[0] > 1e-3
    assert run.series("train/logp_abs_diff_max")[0] > 1e-3


def test_gspo_token_is_gspo_where_the_tokens_of_a_row_have_one_advantage(grpo: Variant, gspo: Variant) -> None:
    two = ["actor.ppo_n_minibatches=2", "actor.eps_clip=0.05"]
    sequence, token = gspo(*two), grpo(*two, "variant=gspo_token")
    plain = grpo(*two)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "rollout/rewards_mean", "train/approx_kl"):
        assert token.series(name) == close(sequence.series(name)), name
    assert plain.series("train/grad_norm")[0] != close(sequence.series("train/grad_norm")[0], 1e-3)
    # A geometric mean over the row moves less than its tokens do.
    assert sequence.series("train/ratio_std")[0] < plain.series("train/ratio_std")[0]


def test_cispo(grpo: Variant) -> None:
    run = grpo("variant=cispo")
    for step, rows in enumerate(run.rows):
        values = [
            [-a * p for a, p in zip(trained(row, "advantages"), trained(row, "logprobs"), strict=True)] for row in rows
        ]
        assert run.series("train/policy_loss")[step] == close(reduced(rows, values, "token_mean"))
    moved = grpo("variant=cispo", *MOVING)
    assert moved.series("train/clip_frac_low") == [0]  # nothing is below 1 - 1
    assert moved.series("train/clip_frac_high")[0] > 0
    # The clip cuts the weight of a gradient and leaves the gradient: another update than PPO's clip makes.
    other = grpo("variant=cispo", *MOVING, "actor.use_cispo_loss=false")
    assert moved.series("train/grad_norm")[0] != close(other.series("train/grad_norm")[0], 1e-3)


def test_sapo(grpo: Variant) -> None:
    run, moved = grpo("variant=sapo"), grpo("variant=sapo", *MOVING)
    assert run.series("train/sapo_gate") == close([1.0, 1.0])
    assert 0.3 < moved.series("train/sapo_gate")[0] < 0.999
    assert not any("clip_frac" in name for name in moved.names())
    # At the ratio 1, f = 2 / tau: the loss is that of GRPO with another factor for each sign.
    values = [[-a * 2 / (1.0 if a > 0 else 1.05) for a in trained(row, "advantages")] for row in run.rows[0]]
    assert run.series("train/policy_loss")[0] == close(reduced(run.rows[0], values, "seq_mean_token_mean"))
    # A larger tau closes the gate faster.
    sharp = grpo("variant=sapo", *MOVING, "actor.sapo_tau_pos=5", "actor.sapo_tau_neg=5")
    assert sharp.series("train/sapo_gate")[0] < moved.series("train/sapo_gate")[0]


def test_dual_clip(grpo: Variant) -> None:
    runs = [grpo(*MOVING, f"actor.c_clip={bound}") for bound in (1.05, 100.0)]
    assert runs[0].series("train/clip_frac_dual")[0] > 0
    assert runs[1].series("train/clip_frac_dual") == [0]


# The reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [
        ("k1", lambda x: -x),
        ("k2", lambda x: x * x / 2),
        ("k3", lambda x: math.exp(x) - x - 1),
    ],
)
def test_kl_to_the_reference(grpo: Variant, reference: Path, estimator: str, formula: Callable[[float], float]) -> None:
    run = grpo(f"+ref.path={reference}", "actor.kl_ctl=0.7", f"actor.kl_estimator={estimator}")
    for step, rows in enumerate(run.rows):
        values = [
            [
                formula(ref - new)
                for new, ref in zip(trained(row, "logprobs"), trained(row, "ref_logprobs"), strict=True)
            ]
            for row in rows
        ]
        expected = reduced(rows, values, "seq_mean_token_mean")
        assert expected > 1e-3 or estimator == "k1"
        kl, policy = run.series("train/kl_loss")[step], run.series("train/policy_loss")[step]
        assert kl == close(expected, 1e-4)
        assert run.series("train/loss")[step] == close(policy + 0.7 * kl)


def test_the_reference_is_the_actor_as_it_starts(grpo: Variant) -> None:
    run = grpo("ref=default", "actor.kl_ctl=0.1", "total_train_steps=3", "actor.optimizer.lr=5e-3")
    kl = run.series("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert kl[2] > 1e-4


def test_kl_in_the_reward_of_a_group(grpo: Variant, reference: Path) -> None:
    """What the tokens of a row earn in all is compared within the group; the loss has no KL."""
    run = grpo(
        f"+ref.path={reference}", "actor.kl_ctl=0.5", "actor.use_kl_in_reward=true", "actor.kl_estimator=k1",
        "actor.adv_norm.std_level=null", "actor.adv_norm.mean_leave1out=true",
    )  # fmt: skip
    assert "train/kl_loss" not in run.names()
    for rows in run.rows:
        for group in groups(rows):
            earned = [
                row.reward - 0.5 * (sum(trained(row, "logprobs")) - sum(trained(row, "ref_logprobs"))) for row in group
            ]
            assert advantages(group) == close([x - (sum(earned) - x) / 3 for x in earned], 1e-4)


# Rows of another policy ----------------------------------------------------------------------------------------------

WIDE = ["actor.eps_clip=1.0", "actor.eps_clip_higher=1e6"]  # the bare ratio


def spied(rows_of: list[list[np.ndarray]]) -> Any:
    """Keeps (behaviour, proximal) log-probabilities of the trained tokens at the moment of correction."""
    correct = update.correct_rows

    def correct_rows(rows: Sequence[TrainSequence], prox: Sequence[Sequence[float]], actor: Any) -> dict[str, float]:
        for row, new in zip(rows, prox, strict=True):
            places = ~np.array(row.prompt_mask)
            rows_of.append([np.array(row.logprobs)[places], np.array(new)[places]])
        return correct(rows, prox, actor)

    return correct_rows


@pytest.fixture
def before(stale: None, monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """[behaviour, proximal] of each row of one step, for runs of one step."""
    found: list[list[np.ndarray]] = []
    monkeypatch.setattr(update, "correct_rows", spied(found))
    return found


def test_recomputed_logprobs_take_the_place_of_the_rollouts(grpo: Variant, stale: None) -> None:
    plain, run = grpo("total_train_steps=1"), grpo("total_train_steps=1", "actor.recompute_logprob=true")
    assert plain.series("train/ratio_std")[0] > 0.1
    assert run.series("train/ratio_std")[0] < 1e-5
    for each in (plain, run):  # the difference to the rollout is told either way
        assert each.series("train/logp_abs_diff_mean")[0] == close(0.3 * math.sqrt(2 / math.pi), 0.05)
    assert run.series("time/recompute")[0] > 0


def test_decoupled_loss_weighs_by_the_distance_to_the_sampling_policy(grpo: Variant, before: list[Any]) -> None:
    run = grpo("variant=decoupled", "actor.reduction=token_mean", "total_train_steps=1")
    expected = [np.exp(prox - behave) for behave, prox in before]
    weights = [trained(row, "weights") for row in run.rows[0]]
    assert np.concatenate(weights) == close(np.concatenate(expected), 1e-4)
    assert run.series("train/weights_mean")[0] == close(np.concatenate(expected).mean(), 1e-4)
    assert run.series("train/ratio_std")[0] < 1e-5  # the ratio that is clipped is that to the proximal policy
    values = [
        [-w * a for w, a in zip(trained(row, "weights"), trained(row, "advantages"), strict=True)]
        for row in run.rows[0]
    ]
    assert run.series("train/policy_loss")[0] == close(reduced(run.rows[0], values, "token_mean"))
    assert run.series("train/rejected_frac") == [0]


def test_decoupled_loss_without_a_forward_pass(grpo: Variant, stale: None) -> None:
    """alpha = 2/3 of the log-ratio is weight, a third is ratio."""
    settings = ["variant=decoupled", "total_train_steps=1", *WIDE]
    run = grpo(*settings, "actor.prox_logp_method=loglinear")
    assert "time/recompute" not in run.names()
    assert run.series("train/ratio_std")[0] == close(0.1, 0.03)
    assert run.series("train/weights_std")[0] == close(0.2, 0.06)
    recomputed = grpo(*settings, "actor.prox_logp_method=metrics")
    # The interpolation is off by a third of the noise; the loss is that of recompute.
    error = recomputed.series("train/prox_approx_abs_diff_mean")[0]
    assert error == close(0.3 * math.sqrt(2 / math.pi) / 3, 0.02)
    assert "train/prox_approx_abs_diff_mean" not in run.names()
    assert recomputed.series("train/ratio_std")[0] < 1e-5


def test_decoupled_gspo_weighs_the_row(gspo: Variant, before: list[Any]) -> None:
    run = gspo("variant=decoupled", "total_train_steps=1")
    weights = [np.exp(prox - behave).mean() for behave, prox in before]
    assert run.series("train/weights_mean")[0] == close(np.mean(weights), 1e-4)
    assert run.series("train/policy_loss")[0] == close(
        -np.mean([w * a for w, a in zip(weights, advantages(run.rows[0]), strict=True)]), 1e-4
    )


def test_truncated_importance_sampling(grpo: Variant, before: list[Any]) -> None:
    run = grpo("variant=tis", "actor.rejection_sampling.upper=1.2", "total_train_steps=1")
    expected = np.concatenate([np.minimum(np.exp(prox - behave), 1.2) for behave, prox in before])
    assert 0 < (expected == 1.2).sum() < expected.size
    assert run.series("train/weights_max")[0] == close(1.2)
    assert run.series("train/weights_mean")[0] == close(expected.mean(), 1e-4)
    assert run.series("train/rejected_frac") == [0]


@pytest.mark.parametrize("metric", ["ratio", "kl_k2"])
def test_tokens_too_far_off_are_masked(grpo: Variant, before: list[Any], metric: str) -> None:
    bound = {"ratio": ["upper=1.3", "lower=0.8"], "kl_k2": ["upper=0.05", "metric=kl_k2"]}[metric]
    mask = ["+actor.rejection_sampling.action=mask", *(f"+actor.rejection_sampling.{text}" for text in bound)]
    run = grpo("actor.use_decoupled_loss=true", *mask, "total_train_steps=1")
    logs = [prox - behave for behave, prox in before]
    passed = [(np.exp(log) <= 1.3) & (np.exp(log) >= 0.8) if metric == "ratio" else log**2 / 2 <= 0.05 for log in logs]
    share = np.concatenate(passed).mean()
    assert 0.1 < share < 0.95
    assert run.series("train/rejected_frac")[0] == close(1 - share)
    for row, log, kept in zip(run.rows[0], logs, passed, strict=True):
        assert trained(row, "weights") == close(np.exp(log[kept]), 1e-4)
    assert run.series("train/response_len")[0] == close(np.mean([kept.sum() for kept in passed if kept.any()]), 1e-4)


def test_rows_too_far_off_are_masked(grpo: Variant, before: list[Any]) -> None:
    level = ["level=sequence", "action=mask", "upper=1.1", "lower=0.9"]
    run = grpo(
        "actor.use_decoupled_loss=true", *(f"+actor.rejection_sampling.{text}" for text in level), "total_train_steps=1"
    )
    means = [float(np.exp((prox - behave).mean())) for behave, prox in before]
    kept = [0.9 <= mean <= 1.1 for mean in means]
    assert 0 < sum(kept) < len(kept)
    for row, is_kept, mean in zip(run.rows[0], kept, means, strict=True):
        weights = trained(row, "weights")
        assert (len(weights) > 0) == is_kept
        assert weights == close([mean] * len(weights), 1e-4)


@pytest.mark.parametrize("recipe", ["grpo", "gspo"])
def test_m2po_masks_the_farthest_tokens(request: pytest.FixtureRequest, before: list[Any], recipe: str) -> None:
    settings = {"grpo": ["variant=m2po"], "gspo": WIDE}[recipe]
    run = request.getfixturevalue(recipe)(*settings, "actor.m2_threshold=0.02", "total_train_steps=1")
    log_r = np.concatenate([prox - behave for behave, prox in before])
    a = np.concatenate([trained(row, "advantages") for row in run.rows[0]])
    candidates = sorted(np.flatnonzero(log_r * a > 0), key=lambda t: log_r[t] ** 2)
    left = list(candidates)
    while left and np.mean([log_r[t] ** 2 for t in left]) > 0.02:
        left.pop()
    masked = sorted(set(candidates) - set(left))
    assert 0 < len(masked) < len(candidates)
    assert run.series("train/m2_masked_frac")[0] == close(len(masked) / len(log_r))
    weights = np.concatenate([trained(row, "weights") for row in run.rows[0]])
    assert np.flatnonzero(weights == 0).tolist() == masked
    assert set(weights) == {0.0, 1.0}
    assert run.series("train/response_len")[0] == close(len(log_r) / 16)  # they keep their place in the mean
    assert run.series("train/ratio_std")[0] > (0.2 if recipe == "grpo" else 0.05)  # to the policy that sampled


def test_on_policy_rows_have_nothing_to_correct(grpo: Variant) -> None:
    plain = grpo()
    run = grpo("actor.use_decoupled_loss=true", "actor.m2_threshold=0.04", "+actor.rejection_sampling.action=mask")
    assert run.series("train/m2_masked_frac") == run.series("train/rejected_frac") == [0, 0]
    assert run.series("train/weights_mean") == close([1.0, 1.0], 1e-4)
    assert run.series("train/grad_norm") == close(plain.series("train/grad_norm"), 1e-3)
    assert run.series("train/loss") == close(plain.series("train/loss"), 1e-4)


# PPO has the same settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (["actor.use_cispo_loss=true", "actor.eps_clip=1.0"], "train/clip_frac_high"),
        (["variant=sapo"], "train/sapo_gate"),
        (["actor.importance_sampling_level=sequence", "actor.eps_clip=3e-4"], "train/clip_frac_low"),
        (["actor.m2_threshold=0.02"], "train/m2_masked_frac"),
        (["actor.use_decoupled_loss=true", "actor.prox_logp_method=metrics"], "train/prox_approx_abs_diff_mean"),
        (["actor.use_decoupled_loss=true", "actor.prox_logp_method=loglinear"], "train/weights_std"),
        (["actor.use_decoupled_loss=true", "+actor.rejection_sampling.upper=1.2"], "train/rejected_frac"),
        (["actor.recompute_logprob=true"], "time/recompute"),
        (["actor.ppo_n_minibatches=4", "critic.ppo_n_minibatches=2"], "train/ratio_std"),
    ],
)
def test_variants_of_ppo(ppo: Variant, stale: None, settings: list[str], name: str) -> None:
    run = ppo(*settings)
    assert len(run.rows) == len(run.critic_rows) == 2
    assert run.series(name)[0] > 0
    assert all(norm > 0 for norm in run.series("train/grad_norm"))
    assert run.series("train/skipped_steps") == run.series("train/critic_skipped_steps") == [0, 0]


# The commands of docs/algorithms.md ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "command"),
    [(section, line) for section, line in commands() if ".sft" not in line and ".dpo" not in line],
)
def test_commands_of_the_page_run(section: str, command: str, tmp_path: Path) -> None:
    """As they stand there, on the quickstart's task, for two steps."""
    words = shlex.split(command)
    settings = [word for word in words[3:] if "--" not in word]
    recipe = words[2].removeprefix("areno.recipes.")
    n_tokens = ["gconfig.max_new_tokens=120"] if any("overlong_tokens" in word for word in words) else []
    n_tokens += ["actor.overlong_tokens=100"] if n_tokens else []
    task = "quickstart_ppo" if recipe == "ppo" else "quickstart"
    warmup = ["critic.warmup_steps=0"] if recipe == "ppo" else []
    run = play(recipe, tmp_path / "run", "reward.workers=1", *settings, *n_tokens, *warmup, task=task)
    assert run.series("train/skipped_steps") == [0, 0]
    assert all(math.isfinite(value) for value in run.series("train/loss"))
    assert MODEL.is_dir()
