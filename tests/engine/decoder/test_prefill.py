"""Padded prefills, as CUDA graphs need them: the samples and the KV cache are those of prefills without padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.prefill import PrefillBatch, PrefillGraphs, PrefillIndices, PrefillShape, PrefillTensors
from tests.helpers.cpu_graphs import CpuCaptures
from tests.helpers.family_cases import random_model
from tests.helpers.tiny_decoder import Outputs, assert_same, make_decoder, model, request, run
from tests.helpers.two_ranks import load

SCRATCH = 999


def played(pads: bool, **settings: object) -> tuple[Outputs, Decoder]:
    """Prompts of many lengths, several samples of each, and second turns that find the first ones in the cache."""
    decoder = make_decoder(**settings)
    if pads:
        runner, scratch = decoder.runner, decoder.blocks.scratch * decoder.blocks.block_size
        runner.prefill_graphs = PrefillGraphs(runner._prefill_logits, scratch, CpuCaptures(), n_params=1)
    outputs: Outputs = {}
    for length in (1, 7, 16, 23):
        decoder.submit(request(length, length, n_samples=1 + length % 3))
    outputs |= run(decoder)
    for number, length in enumerate((7, 23)):
        turn = request(100 + number, 5)
        first = request(length, length)
        turn.prompt = [*first.prompt, *outputs[length, 0].tokens, *turn.prompt]
        decoder.submit(turn)
    return outputs | run(decoder), decoder


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 10}, {"block_size": 16}], ids=str)
def test_padding_changes_nothing(settings: dict[str, int]) -> None:
    plain, _ = played(False, **settings)
    padded, decoder = played(True, **settings)
    assert decoder.runner.prefill_graphs is not None
    if settings == {"max_prefill_tokens": 10}:
        assert decoder.stats.graph_replays >= 2
        decoder.reset_stats()
        assert decoder.stats.graph_replays == 0
    assert_same(padded, plain)


def batch_of(n_tokens: int, n_rows: int = 1, n_earlier: int = 0) -> PrefillBatch:
    """A prefill of rows that complete their prompts, and that attend to `n_earlier` tokens of earlier steps."""
    cu_q = np.append(np.arange(n_rows), n_tokens)
    stored = np.arange(n_tokens)[None]
    keys = np.arange(n_tokens + n_earlier)[None] if n_earlier else None
    cu_k = np.append(cu_q[:-1], n_tokens + n_earlier)
    place = PrefillIndices(stored, keys, cu_k.astype(np.int32))
    return PrefillBatch(np.arange(n_tokens), np.arange(n_tokens), cu_q, cu_q[1:] - 1, [place])


def test_the_first_prefill_of_a_size_is_computed_like_later_ones() -> None:
    """A resumed run has another first one, and a kernel for another number of rows may round otherwise."""
    shapes: list[tuple[int, ...]] = []

    def body(given: PrefillTensors) -> Tensor:
        shapes.append((len(given.tokens_N), len(given.last_K), *given.stored[0].shape))
        return given.tokens_N[given.last_K, None].float()

    graphs = PrefillGraphs(body, SCRATCH, CpuCaptures(), n_params=1)
    for n_tokens in (20, 21, 31, 17):
        logits = graphs.run(batch_of(n_tokens))
        assert logits is not None
        assert logits.tolist() == [[n_tokens - 1]]
    assert set(shapes) == {(32, 64, 32)}
    assert graphs.graphs.n_replays == 3


def test_without_memory_for_a_graph_prefills_are_computed_padded() -> None:
    shapes: list[int] = []

    def body(given: PrefillTensors) -> Tensor:
        shapes.append(len(given.tokens_N))
        return given.tokens_N[given.last_K, None].float()

    graphs = PrefillGraphs(body, SCRATCH, CpuCaptures(room=0), n_params=1)
    for n_tokens in (20, 21, 31):
        logits = graphs.run(batch_of(n_tokens))
        assert logits is not None
        assert logits.tolist() == [[n_tokens - 1]]
    assert set(shapes) == {32}
    assert graphs.graphs.n_replays == 0


@pytest.mark.slow
def test_there_are_few_shapes() -> None:
    shapes: set[PrefillShape] = set()
    for n_tokens in range(1, 2049, 5):
        for n_rows in (1, 3, 64):
            for n_earlier in (0, 1, 100, 2000, 14000):
                found = batch_of(n_tokens, min(n_rows, n_tokens), n_earlier).pad(SCRATCH, 2048)
                if found is not None:
                    batch, shape = found
                    assert len(batch.pack()) == sum(shape.input_lengths())
                    assert shape.max_q >= batch.shape.max_q
                    assert shape.max_k >= batch.shape.max_k
                    shapes.add(shape)
    assert 20 < len(shapes) <= 64


@pytest.mark.parametrize(("size", "is_padded"), [((2048,), 1), ((2049,), 0), ((70, 64), 1), ((70, 65), 0)])
def test_large_prefills_are_not_padded(size: tuple[int, ...], is_padded: int) -> None:
    assert (batch_of(*size).pad(SCRATCH, 2048) is not None) == is_padded
    assert batch_of(20, 1, 16352).pad(SCRATCH, 2048) is not None
    assert batch_of(20, 1, 16353).pad(SCRATCH, 2048) is None


@pytest.mark.parametrize(("n_params", "most"), [(10**6, 16384), (440_000_000, 8192), (7 * 10**9, 2048)])
def test_larger_prefills_are_padded_for_smaller_models(n_params: int, most: int) -> None:
    graphs = PrefillGraphs(lambda given: given.tokens_N[given.last_K, None].float(), SCRATCH, CpuCaptures(), n_params)
    assert graphs.run(batch_of(most)) is not None
    assert graphs.run(batch_of(most + 1)) is None


def rows_alike(n_tokens: int, n_rows: int) -> PrefillBatch:
    """A prefill of whole prompts, which have about the same length."""
    cu_q = np.linspace(0, n_tokens, n_rows + 1).astype(np.int64)
    place = PrefillIndices(np.arange(n_tokens)[None], None, cu_q.astype(np.int32))
    return PrefillBatch(np.arange(n_tokens), np.arange(n_tokens), cu_q, cu_q[1:] - 1, [place])


def test_attention_of_many_tokens_launches_programs_for_the_longest_row() -> None:
    found = rows_alike(3900, 13).pad(SCRATCH, 8192)
    assert found is not None
    assert (found[1].n_tokens, found[1].max_q) == (4096, 512)


@pytest.mark.slow
def test_larger_prefills_have_few_shapes() -> None:
    shapes: set[PrefillShape] = set()
    for n_tokens in range(2049, 16385, 61):
        for n_rows in (1, 2, 3, 4, 8, 16, 32, 64):
            batch = rows_alike(n_tokens, n_rows)
            found = batch.pad(SCRATCH, 16384)
            assert found is not None
            # Of the rows, or of the padding.
            assert max(batch.shape.max_q, found[1].n_tokens - n_tokens) <= found[1].max_q <= found[1].n_tokens
            shapes.add(found[1])
    assert 20 < len(shapes) <= 45


@pytest.mark.parametrize(
    ("case", "pads"),
    [("smollm3", True), ("mistral-window", False), ("gemma3-tied", False), ("qwen3.5", False)],
)
def test_which_models_pad(case: str, pads: bool, tmp_path: Path) -> None:
    random_model(case, tmp_path)
    of = load(tmp_path)
    for backend in ("varlen", "fixed_order"):
        assert make_decoder(of, attn_backend=backend).runner._pads_prefills == pads
    assert not make_decoder(of, attn_backend="sdpa").runner._pads_prefills


@pytest.mark.gpu
def test_graphs_on_the_gpu() -> None:
    """A size that occurs for the second time is captured. All samples are those of prefills without graphs."""
    outputs = []
    for use_graphs in (False, True):
        decoder = make_decoder(model("cuda", torch.bfloat16), use_graphs=use_graphs, attn_backend="varlen")
        found: Outputs = {}
        for turn in range(4):
            for number in range(3):
                decoder.submit(request(10 * turn + number, 20 + number, n_samples=2))
            found |= run(decoder)
        outputs.append(found)
        graphs = decoder.runner.prefill_graphs
        assert (graphs is not None and graphs.graphs.n_replays == 3) == use_graphs
    for key, output in outputs[0].items():
        assert len(output.logprobs) == len(outputs[1][key].logprobs)
        assert output.logprobs[0] == pytest.approx(outputs[1][key].logprobs[0], abs=0.1)
