"""More families against transformers: same logits and gradients, saved and loaded, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from two_ranks import compare_models, load, on_two_ranks, packed, random_rows

from areno.models.weights import save_weights
from tests.family_cases import CASES, random_model

NAMES = list(CASES)


def logits_of(reference: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([reference(row[None]).logits[0] for row in rows])


@pytest.mark.parametrize("case", NAMES)
def test_logits_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    model = load(tmp_path)
    rows = random_rows(101)
    logits, expected = model.logits(model(*packed(rows))), logits_of(reference, rows)
    assert expected.std() > 0.3  # a reference that says nothing would agree with anything
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) / 10
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    # What was gathered under the names of the checkpoint, as saving does.
    save_weights(model, tmp_path / "gradients")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gradients", dtype=torch.float32)
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter.data, theirs[name], atol=5e-4, rtol=1e-3, msg=f"{case} {name}")


@pytest.mark.parametrize("case", NAMES)
def test_transformers_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    reference = random_model(case, tmp_path)
    save_weights(load(tmp_path), tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(saved.state_dict()[name], tensor), name
    rows = random_rows(101, (60,))
    with torch.no_grad():
        assert torch.equal(logits_of(saved, rows), logits_of(reference, rows))


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, gradients (after gathering), initialisation and saving."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    references = {case: random_model(case, tmp_path / case) for case in NAMES}
    on_two_ranks(compare_models, *(tmp_path / case for case in NAMES))
    for case, reference in references.items():
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{tmp_path / case}-saved", dtype=torch.float32)
        for name, parameter in reference.state_dict().items():
            assert torch.equal(saved.state_dict()[name], parameter), f"{case} {name}"
