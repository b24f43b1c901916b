"""Every layout of ranks trains, scores, samples and saves as one rank does: tensor, data, context and sequence
parallel, and an optimizer that data-parallel ranks divide (ZeRO)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.helpers.tiny_engine import (
    MIXED,
    folder_with,
    logprobs_of,
    rollout,
    saved_tensors,
    scored,
    spec,
    tokens_of,
    train_rows,
)

# An eps that makes a step smooth in the gradient: the sign of one that is almost 0 does not matter.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, lr_scheduler_type="constant", warmup_steps_proportion=0.0)
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": WIDE,
    "llama": WIDE | LLAMA,
    "two key-value heads": {"num_key_value_heads": 2, "attention_bias": True},
}


def layout(dp: int = 1, tp: int = 1, zero: int = 1, cp: int = 1, **more: Any) -> dict[str, Any]:
    """dp: ranks with other rows or, in a context of cp ranks, with other tokens of the same rows."""
    return {"devices": dp * tp, "tp_size": tp, "cp_size": cp, "zero_stage": zero, **more}


LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"dp{n}-zero{zero}": layout(dp=n, zero=zero) for n, zero in ((2, 0), (2, 1), (2, 2), (4, 1), (4, 2))},
    "tp2": layout(tp=2),
    "tp2-whole-tokens": layout(tp=2, sequence_parallel=False),
    "tp4": layout(tp=4),
    **{f"dp2-tp2-zero{zero}": layout(dp=2, tp=2, zero=zero) for zero in (0, 1, 2)},
    **{f"cp2-zero{zero}": layout(dp=2, cp=2, zero=zero) for zero in (0, 1, 2)},
    "cp4": layout(dp=4, cp=4),
    "dp2-cp2": layout(dp=4, cp=2),
    "tp2-cp2": layout(dp=2, tp=2, cp=2),
}
MATRIX = [("qwen3", name) for name in LAYOUTS]
# A head of its own meets each way of dividing once.
MATRIX += [
    ("llama", name) for name in ("dp2-zero2", "tp2", "tp2-whole-tokens", "tp4", "dp2-tp2-zero1", "cp2-zero1", "tp2-cp2")
]
MATRIX.append(("two key-value heads", "tp4"))  # each head is on two ranks

TOKEN_ROWS = [[3, 4, 5, 6], [7, 8], [9] * 40, [10, 11, 12], [13]]
# More tokens than any row has: a micro-batch of one row is shared by the ranks of a context, too.
ONE_STEP = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=30))
TWO_STEPS = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=30), n_minibatches=2, seed=3)
BY_TWO = UpdateSpec(MicroBatchSpec(mini_bs=2))


def pairs() -> list[TrainSequence]:
    """Five of them: chosen, then rejected."""
    rows = []
    for index in range(10):
        tokens = [(index * 7 + place * 5) % 60 + 2 for place in range(4 + index)]
        n = len(tokens)
        rows.append(TrainSequence([True] * 2 + [False] * (n - 2), tokens, ref_logprobs=[-3.0] * n))
    return rows


N_OF_ODD_ROWS = 7
Updates = list[tuple[list[TrainSequence], Any, UpdateSpec, str]]


def updates_of(rows: list[TrainSequence]) -> Updates:
    """Of each kind: first with odd numbers of rows, two of them fewer than the copies of the model, then with all."""
    clipped, preference = partial(grpo_loss_fn, clip_eps=0.2), partial(dpo_loss_fn, beta=0.1)
    return [
        (rows[:9], clipped, BY_TWO, "actor"),
        (critic_rows(), value_loss_fn, BY_TWO, "critic"),
        (pairs(), preference, UpdateSpec(BY_TWO.mb_spec, rows_per_unit=2), "actor"),
        (rows[:5], sft_loss_fn, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=20)), "actor"),
        (critic_rows(), value_loss_fn, BY_TWO, "critic"),
        (rows[:1], gspo_loss_fn, BY_TWO, "actor"),
        (critic_rows()[:1], value_loss_fn, BY_TWO, "critic"),
        (rows, gspo_loss_fn, ONE_STEP, "actor"),
        (rows, gspo_loss_fn, TWO_STEPS, "actor"),
        (rows, clipped, UpdateSpec(MicroBatchSpec(max_tokens_per_mb=60), n_minibatches=2, seed=3), "actor"),
        (critic_rows(), value_loss_fn, TWO_STEPS, "critic"),
        (rows[: len(rows) // 2 * 2], preference, UpdateSpec(ONE_STEP.mb_spec, rows_per_unit=2), "actor"),
        (rows[:5], sft_loss_fn, TWO_STEPS, "actor"),
    ]


def train(engine: Engine, updates: Updates) -> list[dict[str, float]]:
    return [engine.train(rows, loss_fn, update, role=role) for rows, loss_fn, update, role in updates]


def outcome(engine: Engine, rows: list[TrainSequence], folder: Path) -> dict[str, Any]:
    """Scores, the statistics of an update of each kind, scores and samples afterwards, and the saved weights."""
    engine.ensure_roles({"critic": critic(folder / "model", optimizer=OPTIMIZER)})

    def scores() -> list[Any]:
        critics = [*engine.values("critic", TOKEN_ROWS), np.array(engine.rewards("critic", TOKEN_ROWS))]
        return [*scored(engine, "actor", TOKEN_ROWS), *scored(engine, "actor", TOKEN_ROWS[:1]), *critics]

    before = scores()
    stats = train(engine, updates_of(rows))
    for role in ("actor", "critic"):
        engine.save(str(folder / f"saved-{role}"), role)
    weights = {role: saved_tensors(folder / f"saved-{role}") for role in ("actor", "critic")}
    outputs = rollout(engine)
    found = {"before": before, "stats": stats, "after": scores(), "weights": weights}
    return found | {"tokens": tokens_of(outputs), "logprobs": logprobs_of(outputs)}


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank does."""
    path = tmp_path_factory.mktemp("one")
    with Engine(spec(folder_with(path / "model", **MODELS[request.param]), optimizer=OPTIMIZER), "inline") as engine:
        requests = [item for item in MIXED if item.params.temperature == 1]
        rows = train_rows(rollout(engine, requests), requests)
        for row in rows:
            assert row.logprobs is not None
            row.ref_logprobs = [0.9 * number for number in row.logprobs]  # apart, so that no pair is a draw
        engine.save(str(path / "start"))
        found = outcome(engine, rows, path)
    start = saved_tensors(path / "start")
    for name, weight in found["weights"]["actor"].items():
        assert (start[name] - weight).abs().max() > 1e-3, name
    assert all(stats["grad_norm"] > 0 for stats in found["stats"][:5])  # those of GSPO may be clipped
    return found | {"rows": rows, "path": path}


@pytest.mark.slow
@pytest.mark.parametrize(("one", "name"), MATRIX, indirect=["one"])
def test_every_layout_is_as_one_rank(one: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(one["path"] / "model")
    with Engine(spec(one["path"] / "model", optimizer=OPTIMIZER, **LAYOUTS[name])) as engine:
        found = outcome(engine, one["rows"], tmp_path)
        n_copies = engine.spec.layout.n_data_parallel_groups
    for when in ("before", "after"):
        for ours, expected in zip(found[when], one[when], strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    for number, (ours, expected) in enumerate(zip(found["stats"], one["stats"], strict=True)):
        counted = {"computed_tokens", "row_tokens"}
        if number >= N_OF_ODD_ROWS and n_copies == 1:
            counted = set[str]()
        elif number >= N_OF_ODD_ROWS:
            # A prompt is computed once in each copy that has a row of it. A copy without a row trains an empty one.
            assert expected["computed_tokens"] <= ours["computed_tokens"] <= ours["row_tokens"]
            assert expected["row_tokens"] <= ours["row_tokens"]
        for metric in expected.keys() - {"memory_gib", "step_train_time_s"} - counted:
            close = pytest.approx(expected[metric], rel=1e-3, abs=2e-3)
            if metric in ("loss", "grad_norm"):
                close = pytest.approx(expected[metric], rel=1e-5, abs=1e-5)
            elif metric == "grad_zero_frac":  # the padding of the vocabulary counts as zeros
                close = pytest.approx(expected[metric], abs=0.02)
            assert ours[metric] == close, (number, metric)
    for role, weights in one["weights"].items():
        assert found["weights"][role].keys() == weights.keys()
        for tensor, weight in weights.items():
            np.testing.assert_allclose(found["weights"][role][tensor], weight, atol=1e-5, rtol=0, err_msg=tensor)
    assert found["tokens"] == one["tokens"]
    assert found["logprobs"] == pytest.approx(one["logprobs"], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "adam_8bit"])
def test_two_gpus_divide_the_optimizer(tmp_path: Path, kind: Any) -> None:
    """Over NCCL, with fused layers: as undivided up to the order of sums; the CUDA graphs read the gathered weights."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder = folder_with(tmp_path / "model", **WIDE)
    optimizer = dataclasses.replace(OPTIMIZER, type=kind)
    found: list[tuple[list[dict[str, float]], dict[str, torch.Tensor], float]] = []
    for zero_stage in (0, 1, 2):
        build = spec(folder, optimizer=optimizer, dtype="bfloat16", zero_stage=zero_stage)
        with Engine(dataclasses.replace(build, devices=["cuda:0", "cuda:1"])) as engine:
            engine.ensure_roles({"critic": critic(folder, optimizer=optimizer, offload=True)})
            rollout(engine)  # graphs are captured before the first update
            stats = train(engine, updates_of(train_rows(rollout(engine)))[:N_OF_ODD_ROWS])
            as_trained = [item for item in MIXED if item.params.temperature == 1]
            rows = train_rows(rollout(engine, as_trained), as_trained)
            again = engine.train(rows, partial(grpo_loss_fn, clip_eps=0.2), BY_TWO)
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
