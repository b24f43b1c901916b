"""A model with attention sinks, and windows in every other layer: packed rows, ranks, rollouts, and files.

Heads are wider together than the residual stream, all projections of attention have biases, and rotary positions are
those of yarn without a rounded range, as in gpt-oss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

from areno.engine.exact import make_exact
from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from areno.layers.attention import AttentionLayer, PackedAttend, SharedKeys
from areno.layers.config import RopeConfig
from areno.layers.parallel import ParallelGroup
from areno.models.config import LayerKind
from areno.models.folder import RawConfig
from areno.models.rope_config import read_rope
from areno.models.transformer import Transformer
from tests.helpers.drafters import KnownDrafter
from tests.helpers.family_rollouts import REQUESTS, Outputs, trained_logprobs
from tests.helpers.fused_layers import build
from tests.helpers.new_decoder import new_decoder
from tests.helpers.saving import save_weights
from tests.helpers.two_ranks import on_two_ranks, packed, random_rows

ROPE = RopeConfig(
    150.0, "yarn", factor=8.0, original_max_positions=16, attention_factor=1.2, beta_fast=8.0, truncate=False
)
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "head_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "rope": ROPE,
    "max_position_embeddings": 96,
    "qk_norm": False,
    "mlp_bias": False,
    "attention_sinks": True,
    "kinds": (LayerKind(ROPE, 5), LayerKind(ROPE)),
}


def model_with_sinks(**changes: Any) -> Transformer:
    return build(torch.float32, "cpu", **{**SHAPE, **changes})


def gradients(model: Transformer, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.logits(model(*packed(rows))).sin().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_packed_rows_have_the_sinks_of_rows_alone() -> None:
    model, rows = model_with_sinks(), random_rows(101)
    logits = model.logits(model(*packed(rows))).split([len(row) for row in rows])
    for row, together in zip(rows, logits, strict=True):
        torch.testing.assert_close(model.logits(model(*packed([row]))), together, atol=1e-5, rtol=1e-5)
    apart = [gradients(model, [row]) for row in rows]
    for name, found in gradients(model, rows).items():
        torch.testing.assert_close(found, sum(each[name] for each in apart), atol=1e-4, rtol=1e-4)
        assert not name.endswith("sinks") or found.abs().min() > 0
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.sinks.fill_(-1e9)  # as if there were none
    without = model.logits(model(*packed(rows)))
    assert (without - torch.cat(logits)).abs().max() > 0.1


def test_shared_prefixes_change_nothing() -> None:
    """Two rows continue a first one, whose tokens are computed once: logits and gradients are those of three rows."""
    model, row = model_with_sinks(), random_rows(101, (9,))[0]
    rows = [row[:6], torch.cat((row[:6], row[6:7])), torch.cat((row[:6], row[7:]))]
    of_own = [slice(0, 6), slice(12, 13), slice(19, 21)]
    upstream = torch.randn(9, 101, generator=torch.Generator().manual_seed(1))
    found = []
    for is_shared in (False, True):
        model.zero_grad()
        tokens, positions, attend = packed(rows)
        if is_shared:
            tokens_M = torch.tensor([*range(6), *range(7), *range(6), 7, 8])
            keys = SharedKeys(tokens_M, attend.cu_seqlens, attend.max_len, 9)
            starts = torch.tensor([0, 6, 7, 9], dtype=torch.int32)
            tokens, positions = row, torch.tensor([*range(6), 6, 6, 7])
            attend = PackedAttend(starts, 6, "sdpa", keys=keys)
        logits = model.logits(model(tokens, positions, attend))
        logits = logits if is_shared else torch.cat([logits[own] for own in of_own])
        (logits * upstream).sum().backward()
        found.append((logits, *(parameter.grad for parameter in model.parameters())))
    for separate, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, separate, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "whole"])
def test_attention_is_that_of_transformers(layer: int) -> None:
    """With the rotary positions that GptOssConfig has by itself. Output, and gradients of all weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    given = GptOssConfig(**sizes, sliding_window=5, attn_implementation="eager")
    theirs, rotary = GptOssAttention(given, layer), GptOssRotaryEmbedding(given)
    raw = RawConfig({"rope_parameters": given.rope_parameters, "rope_theta": given.default_theta}, "here", [])
    rope = read_rope(raw, given.max_position_embeddings)
    assert (raw.problems, rope.truncate, rope.theta) == ([], False, 150000.0)
    model = model_with_sinks(rope=rope, head_dim=64, hidden_size=48, kinds=(LayerKind(rope, 5), LayerKind(rope)))
    ours = model.layers[layer].attention
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.3)
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([each.weight for each in projections]))
        ours.qkv.bias.copy_(torch.cat([each.bias for each in projections]))
        ours.out.weight.copy_(theirs.o_proj.weight)
        ours.out.bias.copy_(theirs.o_proj.bias)
        ours.sinks.copy_(theirs.sinks)
    x, positions = torch.randn(19, 48), torch.arange(3000, 3019)
    angles = rotary(x[None], positions[None])
    for mine, other in zip(model.rotaries[0](positions), angles, strict=True):
        torch.testing.assert_close(mine.squeeze(1), other.squeeze(0), atol=1e-3, rtol=0)
        assert mine.max() > 1.2  # cosines and sines are scaled
    ahead = positions[:, None] - positions
    hidden = (ahead < 0) | (ahead >= 5 if layer == 0 else ahead < 0)
    expected = theirs(x[None], angles, torch.zeros(19, 19).masked_fill(hidden, -torch.inf)[None, None])[0][0]
    of_us = [angle.squeeze(0).unsqueeze(1) for angle in angles]
    out = ours(x, *of_us, PackedAttend(torch.tensor([0, 19], dtype=torch.int32), 19, "sdpa"))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert theirs.sinks.grad.abs().min() > 1e-3
    found = {
        ours.qkv.weight: torch.cat([each.weight.grad for each in projections]),
        ours.qkv.bias: torch.cat([each.bias.grad for each in projections]),
        ours.out.weight: theirs.o_proj.weight.grad,
        ours.out.bias: theirs.o_proj.bias.grad,
        ours.sinks: theirs.sinks.grad,
    }
    for parameter, of_theirs in found.items():
        assert parameter.grad is not None
        assert (parameter.grad - of_theirs).abs().max() < 1e-4 * max(1, of_theirs.abs().max())


def decode(model: Transformer, drafter: KnownDrafter | None = None, **settings: Any) -> Outputs:
    decoder, outputs = new_decoder(model, **settings), {}
    decoder.use_drafter(drafter)
    for request in REQUESTS:
        decoder.submit(request)
    while decoder.has_work:
        outputs |= {(each.request_id, each.sample): each for each in decoder.step() if each.finish_reason is not None}
    assert drafter is None or decoder.stats.accepted_tokens > 0
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_rollout_agrees_with_training(fp8_kv: bool) -> None:
    """With shared and cut prompts, preempted rows, and drafts."""
    model = model_with_sinks(fp8_kv=fp8_kv)
    outputs = decode(model)
    for out, expected in zip(outputs.values(), trained_logprobs(model, outputs), strict=True):
        torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=0)
    known = KnownDrafter({key: out.tokens for key, out in outputs.items()}, 101, wrong=0.3)
    for others in (decode(model, max_prefill_tokens=7), decode(model, n_blocks=14), decode(model, known)):
        for key, out in outputs.items():
            assert others[key].tokens == out.tokens
            assert others[key].logprobs == pytest.approx(out.logprobs, abs=1e-4)


@pytest.mark.slow
def test_exact_log_probabilities() -> None:
    model = model_with_sinks()
    make_exact(model)
    exact: dict[str, Any] = {"exact": True, "attn_backend": "fixed_order"}
    outputs = decode(model, **exact)
    known = KnownDrafter({key: out.tokens for key, out in outputs.items()}, 101, wrong=0.3)
    for others in (decode(model, max_prefill_tokens=7, n_blocks=14, **exact), decode(model, known, **exact)):
        assert {key: out.logprobs for key, out in others.items()} == {key: out.logprobs for key, out in outputs.items()}
    rows = [torch.tensor(REQUESTS[key[0]].prompt + out.tokens) for key, out in outputs.items()]
    tokens, positions, attend = packed(rows)
    softmax = VocabSoftmax(temperature=1.0, own_logits=model.local_logits)
    with torch.no_grad():
        hidden = model(tokens, positions, PackedAttend(attend.cu_seqlens, attend.max_len, "fixed_order"))
        found = selected_logprobs(hidden, model.lm_head.weight, tokens.roll(-1), softmax)[0]
    for out, of_row in zip(outputs.values(), found.split([len(row) for row in rows]), strict=True):
        assert of_row[-len(out.tokens) - 1 : -1].tolist() == out.logprobs


def compare_context(_: Path, context: ParallelGroup) -> None:
    """Each rank has half of the tokens outside of attention, and half of the heads inside."""
    model = model_with_sinks()
    rows = random_rows(101, (5, 9, 4))
    expected_grads = gradients(model, rows)
    tokens, positions, attend = packed(rows)
    with torch.no_grad():
        expected = context.own_rows(model.logits(model(tokens, positions, attend)))
    model.zero_grad()
    attend = PackedAttend(attend.cu_seqlens, attend.max_len, "sdpa", context)
    logits = model.logits(model(context.own_rows(tokens), context.own_rows(positions), attend))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    logits.sin().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(context.all_reduce(parameter.grad), expected_grads[name], atol=1e-4, rtol=1e-4)

    compare_passes(attend)


def compare_passes(attend: PackedAttend) -> None:
    """The passes outside autograd, which fused layers take: each rank adds to the sinks of its own heads."""
    n_tokens, context = int(attend.cu_seqlens[-1]), attend.context
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(n_tokens, heads, 8, generator=generator) for heads in (4, 2, 2, 4)]
    q, k, v, upstream = (context.own_rows(x) for x in whole)
    sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))
    inputs, layer = [x.clone().requires_grad_() for x in (q, k, v)], AttentionLayer(0, 4, sinks)
    expected = attend(layer, *inputs)
    expected.backward(upstream)
    of_sinks, sinks.grad = sinks.grad, torch.zeros(4)
    with torch.no_grad():
        out, saved = attend.forward(layer, q, k, v)
        found = attend.backward(layer, upstream, q, k, v, out, saved)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sinks.grad, of_sinks)
    assert of_sinks is not None
    assert of_sinks.count_nonzero() == 4 // context.size
    for grad, x in zip(found, inputs, strict=True):
        torch.testing.assert_close(grad, x.grad)


@pytest.mark.slow
def test_two_context_parallel_ranks_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    on_two_ranks(compare_context, tmp_path / "none")


def test_sinks_are_saved_for_each_head_and_are_no_matrix(tmp_path: Path) -> None:
    model = model_with_sinks()
    save_weights(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(model.layers):
        assert torch.equal(saved[f"model.layers.{index}.self_attn.sinks"], layer.attention.sinks)
        assert layer.attention.sinks.shape == (4,)
        assert not model.matrix_parts(f"layers.{index}.attention.sinks")  # so Adam updates it under Muon
