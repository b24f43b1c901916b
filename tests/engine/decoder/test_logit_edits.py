"""Bias, presence penalty, min-p, top log-probabilities: against draws worked by hand, beside plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from areno.errors import EngineError
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.types import GenerationRequest
from tests.helpers.drafters import KnownDrafter
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tiny_decoder import MIXED, VOCAB, forward_logits, make_decoder, mixed_outputs, request, run

EDITED = [
    replace(request(41, 9, n_samples=3, max_new_tokens=20), logit_bias={3: 4.0, 5: -100.0}),
    request(42, 8, max_new_tokens=20, presence_penalty=1.3, frequency_penalty=0.4, temperature=0.7),
    request(43, 17, n_samples=2, max_new_tokens=20, min_p=0.3),
    replace(request(44, 5, max_new_tokens=20, greedy=True), logit_bias={7: 2.5}, top_logprobs=4),
    replace(request(45, 5, max_new_tokens=20, top_p=0.9), top_logprobs=2),
    request(46, 6, n_samples=3, max_new_tokens=20, min_p=0.3, top_p=0.6),
]


def weights_by_hand(item: GenerationRequest, row: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    params, edited_V = item.params, logits_V.clone()
    for token, value in item.logit_bias.items():
        edited_V[token] += value
    counts_V = torch.tensor(row[len(item.prompt) :], dtype=torch.int64).bincount(minlength=VOCAB)
    edited_V -= params.frequency_penalty * counts_V + params.presence_penalty * (counts_V > 0)
    weights_V = (edited_V / params.temperature).softmax(-1)
    weights_V[weights_V < params.min_p * weights_V.max()] = 0
    weights_V /= weights_V.sum()  # top-p is a share of what min-p keeps
    if params.top_p < 1:
        sorted_V, order_V = weights_V.sort(descending=True)
        weights_V[order_V[(sorted_V.cumsum(-1) - sorted_V) >= params.top_p]] = 0
    return weights_V / weights_V.sum()


def check(settings: dict[str, int], max_new_tokens: int = 20) -> None:
    decoder = make_decoder(**settings)
    edited = [replace(item, params=replace(item.params, max_new_tokens=max_new_tokens)) for item in EDITED]
    for item in [*edited, *MIXED]:
        decoder.submit(item)
    outputs = run(decoder)
    for item in edited:
        for sample in range(item.n_samples):
            output, row = outputs[item.request_id, sample], list(item.prompt)
            for position, token in enumerate(output.tokens):
                logits_V = forward_logits(row)[-1].double()
                weights_V = weights_by_hand(item, row, logits_V)
                number = uniform(torch.tensor([sample_keys(item.seed, [sample])[0]]), torch.tensor([position]))
                drawn = torch.searchsorted(weights_V.cumsum(-1), number, right=True)
                assert token == int(weights_V.argmax() if item.params.greedy else drawn)
                logprobs_V = (logits_V / item.params.temperature).log_softmax(-1)
                assert output.logprobs[position] == pytest.approx(logprobs_V[token].item(), abs=1e-4)
                if item.top_logprobs:
                    expected = logprobs_V.topk(item.top_logprobs)
                    assert [one for one, _ in output.top_logprobs[position]] == expected.indices.tolist()
                    told = [value for _, value in output.top_logprobs[position]]
                    assert told == pytest.approx(expected.values.tolist(), abs=1e-4)
                row.append(token)
    for key, output in mixed_outputs().items():
        assert outputs[key].tokens == output.tokens
        assert outputs[key].logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert output.top_logprobs == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"n_blocks": 14, "block_size": 5, "max_prefill_tokens": 20},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"max_running": 3})),
    ],
)
def test_edited_draws_are_those_by_hand_and_others_are_as_without_them(settings: dict[str, int]) -> None:
    check(settings)


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 7}])
def test_prompt_logprobs_are_those_of_a_forward_pass(settings: dict[str, int]) -> None:
    decoder = make_decoder(**settings)
    plain = request(51, 33, max_new_tokens=3)
    decoder.submit(plain)
    run(decoder)  # its blocks are cached now, and must not be used
    decoder.submit(replace(plain, request_id=52, prompt_logprobs=True, top_logprobs=2, n_samples=2))
    decoder.submit(MIXED[1])
    outputs = run(decoder)
    logprobs_NV = forward_logits(plain.prompt).double().log_softmax(-1)
    for sample in range(2):
        output = outputs[52, sample]
        assert output.cached_tokens == 0
        assert len(output.prompt_logprobs) == len(plain.prompt) - 1
        for place, (logprob, top) in enumerate(output.prompt_logprobs):
            assert logprob == pytest.approx(logprobs_NV[place, plain.prompt[place + 1]].item(), abs=1e-4)
            assert [token for token, _ in top] == logprobs_NV[place].topk(2).indices.tolist()


@pytest.mark.parametrize("drafts", [False, True])
def test_raw_logprobs_leave_the_temperature_out(drafts: bool) -> None:
    plain = request(55, 12, max_new_tokens=9, temperature=0.5, frequency_penalty=0.5)
    raw = replace(plain, raw_logprobs=True, top_logprobs=2, prompt_logprobs=True)
    neighbours = [plain, replace(plain, top_logprobs=3, seed=1, request_id=56), MIXED[1]]
    alone = {}
    for item in [raw, *neighbours]:
        decoder = make_decoder()
        decoder.submit(item)
        alone |= run(decoder)
    decoder = make_decoder()
    if drafts:
        known = {(id_ + more, n): output.tokens for (id_, n), output in alone.items() for more in (0, 100)}
        decoder.use_drafter(KnownDrafter(known, VOCAB, 0.3))
    for item in [raw, *(replace(each, request_id=each.request_id + 100) for each in neighbours)]:
        decoder.submit(item)
    outputs = run(decoder)
    output, row = outputs[55, 0], list(raw.prompt)
    assert len(output.raw_logprobs) == len(output.tokens)
    for token, logprob, of_raw, top in zip(
        output.tokens, output.logprobs, output.raw_logprobs, output.top_logprobs, strict=True
    ):
        logits_V = forward_logits(row)[-1].double()
        expected_V = logits_V.log_softmax(-1)
        assert of_raw == pytest.approx(expected_V[token].item(), abs=1e-4)
        assert logprob == pytest.approx((logits_V / 0.5).log_softmax(-1)[token].item(), abs=1e-4)
        assert [value for _, value in top] == pytest.approx(expected_V.topk(2).values.tolist(), abs=1e-4)
        row.append(token)
    logprobs_NV = forward_logits(raw.prompt).double().log_softmax(-1)
    for place, (logprob, _) in enumerate(output.prompt_logprobs):
        assert logprob == pytest.approx(logprobs_NV[place, raw.prompt[place + 1]].item(), abs=1e-4)
    for item in neighbours:
        found, expected = outputs[item.request_id + 100, 0], alone[item.request_id, 0]
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert found.raw_logprobs == []


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_a_prompt_that_begins_anew_is_scored_once(n_steps: int) -> None:
    """For all samples, also where the chunk that only the last token was missing from has been computed."""
    plain = replace(request(53, 33, max_new_tokens=3), prompt_logprobs=True, n_samples=2)
    whole = make_decoder()
    whole.submit(plain)
    expected = run(whole)
    decoder = make_decoder(max_prefill_tokens=16)
    decoder.submit(plain)
    for _ in range(n_steps):
        assert not decoder.step()
    decoder.reset_cache()
    for key, output in run(decoder).items():
        assert len(output.prompt_logprobs) == len(plain.prompt) - 1
        found = [logprob for logprob, _ in output.prompt_logprobs]
        assert found == pytest.approx([logprob for logprob, _ in expected[key].prompt_logprobs], abs=1e-4)


def test_cached_prompt_tokens_are_told() -> None:
    decoder = make_decoder(block_size=4)
    decoder.submit(request(61, 18, max_new_tokens=2))
    assert run(decoder)[61, 0].cached_tokens == 0
    decoder.submit(replace(request(61, 18, max_new_tokens=2), request_id=62, n_samples=2))
    assert {output.cached_tokens for output in run(decoder).values()} == {16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias holds the token id 40; the model's vocabulary is 0..39"),
        ({"logit_bias": {3: 1.0, -1: 1.0}}, "logit_bias holds the token id -1"),
        ({"top_logprobs": VOCAB + 1}, "asks for 41 top log-probabilities"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make_decoder().submit(replace(request(1), **change))


def check_interpreted() -> None:
    """With the kernels; run in a process of its own. Each token takes seconds."""
    check({}, max_new_tokens=6)


@pytest.mark.slow
def test_interpreted_kernels_draw_the_same() -> None:
    run_interpreted("from tests.engine.decoder.test_logit_edits import check_interpreted; check_interpreted()")
