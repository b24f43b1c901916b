"""The losses of KTO and of reward models against loops in float64, however a step is divided."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest
import torch

from areno.errors import DataError
from areno.loss_fns import kto_loss_fn, reward_model_loss_fn
from areno.loss_fns.data_pack import DataPack

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
    return loss, grads, {"accuracy": right}


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


KTO_FORM = (kto_loss_fn, kto_by_hand, random_rows, 1)
REWARD_FORM = (reward_model_loss_fn, reward_model_by_hand, random_units, 3)


@pytest.mark.parametrize(
    ("form", "how"), [*((KTO_FORM, how) for how in KTO), *((REWARD_FORM, how) for how in REWARD_MODEL)]
)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_losses_are_the_papers(form, how, dtype, tol):
    loss_fn, by_hand, random_of, rows_per_unit = form
    for seed in range(5):
        rows = random_of(seed)
        pack, logprobs = pack_of(rows, dtype=dtype, rows_per_unit=rows_per_unit)
        loss, stats = loss_fn(pack, logprobs, **how)
        loss.backward()
        expected, grads, expected_stats = by_hand(rows, **how)
        assert loss.item() == pytest.approx(expected, abs=tol)
        torch.testing.assert_close(logprobs.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        n_rewards = {name: len(stats.pop(name)) for name in list(stats) if name.startswith("rewards")}
        assert n_rewards in ({"rewards_chosen": 2, "rewards_rejected": 3}, {"rewards": 8})
        found = {name: stats[name].item() for name in expected_stats}
        assert found == pytest.approx(expected_stats, abs=max(tol, 1e-6) if loss_fn is kto_loss_fn else tol)
        assert loss_fn is kto_loss_fn or stats.keys() == expected_stats.keys()


@pytest.mark.parametrize(
    ("form", "how", "cuts"),
    [
        (KTO_FORM, {"beta": 0.5, "reference_point": 0.3}, (0, 1, 2, 5)),
        (REWARD_FORM, {"center_coef": 0.1}, (0, 3, 9)),
    ],
)
def test_losses_do_not_depend_on_how_a_step_is_cut(form, how, cuts):
    loss_fn, _, random_of, rows_per_unit = form
    rows = random_of(0)
    pack, logprobs = pack_of(rows, rows_per_unit=rows_per_unit)
    loss, stats = loss_fn(pack, logprobs, **how)
    loss.backward()
    total, right, grads = 0.0, 0.0, []
    for start, stop in pairwise(cuts):
        share_pack, share_logprobs = pack_of(rows[start:stop], pack.step_rows, rows_per_unit=rows_per_unit)
        share, share_stats = loss_fn(share_pack, share_logprobs, **how)
        share.backward()
        total, right = total + share.item(), right + share_stats["accuracy"].item()
        grads.append(share_logprobs.grad)
    assert total == pytest.approx(loss.item(), abs=1e-12)
    assert right == pytest.approx(stats["accuracy"].item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), logprobs.grad, atol=1e-12, rtol=0)


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
