"""The losses of KTO and of reward models against loops in float64, however a step is divided."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
import torch

from areno.errors import DataError
from areno.loss_fns import kto_loss_fn, reward_model_loss_fn
from areno.loss_fns.pack import DataPack

# Trained tokens of each row, with holes.
MASKS = [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 0, 0, 1, 1, 1], [0, 1, 0]]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def random_rows(seed, masks=MASKS):
    draw = random.Random(seed)
    rows = []
    for number, mask in enumerate(masks):
        ref = [-draw.expovariate(1) for _ in mask]
        logprobs = [value + draw.gauss(0, 1) for value in ref]
        row = {"mask": mask, "ref": ref, "logprobs": logprobs, "reward": float(number % 2), "level": 0.0}
        rows.append(row)
    return rows


def pack_of(rows, step_rows=None, dtype=torch.float64, rows_per_unit=1):
    mask = torch.tensor([m for row in rows for m in row["mask"]]).bool()
    logprobs = torch.tensor([v for row in rows for v in row["logprobs"]], dtype=dtype, requires_grad=True)
    pack = DataPack(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        row_of_token=torch.tensor([i for i, row in enumerate(rows) for _ in row["mask"]]),
        loss_mask=mask,
        n_rows=len(rows),
        step_tokens=int(mask.sum()),
        step_rows=sum(any(row["mask"]) for row in rows) if step_rows is None else step_rows,
        ref_logprobs=torch.tensor([v for row in rows for v in row["ref"]], dtype=dtype),
        returns=torch.tensor([row["level"] for row in rows for _ in row["mask"]], dtype=dtype),
        rewards=torch.tensor([row["reward"] for row in rows], dtype=dtype),
        rows_per_unit=rows_per_unit,
    )
    return pack, logprobs


# KTO -----------------------------------------------------------------------------------------------------------------

KTO = [
    {"beta": 0.1},
    {"beta": 0.7, "reference_point": 0.4},
    {"beta": 2.0, "reference_point": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.6},
]


def kto_by_hand(rows, beta, reference_point=0.0, desirable_weight=1.0, undesirable_weight=1.0):
    loss, grads, right = 0.0, [], 0.0
    for row in rows:
        h = sum(m * (lp - ref) for m, lp, ref in zip(row["mask"], row["logprobs"], row["ref"], strict=True))
        sign = 1 if row["reward"] else -1
        weight = desirable_weight if row["reward"] else undesirable_weight
        v = sigmoid(sign * beta * (h - reference_point))
        loss += weight * (1 - v) / len(rows)
        grads += [-weight * sign * beta * v * (1 - v) * m / len(rows) for m in row["mask"]]
        right += (sign * (h - reference_point) > 0) / len(rows)
    return loss, grads, right


@pytest.mark.parametrize("how", KTO)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_kto_is_the_papers(how, dtype, tol):
    for seed in range(5):
        rows = random_rows(seed)
        pack, logprobs = pack_of(rows, dtype=dtype)
        loss, stats = kto_loss_fn(pack, logprobs, **how)
        loss.backward()
        expected, grads, right = kto_by_hand(rows, **how)
        assert loss.item() == pytest.approx(expected, abs=tol)
        torch.testing.assert_close(logprobs.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        assert stats["accuracy"].item() == pytest.approx(right, abs=1e-6)
        assert (len(stats["rewards_chosen"]), len(stats["rewards_rejected"])) == (2, 3)


def test_kto_does_not_depend_on_how_a_step_is_cut():
    rows = random_rows(0)
    pack, logprobs = pack_of(rows)
    loss, stats = kto_loss_fn(pack, logprobs, beta=0.5, reference_point=0.3)
    loss.backward()
    total, right, grads = 0.0, 0.0, []
    for part in (rows[:1], rows[1:2], rows[2:]):
        share_pack, share_logprobs = pack_of(part, step_rows=len(rows))
        share, share_stats = kto_loss_fn(share_pack, share_logprobs, beta=0.5, reference_point=0.3)
        share.backward()
        total, right = total + share.item(), right + share_stats["accuracy"].item()
        grads.append(share_logprobs.grad)
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert right == pytest.approx(stats["accuracy"].item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), logprobs.grad, atol=1e-12, rtol=0)


def test_kto_ignores_rows_without_trained_tokens():
    rows = random_rows(0)
    alone = kto_loss_fn(*pack_of(rows))[0].item()
    rows.append({**rows[0], "mask": [0, 0, 0]})
    loss, stats = kto_loss_fn(*pack_of(rows, step_rows=len(rows) - 1))
    assert loss.item() == pytest.approx(alone, abs=1e-12)
    assert len(stats["rewards_rejected"]) == 3


# Reward models -------------------------------------------------------------------------------------------------------

UNITS = [
    [(1.0, 0.0), (0.0, 0.0), None],
    [(3.0, 3.0), (1.0, 1.0), (0.5, 0.5)],
    [(1.0, 0.7), (0.0, 0.0), (0.0, 0.1)],  # the last two are a tie
]
REWARD_MODEL = [
    {},
    {"margin_coef": 0.0},
    {"margin_coef": 0.5, "center_coef": 0.01},
    {"center_coef": 0.2},
]


def random_units(seed):
    """Rows of three units; (rating, level) of each answer, None for a row that fills up the unit."""
    draw, rows = random.Random(seed), []
    for unit in UNITS:
        for answer in unit:
            n = 2 if answer is None else draw.randrange(2, 6)
            rating, level = answer or (0.0, 0.0)
            values = [draw.gauss(0, 1) for _ in range(n)]
            mask = [0] * n if answer is None else [0] * (n - 1) + [1]
            rows.append({"mask": mask, "ref": values, "logprobs": values, "reward": rating, "level": level})
    return rows


def reward_model_by_hand(rows, margin_coef=1.0, center_coef=0.0):
    scores = [row["logprobs"][-1] for row in rows]
    n_rows = sum(any(row["mask"]) for row in rows)
    loss, right, apart, confidence = 0.0, 0.0, 0.0, 0.0
    by_score = [0.0] * len(rows)
    for start in range(0, len(rows), 3):
        unit = [i for i in range(start, start + 3) if any(rows[i]["mask"])]
        pairs = [(i, j) if rows[i]["reward"] > rows[j]["reward"] else (j, i) for i, j in combinations(unit, 2)]
        pairs = [(i, j) for i, j in pairs if rows[i]["reward"] != rows[j]["reward"]]
        weight = len(unit) / n_rows / len(pairs)
        for i, j in pairs:
            d, total = scores[i] - scores[j], scores[i] + scores[j]
            logit = d - margin_coef * (rows[i]["level"] - rows[j]["level"])
            loss += weight * (math.log1p(math.exp(-logit)) + center_coef * total**2)
            by_score[i] += weight * (-sigmoid(-logit) + 2 * center_coef * total)
            by_score[j] += weight * (sigmoid(-logit) + 2 * center_coef * total)
            right += weight * (d > 0)
            apart += weight * d
            confidence += weight * sigmoid(abs(d))
    grads = [m * slope for row, slope in zip(rows, by_score, strict=True) for m in row["mask"]]
    return loss, grads, {"accuracy": right, "margin": apart, "confidence": confidence}


@pytest.mark.parametrize("how", REWARD_MODEL)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_reward_model_is_the_papers(how, dtype, tol):
    for seed in range(5):
        rows = random_units(seed)
        pack, values = pack_of(rows, dtype=dtype, rows_per_unit=3)
        loss, stats = reward_model_loss_fn(pack, values, **how)
        loss.backward()
        expected, grads, expected_stats = reward_model_by_hand(rows, **how)
        assert loss.item() == pytest.approx(expected, abs=tol)
        torch.testing.assert_close(values.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        rewards = stats.pop("rewards")
        assert len(rewards) == 8
        assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected_stats, abs=tol)


def test_reward_model_does_not_depend_on_how_a_step_is_cut():
    rows = random_units(0)
    pack, values = pack_of(rows, rows_per_unit=3)
    loss, _ = reward_model_loss_fn(pack, values, center_coef=0.1)
    loss.backward()
    total, grads = 0.0, []
    for part in (rows[:3], rows[3:]):
        share_pack, share_values = pack_of(part, step_rows=8, rows_per_unit=3)
        share, _ = reward_model_loss_fn(share_pack, share_values, center_coef=0.1)
        share.backward()
        total += share.item()
        grads.append(share_values.grad)
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), values.grad, atol=1e-12, rtol=0)


def test_reward_model_refuses_what_cannot_be_compared():
    rows = random_units(0)
    with pytest.raises(DataError, match="units of at least two rows"):
        reward_model_loss_fn(*pack_of(rows))
    rows[0]["mask"] = [1] * len(rows[0]["mask"])
    with pytest.raises(DataError, match=r"a row has [2-9] trained tokens"):
        reward_model_loss_fn(*pack_of(rows, rows_per_unit=3))
    rows = random_units(0)
    rows[0]["reward"] = 0.0
    with pytest.raises(DataError, match="equal ratings"):
        reward_model_loss_fn(*pack_of(rows, rows_per_unit=3))
