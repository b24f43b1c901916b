"""Random shapes of families with experts against transformers: logits and gradients.

`python -m tests.models.test_random_shapes FAMILY N` compares N shapes, and prints the largest differences.
"""

from __future__ import annotations

import random
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from tests.helpers import tiny_shape
from tests.helpers.in_float64 import InFloat64
from tests.helpers.saving import save_weights
from tests.helpers.two_ranks import load, packed, random_rows

TIE = 1e-5  # least difference of the last chosen expert's score and the next
LENGTHS = (7, 40, 1, 23, 12)


def qwen3_5_moe(rng: random.Random) -> Any:
    head_dim, n_kv, n_key = rng.choice((8, 16, 24)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    n_layers, n_experts = rng.randint(2, 4), rng.choice((3, 5, 6, 7, 11))  # of one expert, the weight is always 1
    kinds = ["full_attention", *(rng.choice(("linear_attention", "full_attention")) for _ in range(n_layers - 1))]
    rng.shuffle(kinds)
    return transformers.Qwen3_5MoeTextConfig(
        vocab_size=101,
        hidden_size=rng.choice((24, 32, 40)),
        num_hidden_layers=n_layers,
        layer_types=kinds,
        num_attention_heads=n_kv * rng.randint(1, 3),
        num_key_value_heads=n_kv,
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rng.choice((100.0, 1e4)),
            "partial_rotary_factor": rng.choice((0.25, 0.5)),
        },
        attention_bias=rng.random() < 0.3,
        linear_num_key_heads=n_key,
        linear_num_value_heads=n_key * rng.randint(1, 3),
        linear_key_head_dim=rng.choice((8, 12)),
        linear_value_head_dim=rng.choice((8, 12, 20)),
        linear_conv_kernel_dim=rng.randint(2, 5),
        num_experts=n_experts,
        num_experts_per_tok=rng.randint(2, min(4, n_experts - 1)),
        moe_intermediate_size=rng.choice((12, 20, 28)),
        shared_expert_intermediate_size=rng.choice((8, 18, 36)),
        tie_word_embeddings=rng.random() < 0.5,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=3,
    )


def gpt_oss(rng: random.Random) -> Any:
    n_kv, n_layers, n_experts = rng.choice((1, 2, 3)), rng.randint(1, 4), rng.choice((3, 5, 6, 7, 11))
    kinds = [rng.choice(("sliding_attention", "full_attention")) for _ in range(n_layers)]
    yarn = {
        "rope_type": "yarn",
        "rope_theta": rng.choice((100.0, 1.5e5)),
        "factor": rng.choice((2.0, 32.0)),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": rng.random() < 0.2,
        "original_max_position_embeddings": rng.choice((16, 64)),
    }
    return transformers.GptOssConfig(
        vocab_size=101,
        hidden_size=rng.choice((24, 32, 40)),
        intermediate_size=rng.choice((12, 20, 28)),
        num_hidden_layers=n_layers,
        layer_types=kinds if rng.random() < 0.7 else None,
        num_attention_heads=n_kv * rng.randint(1, 3),
        num_key_value_heads=n_kv,
        head_dim=rng.choice((8, 16, 24)),
        sliding_window=rng.choice((3, 9, 128)),
        rope_parameters=yarn if rng.random() < 0.8 else {"rope_type": "default", "rope_theta": 1000.0},
        attention_bias=rng.random() < 0.8,
        num_local_experts=n_experts,
        num_experts_per_tok=rng.randint(2, min(4, n_experts - 1)),
        swiglu_limit=rng.choice((0.5, 1.5, 7.0)),
        swiglu_alpha=rng.choice((1.702, 1.0)),
        tie_word_embeddings=rng.random() < 0.5,
        max_position_embeddings=256,
        initializer_range=rng.choice((0.1, 0.2)),
        eos_token_id=3,
    )


def glm4_moe(rng: random.Random) -> Any:
    n_kv, n_groups, n_layers = rng.choice((1, 2, 3)), rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 3)
    n_experts, top_groups = n_groups * rng.choice((3, 4, 5)), rng.randint(1, n_groups)
    n_chosen = rng.randint(1, min(4, top_groups * n_experts // n_groups))
    return transformers.Glm4MoeConfig(
        vocab_size=101,
        hidden_size=rng.choice((24, 32, 40)),
        intermediate_size=rng.choice((28, 44)),
        num_hidden_layers=n_layers,
        num_attention_heads=n_kv * rng.randint(1, 3),
        num_key_value_heads=n_kv,
        head_dim=rng.choice((8, 12, 16)),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": rng.choice((100.0, 1e4)),
            "partial_rotary_factor": rng.choice((0.5, 0.5, 1.0)),
        },
        attention_bias=rng.random() < 0.7,
        use_qk_norm=rng.random() < 0.5,
        moe_intermediate_size=rng.choice((20, 36)),
        n_routed_experts=n_experts,
        n_shared_experts=rng.choice((0, 1, 2)),
        num_experts_per_tok=n_chosen,
        n_group=n_groups,
        topk_group=top_groups,
        routed_scaling_factor=rng.choice((1.0, 1.5, 2.5)),
        norm_topk_prob=n_chosen > 1 and rng.random() < 0.7,  # of one expert, the weight would always be 1
        first_k_dense_replace=rng.randint(0, n_layers - 1),
        tie_word_embeddings=rng.random() < 0.5,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=3,
    )


SHAPES = {"glm4_moe": glm4_moe, "gpt_oss": gpt_oss, "qwen3_5_moe": qwen3_5_moe}


def gaps_of_groups(router: Any, logits: Tensor) -> Tensor:
    """Differences of GLM's last chosen group or expert and the next, for each token."""
    ranked = logits.sigmoid() + router.e_score_correction_bias
    groups = ranked.unflatten(-1, (router.num_group, -1))
    of_groups = groups.topk(2).values.sum(-1).sort(-1, descending=True)
    used = of_groups.indices[:, : router.topk_group, None].expand(-1, -1, groups.shape[-1])
    of_experts = groups.gather(1, used).flatten(1).sort(-1, descending=True).values
    gaps = torch.ones(len(logits), dtype=logits.dtype)
    for values, n in ((of_groups.values, router.topk_group), (of_experts, router.top_k)):
        if n < values.shape[1]:
            gaps = torch.minimum(gaps, values[:, n - 1] - values[:, n])
    return gaps


def gaps_of_softmax(router: Any, logits: Tensor) -> Tensor:
    best = logits.softmax(-1).sort(-1, descending=True).values
    return best[:, router.top_k - 1] - best[:, router.top_k]


def choices_near_ties(reference: Any, row: Tensor) -> Tensor:
    """The experts (N, L, k) of tokens of which one is chosen by less than `TIE` in any layer, and -1 for others."""
    chosen, near = [], torch.zeros(len(row), dtype=torch.bool)

    def watch(router: Any, args: Any, output: Any) -> None:
        gaps = gaps_of_groups if hasattr(router, "e_score_correction_bias") else gaps_of_softmax
        logits = F.linear(args[0].flatten(0, -2), router.weight, getattr(router, "bias", None))
        near.logical_or_(gaps(router, logits) < TIE)
        chosen.append(output[2])

    routers = [module for module in reference.modules() if hasattr(module, "top_k") and hasattr(module, "weight")]
    assert routers
    hooks = [router.register_forward_hook(watch) for router in routers]
    with torch.no_grad():
        reference(row[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).masked_fill(~near[:, None, None], -1)


class Found(NamedTuple):
    logits: float  # largest difference, as a share of what is allowed
    gradient: float
    n_ties: int  # tokens whose choice of an expert is near a tie in some layer
    n_tokens: int


def compare(family: str, seed: int, folder: Path) -> Found:
    """Compare logits and all gradients with those in float64. Tokens near a tie use the experts of float64.

    Logits are allowed 1e-4, and gradients 1e-4 of the tensor's largest; with recurrent layers, which multiply rounding
    (test_delta_rounding.py), 1e-3 as in test_families.py. If that is more, twice the difference of transformers from
    its own float64 is allowed, of gradients that of the tensor in which it is largest. transformers takes no experts,
    so its differences are those of the tokens before a tie, which no later token changes.
    """
    config = SHAPES[family](random.Random(seed))
    reference = tiny_shape.random_model(config, folder)
    reference.set_experts_implementation("eager")
    exact, rounded = deepcopy(reference).double(), reference
    rows = random_rows(101, LENGTHS)
    n_tokens = sum(map(len, rows))
    weights = torch.randn(n_tokens, 101, generator=torch.Generator().manual_seed(2)) / 10
    with InFloat64():
        chosen = [choices_near_ties(exact, row) for row in rows]
        before_ties = torch.cat([(each[:, 0, 0] >= 0).cumsum(0) == 0 for each in chosen])
        right = torch.cat([exact(row[None]).logits[0] for row in rows])
        (right * weights)[before_ties].sum().backward(retain_graph=True)
        of_some = _gradients(exact)
        (right * weights).sum().backward()
        of_all = _gradients(exact)
    theirs = torch.cat([rounded(row[None]).logits[0] for row in rows])
    (theirs * weights)[before_ties].sum().backward()
    model = load(folder)
    given = torch.cat(chosen)
    model.routing.configure(given.masked_fill(given < 0, model.routing.unknown_expert))
    ours = model.logits(model(*packed(rows)))
    (ours * weights).sum().backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad  # not that of GLM's bias of choices
        parameter.data = parameter.data if parameter.grad is None else parameter.grad
    save_weights(model, folder / "gradients")
    found = transformers.AutoModelForCausalLM.from_pretrained(folder / "gradients", dtype=torch.float32)
    of_logits = _apart(ours, right) / max(1e-4, 2 * _apart(theirs[before_ties], right[before_ties]))
    of_ours = _largest_share({name: each.data for name, each in found.named_parameters()}, of_all)
    bar = 1e-3 if model.config.delta else 1e-4
    of_gradient = of_ours / max(bar, 2 * _largest_share(_gradients(rounded), of_some))
    return Found(of_logits, of_gradient, int((given[:, 0, 0] >= 0).sum()), n_tokens)


def _gradients(model: Any) -> dict[str, Tensor]:
    """Take the gradients from the parameters of the model."""
    taken = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    return taken


def _largest_share(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference from the gradients `right`, as a share of the tensor's largest."""
    return max(
        _apart(found[name], each) / each.abs().max().clamp_min(1e-3).item()
        for name, each in right.items()
        if each.numel()
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", SHAPES)
def test_random_shapes_are_those_of_transformers(family: str, seed: int, tmp_path: Path) -> None:
    found = compare(family, seed, tmp_path)
    assert found.logits <= 1
    assert found.gradient <= 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = []
    for seed in range(int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as folder:
            results.append(compare(sys.argv[1], seed, Path(folder)))
        if max(results[-1][:2]) > 1:
            print(seed, results[-1], flush=True)
    print("logits", max(each.logits for each in results), "gradients", max(each.gradient for each in results))
    ties, total = (sum(each[index] for each in results) for index in (2, 3))
    print(f"near ties: {ties} of {total} tokens, which use the experts of float64; none is left out")
