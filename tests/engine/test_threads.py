"""The number of threads of a rank on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from areno.config.models import MicroBatchSpec
from areno.engine import deterministic
from areno.engine.deterministic import CpuThreads
from areno.engine.engine import Engine
from areno.engine.train.passes import ForwardPasses
from tests.helpers.tiny_engine import engine_spec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def in_pass(found: CpuThreads, n_tokens: int) -> int:
    with found.for_pass(n_tokens):
        return torch.get_num_threads()


@pytest.mark.parametrize(
    ("size", "n_tokens", "exact", "decoding", "training"),
    [
        (300_000, 500, False, 1, 1),
        (300_000, 2_000, False, 1, 2),
        (300_000, 2_000, True, 1, 1),
        (6_000_000, 1, False, 2, 2),
        (6_000_000, 1, True, 2, 2),
    ],
)
def test_a_tiny_model_has_all_threads_for_large_passes_alone(
    size: int, n_tokens: int, exact: bool, decoding: int, training: int
) -> None:
    found = CpuThreads(CPU, 2, lambda: size, one_number=exact)  # two ranks share the four threads
    assert torch.get_num_threads() == decoding
    assert in_pass(found, n_tokens) == training
    assert torch.get_num_threads() == decoding


def test_a_device_does_not_change_threads() -> None:
    found = CpuThreads(torch.device("cuda"), 2, lambda: 1, one_number=False)
    assert in_pass(found, 1 << 40) == torch.get_num_threads() == 4


def test_scores_of_an_engine_count_the_tokens_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    hidden = ForwardPasses.hidden_states
    monkeypatch.setattr(
        ForwardPasses,
        "hidden_states",
        lambda self, packed: (seen.append(torch.get_num_threads()), hidden(self, packed))[1],
    )
    with Engine(engine_spec("examples/quickstart/model")) as engine:
        rows = np.random.default_rng(1).integers(4, 16, (30, 100)).tolist()  # without common prefixes
        monkeypatch.setattr(deterministic, "_ALL_FROM", engine.info.n_params * 1000)
        engine.logprobs("actor", rows, mb_spec=MicroBatchSpec(max_tokens_per_mb=999))
        assert set(seen) == {1}
        seen.clear()
        engine.logprobs("actor", rows, mb_spec=MicroBatchSpec(max_tokens_per_mb=3000))
        assert set(seen) == {4}
