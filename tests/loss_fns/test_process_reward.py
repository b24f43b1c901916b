"""The loss of process reward models against loops in float64, however a step is divided."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areno.loss_fns import process_reward_loss_fn
from areno.loss_fns.data_pack import DataPack

# Label of each marked token, None elsewhere.
LABELS = [
    [None, None, 1, None, 0],
    [None, 1, None, None],
    [None, 0, None, 0, 1],
    [None, None, None],  # a row without steps
    [None, 0.75, 0.2],
    [None, None, 1, 1, None, 0],
]


def pack_of(labels, values, step_tokens=None, dtype=torch.float64):
    flat = [label for row in labels for label in row]
    mask = torch.tensor([label is not None for label in flat])
    pack = DataPack(
        tokens=torch.zeros(len(flat), dtype=torch.int64),
        row_of_token=torch.tensor([number for number, row in enumerate(labels) for _ in row]),
        loss_mask=mask,
        n_rows=len(labels),
        step_tokens=int(mask.sum()) if step_tokens is None else step_tokens,
        step_rows=len(labels),
        returns=torch.tensor([label or 0.0 for label in flat], dtype=dtype),
    )
    return pack, torch.tensor([v for row in values for v in row], dtype=dtype, requires_grad=True)


def random_values(seed):
    draw = random.Random(seed)
    return [[draw.gauss(0, 2) for _ in row] for row in LABELS]


def by_hand(labels, values):
    rows = [list(zip(*row, strict=True)) for row in zip(values, labels, strict=True)]
    steps = [[(v, y) for v, y in row if y is not None] for row in rows]
    n = sum(map(len, steps))
    out = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0, "confidence": 0.0}
    first, grads = [], []
    for row in steps:
        wrong = [number for number, (_, y) in enumerate(row) if y < 0.5]
        found = [number for number, (v, _) in enumerate(row) if v < 0]
        if wrong:
            first.append(float(found[:1] == wrong[:1]))
        for v, y in row:
            p = math.exp(v) / (1 + math.exp(v))
            out["loss"] += (-y * math.log(p) - (1 - y) * math.log(1 - p)) / n
            out["accuracy"] += ((p > 0.5) == (y >= 0.5)) / n
            out["margin"] += (v if y >= 0.5 else -v) / n
            out["confidence"] += max(p, 1 - p) / n
    for row in rows:
        grads += [0.0 if y is None else (1 / (1 + math.exp(-v)) - y) / n for v, y in row]
    return out, first, grads


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_the_loss_is_the_cross_entropy_of_steps(dtype, tol):
    for seed in range(5):
        values = random_values(seed)
        pack, given = pack_of(LABELS, values, dtype=dtype)
        loss, stats = process_reward_loss_fn(pack, given)
        loss.backward()
        expected, first, grads = by_hand(LABELS, values)
        assert {"loss": loss.item()} | {name: stats[name].item() for name in expected if name != "loss"} == (
            pytest.approx(expected, abs=tol)
        )
        assert stats["first_error"].tolist() == first
        torch.testing.assert_close(given.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        assert len(stats["rewards"]) == 11


def test_it_is_the_loss_of_a_token_classifier():
    """Of transformers, whose two scores for each token differ by the value."""
    from transformers.loss.loss_utils import ForTokenClassification

    labels = [[None if label is None else round(label) for label in row] for row in LABELS]
    values = random_values(0)
    logits = torch.randn(sum(map(len, labels)), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[:, 1] = logits[:, 0] + torch.tensor([v for row in values for v in row])
    marked = torch.tensor([-100 if label is None else label for row in labels for label in row])
    theirs = ForTokenClassification(logits, marked, type("Config", (), {"num_labels": 2}))
    assert process_reward_loss_fn(*pack_of(labels, values))[0].item() == pytest.approx(theirs.item(), abs=1e-6)


def test_micro_batches_add_up():
    values = random_values(1)
    pack, given = pack_of(LABELS, values)
    loss, stats = process_reward_loss_fn(pack, given)
    parts = [
        process_reward_loss_fn(*pack_of(LABELS[part], values[part], step_tokens=11))
        for part in (slice(0, 2), slice(2, 3), slice(3, 6))
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), abs=1e-12)
    for name in ("accuracy", "margin", "confidence"):
        assert sum(each[name].item() for _, each in parts) == pytest.approx(stats[name].item(), abs=1e-12)
    assert torch.cat([each["first_error"] for _, each in parts]).tolist() == stats["first_error"].tolist()
