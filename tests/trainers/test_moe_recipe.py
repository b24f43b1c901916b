"""A recipe trains a model with experts from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from areno.api.trainer import Trainer
from areno.config.models import PolicyConfig
from areno.errors import ConfigError
from areno.plan.sdk_arguments import ArenoConfig
from areno.types import SamplingParams, TrainSequence
from tests.helpers.moe_models import quickstart_with_experts
from tests.helpers.policy_runs import play


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_with_experts(tmp_path_factory.mktemp("sparse") / "model")


def _reward() -> Any:
    """Sums with many twos, so that there is something to learn.

    A function within a function travels by value: the reward process does not import this file.
    """
    return lambda record: record.completion.count("2") / 8


@pytest.mark.slow
def test_gspo_trains_a_model_with_experts(model: Path, tmp_path: Path) -> None:
    settings = [
        f"actor.path={model}",
        "actor.init_from_scratch=true",
        "actor.routing_replay=true",
        "actor.recompute_logprob=true",
        "actor.router_aux_loss_coef=0.01",
        "actor.optimizer.lr=1e-2",
        "actor.mb_spec.max_tokens_per_mb=128",
        "gconfig.temperature=1.0",
        "total_train_steps=8",
        "saver.freq_steps=null",
    ]
    run = play("gspo", tmp_path / "run", *settings, reward_fn=_reward())
    rewards = run.series("rollout/rewards_mean")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    assert max(run.series("train/logp_abs_diff_max")) < 1e-4
    assert max(run.series("train/router_changed")) < 0.01
    aux, entropy = run.series("train/router_aux_loss"), run.series("train/router_entropy")
    assert all(1.9 < value < 8 for value in aux)  # 2 where the loads are even, 8 where two experts have all
    assert all(0.1 < value <= 1 for value in entropy)
    total, loss = run.series("train/total_loss"), run.series("train/loss")
    assert total == pytest.approx([of_step + 0.01 * of_router for of_step, of_router in zip(loss, aux, strict=True)])
    assert all(row.routes is not None and len(row.routes) == len(row.tokens) - 1 for row in run.rows[0])
    [saved] = (tmp_path / "run/checkpoints").glob("step-*")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.isfinite(loaded(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_script_replays_the_experts_of_its_samples(model: Path) -> None:
    config = ArenoConfig(
        dummy_load=True,
        optimizer={"lr": 1e-3, "lr_scheduler_type": "constant"},
        runtime={"device": "cpu", "routing_replay": True, "gradient_checkpointing": False},
    )
    with Trainer(1, str(model), custom_config=config) as trainer:
        trainer.init()
        params = SamplingParams(max_new_tokens=8)
        with trainer.rollout_session(sampling_params=params, proxy=False):
            [result] = trainer.rollout_token_batch([[3, 4, 5, 6]], 3, params, seed=1)
        rows = [
            TrainSequence(
                tokens=result.prompt_tokens + sequence.resp_tokens,
                prompt_mask=[True] * 4 + [False] * len(sequence.resp_tokens),
                logprobs=[0.0] * 4 + sequence.resp_logprobs,
                routes=sequence.routes,
            )
            for sequence in result.sequences
        ]
        tokens = [row.tokens for row in rows]
        scored = trainer.score_logprobs("actor", tokens, routes=[row.routes for row in rows])
        for row, logprobs in zip(rows, scored, strict=True):
            assert logprobs[4:] == pytest.approx(row.logprobs[4:], abs=1e-4)
        others = [np.broadcast_to([1, 2], np.shape(row.routes)) for row in rows]
        assert trainer.score_logprobs("actor", tokens, routes=others) != scored


def test_replay_needs_experts_and_no_agents(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.routing_replay: is true, but the model has no experts"):
        play("gspo", tmp_path / "a", "actor.routing_replay=true", reward_fn=_reward())
    with pytest.raises(ConfigError, match=r"actor\.routing_replay: is true, but the turns of agents"):
        play("gspo", tmp_path / "b", "actor.routing_replay=true", "agent.fn=agent.py", f"actor.path={model}")
    assert not PolicyConfig(path="x").routing_replay
