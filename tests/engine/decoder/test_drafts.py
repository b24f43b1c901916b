"""Drafts: the index finds what a search through all texts finds, and drafts are made where they pay."""

from __future__ import annotations

import random
import time

import pytest

from areno.engine.decoder.drafts import (
    LONGEST,
    MAX_SEQUENCES,
    MOST,
    SEGMENT,
    SHORTEST,
    DraftIndex,
    StepCosts,
    SuffixDrafter,
)
from areno.engine.decoder.sequence import Sequence
from areno.types import GenerationRequest
from tests.helpers.tiny_decoder import Outputs, make_decoder, model, request, run

COSTS = StepCosts(fixed=40, verification=4, most_rows=1024)


def begun(costs: StepCosts = COSTS, **how: bool) -> SuffixDrafter:
    drafter = SuffixDrafter(**how)
    drafter.begin(costs)
    return drafter


def longest_suffix(text: list[int], texts: list[tuple[int, list[int]]]) -> tuple[int, list[list[int]]]:
    """The longest suffix that occurs before, and what followed each of its occurrences.

    texts: Each with the number of tokens before it, which are not what follows.
    """
    for n in range(LONGEST, SHORTEST - 1, -1):
        suffix = text[-n:]
        found = [
            other[at + n : at + n + MOST]
            for n_before, other in texts
            for at in range(max(0, n_before - n), len(other) - n)
            if len(text) >= n and other[at : at + n] == suffix
        ]
        if found:
            return n, found
    return 0, []


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
        for row, text in enumerate(texts):
            alike = [
                (min(LONGEST, len(before)), each)
                for before, each, scope in zip(befores, written, scopes, strict=True)
                if scope == scopes[row]
            ]
            length, followed = longest_suffix(written[row], alike)
            assert lengths[row] <= length
            n_hidden += lengths[row] < length  # by a collision of hashes
            if lengths[row] == length > 0:
                n_found += 1
                draft = index.following(int(places[row]), text)
                # A segment may end before the draft does, and a text that repeats itself goes on.
                assert any(draft[: len(each)] == each[: len(draft)] for each in followed)
    assert n_found > 20
    assert n_hidden < 5


def test_the_newest_occurrence_counts() -> None:
    index = DraftIndex(4 * SEGMENT)
    text = index.open(1, [])
    index.extend([text], [[1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 8, 1, 2, 3]])
    lengths, places = index.find([text])
    assert (lengths.tolist(), index.following(int(places[0]), text)[:3]) == ([3], [5, 9, 8])


def test_a_repetition_is_continued() -> None:
    index = DraftIndex(4 * SEGMENT)
    text = index.open(1, [])
    index.extend([text], [[5, 1, 2, 1, 2, 1, 2, 1, 2, 1]])
    _, places = index.find([text])
    assert index.following(int(places[0]), text) == [2, 1, 2, 1, 2, 1, 2, 1]


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


def sequence(tokens: list[int], prompt: list[int] | None = None) -> Sequence:
    item = GenerationRequest(request_id=0, prompt=prompt or [1, 2, 3, 4])
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
    assert len(n_steps) < 25
