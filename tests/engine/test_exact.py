"""engine.exact: the log-probabilities of rollout and training have the same bits, whatever is computed beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from areno.bench.work import model_folder as shape_folder
from areno.config.models import MicroBatchSpec
from areno.config.rollout import DecoderConfig, SamplingConfig
from areno.engine.engine import Engine
from areno.engine.exact import make_exact
from areno.errors import EngineError
from areno.kernels.attention import varlen_attention
from areno.kernels.fixed_order import SPAN, reference
from areno.kernels.padding import CuSeqlens
from areno.kernels.paged import PagedBatch, decode_attention
from areno.layers.parallel import ParallelGroup
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.specs.rollout import RolloutSpec
from areno.specs.update import UpdateSpec
from areno.types import TrainSequence
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tiny_engine import (
    engine_spec,
    finish,
    logprobs_of,
    model_folder,
    request,
    spec,
    tokens_of,
    train_rows,
)

# Prompts shorter and longer than a span, one of them a span exactly.
LENGTHS = [3, 40, 64, 115, SPAN - 1, SPAN, SPAN + 5, SPAN + 200]
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
    with Engine(spec(folder, exact=True), "inline") as engine:
        yield engine


def sampled(engine: Engine, requests: Any = REQUESTS, rollout: RolloutSpec = ROOMY) -> Any:
    engine.begin_rollout(rollout)
    outputs = engine.generate(list(requests))
    engine.end_rollout()
    return outputs


def apart(engine: Engine, rows: list[TrainSequence], temperature: float = 0.7) -> float:
    """The largest difference between the rows' log-probabilities and those of a training forward pass."""
    scored = engine.logprobs("actor", [list(row.tokens) for row in rows], SamplingConfig(temperature=temperature))
    pairs = [
        np.abs(np.asarray(row.logprobs) - new)[~np.asarray(row.prompt_mask)]
        for row, new in zip(rows, scored, strict=True)
    ]
    return float(np.concatenate(pairs).max())


def written(folder: Path, kind: str) -> Path:
    """A model of another family, with biases that are not zero."""
    import transformers

    config = json.loads((model_folder(folder) / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    config = transformers.AutoConfig.for_model(
        kind,
        **{**sizes, **heads},
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def test_rollout_and_training_have_the_same_bits(engine: Engine) -> None:
    rows = train_rows(sampled(engine), REQUESTS)
    assert apart(engine, rows) == 0.0


def test_without_the_setting_they_have_not(folder: Path) -> None:
    with Engine(spec(folder), "inline") as plain:
        assert apart(plain, train_rows(sampled(plain), REQUESTS)) > 0.0


@pytest.mark.parametrize("kind", ["qwen2", pytest.param("llama", marks=pytest.mark.slow)])
def test_other_families(kind: str, tmp_path: Path) -> None:
    with Engine(spec(written(tmp_path, kind), exact=True, random_init=False), "inline") as engine:
        assert apart(engine, train_rows(sampled(engine), REQUESTS)) == 0.0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"temperature": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.6, "min_new_tokens": 20, "presence_penalty": 0.3},
        {"temperature": 1.0, "greedy": True},
    ],
)
def test_sampling_settings(engine: Engine, params: dict[str, Any]) -> None:
    requests = [request(i, n_samples=2, length=20 + 60 * i, max_new_tokens=30, **params) for i in range(3)]
    assert apart(engine, train_rows(sampled(engine, requests), requests), params["temperature"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(DecoderConfig(max_prefill_tokens=33), id="prompts in chunks"),
        pytest.param(DecoderConfig(max_kv_tokens=600), id="preempted"),
    ],
)
def test_a_sample_does_not_depend_on_the_batch(engine: Engine, decoder: DecoderConfig) -> None:
    expected = sampled(engine)
    engine.begin_rollout(replace(ROOMY, decoder=decoder))
    crowded = engine.generate(REQUESTS)
    preempted = sum(stats.preemptions for stats in engine.rollout_stats())
    engine.end_rollout(drop=True)
    assert tokens_of(crowded) == tokens_of(expected)
    assert logprobs_of(crowded) == logprobs_of(expected)
    assert (preempted > 0) == (decoder.max_kv_tokens is not None)


def test_a_sample_alone_is_the_one_in_the_batch(engine: Engine) -> None:
    expected = sampled(engine)
    engine.begin_rollout(replace(ROOMY, max_running=1))
    for one in REQUESTS[4:2:-1]:
        engine.submit([one])
        for (request_id, sample), output in finish(engine, one.n_samples).items():
            there = expected[request_id][sample]
            assert (output.tokens, output.logprobs) == (there.tokens, there.logprobs)
    engine.end_rollout(drop=True)


def test_a_finished_sample_goes_on_as_it_did(engine: Engine) -> None:
    """Greedy decoding of a beginning of it, as a prompt, gives the rest."""
    whole = request(0, length=SPAN - 8, greedy=True, ignore_eos=True, max_new_tokens=40, temperature=1.0)
    [output] = sampled(engine, [whole])[0]
    later = [
        replace(
            whole,
            request_id=n,
            prompt=whole.prompt + output.tokens[:n],
            params=replace(whole.params, max_new_tokens=40 - n),
        )
        for n in (1, 7, 8, 25)
    ]
    for n, [rest] in sampled(engine, later).items():
        assert rest.tokens == output.tokens[n:]
        assert rest.logprobs == output.logprobs[n:]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"devices": 2}, id="dp", marks=pytest.mark.slow),
        pytest.param({"devices": 2, "tp_size": 2}, id="tp"),
    ],
)
def test_several_devices(folder: Path, engine: Engine, settings: dict[str, int]) -> None:
    expected = sampled(engine)
    with Engine(spec(folder, exact=True, **settings), "spawn") as spread:
        outputs = sampled(spread)
        if "tp_size" not in settings:  # partial products are rounded before they are summed
            assert tokens_of(outputs) == tokens_of(expected)
            assert logprobs_of(outputs) == logprobs_of(expected)
        assert apart(spread, train_rows(outputs, REQUESTS)) == 0.0


@pytest.mark.slow
def test_four_ranks_that_share_a_model(tmp_path: Path) -> None:
    config = json.loads((model_folder(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with Engine(spec(tmp_path, devices=4, tp_size=4, exact=True), "spawn") as spread:
        assert apart(spread, train_rows(sampled(spread), REQUESTS)) == 0.0


def test_rollout_and_training_agree_before_an_update(folder: Path) -> None:
    with Engine(spec(folder, exact=True), "inline") as engine:
        rows = train_rows(sampled(engine), REQUESTS)
        assert engine.train(rows, grpo_loss_fn, UPDATE)["logp_abs_diff_max"] == 0.0
        rows = train_rows(sampled(engine), REQUESTS)
        stats = engine.train(rows, grpo_loss_fn, replace(UPDATE, n_minibatches=2))
        assert stats["logp_abs_diff_max"] == 0.0  # of the weights before the first step
        stale = [replace(row, staleness=2, old_logprobs=None) for row in rows]
        assert engine.train(stale, grpo_loss_fn, UPDATE)["logp_abs_diff_max"] > 0.0


def test_a_difference_ends_the_run(folder: Path) -> None:
    with Engine(spec(folder, exact=True), "inline") as engine:
        rows = train_rows(sampled(engine), REQUESTS)
        last = rows[-1].logprobs
        assert last is not None
        rows[-1] = replace(rows[-1], logprobs=[*last[:-1], float(np.nextafter(np.float32(last[-1]), np.float32(0)))])
        with pytest.raises(EngineError, match=r"engine\.exact is true, but the model disagrees by .*before any update"):
            engine.train(rows, grpo_loss_fn, UPDATE)
        assert engine.weights_version == 0


def test_gradients_are_those_of_the_plain_engine(folder: Path) -> None:
    found = []
    for exact in (False, True):
        with Engine(spec(folder, exact=exact), "inline") as engine:
            rows = [replace(row, logprobs=None) for row in train_rows(sampled(engine), REQUESTS)]
            found.append(engine.train(rows, sft_loss_fn, UPDATE))
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-5)
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)


def test_a_machine_that_cannot_keep_it_is_told(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A library whose products depend on the number of rows."""
    real = F.linear

    def split(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        return real(x, weight, *more) * (1 + 1e-6 * (len(x) < 40))

    monkeypatch.setattr(F, "linear", split)
    with (
        pytest.raises(EngineError, match=r"engine\.exact cannot be kept on this machine: a product of 16 rows"),
        Engine(spec(folder, exact=True), "inline"),
    ):
        pass


def test_ranks_add_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [torch.tensor([1e8, 1.0]), torch.tensor([-1e8, 1e8]), torch.tensor([1.0, -1e8])]
    monkeypatch.setattr(
        "torch.distributed.all_gather", lambda out, x, group: [a.copy_(b) for a, b in zip(out, pieces, strict=True)]
    )
    group = ParallelGroup(1, 3, group=object(), in_order=True)
    assert group.all_reduce(pieces[1].clone()).tolist() == [1.0, 0.0]


# The attention by itself ----------------------------------------------------------------------------------------------


def packed(lengths: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 24) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    n = sum(lengths)
    q, k, v = (torch.randn(n, count, dim) for count in (heads, kv_heads, kv_heads))
    return q, k, v, torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


ROWS = [1, 5, SPAN + 2, 2 * SPAN + 1, 130, 64]


def decoded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    shared: int = 0,
    n_shared: int = SPAN,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last token of each row by paged attention, with blocks of 16 in random order.

    shared: so many rows, all of one length, have the first n_shared positions of the first one.
    """
    lengths = starts.diff()
    size, width = 16, -(-int(lengths.max()) // 16)
    table = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
    blocks = torch.full((2, len(lengths) * width, size, *k.shape[1:]), 1e3)
    for row, length in enumerate(lengths.tolist()):
        if row < shared:
            table[row, : n_shared // size] = table[0, : n_shared // size]
        for position in range(length - 1):
            for part, x in zip(blocks, (k, v), strict=True):
                part[table[row, position // size], position % size] = x[starts[row] + position]
    last = starts[1:].long() - 1
    batch = PagedBatch(
        table_TW=table,
        slots_B=torch.arange(len(lengths)),
        lengths_B=lengths.long(),
        shared_lens_B=torch.tensor([n_shared if row < shared else 0 for row in range(len(lengths))]),
        split_lens=torch.tensor([SPAN, SPAN]),
        splits=(4, 2 if shared else 0),
        fixed_order=True,
        prefix_groups_GR=torch.tensor([[*range(shared)] + [-1] * (8 - shared), [-1] * 8]) if shared else None,
    )
    return decode_attention(q[last], k[last], v[last], blocks, batch, window, None, sinks)


def test_attention_is_that_of_torch() -> None:
    q, k, v, starts = packed(ROWS)
    for x in (q, k, v):
        x.requires_grad_()
    results = []
    for backend in ("sdpa", "fixed_order"):
        out = varlen_attention(q, k, v, CuSeqlens(starts, starts, max(ROWS), max(ROWS)), backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for plain, exact in zip(*results, strict=True):
        torch.testing.assert_close(plain, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -9.0, 3.0, 30.0])], ids=["", "sinks"])
@pytest.mark.parametrize(("threads", "window"), [(1, None), (2, None), (1, 9), (1, SPAN + 5)])
def test_a_query_has_the_same_bits_wherever_it_is_computed(
    threads: int, window: int | None, sinks: torch.Tensor | None
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v, starts = packed(ROWS)
        attend = partial(varlen_attention, backend="fixed_order", window=window, sinks_H=sinks)
        whole = attend(q, k, v, CuSeqlens(starts, starts, max(ROWS), max(ROWS)))
        tails = [1, 2, 40, SPAN + 7, 66, 7]
        places = torch.cat([torch.arange(end - n, end) for n, end in zip(tails, starts[1:].tolist(), strict=True)])
        starts_q = torch.tensor([0, *np.cumsum(tails)], dtype=torch.int32)
        assert torch.equal(attend(q[places], k, v, CuSeqlens(starts_q, starts, max(tails), max(ROWS))), whole[places])
        assert torch.equal(decoded(q, k, v, starts, window=window, sinks=sinks), whole[starts[1:].long() - 1])
        for row, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            alone = torch.tensor([0, ROWS[row]], dtype=torch.int32)
            one = attend(q[start:end], k[start:end], v[start:end], CuSeqlens(alone, alone, ROWS[row], ROWS[row]))
            assert torch.equal(one, whole[start:end])
    finally:
        torch.set_num_threads(before)


def compare_interpreted() -> None:
    """The Triton kernels against the torch form: whole rows, ends of rows, decode steps without and with a group."""
    from areno.kernels.fixed_order import triton

    for rows, heads, kv_heads, dim in ((ROWS, 4, 2, 24), ([5, SPAN + 2, 64], 3, 1, 16)):
        q, k, v, starts = packed(rows, heads, kv_heads, dim)
        expected, _ = reference.packed_attention(q, k, v, CuSeqlens(starts, starts, max(rows), max(rows)))
        out, log_sum = triton.packed_attention(q, k, v, CuSeqlens(starts, starts, max(rows), max(rows)))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        scores = (q[-64:, 0] @ k[-64:, 0].T * dim**-0.5).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(log_sum[0, -64:], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(decoded(q, k, v, starts), expected[starts[1:].long() - 1], rtol=1e-5, atol=1e-5)
    for window in (9, SPAN + 5):
        q, k, v, starts = packed([SPAN + 9, 2 * SPAN + 1], 2, 1, 16)
        expected, _ = reference.packed_attention(q, k, v, CuSeqlens(starts, starts, 2 * SPAN + 1, 2 * SPAN + 1), window)
        out, _ = triton.packed_attention(q, k, v, CuSeqlens(starts, starts, 2 * SPAN + 1, 2 * SPAN + 1), window)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        got = decoded(q, k, v, starts, window=window)
        torch.testing.assert_close(got, expected[starts[1:].long() - 1], rtol=1e-5, atol=1e-5)
        sinks, rows = torch.tensor([3.0, -2.0]), CuSeqlens(starts, starts, 2 * SPAN + 1, 2 * SPAN + 1)
        expected, _ = reference.packed_attention(q, k, v, rows, window, sinks)
        out, log_sum = triton.packed_attention(q, k, v, rows, window, sinks)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        without = triton.packed_attention(q, k, v, rows, window)[1]
        torch.testing.assert_close(log_sum, without.logaddexp(sinks.unsqueeze(1)), rtol=1e-5, atol=1e-5)
        got = decoded(q, k, v, starts, window=window, sinks=sinks)
        torch.testing.assert_close(got, expected[starts[1:].long() - 1], rtol=1e-5, atol=1e-5)
    for n_shared in (64, SPAN, 2 * SPAN):  # less than the first split of a group, as much, and more
        n_tokens = n_shared + 70
        q, k, v, starts = packed([n_tokens] * 4, 2, 1, 16)
        for row in (1, 2):  # begin as the first one
            for x in (k, v):
                x[starts[row] : starts[row] + n_shared] = x[:n_shared]
        for window in (None, 20, 200) if n_shared == SPAN else (None, 200):  # 20: nothing shared is seen
            expected, _ = reference.packed_attention(q, k, v, CuSeqlens(starts, starts, n_tokens, n_tokens), window)
            out = decoded(q, k, v, starts, 3, n_shared, window)
            torch.testing.assert_close(out, expected[starts[1:].long() - 1], rtol=1e-5, atol=1e-5)
    from areno.kernels.matmul import fixed_order_matmul

    x, weight = torch.randn(37, 50), torch.randn(70, 50)
    torch.testing.assert_close(fixed_order_matmul(x, weight, torch.float32), x @ weight.T, rtol=1e-5, atol=1e-5)
    from areno.kernels.logprobs import VocabSoftmax, sampled_logprobs, selected_logprobs

    targets, temperature = torch.randint(70, (37,)), 0.6
    logits = x @ weight.T
    found = sampled_logprobs(logits, targets, torch.full((37,), temperature))
    there = selected_logprobs(
        x, weight, targets, VocabSoftmax(temperature=temperature, own_logits=lambda hidden: logits)
    )[0]
    assert torch.equal(found, there)


@pytest.mark.slow
def test_interpreted_kernels_compute_the_same() -> None:
    run_interpreted("from tests.engine.test_exact import compare_interpreted; compare_interpreted()")


def test_rows_of_products_are_filled_up(folder: Path, engine: Engine) -> None:
    from areno.models.registry import build_model, load_config

    model = build_model(load_config(str(folder)), dtype=torch.float32, device="cpu")
    model.init_weights(1)
    assert make_exact(model) == f"products of {reference.row_multiple()} rows at a time"
    assert model.logits(torch.randn(3, 32)).shape == (3, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "prompt"), [(4, 20), (64, 100), (200, 300)])
def test_bits_on_cuda(rows: int, prompt: int, tmp_path: Path) -> None:
    """In bf16, with CUDA graphs: the library divides products of few rows, and attention has parts and groups."""
    path, _ = shape_folder("qwen3-0.6b", tmp_path)
    settings = engine_spec(path, ["cuda:0"], dtype="bfloat16", random_init=True, exact=True)
    requests = [request(i, n_samples=4, length=prompt, max_new_tokens=70, temperature=1.0) for i in range(rows // 4)]
    with Engine(settings.without_optimizer(), "inline") as engine:
        outputs = sampled(engine, requests, RolloutSpec(max_running=rows, max_len=prompt + 70))
        assert apart(engine, train_rows(outputs, requests), 1.0) == 0.0
