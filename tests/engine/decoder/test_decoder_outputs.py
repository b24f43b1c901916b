"""What a decoder returns beside whole completions: tokens as they come, and the weights version of each token."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from areno.engine.decoder.decoder import Decoder
from areno.types import GenerationOutput
from tests.helpers.tiny_decoder import MIXED, generate, make_decoder, mixed_outputs, request

Key = tuple[int, int]


def run_streaming(decoder: Decoder) -> tuple[dict[Key, list[GenerationOutput]], dict[Key, GenerationOutput]]:
    """(partial outputs, finished outputs), by request id and sample."""
    partial: dict[Key, list[GenerationOutput]] = {}
    finished: dict[Key, GenerationOutput] = {}
    for _ in range(2000):
        for output in decoder.step():
            key = output.request_id, output.sample
            assert key not in finished
            if output.finish_reason is None:
                partial.setdefault(key, []).append(output)
            else:
                finished[key] = output
        if not decoder.has_work:
            return partial, finished
    raise AssertionError("the decoder does not come to an end")


def assert_pieces_of(partial: list[GenerationOutput], whole: GenerationOutput) -> None:
    """The partial outputs are the completion from its start, and the finished output has the rest as well."""
    n = sum(len(output.tokens) for output in partial)
    assert [token for output in partial for token in output.tokens] == whole.tokens[:n]
    assert [value for output in partial for value in output.logprobs] == whole.logprobs[:n]
    assert [value for output in partial for value in output.versions] == whole.versions[:n]


@pytest.mark.parametrize(
    "settings", [{}, {"n_blocks": 9, "block_size": 5, "max_prefill_tokens": 20}, {"max_prefill_tokens": 5}]
)
def test_partial_outputs_add_up_to_the_finished_one(settings: dict[str, int]) -> None:
    decoder = make_decoder(**settings)
    for item in MIXED:
        decoder.submit(replace(item, stream=item.request_id % 2 == 0))
    partial, finished = run_streaming(decoder)
    assert (decoder.stats.preemptions > 0) == ("n_blocks" in settings)
    assert finished.keys() == mixed_outputs().keys()
    for key, output in finished.items():
        assert output.tokens == mixed_outputs()[key].tokens
        assert len(output.tokens) == len(output.logprobs) == len(output.versions)
        if key[0] % 2:
            assert key not in partial
        else:
            # All but the last token, which comes with the finished output, are returned one by one.
            assert [len(output.tokens) for output in partial.get(key, [])] == [1] * (len(output.tokens) - 1)
            assert_pieces_of(partial.get(key, []), output)


def test_pieces_come_for_all_samples_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areno.engine.decoder.decoder.PIECE_STEPS", 4)
    decoder = make_decoder()
    for item in MIXED:
        decoder.submit(replace(item, pieces=item.request_id % 2 == 0))
    telling: list[int] = []  # steps with partial outputs
    step = decoder.step

    def watched() -> list[GenerationOutput]:
        watched.n += 1
        outputs = step()
        if any(output.finish_reason is None for output in outputs):
            telling.append(watched.n)
        return outputs

    watched.n = 0
    monkeypatch.setattr(decoder, "step", watched)
    partial, finished = run_streaming(decoder)
    assert len(telling) > 2
    assert all((step - telling[0]) % 4 == 0 for step in telling)
    assert any(len(pieces) > 1 for pieces in partial.values())
    for key, output in finished.items():
        assert output.tokens == mixed_outputs()[key].tokens
        assert_pieces_of(partial.get(key, []), output)
        assert key not in partial or key[0] % 2 == 0


def test_partial_outputs_may_be_rare_but_the_first_token_comes_at_once() -> None:
    decoder = make_decoder(stream_every_s=1000.0)
    for item in MIXED:
        decoder.submit(replace(item, stream=True))
    partial, finished = run_streaming(decoder)
    for key, output in finished.items():
        assert output.tokens == mixed_outputs()[key].tokens
        assert [len(piece.tokens) for piece in partial.get(key, [])] == [1][: len(output.tokens) - 1]


def test_tokens_come_while_the_request_runs_and_abort_ends_it() -> None:
    decoder = make_decoder()
    decoder.submit(replace(request(1, max_new_tokens=30), stream=True))
    came = [output for _ in range(6) for output in decoder.step()]
    assert len(came) == 5  # the host reads one step behind the device
    assert {output.finish_reason for output in came} == {None}
    decoder.abort(1)
    (last,) = decoder.step()
    assert last.finish_reason == "abort"
    assert len(last.tokens) == 5
    assert_pieces_of(came, last)
    assert not decoder.has_work


def test_partial_outputs_do_not_wait_for_stop_strings() -> None:
    def detokenize(tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    (free,) = generate(request(2, 9, max_new_tokens=30)).values()
    stop = f"<{free.tokens[9]}><{free.tokens[10]}>"
    decoder = make_decoder(detokenize=detokenize)
    decoder.submit(replace(request(2, 9, max_new_tokens=30, stop=[stop]), stream=True))
    partial, finished = run_streaming(decoder)
    whole = finished[2, 0]
    assert whole.finish_reason == "stop"
    assert detokenize(whole.tokens).endswith(stop)
    assert sum(len(output.tokens) for output in partial[2, 0]) == len(whole.tokens) - 1
    assert_pieces_of(partial[2, 0], whole)


@pytest.mark.parametrize("resets", [False, True])
def test_each_token_knows_the_version_of_the_weights_that_sampled_it(resets: bool) -> None:
    decoder = make_decoder()
    decoder.weights_version = 3
    decoder.submit(replace(request(1, n_samples=2), stream=True))
    came = [output for _ in range(5) for output in decoder.step()]
    decoder.weights_version = 4  # the token in flight is of version 3
    if resets:
        decoder.reset_cache()
    decoder.submit(request(2))
    partial, finished = run_streaming(decoder)
    for sample in range(2):
        assert finished[1, sample].versions == [3] * 5 + [4] * 7
        own = [output for output in came if output.sample == sample] + partial[1, sample]
        assert_pieces_of(own, finished[1, sample])
    assert finished[2, 0].versions == [4] * 12


def test_an_output_has_every_field() -> None:
    expected = [field.name for field in fields(GenerationOutput)]
    assert all(list(vars(output)) == expected for output in mixed_outputs().values())
