"""Models with experts in the engine: rollout and training agree, with the experts of the rollout and without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areno.config.experiments import ExperimentConfig
from areno.config.fp8 import FP8Config
from areno.config.models import MicroBatchSpec, PolicyConfig
from areno.engine.engine import Engine
from areno.errors import DataError, EngineError
from areno.layers.config import MoEConfig
from areno.layers.mlp import ExpertMLP
from areno.layers.routing import Routing
from areno.layers.shard import WeightSpec
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.registry import load_config
from areno.plan.plan import engine_problems
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.expert_rollouts import ROOMY, TIGHT, apart, rows_of, sampled
from tests.helpers.moe_models import moe_folder
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import logprobs_of, request, saved_tensors, spec, tokens_of

UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=100))
LOSS = partial(grpo_loss_fn, clip_eps=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(spec(folder, routing_replay=True, optimizer=None), "inline") as engine:
        yield engine


def test_routes_are_the_experts_that_a_forward_pass_chooses(engine: Engine, folder: Path) -> None:
    """A prompt that comes again is found in the cache, with its experts."""
    twice = [request(7, length=70, max_new_tokens=4), request(7, length=70, max_new_tokens=4)]
    twice[1].request_id = 8
    engine.begin_rollout(ROOMY)
    outputs = {**engine.generate(twice[:1]), **engine.generate(twice[1:])}
    assert outputs[8][0].cached_tokens == 64
    engine.end_rollout()
    model = worker_of(engine).actor
    from tests.helpers.two_ranks import packed

    for samples in outputs.values():
        tokens = twice[0].prompt + samples[0].tokens
        model.routing.configure(records=True)
        with torch.no_grad():
            model(*packed([torch.tensor(tokens)]))
        routes = samples[0].routes
        assert routes is not None
        assert routes.shape == (len(tokens) - 1, 2, 2)
        assert routes.dtype == np.uint8
        assert np.array_equal(routes, model.routing.recorded_experts()[:-1].numpy())
        model.routing.configure()


@pytest.mark.slow
def test_with_engine_exact_the_difference_is_0(folder: Path) -> None:
    with Engine(spec(folder, exact=True, routing_replay=True), "inline") as engine:
        for rollout in (ROOMY, TIGHT):
            outputs = sampled(engine, rollout)
            for with_routes in (True, False):
                assert apart(engine, rows_of(outputs, with_routes)) == 0.0
        rows = rows_of(outputs)
        for mb_spec in (MicroBatchSpec(max_tokens_per_mb=100), MicroBatchSpec(mini_bs=3)):
            stats = engine.train(rows, LOSS, UpdateSpec(mb_spec))
            assert stats["logp_abs_diff_max"] == 0.0
            rows = rows_of(sampled(engine))


@pytest.mark.slow
def test_given_experts_are_used_and_others_get_no_gradient(folder: Path, tmp_path: Path) -> None:
    """Rows whose tokens all went through two experts change these and the router, and no other expert."""
    with Engine(spec(folder, gradient_checkpointing=True), "inline") as engine:
        engine.save(str(tmp_path / "before"))
        rows = rows_of(sampled(engine), with_routes=False)
        for row in rows:
            row.routes = np.broadcast_to(np.array([5, 2]), (len(row.tokens), 2, 2))
        stats = engine.train(rows, LOSS, UPDATE)
        engine.save(str(tmp_path / "after"))
        assert 0.5 < stats["router_changed"] < 1.0
        assert stats["router_max_violation"] == pytest.approx(3.0)  # 8 experts, 2 of which have all
        # The experts of a row are its own: without them, the router decides again.
        assert engine.train(rows_of(sampled(engine), with_routes=False), LOSS, UPDATE)["router_changed"] == 0.0
    before, after = saved_tensors(tmp_path / "before"), saved_tensors(tmp_path / "after")
    for name, weight in before.items():
        if ".experts." in name:
            is_given = ".experts.5." in name or ".experts.2." in name
            decay = 1 - 1e-2 * 0.01  # AdamW's, which all matrices have
            moved = (after[name] - weight * decay).abs().max()
            assert (moved > 1e-3) == is_given, name
        elif ".mlp.gate." in name:
            assert (after[name] - weight).abs().max() > 1e-3


@pytest.mark.parametrize("normalised", [True, False])
def test_the_layer_is_the_formula_also_with_given_experts(normalised: bool) -> None:
    """Output and gradients in float64 against a loop over tokens and choices, written down from the paper."""
    experts = MoEConfig(n_experts=5, top_k=2, inner_size=6, normalised=normalised)
    routing = Routing(experts, 1)
    layer = ExpertMLP(4, experts, 0, routing, WeightSpec(torch.float32, "cpu"))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(7, 4, generator=generator, requires_grad=True)
    given = torch.tensor([[4, 0], [1, 3], [2, 1], [255, 255], [0, 1]], dtype=torch.uint8)
    routing.configure(given[:, None])
    upstream = torch.randn(7, 4, generator=generator)
    leaves = (x, *layer.parameters())
    out = layer(x)
    got = torch.autograd.grad((out * upstream).sum(), leaves)

    x64, router, gate_up, down = (leaf.detach().double().requires_grad_() for leaf in leaves)
    rows = []
    for n in range(7):
        probs = (router @ x64[n]).softmax(0)
        chosen = given[n].tolist() if n < 5 and n != 3 else probs.topk(2).indices.tolist()
        total = sum(probs[e] for e in chosen) if normalised else 1.0
        row = torch.zeros(4, dtype=torch.float64)
        for e in chosen:
            gate, up = (gate_up.view(5, 12, 4)[e] @ x64[n]).chunk(2)
            row = row + probs[e] / total * (down.view(5, 4, 6)[e] @ (gate * gate.sigmoid() * up))
        rows.append(row)
    expected = torch.stack(rows)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad((expected * upstream.double()).sum(), (x64, router, gate_up, down))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_routes_that_are_wrong_are_told(engine: Engine, tmp_path: Path) -> None:
    rows = rows_of(sampled(engine))
    good = rows[0].routes
    assert good is not None
    for routes, message in (
        (good[:, :1], r"row 0: routes are uint8 of shape .*\(at most \d+ tokens, 2 layers, 2 experts\)"),
        (good.astype(float), "whole numbers"),
        (np.full_like(good, 8), r"routes hold 8; the model's experts are 0 to 7"),
        (np.concatenate([good, good]), "at most"),
    ):
        with pytest.raises(DataError, match=message):
            engine.logprobs("actor", [rows[0].tokens], routes=[routes]) if "row 0" not in message else train(
                engine, [replace(rows[0], routes=routes)]
            )
    with pytest.raises(EngineError, match=r"routes of 1 rows, and 2 rows"):
        engine.logprobs("actor", [rows[0].tokens] * 2, routes=[good])


def train(engine: Engine, rows: list[TrainSequence]) -> None:
    """The checks of Engine.train, on an engine that has no optimizer."""
    from areno.engine.train.checked_rows import add_routes, read_rows

    add_routes(read_rows(rows, 64), rows, engine.info.routes, "row {}")


def test_settings_without_experts_or_that_experts_cannot_have(folder: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_engine import model_folder

    plain, sparse = load_config(model_folder(tmp_path / "plain")), load_config(folder)
    actor = PolicyConfig(path="x", router_aux_loss_coef=0.1, routing_replay=True)
    config = ExperimentConfig(experiment_name="e", actor=actor)
    found = [*engine_problems(config, plain, "cpu")]
    assert [problem.key for problem in found] == ["actor.routing_replay", "actor.router_aux_loss_coef"]
    config.engine.exact = True
    assert not [*engine_problems(config, sparse, "cpu")]
    [problem] = engine_problems(config, sparse, "cuda:0")
    assert problem.key == "engine.exact"
    config.engine.exact, actor.fp8_config = False, FP8Config()
    [problem] = engine_problems(config, sparse, "cuda:0")
    assert str(problem) == "actor.fp8_config: is set, but experts have no products in FP8; leave it out"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"zero_stage": 2}, {"cp_size": 2}], ids=["tp", "dp", "cp"])
def test_two_ranks_sample_and_train_as_one(layout: dict[str, int], folder: Path, tmp_path: Path) -> None:
    """With half of the experts, rows, or tokens each: the same tokens, routes, statistics, weights and state."""
    how: dict[str, Any] = {"routing_replay": True, "router_aux_loss_coef": 0.1}
    with Engine(spec(folder, devices=2, **layout, **how)) as two:
        two.save(str(tmp_path / "start"))
        with Engine(spec(tmp_path / "start", random_init=False, **how), "inline") as one:
            outputs, expected = sampled(two), sampled(one)
            assert tokens_of(outputs) == tokens_of(expected)
            assert logprobs_of(outputs) == pytest.approx(logprobs_of(expected), abs=1e-4)
            rows = rows_of(expected)
            for row, other in zip(rows, rows_of(outputs), strict=True):
                assert np.array_equal(row.routes, other.routes)
            for _ in range(2):
                stats, wanted = two.train(rows, LOSS, UPDATE), one.train(rows, LOSS, UPDATE)
                for name in stats.keys() - {"memory_gib", "step_train_time_s"}:
                    assert stats[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name
            for engine, name in ((one, "one"), (two, "two")):
                engine.save(str(tmp_path / name))
            two.save_state(tmp_path / "state")
            two.is_state_written(wait=True)
            one.load_state(tmp_path / "state")
            one.save(str(tmp_path / "loaded"))
            greedy = [request(i, greedy=True, ignore_eos=True) for i in range(4)]
            assert tokens_of(sampled(two, requests=greedy)) == tokens_of(sampled(one, requests=greedy))
    start, *saved = (saved_tensors(tmp_path / name) for name in ("start", "one", "two"))
    loaded = saved_tensors(tmp_path / "loaded")
    for name, weight in saved[0].items():
        torch.testing.assert_close(saved[1][name], weight, atol=1e-3, rtol=0.0)
        assert torch.equal(loaded[name], saved[1][name])
        assert not torch.equal(start[name], weight)
