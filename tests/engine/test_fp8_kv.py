"""Keys and values in FP8: rollout, training and the reference compute the same function, and blocks hold codes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areno.bench.work import model_folder as shape_folder
from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig, SamplingConfig
from areno.engine.engine import Engine
from areno.kernels.fixed_order import SPAN
from areno.layers.attention import PackedAttend
from areno.loss_fns.grpo import grpo_loss_fn
from areno.models.layer import Attention
from areno.models.registry import build_model, load_config
from areno.plan.startup_log import log_model
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.family_cases import random_model
from tests.helpers.lora_models import lora
from tests.helpers.moe_models import moe_folder
from tests.helpers.tiny_engine import finish, logprobs_of, model_folder, request, scored, spec, tokens_of, train_rows

LENGTHS = [3, 40, 64, 115, SPAN, SPAN + 50]
REQUESTS = [
    request(i, n_samples=1 + i % 3, length=length, max_new_tokens=10 + 3 * i, temperature=0.7)
    for i, length in enumerate(LENGTHS)
]
ROOMY = RolloutSpec(max_running=16, max_len=400)
UPDATE = UpdateSpec(MicroBatchSpec(max_tokens_per_mb=700), sampling=SamplingConfig(temperature=0.7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(spec(folder, exact=True, fp8_kv=True), "inline") as engine:
        yield engine


def sampled(engine: Engine, rollout: RolloutSpec = ROOMY) -> Any:
    engine.begin_rollout(rollout)
    outputs = engine.generate(REQUESTS)
    engine.end_rollout()
    return outputs


def apart(engine: Engine, rows: list[TrainSequence]) -> float:
    """The largest difference between the rows' log-probabilities and those of a training forward pass."""
    found = engine.logprobs("actor", [list(row.tokens) for row in rows], SamplingConfig(temperature=0.7))
    pairs = [
        np.abs(np.asarray(row.logprobs) - new)[~np.asarray(row.prompt_mask)]
        for row, new in zip(rows, found, strict=True)
    ]
    return float(np.concatenate(pairs).max())


def test_rollout_and_training_have_the_same_bits(engine: Engine) -> None:
    rows = train_rows(sampled(engine), REQUESTS)
    assert apart(engine, rows) == 0.0
    again = sampled(engine)
    assert apart(engine, train_rows(again, REQUESTS)) == 0.0


def test_without_exact_they_differ_by_rounding(folder: Path) -> None:
    with Engine(spec(folder, fp8_kv=True), "inline") as plain:
        rows = train_rows(sampled(plain), REQUESTS)
        assert apart(plain, rows) < 1e-3  # a code may be another one
    with Engine(spec(folder), "inline") as unrounded:
        assert apart(unrounded, rows) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param({"max_prefill_tokens": 33}, id="prompts in chunks"),
        pytest.param({"max_kv_tokens": 600}, id="preempted"),
        pytest.param({"speculation": "on"}, id="drafts"),
    ],
)
def test_a_sample_does_not_depend_on_the_batch(engine: Engine, decoder: dict[str, Any]) -> None:
    expected = sampled(engine)
    rollout = replace(ROOMY, decoder=DecoderConfig(**decoder))
    for _ in range(2):  # drafts are from samples before
        engine.begin_rollout(rollout)
        found, counts = engine.generate(REQUESTS), engine.draft_counts()
        preempted = sum(stats.preemptions for stats in engine.rollout_stats())
        engine.end_rollout()
        assert tokens_of(found) == tokens_of(expected)
        assert logprobs_of(found) == logprobs_of(expected)
    assert (preempted > 0) == ("max_kv_tokens" in decoder)
    assert (counts.accepted > 0) == ("speculation" in decoder)


def test_a_cached_prefix_is_the_computed_one(engine: Engine) -> None:
    output = sampled(engine)[4][0]
    engine.begin_rollout(ROOMY)
    prompt = REQUESTS[4].prompt + output.tokens[:20]
    for number, item in enumerate((REQUESTS[4], replace(REQUESTS[4], prompt=prompt))):  # the second finds blocks
        engine.submit([replace(item, request_id=number, n_samples=1)])
        found = finish(engine, 1)[number, 0]
        rows = train_rows({number: [found]}, [replace(item, request_id=number)])
    cached = sum(stats.cached_prompt_tokens for stats in engine.rollout_stats())
    engine.end_rollout()
    assert cached >= SPAN
    assert apart(engine, rows) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3", "mistral-window", "experts"])
def test_windows_and_experts(case: str, tmp_path: Path) -> None:
    folder = tmp_path / case
    if case == "experts":
        moe_folder(folder)
    else:
        random_model(case, folder)
    requests = [request(i, n_samples=2, length=30 + 30 * i, max_new_tokens=40, temperature=0.7) for i in range(3)]
    with Engine(spec(folder, exact=True, fp8_kv=True, random_init=case == "experts"), "inline") as engine:
        for max_prefill_tokens in (8192, 11):
            engine.begin_rollout(
                replace(ROOMY, max_len=160, decoder=DecoderConfig(max_prefill_tokens=max_prefill_tokens))
            )
            outputs = engine.generate(requests)
            engine.end_rollout()
            assert apart(engine, train_rows(outputs, requests)) == 0.0


@pytest.mark.slow
def test_only_attention_of_a_model_with_recurrent_states_rounds(tmp_path: Path) -> None:
    random_model("qwen3.5", tmp_path)
    requests = [request(i, n_samples=2, length=20 + 9 * i, max_new_tokens=20, temperature=0.7) for i in range(3)]
    with Engine(spec(tmp_path, fp8_kv=True, random_init=False), "inline") as engine:
        engine.begin_rollout(replace(ROOMY, max_len=64))
        outputs = engine.generate(requests)
        engine.end_rollout()
        assert apart(engine, train_rows(outputs, requests)) < 1e-3


@pytest.mark.slow
def test_adapters_and_their_base(folder: Path) -> None:
    with Engine(spec(folder, exact=True, fp8_kv=True, lora=lora(folder)), "inline") as engine:
        engine.ensure_roles({"ref": RoleSpec(path=str(folder), key="ref.path", fp8_kv=True)})
        rows = train_rows(sampled(engine), REQUESTS)
        tokens = [list(row.tokens) for row in rows]
        assert scored(engine, "ref", tokens) == scored(engine, "actor", tokens)
        assert engine.train(rows, grpo_loss_fn, UPDATE)["logp_abs_diff_max"] == 0.0
        assert apart(engine, train_rows(sampled(engine), REQUESTS)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"cp_size": 2}], ids=["tp", "cp"])
def test_two_devices(folder: Path, layout: dict[str, int]) -> None:
    with Engine(spec(folder, exact=True, fp8_kv=True, devices=2, **layout), "spawn") as engine:
        rows = train_rows(sampled(engine), REQUESTS)
        assert apart(engine, rows) == 0.0
        assert engine.train(rows, grpo_loss_fn, UPDATE)["logp_abs_diff_max"] == 0.0


@pytest.mark.slow
def test_a_suspended_rollout_goes_on_under_new_weights(folder: Path) -> None:
    """Tokens after the update have the bits of a pass with the new weights over the whole row."""
    long = request(50, n_samples=2, length=70, max_new_tokens=200, ignore_eos=True, temperature=0.7)
    with Engine(spec(folder, exact=True, fp8_kv=True), "inline") as engine:
        rows = train_rows(sampled(engine), REQUESTS)
        engine.begin_rollout(ROOMY)
        engine.submit([long])
        while sum(stats.generated_tokens for stats in engine.rollout_stats()) < 60:
            engine.poll(0.01)
        engine.suspend_rollout()
        engine.train(rows, grpo_loss_fn, UPDATE)
        engine.resume_rollout()
        outputs = finish(engine, 2)
        engine.end_rollout()
        for output in outputs.values():
            n_old = output.versions.count(0)
            assert 0 < n_old < 200
            [found] = engine.logprobs("actor", [long.prompt + output.tokens], SamplingConfig(temperature=0.7))
            assert found[len(long.prompt) + n_old :].tolist() == output.logprobs[n_old:]


def test_the_reference_at_the_start_is_the_actor(engine: Engine, folder: Path) -> None:
    tokens = [list(row.tokens) for row in train_rows(sampled(engine), REQUESTS)]
    ref = RoleSpec(path=str(folder), key="ref.path", fp8_kv=True)
    engine.ensure_roles({"ref": ref, "unrounded": replace(ref, fp8_kv=False)})
    assert scored(engine, "ref", tokens) == scored(engine, "actor", tokens)
    assert scored(engine, "unrounded", tokens) != scored(engine, "actor", tokens)


def test_a_run_says_so_and_recommends_exact(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for settings, n_warnings in (({}, 1), ({"exact": True}, 0), ({"optimizer": None}, 0)):
        caplog.clear()
        with Engine(spec(folder, fp8_kv=True, **settings), "inline") as engine, caplog.at_level(logging.INFO, "areno"):
            log_model(engine)
        assert sum("keys and values: rounded to FP8" in text for text in caplog.messages) == 1
        told = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        found = [text for text in told if "rollout.kv_cache_dtype=fp8 without engine.exact" in text]
        assert len(found) == n_warnings
        assert all(text.endswith("set engine.exact=true") for text in found)


def test_a_run_recommends_no_exact_to_a_model_that_cannot_have_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = shape_folder("tiny-qwen3.5", tmp_path)
    with Engine(spec(path, fp8_kv=True), "inline") as engine, caplog.at_level(logging.WARNING, "areno"):
        log_model(engine)
    [text] = caplog.messages
    assert text.endswith("log-probabilities differ more; watch train/logp_abs_diff_mean")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "prompt"), [(4, 20), (64, 100), (200, 300)])
def test_bits_on_cuda(rows: int, prompt: int, tmp_path: Path) -> None:
    """In bf16, with CUDA graphs, and prompts that end within a block and after the first span."""
    path, _ = shape_folder("qwen3-0.6b", tmp_path)
    requests = [request(i, n_samples=4, length=prompt, max_new_tokens=70, temperature=0.7) for i in range(rows // 4)]
    rollout = RolloutSpec(max_running=rows, max_len=prompt + 70)
    for exact in (True, False):
        settings = spec(path, ["cuda:0"], dtype="bfloat16", exact=exact, fp8_kv=True)
        with Engine(settings.without_optimizer(), "inline") as engine:
            rows_of = []
            for max_prefill_tokens in (8192, 50):
                engine.begin_rollout(replace(rollout, decoder=DecoderConfig(max_prefill_tokens=max_prefill_tokens)))
                rows_of += train_rows(engine.generate(requests), requests)
                engine.end_rollout()
            assert apart(engine, rows_of) <= (0.0 if exact else 0.5)


# The gradient ---------------------------------------------------------------------------------------------------------


def rounded(x: Tensor) -> Tensor:
    """x + sg(q(x) - x) of float64 rows: the nearest e4m3 number times 2^ceil(log2(largest / 448))."""
    scale = 2.0 ** (x.detach().abs().amax(-1, keepdim=True) / 448).log2().ceil()
    codes = (x.detach() / scale).float().to(torch.float8_e4m3fn).double()
    return x + (codes * scale - x).detach()


def oracle(
    attention: Attention, weights: dict[str, Tensor], x: Tensor, angles: tuple[Tensor, Tensor], starts: list[int]
) -> Tensor:
    """The attention of a Qwen3 layer in float64, one row and one head at a time."""
    dim, (n_q, n_k, _) = attention.head_dim, (size // attention.head_dim for size in attention.sizes)
    cos, sin = (angle.double() for angle in angles)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    heads = (x @ weights["qkv.weight"].T).unflatten(-1, (-1, dim))
    q = normed(heads[:, :n_q], weights["q_norm.weight"])
    k = rounded(normed(heads[:, n_q : n_q + n_k], weights["k_norm.weight"]))
    v = rounded(heads[:, n_q + n_k :])
    rows = []
    for start, end in pairwise(starts):
        future = torch.ones(end - start, end - start).triu(1).bool()
        of_heads = []
        for head in range(n_q):
            kv = head * n_k // n_q
            scores = q[start:end, head] @ k[start:end, kv].T / math.sqrt(dim)
            of_heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[start:end, kv])
        rows.append(torch.cat(of_heads, dim=-1))
    return torch.cat(rows) @ weights["out.weight"].T


def test_gradients_are_straight_through(folder: Path) -> None:
    model = build_model(replace(load_config(folder), fp8_kv=True), dtype=torch.float32, device="cpu")
    model.init_weights(3)
    attention = model.layers[0].attention
    assert isinstance(attention, Attention)
    torch.manual_seed(0)
    starts, n = [0, 7, 30, 31, 64], 64
    x = torch.randn(n, 32)
    angles = model.rotaries[0](torch.cat([torch.arange(b - a) for a, b in pairwise(starts)]))
    upstream = torch.randn(n, 32)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    given, wanted = x.clone().requires_grad_(), x.double().requires_grad_()
    out = attention(given, *angles, PackedAttend(cu_seqlens, 33, "sdpa"))
    out.backward(upstream)
    weights = {name: p.detach().double().requires_grad_() for name, p in attention.named_parameters()}
    expected = oracle(attention, weights, wanted, angles, starts)
    expected.backward(upstream.double())
    pairs = [(out, expected), (given.grad, wanted.grad)]
    pairs += [(p.grad, weights[name].grad) for name, p in attention.named_parameters()]
    for got, true in pairs:
        assert got is not None
        assert true is not None
        assert (got.double() - true).norm() <= 1e-6 * true.norm()
