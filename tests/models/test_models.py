"""Families against transformers: same logits, same gradients, whatever the packing, recompute or number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from areno.errors import ConfigError
from areno.layers.parallel import ParallelGroup
from areno.models.registry import build_model, load_config
from tests.helpers.family_cases import DENSE, EXPERTS, random_model
from tests.helpers.two_ranks import assert_gradients, load, packed, random_rows

MODELS = Path(__file__).parents[3] / "shared/data/models"


@pytest.mark.parametrize("case", [*DENSE, *EXPERTS])
def test_packed_rows_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    with torch.no_grad():
        logits = model.logits(model(*packed(rows)))
        expected = torch.cat([reference(row[None]).logits[0] for row in rows])
    assert logits.dtype == torch.float32
    assert expected.std() > 0.3  # a reference that says nothing would agree with anything
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(not MODELS.is_dir(), reason="shared/data is not beside this checkout")
@pytest.mark.parametrize("name", ["stories260K-hf", "verl-arithmetic-sequence"])
def test_real_weights_give_the_logits_of_transformers(name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    model = load(MODELS / name)
    rows = random_rows(model.config.vocab_size, (40, 200))
    with torch.no_grad():
        logits = model.logits(model(*packed(rows)))
        expected = torch.cat([reference(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(not MODELS.is_dir(), reason="shared/data is not beside this checkout")
def test_real_weights_give_the_recorded_logits() -> None:
    folder = MODELS / "stories260K-hf"
    recorded = json.loads((folder / "reference_forward.json").read_text())
    model = load(folder)
    with torch.no_grad():
        logits = model.logits(model(*packed([torch.tensor(recorded["input_ids"])]))[-1:])
    torch.testing.assert_close(logits[0], torch.tensor(recorded["last_logits"]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("case", "recompute", "absolute"),
    [
        *((case, False, 2e-4) for case in ("qwen3-tied", "llama-linear", "qwen3-yarn")),
        *((case, recompute, 5e-4) for case in EXPERTS for recompute in (False, True)),
    ],
)
def test_gradients_are_those_of_transformers(case: str, recompute: bool, absolute: float, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101, (5, 9))
    weights = torch.randn(14, 101, generator=torch.Generator().manual_seed(2))
    (model.logits(model(*packed(rows), recompute=recompute)) * weights).sum().backward()
    (torch.cat([reference(row[None]).logits[0] for row in rows]) * weights).sum().backward()
    compared = assert_gradients(model, reference, absolute)
    assert (sum(".experts." in name for name in compared) > 10) == (case in EXPERTS)


def test_a_row_does_not_see_its_neighbours(tmp_path: Path) -> None:
    random_model("qwen3", tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    with torch.no_grad():
        together = model(*packed(rows)).split([len(row) for row in rows])
        for row, hidden in zip(rows, together, strict=True):
            torch.testing.assert_close(hidden, model(*packed([row])), atol=1e-5, rtol=1e-5)


def test_recompute_changes_memory_and_not_gradients(tmp_path: Path) -> None:
    random_model("qwen3", tmp_path)
    model = load(tmp_path)
    tokens, positions, attend = packed(random_rows(101))
    grads, kept = [], []
    for recompute in (False, True):
        model.zero_grad()
        n_kept = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal n_kept
            n_kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            hidden = model(tokens, positions, attend, recompute=recompute)
        kept.append(n_kept)
        hidden.square().sum().backward()
        grads.append([parameter.grad for parameter in model.layers.parameters()])
    assert kept[1] < kept[0] / 3
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=0, rtol=0)


def test_parameters_can_become_views_of_a_flat_buffer(tmp_path: Path) -> None:
    random_model("qwen3-tied", tmp_path)
    model = load(tmp_path)
    tokens, positions, attend = packed(random_rows(101))
    expected = model.logits(model(tokens, positions, attend)).detach()
    parameters = dict(model.named_parameters())
    assert "head.weight" not in parameters
    assert model.lm_head.weight is parameters["embed.weight"]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    start = 0
    for parameter in parameters.values():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    torch.testing.assert_close(model.logits(model(tokens, positions, attend)), expected, atol=0, rtol=0)
    flat.mul_(0)
    assert model.logits(model(tokens, positions, attend)).abs().max() == 0


def test_init_weights_follows_seed_and_kind(tmp_path: Path) -> None:
    random_model("qwen2", tmp_path)
    config = load_config(tmp_path)
    models = [build_model(config, dtype=torch.float32, device="cpu") for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        model.init_weights(seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert first["layers.0.mlp.gate_up.weight"].std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert first["layers.1.input_norm.weight"].eq(1).all()
    assert first["layers.1.attention.qkv.bias"].eq(0).all()
    for name, parameter in first.items():
        assert (parameter.dim() == 1) == ("norm" in name or name.endswith("bias")), name


# --- tensor parallelism ---


def test_ranks_that_do_not_divide_the_model_name_the_key(tmp_path: Path) -> None:
    random_model("qwen3", tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.tp_size: is 3, .*num_key_value_heads=2"):
        build_model(config, dtype=torch.float32, device="cpu", tp=ParallelGroup(rank=0, size=3))
