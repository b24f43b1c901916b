"""The optimizer divided over data-parallel ranks (ZeRO): the same training, with less on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areno.engine.train import zero_buffers
from areno.engine.train.zero_buffers import FlatParameters, slice_length
from areno.kernels.adam import BLOCK
from areno.layers.attention import PackedAttend
from areno.layers.parallel import ParallelGroup
from areno.models.registry import build_model, load_config
from areno.models.transformer import Transformer
from tests.helpers.interpreted import run_interpreted
from tests.helpers.muon_updates import same_bits
from tests.helpers.tiny_engine import model_folder
from tests.helpers.tp_ranks import on_ranks as on_tp_ranks
from tests.helpers.zero_ranks import compare_stages, on_ranks, quick_checks


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """And what each holds; and a rank that begins a step again repeats no reduction."""
    on_ranks(2, quick_checks, model_folder(tmp_path, num_hidden_layers=3, tie_word_embeddings=False))


@pytest.mark.slow
@pytest.mark.parametrize(("n_ranks", "tied"), [(2, True), (3, True), (2, False)])
def test_ranks_train_as_one_in_all_forms(tmp_path: Path, n_ranks: int, tied: bool) -> None:
    on_ranks(n_ranks, compare_stages, model_folder(tmp_path, num_hidden_layers=5, tie_word_embeddings=tied))


@pytest.mark.slow
def test_moments_in_bf16_round_alike_on_any_rank(tmp_path: Path) -> None:
    on_tp_ranks(2, same_bits, model_folder(tmp_path, num_hidden_layers=3), "adam_bf16")


@pytest.mark.parametrize("align", [16, BLOCK])
@pytest.mark.parametrize("divide_grads", [False, True])
def test_every_element_has_one_owner(
    tmp_path: Path, align: int, divide_grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_buffers, "BUCKET", 1)
    monkeypatch.setattr(zero_buffers, "CHUNK", 768)
    folder = model_folder(tmp_path, vocab_size=65, num_hidden_layers=3)
    owners, size = None, 3
    for rank in range(size):
        model = build_model(load_config(folder), dtype=torch.bfloat16, device="cpu")
        model.init_weights(1)
        dp = ParallelGroup(rank, size)
        flat = FlatParameters(model, None, align, stage=model.backward_stage, dp=dp, divide_grads=divide_grads)
        owners = torch.zeros(flat.params.numel(), dtype=torch.int) if owners is None else owners
        local = torch.zeros(flat.n_local, dtype=torch.int)
        for chunk in flat.chunks():
            owners[chunk.place] += 1
            local[chunk.local] += 1
            assert slice_length(chunk.place) == slice_length(chunk.local) == slice_length(chunk.grads) <= 768
            assert chunk.local.start % align == 0
            assert torch.equal(flat.masters[chunk.local], flat.params[chunk.place].float())
        assert local.max() == 1
        assert [bucket.stage for bucket in flat.buckets] == [-1, 0, 1, 2, 3]
    assert owners is not None
    placed = torch.zeros_like(owners)
    for place in flat.ranges.values():
        assert place.start % align == 0
        placed[place] += 1
    assert torch.equal(owners[placed > 0], placed[placed > 0])


def stages_are_final(folder: Path, **how: Any) -> None:
    """When the backward pass reports a stage, the gradients of all parameters from it on are whole."""
    head = how.pop("head", "lm")
    model = build_model(load_config(folder, head), dtype=torch.float32, device="cpu")
    model.init_weights(2)
    if model.score is not None:
        torch.nn.init.normal_(model.score.weight)
    flat = FlatParameters(model)
    n = 9
    attend = PackedAttend(torch.tensor([0, 4, n], dtype=torch.int32), 5, "sdpa")
    seen: list[tuple[int, dict[str, torch.Tensor]]] = []
    model.on_stage_backward = lambda stage: seen.append((stage, gradients_from(model, stage)))
    hidden = model(torch.arange(n), torch.arange(n), attend, **how)
    (model.values(hidden) if head == "value" else hidden @ model.lm_head.weight.t()).square().sum().backward()
    assert [stage for stage, _ in seen] == [*range(len(model.layers), -1, -1)]
    assert flat.grads.any()
    for stage, found in seen:
        for name, gradient in gradients_from(model, stage).items():
            assert torch.equal(found[name], gradient), (stage, name)
    assert {model.backward_stage(name) for name, _ in model.named_parameters()} == {*range(-1, len(model.layers) + 1)}


def gradients_from(model: Transformer, stage: int) -> dict[str, torch.Tensor]:
    return {
        n: p.grad.clone()
        for n, p in model.named_parameters()
        if p.grad is not None and model.backward_stage(n) >= stage
    }


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"recompute": True, "n_kept": 1}, {"head": "value"}])
def test_the_backward_pass_reports_stages_in_time(tmp_path: Path, how: dict[str, Any]) -> None:
    stages_are_final(model_folder(tmp_path, num_hidden_layers=3, tie_word_embeddings=False, attention_bias=True), **how)


@pytest.mark.slow
def test_the_backward_pass_of_fused_layers_reports_stages_in_time(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, num_hidden_layers=2)
    run_interpreted(
        f"from tests.engine.train.test_zero import fused_stages; fused_stages({str(folder)!r})", timeout=200
    )


def fused_stages(folder: str) -> None:
    """In a process where Triton interprets."""
    stages_are_final(Path(folder), recompute=True, n_kept=1)
