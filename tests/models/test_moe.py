"""Families with experts: what a rank holds, the auxiliary loss and the statistics of the router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from areno.config.layout import Layout
from areno.engine.train.moe_routing import StepRouting
from areno.engine.train.packing import LocalTokens, PackedTokens
from areno.errors import ConfigError
from areno.layers.parallel import ParallelGroup
from areno.models.registry import build_model, layout_problems, load_config
from areno.models.transformer import Transformer
from areno.models.weights import checkpoint_table
from tests.helpers.family_cases import random_model
from tests.helpers.moe_models import moe_folder
from tests.helpers.two_ranks import gradient_of, load, packed, random_rows


def test_a_rank_holds_whole_experts_and_reads_only_those(tmp_path: Path) -> None:
    reference = random_model("qwen3-experts", tmp_path)
    model = load(tmp_path, ParallelGroup(1, 2))  # loading needs no collective
    ours, theirs = model.layers[1].mlp, reference.model.layers[1].mlp
    assert torch.equal(ours.experts_gate_up.stack_EOI, theirs.experts.gate_up_proj[4:])
    assert torch.equal(ours.experts_down.stack_EOI, theirs.experts.down_proj[4:])
    assert torch.equal(ours.router.weight, theirs.gate.weight)
    read = [part.shard_of(torch.zeros(part.full_shape)).numel() for part in ours.experts_down.layout["weight"]]
    assert read == [0] * 4 + [16 * 32] * 4


def test_ranks_that_do_not_divide_the_experts_name_the_key(tmp_path: Path) -> None:
    random_model("qwen3-experts", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "num_local_experts": 7, "intermediate_size": 45, "mlp_only_layers": []}))
    config = load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.tp_size: is 2, .*7 \(experts\).*num_local_experts=7"):
        build_model(config, dtype=torch.float32, device="cpu", tp=ParallelGroup(rank=0, size=2))
    assert "intermediate" not in str(layout_problems(config, Layout.single_replica(2))[0])  # no layer has a plain MLP


def test_random_weights_tell_tokens_apart_and_use_all_experts(tmp_path: Path) -> None:
    """With weights that are all equally large, attention makes tokens alike, and a rounding error reroutes them."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_experts": 16, "vocab_size": 256}
    changes = {**sizes, "initializer_range": 0.125, "mlp_only_layers": [], "tie_word_embeddings": False}
    config = load_config(moe_folder(tmp_path, **changes))
    model = build_model(config, dtype=torch.float32, device="cpu")
    model.init_weights(1)
    noise_VD = torch.randn(model.embed.weight.shape, generator=torch.Generator().manual_seed(2))
    assert model.routing is not None
    tokens, positions, attend = packed(random_rows(256, (200,)))
    found = []
    with torch.no_grad():
        for noise in (0.0, 1e-3):
            model.routing.configure(records=True)
            model.embed.weight.mul_(1 + noise * noise_VD)
            found.append((model(tokens, positions, attend), model.routing.recorded_experts()))
    (hidden_ND, experts_NLk), (moved_ND, moved_NLk) = found
    assert hidden_ND.mean(0).square().mean() < 0.2 * hidden_ND.square().mean()
    for layer in range(config.num_layers):
        assert experts_NLk[:, layer].unique().numel() == 16
    assert (experts_NLk.sort().values != moved_NLk.sort().values).any(-1).float().mean() < 0.01
    assert (moved_ND - hidden_ND).norm() < 0.02 * hidden_ND.norm()


# --- the auxiliary loss ---


def aux_loss(model: Transformer, coefficient: float, rows: list[list[torch.Tensor]]) -> float:
    """Leave the gradient of the auxiliary loss alone in the parameters, over micro-batches; returns the loss."""
    assert model.routing is not None
    routing = StepRouting(model.routing, coefficient, ParallelGroup())
    batches = []
    for batch in rows:
        tokens, positions, attend = packed(batch)
        batches.append(PackedTokens(tokens, positions, attend.cu_seqlens, attend.max_len))

    def run(one: PackedTokens) -> torch.Tensor:
        share = LocalTokens.for_rank(one, ParallelGroup(), "sdpa")
        routing.begin_pass(one, share)
        return model(share.tokens_n, share.positions_n, share.attend)

    routing.begin_step(batches, run)
    routing.restart()
    for one in batches:
        hidden = run(one)
        routing.count_experts()
        (hidden * 0).sum().backward()  # a loss that knows nothing of the router
    routing.free_tensors()
    routing.add_statistics(numbers := {"total_loss": 0.0})
    return numbers["router_aux_loss"]


def loss_of_shares(reference: Any, row: torch.Tensor) -> torch.Tensor:
    """The same loss of sigmoid scores, as shares of their sum (DeepSeek-V3, arXiv 2412.19437, equation 19)."""
    routed = []
    routers = [module for module in reference.modules() if hasattr(module, "e_score_correction_bias")]
    hooks = [router.register_forward_hook(lambda _, args, output: routed.append(output)) for router in routers]
    reference.model(row[None])
    for hook in hooks:
        hook.remove()
    n_experts, scores = routers[0].num_experts, torch.cat([logits.sigmoid() for logits, _, _ in routed])
    chosen = torch.cat([torch.nn.functional.one_hot(chosen, n_experts).sum(1) for _, _, chosen in routed]).float()
    return n_experts * (chosen.mean(0) * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "glm4-tied", "gpt-oss"])
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_model(f"{case}-experts", tmp_path)
    row = random_rows(101, (40,))[0]
    config = reference.config
    if case == "glm4-tied":  # for which transformers has no loss
        expected = loss_of_shares(reference, row)
    else:
        logits = reference.model(row[None], output_router_logits=True).router_logits
        expected = load_balancing_loss_func(logits, config.num_local_experts, config.num_experts_per_tok)
    (0.3 * expected).backward()
    model = load(tmp_path)
    assert aux_loss(model, 0.3, [[row]]) == pytest.approx(expected.item(), rel=1e-5)
    theirs, n_routers = dict(reference.named_parameters()), 0
    for name, parameter, part in checkpoint_table(model):
        ours = torch.zeros(part.full_shape) if parameter.grad is None else part.region(parameter.grad)
        is_compared = ".experts." not in name and "self_attn" not in name and not name.endswith("correction_bias")
        expected_grad = gradient_of(name, theirs) if is_compared else None
        if expected_grad is not None and name != "lm_head.weight":
            n_routers += "gate.weight" in name or "router" in name
            torch.testing.assert_close(ours, expected_grad, atol=1e-5, rtol=1e-3, msg=name)
    assert n_routers == sum("gate.weight" in name or "router" in name for name in theirs)


def test_the_auxiliary_loss_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    random_model("qwen3-experts", tmp_path)
    rows = random_rows(101, (9, 30, 4, 17))
    found = []
    for batches in ([rows], [[row] for row in rows], [rows[:1], rows[1:]]):
        model = load(tmp_path)
        loss = aux_loss(model, 1.0, batches)
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert grads["layers.1.mlp.router.weight"].abs().max() > 1e-4
        found.append((loss, grads))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], atol=1e-6, rtol=1e-4, msg=name)


def test_statistics_are_those_of_a_count_by_hand(tmp_path: Path) -> None:
    reference = random_model("qwen3-experts", tmp_path)
    row = random_rows(101, (40,))[0]
    model = load(tmp_path)
    assert model.routing is not None
    routing = StepRouting(model.routing, 0.0, ParallelGroup())
    tokens, positions, attend = packed([row])
    one = PackedTokens(tokens, positions, attend.cu_seqlens, attend.max_len)
    share = LocalTokens.for_rank(one, ParallelGroup(), "sdpa")
    routing.begin_step([one], lambda packed: None)
    routing.begin_pass(one, share)
    model(share.tokens_n, share.positions_n, share.attend)
    routing.count_experts()
    routing.add_statistics(found := {"total_loss": 0.0})
    with torch.no_grad():
        probs = [logits.softmax(-1) for logits in reference.model(row[None], output_router_logits=True).router_logits]
    counts = [torch.bincount(each.topk(2, dim=-1).indices.flatten(), minlength=8).double() for each in probs]
    violations = [each / each.mean() - 1 for each in counts]
    assert len(violations) == 2
    assert found["router_max_violation"] == pytest.approx(float(sum(each.max() for each in violations)) / 2, rel=1e-6)
    mean = float(sum(each.abs().mean() for each in violations)) / 2
    assert found["router_mean_violation"] == pytest.approx(mean, rel=1e-6)
    entropies = [-(each * each.log()).sum(-1).mean() / torch.tensor(8.0).log() for each in probs]
    assert found["router_entropy"] == pytest.approx(float(sum(entropies)) / 2, rel=1e-4)
    assert found["router_changed"] == 0.0
