"""The policy losses against TRL's own code on the same log-probabilities: values, and gradients of log-probabilities.

Only the part of TRL's trainers runs that computes the loss from log-probabilities, so no model is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areno.launch.compose import load
from areno.loss_fns import grpo_loss_fn, gspo_loss_fn
from areno.loss_fns.surrogates import GMPO, VESPO
from areno.recipes.grpo import GRPOConfig
from tests.helpers.padded_rows import LENGTHS, Batch, assert_same, batch, ours

pytestmark = pytest.mark.slow

LIMIT = 9


def theirs(trainer_class: Any, given: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of a trainer of TRL, and its gradient with respect to the log-probabilities."""
    now, entropy = given["now"].clone().requires_grad_(), given["entropy"]
    trainer = object.__new__(trainer_class)
    own = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        pad_across_processes=lambda x, **_: x,
        sync_gradients=True,
    )
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    args |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    values = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (now, entropy, None),
        "accelerator": own,
        "args": SimpleNamespace(**{name: settings.pop(name, value) for name, value in args.items()}),
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "aux_loss_enabled": False,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        **settings,
    }
    vars(trainer).update(values)
    none = torch.zeros((len(LENGTHS), 1), dtype=torch.int64)
    advantages = given["advantages"]
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros_like(given["mask"]),
        "completion_mask": given["mask"],
        "tool_mask": given["tools"],
        "advantages": advantages[:, 0] if (advantages == advantages[:, :1]).all() else advantages,
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": (given["mask"] * given["tools"]).sum(),
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, now)[0]


TOKEN, NORM = {"reduction": "token_mean"}, {"reduction": "seq_mean_token_sum_norm", "norm_length": LIMIT}
CISPO = {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_higher": 0.28}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {"loss_type": "grpo"}),
    "kl": ({"kl_coef": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "dual clip": ({"c_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "dapo": ({"clip_eps_higher": 0.28, **TOKEN}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "token mean": (TOKEN, {"loss_type": "bnpo"}),
    "dr_grpo": (NORM, {"loss_type": "dr_grpo"}),
    "cispo": ({**CISPO, **TOKEN}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "sapo": ({"surrogate": "sapo"}, {"loss_type": "sapo"}),
    "sapo, other temperatures": (
        {"surrogate": "sapo", "sapo_tau_pos": 2.0, "sapo_tau_neg": 3.0},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    "vespo": ({"surrogate": "vespo", **TOKEN}, {"loss_type": "vespo"}),
    "vespo, other weights": (
        {"surrogate": VESPO(k_pos=1.5, lambda_pos=1.0, k_neg=0.5, lambda_neg=0.7), **TOKEN},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 1.0,
            "vespo_k_neg": 0.5,
            "vespo_lambda_neg": 0.7,
        },
    ),
}


@pytest.fixture(autouse=True)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """TRL makes tensors of its settings, such as the temperatures of SAPO, in the default dtype."""
    if "dtype" in request.fixturenames:
        torch.set_default_dtype(request.getfixturevalue("dtype"))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trl() -> Any:
    # Not above: the default run does without these tests, and would wait a second for it in each of its processes.
    return pytest.importorskip("trl", reason="trl is not installed; it is in the dev extra")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_of_grpos_trainer(trl: Any, dtype: torch.dtype) -> None:
    for how, their_settings in CASES.values():
        for seed in range(3):
            for by_token in (False, True):
                given = batch(dtype, seed, by_token)
                assert_same(ours(grpo_loss_fn, given, **how), theirs(trl.GRPOTrainer, given, **their_settings))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ratios_of_rows(trl: Any, dtype: torch.dtype) -> None:
    for seed in range(3):
        given = batch(dtype, seed)
        of_rows = {"importance_sampling_level": "sequence"}
        expected = theirs(trl.GRPOTrainer, given, loss_type="grpo", **of_rows)
        assert_same(ours(gspo_loss_fn, given, clip_eps=0.2), expected)
        assert_same(ours(grpo_loss_fn, given, **of_rows), expected)
        luspo = theirs(trl.GRPOTrainer, given, loss_type="luspo", **of_rows)
        assert_same(ours(grpo_loss_fn, given, **of_rows, **NORM), luspo, LIMIT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gmpo(trl: Any, dtype: torch.dtype) -> None:
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

    for seed in range(3):
        for clip in (0.4, 0.1):
            given = batch(dtype, seed)
            expected = theirs(GMPOTrainer, given, epsilon_low=clip, epsilon_high=clip, loss_type="grpo")
            assert_same(ours(grpo_loss_fn, given, surrogate=GMPO(log_clip=clip)), expected)


def test_defaults(trl: Any) -> None:
    """The defaults of the variants are those of TRL where it has the variant."""
    fields = {name: field.default for name, field in trl.GRPOConfig.__dataclass_fields__.items()}
    vespo, sapo = (load(GRPOConfig, "quickstart", [f"variant={name}"]).actor for name in ("vespo", "sapo"))
    for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
        assert vars(vespo.vespo)[name] == fields[f"vespo_{name}"]
    assert (sapo.sapo_tau_pos, sapo.sapo_tau_neg) == (fields["sapo_temperature_pos"], fields["sapo_temperature_neg"])
    bonus = load(GRPOConfig, "quickstart", ["variant=adaptive_entropy"]).actor.entropy_bonus
    assert bonus is not None
    assert (bonus.target, bonus.delta) == (fields["entropy_target"], fields["entropy_coef_delta"])
