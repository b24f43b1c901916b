"""Scheduler: order, budgets, sharing and preemption, played without a model by a device of a few lines."""

from __future__ import annotations

import random

import pytest

from areno.engine.decoder.block_manager import BlockManager
from areno.engine.decoder.scheduler import Scheduler, SchedulerOutput
from areno.engine.decoder.sequence import Sequence
from areno.types import GenerationRequest, SamplingParams


def make_request(
    request_id: int, n_prompt: int, n_samples: int = 1, max_new: int = 4, prompt_id: int | None = None
) -> list[Sequence]:
    prompt = [(request_id if prompt_id is None else prompt_id) * 1000 + i for i in range(n_prompt)]
    request = GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        n_samples=n_samples,
        params=SamplingParams(max_new_tokens=max_new),
    )
    return [
        Sequence(request=request, sample=i, key=i, max_new=max_new, stop_ids=frozenset(), tokens=list(prompt))
        for i in range(n_samples)
    ]


def make_scheduler(
    n_blocks: int = 64, block_size: int = 4, max_running: int = 8, max_prefill_tokens: int = 64
) -> Scheduler:
    return Scheduler(BlockManager(n_blocks, block_size), max_running, max_prefill_tokens)


def add(scheduler: Scheduler, *requests: list[Sequence]) -> None:
    for request in requests:
        for sequence in request:
            scheduler.waiting.append(sequence)


def arrive(scheduler: Scheduler, plan: SchedulerOutput) -> list[Sequence]:
    """What the decoder does with the tokens of a step; here token 7 for everybody."""
    sequences = [s for chunk in plan.chunks if chunk.is_last for s in chunk.prefill.sequences] + plan.decode
    for sequence in sequences:
        sequence.accept(7, -1.0, 0)
        scheduler.register(sequence, len(sequence.tokens) - 1)
    scheduler.remove_finished()
    return sequences


def test_prefill_is_cut_by_the_budget_while_the_running_go_on() -> None:
    scheduler = make_scheduler(max_prefill_tokens=10)
    (short,), (long,) = make_request(1, 4, max_new=9), make_request(2, 20)
    add(scheduler, [short], [long])
    spans = []
    for step in range(3):
        plan = scheduler.schedule()
        assert sum(chunk.end - chunk.start for chunk in plan.chunks) <= 10
        spans.append([(chunk.prefill.leader is long, chunk.start, chunk.end) for chunk in plan.chunks])
        assert plan.decode == ([short] if step else [])
        arrive(scheduler, plan)
    assert spans == [[(False, 0, 4), (True, 0, 6)], [(True, 6, 16)], [(True, 16, 20)]]
    assert len(short.logprobs) == 3


def test_samples_of_a_request_are_prefilled_once_and_share_full_blocks() -> None:
    scheduler = make_scheduler()
    samples = make_request(1, 10, n_samples=3)
    add(scheduler, samples)
    plan = scheduler.schedule()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.end, chunk.is_last, chunk.prefill.sequences) == (0, 10, True, samples)
    first, second, third = (sequence.block_tables.group_blocks[0] for sequence in samples)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    assert chunk.prefill.block_copies(scheduler.blocks) == [(first[2], second[2]), (first[2], third[2])]
    assert scheduler.blocks.n_available == 64 - 2 - 3


def test_a_prompt_of_whole_blocks_needs_no_copies() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(1, 8, n_samples=3))
    (chunk,) = scheduler.schedule().chunks
    assert chunk.prefill.block_copies(scheduler.blocks) == []
    assert scheduler.blocks.n_available == 64 - 2


def test_samples_without_a_slot_come_later_and_find_the_prompt() -> None:
    scheduler = make_scheduler(max_running=2)
    samples = make_request(1, 9, n_samples=4, max_new=2)
    add(scheduler, samples)
    for _ in range(2):
        arrive(scheduler, scheduler.schedule())
    assert all(sequence.finish_reason == "length" for sequence in samples[:2])
    (chunk,) = scheduler.schedule().chunks
    assert chunk.prefill.sequences == samples[2:]
    assert (chunk.start, chunk.end) == (8, 9)
    assert scheduler.n_cached_tokens == 8


def admissions(scheduler: Scheduler, steps: int) -> list[int]:
    """Return the number of samples that begin in each step."""
    found = []
    for _ in range(steps):
        plan = scheduler.schedule()
        found.append(sum(len(chunk.prefill.sequences) for chunk in plan.chunks if chunk.is_last))
        arrive(scheduler, plan)
    return found


def test_a_full_batch_is_filled_in_bulk() -> None:
    scheduler = make_scheduler(n_blocks=500, max_running=32, max_prefill_tokens=512)
    # One sample ends in each step from the second on, and its slot waits until four are free.
    add(scheduler, *[make_request(i, 4, max_new=2 + i) for i in range(32)])
    add(scheduler, *[make_request(100 + i, 4, max_new=90) for i in range(20)])
    assert admissions(scheduler, 12) == [32, 0, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0]


def test_a_slot_of_a_full_batch_stays_free_for_at_most_16_steps() -> None:
    scheduler = make_scheduler(n_blocks=500, max_running=32, max_prefill_tokens=512)
    add(scheduler, make_request(0, 4, max_new=3), *[make_request(1 + i, 4, max_new=90) for i in range(40)])
    assert admissions(scheduler, 20) == [32] + [0] * 15 + [1, 0, 0, 0]


def test_a_batch_with_room_for_all_admits_at_once() -> None:
    scheduler = make_scheduler(n_blocks=500, max_running=32, max_prefill_tokens=512)
    add(scheduler, *[make_request(i, 4, max_new=90) for i in range(31)], make_request(40, 4, max_new=5))
    waiting = make_request(50, 4, max_new=9)
    add(scheduler, waiting)
    assert admissions(scheduler, 2) == [32, 0]
    scheduler.abort(50)
    assert admissions(scheduler, 4) == [0, 0, 0, 0]  # the slot of request 40 is free now
    add(scheduler, make_request(60, 4))
    assert admissions(scheduler, 1) == [1]


def test_requests_that_differ_only_in_seeds_are_prefilled_once_like_samples_of_a_request() -> None:
    scheduler = make_scheduler()
    requests = [make_request(1, 10), make_request(2, 10, n_samples=2, prompt_id=1), make_request(3, 10)]
    add(scheduler, *requests)
    first, second = scheduler.schedule().chunks
    assert (first.start, first.end, first.prefill.sequences) == (0, 10, [*requests[0], *requests[1]])
    assert second.prefill.sequences == requests[2]
    assert len({tuple(sequence.block_tables.group_blocks[0][:2]) for sequence in first.prefill.sequences}) == 1
    assert len({sequence.block_tables.group_blocks[0][2] for sequence in first.prefill.sequences}) == 3
    assert [sequence.n_cached for sequence in first.prefill.sequences] == [0, 8, 8]  # its two full blocks
    assert scheduler.n_cached_tokens == 16


@pytest.mark.parametrize(("aborted", "waits"), [(1, True), (2, False)])
def test_a_shared_prefill_goes_on_without_aborted_samples_unless_they_own_its_blocks(aborted: int, waits: bool) -> None:
    scheduler = make_scheduler(max_prefill_tokens=4)
    requests = {1: make_request(1, 10), 2: make_request(2, 10, prompt_id=1)}
    add(scheduler, *requests.values())
    (chunk,) = scheduler.schedule().chunks
    assert chunk.prefill.sequences == [*requests[1], *requests[2]]
    assert not chunk.is_last
    assert scheduler.abort(aborted) == requests.pop(aborted)
    [[left]] = requests.values()
    assert list(scheduler.waiting) == [left] * waits
    while scheduler.has_work:
        arrive(scheduler, scheduler.schedule())
    assert left.finish_reason == "length"
    assert len(left.logprobs) == 4
    scheduler.cache_departed()
    assert scheduler.blocks.n_available == 64


def test_an_equal_prompt_with_other_settings_shares_too_but_its_last_token_is_computed() -> None:
    scheduler = make_scheduler()
    (first,), (second,) = make_request(1, 8), make_request(1, 8, max_new=5)
    add(scheduler, [first], [second])
    chunks = scheduler.schedule().chunks
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 8), (4, 8)]
    assert first.block_tables.group_blocks[0][0] == second.block_tables.group_blocks[0][0]
    assert first.block_tables.group_blocks[0][1] != second.block_tables.group_blocks[0][1]


def test_the_next_turn_finds_the_blocks_of_the_turn_before() -> None:
    scheduler = make_scheduler()
    (turn,) = make_request(1, 6, max_new=5)
    add(scheduler, [turn])
    while scheduler.has_work:
        arrive(scheduler, scheduler.schedule())
    request = GenerationRequest(request_id=2, prompt=[*turn.tokens, 1, 2])
    scheduler.waiting.append(
        Sequence(request=request, sample=0, key=0, max_new=1, stop_ids=frozenset(), tokens=list(request.prompt))
    )
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.start, chunk.end) == (8, 13)  # 11 tokens, of which the last was never an input: 2 full blocks


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(n_blocks=5)
    (old,), (young,), (waiting,) = make_request(1, 7, max_new=6), make_request(2, 7, max_new=6), make_request(3, 7)
    add(scheduler, [old], [young], [waiting])
    plans = []
    while not scheduler.n_preemptions:
        assert len(plans) < 10
        plans.append(scheduler.schedule())
        arrive(scheduler, plans[-1])
    assert plans[-1].decode == [old]
    assert list(scheduler.waiting) == [young, waiting]
    assert young.slot == -1
    kept = list(young.tokens)
    order = []
    for _ in range(40):
        plan = scheduler.schedule()
        order += [chunk.prefill.leader for chunk in plan.chunks if chunk.is_last]
        arrive(scheduler, plan)
    assert order[:2] == [young, waiting]
    assert young.tokens[: len(kept)] == kept
    assert [len(sequence.logprobs) for sequence in (old, young, waiting)] == [6, 6, 4]


def test_nobody_is_admitted_into_the_blocks_that_the_running_need_next() -> None:
    scheduler = make_scheduler(n_blocks=7)
    (first,), (second,), (waiting,) = make_request(1, 4, max_new=6), make_request(2, 4, max_new=6), make_request(3, 8)
    add(scheduler, [first], [second])
    for _ in range(2):
        arrive(scheduler, scheduler.schedule())
    assert scheduler.blocks.n_available == 3
    add(scheduler, [waiting])
    while not (first.finish_reason and second.finish_reason):
        plan = scheduler.schedule()
        assert plan.chunks == []  # 2 of the 3 blocks would leave one for the two that run
        arrive(scheduler, plan)
    assert scheduler.n_preemptions == 0
    (chunk,) = scheduler.schedule().chunks
    assert chunk.prefill.leader is waiting


def test_the_last_token_by_length_needs_no_further_step_or_block() -> None:
    scheduler = make_scheduler(n_blocks=2)
    (sequence,) = make_request(1, 4, max_new=5)
    add(scheduler, [sequence])
    steps = [scheduler.schedule() for _ in range(7)]  # no token arrives: the device runs ahead
    assert [len(plan.decode) for plan in steps] == [0, 1, 1, 1, 1, 0, 0]
    assert not scheduler.is_short_of_blocks()
    assert len(sequence.block_tables.group_blocks[0]) == 2


def test_abort_finds_sequences_wherever_they_are() -> None:
    scheduler = make_scheduler(max_running=3, max_prefill_tokens=8)
    requests = [make_request(1, 4, max_new=9), make_request(2, 30, n_samples=2), make_request(3, 4)]
    add(scheduler, *requests)
    arrive(scheduler, scheduler.schedule())
    for request_id, sequences in enumerate(requests, start=1):
        assert scheduler.abort(request_id) == sequences
        assert all(sequence.finish_reason == "abort" for sequence in sequences)
    assert not scheduler.has_work
    scheduler.cache_departed()
    assert scheduler.blocks.n_available == 64
    assert scheduler.n_running == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_work_ends_with_every_token_drawn_and_no_block_or_slot_lost(seed: int) -> None:
    rng = random.Random(seed)
    n_blocks = rng.choice([6, 10, 40])
    scheduler = make_scheduler(n_blocks, block_size=rng.choice([1, 3, 4]), max_running=5, max_prefill_tokens=7)
    room = n_blocks * scheduler.blocks.block_size
    everybody: list[Sequence] = []
    in_flight: SchedulerOutput | None = None
    for step in range(5000):
        if step < 60 and rng.random() < 0.5:
            n_prompt = rng.randrange(1, min(12, room))
            max_new = rng.randrange(1, min(12, room - n_prompt + 1) + 1)
            prompt_id = rng.choice([step, 100, 101])  # some have equal prompts and then, perhaps, equal settings
            everybody += (new := make_request(step, n_prompt, rng.randrange(1, 4), max_new, prompt_id))
            add(scheduler, new)
        if rng.random() < 0.03 and everybody:
            scheduler.abort(rng.choice(everybody).request.request_id)
        if in_flight is not None and scheduler.is_short_of_blocks():
            arrive_unfinished(scheduler, in_flight)
            in_flight = None
        plan = scheduler.schedule()
        assert len({sequence.slot for sequence in plan.decode}) == len(plan.decode)
        assert all(0 <= sequence.slot < 5 for sequence in plan.decode)
        assert all(len(s.block_tables.group_blocks[0]) * scheduler.blocks.block_size >= s.n_kv for s in plan.decode)
        if in_flight is not None:
            arrive_unfinished(scheduler, in_flight)
        in_flight = plan
        if step > 60 and not scheduler.has_work:
            break
    assert not scheduler.has_work
    for sequence in everybody:
        assert sequence.finish_reason == "abort" or len(sequence.logprobs) == sequence.max_new
    scheduler.cache_departed()
    assert scheduler.blocks.n_available == n_blocks
    assert scheduler.n_running == 0
    assert sorted(scheduler._slots) == list(range(5))


def arrive_unfinished(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """As `arrive`, for a step whose sequences may have been aborted meanwhile."""
    sequences = [s for chunk in plan.chunks if chunk.is_last for s in chunk.prefill.sequences] + plan.decode
    for sequence in sequences:
        if sequence.finish_reason is None:
            sequence.accept(7, -1.0, 0)
            scheduler.register(sequence, len(sequence.tokens) - 1)
    scheduler.remove_finished()


@pytest.mark.parametrize("new_weights", [False, True])
def test_blocks_of_finished_sequences_wait_for_a_prompt_that_may_match_them(new_weights: bool) -> None:
    scheduler = make_scheduler()
    (first,) = make_request(1, 4, max_new=9)
    add(scheduler, [first])
    while scheduler.has_work:
        plan = scheduler.schedule()
        for sequence in [chunk.prefill.leader for chunk in plan.chunks] + plan.decode:
            sequence.accept(7, -1.0, 0)
        scheduler.remove_finished()
    assert len(scheduler.blocks.cached_group_blocks) == 0
    if new_weights:
        scheduler.preempt_all()
        scheduler.blocks.reset()
    (second,) = make_request(1, 4)
    second.tokens = [*first.tokens, 8]  # the next turn of a conversation
    add(scheduler, [second])
    (chunk,) = scheduler.schedule().chunks
    assert chunk.start == (0 if new_weights else 12)


def test_a_limit_leaves_slots_free_until_it_is_raised() -> None:
    scheduler = make_scheduler(max_running=8)
    add(scheduler, make_request(1, 4, n_samples=6, max_new=9), make_request(2, 4, n_samples=6, max_new=9))
    scheduler.limit_running(3)
    arrive(scheduler, scheduler.schedule())
    assert scheduler.n_running == 3
    assert {sequence.slot for sequence in scheduler.running} == {0, 1, 2}
    scheduler.limit_running(8)
    for _ in range(20):
        arrive(scheduler, scheduler.schedule())
        if scheduler.n_running == 8:
            break
    assert scheduler.n_running == 8
