"""Shared prefixes together with everything that computes rows: layouts, adapters, experts, critics, exact mode."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areno.config.models import MicroBatchSpec
from areno.config.rollout import SamplingConfig
from areno.engine.engine import Engine
from areno.engine.train import passes
from areno.engine.train.passes import ForwardPasses
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.specs.role import RoleSpec
from areno.specs.update import UpdateSpec
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import lora
from tests.helpers.moe_models import moe_folder
from tests.helpers.shared_rows import Rows, group, train_rows, tree
from tests.helpers.tiny_engine import engine_spec, folder_with, spec

UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=120), n_minibatches=2, seed=3)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "adapters": {"adapters": True},
    "experts": {"experts": True, "router_aux_loss_coef": 0.1},
    "experts, replayed": {"experts": True, "replays": True},
    "glm": {"case": "glm4-tied-experts", "router_aux_loss_coef": 0.1},
    "glm, replayed": {"case": "glm4-experts", "replays": True},
    "exact": {"exact": True},
    "recompute": {"gradient_checkpointing": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "two copies": {"devices": 2},
    "two copies, zero 2": {"devices": 2, "zero_stage": 2},
    "tp 2": {"devices": 2, "tp_size": 2},
    "cp 2": {"devices": 2, "cp_size": 2},
    "tp 2, cp 2": {"devices": 4, "tp_size": 2, "cp_size": 2},
}
# Each kind meets copies, tensor and context parallelism, the last two together; each layout alone meets one kind.
ON_RANKS = [
    (kind, layout) for layout in ("two copies, zero 2", "tp 2, cp 2") for kind in ("dense", "adapters", "experts")
]
ON_RANKS += [("adapters", "two copies"), ("dense", "tp 2"), ("experts", "cp 2")]


def rows_of_groups(vocab: int) -> Rows:
    """Groups in any order. An answer is empty, two are equal, and the last group is larger than a micro-batch."""
    rows = [*group(40, [9, 3, 14], vocab, 1), *group(25, [0, 8, 2, 6], vocab, 2), *group(33, [5, 5], vocab, 3)]
    rows += group(18, [11] * 20, vocab, 5)
    rows.append(rows[-1].copy())
    random.Random(0).shuffle(rows)
    return rows


def results(folder: Path, share: str, **settings: Any) -> list[Any]:
    """Scores and statistics before and after updates of the actor and of a critic."""
    adapters = lora(folder) if settings.pop("adapters", False) else None
    settings.pop("experts", False)
    replays = settings.pop("replays", False)
    if case := settings.pop("case", ""):
        settings["random_init"] = False
    workers = "spawn" if settings.get("devices", 1) > 1 else "inline"
    with Engine(spec(folder, share_prefixes=share, lora=adapters, **settings), workers) as engine:
        vocab = engine.info.vocab_size
        tokens = rows_of_groups(vocab)
        rows = train_rows(tokens, prompt=20, staleness=1)  # of made-up log-probabilities, which exact mode notices
        routes = [experts_of(row, engine.info.routes) if replays else None for row in tokens]
        for row, given in zip(rows, routes, strict=True):
            row.routes = given
        found: list[Any] = engine.logprobs("actor", tokens, SamplingConfig(temperature=0.8), routes=routes)
        found += [engine.train(rows, gspo_loss_fn, UPDATE) for _ in range(2)]
        pairs = train_rows([row for seed in range(4) for row in group(30, [6, 8], vocab, seed)], prompt=30, staleness=1)
        how = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=90), rows_per_unit=2)
        found.append(engine.train(pairs, partial(dpo_loss_fn, beta=0.1), how))
        if case:  # transformers has no critics of this family
            return [*found, *engine.logprobs("actor", tokens, SamplingConfig(temperature=0.8), routes=routes)]
        critic = RoleSpec(path=str(folder), head="value", key="critic.path", optimizer=engine.spec.actor.optimizer)
        engine.ensure_roles({"critic": critic})
        found += engine.values("critic", tokens)
        found.append(engine.train(rows, value_loss_fn, UPDATE, role="critic"))
        found += engine.values("critic", tokens)
        found.append(np.array(engine.rewards("critic", tokens)))
        found += engine.logprobs("actor", tokens, SamplingConfig(temperature=0.8))
    return found


def experts_of(row: np.ndarray, shape: Any) -> np.ndarray:
    """Experts for all tokens of a row, which depend on the place and so are those of a shared prefix."""
    places = np.arange(len(row))[:, None, None]
    return (places + np.arange(shape.n_layers)[:, None] * 3 + np.arange(shape.top_k)) % shape.n_experts


def check(folder: Path, **settings: Any) -> None:
    shared, apart = (results(folder, share, **settings) for share in ("on", "off"))
    alone = settings.get("devices", 1) == 1  # few rows of a small step are together on one of several ranks
    is_exact, n_rows = settings.get("exact", False), len(rows_of_groups(16))
    n_last = n_rows if "case" in settings else 2 * n_rows + 1
    assert all(np.abs(values).max() > 0 for values in shared[-n_last:])
    for number, (found, expected) in enumerate(zip(shared, apart, strict=True)):
        if not isinstance(expected, dict):
            if is_exact and number < len(
                rows_of_groups(16)
            ):  # before any update: after it, gradients differ in rounding
                assert np.array_equal(found, expected)
            np.testing.assert_allclose(found, expected, atol=5e-4, rtol=0)
            continue
        assert found["row_tokens"] == expected["row_tokens"] == expected["computed_tokens"]
        assert found["computed_tokens"] <= (0.75 if alone else 0.95) * found["row_tokens"]
        measured = {"memory_gib", "computed_tokens", "step_train_time_s"}
        for name in expected.keys() - measured:
            assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-3), name


def folder_of(kind: str, path: Path) -> Path:
    if case := KINDS[kind].get("case"):
        random_model(case, path, num_attention_heads=8, num_key_value_heads=4, first_k_dense_replace=1)
        return path
    if KINDS[kind].get("experts"):
        return moe_folder(path, num_attention_heads=8, num_key_value_heads=4)
    return folder_with(path, num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank(kind: str, tmp_path: Path) -> None:
    check(folder_of(kind, tmp_path / "model"), **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), ON_RANKS)
def test_several_ranks(kind: str, layout: str, tmp_path: Path) -> None:
    check(folder_of(kind, tmp_path / "model"), **KINDS[kind], **LAYOUTS[layout])


def test_the_default_shares_what_saves_a_tenth(tmp_path: Path) -> None:
    with Engine(spec(folder_of("dense", tmp_path / "model")), "inline") as engine:
        assert engine.spec.share_prefixes == "auto"
        stats = engine.train(train_rows(rows_of_groups(engine.info.vocab_size), prompt=20), gspo_loss_fn, UPDATE)
        assert stats["computed_tokens"] < stats["row_tokens"]
        apart = [row for seed in range(4) for row in group(20, [30], engine.info.vocab_size, seed)]
        stats = engine.train(train_rows(apart, prompt=20), gspo_loss_fn, UPDATE)
        assert stats["computed_tokens"] == stats["row_tokens"]


def test_a_role_that_cannot_share_gets_rows_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its micro-batches then hold as many tokens as it computes."""
    seen: list[int] = []
    run = ForwardPasses.run_layers

    def record(self: ForwardPasses, packed: Any, *more: Any) -> Any:
        if self.model.config.delta is not None:
            seen.append(len(packed.tokens_N))
        return run(self, packed, *more)

    monkeypatch.setattr(ForwardPasses, "run_layers", record)
    for family in ("qwen3-window", "qwen3.5"):
        random_model(family, tmp_path / family)
    with Engine(spec(tmp_path / "qwen3-window", share_prefixes="on"), "inline") as engine:
        of_ref = RoleSpec(path=str(tmp_path / "qwen3.5"), key="ref.path", optimizer=engine.spec.actor.optimizer)
        engine.ensure_roles({"ref": of_ref})
        rows = group(30, [4] * 6, engine.info.vocab_size)
        how = MicroBatchSpec(max_tokens_per_mb=90)
        engine.train(train_rows(rows, prompt=30), gspo_loss_fn, UpdateSpec(how), role="ref")
        engine.logprobs("ref", rows, SamplingConfig(), how)
    assert seen == [68] * 6


@pytest.mark.parametrize("share", ["on", "off"])
def test_the_head_computes_no_logits_of_masked_tokens(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    compute = passes.selected_logprobs
    count = lambda hidden, *args, **more: (computed.append(len(hidden)), compute(hidden, *args, **more))[1]  # noqa: E731
    monkeypatch.setattr(passes, "selected_logprobs", count)
    rows = [*group(30, [9, 5, 3], 16, 1), *tree(3, 16, turn=12), *group(4, [1], 16, 2)]
    masks = [np.random.default_rng(index).random(len(row)) < 0.6 for index, row in enumerate(rows)]
    masks[-1][:] = True
    with Engine(engine_spec("examples/quickstart/model", exact=True, share_prefixes=share)) as engine:
        expected = engine.logprobs("actor", rows)
        computed.clear()
        found = engine.logprobs("actor", rows, prompt_masks=[mask.tolist() for mask in masks])
    for one, other, mask in zip(found, expected, masks, strict=True):
        assert np.array_equal(one, np.where(mask, 0, other))
    asked = sum(int((~mask[1:]).sum()) for mask in masks)
    assert sum(computed) == asked if share == "off" else sum(computed) <= asked
