"""Muon on flat buffers against float64 formulas, against torch, and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.config.optimizers import MuonConfig, OptimizerConfig
from areno.cost import memory
from areno.engine.engine import Engine
from areno.engine.train.muon import orthogonalise
from areno.engine.train.optimizer import Optimizer
from areno.engine.train.zero_buffers import FlatParameters
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.sft import sft_loss_fn
from areno.models.parameters import n_matrix_parameters
from areno.models.registry import build_model, load_config
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.family_cases import random_model
from tests.helpers.moe_models import moe_folder
from tests.helpers.muon_updates import (
    STEPS,
    Formulas,
    backend,
    compare,
    is_matrix,
    largest_error,
    parts,
    polynomial_of_singular_values,
    step,
    whole_tensors,
)
from tests.helpers.muon_updates import optimizer as muon_optimizer
from tests.helpers.tiny_engine import model_folder, saved_tensors, spec
from tests.helpers.tp_ranks import Groups, on_ranks
from tests.helpers.zero_ranks import assert_same_in_host, small_windows

ALONE = Groups()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "scale_mode": "spectral"},
    {"momentum": 0.5, "ns_steps": 3},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "dense", num_hidden_layers=3, tie_word_embeddings=False)


@pytest.mark.parametrize("muon", SETTINGS)
def test_fifty_steps_are_those_of_the_formulas(folder: Path, muon: dict[str, Any]) -> None:
    trained = backend(folder, ALONE, muon=muon)
    before = whole_tensors(trained)
    formulas = Formulas({key: tensor.clone() for key, tensor in before.items()}, MuonConfig(**muon))
    for number in range(STEPS):
        step(trained, number)
        formulas.step(number)
    assert largest_error(trained, before, formulas.tensors) <= 1e-5


@pytest.mark.parametrize("adapted", [False, True])
def test_experts_and_adapters_are_orthogonalised_apart(tmp_path: Path, adapted: bool) -> None:
    """The formulas know the tensors of the checkpoint only, each expert and each A and B by itself."""
    trained = backend(moe_folder(tmp_path) if not adapted else model_folder(tmp_path), ALONE, adapted)
    before = whole_tensors(trained)
    formulas = Formulas({key: tensor.clone() for key, tensor in before.items()}, MuonConfig())
    for number in range(STEPS):
        step(trained, number)
        formulas.step(number)
    assert largest_error(trained, before, formulas.tensors) <= 1e-5
    assert trained.flat is not None
    n_elements = {key: tensor.numel() for key, tensor in before.items() if not is_matrix(key, tuple(tensor.shape))}
    if adapted:
        assert not n_elements
        assert trained.flat.n_elementwise == 0
    else:
        assert any("router" in key for key in n_elements)
    matrices = [key for key, _, part in parts(trained) if is_matrix(key, part.full_shape)]
    assert len(matrices) == sum(map(len, trained.flat.matrices.values()))


@pytest.mark.parametrize("scale_mode", ["match_rms_adamw", "spectral"])
def test_gate_and_up_whose_rows_alternate_are_orthogonalised_apart(tmp_path: Path, scale_mode: Any) -> None:
    random_model("gpt-oss-experts", tmp_path)
    trained = backend(tmp_path, ALONE, muon={"scale_mode": scale_mode})
    before = whole_tensors(trained)
    tensors = {key: tensor.clone() for key, tensor in before.items()}
    formulas = Formulas(tensors, MuonConfig(scale_mode=scale_mode), gate_and_up_alternate=True)
    for number in range(3):
        step(trained, number)
        formulas.step(number)
    assert any("gate_up" in key for key in tensors)
    assert largest_error(trained, before, tensors) <= 1e-5


@pytest.mark.parametrize("scale_mode", ["match_rms_adamw", "spectral"])
def test_equals_the_muon_of_torch(monkeypatch: pytest.MonkeyPatch, scale_mode: Any) -> None:
    """Whose products are in bf16, so here in float32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        ours = torch.nn.Linear(*shape, bias=False)
        theirs = torch.nn.Parameter(ours.weight.detach().clone())
        part = build_part(ours)
        flat = FlatParameters(ours, matrix_parts=lambda name, part=part: (part,))
        how = {"lr": 0.02, "weight_decay": 0.1, "lr_scheduler_type": "constant", "gradient_clipping": 0.0}
        settings = OptimizerConfig(
            type="muon", warmup_steps_proportion=0.0, muon=MuonConfig(scale_mode=scale_mode), **how
        )
        optimizer = Optimizer(flat, settings, ParallelGroup())
        adjust = "original" if scale_mode == "spectral" else scale_mode
        reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust)
        before = theirs.detach().clone()
        for _ in range(STEPS):
            theirs.grad = torch.randn_like(theirs)
            flat.grads.copy_(theirs.grad.flatten())
            optimizer.step(1.0)
            reference.step()
        moved = (theirs - before).norm()
        assert (ours.weight - theirs).norm() <= 1e-5 * moved


def build_part(linear: torch.nn.Linear) -> Any:
    from areno.layers.shard import TensorPart

    return TensorPart(tuple(linear.weight.shape))


def test_products_in_bfloat16_give_nearly_the_same_direction() -> None:
    torch.manual_seed(1)
    for shape in ((1, 32, 80), (3, 80, 32)):
        x = torch.randn(shape, dtype=torch.float64)
        x /= x.flatten(1).norm(dim=1).view(-1, 1, 1)
        wanted = torch.stack([polynomial_of_singular_values(each, 5) for each in x])
        assert (orthogonalise(x, 5) - wanted).norm() <= 1e-10 * wanted.norm()
        assert (orthogonalise(x.bfloat16(), 5).double() - wanted).norm() <= 0.15 * wanted.norm()


def test_a_gradient_of_zero_changes_nothing_but_the_decay(folder: Path) -> None:
    trained = backend(folder, ALONE)
    assert trained.flat is not None
    assert trained.optimizer is not None
    before = whole_tensors(trained)
    trained.optimizer.step(0.0)
    for key, tensor in whole_tensors(trained).items():
        kept = 1 - 0.02 * 0.1 if tensor.dim() >= 2 else 1.0
        torch.testing.assert_close(tensor, before[key] * kept, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_and_moments_in_host_memory_change_no_bit(
    folder: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_windows()
    plain, in_host = (backend(folder, ALONE, dtype=dtype, offload=away) for away in (False, True))
    for number in range(3):
        for each in (plain, in_host):
            step(each, number)
    assert_same_in_host(plain, in_host)


@pytest.mark.slow
def test_two_data_parallel_ranks_update_as_one(folder: Path) -> None:
    on_ranks(2, compare, folder, 1, (0, 1, 2), [{}])


@pytest.mark.slow
def test_two_tensor_parallel_ranks_update_as_one(folder: Path, tmp_path: Path) -> None:
    on_ranks(2, compare, folder, 2, (0,), [{}, {"adapted": True}])
    on_ranks(2, compare, moe_folder(tmp_path / "experts"), 2, (0,), [{}])


@pytest.mark.slow
def test_four_ranks_update_as_one(tmp_path: Path) -> None:
    """Two shards of two copies, and four that share two key-value heads."""
    dense = model_folder(tmp_path / "dense", num_hidden_layers=3)
    on_ranks(4, compare, dense, 2, (1, 2), [{}])
    on_ranks(4, compare, dense, 4, (0,), [{}, {"adapted": True}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *({"devices": 2, "cp_size": 2, "zero_stage": stage} for stage in (0, 1, 2)),
        {"devices": 4, "cp_size": 2, "zero_stage": 2},
        {"devices": 4, "cp_size": 2, "tp_size": 2},
    ],
    ids=["zero 0", "zero 1", "zero 2", "two copies", "tp 2"],
)
def test_ranks_that_share_rows_train_as_one(tmp_path: Path, layout: dict[str, Any]) -> None:
    """Context parallelism, in whole training steps: to 1e-4 of the distance moved, as sums have another order."""
    folder = model_folder(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    tokens = [[(7 * n + 5 * place) % 60 + 2 for place in range(n)] for n in (11, 6, 25)]
    rows = [TrainSequence([True] * 2 + [False] * (len(each) - 2), each) for each in tokens]
    update, found = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=20)), []
    for number, how in enumerate(({}, layout)):
        with Engine(spec(folder, optimizer=muon_optimizer(), **how)) as engine:
            engine.save(str(tmp_path / "start"))
            stats = [engine.train(rows, sft_loss_fn, update) for _ in range(5)]
            engine.save(str(tmp_path / f"end-{number}"))
        found.append(([each["loss"] for each in stats], saved_tensors(tmp_path / f"end-{number}")))
    start, (losses, expected), (several, weights) = saved_tensors(tmp_path / "start"), *found
    assert losses[-1] < losses[0]
    assert several == pytest.approx(losses, rel=1e-4)
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-4 * (weight - start[name]).norm(), name


@pytest.mark.parametrize("family", ["dense", "experts", "qwen3.5"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_the_plan_knows_the_moments(tmp_path: Path, family: str, zero_stage: int, monkeypatch: Any) -> None:
    """A matrix has one moment, all other parameters have two."""
    monkeypatch.setattr("areno.engine.train.zero_buffers.BUCKET", 1)
    if family == "dense":
        model_folder(tmp_path, hidden_size=64, intermediate_size=128)
    elif family == "experts":
        moe_folder(tmp_path, hidden_size=64)
    else:
        random_model(family, tmp_path)
    config = load_config(tmp_path)
    model = build_model(config, dtype=torch.bfloat16, device="cpu")
    n = sum(
        part.full_shape[0] * part.full_shape[1]
        for name, _ in model.named_parameters()
        for part in model.matrix_parts(name)
    )
    assert n_matrix_parameters(config) == pytest.approx(n, rel=0.01)
    dp = ParallelGroup(0, 2)
    stage = model.backward_stage if zero_stage else None
    how: dict[str, Any] = {"stage": stage, "dp": dp, "divide_grads": zero_stage == 2}
    flat = FlatParameters(model, None, matrix_parts=model.matrix_parts, **how)
    moments = Optimizer(flat, OptimizerConfig(type="muon"), ParallelGroup()).moments.values()
    from areno.config.layout import Layout

    found = memory.model_bytes(config, 2, "muon", layout=Layout(2), zero_stage=zero_stage)
    assert found.moments == pytest.approx(sum(moment.nbytes for moment in moments), rel=0.03)
