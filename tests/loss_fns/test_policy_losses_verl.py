"""The policy losses against verl's own code on the same log-probabilities, where verl is installed.

verl is not in the dev extra: it needs Ray.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areno.loss_fns import grpo_loss_fn, ppo_loss_fn
from areno.loss_fns.adv_estimators import OTB
from areno.loss_fns.masks import DPPOKL, DPPOTV
from areno.loss_fns.surrogates import GMPO
from tests.helpers.padded_rows import LENGTHS, Batch, assert_same, batch, ours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def verl() -> Any:
    pytest.importorskip("verl", reason="verl is not installed")
    return pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl lacks one of its dependencies")


def theirs(verl: Any, name: str, given: Batch, reduction: str, **settings: Any) -> tuple[Tensor, Tensor]:
    from verl.workers.config import ActorConfig

    class Config(ActorConfig):  # without the checks of a whole run
        def __init__(self, **values: Any):
            vars(self).update(values)

        def get(self, key: str, default: Any = None) -> Any:
            return vars(self).get(key, default)

    now, mask = given["now"].clone().requires_grad_(), given["mask"] * given["tools"]
    ranges = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    config = Config(**{**ranges, "global_batch_info": {}, "tau_pos": 1.0, "tau_neg": 1.05, **settings})
    loss_fn = verl.get_policy_loss_fn(name)
    loss = loss_fn(given["old"], now, given["advantages"], mask.to(now.dtype), reduction, config)[0]
    return loss.detach(), torch.autograd.grad(loss, now)[0]


TOKEN, ROW = {"reduction": "token_mean"}, {"reduction": "seq_mean_token_mean"}
LIMITED = {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_higher": 19.0, **TOKEN}
CASES: dict[str, tuple[Any, dict[str, Any], str, str, dict[str, Any]]] = {
    "ppo": (ppo_loss_fn, {}, "vanilla", "token-mean", {}),
    "grpo": (grpo_loss_fn, {"c_clip": 3.0}, "vanilla", "seq-mean-token-mean", {}),
    "cispo": (
        grpo_loss_fn,
        {"surrogate": "cispo", "clip_eps": 0.2, "clip_eps_higher": 0.28, **TOKEN},
        "cispo",
        "token-mean",
        {"clip_ratio_high": 0.28},
    ),
    "sapo": (grpo_loss_fn, {"surrogate": "sapo"}, "sapo", "seq-mean-token-mean", {}),
    "gspo_token": (grpo_loss_fn, {"importance_sampling_level": "sequence"}, "gspo", "seq-mean-token-mean", {}),
    "gmpo": (grpo_loss_fn, {"surrogate": GMPO(log_clip=0.2)}, "geo_mean", "token-mean", {}),
    "dppo_tv": (
        grpo_loss_fn,
        {"mask": DPPOTV(threshold=0.1), **LIMITED},
        "dppo_tv",
        "token-mean",
        {"clip_ratio": 0.1, "clip_ratio_c": 20.0},
    ),
    "dppo_kl": (
        grpo_loss_fn,
        {"mask": DPPOKL(threshold=0.02), **LIMITED},
        "dppo_kl",
        "token-mean",
        {"clip_ratio": 0.02, "clip_ratio_c": 20.0},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_losses(verl: Any, name: str, dtype: torch.dtype) -> None:
    loss_fn, how, their_name, reduction, settings = CASES[name]
    for seed in range(3):
        for by_token in (False, True) if name != "gmpo" else (False,):
            given = batch(dtype, seed, by_token)
            expected = theirs(verl, their_name, given, reduction, **settings)
            assert_same(ours(loss_fn, given, **how), expected, bar64=1e-7)  # verl adds 1e-8 to divisors


def test_otb(verl: Any) -> None:
    """Up to the 1e-8 that verl adds to sums, and with its option for the last tokens of a longest row off."""
    for seed in range(5):
        given = batch(torch.float64, seed)
        mask = given["mask"].double()
        rng = np.random.default_rng(seed)
        rewards, groups = rng.integers(0, 2, len(LENGTHS)).astype(float), [0, 1, 0, 1, 0, 1]
        collision = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        collision = torch.maximum(collision, given["old"].exp().square())
        of_tokens = torch.zeros_like(mask)
        of_tokens[range(len(LENGTHS)), [n - 1 for n in LENGTHS]] = torch.tensor(rewards)
        expected = verl.compute_optimal_token_baseline_advantage(
            of_tokens, mask, np.array(groups), given["old"], collision, handle_zero_tail=False
        )[0]
        terms = 1 - 2 * given["old"].exp() + collision
        rows = [row[:n].numpy() for row, n in zip(terms, LENGTHS, strict=True)]
        found = OTB().token_advantages(rewards, groups, rows)
        for row, other, n in zip(found, expected, LENGTHS, strict=True):
            np.testing.assert_allclose(row, other[:n].numpy(), atol=1e-6)
