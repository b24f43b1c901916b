"""Rows for the tests of the losses: as lists for formulas written by hand, and packed for the loss functions."""

from __future__ import annotations

import random

import pytest
import torch

from areno.loss_fns.data_pack import DataPack

PER_TOKEN = ("old_logprobs", "advantages", "ref_logprobs", "entropy", "weights", "values", "returns")
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-6)]


def random_rows(seed=0, constant_advantage=False, spread=0.4):
    """Rows as dicts of lists; masks have holes, one row has no trained token, one has a single one.

    `outputs` is what the trained model says of each token: a log-probability, or for the critic a value.
    """
    rng, more = random.Random(seed), random.Random(seed + 100)
    rows = []
    for mask in ([0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1], [0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1, 1, 1, 1, 1]):
        n, advantage = len(mask), rng.gauss(0, 1)
        old = [-rng.expovariate(1) for _ in mask]
        rows.append(
            {
                "mask": mask,
                "outputs": [o + rng.gauss(0, spread) for o in old],
                "old_logprobs": old,
                "ref_logprobs": [o + rng.gauss(0, 0.5) for o in old],
                "advantages": [advantage if constant_advantage else rng.gauss(0, 1) for _ in range(n)],
                "entropy": [rng.random() for _ in mask],
                "weights": [more.choice([0.0, more.uniform(0.2, 3.0)]) for _ in mask],
                "values": [o + more.gauss(0, spread) for o in old],
                "returns": [more.gauss(0, 1) for _ in mask],
                "staleness": more.choice([0, 1, 4]),
            }
        )
    return rows


def interpolates(loss_fn):
    """Whether the loss is to find the proximal policy between the rollout and the policy in training."""
    return getattr(loss_fn, "keywords", {}).get("prox_logp_method") == "loglinear"


def pack_of(rows, *, weighted=False, interpolated=False, step_rows=None, step_tokens=None, dtype=torch.float64):
    """Pack rows for a loss: (DataPack, outputs (N,) with requires_grad).

    weighted: the rows bring weights. interpolated: their old log-probabilities are those of the rollout alone.
    """
    flat = {name: [v for row in rows for v in row[name]] for name in (*PER_TOKEN, "outputs", "mask")}
    mask = torch.tensor(flat["mask"]).bool()
    fields = {name: torch.tensor(flat[name], dtype=dtype) for name in PER_TOKEN if weighted or name != "weights"}
    if interpolated:
        fields["rollout_logprobs"] = fields.pop("old_logprobs")
    pack = DataPack(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        row_of_token=torch.tensor([i for i, row in enumerate(rows) for _ in row["mask"]]),
        loss_mask=mask,
        n_rows=len(rows),
        step_tokens=int(mask.sum()) if step_tokens is None else step_tokens,
        step_rows=sum(any(row["mask"]) for row in rows) if step_rows is None else step_rows,
        staleness=torch.tensor([float(row["staleness"]) for row in rows]),
        **fields,
    )
    return pack, torch.tensor(flat["outputs"], dtype=dtype, requires_grad=True)


def trained(row):
    return [t for t, m in enumerate(row["mask"]) if m]


def all_trained(rows, name):
    return [row[name][t] for row in rows for t in trained(row)]


def token_weight(rows, row, reduction, norm_length):
    """The factor that the reduction puts on each trained token of `row`."""
    n_rows, n_tokens = sum(any(r["mask"]) for r in rows), sum(sum(r["mask"]) for r in rows)
    if reduction == "seq_mean_token_mean":
        return 1 / (n_rows * len(trained(row)))
    return 1 / n_tokens if reduction == "token_mean" else 1 / (n_rows * norm_length)


def check(loss_fn, rows, expected, dtype, tol, weighted=False):
    """Loss and gradient are `expected`; returns the statistics."""
    pack, outputs = pack_of(rows, weighted=weighted, interpolated=interpolates(loss_fn), dtype=dtype)
    loss, stats = loss_fn(pack, outputs)
    loss.backward()
    assert loss.dim() == 0
    assert loss.item() == pytest.approx(expected[0], abs=tol, rel=tol)
    torch.testing.assert_close(outputs.grad, torch.tensor(expected[1], dtype=dtype), atol=tol, rtol=tol)
    assert not any(value.requires_grad for value in stats.values())
    return stats
