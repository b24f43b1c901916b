"""Families with experts against transformers: logits, gradients, files, the auxiliary loss; on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from areno.config.layout import Layout
from areno.engine.train.moe_routing import StepRouting
from areno.engine.train.packing import LocalTokens, PackedTokens
from areno.errors import CheckpointError, ConfigError
from areno.layers.parallel import ParallelGroup
from areno.models.registry import build_model, layout_problems, load_config
from areno.models.transformer import Transformer
from areno.models.weights import checkpoint_table
from tests.helpers.moe_models import CASES, SHAPE, random_reference
from tests.helpers.saving import save_weights
from tests.helpers.two_ranks import assert_saved_alike, compare_models, load, on_two_ranks, packed, random_rows


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    with torch.no_grad():
        logits = model.logits(model(*packed(rows)))
        expected = torch.cat([reference(row[None]).logits[0] for row in rows])
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def their_gradient(name: str, theirs: dict[str, Any]) -> torch.Tensor:
    """Of a checkpoint tensor; transformers stacks the experts of a layer in one parameter."""
    name = name.replace("block_sparse_moe", "mlp").replace("w1", "gate_proj").replace("w3", "up_proj")
    name = name.replace("w2", "down_proj")
    if ".experts." not in name:
        return theirs[name].grad
    layer, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    if kind == "down_proj":
        return theirs[f"{layer}.experts.down_proj"].grad[int(expert)]
    return theirs[f"{layer}.experts.gate_up_proj"].grad[int(expert)].chunk(2)[kind == "up_proj"]


@pytest.mark.parametrize("case", ["qwen3", "qwen3-tied", "mixtral"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_transformers(case: str, recompute: bool, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101, (5, 9))
    weights = torch.randn(14, 101, generator=torch.Generator().manual_seed(2))
    (model.logits(model(*packed(rows), recompute=recompute)) * weights).sum().backward()
    (torch.cat([reference(row[None]).logits[0] for row in rows]) * weights).sum().backward()
    theirs, n_experts = dict(reference.named_parameters()), 0
    for name, parameter, part in checkpoint_table(model):
        assert parameter.grad is not None
        n_experts += ".experts." in name
        expected = their_gradient(name, theirs)
        torch.testing.assert_close(part.region(parameter.grad), expected, atol=5e-4, rtol=1e-4, msg=name)
    assert n_experts > 10


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path / "theirs")
    save_weights(load(tmp_path / "theirs"), tmp_path / "ours")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    row = random_rows(101, (20,))[0][None]
    with torch.no_grad():
        assert torch.equal(again(row).logits, reference(row).logits)


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients (after gathering), initialisation and saving, each rank with half of the experts."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    references = [random_reference(case, tmp_path / case) for case in CASES]
    on_two_ranks(compare_models, *(tmp_path / case for case in CASES))
    for case, reference in zip(CASES, references, strict=True):
        assert_saved_alike(reference, Path(f"{tmp_path / case}-saved"))


def test_a_rank_holds_whole_experts_and_reads_only_those(tmp_path: Path) -> None:
    reference = random_reference("qwen3", tmp_path)
    model = load(tmp_path, ParallelGroup(1, 2))  # loading needs no collective
    ours, theirs = model.layers[1].mlp, reference.model.layers[1].mlp
    assert torch.equal(ours.experts_gate_up.stack_EOI, theirs.experts.gate_up_proj[4:])
    assert torch.equal(ours.experts_down.stack_EOI, theirs.experts.down_proj[4:])
    assert torch.equal(ours.router.weight, theirs.gate.weight)
    read = [part.cut(torch.zeros(part.full_shape)).numel() for part in ours.experts_down.layout["weight"]]
    assert read == [0] * 4 + [16 * 32] * 4


def test_ranks_that_do_not_divide_the_experts_name_the_key(tmp_path: Path) -> None:
    random_reference("qwen3", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "num_local_experts": 7, "intermediate_size": 45, "mlp_only_layers": []}))
    config = load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.tp_size: is 2, .*7 \(experts\).*num_local_experts=7"):
        build_model(config, dtype=torch.float32, device="cpu", tp=ParallelGroup(rank=0, size=2))
    assert "intermediate" not in str(layout_problems(config, Layout.one_copy(2))[0])  # no layer has a plain MLP


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3", {"num_local_experts": None}, "num_experts is missing"),
        ("qwen3", {"num_experts": 9}, "num_local_experts is 8, and num_experts is 9"),
        ("qwen3", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, .* at most num_local_experts=8"),
        ("qwen3", {"mlp_only_layers": [3]}, "mlp_only_layers is .*layers, 0 to 2"),
        ("qwen3", {"mlp_only_layers": [0, 1, 2]}, "leave no layer with experts"),
        ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected int, at least 1"),
        ("qwen3", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is True"),
        ("qwen3", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, a field that areno"),
        ("mixtral", {"sliding_window": 64}, "sliding_window is 64, which is not supported"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, which is not supported"),
        ("mixtral", {"rope_parameters": None}, "rope_theta is missing"),
    ],
)
def test_fields_that_are_not_supported_are_named(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind, extra = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **extra)
    config.architectures = ["Qwen3MoeForCausalLM" if kind == "qwen3_moe" else "MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    load_config(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_config(tmp_path)


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
        share = LocalTokens.of_rank(one, ParallelGroup(), "sdpa")
        routing.begin(one, share)
        return model(share.tokens_n, share.positions_n, share.attend)

    routing.begin_step(batches, run)
    routing.restart()
    for one in batches:
        hidden = run(one)
        routing.add()
        (hidden * 0).sum().backward()  # a loss that knows nothing of the router
    routing.end()
    routing.add_statistics(numbers := {"total_loss": 0.0})
    return numbers["router_aux_loss"]


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path)
    row = random_rows(101, (40,))[0]
    out = reference.model(row[None], output_router_logits=True)
    config = reference.config
    expected = load_balancing_loss_func(out.router_logits, config.num_local_experts, config.num_experts_per_tok)
    (0.3 * expected).backward()
    model = load(tmp_path)
    assert aux_loss(model, 0.3, [[row]]) == pytest.approx(expected.item(), rel=1e-5)
    theirs, n_routers = dict(reference.named_parameters()), 0
    for name, parameter, part in checkpoint_table(model):
        ours = torch.zeros(part.full_shape) if parameter.grad is None else part.region(parameter.grad)
        expected_grad = their_gradient(name, theirs) if ".experts." not in name else None
        if expected_grad is not None and name != "lm_head.weight":
            n_routers += "gate.weight" in name
            torch.testing.assert_close(ours, expected_grad, atol=1e-5, rtol=1e-3, msg=name)
    assert n_routers == sum("gate.weight" in name for name in theirs)


def test_the_auxiliary_loss_does_not_depend_on_micro_batches(tmp_path: Path) -> None:
    random_reference("qwen3", tmp_path)
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
    reference = random_reference("qwen3", tmp_path)
    row = random_rows(101, (40,))[0]
    model = load(tmp_path)
    assert model.routing is not None
    routing = StepRouting(model.routing, 0.0, ParallelGroup())
    tokens, positions, attend = packed([row])
    one = PackedTokens(tokens, positions, attend.cu_seqlens, attend.max_len)
    share = LocalTokens.of_rank(one, ParallelGroup(), "sdpa")
    routing.begin_step([one], lambda packed: None)
    routing.begin(one, share)
    model(share.tokens_n, share.positions_n, share.attend)
    routing.add()
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


# --- scores ---


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_a_reward_model_gives_the_scores_of_transformers(case: str, tmp_path: Path) -> None:
    kind, extra = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **extra, num_labels=1, pad_token_id=0)
    reference = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, head="value")
    rows = [row.clamp(min=1) for row in random_rows(101)]
    with torch.no_grad():
        found = model.values(model(*packed(rows))).split([len(row) for row in rows])
        expected = [reference(row[None]).logits[0, 0] for row in rows]
    assert torch.stack(expected).std() > 0.1
    for values, score in zip(found, expected, strict=True):
        torch.testing.assert_close(values[-1], score, atol=1e-4, rtol=0)
