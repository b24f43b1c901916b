"""The Trainer as a script uses it: training, custom losses, metrics, roles, checkpoints, ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer
from areno.config.models import ROWS_COUNTED
from areno.errors import EngineError
from tests.helpers.sdk_script import LR, MODEL, loss, made, plain_rows, rows_of, sampled, tokens_of


@pytest.mark.slow
def test_a_few_steps_teach_something(tmp_path: Path) -> None:
    from areno.loss_fns import gspo_loss_fn

    with made(optimizer={**LR, "lr": 1e-3}) as trainer:
        means = []
        for _ in range(12):
            results = sampled(trainer, ["17+25=", "38+44="], 32)
            rows = rows_of(results)
            for row, sequence in zip(rows, (s for r in results for s in r.sequences), strict=True):
                row.reward = float(sequence.resp_tokens[0] == 8)  # the digit 4
                row.advantages = [row.reward - 0.5] * len(row.tokens or [])
            means.append(sum(row.reward for row in rows) / len(rows))
            trainer.train(rows, partial(gspo_loss_fn, clip_eps=0.2))
        assert means[-1] > means[0] + 0.2, means


def test_training_is_at_the_temperature_of_the_last_rollout(trainer: Trainer) -> None:
    from areno.loss_fns import grpo_loss_fn

    hot = SamplingParams(max_new_tokens=6, temperature=0.5)
    rows = rows_of(sampled(trainer, params=hot))
    stats = trainer.train(rows, grpo_loss_fn)
    assert stats["logp_abs_diff_max"] < 1e-4
    rows = rows_of(sampled(trainer, params=hot))
    assert trainer.train(rows, grpo_loss_fn, temperature=1.0)["logp_abs_diff_max"] > 1e-2
    rows = rows_of(sampled(trainer, params=hot))
    scored = trainer.score_logprobs("actor", [row.tokens or [] for row in rows])
    for row, logprobs in zip(rows, scored, strict=True):
        n_prompt = sum(row.prompt_mask or [])
        assert logprobs[n_prompt:] == pytest.approx((row.logprobs or [])[n_prompt:], abs=1e-4)


def test_fp8_in_both_phases() -> None:
    """The actor and its reference compute in FP8 before training, to the bit in exact mode."""
    runtime = {"exact": True, "fp8_config": {"exclude_modules": ["o_proj"]}, "kv_cache_dtype": "fp8"}
    with made(runtime=runtime) as trainer, made() as plain:
        rows = rows_of(sampled(trainer))
        trainer.ensure_roles({"ref": ModelRole("ref", MODEL, trainable=False)})
        tokens = [row.tokens or [] for row in rows]
        scored, by_ref = (trainer.score_logprobs(role, tokens) for role in ("actor", "ref"))
        assert scored == by_ref
        assert plain.score_logprobs("actor", tokens) != scored
        for row, logprobs in zip(rows, scored, strict=True):
            n_prompt = sum(row.prompt_mask or [])
            assert logprobs[n_prompt:] == (row.logprobs or [])[n_prompt:]


class Scaled:
    """A loss that is an object."""

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, pack: Any, logprobs: Any) -> Any:
        value, stats = loss(pack, logprobs)
        return value * self.scale, stats


def scaled(pack: Any, logprobs: Any, *, scale: float) -> Any:
    return Scaled(scale)(pack, logprobs)


@pytest.mark.parametrize("workers", ["inline", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_form_of_a_custom_loss(workers: str) -> None:
    """All double the same loss."""
    scale = 2.0

    def closure(pack: Any, logprobs: Any) -> Any:
        return -scale * pack.token_mean(pack.trained(logprobs)), {"own": pack.trained(logprobs)}

    with made(optimizer={**LR, "lr": 1e-9}, runtime={"workers": workers}) as trainer:
        expected = 2 * trainer.train(plain_rows(), loss)["loss"]
        forms = [
            closure,
            lambda pack, lp: (scale * loss(pack, lp)[0], {}),
            partial(scaled, scale=scale),
            partial(lambda pack, lp, factor: (factor * loss(pack, lp)[0], {}), factor=scale),
            Scaled(scale),
        ]
        for form in forms:
            assert trainer.train(plain_rows(), form)["loss"] == pytest.approx(expected, abs=1e-4)
        assert {"own_mean", "own_std", "own_max"} <= set(trainer.train(plain_rows(), closure))


def test_metrics_of_a_script(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from areno.loss_fns import gspo_loss_fn

    with made(metrics_log_dir=str(tmp_path)) as trainer:
        trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, 1e-3)})
        for _ in range(2):
            [batch] = trainer.load_prompt_batches(
                [{"prompt": "8+7="}, {"prompt": "1" * 50}], batch_size=1, max_prompt_tokens=9
            )
            rows = rows_of(sampled(trainer, [item.prompt for item in batch.items]))
            for row in rows:
                row.values = row.returns = [0.5] * len(row.tokens or [])
            trainer.score_logprobs("actor", [row.tokens or [] for row in rows])
            trainer.train_values("critic", rows)
            stats = trainer.train(rows, gspo_loss_fn)
    assert stats["step_e2e_time_s"] >= stats["step_rollout_time_s"] + stats["step_train_time_s"] > 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in stats} <= names
    assert {"time/rollout", "time/score", "time/train", "time/train_critic", "time/step"} <= names
    assert {"train/critic_loss", "train/critic_value_loss", "train/critic_lr"} <= names
    for name, value in [
        ("rewards_mean", 0.5),
        ("rewards_std", 0.5),
        ("rewards_max", 1.0),
        ("rewards_min", 0.0),
        ("accuracy", 0.5),
        ("advantages_mean", 0.0),
        ("advantages_std", 1.0),
        ("prompt_len_mean", 4.0),
        ("num_sequences", 2.0),
        ("skipped_long", 1.0),
    ]:
        assert [event.value for event in events.Scalars(f"rollout/{name}")] == [value, value]
    assert {"rollout/logprobs_mean", "rollout/seq_len_mean", "rollout/response_len_mean"} <= names
    assert [event.value for event in events.Scalars("rollout/total_skipped_long")] == [1.0, 2.0]
    for name in ("train/loss", "train/critic_loss", "rollout/accuracy"):
        assert [event.step for event in events.Scalars(name)] == [1, 2]


def test_what_a_role_name_stands_for(trainer: Trainer, tmp_path: Path) -> None:
    from areno.plan.roles import script_roles

    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForSequenceClassification"]}))
    roles = [
        ModelRole("ref", MODEL, False),
        ModelRole("critic", MODEL, True, 3e-5),
        ModelRole("reward", str(judge), False),
        ModelRole("teacher", MODEL, False),
        ModelRole("judge", MODEL, False),
        ModelRole("scorer", str(judge), False),
        ModelRole("value", MODEL, True),
    ]
    specs = script_roles({role.name: role for role in roles}, trainer.engine.spec.actor)
    assert {name: (spec.head, spec.needs_head) for name, spec in specs.items()} == {
        "ref": ("lm", False),
        "critic": ("value", False),
        "reward": ("value", True),
        "teacher": ("lm", False),
        "judge": ("lm", False),
        "scorer": ("value", False),
        "value": ("value", False),
    }
    rates = {name: spec.optimizer and spec.optimizer.lr for name, spec in specs.items()}
    assert {name: rate for name, rate in rates.items() if rate} == {"critic": 3e-5, "value": LR["lr"]}
    assert specs["critic"].optimizer == replace(specs["value"].optimizer, lr=3e-5)


def test_reference_and_critic_of_one_step(tmp_path: Path) -> None:
    from areno.loss_fns import grpo_loss_fn

    with made() as trainer:
        trainer.ensure_roles(
            {"ref": ModelRole("ref", MODEL, False), "critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-2)}
        )
        rows = rows_of(sampled(trainer, n_samples=4))
        tokens = [row.tokens or [] for row in rows]
        before = trainer.score_logprobs("ref", tokens)
        assert before == trainer.score_logprobs("actor", tokens)  # a copy of the actor as it starts
        for row, ref, values in zip(rows, before, trainer.score_values("critic", tokens), strict=True):
            assert values == [0.0] * len(values)
            row.ref_logprobs, row.values, row.returns = ref, values, [1.0] * len(values)
        losses = [trainer.train_values("critic", rows, 4, cliprange_value=9.0)["value_loss"] for _ in range(6)]
        assert losses[0] == pytest.approx(1.0)
        assert losses[-1] < 0.5 * losses[0]
        assert trainer.train(rows, partial(grpo_loss_fn, kl_coef=0.1))["kl_loss"] == pytest.approx(0.0, abs=1e-6)
        assert trainer.score_logprobs("ref", tokens) == before != trainer.score_logprobs("actor", tokens)
        trainer.write_checkpoint(tmp_path / "critic", role="critic")
        with pytest.raises(EngineError, match="role 'critic' is loaded already"):
            trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-3)})
        trainer.ensure_roles({"critic": ModelRole("critic", MODEL, True, optimizer_lr=1e-2)})  # what it is already
        trainer.ensure_roles({"reward": ModelRole("reward", str(tmp_path / "critic"), False)})
        rewards = trainer.score_rewards("reward", tokens)
        assert len(rewards) == len(tokens)
        assert min(rewards) > 0.1
        with pytest.raises(EngineError, match="reward"):
            trainer.train_values("reward", rows)
        with pytest.raises(EngineError, match="ref"):
            trainer.score_values("ref", tokens)
        trainer.release_role("ref")
        with pytest.raises(EngineError, match="ref"):
            trainer.score_logprobs("ref", tokens)


def test_a_checkpoint_is_a_model_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with made() as trainer:
        for _ in range(2):  # the second replaces the first
            trainer.train(plain_rows(), loss)
            path = trainer.save_checkpoint(str(tmp_path / "runs" / "last"))
        assert path == str(tmp_path / "runs" / "last")
        scored = trainer.score_logprobs("actor", [[4, 5, 6, 1]], 1.0)
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["last"]
    import torch

    tokens = torch.tensor([[4, 5, 6, 1]])
    logits = AutoModelForCausalLM.from_pretrained(path)(tokens).logits[0].log_softmax(-1)
    assert scored[0][1:] == pytest.approx(logits[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist(), abs=1e-4)
    with Trainer(1, path, custom_config=ArenoConfig(runtime={"device": "cpu"})) as again:
        again.init()
        assert again.score_logprobs("actor", [[4, 5, 6, 1]], 1.0)[0] == pytest.approx(scored[0], abs=1e-6)


def test_weights_from_another_folder(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(MODEL) / "config.json").read_bytes())
    config = {"model_path": tmp_path, "dummy_load": True}
    drawn = []
    for seed in (1, 1, 2):
        with made(**config, runtime={"seed": seed}) as random:
            assert random.get_tokenizer().get_vocab() == trainer.get_tokenizer().get_vocab()
            drawn.append(random.score_logprobs("actor", [[4, 5, 6]], 1.0))
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != trainer.score_logprobs("actor", [[4, 5, 6]], 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_two_ranks_are_as_one(tp_size: int, tmp_path: Path) -> None:
    from areno.loss_fns import gspo_loss_fn

    def two_steps(world_size: int, tp_size: int) -> list[Any]:
        seen: list[Any] = []
        with made(world_size, tp_size=tp_size, dp_size=world_size // tp_size, optimizer={**LR, "lr": 1e-3}) as trainer:
            trainer.ensure_roles(
                {"critic": ModelRole("critic", MODEL, True, 1e-2), "ref": ModelRole("ref", MODEL, False)}
            )
            for step in range(2):
                results = sampled(trainer, ["12+19=", "8+7=", "55+6="], 4, seed=step)
                seen.append(tokens_of(results))
                rows = rows_of(results)
                tokens = [row.tokens or [] for row in rows]
                for row, values in zip(rows, trainer.score_values("critic", tokens), strict=True):
                    row.values, row.returns = values, [row.reward] * len(values)
                seen.append(trainer.train_values("critic", rows, 2)["value_loss"])
                seen.append(trainer.train(rows, gspo_loss_fn, mini_bs=2)["loss"])
                seen.append(trainer.score_logprobs("ref", tokens, 1.0)[0][1])
            with pytest.raises(EngineError, match="has no gradient"):
                trainer.train(rows, lambda pack, lp: (lp.detach().sum(), {}))
            trainer.save_checkpoint(tmp_path / f"{world_size}-{tp_size}")
        return seen

    for one, two in zip(two_steps(1, 1), two_steps(2, tp_size), strict=True):
        assert one == (two if isinstance(two, list) else pytest.approx(two, abs=1e-4))


def test_counted_micro_batches_have_as_many_rows_as_in_a_recipe() -> None:
    with made() as trainer:
        trainer.train(plain_rows(ROWS_COUNTED + 1), loss, gradient_accumulation_steps=1)
        assert trainer.engine.weights_version == 2
        trainer.train(plain_rows(ROWS_COUNTED), loss, gradient_accumulation_steps=1)
        assert trainer.engine.weights_version == 3
