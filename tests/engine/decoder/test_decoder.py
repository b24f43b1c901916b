"""Decoder: the same completions as a plain forward pass gives, whatever is batched, shared, cut, preempted or found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

from areno.engine.decoder.cuda_graphs import capture_sizes
from areno.engine.decoder.sampler import PendingTokens
from areno.engine.decoder.scheduler import SchedulerOutput
from areno.errors import EngineError
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.models.registry import build_model
from areno.types import GenerationRequest, SamplingParams
from tests.helpers.tiny_decoder import (
    CONTEXT,
    EOS,
    MIXED,
    VOCAB,
    Outputs,
    assert_same,
    forward_logits,
    generate,
    make_decoder,
    mixed_outputs,
    model,
    prompt,
    request,
    run,
    tiny_folder,
)

STORIES = Path(__file__).parents[4] / "shared/data/models/stories260K-hf"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_one_pass_over_the_whole_row(temperature: float) -> None:
    requests = [request(i, 3 * i, n_samples=2, temperature=temperature, top_k=8 * (i % 2) or -1) for i in range(1, 8)]
    outputs = generate(*requests)
    assert len(outputs) == 14
    for (request_id, _), output in outputs.items():
        row = prompt(request_id, 3 * request_id) + output.tokens
        logprobs = (forward_logits(row) / temperature).log_softmax(-1)
        expected = logprobs[-len(output.tokens) - 1 : -1].gather(1, torch.tensor(output.tokens)[:, None])
        assert output.logprobs == pytest.approx(expected.flatten().tolist(), abs=1e-4)


def test_the_draw_is_the_inverse_of_the_distribution_at_the_seeded_number() -> None:
    (output,) = generate(request(3, 6)).values()
    row = prompt(3, 6)
    for position, token in enumerate(output.tokens):
        number = uniform(torch.tensor([sample_keys(103, [0])[0]]), torch.tensor([position]))
        cumulated = forward_logits(row)[-1].double().softmax(-1).cumsum(-1)
        assert token == int(torch.searchsorted(cumulated, number, right=True))
        row.append(token)


def test_truncation_to_one_token_is_greedy_for_those_that_ask_for_it() -> None:
    best = generate(request(1, greedy=True))[1, 0].tokens
    free = generate(request(1))[1, 0].tokens
    assert best != free
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}):
        assert generate(request(1, **params), request(2))[1, 0].tokens == best
    assert generate(request(1), request(2, top_k=1))[1, 0].tokens == free


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "stories260K"])
def test_greedy_is_that_of_transformers(name: str) -> None:
    folder = tiny_folder() if name == "tiny" else STORIES
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    of = model(folder=folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    n_new = 40
    if name == "tiny":
        prompts = [prompt(seed, length) for seed, length in enumerate((1, 7, 16, 30))]
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = ["Once", "Once upon a time, there was a", "Tom and Lily saw a big dog. They", "The sun was hot"]
        prompts = [tokenizer(text).input_ids for text in texts]
    decoder = make_decoder(of, eos_token_ids=[])
    for i, tokens in enumerate(prompts):
        params = SamplingParams(greedy=True, max_new_tokens=n_new)
        decoder.submit(GenerationRequest(request_id=i, prompt=tokens, params=params))
    outputs = run(decoder)
    for i, tokens in enumerate(prompts):
        row = list(tokens)
        with torch.no_grad():
            for _ in range(n_new):
                row.append(int(reference(torch.tensor([row])).logits[0, -1].argmax()))
        assert outputs[i, 0].tokens == row[len(tokens) :]


def test_a_shared_prompt_is_as_good_as_separate_ones() -> None:
    for length in (9, 8, 1):  # with and without a partial last block
        shared = generate(request(1, length, n_samples=4))
        for sample in range(4):
            row = prompt(1, length)
            key = torch.tensor([sample_keys(101, [sample])[0]])
            for position, token in enumerate(shared[1, sample].tokens):
                cumulated = forward_logits(row)[-1].double().softmax(-1).cumsum(-1)
                drawn = torch.searchsorted(cumulated, uniform(key, torch.tensor([position])), right=True)
                assert token == int(drawn)
                row.append(token)
        assert len({tuple(output.tokens) for output in shared.values()}) > 1


def test_requests_of_one_prompt_get_the_samples_that_each_gets_alone() -> None:
    items = [replace(request(1, 9), request_id=number, seed=number) for number in range(4)]
    decoder = make_decoder()
    for item in items:
        decoder.submit(item)
    with mock.patch.object(decoder.runner, "launch", side_effect=decoder.runner.launch) as launch:
        together = run(decoder)
    assert [chunk.end - chunk.start for call in launch.call_args_list for chunk in call.args[0].chunks] == [9]
    alone: Outputs = {}
    for item in items:
        alone |= generate(item)
    assert_same(alone, together)


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    alone: Outputs = {}
    for item in MIXED:
        alone |= generate(item)
    assert_same(alone, mixed_outputs())


def test_joining_late_changes_nothing() -> None:
    decoder = make_decoder()
    outputs: Outputs = {}
    for item in MIXED:
        decoder.submit(item)
        for _ in range(3):
            outputs |= {(output.request_id, output.sample): output for output in decoder.step()}
    assert_same(outputs | run(decoder), mixed_outputs())


def test_a_decoder_that_does_not_run_ahead_computes_no_token_that_it_drops() -> None:
    decoder, computed = make_decoder(runs_ahead=False), []
    launch = decoder.runner.launch

    def counting(scheduled: SchedulerOutput) -> list[PendingTokens]:
        pending = launch(scheduled)
        computed.append(sum(len(each.sequences) for each in pending))
        return pending

    with mock.patch.object(decoder.runner, "launch", counting):
        for item in MIXED:
            decoder.submit(item)
        outputs = run(decoder)
    assert_same(outputs, mixed_outputs())
    assert sum(computed) == sum(len(output.tokens) for output in outputs.values())


@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 16])
def test_chunked_prefill_is_whole_prefill(max_prefill_tokens: int) -> None:
    assert_same(generate(*MIXED, max_prefill_tokens=max_prefill_tokens), mixed_outputs())


@pytest.mark.parametrize(("n_blocks", "block_size"), [(9, 5), (12, 4), (45, 1)])
def test_preemption_changes_nothing(n_blocks: int, block_size: int) -> None:
    decoder = make_decoder(n_blocks=n_blocks, block_size=block_size, max_prefill_tokens=20)
    for item in MIXED:
        decoder.submit(item)
    assert_same(run(decoder), mixed_outputs())
    assert decoder.stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("max_running", [1, 3])
def test_few_slots_change_nothing(max_running: int) -> None:
    assert_same(generate(*MIXED, max_running=max_running), mixed_outputs())


def test_found_prefixes_change_nothing_and_save_prefill() -> None:
    decoder = make_decoder()
    for item in MIXED:
        decoder.submit(item)
    first = run(decoder)
    assert decoder.stats.cached_prompt_tokens == 0
    for item in MIXED:
        decoder.submit(item)
    assert_same(run(decoder), first)
    found = decoder.stats.cached_prompt_tokens
    assert found == sum((len(item.prompt) - 1) // 4 * 4 for item in MIXED)

    turn = GenerationRequest(
        request_id=50, prompt=[*MIXED[5].prompt, *first[6, 2].tokens, 5, 6], params=SamplingParams(max_new_tokens=9)
    )
    decoder.submit(turn)
    again = run(decoder)
    assert decoder.stats.cached_prompt_tokens - found == (12 + 23 - 1) // 4 * 4
    assert_same(again, generate(turn))

    decoder.reset_cache()
    found = decoder.stats.cached_prompt_tokens
    decoder.submit(turn)
    run(decoder)
    assert decoder.stats.cached_prompt_tokens == found


def test_after_reset_cache_the_new_weights_are_used_by_running_sequences_too() -> None:
    changed = build_model(model().config, dtype=torch.float32, device="cpu")
    changed.load_state_dict(model().state_dict())
    decoder = make_decoder(changed)
    decoder.submit(request(1, 9, n_samples=2))
    for _ in range(5):
        assert decoder.step() == []
    changed.init_weights(5)
    decoder.reset_cache()
    outputs = run(decoder)
    for output in outputs.values():
        row = prompt(1, 9) + output.tokens
        per_model = [
            forward_logits(row, of).log_softmax(-1)[8:-1].gather(1, torch.tensor(output.tokens)[:, None]).flatten()
            for of in (model(), changed)
        ]
        assert output.logprobs[:5] == pytest.approx(per_model[0][:5].tolist(), abs=1e-4)
        assert output.logprobs[5:] == pytest.approx(per_model[1][5:].tolist(), abs=1e-4)


def test_end_of_sequence_and_stop_tokens_end_a_sample_and_stay_in_it() -> None:
    free = generate(request(1, 9, n_samples=8, max_new_tokens=40))
    for stop, params in ((EOS, {"ignore_eos": False}), (7, {"stop_token_ids": [7]})):
        stopped = generate(request(1, 9, n_samples=8, max_new_tokens=40, **params))
        reasons = set()
        for key, output in stopped.items():
            whole = free[key].tokens
            cut = whole.index(stop) + 1 if stop in whole else len(whole)
            assert output.tokens == whole[:cut]
            assert len(output.logprobs) == cut
            assert output.finish_reason == ("stop" if stop in whole else "length")
            reasons.add(output.finish_reason)
        assert "stop" in reasons


def test_min_new_tokens_keeps_stop_tokens_away_until_then() -> None:
    params = {"ignore_eos": False, "stop_token_ids": [7, 8, 9], "max_new_tokens": 30}
    without = generate(request(1, 9, n_samples=8, **params))
    assert min(len(output.tokens) for output in without.values()) < 6
    outputs = generate(request(1, 9, n_samples=8, min_new_tokens=6, **params))
    assert min(len(output.tokens) for output in outputs.values()) >= 6 + 1
    for output in outputs.values():
        assert not {EOS, 7, 8, 9} & set(output.tokens[:6])
        row = prompt(1, 9) + output.tokens
        expected = forward_logits(row).log_softmax(-1)[8:-1].gather(1, torch.tensor(output.tokens)[:, None]).flatten()
        assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-4)  # of the model, not of what was allowed


def test_stop_strings_cut_after_the_token_that_completes_them() -> None:
    def detokenize(tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    (free,) = generate(request(2, 9, max_new_tokens=30)).values()
    second, third = free.tokens[9:11]
    stop = f"{second}><{third}"
    (stopped,) = generate(request(2, 9, max_new_tokens=30, stop=["no such text", stop]), detokenize=detokenize).values()
    pairs = list(zip(free.tokens, free.tokens[1:], strict=False))
    assert stopped.tokens == free.tokens[: pairs.index((second, third)) + 2]
    assert stopped.finish_reason == "stop"
    assert stopped.logprobs == pytest.approx(free.logprobs[: len(stopped.tokens)], abs=1e-6)


def test_lengths_end_a_sample() -> None:
    def length(n_prompt: int, **params) -> int:
        (output,) = generate(request(1, n_prompt, **params)).values()
        assert output.finish_reason == "length"
        assert len(output.logprobs) == len(output.tokens)
        return len(output.tokens)

    assert length(9, max_new_tokens=1) == 1
    assert length(9, max_new_tokens=50, max_context_len=20) == 11
    assert length(9, max_new_tokens=500, max_context_len=400) == CONTEXT - 9
    assert length(CONTEXT - 1, max_new_tokens=5) == 1


def test_abort_returns_what_was_drawn() -> None:
    decoder = make_decoder(max_running=4)
    kept, dropped, waiting = request(1, 9, n_samples=2), request(2, 6, n_samples=2), request(3, 6)
    for item in (kept, dropped, waiting):
        decoder.submit(item)
    for _ in range(5):
        assert decoder.step() == []
    assert (decoder.stats.running, decoder.stats.waiting) == (4, 1)
    decoder.abort(2)
    decoder.abort(3)
    decoder.abort(77)  # unknown: nothing to do
    assert decoder.has_work
    outputs = run(decoder)
    whole = generate(kept, dropped)
    for sample in range(2):
        assert outputs[1, sample].tokens == whole[1, sample].tokens
        assert outputs[2, sample].finish_reason == "abort"
        n_drawn = len(outputs[2, sample].tokens)
        assert 3 <= n_drawn <= 5
        assert outputs[2, sample].tokens == whole[2, sample].tokens[:n_drawn]
        assert len(outputs[2, sample].logprobs) == n_drawn
    assert outputs[3, 0].tokens == []


def test_graph_sizes_reach_the_largest_batch_in_steps_that_waste_little() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(8) == [1, 2, 4, 8]
    assert capture_sizes(48) == [1, 2, 4, 8, 16, 32, 48]
    assert capture_sizes(128) == [1, 2, 4, 8, 16, 32, 64, 96, 128]


def test_stats_count() -> None:
    decoder = make_decoder()
    decoder.submit(request(1, 9, n_samples=3))
    outputs = run(decoder)
    assert decoder.stats.generated_tokens == sum(len(output.tokens) for output in outputs.values()) == 36
    assert decoder.stats.graph_replays == 0


def test_non_finite_logits_end_the_run() -> None:
    broken = build_model(model().config, dtype=torch.float32, device="cpu")
    broken.load_state_dict(model().state_dict())
    with torch.no_grad():
        broken.lm_head.weight[5, 0] = torch.nan
    decoder = make_decoder(broken)
    decoder.submit(request(1))
    with pytest.raises(EngineError, match="the model produced non-finite logits"):
        run(decoder)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(1, 90), "does not fit the KV cache of 80 tokens.*rollout.max_kv_tokens.*gconfig.max_tokens"),
        (request(1, 70, max_new_tokens=12), "rollout.max_kv_tokens"),
        (request(1, CONTEXT), "no room for a completion in a context of 96.*gconfig.max_tokens"),
        (request(1, 9, max_context_len=9), "no room for a completion in a context of 9"),
        (request(1, 9, max_prompt_len=8), "at most 8 may be; shorten it or raise max_prompt_len"),
        (request(1, 0), "no tokens"),
        (GenerationRequest(request_id=1, prompt=[1, VOCAB]), "vocabulary is 0..39"),
        (request(1, n_samples=0), "gconfig.n_samples"),
        (request(1, stop_token_ids=[5, VOCAB]), "stop_token_ids holds the token id 40; .*vocabulary is 0..39"),
        (request(1, stop_token_ids=[2**70], min_new_tokens=2), "stop_token_ids holds the token id 1180591620717411303"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(bad: GenerationRequest, message: str) -> None:
    decoder = make_decoder(n_blocks=20)
    with pytest.raises(EngineError, match=message):
        decoder.submit(bad)
    assert not decoder.has_work


def test_what_just_fits_is_served_and_a_live_id_is_refused() -> None:
    decoder = make_decoder(n_blocks=20)
    decoder.submit(request(1, 70, max_new_tokens=11, n_samples=3))
    with pytest.raises(EngineError, match="request id 1 is that of an unfinished request"):
        decoder.submit(request(1))
    assert [len(output.tokens) for output in run(decoder).values()] == [11, 11, 11]
    decoder.submit(request(1))
    run(decoder)
