"""Context parallel: ranks that share the tokens of each row find what one rank finds, with any loss and layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engine import MIXED, logprobs_of, model_folder, rollout, saved_tensors, scored, spec, tokens_of, train_rows

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.engine.spec import RoleSpec, UpdateSpec
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.value import value_loss_fn
from areno.models.registry import load_config, tp_problems
from areno.types import TrainSequence

ROWS = [[3, 4, 5, 6], [7, 8], [9] * 40, [10, 11, 12], [13]]
# More than any one row has: a micro-batch of one row is shared, too.
UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=30), n_minibatches=2, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads, four of keys: for two tensor-parallel ranks of two context-parallel ones."""
    folder = model_folder(tmp_path_factory.mktemp("model"), vocab_size=65)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4}))
    return folder


def sampled_rows(engine: Engine) -> list[TrainSequence]:
    requests = [item for item in MIXED if item.params.temperature == 1]
    return train_rows(rollout(engine, requests), requests)


def compare(folder: Path, tmp_path: Path, layout: dict[str, Any], steps: Any) -> None:
    """What `steps(engine, rows)` returns, and the weights that it leaves, are those of one rank."""
    with Engine(spec(folder), "inline") as one:
        rows = sampled_rows(one)
        expected, weights = steps(one, rows), weights_of(one, tmp_path / "one")
    with Engine(spec(folder, **layout)) as several:
        found = steps(several, rows)
        for name, weight in weights_of(several, tmp_path / "several").items():
            np.testing.assert_allclose(weight, weights[name], atol=1e-3, rtol=0, err_msg=name)
    assert len(found) == len(expected)
    for ours, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, dict):
            assert {name: ours[name] for name in ("loss", "grad_norm")} == pytest.approx(
                {name: wanted[name] for name in ("loss", "grad_norm")}, rel=1e-5, abs=1e-6
            )
            assert ours == pytest.approx(wanted | {"memory_gib": ours["memory_gib"]}, rel=1e-3, abs=2e-3)
        else:
            np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)


def weights_of(engine: Engine, folder: Path) -> dict[str, Any]:
    engine.save(str(folder))
    return saved_tensors(folder)


def policy_steps(engine: Engine, rows: list[TrainSequence]) -> list[Any]:
    before = scored(engine, "actor", ROWS)
    stats = [engine.train(rows, gspo_loss_fn, UPDATE) for _ in range(2)]
    outputs = rollout(engine)
    tokens = [np.array(sample) for request in tokens_of(outputs).values() for sample in request]
    return [*before, *stats, *scored(engine, "actor", ROWS), *tokens, np.array(logprobs_of(outputs))]


def test_two_ranks_share_the_tokens_of_each_row(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path, {"devices": 2, "cp_size": 2}, policy_steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"devices": 4, "cp_size": 2, "tp_size": 2}, {"devices": 4, "cp_size": 2}, {"devices": 4, "cp_size": 4}],
    ids=["tp2-cp2", "dp2-cp2", "cp4"],
)
def test_other_layouts(folder: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    compare(folder, tmp_path, layout, policy_steps)


def other_losses(engine: Engine, rows: list[TrainSequence], folder: Path) -> list[Any]:
    engine.ensure_roles(
        {"critic": RoleSpec(path=str(folder), head="value", key="critic.path", optimizer=engine.spec.optimizer)}
    )
    values = engine.values("critic", ROWS)
    for row in rows:
        row.values = [0.0] * len(row.tokens)
        row.returns = [0.5] * len(row.tokens)
        row.ref_logprobs = row.logprobs
    found = [engine.train(rows, value_loss_fn, UPDATE, role="critic"), *values]
    found += engine.values("critic", ROWS)
    found.append(np.array(engine.rewards("critic", ROWS)))
    pairs = UpdateSpec(UPDATE.mb_spec, rows_per_unit=2)
    found.append(engine.train(rows[: len(rows) // 2 * 2], partial(dpo_loss_fn, beta=0.1), pairs))
    found.append(engine.train(rows[:5], sft_loss_fn, UPDATE))
    return found


@pytest.mark.slow
def test_a_critic_pairs_and_plain_rows(folder: Path, tmp_path: Path) -> None:
    compare(folder, tmp_path, {"devices": 2, "cp_size": 2}, partial(other_losses, folder=folder))


def test_heads_that_a_context_does_not_divide(folder: Path) -> None:
    config = load_config(folder)
    assert tp_problems(config, 2, cp_size=2) == []
    (problem,) = tp_problems(config, 2, cp_size=4)
    assert problem.key == "engine.cp_size"
    assert problem.message == (
        "is 4, which does not divide the 2 key-value heads of the model on each device (config.json: "
        "num_key_value_heads=4; engine.tp_size=2)"
    )
