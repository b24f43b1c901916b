"""Padded prefills, as CUDA graphs need them: the samples and the KV cache are those of prefills without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.prefill import PrefillBatch, PrefillTensors
from tests.helpers.tiny_decoder import Outputs, assert_same, make_decoder, model, request, run


class Padded:
    """Computes padded prefills as PrefillGraphs does, without graphs."""

    def __init__(self, decoder: Decoder):
        self.runner, self.n_replays = decoder.runner, 0
        self.scratch = decoder.blocks.scratch * decoder.blocks.block_size

    def run(self, batch: PrefillBatch) -> torch.Tensor | None:
        padded = batch.padded(self.scratch) if len(batch.last) else None
        if padded is None:
            return None
        assert len(padded.tokens) > len(batch.tokens) or padded.shape != batch.shape
        self.n_replays += 1
        given = PrefillTensors.of(torch.from_numpy(padded.packed()), padded.shape)
        return self.runner._prefill_logits(given)[: len(batch.last)]


def played(pads: bool, **settings: object) -> tuple[Outputs, Decoder]:
    """Prompts of many lengths, several samples of each, and second turns that find the first ones in the cache."""
    decoder = make_decoder(**settings)
    if pads:
        decoder.runner.prefill_graphs = Padded(decoder)  # type: ignore[assignment]
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
    assert decoder.runner.prefill_graphs.n_replays >= 2
    assert_same(padded, plain)


def test_large_prefills_are_not_padded() -> None:
    places = np.zeros((1, 1))
    batch = PrefillBatch(
        np.zeros(3000, np.int64), np.zeros(3000), np.array([0, 3000]), np.array([2999]), [places], 3000
    )  # type: ignore[list-item]
    assert batch.padded(0) is None


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
        assert (graphs is not None and graphs.n_replays == 3) == use_graphs
    for key, output in outputs[0].items():
        assert len(output.logprobs) == len(outputs[1][key].logprobs)
        assert output.logprobs[0] == pytest.approx(outputs[1][key].logprobs[0], abs=0.1)
