"""Speculation: with drafters that are right, wrong or random, samples are those of a run without drafts."""

from __future__ import annotations

import dataclasses
import functools
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.engine.decoder.draft_length import StepCosts
from areno.engine.decoder.grammar import GrammarCompiler
from areno.engine.decoder.ngram_drafts import NgramDrafter
from areno.engine.exact import make_exact
from areno.kernels.paged import decode_attention
from areno.models.registry import build_model
from areno.models.transformer import Transformer
from areno.types import BegunCompletion, GenerationOutput, GenerationRequest
from tests.helpers.drafters import KnownDrafter
from tests.helpers.family_cases import random_model
from tests.helpers.tiny_decoder import EOS, VOCAB, Outputs, assert_all_blocks_are_free, make_decoder, model, request
from tests.helpers.two_ranks import load

SLOW = [pytest.param(f"{name}-experts", marks=pytest.mark.slow) for name in ("qwen3", "gpt-oss")]
WRONG = [0.0, 1.0, 0.4]


def edited(item: GenerationRequest, **how: Any) -> GenerationRequest:
    return dataclasses.replace(item, **how)


REQUESTS = [
    request(1, 9, n_samples=3, max_new_tokens=20),
    request(2, 1, temperature=0.7),
    request(3, 17, n_samples=2, top_k=4),
    request(4, 8, greedy=True, max_new_tokens=25),
    request(5, 30, top_p=0.8, temperature=1.3),
    request(6, 5, ignore_eos=False, min_new_tokens=7, max_new_tokens=40, n_samples=4),
    request(7, 4, max_new_tokens=1, n_samples=2),
    request(8, 6, frequency_penalty=0.6, n_samples=2, max_new_tokens=24),
    request(9, 6, presence_penalty=0.8, frequency_penalty=-0.5, min_p=0.05, max_new_tokens=24),
    edited(request(10, 7), logit_bias={5: 3.0, 9: -2.0}, top_logprobs=3),
    edited(request(11, 12, n_samples=2), top_logprobs=2, prompt_logprobs=True),
    request(12, 7, stop_token_ids=[8, 9, 10], n_samples=4, max_new_tokens=30),
    request(13, 7, stop=["hu", "c"], n_samples=4, max_new_tokens=30, min_new_tokens=3),
    edited(request(14, 7, n_samples=2, max_new_tokens=22), pieces=True),
    edited(request(15, 9, max_new_tokens=21), begun=BegunCompletion([7, 8, 9], [-1.0, -2.0, -3.0], [0, 0, 0])),
]
LETTERS = ["<pad>", "?", "_", "<eos>", ",", *string.ascii_lowercase]


def detokenize(tokens: list[int]) -> str:
    return "".join(LETTERS[token] if token < len(LETTERS) else "#" for token in tokens)


@functools.cache
def exact_model() -> Transformer:
    built = build_model(model().config, dtype=torch.float32, device="cpu")
    built.load_state_dict(model().state_dict())
    make_exact(built)
    return built


def sampled(of: Transformer, requests: list[GenerationRequest], drafter: Any = None, **how: Any) -> Outputs:
    decoder = make_decoder(of, drafter=drafter, detokenize=detokenize, **how)
    decoder.weights_version = 3
    for item in requests:
        decoder.submit(item)
    outputs: Outputs = {}
    while decoder.has_work:
        outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
    if drafter is not None:
        stats = decoder.stats
        assert stats.drafted_tokens > 0
        assert drafter.n_finished == len(outputs)
        if drafter.wrong == 1:
            assert stats.accepted_tokens == 0
        if drafter.wrong == 0:
            assert stats.accepted_tokens > 0.8 * stats.drafted_tokens
        assert stats.generated_tokens == sum(len(o.tokens) for o in outputs.values()) - sum(
            len(item.begun.tokens) for item in requests if item.begun
        )
    assert_all_blocks_are_free(decoder)
    return outputs


def assert_equal(got: Outputs, expected: Outputs, *, bits: bool) -> None:
    assert got.keys() == expected.keys()
    for key, output in got.items():
        other = expected[key]
        assert (output.tokens, output.finish_reason) == (other.tokens, other.finish_reason), key
        assert output.versions == other.versions
        if bits:
            assert output.logprobs == other.logprobs, key
            assert output.top_logprobs == other.top_logprobs
        else:
            assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            tops = ([[token for token, _ in each] for each in one.top_logprobs] for one in (output, other))
            assert next(tops) == next(tops)


def known(outputs: Outputs, wrong: float, **how: Any) -> KnownDrafter:
    return KnownDrafter({key: output.tokens for key, output in outputs.items()}, VOCAB, wrong, **how)


EXACT = {"exact": True, "attn_backend": "fixed_order"}


@functools.cache
def without_drafts(is_exact: bool) -> Outputs:
    return sampled(exact_model() if is_exact else model(), REQUESTS, **(EXACT if is_exact else {}))


@pytest.mark.parametrize(
    ("is_exact", "runs_ahead"),
    [(True, False), (False, True), *(pytest.param(both, both, marks=pytest.mark.slow) for both in (False, True))],
)
@pytest.mark.parametrize("wrong", WRONG)
def test_samples_are_those_of_a_run_without_drafts(wrong: float, is_exact: bool, runs_ahead: bool) -> None:
    expected = without_drafts(is_exact)
    of, how = (exact_model(), EXACT) if is_exact else (model(), {})
    got = sampled(of, REQUESTS, known(expected, wrong), runs_ahead=runs_ahead, **how)
    assert_equal(got, expected, bits=is_exact)


def test_attention_reads_the_cache_early_in_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts, rows read the keys of rows before them, which the same step writes."""
    seen: set[tuple[bool, bool]] = set()  # whether rows have one sequence each, and whether they read early

    def attend(*args: Any) -> torch.Tensor:
        slots_B = args[4].slots_B
        seen.add((len(slots_B.unique()) == len(slots_B), args[4].reads_early))
        return decode_attention(*args)

    monkeypatch.setattr("areno.engine.decoder.runner.decode_attention", attend)
    expected = sampled(model(), REQUESTS)
    assert seen == {(True, True)}
    seen.clear()
    sampled(model(), REQUESTS, known(expected, 0.4))
    assert (False, False) in seen
    assert (False, True) not in seen


@pytest.mark.parametrize("wrong", WRONG)
def test_with_few_blocks_that_preempt(wrong: float) -> None:
    expected = without_drafts(True)
    drafter = known(expected, wrong)
    decoder = make_decoder(exact_model(), drafter=drafter, detokenize=detokenize, n_blocks=24, max_running=9, **EXACT)
    decoder.weights_version = 3
    for item in REQUESTS:
        decoder.submit(item)
    outputs: Outputs = {}
    while decoder.has_work:
        outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
    assert decoder.stats.preemptions > 0
    assert decoder.stats.drafted_tokens > 0
    assert_equal(outputs, expected, bits=True)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_grammar_masks_each_position(wrong: float) -> None:
    requests = [
        dataclasses.replace(request(i, 9, n_samples=2, max_new_tokens=22), grammar="start: /[a-z]{3}(,[a-z]{3})*/")
        for i in (1, 2)
    ]
    requests += [dataclasses.replace(request(3, 9, max_new_tokens=22), grammar="start: /[a-e]{2,9}/", top_logprobs=2)]
    requests += [request(4, 6, n_samples=2, frequency_penalty=0.5)]
    how = {**EXACT, "compile_grammar": compiler().compile}
    expected = sampled(exact_model(), requests, **how)
    assert_equal(sampled(exact_model(), requests, known(expected, wrong), **how), expected, bits=True)


@functools.cache
def compiler() -> GrammarCompiler:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    of_chars = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    return GrammarCompiler(of_chars, VOCAB, [EOS])


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_ids_without_a_text_are_not_sampled(wrong: float) -> None:
    how = {**EXACT, "texts": ((0, 14), (20, 33))}
    without, requests = {2, 3, 14, 19, 33, 39}, [*REQUESTS, edited(request(16, 7), logit_bias={38: 100.0})]
    assert any(without.intersection(output.tokens) for output in without_drafts(True).values())
    expected = sampled(exact_model(), requests, **how)
    for key, output in expected.items():
        drawn = output.tokens[3:] if key[0] == 15 else output.tokens
        assert all(token < 14 or 20 <= token < 33 for token in drawn)
    assert_equal(sampled(exact_model(), requests, known(expected, wrong), **how), expected, bits=True)
    # The probability that ids without a text would have counts in log-probabilities, as in training.
    whole = without_drafts(True)
    same = [key for key, output in whole.items() if expected[key].tokens[:1] == output.tokens[:1]]
    assert len(same) > 2
    assert all(expected[key].logprobs[0] == whole[key].logprobs[0] for key in same)


BANNED = [  # tokens that are often sampled otherwise: as a stop token before min_new_tokens, and by their bias
    request(21, 6, ignore_eos=False, stop_token_ids=[6, 7, 8, 9], min_new_tokens=12, max_new_tokens=18, n_samples=3),
    edited(request(22, 1, n_samples=3, max_new_tokens=20), logit_bias=dict.fromkeys(range(4, 30), -100.0)),
    edited(request(23, 1, max_new_tokens=20), logit_bias=dict.fromkeys(range(20, 38), -100.0)),
    request(24, 1, greedy=True, frequency_penalty=1.5, max_new_tokens=30),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_banned_tokens(wrong: float) -> None:
    expected = sampled(exact_model(), BANNED, **EXACT)
    for item in BANNED[1:3]:
        banned = {token for token, bias in item.logit_bias.items() if bias < 0}
        assert all(banned.isdisjoint(output.tokens) for key, output in expected.items() if key[0] == item.request_id)
    assert_equal(sampled(exact_model(), BANNED, known(expected, wrong), **EXACT), expected, bits=True)


@pytest.mark.slow
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize(("scope", "table_bits"), [(None, 16), (5, 16), (None, 9)])
def test_drafts_of_the_table_change_no_bit(scope: int | None, table_bits: int, has_grammar: bool) -> None:
    """In rollouts that repeat, with few blocks and slots. A small table overwrites entries that are in use."""
    grammar = edited(request(30, 9, n_samples=3, max_new_tokens=22), grammar="start: /[a-z]{3}(,[a-z]{3})*/")
    chosen = [*REQUESTS, *BANNED, grammar]
    if not has_grammar:  # all steps may then draft on the device
        chosen = [item for item in chosen if not (item.grammar or item.edits_logits or item.top_logprobs)]
        chosen = [item for item in chosen if not item.params.frequency_penalty]
    requests = [edited(item, draft_scope=scope) for item in chosen]
    how = {**EXACT, "compile_grammar": compiler().compile, "detokenize": detokenize}
    expected = {
        key: output for key, output in without_table().items() if key[0] in {each.request_id for each in chosen}
    }
    drafter = NgramDrafter(torch.device("cpu"), table_bits=table_bits, memory_tokens=4000)
    decoder = make_decoder(exact_model(), drafter=drafter, n_blocks=26, max_running=10, **how)
    decoder.weights_version, n_accepted = 3, 0
    for _ in range(2):
        drafter.begin_rollout(StepCosts(fixed=10_000, verification=1, most_rows=200))
        decoder.reset_cache()
        decoder.reset_stats()
        for item in requests:
            decoder.submit(item)
        outputs: Outputs = {}
        while decoder.has_work:
            outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
        assert decoder.stats.preemptions > 0
        assert_equal(outputs, expected, bits=True)
        n_accepted += decoder.stats.accepted_tokens
    assert n_accepted > 100
    assert drafter.memory.n_tokens <= 4000


@functools.cache
def without_table() -> Outputs:
    grammar = edited(request(30, 9, n_samples=3, max_new_tokens=22), grammar="start: /[a-z]{3}(,[a-z]{3})*/")
    return sampled(exact_model(), [*REQUESTS, *BANNED, grammar], compile_grammar=compiler().compile, **EXACT)


@pytest.mark.slow
def test_a_parked_sample_goes_on_with_drafts() -> None:
    """Parked after some steps of a run without drafts, or with drafts, and continued with drafts of its own tokens."""
    expected = without_drafts(True)
    plain = [item for item in REQUESTS if not (item.top_logprobs or item.pieces or item.begun)]
    decoder = make_decoder(exact_model(), drafter=known(expected, 0.4), detokenize=detokenize, **EXACT)
    decoder.weights_version = 3
    for item in plain:
        decoder.submit(item)
    outputs: Outputs = {}
    for _ in range(3):
        outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
    by_id = {item.request_id: item for item in plain}
    for number, part in enumerate(decoder.park()):
        key = part.request_id, part.sample
        if part.finish_reason is not None:
            outputs[key] = part
            continue
        item = by_id[part.request_id]
        begun = BegunCompletion(part.tokens, part.logprobs, part.versions) if part.tokens else None
        rest = edited(item, request_id=1000 + number, n_samples=1, first_sample=part.sample, begun=begun)
        of = make_decoder(
            exact_model(),
            drafter=known({(1000 + number, part.sample): expected[key]}, 0.3),
            detokenize=detokenize,
            **EXACT,
        )
        of.weights_version = 3
        of.submit(rest)
        while of.has_work:
            outputs.update((key, output) for output in of.step() if output.finish_reason is not None)
    for key, output in outputs.items():
        assert (output.tokens, output.logprobs) == (expected[key].tokens, expected[key].logprobs), key
        assert output.finish_reason == expected[key].finish_reason
    assert {key[0] for key in outputs} == by_id.keys()


@pytest.mark.parametrize("wrong", WRONG)
def test_streams_return_each_token_once(wrong: float) -> None:
    item = dataclasses.replace(request(1, 9, n_samples=2, max_new_tokens=20), stream=True, top_logprobs=1)
    expected = sampled(model(), [item])
    decoder = make_decoder(drafter=known(expected, wrong))
    decoder.submit(item)
    streamed: dict[tuple[int, int], list[int]] = {key: [] for key in expected}
    while decoder.has_work:
        for output in decoder.step():
            key = output.request_id, output.sample
            if output.finish_reason is None:
                assert len(output.tokens) == len(output.logprobs) == len(output.top_logprobs) > 0
                streamed[key] += output.tokens
                assert streamed[key] == expected[key].tokens[: len(streamed[key])]
            else:
                assert output.tokens == expected[key].tokens
    assert any(streamed.values())


def random_requests(rng: random.Random) -> list[GenerationRequest]:
    requests: list[GenerationRequest] = []
    for number in range(rng.randrange(4, 8)):
        prompt = [rng.randrange(4, 101) for _ in range(rng.randrange(1, 50))]
        if requests and rng.random() < 0.4:
            prompt = (rng.choice(requests).prompt[: rng.randrange(1, 40)] + prompt)[:60]
        item = request(number, 1, n_samples=rng.randrange(1, 5), max_new_tokens=rng.randrange(1, 30))
        requests.append(dataclasses.replace(item, prompt=prompt))
    return requests


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (4, 9))])
@pytest.mark.parametrize("case", ["gemma3-tied", "mistral-window", *SLOW])
def test_random_rollouts(case: str, seed: int, tmp_path: Path) -> None:
    """In a small cache, with aborts, new weights and parked samples on the way. Routes are those without drafts."""
    random_model(case, tmp_path)
    of, rng, keeps_routes = load(tmp_path), random.Random(seed), case.endswith("-experts")
    requests = random_requests(rng)
    expected = sampled(of, requests, n_blocks=400, max_prefill_tokens=512, keeps_routes=keeps_routes)
    completions = {key: output.tokens for key, output in expected.items()}
    longest = max(len(item.prompt) + item.params.max_new_tokens for item in requests)
    how = {"max_running": rng.randrange(3, 9), "max_prefill_tokens": rng.choice([3, 7, 16])}
    drafter = KnownDrafter(completions, 101, 0.3, seed=seed)
    decoder = make_decoder(
        of,
        n_blocks=longest // 4 + 8,
        drafter=drafter,
        runs_ahead=rng.random() < 0.5,
        keeps_routes=keeps_routes,
        **how,
    )
    waiting, aborted = list(requests), set[int]()
    found: dict[tuple[int, int], GenerationOutput] = {}
    while waiting or decoder.has_work:
        if waiting and rng.random() < 0.7:
            decoder.submit(waiting.pop(0))
        if rng.random() < 0.02:
            decoder.reset_cache()
        if rng.random() < 0.01:
            aborted.add(number := rng.choice(list(decoder.unfinished) or [-1]))
            decoder.abort(number)
        found |= {(output.request_id, output.sample): output for output in decoder.step()}
    assert decoder.stats.accepted_tokens > 0
    assert_all_blocks_are_free(decoder)
    assert found.keys() == expected.keys()
    for key, output in found.items():
        other, n = expected[key], len(output.tokens)
        assert output.tokens == other.tokens[:n]
        assert output.logprobs == pytest.approx(other.logprobs[:n], abs=1e-3)
        if keeps_routes and output.finish_reason != "abort":
            assert output.routes is not None
            assert other.routes is not None
            assert output.routes.tolist() == other.routes[: len(output.routes)].tolist()
        if key[0] not in aborted:
            assert (n, output.finish_reason) == (len(other.tokens), other.finish_reason)


def test_parked_samples_have_the_tokens_of_a_run_without_drafts() -> None:
    expected = without_drafts(False)
    decoder = make_decoder(drafter=known(expected, 0.4), detokenize=detokenize, runs_ahead=True)
    for item in REQUESTS:
        decoder.submit(item)
    for _ in range(4):
        decoder.step()
    parked = decoder.park()
    assert parked
    for output in parked:
        tokens = expected[output.request_id, output.sample].tokens
        assert output.tokens == tokens[: len(output.tokens)]


def test_models_with_recurrent_states_do_not_draft(tmp_path: Path) -> None:
    random_model("qwen3.5", tmp_path)
    assert make_decoder(load(tmp_path), drafter=KnownDrafter({}, VOCAB)).drafter is None


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_on_the_gpu(wrong: float, use_graphs: bool) -> None:
    of = build_model(model().config, dtype=torch.float32, device="cuda")
    of.load_state_dict(model().state_dict())
    make_exact(of, timed=False)
    how = {**EXACT, "use_graphs": use_graphs, "runs_ahead": True}
    expected = sampled(of, REQUESTS, **how)
    assert_equal(sampled(of, REQUESTS, known(expected, wrong), **how), expected, bits=True)
    plain = REQUESTS[:7]  # whose steps run as graphs, with rows for padding and for shared prompts
    alone = {key: output for key, output in expected.items() if key[0] < 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("areno.engine.decoder.attention_split.MIN_SAVING", 0)
        assert_equal(sampled(of, plain, known(expected, wrong), **how), alone, bits=True)


@pytest.mark.parametrize(
    ("runs_ahead", "n_blocks"),
    [
        (True, 24),
        (False, 30),
        pytest.param(False, 24, marks=pytest.mark.slow),
        pytest.param(True, 30, marks=pytest.mark.slow),
    ],
)
def test_samples_as_long_as_the_context(runs_ahead: bool, n_blocks: int) -> None:
    """Steps that draft plan with more positions than there are."""
    item = request(1, 9, max_new_tokens=87)
    drafter = NgramDrafter(torch.device("cpu"), table_bits=12)
    drafter.length.next_length = lambda *_, **__: 7  # type: ignore[method-assign]
    drafter.begin_rollout(StepCosts(fixed=10_000, verification=1, most_rows=200))
    decoder = make_decoder(exact_model(), drafter=drafter, n_blocks=n_blocks, runs_ahead=runs_ahead, **EXACT)
    expected = sampled(exact_model(), [item], **EXACT)
    for _ in range(2):
        decoder.submit(item)
        outputs: Outputs = {}
        while decoder.has_work:
            outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
        assert len(outputs[1, 0].tokens) == 87
        assert (outputs[1, 0].tokens, outputs[1, 0].logprobs) == (expected[1, 0].tokens, expected[1, 0].logprobs)
    assert decoder.stats.accepted_tokens > 60


def test_a_rollout_begins_while_tokens_of_the_last_one_are_in_flight() -> None:
    drafter = NgramDrafter(torch.device("cpu"), table_bits=12)
    drafter.length.next_length = lambda *_, **__: 3  # type: ignore[method-assign]
    costs = StepCosts(fixed=10_000, verification=1, most_rows=200)
    decoder = make_decoder(exact_model(), drafter=drafter, runs_ahead=True, **EXACT)
    drafter.begin_rollout(costs)
    decoder.submit(request(1, 9, max_new_tokens=40))
    for _ in range(5):
        decoder.step()
    decoder.clear()
    drafter.begin_rollout(costs)
    item = request(2, 9, max_new_tokens=40)
    decoder.submit(item)
    outputs: Outputs = {}
    while decoder.has_work:
        outputs |= {(o.request_id, o.sample): o for o in decoder.step() if o.finish_reason is not None}
    assert outputs[2, 0].tokens == sampled(exact_model(), [item], **EXACT)[2, 0].tokens
