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
from areno.models.weights import checkpoint_table
from tests.helpers.dense_models import CASES, random_reference
from tests.helpers.two_ranks import assert_saved_alike, compare_models, load, on_two_ranks, packed, random_rows

MODELS = Path(__file__).parents[3] / "shared/data/models"


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path)
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


@pytest.mark.parametrize("case", ["qwen3-tied", "llama-linear", "qwen3-yarn"])
def test_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_reference(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101, (5, 9))
    weights = torch.randn(14, 101, generator=torch.Generator().manual_seed(2))
    (model.logits(model(*packed(rows))) * weights).sum().backward()
    (torch.cat([reference(row[None]).logits[0] for row in rows]) * weights).sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter, part in checkpoint_table(model):
        assert parameter.grad is not None
        torch.testing.assert_close(part.region(parameter.grad), theirs[name].grad, atol=2e-4, rtol=1e-4, msg=name)


def test_a_row_does_not_see_its_neighbours(tmp_path: Path) -> None:
    random_reference("qwen3", tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    with torch.no_grad():
        together = model(*packed(rows)).split([len(row) for row in rows])
        for row, hidden in zip(rows, together, strict=True):
            torch.testing.assert_close(hidden, model(*packed([row])), atol=1e-5, rtol=1e-5)


def test_recompute_changes_memory_and_not_gradients(tmp_path: Path) -> None:
    random_reference("qwen3", tmp_path)
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
    random_reference("qwen3-tied", tmp_path)
    model = load(tmp_path)
    tokens, positions, attend = packed(random_rows(101))
    expected = model.logits(model(tokens, positions, attend)).detach()
    parameters = dict(model.named_parameters())
    assert "head.weight" not in parameters
    assert model.output.weight is parameters["embed.weight"]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    start = 0
    for parameter in parameters.values():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    torch.testing.assert_close(model.logits(model(tokens, positions, attend)), expected, atol=0, rtol=0)
    flat.mul_(0)
    assert model.logits(model(tokens, positions, attend)).abs().max() == 0


def test_init_weights_follows_seed_and_kind(tmp_path: Path) -> None:
    random_reference("qwen2", tmp_path)
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
    random_reference("qwen3", tmp_path)
    config = load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.tp_size: is 3, .*num_key_value_heads=2"):
        build_model(config, dtype=torch.float32, device="cpu", tp=ParallelGroup(rank=0, size=3))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients (after gathering), initialisation and saving; 101 tokens leave the last rank a padded row."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cases = ("qwen3", "qwen3-tied", "llama-linear", "llama3-rope", "qwen2", "qwen2-tied")  # each family, tied and not
    references = [random_reference(case, tmp_path / case) for case in cases]
    on_two_ranks(compare_models, *(tmp_path / case for case in cases))
    for case, reference in zip(cases, references, strict=True):
        assert_saved_alike(reference, Path(f"{tmp_path / case}-saved"))
