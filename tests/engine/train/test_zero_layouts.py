"""Layouts with the optimizer whole or divided: each trains as one rank does, and reads the states of the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.engine.engine import Engine
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.critics import critic, critic_rows
from tests.helpers.states import content, same, saved
from tests.helpers.tiny_engine import MIXED, model_folder, rollout, saved_tensors, spec, tokens_of, train_rows

# An eps that makes a step smooth in the gradient: the sign of one that is almost 0 does not matter.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
}
LAYOUTS = [(1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 4, 1), (1, 4, 2), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 1, 1), (4, 1, 1)]
IN_CONTEXT = [(1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 4, 1), (2, 2, 1)]  # where two copies share the tokens of each row


def folder_of(path: Path, family: str) -> Path:
    """A vocabulary that ranks do not divide, and as many key heads as the largest layout needs."""
    values = json.loads((model_folder(path, vocab_size=65) / "config.json").read_text()) | FAMILIES[family]
    values |= {"num_key_value_heads": 4, "num_hidden_layers": 3}
    (path / "config.json").write_text(json.dumps(values))
    return path


def engine_of(folder: Path, tp_size: int = 1, dp_size: int = 1, zero_stage: int = 1, **how: Any) -> Engine:
    optimizer = how.pop("optimizer", OPTIMIZER)
    layout = {"devices": tp_size * dp_size, "tp_size": tp_size, "zero_stage": zero_stage}
    engine = Engine(spec(folder, optimizer=optimizer, **layout, **how))
    engine.ensure_roles({"critic": critic(folder, optimizer=optimizer)})
    return engine


def pairs() -> list[TrainSequence]:
    """Five of them: chosen, then rejected."""
    rows = []
    for index in range(10):
        tokens = [(index * 7 + place * 5) % 60 + 2 for place in range(4 + index)]
        n = len(tokens)
        rows.append(TrainSequence([True] * 2 + [False] * (n - 2), tokens, ref_logprobs=[-3.0] * n))
    return rows


def train(engine: Engine, rows: list[TrainSequence]) -> list[dict[str, float]]:
    """A step of each kind, with odd numbers of rows."""
    spec = MicroBatchSpec(mini_bs=2)
    pair_update = UpdateSpec(spec, rows_per_unit=2)
    return [
        engine.train(rows[:9], partial(grpo_loss_fn, clip_eps=0.2), UpdateSpec(spec)),
        engine.train(critic_rows(), value_loss_fn, UpdateSpec(spec), role="critic"),
        engine.train(pairs(), partial(dpo_loss_fn, beta=0.1), pair_update),
        engine.train(rows[:5], sft_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=20))),
        engine.train(critic_rows(), value_loss_fn, UpdateSpec(spec), role="critic"),
        # Fewer rows than there are copies of the model.
        engine.train(rows[:1], partial(gspo_loss_fn, clip_eps=0.2), UpdateSpec(spec)),
        engine.train(critic_rows()[:1], value_loss_fn, UpdateSpec(spec), role="critic"),
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What one rank does."""
    path = tmp_path_factory.mktemp("one")
    folder = folder_of(path / "model", request.param)
    with engine_of(folder) as engine:
        requests = [item for item in MIXED if item.params.temperature == 1]
        rows = train_rows(rollout(engine, requests), requests)
        found: dict[str, Any] = {"folder": folder, "rows": rows, "stats": train(engine, rows)}
        for role in ("actor", "critic"):
            engine.save(str(path / role), role)
            found[role] = saved_tensors(path / role)
        yield found | {"tokens": tokens_of(rollout(engine))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp_size", "dp_size", "zero_stage", "cp_size"),
    [*((*layout, 1) for layout in LAYOUTS), *((*layout, 2) for layout in IN_CONTEXT)],
)
def test_every_layout_is_as_one_rank(
    one: dict[str, Any], tmp_path: Path, tp_size: int, dp_size: int, zero_stage: int, cp_size: int
) -> None:
    """Loss and gradient norm, weights after several steps, greedy tokens and samples drawn from seeds."""
    with engine_of(one["folder"], tp_size, dp_size, zero_stage, cp_size=cp_size) as engine:
        for found, expected in zip(train(engine, one["rows"]), one["stats"], strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5, abs=1e-5)
            assert expected["grad_norm"] > 0
        for role in ("actor", "critic"):
            engine.save(str(tmp_path / role), role)
            weights = saved_tensors(tmp_path / role)
            assert weights.keys() == one[role].keys()
            for name, weight in weights.items():
                torch.testing.assert_close(weight, one[role][name], atol=1e-5, rtol=0)
        assert tokens_of(rollout(engine)) == one["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "adam_8bit", "sgd"])
def test_a_state_is_of_any_division(tmp_path: Path, kind: Any) -> None:
    """Written on some ranks, read on others: weights, masters and moments are equal to the bit."""
    folder = folder_of(tmp_path / "model", "llama")
    optimizer = OptimizerConfig(type=kind, lr=1e-2, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
    layouts = [(1, 1, 1), (1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 3, 1)] + [(1, 4, 1), (2, 2, 1)] * (kind == "adam")
    engines = [engine_of(folder, *layout, dtype="bfloat16", optimizer=optimizer) for layout in layouts]
    try:
        rows = critic_rows()
        for writer, engine in enumerate(engines[:4]):
            engine.train(rows, sft_loss_fn)
            engine.train(rows, value_loss_fn, role="critic")
            state = saved(engine, tmp_path / f"state-{writer}")
            expected = content(state)
            for reader, other in enumerate(engines):
                other.load_state(state)
                path = tmp_path / f"again-{writer}-{reader}"
                assert same(content(saved(other, path)), expected), layouts[reader]
                other.save(str(path / "model"))
                for name, weight in saved_tensors(path / "model").items():
                    assert torch.equal(weight, expected[f"actor.master.{name}"].bfloat16()), (layouts[reader], name)
            assert engine.weights_version == writer + 1
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adam_8bit"])
def test_two_gpus_divide_the_optimizer(tmp_path: Path, kind: Any) -> None:
    """Over NCCL, with fused layers: as undivided up to the order of sums; the CUDA graphs read the gathered weights."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder = folder_of(tmp_path / "model", "qwen3")
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    found: list[tuple[list[dict[str, float]], dict[str, torch.Tensor], float]] = []
    for zero_stage in (0, 1, 2):
        build = spec(folder, optimizer=optimizer, dtype="bfloat16", zero_stage=zero_stage)
        with Engine(dataclasses.replace(build, devices=["cuda:0", "cuda:1"])) as engine:
            engine.ensure_roles({"critic": critic(folder, optimizer=optimizer, offload=True)})
            rollout(engine)  # graphs are captured before the first update
            stats = train(engine, train_rows(rollout(engine)))
            as_trained = [item for item in MIXED if item.params.temperature == 1]
            rows = train_rows(rollout(engine, as_trained), as_trained)
            again = engine.train(rows, partial(grpo_loss_fn, clip_eps=0.2), UpdateSpec(MicroBatchSpec(mini_bs=2)))
            state = saved(engine, tmp_path / f"state-{zero_stage}")
            engine.load_state(state)
            assert same(content(saved(engine, tmp_path / f"again-{zero_stage}")), content(state))
            engine.save(str(tmp_path / f"saved-{zero_stage}"))
            found.append((stats, saved_tensors(tmp_path / f"saved-{zero_stage}"), again["logp_abs_diff_max"]))
    for stats, weights, apart in found:
        assert apart < 0.1  # the rollout's weights are those of training
        for mine, expected in zip(stats, found[0][0], strict=True):
            assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, found[0][1][name], atol=1e-2, rtol=0)
