"""frequency_penalty: against a draw worked by hand, whatever is batched, shared, cut in pieces or preempted."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from areno.engine.decoder.decoder import Decoder
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.types import GenerationRequest
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tiny_decoder import MIXED, VOCAB, forward_logits, make_decoder, mixed_outputs, model, request, run

PENALIZED = [
    request(21, 9, n_samples=3, max_new_tokens=25, frequency_penalty=1.5),
    request(22, 8, max_new_tokens=25, frequency_penalty=-0.7, temperature=0.6),
    request(23, 17, n_samples=2, max_new_tokens=25, frequency_penalty=0.9, greedy=True),
]


def by_hand(item: GenerationRequest, sample: int, n_tokens: int, device: str = "cpu") -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities, one forward pass over the whole row for each."""
    row, logprobs = list(item.prompt), []
    params = item.params
    for position in range(n_tokens):
        logits = forward_logits(row, model(device))[-1].cpu().double()
        counts = torch.tensor(row[len(item.prompt) :], dtype=torch.int64).bincount(minlength=VOCAB)
        weights = ((logits - params.frequency_penalty * counts) / params.temperature).softmax(-1)
        number = uniform(torch.tensor([sample_keys(item.seed, [sample])[0]]), torch.tensor([position]))
        drawn = torch.searchsorted(weights.cumsum(-1), number, right=True)
        token = int(weights.argmax() if params.greedy else drawn)
        logprobs.append((logits / params.temperature).log_softmax(-1)[token].item())  # the policy's own
        row.append(token)
    return row[len(item.prompt) :], logprobs


@cache
def expected(device: str) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    return {
        (item.request_id, sample): by_hand(item, sample, 25, device)
        for item in PENALIZED
        for sample in range(item.n_samples)
    }


def check(decoder: Decoder, device: str = "cpu") -> None:
    """Twice, so that slots, counts and graphs are used again; half of the batch has no penalty."""
    for _ in range(2):
        for item in [*PENALIZED, *MIXED]:
            decoder.submit(item)
        outputs = run(decoder)
        for key, (tokens, logprobs) in expected(device).items():
            assert outputs[key].tokens == tokens
            assert outputs[key].logprobs == pytest.approx(logprobs, abs=1e-3)
        for key, output in mixed_outputs().items():
            assert outputs[key].tokens == output.tokens
        decoder.reset_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"n_blocks": 14, "block_size": 5, "max_prefill_tokens": 20}, {"max_prefill_tokens": 5, "max_running": 3}],
)
def test_the_draw_is_that_of_the_penalized_logits_and_the_logprob_the_policys(settings: dict[str, int]) -> None:
    decoder = make_decoder(**settings)
    check(decoder)
    assert (decoder.stats.preemptions > 0) == ("n_blocks" in settings)


def test_counts_are_made_only_for_requests_that_use_them() -> None:
    decoder = make_decoder()
    decoder.submit(MIXED[0])
    run(decoder)
    assert decoder.runner.sampler.tensors.counts is None
    decoder.submit(PENALIZED[0])
    run(decoder)
    assert decoder.runner.sampler.tensors.counts is not None


def check_interpreted() -> None:
    """With the kernels; run in a process of its own."""
    item = request(24, 9, n_samples=2, max_new_tokens=10, frequency_penalty=1.5)
    decoder = make_decoder(n_blocks=9)
    decoder.submit(item)
    decoder.submit(request(25, 9, n_samples=2, max_new_tokens=10))
    outputs = run(decoder)
    for sample in range(2):
        assert outputs[24, sample].tokens == by_hand(item, sample, 10)[0]


@pytest.mark.slow
def test_interpreted_kernels_draw_the_same() -> None:
    run_interpreted("from tests.engine.decoder.test_frequency_penalty import check_interpreted; check_interpreted()")


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
def test_graphs_on_the_gpu_draw_the_same(use_graphs: bool) -> None:
    decoder = make_decoder(model("cuda"), use_graphs=use_graphs, attn_backend="sdpa")
    check(decoder, "cuda")
    assert (decoder.stats.graph_replays > 0) == use_graphs
