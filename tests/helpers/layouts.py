"""What several ranks compute against one: scores, updates, samples and weights. For tests of layouts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.config.models import MicroBatchSpec
from areno.engine.engine import Engine
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.tiny_engine import (
    MIXED,
    logprobs_of,
    model_folder,
    rollout,
    saved_tensors,
    scored,
    spec,
    tokens_of,
    train_rows,
)

ROWS = [[3, 4, 5, 6], [7, 8], [9] * 40, [10, 11, 12], [13]]
# More than any one row has: a micro-batch of one row is shared, too.
ONE_STEP = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=30))
UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=30), n_minibatches=2, seed=3)


def folder_with(path: Path, vocab_size: int = 65, **changes: Any) -> Path:
    """A tiny model with changes in its config.json. Ranks do not divide 65 tokens."""
    folder = model_folder(path, vocab_size)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
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
    close = 1e-5  # in the first step; the next ones begin with weights that differ in rounding
    for ours, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, dict):
            assert {name: ours[name] for name in ("loss", "grad_norm")} == pytest.approx(
                {name: wanted[name] for name in ("loss", "grad_norm")}, rel=close, abs=1e-6
            )
            close = 1e-4
            # A vocabulary that the ranks do not divide is padded, and the padding counts as zeros.
            assert ours.get("grad_zero_frac") == pytest.approx(wanted.get("grad_zero_frac"), abs=0.02)
            apart = {name: ours[name] for name in ("memory_gib", "grad_zero_frac")}
            for name, value in (wanted | apart).items():
                assert ours[name] == pytest.approx(value, rel=1e-3, abs=2e-3), name
        else:
            np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)


def weights_of(engine: Engine, folder: Path) -> dict[str, Any]:
    engine.save(str(folder))
    return saved_tensors(folder)


def policy_steps(engine: Engine, rows: list[TrainSequence]) -> list[Any]:
    before = scored(engine, "actor", ROWS)
    stats = [engine.train(rows, gspo_loss_fn, update) for update in (ONE_STEP, UPDATE)]
    outputs = rollout(engine)
    tokens = [np.array(sample) for request in tokens_of(outputs).values() for sample in request]
    return [*before, *stats, *scored(engine, "actor", ROWS), *tokens, np.array(logprobs_of(outputs))]


def other_losses(engine: Engine, rows: list[TrainSequence], folder: Path) -> list[Any]:
    engine.ensure_roles(
        {"critic": RoleSpec(path=str(folder), head="value", key="critic.path", optimizer=engine.spec.actor.optimizer)}
    )
    values = engine.values("critic", ROWS)
    for row in rows:
        assert row.tokens is not None
        assert row.logprobs is not None
        row.values = [0.0] * len(row.tokens)
        row.returns = [0.5] * len(row.tokens)
        row.ref_logprobs = [0.9 * number for number in row.logprobs]  # apart, so that no pair is a draw
    found = [engine.train(rows, value_loss_fn, UPDATE, role="critic"), *values]
    found += engine.values("critic", ROWS)
    found.append(np.array(engine.rewards("critic", ROWS)))
    pairs = UpdateSpec(UPDATE.mb_spec, rows_per_unit=2)
    found.append(engine.train(rows[: len(rows) // 2 * 2], partial(dpo_loss_fn, beta=0.1), pairs))
    found.append(engine.train(rows[:5], sft_loss_fn, UPDATE))
    return found
