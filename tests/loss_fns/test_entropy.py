"""The entropy bonus: the loss against a plain loop in float64, and its adapted coefficient."""

from __future__ import annotations

import pytest
import torch

from areno.errors import ConfigError, DataError
from areno.launch.compose import load
from areno.loss_fns import grpo_loss_fn
from areno.loss_fns.entropy import EntropyBonus
from areno.recipes.grpo import GRPOConfig
from tests.helpers.loss_rows import pack_of, random_rows, token_weight, trained


@pytest.mark.parametrize("reduction", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
def test_the_bonus_is_subtracted(reduction):
    rows = random_rows()
    pack, outputs = pack_of(rows)
    pack.entropy.requires_grad_()
    how = {"reduction": reduction, "norm_length": 10}
    plain = grpo_loss_fn(pack, outputs, **how)[0].item()
    loss, stats = grpo_loss_fn(pack, outputs, entropy_coef=0.3, **how)
    loss.backward()
    expected, grads = 0.0, []
    for row in rows:
        grad = [0.0] * len(row["mask"])
        for t in trained(row):
            grad[t] = -0.3 * token_weight(rows, row, reduction, 10)
            expected += grad[t] * row["entropy"][t]
        grads += grad
    assert loss.item() - plain == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(pack.entropy.grad, torch.tensor(grads, dtype=torch.float64), atol=1e-12, rtol=0)
    assert not stats["entropy"].requires_grad


def test_an_entropy_without_a_gradient_is_refused():
    with pytest.raises(DataError, match="differentiates_entropy=True"):
        grpo_loss_fn(*pack_of(random_rows()), entropy_coef=0.1)


def test_the_adapted_coefficient():
    """Skywork-OR1 sec. 4, step by step."""
    bonus, entropies, coef = EntropyBonus(coef=0.0, target=0.5, delta=0.01), [], 0.0
    assert bonus.coefficient([]) == 0.0
    for entropy, expected in ((0.4, 0.01), (0.3, 0.02), (0.6, 0.0), (0.5, 0.0), (0.4, 0.01), (0.2, 0.02)):
        entropies.append(entropy)
        coef = max(0.0, coef + (0.01 if entropy < 0.5 else -0.01))
        assert bonus.coefficient(entropies) == pytest.approx(expected, abs=1e-15)
        assert bonus.coefficient(entropies) == (coef if entropy <= 0.5 else 0.0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["actor.entropy_bonus.coef=0"], "actor.entropy_bonus.coef: is 0, and without a target"),
        (
            ["actor.entropy_bonus.delta=0.1"],
            "actor.entropy_bonus.delta: is 0.1, but actor.entropy_bonus.target is null",
        ),
        (
            ["actor.entropy_bonus.coef=0.1", "teacher.path=folder", "teacher.loss_type=reverse_kl"],
            "actor.entropy_bonus: is set, but passes that compare with a teacher",
        ),
    ],
)
def test_settings_that_do_not_fit(settings, problem):
    with pytest.raises(ConfigError) as raised:
        load(GRPOConfig, "quickstart", settings)
    assert problem in str(raised.value)
