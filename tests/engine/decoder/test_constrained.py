"""Requests with a grammar in the decoder: the draw of the allowed tokens, whatever else runs beside them."""

from __future__ import annotations

import dataclasses
import functools
import json
import string
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.grammar import GrammarCompiler
from areno.engine.engine import Engine
from areno.errors import EngineError, GrammarError
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.kernels.sampling.reference import allowed_tokens
from areno.server.output_grammars import Constraint, compile_grammar
from areno.types import GenerationRequest, SamplingParams
from tests.helpers import tiny_engine
from tests.helpers.grammars import allowed, response_format, schemas
from tests.helpers.interpreted import run_interpreted
from tests.helpers.tiny_decoder import (
    EOS,
    MIXED,
    VOCAB,
    forward_logits,
    make_decoder,
    mixed_outputs,
    model,
    request,
    run,
)

# Letters in groups of three with a comma between them; it ends after any group.
GROUPS = 'start: group ("," group)*\ngroup: /[a-z]{3}/'


@functools.cache
def compiler() -> GrammarCompiler:
    """For a tokenizer whose tokens are characters; the last ids of the model's vocabulary are not among them."""
    tokens = ["<pad>", "?", "_", "<eos>", ",", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    of_chars = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    return GrammarCompiler(of_chars, VOCAB, [EOS])


def constrained(request_id: int, length: int = 9, grammar: str = GROUPS, **how: Any) -> GenerationRequest:
    item = request(request_id, length, **{"max_new_tokens": 22, **how})
    item.grammar = grammar
    return item


CONSTRAINED = [
    constrained(31, n_samples=3),
    constrained(32, 8, temperature=0.6, ignore_eos=False),
    constrained(33, 17, n_samples=2, greedy=True),
    constrained(34, 5, n_samples=2, top_k=3, temperature=1.3),
    constrained(35, 5, n_samples=2, top_p=0.7, frequency_penalty=0.5),
]


@functools.cache
def by_hand(request_id: int, sample: int, device: str = "cpu") -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities, one forward pass over the whole row for each, without penalty, top-k and top-p."""
    item = next(item for item in CONSTRAINED if item.request_id == request_id)
    row, logprobs, state = list(item.prompt), [], compiler().compile(item.grammar or "").start()
    params = item.params
    while len(logprobs) < params.max_new_tokens and not state.finished:
        logits = forward_logits(row, model(device))[-1].cpu().double() / params.temperature
        weights = torch.zeros(VOCAB, dtype=torch.float64)
        weights[allowed(state.allowed_token_mask())] = logits.softmax(-1)[allowed(state.allowed_token_mask())]
        position = torch.tensor([len(logprobs)])
        number = uniform(torch.tensor([sample_keys(item.seed, [sample])[0]]), position)
        drawn = torch.searchsorted(weights.cumsum(-1), number * weights.sum(), right=True)
        token = int(weights.argmax() if params.greedy else drawn)
        logprobs.append(logits.log_softmax(-1)[token].item())  # over the whole vocabulary
        state.accept(token)
        row.append(token)
    return row[len(item.prompt) :], logprobs


def decoder(**settings: Any) -> Decoder:
    return make_decoder(**{"compile_grammar": compiler().compile, **settings})


def check(of: Decoder, device: str = "cpu") -> None:
    """Twice, so that slots, masks and graphs are used again; half of the batch has no grammar."""
    for _ in range(2):
        for plain, with_grammar in zip(MIXED, [*CONSTRAINED, *CONSTRAINED], strict=False):
            if with_grammar.request_id not in of.unfinished:
                of.submit(with_grammar)
            of.submit(plain)
        for item in CONSTRAINED:
            if item.request_id not in of.unfinished:
                of.submit(item)
        outputs = run(of)
        for item in CONSTRAINED:
            for sample in range(item.n_samples):
                output, state = outputs[item.request_id, sample], compiler().compile(GROUPS).start()
                for token in output.tokens:
                    assert token in allowed(state.allowed_token_mask())
                    state.accept(token)
                assert output.finish_reason == ("stop" if state.finished else "length")
                if item.request_id < 34:
                    tokens, logprobs = by_hand(item.request_id, sample, device)
                    assert output.tokens == tokens
                    assert output.logprobs == pytest.approx(logprobs, abs=1e-3)
        for key, output in mixed_outputs().items():
            assert outputs[key].tokens == output.tokens
            assert outputs[key].logprobs == pytest.approx(output.logprobs, abs=1e-4)
        of.reset_cache()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_blocks": 14, "block_size": 5, "max_prefill_tokens": 20},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"runs_ahead": False}, {"max_prefill_tokens": 5, "max_running": 3})
        ),
    ],
)
def test_the_draw_is_that_of_the_allowed_tokens_and_the_logprob_the_policys(settings: dict[str, int]) -> None:
    of = decoder(**settings)
    check(of)
    assert (of.stats.preemptions > 0) == ("n_blocks" in settings)


def test_others_do_not_wait_for_a_sequence_with_a_grammar() -> None:
    of, n_steps = decoder(), 0
    of.submit(constrained(40, max_new_tokens=12))
    of.submit(request(41, max_new_tokens=12))
    ends = {}
    while of.has_work:
        n_steps += 1
        for output in of.step():
            ends[output.request_id] = n_steps
    assert ends[41] <= 14
    assert ends[40] <= 25


def test_masks_cost_nothing_where_no_request_has_a_grammar() -> None:
    of = decoder()
    of.submit(MIXED[0])
    run(of)
    assert of.runner.sampler.masks_SW is None


def test_a_stream_and_an_abort() -> None:
    of = decoder()
    item = dataclasses.replace(CONSTRAINED[0], stream=True)
    of.submit(item)
    pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while of.has_work:
        for output in of.step():
            pieces[output.sample] = output.tokens if output.finish_reason else pieces[output.sample] + output.tokens
    assert all(tokens == by_hand(31, sample)[0] for sample, tokens in pieces.items())
    of.submit(item)
    for _ in range(3):
        of.step()
    of.abort(31)
    assert {output.finish_reason for output in of.step()} == {"abort"}


def test_a_grammar_allows_no_minimum_of_tokens() -> None:
    with pytest.raises(EngineError, match="its grammar decides when a completion ends; leave gconfig"):
        decoder().submit(constrained(43, min_new_tokens=3))


def test_a_dead_end_ends_the_sample(caplog: pytest.LogCaptureFixture) -> None:
    """The tokenizer has no digits, so nothing can follow the first letter."""
    of = decoder()
    of.submit(constrained(44, grammar="start: /[a-z]/ /[0-9]/"))
    [output] = run(of).values()
    assert output.finish_reason == "abort"
    assert len(output.tokens) == len(output.logprobs) == 1  # what was drawn although nothing is allowed is no sample
    assert "a sample of request 44 ends early" in caplog.text


def test_a_grammar_whose_first_text_the_tokenizer_cannot_write(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GrammarError, match="allows no token of this tokenizer"):
        decoder().submit(constrained(45, grammar="start: /[0-9]/"))
    of = decoder()
    of.submit(constrained(46, grammar='start: "5"'))  # a forced text is encoded, which gives the unknown token
    [output] = run(of).values()
    assert (output.finish_reason, output.tokens) == ("abort", [])
    assert "doesn't satisfy the grammar; forced bytes: got '5'" in caplog.text
    assert "<state>" not in caplog.text


def test_bits_of_masks() -> None:
    masks = torch.from_numpy(np.array([[-1, -1], [5, 1 << 3]], dtype=np.int32))
    found = allowed_tokens(masks, torch.tensor([1, 0]), 40)
    assert found[0].nonzero().flatten().tolist() == [0, 2, 35]
    assert found[1].all()


def check_interpreted() -> None:
    """With the kernels; run in a process of its own."""
    of = decoder(n_blocks=12)
    short = dataclasses.replace(CONSTRAINED[0], n_samples=1, params=SamplingParams(max_new_tokens=8, ignore_eos=True))
    for item in (short, dataclasses.replace(MIXED[0], n_samples=1)):
        of.submit(item)
    assert run(of)[31, 0].tokens == by_hand(31, 0)[0][:8]


@pytest.mark.slow
def test_interpreted_kernels_draw_the_same() -> None:
    run_interpreted("from tests.engine.decoder.test_constrained import check_interpreted; check_interpreted()")


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
def test_graphs_on_the_gpu_draw_the_same(use_graphs: bool) -> None:
    of = decoder(of=model("cuda"), use_graphs=use_graphs, attn_backend="sdpa")
    check(of, "cuda")
    assert (of.stats.graph_replays > 0) == use_graphs


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fifty_schemas_from_random_weights(devices: int, tiny: Any, tmp_path: Path) -> None:
    """In one process, and in workers that compile the grammars for themselves."""
    folder = tiny_engine.model_folder(tmp_path, vocab_size=len(tiny) + 11)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": tiny.eos_token_id}))
    spec = tiny_engine.spec(folder, devices, tokenizer_path=tiny.name_or_path)
    asked = list(schemas())[:: 5 if devices > 1 else 1]
    requests = []
    for number, schema in enumerate(asked):
        grammar = compile_grammar(Constraint(response_format=response_format(schema)), tiny, len(tiny) + 11)
        assert grammar is not None
        item = tiny_engine.request(number, n_samples=2, max_new_tokens=160, temperature=2.0)
        item.grammar = grammar.text
        requests.append(item)
    with Engine(spec) as engine:
        engine.begin_rollout(tiny_engine.RolloutSpec(max_running=100, max_len=200))
        outputs = engine.generate(requests)
    finished = [(output, number) for number in outputs for output in outputs[number] if output.finish_reason == "stop"]
    for output, number in finished:
        assert output.tokens[-1] == tiny.eos_token_id
        jsonschema.validate(json.loads(tiny.decode(output.tokens[:-1])), asked[number])
    assert len(finished) >= len(asked)  # half of the samples
    assert {output.finish_reason for samples in outputs.values() for output in samples} <= {"stop", "length"}
