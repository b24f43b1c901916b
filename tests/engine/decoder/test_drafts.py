"""Drafts: the index finds what a search through all texts finds, and drafts are made where they pay."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from areno.engine.decoder.drafts import (
    LENGTHS,
    LONGEST,
    MAX_SEQUENCES,
    MOST,
    SEGMENT,
    DraftIndex,
    SampleMemory,
    StepCosts,
    SuffixDrafter,
)
from areno.engine.decoder.sequence import Sequence
from areno.types import GenerationRequest
from tests.helpers.tiny_decoder import Outputs, make_decoder, model, request, run

COSTS = StepCosts(fixed=40, verification=4, most_rows=1024)


def begun(costs: StepCosts = COSTS, **how: Any) -> SuffixDrafter:
    drafter = SuffixDrafter(**how)
    drafter.begin(costs)
    return drafter


def followers(text: list[int], n: int, texts: list[tuple[int, list[int]]], least: int) -> list[list[int]]:
    """What followed each earlier occurrence of the last n tokens, if at least as many tokens.

    texts: Each with the number of tokens before it, which are not what follows.
    """
    return [
        other[at + n : at + n + MOST]
        for n_before, other in texts
        for at in range(max(0, n_before - n), len(other) - n - least + 1)
        if len(text) >= n and other[at : at + n] == text[-n:]
    ]


def longest_suffix(text: list[int], texts: list[tuple[int, list[int]]], least: int) -> int:
    return max((n for n in LENGTHS if followers(text, n, texts, least)), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("n_letters", [2, 4, 30])
def test_the_index_finds_what_a_search_finds(n_letters: int) -> None:
    rng, index = random.Random(n_letters), DraftIndex(4096 * SEGMENT)
    scopes = [7, 7, 7, -(2**62), -(2**62)]
    befores = [[rng.randrange(n_letters) for _ in range(rng.randrange(12))] for _ in scopes]
    texts = [index.open(scope, before) for scope, before in zip(scopes, befores, strict=True)]
    written = [before[-LONGEST:] for before in befores]
    n_found = n_hidden = 0
    for _ in range(120):
        new = [[rng.randrange(n_letters) for _ in range(rng.choice([0, 1, 1, 3, 40]))] for _ in texts]
        index.extend(texts, new)
        for mine, more in zip(written, new, strict=True):
            mine += more
        lengths, places = index.find(texts)
        for row in range(len(texts)):
            alike = [
                (min(LONGEST, len(before)), each)
                for before, each, scope in zip(befores, written, scopes, strict=True)
                if scope == scopes[row]
            ]
            assert lengths[row] <= longest_suffix(written[row], alike, 1)
            # A suffix may be hidden by a collision of hashes.
            n_hidden += lengths[row] < longest_suffix(written[row], alike, MOST)
            if lengths[row]:
                n_found += 1
                [draft] = index.following(places[row : row + 1])
                # A segment may end before the draft does.
                assert draft in [each[: len(draft)] for each in followers(written[row], lengths[row], alike, 1)]
    assert n_found > 20
    assert n_hidden < 5


def test_the_newest_occurrence_counts() -> None:
    index = DraftIndex(4 * SEGMENT)
    text = index.open(1, [])
    index.extend([text], [[1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 8, 7, 6, 7, 9, 1, 2, 3]])
    lengths, places = index.find([text])
    assert (lengths.tolist(), index.following(places)) == ([3], [[5, 9, 8, 7, 6, 7, 9, 1]])


def test_a_growing_text_is_found_when_a_whole_draft_follows() -> None:
    index = DraftIndex(8 * SEGMENT)
    ended, growing, text = (index.open(1, []) for _ in range(3))
    index.extend([ended], [[1, 2, 3, 4, 5]], ends=True)
    index.extend([growing, text], [[1, 2, 3, *range(10, 17)], [1, 2, 3]])
    assert index.following(index.find([text])[1]) == [[4, 5]]
    index.extend([growing], [[17]])
    assert index.following(index.find([text])[1]) == [[*range(10, 18)]]


def test_a_repetition_is_continued() -> None:
    index = DraftIndex(4 * SEGMENT)
    text = index.open(1, [])
    index.extend([text], [[5, *[1, 2] * 7, 1]])
    _, places = index.find([text])
    assert index.following(places) == [[2, 1, 2, 1, 2, 1, 2, 1]]


def test_the_oldest_segments_are_overwritten() -> None:
    index = DraftIndex(3 * SEGMENT)
    first = index.open(1, [])
    index.extend([first], [[1, 2, 3, 4, 5, 6]])
    assert index.is_stored(first)
    for scope in (2, 3, 4):
        other = index.open(scope, [])
        index.extend([other], [[9, 9, 9, 9]])
    assert not index.is_stored(first)
    again = index.open(1, [1, 2, 3, 4])
    assert index.find([again])[0].tolist() == [0]


def test_the_memory_keeps_the_newest_samples_within_its_budgets() -> None:
    rng, memory = random.Random(0), SampleMemory(3000, 1000)
    kept: list[tuple[int, list[int], list[int]]] = []  # by age of the scope's last sample, then by age
    for _ in range(300):
        scope = rng.randrange(6)
        sample = scope, [rng.randrange(9) for _ in range(rng.randrange(9))], [rng.randrange(9)] * rng.randrange(1, 300)
        memory.add(scope, sample[1], np.array(sample[2]))
        kept = [each for each in kept if each[0] != scope] + [each for each in kept if each[0] == scope] + [sample]
        while size_of(mine := [each for each in kept if each[0] == scope]) > 1000 and len(mine) > 1:
            kept.remove(mine[0])
        while size_of(kept) > 3000:
            kept.pop(0)
        for number in range(6):
            found = [(before, tokens.tolist()) for before, tokens in memory.of(number)]
            assert found == [(before, tokens) for of, before, tokens in kept if of == number]
        assert memory.n_tokens == size_of(kept)
    memory.clear()
    assert memory.of(3) == []


def size_of(samples: list[tuple[int, list[int], list[int]]]) -> int:
    return sum(len(before) + len(tokens) + 64 for _, before, tokens in samples)


def test_the_index_takes_the_memory_that_the_documentation_says() -> None:
    drafter = SuffixDrafter()
    assert 55e6 < drafter.index.n_bytes < 65e6
    drafter.begin(COSTS)
    drafter.finished(sequence([5] * 100))
    [(_, tokens)] = drafter.memory.of(hash((1, 2, 3, 4)))
    assert tokens.itemsize == 4


def sequence(
    tokens: list[int], prompt: list[int] | None = None, scope: int | None = None, request_id: int = 0
) -> Sequence:
    item = GenerationRequest(request_id=request_id, prompt=prompt or [1, 2, 3, 4], draft_scope=scope)
    made = Sequence(request=item, sample=0, key=0, max_new=10_000, stop_ids=frozenset(), tokens=[*item.prompt])
    made.tokens += tokens
    return made


def test_other_samples_and_earlier_rollouts_of_the_prompt_are_drafts() -> None:
    drafter = begun()
    completion = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
    drafter.finished(sequence(completion))
    drafter.begin(COSTS)
    new, other_prompt = sequence([]), sequence([], [9, 2, 3, 4])
    assert drafter.is_due(2)
    (draft, none) = drafter.propose([new, other_prompt])
    assert (draft, none) == (completion[: len(draft)], [])
    assert len(draft) > 2
    new.tokens += completion[:4]
    (draft,) = drafter.propose([new])
    assert draft == completion[4 : 4 + len(draft)]
    assert draft
    # The memory has them when the index has overwritten them.
    for _ in range(drafter.index.n_segments):
        drafter.index.open(0, [])
    (draft,) = drafter.propose([sequence([])])
    assert draft == completion[: len(draft)]
    assert draft
    # With texts that do not repeat, nothing is drafted, and ever fewer steps ask.
    rng = random.Random(0)
    noise, asked = [sequence([rng.randrange(1000)], [5, 6, 7]) for _ in range(8)], 0
    for _ in range(300):
        if drafter.is_due(8):
            asked += 1
            assert not any(drafter.propose(noise))
        for each in noise:
            each.tokens.append(rng.randrange(1000))
    assert 3 < asked < 15
    assert not drafter.is_due(MAX_SEQUENCES + 1)


def test_drafts_that_are_wrong_stop() -> None:
    """Texts repeat parts of three tokens, and go on otherwise each time."""
    rng, drafter = random.Random(1), begun()
    rows = [sequence([rng.randrange(1000) for _ in range(50)]) for _ in range(4)]
    n_drafted: list[int] = []
    for _ in range(200):
        for each in rows:
            at = rng.randrange(len(each.tokens) - 3)
            each.tokens += [rng.randrange(1000), *each.tokens[at : at + 3]]
        n_drafted.append(sum(map(len, drafter.propose(rows))) if drafter.is_due(4) else 0)
    assert sum(n_drafted[:20]) > 0
    assert sum(n_drafted[100:]) == 0


def test_turns_of_a_task_share_drafts() -> None:
    drafter, call = begun(), [30, 31, 32, 33, 34, 35, 36, 37]
    first, other = list(range(100, 300)), list(range(400, 450))
    drafter.finished(sequence([*call, 50, 51], first, scope=-5))
    later = [*first, *call, 50, 51, *range(500, 560)]
    turn = sequence([60, *call[:3]], later, scope=-5)
    stranger = sequence([60, *call[:3]], later, scope=7)
    elsewhere = sequence([70, *call[:4]], other, scope=-5)
    drafts = drafter.propose([turn, stranger, elsewhere])
    assert [len(draft) > 1 for draft in drafts] == [True, True, True]
    assert drafts[0] == [*call, 50, 51][3 : 3 + len(drafts[0])]
    assert drafts[1][:5] == call[3 : 3 + len(drafts[1][:5])]  # its own prompt has the call
    assert drafts[2] == [*call, 50, 51][4 : 4 + len(drafts[2])]
    n_opened = drafter.index._n_opened
    drafter.propose([sequence([], [*later, 5, *range(600, 610)], scope=-5)])
    # Of a prompt that goes on, the index stores the new part alone.
    stored = drafter.index._length[n_opened : drafter.index._n_opened]
    assert sum(stored) < 64 + 2 * LONGEST + 11 + LONGEST
    assert drafter.propose([sequence([], later, scope=8)])[0] == []


def test_a_draft_ends_where_its_sample_ends() -> None:
    drafter = begun()
    for completion in ([10, 11, 12, 13, 14], [20, 21, 22, 23, 24]):
        drafter.finished(sequence(completion))
    assert drafter.propose([sequence([10, 11, 12]), sequence([20, 21, 22])]) == [[13, 14], [23, 24]]


def test_many_short_samples_of_many_scopes_fit_into_the_index() -> None:
    rng, drafter = random.Random(0), begun()
    for number in range(128):
        for _ in range(100):
            drafter.finished(sequence([rng.randrange(9) for _ in range(20)], scope=number, request_id=number))
    rows = [sequence([1], scope=number, request_id=number) for number in range(128)]
    while not drafter.index._n_opened or drafter._pending:
        drafter.propose(rows)
    n_opened = drafter.index._n_opened
    assert n_opened < drafter.index.n_segments / 4
    for _ in range(5):
        drafter.propose(rows)
    assert drafter.index._n_opened == n_opened


@pytest.mark.slow
def test_aborted_samples_are_forgotten() -> None:
    drafter = begun()
    for number in range(3000):
        each = sequence([1, 2, 3], request_id=number)
        drafter.propose([each])
        each.finish_reason = "abort"
    assert len(drafter._rows) < 2 * MAX_SEQUENCES + 3
    assert len(drafter._loaded) <= 1


def test_a_text_that_begins_to_repeat_is_drafted_again() -> None:
    rng, drafter = random.Random(2), begun(StepCosts(fixed=320, verification=450, most_rows=1024, host=4))
    rows = [sequence([rng.randrange(1000) for _ in range(50)]) for _ in range(8)]
    searches: list[int] = []
    for step in range(3000):
        for each in rows:
            at = rng.randrange(len(each.tokens) - 3)
            repeated = each.tokens[-40:-39] if step > 1000 else [rng.randrange(1000), *each.tokens[at : at + 3]]
            each.tokens += repeated
        if drafter.is_due(8):
            searches.append(step)
            drafter.propose(rows)
    assert 0 < len([step for step in searches if step < 1000]) < 60
    assert len([step for step in searches if step > 2000]) > 500


def test_drafts_are_looked_for_only_if_they_can_pay() -> None:
    def is_due(right: float, tried: float) -> bool:
        drafter = begun(StepCosts(fixed=320, verification=450, most_rows=1024, host=4))
        for length in LENGTHS:
            drafter._right[length], drafter._tried[length] = right * tried, tried
        return any(drafter.is_due(8) for _ in range(100))

    assert [is_due(right, 400) for right in (0.2, 0.5, 0.7, 0.9)] == [False, False, True, True]
    assert is_due(0.2, 0)  # unknown


def test_a_large_batch_that_does_not_draft_costs_next_to_nothing() -> None:
    rng = random.Random(0)
    drafter = begun(StepCosts(fixed=240, verification=80, most_rows=1024, host=2))
    rows = [sequence([rng.randrange(10_000)], [row, 5, 6], request_id=row) for row in range(256)]
    n_looked_at: list[int] = []
    index_new = drafter._index_new
    drafter._index_new = lambda some, of: n_looked_at.append(len(some)) or index_new(some, of)  # type: ignore[method-assign,func-returns-value]
    for _ in range(600):
        if drafter.is_due(256):
            assert not any(drafter.propose(rows))
        for each in rows:
            each.tokens.append(rng.randrange(10_000))
    assert 5 < len(n_looked_at) < 15
    assert max(n_looked_at) == 16
    assert drafter.is_due(100)  # a smaller batch is looked at anew
    assert not drafter.is_due(MAX_SEQUENCES + 1)


def test_a_large_batch_drafts_if_some_of_its_samples_show_that_it_pays() -> None:
    text = [number * number % 1009 for number in range(120)]
    drafter = begun(StepCosts(fixed=2000, verification=80, most_rows=1024))
    rows = [sequence(text[:3], [row // 8, 5, 6], request_id=row // 8) for row in range(96)]
    for number in range(0, 96, 8):
        drafter.finished(sequence(text, [number // 8, 5, 6], request_id=number // 8))
    n_drafted = 0
    for at in range(3, 60):
        if drafter.is_due(96):
            n_drafted += sum(map(len, drafts := drafter.propose(rows)))
            assert all(draft == text[at : at + len(draft)] for draft in drafts)
        for each in rows:
            each.tokens.append(text[at])
    assert n_drafted > 96 * 100


def test_a_row_costs_few_microseconds() -> None:
    rng, drafter = random.Random(0), begun()
    rows = [sequence([rng.randrange(9) for _ in range(300)], [row, 1, 2]) for row in range(128)]
    drafter.propose(rows)
    seconds: list[float] = []
    for _ in range(20):
        for each in rows:
            each.tokens += [rng.randrange(9), rng.randrange(9)]
        started = time.perf_counter()
        drafter.propose(rows)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) / len(rows) < 40e-6  # 5 on an idle core


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_second_rollout_of_the_same_samples_takes_fewer_steps(runs_ahead: bool) -> None:
    requests = [request(i, 9, n_samples=2, max_new_tokens=40) for i in (1, 2, 3)]
    n_steps: list[int] = []
    results: list[Outputs] = []
    drafter = SuffixDrafter()
    decoder = make_decoder(model(), drafter=drafter, runs_ahead=runs_ahead)
    schedule = decoder._scheduler.schedule
    decoder._scheduler.schedule = lambda *given: n_steps.append(1) or schedule(*given)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        drafter.begin(StepCosts(fixed=100, verification=1, most_rows=128))
        decoder.reset_stats()
        n_steps.clear()
        for item in requests:
            decoder.submit(item)
        results.append(run(decoder))
    assert {key: output.tokens for key, output in results[0].items()} == {
        key: output.tokens for key, output in results[1].items()
    }
    assert decoder.stats.accepted_tokens > 100
    assert 0 < decoder.stats.draft_steps <= decoder.stats.decode_steps
    assert len(n_steps) < 25


def test_completions_leave_as_arrays_while_nothing_is_drafted() -> None:
    drafter = begun()
    drafter.is_due = lambda n_running: False  # type: ignore[method-assign]
    decoder = make_decoder(model(), drafter=drafter)
    decoder.submit(request(1, 9, n_samples=3, max_new_tokens=20))
    outputs = run(decoder)
    assert all(isinstance(vars(each)["tokens"], np.ndarray) for each in outputs.values())
    assert [tokens.tolist() for _, tokens in drafter.memory.of(hash(tuple(request(1, 9).prompt)))] == [
        outputs[1, sample].tokens for sample in range(3)
    ]
    assert decoder.stats.decode_steps == 19
    assert decoder.stats.draft_steps == 0
