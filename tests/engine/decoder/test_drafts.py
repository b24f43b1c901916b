"""Drafts: the table knows what a search through all texts finds, and drafts are made where they pay."""

from __future__ import annotations

import random
from collections.abc import Sequence as Numbers
from typing import Any

import numpy as np
import pytest
import torch

from areno.engine.decoder.draft_length import StepCosts
from areno.engine.decoder.draft_verification import find_accepted_tokens
from areno.engine.decoder.ngram_drafts import NgramDrafter, SampleMemory, _pack_texts, _QueuedText
from areno.engine.decoder.sequence import Sequence
from areno.engine.decoder.slots import SlotTable
from areno.kernels.sampling import CONTEXT, LEVELS, NgramTable, add_texts, draft_tokens
from areno.kernels.sampling.drafts import KEPT
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.types import GenerationRequest, SamplingParams
from tests.helpers.interpreted import run_interpreted
from tests.helpers.slot_samplers import settings_of
from tests.helpers.tiny_decoder import Outputs, make_decoder, model, request, run

COSTS = StepCosts(fixed=400, verification=100, most_rows=1024)
GREEDY = SamplingParams(greedy=True)
CPU = torch.device("cpu")
Texts = list[tuple[int, list[int], list[int]]]  # scope, tokens before, tokens


def random_texts(rng: random.Random, n_letters: int, n: int) -> Texts:
    def drawn(most: int) -> list[int]:
        return [rng.randrange(n_letters) for _ in range(rng.randrange(most))]

    return [(rng.choice([5, -(2**62), 7]), drawn(2 * CONTEXT)[-CONTEXT:], drawn(60)) for _ in range(n)]


def entered(texts: Texts, table: NgramTable, at_once: int = 7) -> NgramTable:
    for start in range(0, len(texts), at_once):
        packed = _pack_texts([_QueuedText(*text) for text in texts[start : start + at_once]])
        if packed.shape[1]:
            add_texts(table, torch.from_numpy(packed).to(table.counts.device))
    return table


def followers(texts: Texts) -> dict[Any, list[int]]:
    """Which tokens followed each suffix, by level and, for some levels, by scope."""
    found: dict[Any, list[int]] = {}
    for scope, before, tokens in texts:
        text = [*before, *tokens]
        for at in range(len(before), len(text)):
            for level, (n, is_scoped) in enumerate(LEVELS):
                if n <= at:
                    key = level, scope if is_scoped else None, tuple(text[at - n : at])
                    found.setdefault(key, []).append(text[at])
    return found


def searched(found: dict[Any, list[int]], text: list[int], scope: int, numbers: Numbers[float | None]) -> list[int]:
    """The draft of a text, by the random number of each token. None as a number: a greedy row."""
    text, drafts = list(text), list[int]()
    for number in numbers:
        keys = [
            (i, scope if s else None, tuple(text[len(text) - n :])) for i, (n, s) in enumerate(LEVELS) if n <= len(text)
        ]
        known = next((found[key] for key in keys if key in found), None)
        if known is None:
            return drafts + [-1] * (len(numbers) - len(drafts))
        kept = known[-KEPT:]
        if number is None:
            most = max(kept.count(token) for token in kept)
            ring = [0] * len(kept)
            for at, token in enumerate(known):
                ring[at % KEPT] = token
            drafts.append(next(token for token in ring if ring.count(token) == most))
        else:
            drafts.append(sorted(kept)[int(number * len(kept))])
        text.append(drafts[-1])
    return drafts


def contexts_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([([-1] * CONTEXT + row)[-CONTEXT:][::-1] for row in rows]).T.contiguous()


@pytest.mark.parametrize("n_letters", [2, 5, 40])
def test_the_table_drafts_what_a_search_finds(n_letters: int) -> None:
    rng = random.Random(n_letters)
    texts = random_texts(rng, n_letters, 120)
    found, table = followers(texts), entered(texts, NgramTable.empty(22, CPU))
    rows = [
        (scope, [*before, *tokens][: rng.randrange(70)]) for scope, before, tokens in random_texts(rng, n_letters, 60)
    ]
    params = [GREEDY if number % 3 == 0 else SamplingParams() for number in range(len(rows))]
    sampler, slots = settings_of(len(rows) + 1, 100, params, "cpu")
    positions = torch.arange(len(rows)) % 7
    scopes = torch.tensor([scope for scope, _ in rows])
    contexts = contexts_of([text for _, text in rows])
    drafts = draft_tokens(table, contexts, scopes, slots, positions, sampler.tensors, 5)
    keys, n_same = sampler.tensors.key[slots], 0
    for row, (scope, text) in enumerate(rows):
        numbers = [uniform(keys[row : row + 1], positions[row : row + 1] + j).item() for j in range(5)]
        expected = searched(found, text[-CONTEXT:], scope, [None] * 5 if params[row].is_greedy else numbers)
        n_same += drafts[row].tolist() == expected
    assert n_same >= len(rows) - 2  # of two suffixes with one entry, the table keeps one
    assert (drafts >= 0).any(0).all()


def test_texts_in_parts_and_at_once_make_the_same_table() -> None:
    texts = random_texts(random.Random(3), 3, 60)
    tables = [entered(texts, NgramTable.empty(24, CPU), at_once) for at_once in (1, 8, 60)]
    for table in tables[1:]:
        assert torch.equal(table.counts[:-1], tables[0].counts[:-1])
        assert torch.equal(table.tokens[:-1], tables[0].tokens[:-1])
    tables[0].clear()
    assert not tables[0].counts.any()


def compare_drafts(device: str, n_rows: int, n_tokens: int) -> None:
    from areno.kernels.sampling import drafts, triton_drafts

    rng = random.Random(1)
    texts = random_texts(rng, 4, 80)
    table = entered(texts, NgramTable.empty(16, torch.device(device)))
    rows = [(scope, [*before, *tokens][: rng.randrange(70)]) for scope, before, tokens in random_texts(rng, 4, n_rows)]
    params = [GREEDY if number % 3 == 0 else SamplingParams() for number in range(n_rows)]
    sampler, slots = settings_of(n_rows + 1, 100, params, device)
    given = (
        contexts_of([text for _, text in rows]).to(device),
        torch.tensor([scope for scope, _ in rows], device=device),
        slots,
        torch.arange(n_rows, device=device) % 5,
        sampler.tensors,
        n_tokens,
    )
    found, expected = triton_drafts.draft_tokens(table, *given), drafts.draft_tokens(table, *given)
    assert torch.equal(found, expected)
    assert (expected[:, -1] >= 0).any()
    if n_rows > 8:
        assert (expected < 0).any()


@pytest.mark.slow
def test_the_kernel_drafts_as_torch_does() -> None:
    run_interpreted("from tests.engine.decoder.test_drafts import compare_drafts; compare_drafts('cpu', 24, 4)")


@pytest.mark.gpu
def test_the_kernel_drafts_as_torch_does_on_the_gpu() -> None:
    compare_drafts("cuda", 300, 7)
    texts = random_texts(random.Random(5), 3, 200)
    on_cpu, on_gpu = (entered(texts, NgramTable.empty(14, torch.device(name)), 50) for name in ("cpu", "cuda"))
    for name in ("tags", "counts", "tokens"):
        assert torch.equal(vars_of(on_cpu)[name][:-1], vars_of(on_gpu)[name][:-1].cpu())


def vars_of(table: NgramTable) -> dict[str, torch.Tensor]:
    return {"tags": table.tags, "counts": table.counts, "tokens": table.tokens}


def test_drafts_agree_with_a_policy_whose_shares_they_know() -> None:
    """A policy that draws one of four tokens with probability 1/4 each: a guess is right in 1/4 of the cases."""
    table = entered([(5, [1, 2, 3], [token]) for token in (10, 20, 30, 40) * 2], NgramTable.empty(20, CPU))
    sampler, slots = settings_of(301, 50, [SamplingParams()] * 300, "cpu")
    sampler.tensors.key[slots] = torch.tensor([sample_keys(3, [number])[0] for number in range(300)])
    contexts, zeros = contexts_of([[1, 2, 3]] * 300), torch.zeros(300, dtype=torch.int64)
    drafts = draft_tokens(table, contexts, zeros + 5, slots, zeros, sampler.tensors, 1)[:, 0]
    drawn = 10 * (1 + (4 * uniform(sampler.tensors.key[slots], zeros)).long())
    assert torch.equal(drafts, drawn)
    assert len(set(drafts.tolist())) == 4


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
            found = [(before, tokens.tolist()) for before, tokens in memory.samples(number)]
            assert found == [(before, tokens) for of, before, tokens in kept if of == number]
        assert memory.n_tokens == size_of(kept)
    memory.clear()
    assert memory.samples(3) == []


def size_of(samples: list[tuple[int, list[int], list[int]]]) -> int:
    return sum(len(before) + len(tokens) + 64 for _, before, tokens in samples)


def sequence(
    tokens: list[int], prompt: list[int] | None = None, scope: int | None = None, request_id: int = 0
) -> Sequence:
    item = GenerationRequest(request_id=request_id, prompt=prompt or [1, 2, 3, 4], draft_scope=scope)
    made = Sequence(request=item, sample=0, key=0, max_new=10_000, stop_ids=frozenset(), tokens=[*item.prompt])
    made.tokens += tokens
    made.logprobs += [-1.0] * len(tokens)
    made.versions += [0] * len(tokens)
    return made


class Batch:
    """A drafter, and sequences in the slots of a batch, which get a token after the other or all of a completion."""

    def __init__(self, **how: Any):
        self.drafter = NgramDrafter(CPU, table_bits=18, **how)
        self.drafter.begin_rollout(COSTS)
        self.table = SlotTable(16)
        self.n_joined = 0

    def join(self, each: Sequence) -> Sequence:
        each.enter_batch(self.table, self.n_joined)
        self.n_joined += 1
        return each

    def finish(self, each: Sequence) -> None:
        self.drafter.learn_finished([self.join(each)])

    def propose(self, rows: list[Sequence], n: int) -> Any:
        """Proposals of n tokens, whatever the lengths of earlier drafts say."""
        self.drafter.length.next_length = lambda *_, **__: n  # type: ignore[method-assign]
        assert self.drafter.should_draft(len(rows))
        return self.drafter.propose(rows)

    def drafts(self, rows: list[Sequence], n: int = 7) -> list[list[int]]:
        made = self.propose(rows, n)
        sampler, slots = settings_of(len(self.table.owner) + 1, 100, [GREEDY] * len(rows), "cpu")
        sampler.tensors.greedy[:] = True
        contexts = torch.from_numpy(made.contexts_BW[:, ::-1].T.copy())
        found = draft_tokens(
            self.drafter.table, contexts, torch.from_numpy(made.scopes_B), slots, slots, sampler.tensors, n
        )
        return [[token for token in draft if token >= 0] for draft in found.tolist()]


COMPLETION = list(range(20, 30))


def test_other_samples_and_earlier_rollouts_of_the_prompt_are_drafts() -> None:
    batch = Batch()
    batch.finish(sequence(COMPLETION))
    new, other_prompt = batch.join(sequence([])), batch.join(sequence([], [9, 2, 3, 4]))
    draft, none = batch.drafts([new, other_prompt])
    assert draft == COMPLETION[:7]
    assert none == COMPLETION[:7][: len(none)]  # the last tokens of another prompt are the same: levels of all scopes
    batch.drafter.begin_rollout(COSTS)
    batch.table = SlotTable(16)
    assert batch.drafts([batch.join(sequence(COMPLETION[:4]))]) == [COMPLETION[4:]]
    # The memory has them when the table has not.
    batch.drafter.table.clear()
    batch.drafter._n_entered = 1 << 30
    batch.drafter.begin_rollout(COSTS)
    batch.table = SlotTable(16)
    assert batch.drafts([batch.join(sequence(COMPLETION[:3]))]) == [COMPLETION[3:]]


def test_a_drafter_that_does_not_remember_forgets() -> None:
    batch = Batch(remembers=False)
    batch.finish(sequence(COMPLETION))
    batch.drafter.begin_rollout(COSTS)
    assert batch.drafts([batch.join(sequence(COMPLETION[:4]))]) == [[]]
    assert batch.drafter.memory.samples(hash((1, 2, 3, 4))) == []


def test_prompts_and_other_turns_of_a_scope_are_drafts() -> None:
    batch, call = Batch(), list(range(30, 38))
    first = list(range(100, 300))
    batch.finish(sequence([*call, 50, 51], first, scope=-5))
    later = [*first, *call, 50, 51, *range(500, 560)]
    turn, stranger = (
        batch.join(sequence([60, *call[:2]], later, scope=-5)),
        batch.join(sequence([60, 30], [70], scope=7)),
    )
    of_turn, of_stranger = batch.drafts([turn, stranger])
    assert of_turn == [*call[2:], 50][: len(of_turn)]
    assert len(of_turn) == 7
    assert of_stranger == []  # two tokens count only in the same scope
    n_before = batch.drafter._n_entered
    batch.drafts([batch.join(sequence([], [*later, 5, *range(600, 610)], scope=-5))])
    assert batch.drafter._n_entered - n_before < 64 + 80  # of a prompt that goes on, the new part alone is entered


def test_running_samples_are_entered_now_and_then() -> None:
    batch = Batch()
    row = batch.join(sequence([*COMPLETION, 5, 6]))
    batch.drafts([row])
    row.tokens += COMPLETION[:3]
    row.logprobs += [-1.0] * 3
    row.versions += [0] * 3
    batch.table.n_new[row.slot] += 3
    assert batch.drafts([row]) == [[*COMPLETION[3:]]]


def test_tokens_that_were_sampled_are_the_next_context() -> None:
    batch = Batch()
    row = batch.join(sequence(COMPLETION))
    made = batch.propose([row], 3)
    assert made.contexts_BW[0].tolist() == [3, 4, *COMPLETION]
    made.verified(made, np.array([[1, 2, 3, 4]]), np.array([2]), np.array([[True, False, False]]))
    batch.table.n_new[row.slot] += 2
    assert batch.drafter.propose([row]).contexts_BW[0].tolist() == [*COMPLETION, 1, 2]
    assert batch.drafter.length._tried.tolist()[:3] == [1, 1, 0]
    assert batch.drafter.length._right.tolist()[:3] == [1, 0, 0]


def test_rows_are_accepted_up_to_the_first_wrong_draft_a_stop_token_or_the_limit() -> None:
    tokens = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 9, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    inputs = np.array([[1, 5, 6, 7], [1, 5, 3, 7], [1, 5, 9, 7], [1, 5, -1, -1], [-2, -2, -2, -2]])
    stops = np.array([[-1, -1], [2, -1], [2, 9], [2, -1], [2, -1]])
    right, counts, stopped = find_accepted_tokens(tokens, inputs, stops)
    assert counts.tolist() == [4, 2, 2, 2, 0]
    assert stopped.tolist() == [False, False, True, False, False]
    assert right.tolist()[:2] == [[True, True, True], [True, False, False]]


def test_a_rollout_that_does_not_draft_only_notes_its_samples() -> None:
    batch = Batch()
    drafter = batch.drafter
    for number in range(500):
        batch.n_joined = 0
        batch.finish(sequence([5] * 20_000, request_id=number))
    assert drafter.memory.n_tokens == 0
    assert sum(len(tokens) for _, tokens, _ in drafter._finished) == drafter._n_finished <= 1 << 22
    assert drafter._finished[-1][0].request_id == 499


def test_before_a_try_the_texts_are_entered_in_small_parts() -> None:
    batch = Batch(prepares=True)
    drafter = batch.drafter
    for number in range(40):
        batch.n_joined = 0
        batch.finish(sequence([*COMPLETION, *range(100, 400)], request_id=number))
    batch.table, batch.n_joined = SlotTable(16), 0
    rows = [batch.join(sequence(COMPLETION[:4], [7, 2, 3, number], request_id=100 + number)) for number in range(16)]
    drafter.length.count_accepted_by_position(
        np.array([40.0]), np.array([0.0])
    )  # too few to know well that drafts are wrong
    counts: list[tuple[int, int]] = []
    while not drafter.should_draft(len(rows)):
        assert len(counts) < 20
        assert drafter.length.awaits_texts
        before = len(drafter._finished), drafter._n_entered
        drafter.prepare_table(rows)
        counts.append((before[0] - len(drafter._finished), drafter._n_entered - before[1]))
    assert [n for n, _ in counts][:4] == [16, 16, 8, 0]
    assert max(n for _, n in counts) < (1 << 12) + 310
    assert sum(n for _, n in counts) == 40 * 310 + 16 * 4
    assert 4 <= len(counts) < 8
    n_entered = drafter._n_entered
    assert batch.drafts(rows)[0] == [*COMPLETION, 100][4:]
    assert drafter._n_entered == n_entered + 16 * 4  # what the rows have sampled
    drafter.prepare_table(rows)  # no try is due
    assert drafter._n_entered == n_entered + 16 * 4


@pytest.mark.parametrize("steps_of_rollout", [3, 1000])
def test_drafts_are_tried_although_new_samples_arrive_in_each_step(steps_of_rollout: int) -> None:
    batch = Batch(prepares=True)
    drafter = batch.drafter
    drafter.length.count_accepted_by_position(np.array([40.0]), np.array([0.0]))
    n_steps = 0
    while not drafter.should_draft(200):
        assert n_steps < 100
        for number in range(16):
            batch.n_joined = 0
            batch.finish(sequence(COMPLETION, request_id=16 * n_steps + number))
        batch.n_joined = 0
        drafter.prepare_table([batch.join(sequence([], request_id=5000 + n_steps))])
        n_steps += 1
        if n_steps % steps_of_rollout == 0:
            drafter.begin_rollout(COSTS)
            drafter.length.count_accepted_by_position(np.array([20.0]), np.array([0.0]))
            drafter.should_draft(200)
    assert n_steps == 64


def test_a_cpu_tries_drafts_without_preparation() -> None:
    drafter = Batch().drafter
    drafter.length.count_accepted_by_position(np.array([40.0]), np.array([0.0]))
    assert drafter.should_draft(16)


@pytest.mark.parametrize("is_settled", [False, True])
@pytest.mark.parametrize("n_staged", [0, 3, 11, 12, 13])
@pytest.mark.parametrize("n_prompt", [1, 4, 20])
def test_contexts_are_the_last_tokens_wherever_these_are_kept(n_prompt: int, n_staged: int, is_settled: bool) -> None:
    batch = Batch()
    batch.drafts([batch.join(sequence(list(range(500, 530))))])  # the slot had another text before
    batch.n_joined = 0
    row = batch.join(sequence(COMPLETION[:2], list(range(60, 60 + n_prompt))))
    slots = np.array([row.slot])
    expected = [*range(60, 60 + n_prompt), *COMPLETION[:2], *range(100, 100 + n_staged)]
    for token in range(100, 100 + n_staged):
        batch.table.stage(slots, np.array([token]), np.array([-1.0]), 0)
    assert row.tokens_from(1).tolist() == expected[1:]
    if is_settled:
        row.append_staged()
    found = batch.propose([row], 1).contexts_BW[0].tolist()
    assert found == ([-1] * 12 + expected)[-12:]
    assert row.tokens_from(len(expected) - 1).tolist() == expected[-1:]


def test_requests_with_a_scope_are_not_kept() -> None:
    batch = Batch()
    batch.drafts([batch.join(sequence(COMPLETION, scope=3)), batch.join(sequence(COMPLETION, [9, 9]))])
    assert len(batch.drafter._requests) == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_second_rollout_of_the_same_samples_takes_fewer_steps(runs_ahead: bool) -> None:
    requests = [request(i, 9, n_samples=2, max_new_tokens=40) for i in (1, 2, 3)]
    n_steps: list[int] = []
    results: list[Outputs] = []
    drafter = NgramDrafter(CPU)
    decoder = make_decoder(model(), drafter=drafter, runs_ahead=runs_ahead)
    schedule = decoder._scheduler.schedule
    decoder._scheduler.schedule = lambda *given: n_steps.append(1) or schedule(*given)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        drafter.begin_rollout(StepCosts(fixed=100, verification=1, most_rows=128))
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
    drafter = NgramDrafter(CPU)
    drafter.begin_rollout(COSTS)
    drafter.should_draft = lambda n_running: False  # type: ignore[method-assign]
    decoder = make_decoder(model(), drafter=drafter)
    decoder.submit(request(1, 9, n_samples=3, max_new_tokens=20))
    outputs = run(decoder)
    assert all(isinstance(vars(each)["tokens"], np.ndarray) for each in outputs.values())
    assert decoder.stats.decode_steps == 19
    assert decoder.stats.draft_steps == 0
