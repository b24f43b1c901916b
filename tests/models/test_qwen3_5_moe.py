"""Qwen3.5 with experts in an engine: rollout and training agree, also on two ranks, and across layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from areno.config.layout import Layout
from areno.engine.engine import Engine
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.sft import sft_loss_fn
from areno.models.parameters import n_matrix_parameters, n_parameters
from areno.models.registry import build_model, layout_problems, load_config
from areno.models.weights import load_weights
from tests.helpers.critics import OPTIMIZER, critic_rows
from tests.helpers.expert_rollouts import TIGHT, apart, assert_same, rows_of, sampled
from tests.helpers.published import publish
from tests.helpers.states import content, same, saved
from tests.helpers.tiny_engine import saved_tensors, spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With more experts than a byte can tell apart."""
    folder = tmp_path_factory.mktemp("published")
    more = {"num_experts": 260, "num_experts_per_tok": 3, "moe_intermediate_size": 4}
    publish("qwen3.5-experts", folder, images=True, fused=True, **more)
    return folder


@pytest.mark.slow
def test_rollout_and_training_agree_however_the_rollout_is_cut(folder: Path) -> None:
    with Engine(spec(folder, random_init=False, routing_replay=True), "inline") as engine:
        expected, outputs = sampled(engine), sampled(engine, TIGHT)
        assert_same(outputs, expected)
        routes = [sample.routes for samples in outputs.values() for sample in samples if sample.routes is not None]
        assert {each.dtype for each in routes} == {np.dtype(np.int16)}
        assert max(each.max() for each in routes) > 127  # more than a signed byte holds
        for replays in (True, False):
            assert apart(engine, rows_of(outputs, replays)) < 1e-4


@pytest.mark.slow
def test_two_ranks_go_on_as_one(tmp_path: Path) -> None:
    """A step with sequence parallelism, its state read by one rank, and the published layout saved by both."""
    stored = publish("qwen3.5-experts", tmp_path / "in", images=True, fused=True)
    optimizer = dataclasses.replace(OPTIMIZER, type="adam")
    settings = {"random_init": False, "optimizer": optimizer, "dtype": "bfloat16"}
    rows = critic_rows()
    with (
        Engine(spec(tmp_path / "in", 2, tp_size=2, **settings)) as two,
        Engine(spec(tmp_path / "in", **settings), "inline") as one,
    ):
        two.save(str(tmp_path / "before"))
        found = saved_tensors(tmp_path / "before")
        assert found.keys() == stored.keys()
        assert all(found[name].dtype == each.dtype and found[name].equal(each) for name, each in stored.items())
        norms = [engine.train(rows, sft_loss_fn)["grad_norm"] for engine in (two, one)]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)
        state = saved(two, tmp_path / "state")
        one.load_state(state)
        assert same(content(saved(one, tmp_path / "again")), content(state))
        for name, engine in (("two", two), ("one", one)):
            engine.save(str(tmp_path / name))
        after = saved_tensors(tmp_path / "two")
        for name, tensor in saved_tensors(tmp_path / "one").items():
            assert torch.equal(tensor, after[name]), name
        assert not after["model.language_model.layers.0.mlp.experts.down_proj"].equal(
            stored["model.language_model.layers.0.mlp.experts.down_proj"]
        )
        norms = [engine.train(rows, sft_loss_fn)["grad_norm"] for engine in (two, one)]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_ranks_that_do_not_divide_the_shared_expert_name_its_field(tmp_path: Path) -> None:
    publish("qwen3.5-experts", tmp_path, images=False, shared_expert_intermediate_size=27)
    [problem] = layout_problems(load_config(tmp_path), Layout.single_replica(2))
    assert "27 (inner size of the shared expert)" in str(problem)
    assert "shared_expert_intermediate_size=27" in str(problem)


def test_the_number_of_parameters_on_a_rank(tmp_path: Path) -> None:
    publish("qwen3.5-experts", tmp_path, images=False)
    config = load_config(tmp_path)
    for n in (1, 2):
        model = build_model(config, dtype=torch.float32, device="meta", tp=ParallelGroup(0, n))
        found = sum(parameter.numel() for parameter in model.parameters())
        assert n_parameters(config, Layout.single_replica(n)) == found
        matrices = [name for name, _ in model.named_parameters() if model.matrix_parts(name)]
        n_in_matrices = sum(model.get_parameter(name).numel() for name in matrices)
        assert n_matrix_parameters(config, Layout.single_replica(n)) == n_in_matrices


def test_routers_and_gates_sum_in_float32(tmp_path: Path) -> None:
    publish("qwen3.5-experts", tmp_path, images=False)
    model = build_model(load_config(tmp_path), dtype=torch.bfloat16, device="cpu")
    load_weights(model, tmp_path)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for router in (model.layers[0].mlp.router, model.layers[0].mlp.shared_gate):
        exact = x.double() @ router.weight.double().T
        torch.testing.assert_close(router(x).double(), exact, atol=1e-5, rtol=1e-5)
