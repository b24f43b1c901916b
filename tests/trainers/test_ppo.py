"""The loop of PPO: a step against transformers and formulas written out, several steps, ranks, the quickstart."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import areno
from areno.config.models import RefConfig
from areno.config.reward import RewardConfig
from areno.launch.compose import load
from areno.recipes.ppo import PPOConfig
from tests.helpers import warm_python
from tests.helpers.policy_runs import MODEL, trained
from tests.helpers.ppo_runs import (
    close,
    digits,
    digits_of,
    fitted,
    hf_logprobs,
    hf_score,
    hf_values,
    optimizer,
    ppo_config,
    scalars_of,
    without_reference,
)


@pytest.mark.parametrize("kl_in_reward", [True, False])
def test_one_step_is_what_the_formulas_say(tmp_path: Path, models: dict[str, Path], kl_in_reward: bool) -> None:
    """Rows, values, GAE, whitening, returns and both losses, recomputed from the tokens alone."""
    actor = {
        "kl_ctl": 0.3,
        "use_kl_in_reward": kl_in_reward,
        "kl_estimator": "k1" if kl_in_reward else "k2",
        "discount": 0.9,
        "gae_lambda": 0.8,
        "reward_scaling": 0.5,
    }
    config = ppo_config(
        tmp_path,
        actor if kl_in_reward else {**actor, "adv_norm": None},
        {"path": str(models["critic"]), "value_loss_coef": 0.25},
        ref=RefConfig(path=str(models["lm"])),
        reward=RewardConfig(path=str(models["reward"]), workers=1),
    )
    played = fitted(config, tmp_path / "run", digits)
    [rows], [critic_rows] = played.rows, played.critic_rows
    assert len(rows) == 8

    all_advantages: list[float] = []
    all_returns: list[float] = []
    all_values: list[float] = []
    all_kl: list[float] = []
    all_log_r: list[float] = []
    for row, critic_row in zip(rows, critic_rows, strict=True):
        assert row.reward == close(0.5 * (digits_of(row) + hf_score(models["reward"], row)))
        assert trained(row, "logprobs") == close(hf_logprobs(MODEL, row))
        values, ref = hf_values(models["critic"], row), hf_logprobs(models["lm"], row)
        assert np.std(values) > 0.01
        assert trained(row, "values") == close(values)
        assert trained(row, "ref_logprobs") == close(ref)
        log_r = [old - new for old, new in zip(trained(row, "logprobs"), ref, strict=True)]
        earned = [-0.3 * x if kl_in_reward else 0.0 for x in log_r]
        earned[-1] += row.reward
        advantage, advantages = 0.0, []
        for t in reversed(range(len(values))):
            following = values[t + 1] if t + 1 < len(values) else 0.0
            advantage = earned[t] + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            advantages.insert(0, advantage)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        assert trained(row, "returns") == trained(critic_row, "returns") == close(returns)
        all_advantages += advantages
        all_returns += returns
        all_values += values
        all_kl += [x * x / 2 for x in log_r]
        all_log_r += log_r
    found = [a for row in rows for a in trained(row, "advantages")]
    policy = 0.0  # the mean of whitened advantages, at the ratio 1
    if kl_in_reward:
        mean, std = np.mean(all_advantages), np.std(all_advantages)
        assert found == close((np.array(all_advantages) - mean) / (std + 1e-6), 1e-3)
    else:
        assert found == close(all_advantages)
        policy = -np.mean(all_advantages)

    errors = np.array(all_returns) - np.array(all_values)
    [scalars] = [row for row in scalars_of(tmp_path / "run") if "train/loss" in row]
    assert scalars["train/critic_value_loss"] == close(np.mean(errors**2))  # of the critic as it was
    assert scalars["train/critic_loss"] == close(0.25 * np.mean(errors**2))
    assert scalars["train/explained_variance"] == close(1 - np.var(errors) / np.var(all_returns), 1e-3)
    assert scalars["train/policy_loss"] == close(policy)
    assert ("train/kl_loss" in scalars) != kl_in_reward
    kl_of_rewards = [row["rollout/ref_kl"] for row in scalars_of(tmp_path / "run") if "rollout/ref_kl" in row]
    assert kl_of_rewards == ([close(np.mean(all_log_r))] if kl_in_reward else [])
    if not kl_in_reward:
        assert scalars["train/kl_loss"] == close(np.mean(all_kl))
        assert scalars["train/loss"] == close(policy + 0.3 * np.mean(all_kl))
    assert scalars["train/grad_norm"] > 0
    assert scalars["train/critic_grad_norm"] > 0


def test_the_critic_passes_over_the_batch_twice(tmp_path: Path, models: dict[str, Path]) -> None:
    found = []
    for epochs in (1, 2):
        own = {"path": str(models["critic"]), "epochs": epochs, "optimizer": optimizer(1e-3)}
        config = ppo_config(tmp_path, critic=own, **without_reference())
        played = fitted(config, tmp_path / f"{epochs}", digits)
        assert [len(rows) for rows in played.critic_rows] == epochs * [len(played.rows[0])]
        for rows in played.critic_rows[1:]:
            assert [trained(row, "values") for row in rows] == [trained(row, "values") for row in played.critic_rows[0]]
        found.append(played.series("train/critic_value_loss")[0])
    assert found[1] < found[0]  # the mean of both: the second loss is lower


def test_a_critic_whose_attention_is_frozen(tmp_path: Path, models: dict[str, Path]) -> None:
    own = {"path": str(models["critic"]), "freeze_attention": True, "optimizer": optimizer(1e-2)}
    config = ppo_config(tmp_path, critic=own, total_train_steps=2, **without_reference())
    config.critic.optimizer.weight_decay = 0.5
    fitted(config, tmp_path / "run", digits)
    before = load_file(models["critic"] / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/latest/critic/model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".self_attn." in name}
    assert len(same) > 4


@pytest.mark.slow
def test_several_updates_of_actor_and_critic(tmp_path: Path, models: dict[str, Path]) -> None:
    """Actor ratios and critic values both move away from where the rows were made, and are clipped against that."""
    config = ppo_config(
        tmp_path,
        critic={"path": str(models["critic"]), "ppo_n_minibatches": 4, "eps_clip": 0.05, "optimizer": optimizer(1e-2)},
        **without_reference(ppo_n_minibatches=2, optimizer=optimizer(1e-2)),
    )
    played = fitted(config, tmp_path / "run", digits)
    [ratio_std], [clipped] = played.series("train/ratio_std"), played.series("train/critic_value_clip_frac")
    assert ratio_std > 0.01
    assert 0.1 < clipped < 1
    # One update each: the ratio is 1, and no value has moved yet. A wide clip holds none back.
    for updates, eps_clip in ((1, 0.05), (4, 100.0)):
        how = {"ppo_n_minibatches": updates, "eps_clip": eps_clip, "optimizer": optimizer(1e-2)}
        config = ppo_config(tmp_path, critic={"path": str(models["critic"]), **how}, **without_reference())
        played = fitted(config, tmp_path / f"{updates}", digits)
        assert played.series("train/ratio_std")[0] < 1e-4
        assert played.series("train/critic_value_clip_frac") == [0]


@pytest.mark.slow
def test_warm_up_trains_the_critic_alone(tmp_path: Path) -> None:
    how = {"critic": {"warmup_steps": 2}, **without_reference()}
    two_steps = {"total_train_steps": None, "total_train_n_seqs": 16}
    played = fitted(ppo_config(tmp_path, **two_steps, **how), tmp_path / "two", digits)
    saved = tmp_path / "two/checkpoints/latest"
    start, end = load_file(MODEL / "model.safetensors"), load_file(saved / "model.safetensors")
    assert start.keys() == end.keys()
    assert all(torch.equal(start[name], end[name]) for name in start)
    critic = load_file(saved / "critic/model.safetensors")
    assert critic["score.weight"].abs().max() > 0  # it starts at 0
    moved = [name for name, value in start.items() if name in critic and not torch.equal(value, critic[name])]
    assert len(moved) > 20
    assert not played.rows
    assert [len(rows) for rows in played.critic_rows] == [8, 8]
    assert all(value == 0 for row in played.critic_rows[0] for value in row.values or [])
    assert any(value != 0 for row in played.critic_rows[1] for value in row.values or [])
    assert not {"train/loss", "time/train", "train/ratio_mean"} & played.names()
    warning = "critic.warmup_steps=2 takes all 2 steps of this run, so its checkpoint is the untrained policy"
    lines = (tmp_path / "two/logs/run.log").read_text().splitlines()
    assert warning in "\n".join(lines)
    untrained = (
        "no stored weight differs from the start (critic.warmup_steps=2 took all steps; lower it, or train longer)"
    )
    assert untrained in lines[-1]
    assert {"train/critic_loss", "train/explained_variance", "time/train_critic", "time/values"} <= played.names()

    played = fitted(ppo_config(tmp_path, total_train_steps=3, **how), tmp_path / "three", digits)
    end = load_file(tmp_path / "three/checkpoints/latest/model.safetensors")
    assert sum(not torch.equal(start[name], end[name]) for name in start) > 20
    said = (tmp_path / "three/logs/run.log").read_text()
    assert "so its checkpoint is the untrained" not in said
    assert "no stored weight differs" not in said
    assert len(played.rows) == 1
    assert len(played.series("train/loss")) == 1
    assert len(played.series("train/critic_loss")) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_quickstart_learns_with_a_critic(seed: int, tmp_path: Path) -> None:
    started = time.perf_counter()
    root = str(Path(areno.__file__).parents[1])
    words = ["-m", "areno.recipes.ppo", f"seed={seed}", "trial_name=t"]
    done = warm_python.commands().run(words, tmp_path, {**os.environ, "PYTHONPATH": root}, timeout=900)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stderr[-3000:]
    found = scalars_of(tmp_path / "outputs/quickstart_ppo/t")
    rewards, explained, accuracies = (
        [row[name] for row in found if name in row]
        for name in ("rollout/rewards_mean", "train/explained_variance", "eval/accuracy")
    )
    last, variance = np.mean(rewards[-5:]), np.mean(explained[-10:])
    print(f"seed {seed}: {seconds:.1f} s, {rewards[0]:.3f} -> {last:.3f}, held out {accuracies[0]:.3f} -> ", end="")
    print(f"{accuracies[-1]:.3f}, explained variance {variance:.2f}")
    assert rewards[0] <= 0.5
    assert last >= 0.85
    assert variance > 0.3
    assert accuracies[-1] >= 0.9
    # While the critic learned alone, the policy stayed what it was.
    warmup = load(PPOConfig, "quickstart_ppo", []).critic.warmup_steps
    assert len([row for row in found if "train/loss" in row]) == len(rewards) - warmup
    assert math.isclose(np.mean(rewards[:warmup]), rewards[0], abs_tol=0.05)
