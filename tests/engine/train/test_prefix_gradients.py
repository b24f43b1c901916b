"""Gradients of all weights with shared prefixes: adapters, experts with the loss that balances them, critics, ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.cost.prefix_sharing import PrefixSharing
from areno.engine.train.backend import TrainBackend
from areno.engine.train.checked_rows import read_rows
from areno.engine.train.micro_batches import divide_steps
from areno.layers.config import AdapterSpec
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.ppo import value_loss_fn
from areno.models.adapter_shapes import linear_shapes
from areno.models.adapters import add_adapters
from areno.models.registry import build_model, load_config
from areno.specs.update import UpdateSpec
from tests.helpers.moe_models import moe_folder
from tests.helpers.shared_rows import group, train_rows, tree
from tests.helpers.tiny_backend import OPTIMIZER, WHOLE
from tests.helpers.tiny_engine import folder_with
from tests.helpers.tp_ranks import Groups, full_gradients, on_ranks
from tests.helpers.train_backend import train_backend

LINKED = MicroBatchSpec(max_tokens_per_mb=90)  # the largest group is in several micro-batches


def backend(kind: str, folder: Path, layout: Groups | None = None) -> TrainBackend:
    """The same weights for the same kind."""
    layout = layout or Groups()
    config = load_config(folder, "value" if kind == "critic" else "lm")
    model = build_model(config, dtype=torch.float32, device="cpu", tp=layout.tp)
    model.init_weights(3)
    if kind == "adapters":
        add_adapters(model, AdapterSpec(rank=3, alpha=6.0, targets=tuple(linear_shapes(config))))
        drawn = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:  # B begins with zeros, and the gradient of A would be zero
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=drawn))
    if kind == "critic":  # its head begins with zeros, too
        torch.nn.init.normal_(model.get_parameter("score.weight"), generator=torch.Generator().manual_seed(6))
    coef = 0.1 if kind == "experts" else 0.0
    return train_backend(model, OPTIMIZER, dp=layout.dp, cp=layout.cp, data=layout.data, router_aux_loss_coef=coef)


def assert_same_gradients(kind: str, folder: Path, spec: MicroBatchSpec, layout: Groups | None = None) -> None:
    """Of a step on groups, trees and equal rows, to 2e-6 of the largest entry of each tensor.

    Rounding is allowed 1.5 times the error that rows in another order have.
    """
    of: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("apart", "reversed", "shared"):
        trained = backend(kind, folder, layout)
        vocab = trained.model.config.vocab_size
        tokens = [*group(14, [6, 0, 9], vocab), *tree(4, vocab), *group(14, [11] * 9, vocab, 3)]
        rows = train_rows([*tokens, tokens[-1]], prompt=2, staleness=1)
        rows = rows[::-1] if name == "reversed" else rows
        update = UpdateSpec(spec if name == "shared" else WHOLE, old_logprobs="rollout")
        rule = PrefixSharing("on" if name == "shared" else "off")
        (steps,) = divide_steps(read_rows(rows, vocab), update, sharing=rule)
        if name == "shared":
            assert (max(map(len, steps[0].groups)) > 1) == (spec is LINKED)
        stats = trained.train(steps, value_loss_fn if kind == "critic" else gspo_loss_fn, update).stats
        assert (stats["computed_tokens"] < stats["row_tokens"]) == (name == "shared")
        if layout is not None:
            of[name] = full_gradients(trained)
            continue
        of[name] = {
            key: parameter.grad.clone()
            for key, parameter in trained.model.named_parameters()
            if parameter.grad is not None
        }
    assert of["apart"].keys() == of["shared"].keys()
    assert len(of["apart"]) > 10
    for key, expected in of["apart"].items():
        scale = expected.abs().max()
        assert scale > 0, key
        rounding = (of["reversed"][key] - expected).abs().max() / scale
        bar = max(2e-6, 1.5 * rounding.item())
        assert bar < 2e-5, key
        assert (of["shared"][key] - expected).abs().max() <= bar * scale, key


KINDS = ("dense", "adapters", "experts", "critic")


def folder_of(kind: str, path: Path) -> Path:
    return moe_folder(path) if kind == "experts" else folder_with(path)


@pytest.mark.parametrize("spec", [WHOLE, LINKED], ids=["one pass", "linked"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_weights_are_those_of_rows_apart(kind: str, spec: MicroBatchSpec, tmp_path: Path) -> None:
    assert_same_gradients(kind, folder_of(kind, tmp_path), spec)


def check_ranks(folder: Path, kinds: list[str]) -> None:
    layout = Groups.of(tp=2)
    for kind in kinds:
        for spec in (WHOLE, LINKED):
            assert_same_gradients(kind, folder / kind, spec, layout)


@pytest.mark.slow
def test_gradients_on_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    kinds = ["dense", "experts", "critic"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        folder_of(kind, tmp_path / kind)
    on_ranks(2, check_ranks, tmp_path, kinds)
