"""What stands beside the actor of PPO: reward models, critics, a reference; what a checkpoint has of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from areno.config.datasets import DatasetConfig
from areno.config.models import RefConfig
from areno.config.reward import RewardConfig
from areno.config.rollout import GenerationConfig
from areno.errors import CheckpointError
from tests.helpers.policy_runs import MODEL, trained
from tests.helpers.ppo_runs import (
    close,
    digits,
    digits_of,
    fitted,
    hf_score,
    hf_values,
    optimizer,
    ppo_config,
    scalars_of,
    without_reference,
)


@pytest.mark.parametrize(("with_model", "with_function"), [(True, False), (False, True), (True, True)])
def test_reward_of_a_model_a_function_or_both(
    tmp_path: Path, models: dict[str, Path], with_model: bool, with_function: bool
) -> None:
    path = str(models["reward"]) if with_model else None
    reward = RewardConfig(path=path, workers=1) if with_function else RewardConfig(path=path)
    config = ppo_config(tmp_path, reward=reward, **without_reference())
    played = fitted(config, tmp_path / "run", digits if with_function else None)
    expected = [with_model * hf_score(models["reward"], row) + with_function * digits_of(row) for row in played.rows[0]]
    assert np.std(expected) > 0.01
    assert [row.reward for row in played.rows[0]] == close(expected)
    assert played.series("rollout/rewards_mean")[0] == close(np.mean(expected))


def test_a_sample_without_a_reward_is_left_out(tmp_path: Path, models: dict[str, Path]) -> None:
    def picky(record: Any) -> float:
        if record.prompt.startswith("17"):
            raise ValueError("not this one")
        return 1.0

    config = ppo_config(
        tmp_path,
        train_dataset=DatasetConfig(batch_size=8, max_length=64),
        reward=RewardConfig(path=str(models["reward"]), workers=1),
        **without_reference(),
    )
    played = fitted(config, tmp_path / "run", picky)
    assert played.series("rollout/reward_errors") == [4]
    assert played.series("rollout/num_sequences") == [16]
    assert len(played.rows[0]) == len(played.critic_rows[0]) == 12


@pytest.mark.slow
def test_checkpoint_has_actor_and_critic(tmp_path: Path) -> None:
    how = {"critic": {"optimizer": optimizer(3e-3)}, **without_reference()}
    fitted(ppo_config(tmp_path, total_train_steps=2, **how), tmp_path / "first", digits)
    saved = tmp_path / "first/checkpoints/latest"
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(saved / "critic")
    assert type(critic).__name__ == "Qwen3ForSequenceClassification"
    assert critic.config.num_labels == 1
    assert type(transformers.AutoModelForCausalLM.from_pretrained(saved)).__name__ == "Qwen3ForCausalLM"
    how = {"critic": {"path": str(saved / "critic")}, **without_reference(path=str(saved))}
    second = fitted(ppo_config(tmp_path, **how), tmp_path / "second", digits)
    for row in second.critic_rows[0]:
        values = hf_values(saved / "critic", row)
        assert max(map(abs, values)) > 0.05
        assert trained(row, "values") == close(values)


def test_critic_from_another_language_model(tmp_path: Path, models: dict[str, Path]) -> None:
    """Takes the body; the head starts at 0."""
    how = {"critic": {"path": str(models["lm"]), "optimizer": optimizer(1e-8)}, **without_reference()}
    played = fitted(ppo_config(tmp_path, **how), tmp_path / "run", digits)
    assert all(value == 0 for row in played.critic_rows[0] for value in row.values or [])
    saved = load_file(tmp_path / "run/checkpoints/latest/critic/model.safetensors")
    body = load_file(models["lm"] / "model.safetensors")
    own = load_file(MODEL / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(saved[name], body[name], atol=1e-6, rtol=0)
    assert (saved[name] - own[name]).abs().max() > 1e-3


@pytest.mark.slow
def test_critic_from_random_weights(tmp_path: Path, models: dict[str, Path]) -> None:
    """In the shape of its folder, which then needs no weights; the actor keeps those of its own folder."""
    empty = tmp_path / "shape"
    shutil.copytree(models["lm"], empty, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in (None, str(empty)):
        how = {"critic": {"path": path, "init_from_scratch": True, "optimizer": optimizer(1e-8)}, **without_reference()}
        fitted(ppo_config(tmp_path, **how), tmp_path / f"run-{path is None}", digits)
        saved = tmp_path / f"run-{path is None}/checkpoints/latest"
        own = load_file(MODEL / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        assert (load_file(saved / "critic/model.safetensors")[name] - own[name]).abs().max() > 1e-2
        assert (load_file(saved / "model.safetensors")[name] - own[name]).abs().max() < 1e-2
    with pytest.raises(CheckpointError, match=r"critic can start .* critic\.init_from_scratch=true"):
        fitted(ppo_config(tmp_path, critic={"path": str(empty)}, **without_reference()), tmp_path / "none", digits)


@pytest.mark.slow
def test_a_critic_that_skips_what_was_cut_off(tmp_path: Path) -> None:
    """The policy trains on these completions, the critic does not."""
    how = {"gconfig": GenerationConfig(n_samples=2, max_new_tokens=3), **without_reference()}
    rows = [{"prompt": prompt, "solutions": ""} for prompt in ("17+5=", "98+97=", "28+6=", "99+89=")]
    plain = fitted(ppo_config(tmp_path, **how), tmp_path / "plain", digits, train_dataset=rows)
    config = ppo_config(tmp_path, critic={"mask_no_eos_with_zero": True}, **how)
    masked = fitted(config, tmp_path / "masked", digits, train_dataset=rows)
    tokens = [[list(row.tokens) for row in played.critic_rows[0]] for played in (plain, masked)]
    assert tokens[0] == tokens[1]
    ends = [len(trained(row, "values")) for row in plain.critic_rows[0]]
    kept = [len(trained(row, "values")) for row in masked.critic_rows[0]]
    cut = [row.tokens[-1] != row.eos_token_id for row in plain.critic_rows[0]]
    assert kept == [0 if is_cut else end for is_cut, end in zip(cut, ends, strict=True)]
    assert 0 < sum(cut) < len(cut)
    assert [len(trained(row, "advantages")) for row in masked.rows[0]] == ends


@pytest.mark.slow
def test_offloaded_roles_give_the_same_numbers(tmp_path: Path, models: dict[str, Path]) -> None:
    found = []
    for offload in (False, True):
        config = ppo_config(
            tmp_path,
            critic={"offload": offload},
            ref=RefConfig(path=str(models["lm"]), offload=offload),
            reward=RewardConfig(path=str(models["reward"]), offload=offload),
            total_train_steps=2,
        )
        fitted(config, tmp_path / str(offload))
        clock = re.compile("^time|time_s|tokens_per_second|memory")
        rows = scalars_of(tmp_path / str(offload))
        found.append([{name: value for name, value in row.items() if not clock.search(name)} for row in rows])
    assert found[0] == found[1]
    assert any(row.get("train/kl_loss", 0) > 0 for row in found[0])


def test_the_reference_is_the_actor_as_it_starts(tmp_path: Path) -> None:
    config = ppo_config(tmp_path, {"kl_ctl": 0.1, "optimizer": optimizer(5e-3)}, total_train_steps=3)
    kl = fitted(config, tmp_path / "run", digits).series("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert kl[2] > 1e-4


def test_a_step_without_a_token_to_train_on(tmp_path: Path) -> None:
    config = ppo_config(
        tmp_path,
        gconfig=GenerationConfig(n_samples=2, max_new_tokens=1),
        **without_reference(mask_no_eos_with_zero=True),
    )
    played = fitted(config, tmp_path / "run", digits)
    assert played.series("train/skipped_steps") == played.series("train/critic_skipped_steps") == [1]
    assert played.series("train/explained_variance") == [0]


def test_values_of_the_samples_own_critic_are_used_by_advantages_of_a_script(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """advantage_fn gets rows with values and returns advantages and returns."""

    def advantage_fn(rows: Any, groups: Any, actor: Any) -> Any:
        assert len(set(groups)) == 4
        values = [np.array(trained(row, "values")) for row in rows]
        return [row.reward - v for row, v in zip(rows, values, strict=True)], [0 * v + 3.0 for v in values]

    config = ppo_config(tmp_path, critic={"path": str(models["critic"])}, **without_reference())
    played = fitted(config, tmp_path / "run", digits, advantage_fn=advantage_fn)
    for row in played.rows[0]:
        assert trained(row, "returns") == [3.0] * len(trained(row, "values"))
        assert trained(row, "advantages") == close([row.reward - v for v in trained(row, "values")])
