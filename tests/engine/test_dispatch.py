"""Which copy of the model draws which samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areno.config.rollout import DecoderConfig
from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.scheduler import Scheduler
from areno.engine.decoder.sequence import Sequence as Sample
from areno.engine.dispatcher import Dispatcher
from areno.engine.engine import Engine
from areno.engine.reports import RolloutStats
from areno.specs.rollout import RolloutSpec
from areno.types import RETURNED, BegunCompletion, GenerationOutput, GenerationRequest
from tests.helpers.tiny_engine import ROLLOUT, model_folder, request, spec, tokens_of


def asked(request_id: int, expected: float, n_samples: int = 1) -> GenerationRequest:
    return replace(request(request_id, n_samples), expected_tokens=expected)


def dispatcher(n_copies: int, slots: int, requests: Sequence[GenerationRequest]) -> Dispatcher:
    out = Dispatcher(n_copies)
    out.begin(slots)
    out.add(requests, {each.request_id: 100 for each in requests})
    return out


def sent(out: Dispatcher) -> dict[int, list[tuple[int, int, int]]]:
    """By copy, what is due now: (number, first sample, samples)."""
    return {
        rank: [(part.request_id, part.first_sample, part.n_samples) for part in batch]
        for rank, batch in out.take_due_requests()
    }


def end_of(number: int, sample: int = 0, reason: Any = "stop") -> GenerationOutput:
    return GenerationOutput(
        request_id=number, sample=sample, tokens=[1], logprobs=[0.0], versions=[0], finish_reason=reason
    )


def waiting(*counts: int) -> list[RolloutStats]:
    return [RolloutStats(waiting=n) for n in counts]


def test_the_longest_go_first_and_each_to_the_copy_with_least_to_do() -> None:
    requests = [asked(10, 5), asked(11, 30), asked(12, 8), asked(13, 9), asked(14, 7)]
    out = dispatcher(2, 2, requests)
    assert sent(out) == {0: [(1, 0, 1), (0, 0, 1)], 1: [(3, 0, 1), (2, 0, 1), (4, 0, 1)]}
    # Lengths that a run does not know again when it goes on decide nothing where all samples run at once.
    assert sent(dispatcher(2, 3, requests)) == {0: [(0, 0, 1), (2, 0, 1), (4, 0, 1)], 1: [(1, 0, 1), (3, 0, 1)]}


def test_equal_prompts_become_neighbours_except_for_interrupted_samples() -> None:
    requests = [replace(asked(number, 10), prompt=[7, number % 3]) for number in range(7)]
    requests[1] = replace(requests[1], begun=BegunCompletion(tokens=[1], logprobs=[0.0], versions=[0]))
    assert sent(dispatcher(1, 9, requests)) == {0: [(number, 0, 1) for number in (0, 3, 6, 1, 2, 5, 4)]}
    by_copy = {0: [(0, 0, 1), (6, 0, 1), (2, 0, 1), (4, 0, 1)], 1: [(1, 0, 1), (3, 0, 1), (5, 0, 1)]}
    requests[1].begun = None
    assert sent(dispatcher(2, 9, requests)) == by_copy


def test_what_there_is_no_room_for_goes_to_the_copy_that_is_done_first() -> None:
    out = dispatcher(2, 2, [asked(number, 10) for number in range(6)])
    assert sent(out) == {0: [(0, 0, 1), (2, 0, 1), (4, 0, 1)], 1: [(1, 0, 1), (3, 0, 1), (5, 0, 1)]}
    out = dispatcher(2, 2, [asked(number, 10, 2) for number in range(8)])
    assert {rank: len(parts) for rank, parts in sent(out).items()} == {0: 2, 1: 2}
    for number in (1, 3, 3, 1):  # copy 1 gets on, copy 0 does not
        assert [each.request_id for each in out.count_received([end_of(number)])] == [number]
    assert sent(out) == {1: [(4, 0, 2), (5, 0, 2)]}


def test_one_copy_gets_everything_at_once_and_requests_go_by_their_own_numbers() -> None:
    out = dispatcher(1, 1, [asked(70, 1, 4), asked(71, 2)])
    assert sent(out) == {0: [(0, 0, 4), (1, 0, 1)]}
    [output] = out.count_received([end_of(0, sample=2)])
    assert (output.request_id, output.sample) == (70, 2)
    assert (out.n_unfinished_by_request, 70 in out, 72 in out) == ({70: 3, 71: 1}, True, False)
    assert out.choose_to_rebalance(waiting(3)) is None


def test_a_group_is_cut_only_where_copies_would_have_nothing_to_do() -> None:
    assert sent(dispatcher(2, 16, [asked(0, 10, 5)])) == {0: [(1, 2, 3)], 1: [(0, 0, 2)]}
    whole = dispatcher(2, 16, [asked(0, 10, 4), asked(1, 10, 4)])
    assert sent(whole) == {0: [(0, 0, 4)], 1: [(1, 0, 4)]}


def test_a_copy_gives_back_what_it_has_not_begun_when_another_one_is_idle() -> None:
    out = dispatcher(2, 8, [asked(number, 10, 2) for number in range(4)])
    sent(out)
    assert out.choose_to_rebalance(waiting(2, 2)) is None  # nobody is idle
    assert out.choose_to_rebalance(waiting(2, 0)) == (0, 1)
    assert out.choose_to_rebalance(waiting(2, 0)) is None  # it has just been asked
    assert list(out.count_received([end_of(2, RETURNED)])) == []
    assert out.n_unfinished_by_request == {0: 2, 1: 2, 2: 2, 3: 2}
    assert sent(out) == {1: [(2, 0, 2)]}
    assert out.n_samples == [2, 6]


def test_a_request_is_ended_where_it_is() -> None:
    out = dispatcher(2, 2, [asked(number, 10, 2) for number in (5, 6, 7, 8, 9)])
    assert sent(out) == {0: [(0, 0, 2), (2, 0, 2)], 1: [(1, 0, 2), (3, 0, 2)]}
    assert (out.sent_parts(6), list(out.drop_unsent(6))) == ([(1, 1)], [])
    assert out.sent_parts(9) == []
    dropped = [(each.request_id, each.sample, each.finish_reason, 9 in out) for each in out.drop_unsent(9)]
    assert dropped == [(9, 0, "abort", True), (9, 1, "abort", False)]
    assert out.sent_parts(99) == list(out.drop_unsent(99)) == []


def test_the_scheduler_gives_whole_requests_back_that_have_not_begun() -> None:
    scheduler = Scheduler(BlockManager(64, 8), max_running=3, max_prefill_tokens=64)
    requests = [request(0, 2), request(1, 2), request(2, 2), request(3, 1)]
    for each in requests:
        for sample in range(each.n_samples):
            scheduler.waiting.append(
                Sample(request=each, sample=sample, key=0, max_new=4, stop_ids=frozenset(), tokens=list(each.prompt))
            )
    scheduler.schedule()  # both samples of request 0 begin, and one of request 1
    assert [each.request_id for each in scheduler.remove_waiting(2)] == [3, 2]
    assert scheduler.remove_waiting(9) == []  # request 1 has begun
    assert [(each.request.request_id, each.sample) for each in scheduler.waiting] == [(1, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_two_copies_share_uneven_work_and_draw_the_same_samples(folder: Path) -> None:
    """Copy 0 gets what is expected to be long and is not; little fits into its cache at once."""
    lengths = {0: 60, 1: 60, 2: 2, 3: 2, 4: 60, 5: 3, 6: 60, 7: 40}
    requests = [
        replace(
            request(number, 2, max_new_tokens=length, ignore_eos=True), expected_tokens=1.0 if length > 50 else 30.0
        )
        for number, length in lengths.items()
    ]
    few_blocks = RolloutSpec(max_running=32, max_len=96, decoder=DecoderConfig(max_kv_tokens=160))
    found, n_returned = [], 0
    # A driver that looks late finds nothing to be given back any more: then it tries again.
    for devices, rollout, most in ((1, ROLLOUT, 1), (2, few_blocks, 20)):
        with Engine(spec(folder, devices, optimizer=None)) as engine:
            received = engine.dispatcher.count_received

            def counted(outputs: Sequence[GenerationOutput], received: Any = received) -> Any:
                nonlocal n_returned
                n_returned += sum(output.sample == RETURNED for output in outputs)
                return received(outputs)

            engine.dispatcher.count_received = counted  # type: ignore[method-assign]
            while most and not n_returned:
                engine.begin_rollout(rollout)
                found.append(tokens_of(engine.generate(requests)))
                assert not engine.dispatcher.n_unfinished_by_request
                engine.end_rollout()
                most -= 1
    assert all(each == found[0] for each in found[1:])
    assert n_returned
