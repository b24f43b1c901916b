"""DPO: its loss against the papers' formulas in float64, its rows, and its loop on a tiny model."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from functools import partial

import pytest
import torch

from areno.errors import DataError
from areno.loss_fns import dpo_loss_fn
from areno.loss_fns.data_pack import DataPack

# Loss ----------------------------------------------------------------------------------------------------------------

HOW = [
    {"beta": 0.1},
    {"beta": 2.0},
    {"beta": 0.5, "label_smoothing": 0.1},
    {"beta": 0.1, "loss_type": "ipo"},
    {"beta": 1.5, "loss_type": "ipo"},
    {"beta": 0.5, "loss_type": "robust", "label_smoothing": 0.2},
    {"beta": 2.0, "loss_type": "simpo"},
    {"beta": 2.5, "loss_type": "simpo", "simpo_gamma": 1.2},
    {"beta": 0.1, "loss_type": "orpo"},
    {"beta": 1.5, "loss_type": "orpo"},
]
REFERENCE_FREE = ("simpo", "orpo")
# Trained tokens of the two rows of each pair; masks have holes.
MASKS = [([0, 1, 1], [0, 0, 1, 1, 1]), ([0, 1, 0, 0, 1, 1], [0, 1]), ([0, 0, 1, 0, 1], [0, 1, 1, 1, 1])]


def random_pairs(seed=0, spread=1.0):
    """A list of pairs of rows; each row a dict of lists."""
    rng = random.Random(seed)

    def row(mask):
        ref = [-rng.expovariate(1) for _ in mask]
        logprobs = [min(value + rng.gauss(0, spread), -0.01) for value in ref]
        return {"mask": mask, "ref_logprobs": ref, "logprobs": logprobs}

    return [(row(chosen), row(rejected)) for chosen, rejected in MASKS]


def pack_of(pairs, step_pairs=None, dtype=torch.float64, rows_per_unit=2):
    rows = [row for pair in pairs for row in pair]
    mask = torch.tensor([m for row in rows for m in row["mask"]]).bool()
    logprobs = torch.tensor([v for row in rows for v in row["logprobs"]], dtype=dtype, requires_grad=True)
    pack = DataPack(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        row_of_token=torch.tensor([i for i, row in enumerate(rows) for _ in row["mask"]]),
        loss_mask=mask,
        n_rows=len(rows),
        step_tokens=int(mask.sum()),
        step_rows=2 * (len(pairs) if step_pairs is None else step_pairs),
        ref_logprobs=torch.tensor([v for row in rows for v in row["ref_logprobs"]], dtype=dtype),
        rows_per_unit=rows_per_unit,
    )
    return pack, logprobs


def log_ratio(row):
    return sum(m * (lp - ref) for m, lp, ref in zip(row["mask"], row["logprobs"], row["ref_logprobs"], strict=True))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean_logprob):
    return mean_logprob - math.log(-math.expm1(mean_logprob))


def of_pair(a, b, beta, label_smoothing=0.0, loss_type="sigmoid", simpo_gamma=0.5):
    """(loss, its derivatives by the scores a of the chosen and b of the rejected answer, statistics)."""
    d, s = a - b, label_smoothing
    if loss_type == "ipo":
        slope = 2 * (d - 1 / (2 * beta))
        return (d - 1 / (2 * beta)) ** 2, slope, -slope, {}
    if loss_type == "simpo":
        slope = -beta * sigmoid(simpo_gamma - beta * d)
        return math.log1p(math.exp(simpo_gamma - beta * d)), slope, -slope, {}
    if loss_type == "orpo":
        x = log_odds(a) - log_odds(b)
        by_x = -beta * sigmoid(-x)
        stats = {"nll_loss": -a, "log_odds_ratio": x}
        return -a + beta * math.log1p(math.exp(-x)), -1 - by_x / math.expm1(a), by_x / math.expm1(b), stats
    flipped, scale = (s, 1) if loss_type == "sigmoid" else (-s, 1 - 2 * s)
    loss = -(1 - s) * math.log(sigmoid(beta * d)) - flipped * math.log(sigmoid(-beta * d))
    slope = beta * (-(1 - s) * sigmoid(-beta * d) + flipped * sigmoid(beta * d))
    return loss / scale, slope / scale, -slope / scale, {}


def by_hand(pairs, beta=0.1, loss_type="sigmoid", **more):
    """The loss, its gradient, and the statistics."""
    loss, grads, n = 0.0, [], len(pairs)
    stats = defaultdict(float)
    for chosen, rejected in pairs:
        sums = []
        for row in (chosen, rejected):
            terms = zip(row["mask"], row["logprobs"], strict=True)
            score = sum(m * lp for m, lp in terms) if loss_type in REFERENCE_FREE else log_ratio(row)
            sums.append((score, 1 if loss_type in ("sigmoid", "robust") else sum(row["mask"])))
        (a, n_a), (b, n_b) = sums
        a, b = a / n_a, b / n_b
        of_loss, slope_a, slope_b, of_stats = of_pair(a, b, beta, loss_type=loss_type, **more)
        loss += of_loss / n
        grads += [slope_a / n * m / n_a for m in chosen["mask"]] + [slope_b / n * m / n_b for m in rejected["mask"]]
        for name, value in of_stats.items():
            stats[name] += value / n
        stats["rewards_chosen"] += beta * a / n
        stats["rewards_rejected"] += beta * b / n
        stats["margin"] += beta * (a - b) / n
        stats["accuracy"] += (1.0 if a > b else 0.5 if a == b else 0.0) / n
        for name, row in (("logps_chosen", chosen), ("logps_rejected", rejected)):
            stats[name] += sum(m * lp for m, lp in zip(row["mask"], row["logprobs"], strict=True)) / n
    return loss, grads, stats


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_the_papers(how, dtype, tol):
    for seed in range(5):
        pairs = random_pairs(seed)
        pack, logprobs = pack_of(pairs, dtype=dtype)
        loss, stats = dpo_loss_fn(pack, logprobs, **how)
        loss.backward()
        expected, grads, expected_stats = by_hand(pairs, **how)
        assert loss.item() == pytest.approx(expected, abs=tol, rel=tol)
        torch.testing.assert_close(logprobs.grad, torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)
        assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected_stats, abs=tol, rel=tol)
        assert not any(value.requires_grad for value in stats.values())


def test_gradient_of_far_margins_is_finite():
    for sign in (1, -1):
        pairs = random_pairs()
        for row in pairs[0]:
            row["logprobs"] = [sign * 1e4 * (row is pairs[0][0]) for _ in row["mask"]]
        pack, logprobs = pack_of(pairs, dtype=torch.float32)
        loss, _ = dpo_loss_fn(pack, logprobs)
        loss.backward()
        assert math.isfinite(loss.item())
        assert logprobs.grad.isfinite().all()


def test_pairs_without_a_preference_count_half():
    pairs = random_pairs()
    for row in pairs[0]:
        row["logprobs"] = list(row["ref_logprobs"])
    pack, logprobs = pack_of(pairs[:1])
    loss, stats = dpo_loss_fn(pack, logprobs)
    assert loss.item() == pytest.approx(math.log(2))
    assert stats["accuracy"].item() == 0.5
    assert stats["margin"].item() == 0


@pytest.mark.parametrize("how", HOW)
def test_shares_add_up_however_the_step_is_cut(how):
    pairs = random_pairs()
    pack, logprobs = pack_of(pairs)
    loss, stats = dpo_loss_fn(pack, logprobs, **how)
    loss.backward()
    total, grads, sums = 0.0, [], dict.fromkeys(stats, 0.0)
    for part in (pairs[:1], pairs[1:]):
        share_pack, share_logprobs = pack_of(part, len(pairs))
        share, share_stats = dpo_loss_fn(share_pack, share_logprobs, **how)
        share.backward()
        total += share.item()
        grads.append(share_logprobs.grad)
        sums = {name: sums[name] + value.item() for name, value in share_stats.items()}
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat(grads), logprobs.grad, atol=1e-12, rtol=0)
    assert sums == pytest.approx({name: value.item() for name, value in stats.items()}, abs=1e-12)


def test_what_is_not_trained_does_not_matter():
    pairs = random_pairs()
    values = []
    for filler in (0.0, 50.0, -1e30):
        for row, name in itertools.product([row for pair in pairs for row in pair], ("logprobs", "ref_logprobs")):
            row[name] = [v if m else filler for v, m in zip(row[name], row["mask"], strict=True)]
        pack, logprobs = pack_of(pairs)
        loss, _ = dpo_loss_fn(pack, logprobs)
        loss.backward()
        assert logprobs.grad[~pack.loss_mask].abs().max() == 0
        values.append(loss.item())
    assert len(set(values)) == 1


def test_loss_refuses_what_are_no_pairs():
    pairs = random_pairs()
    with pytest.raises(DataError, match="rows_per_unit is 1; train with rows_per_unit=2"):
        dpo_loss_fn(*pack_of(pairs, rows_per_unit=1))
    pairs[1][1]["mask"] = [0, 0]
    with pytest.raises(DataError, match="DPO needs a trained token in every row"):
        dpo_loss_fn(*pack_of(pairs))
    pack, logprobs = pack_of(random_pairs())
    pack.ref_logprobs = None
    with pytest.raises(DataError, match=r"this loss needs ref_logprobs.*set TrainSequence\.ref_logprobs"):
        dpo_loss_fn(pack, logprobs)
    for how, message in (
        ({"loss_type": "none"}, "loss_type is 'none'; expected sigmoid, robust, ipo"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect with loss_type ipo"),
        ({"gamma": 1.0}, "gamma is not a setting of a loss_type; expected one of beta, label_smoothing, simpo_gamma"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            partial(dpo_loss_fn, **how)(*pack_of(random_pairs()))


@pytest.mark.parametrize("loss_type", REFERENCE_FREE)
def test_losses_without_a_reference_read_none(loss_type):
    pack, logprobs = pack_of(random_pairs())
    expected = dpo_loss_fn(pack, logprobs, loss_type=loss_type)[0]
    pack.ref_logprobs = None
    assert dpo_loss_fn(pack, logprobs, loss_type=loss_type)[0] == expected


def test_the_robust_loss_is_unbiased():
    """If a share s of the pairs is swapped, its mean is the loss of DPO on the pairs as they were."""
    s, [pair] = 0.3, random_pairs()[:1]
    values = {}
    for swapped in (False, True):
        pack, logprobs = pack_of([pair[::-1] if swapped else pair])
        values[swapped] = dpo_loss_fn(pack, logprobs, beta=0.7, loss_type="robust", label_smoothing=s)[0].item()
    clean = dpo_loss_fn(*pack_of([pair]), beta=0.7)[0].item()
    assert (1 - s) * values[False] + s * values[True] == pytest.approx(clean, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, -1e-9, -1e-4, -0.69, -0.7, -30.0, -1e4])
def test_odds_of_sure_and_of_unlikely_answers_are_finite(value):
    pairs = random_pairs()[:1]
    for row in pairs[0]:
        row["logprobs"] = [value] * len(row["mask"])
    pack, logprobs = pack_of(pairs, dtype=torch.float32)
    loss, stats = dpo_loss_fn(pack, logprobs, loss_type="orpo")
    loss.backward()
    assert loss.item() == pytest.approx(-value + 0.1 * math.log(2), abs=1e-4, rel=1e-5)
    assert stats["log_odds_ratio"].item() == pytest.approx(0, abs=1e-3)
    assert logprobs.grad.isfinite().all()
