"""The fused and the plain transformer layers, compared on a model whose sizes are no powers of two."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from areno.engine.train.zero_buffers import FlatParameters
from areno.layers.attention import PackedAttend, PrefixKeys, SharedKeys
from areno.layers.config import DeltaConfig, RopeConfig
from areno.layers.parallel import ParallelGroup
from areno.layers.shard import WeightSpec
from areno.models.config import TransformerConfig
from areno.models.quantization import quantize_linears
from areno.models.transformer import Transformer

LENGTHS = [3, 1, 2]


BARE = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}


ALONE = ParallelGroup()


SMALL: dict[str, Any] = {  # no size is a power of two
    "family": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 12,
    "rms_norm_eps": 1e-3,
    "rope": RopeConfig(100.0, "yarn", factor=4.0, original_max_positions=16, attention_factor=1.2),
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "eos_token_ids": (1,),
    "initializer_range": 0.3,
    "hf": {},
}


def build(dtype: torch.dtype, device: str, tp: ParallelGroup = ALONE, **changes: Any) -> Transformer:
    """Norm weights and biases are drawn too, so that none of them is 1 or 0. `fp8`: the FP8Config, if any."""
    fp8 = changes.pop("fp8", None)
    config = TransformerConfig(**{**SMALL, **changes})  # type: ignore[arg-type]
    model = Transformer(config, WeightSpec(torch.float32, "cpu", tp))
    model.init_weights(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part in model.tensor_parts(name) if parameter.dim() == 1 else ():
                part.region(parameter).add_(part.shard_of(torch.randn(part.full_shape, generator=generator)) * 0.3)
    model = model.to(device, dtype)
    if fp8 is not None:
        quantize_linears(model, fp8)
    return model


def run(
    model: Transformer, backend: str, is_fused: bool, shares: bool = False, linked: bool = False, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states with and without gradients, and the gradient of two passes together.

    shares: The second and the third row continue the first one.
    linked: They have a pass each, which reads the keys of the first row from a pass before.
    """
    flat = FlatParameters(model)
    device = model.device
    n = sum(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(50, (n,), generator=generator).to(device)
    upstream = torch.randn(n, model.config.hidden_size, generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    keys = None
    if shares:
        positions = torch.tensor([0, 1, 2, 3, 3, 4]).to(device)
        ends = torch.tensor([0, 3, 4, 5]).cumsum(0).int().to(device)
        keys = SharedKeys(torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5]).to(device), ends, 5, n)
    attend = PackedAttend(starts, max(LENGTHS), backend, keys=keys)
    assert is_fused == model.runs_fused(attend)
    passes = partial(_in_three_passes, model, tokens, positions, backend) if linked else None
    for _ in range(2):
        if passes is None:
            hidden = model(tokens, positions, attend, **how)
            (hidden.float() * upstream).sum().backward()
        else:
            hidden = passes(upstream, **how)
    with torch.no_grad():
        scored = model(tokens, positions, attend) if passes is None else passes(None)
    return hidden.detach(), scored, flat.grads


def _in_three_passes(
    model: Transformer, tokens: Tensor, positions: Tensor, backend: str, upstream: Tensor | None, **how: Any
) -> Tensor:
    """Hidden states of the rows of `run`, which share the first row, from a pass for each row, and backward passes."""

    def borders(n: int) -> Tensor:
        return torch.tensor([0, n], dtype=torch.int32, device=tokens.device)

    kept = PrefixKeys(3)
    hidden = [model(tokens[:3], positions[:3], PackedAttend(borders(3), 3, backend, stores=kept), **how)]
    for start, end in ((3, 4), (4, 6)):
        n = end - start
        keys = SharedKeys(torch.arange(3 + n, device=tokens.device), borders(3 + n), 3 + n, 3 + n)
        attend = PackedAttend(borders(n), n, backend, keys=keys, prefix=kept)
        hidden.append(model(tokens[start:end], positions[start:end], attend, **how))
        if upstream is not None:
            (hidden[-1].float() * upstream[start:end]).sum().backward()
    if upstream is not None:
        hidden[0].backward(upstream[:3].to(hidden[0].dtype))
    return torch.cat(hidden)


SOME = {"recompute": True, "n_kept": 1}


ALL_WAYS: tuple[dict[str, Any], ...] = ({}, {"recompute": True}, SOME)


def compare(
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    backend: str,
    ways: tuple[dict[str, Any], ...] = ALL_WAYS,
    shares: bool = False,
    linked: bool = False,
    **changes: Any,
) -> None:
    """Fused layers, keeping all, some or nothing, against plain ones. tolerance: of the norm of the difference."""
    if device == "cuda":
        patch = mock.patch("areno.kernels.backend.is_triton_installed", return_value=False)
    else:
        patch = mock.patch("areno.kernels.backend.is_triton_interpreted", return_value=False)
    with patch:
        expected = run(build(torch.float32, device, **changes), "sdpa", is_fused=False, shares=shares)
    if dtype != torch.float32:  # the same weights, rounded
        with patch:
            expected = run(build(dtype, device, **changes).float(), "sdpa", is_fused=False, shares=shares)
    for how in ways:
        model = build(dtype, device, **changes)
        got = run(model, backend, is_fused=True, shares=shares, linked=linked, **how)
        for one, other in zip(got, expected, strict=True):
            error = (one.float() - other.float()).norm() / other.float().norm()
            assert error < tolerance, (dtype, changes, how, error)
        assert got[2].dtype == torch.float32
        assert torch.equal(got[0], got[1])  # what is scored is what was trained on


DELTA = DeltaConfig(layers=(0,), n_key_heads=2, n_value_heads=2, key_dim=6, value_dim=5, width=3)


LIKE_QWEN: dict[str, Any] = {**BARE, "attention_gate": True, "norm_plus_one": True, "delta": DELTA}
