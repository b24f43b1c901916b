"""Sampling: the random numbers against big-integer arithmetic, the draws against the distribution they are from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from areno.engine.decoder.sampler import LogitEdits, SlotSampler
from areno.engine.decoder.sequence import Sequence
from areno.kernels.sampling.random_keys import sample_keys, uniform
from areno.kernels.sampling.reference import SamplingFlags, sample_tokens
from areno.types import GenerationRequest, SamplingParams
from tests.helpers.exact_logits import logits_to_score
from tests.helpers.interpreted import run_interpreted
from tests.helpers.slot_samplers import PLAIN, Texts, settings_of


def draw(
    logits_BV: Tensor,
    uniform_B: Tensor,
    *,
    temperature: float = 1.0,
    greedy: bool = False,
    top_k: int | None = None,
    top_p: float | None = None,
    edited: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` with the same settings for every row."""
    n = len(uniform_B)
    truncates = top_k is not None or top_p is not None
    return sample_tokens(
        logits_BV,
        torch.full((n,), temperature),
        torch.full((n,), greedy),
        uniform_B,
        top_k_B=torch.full((n,), -1 if top_k is None else top_k) if truncates else None,
        top_p_B=torch.full((n,), 1.0 if top_p is None else top_p) if truncates else None,
        edited_BV=edited,
    )


def grid(n: int) -> Tensor:
    """n numbers spread evenly over [0, 1): each token gets its share of them, give or take one."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def test_uniform_is_splitmix64() -> None:
    def reference(key: int, position: int) -> float:
        word = (1 << 64) - 1
        value = (key + (position + 1) * 0x9E3779B97F4A7C15) & word
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        return ((value ^ (value >> 31)) >> 11) / 2**53

    keys = [sample_keys(seed, [sample])[0] for seed in (0, 1, -5, 2**63 + 9) for sample in (0, 1, 300)]
    assert len(set(keys)) == 12
    for position in (0, 1, 77, 40_000):
        got = uniform(torch.tensor(keys), torch.full((12,), position))
        assert got.tolist() == [reference(key, position) for key in keys]


def test_uniform_is_uniform_over_positions_samples_and_seeds() -> None:
    positions = torch.arange(20_000)
    for key in (
        torch.full_like(positions, sample_keys(3, [0])[0]),
        torch.tensor([sample_keys(3, [i])[0] for i in range(20_000)]),
    ):
        values = uniform(key, positions)
        counts = torch.histc(values, 50, 0, 1)
        chi_square = ((counts - 400) ** 2 / 400).sum().item()
        assert chi_square < 95  # 49 degrees of freedom: 1 in 10,000
        assert abs(torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1].item()) < 0.03


@pytest.mark.parametrize(("vocab", "temperature"), [(7, 1.0), (128, 0.7), (300, 2.5), (300, 1.0)])
def test_frequencies_are_those_of_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    n = 40_000
    tokens, logprobs = draw(logits.expand(n, -1), grid(n), temperature=temperature)
    expected = (logits.double() / temperature).softmax(-1)
    counts = tokens.bincount(minlength=vocab).double()
    assert (counts - n * expected).abs().max() <= 1.01
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=2e-6, rtol=0)


def test_hashed_draws_pass_a_chi_square_test() -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(1))
    n = 20_000
    keys = torch.tensor([sample_keys(9, [i])[0] for i in range(n)])
    tokens, _ = draw(logits.expand(n, -1), uniform(keys, torch.zeros_like(keys)))
    expected = n * logits.double().softmax(-1)
    chi_square = ((tokens.bincount(minlength=16) - expected) ** 2 / expected).sum().item()
    assert chi_square < 45  # 15 degrees of freedom: 1 in 10,000


def test_large_vocabulary_keeps_its_tail() -> None:
    vocab, n = 151_936, 64
    logits = torch.full((1, vocab), 0.0)
    tokens, logprobs = draw(logits.expand(n, -1), grid(n))
    expected = (grid(n) * vocab).long()
    assert (tokens - expected).abs().max() == 0
    assert logprobs.tolist() == pytest.approx([-torch.log(torch.tensor(float(vocab))).item()] * n, abs=1e-5)
    edge, _ = draw(logits.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert edge.tolist() == [0, vocab - 1]


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[:, [40, 41, 200]] = torch.tensor([0.0, 1.0, -1.0])
    extremes = torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    tokens, logprobs = draw(logits, extremes)
    assert tokens.tolist() == [40, 40, 200, 41]
    assert logprobs.isfinite().all()
    underflowing = torch.zeros(3, 300)
    underflowing[:, 7] = 500.0
    assert draw(underflowing, extremes[:3])[0].tolist() == [7, 7, 7]


def test_greedy_takes_the_best_with_the_logprob_of_its_temperature() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    for temperature in (1.0, 0.5):
        tokens, logprobs = draw(logits, grid(2), greedy=True, temperature=temperature, top_k=1)
        assert tokens.tolist() == [1, 0]
        expected = (logits / temperature).log_softmax(-1)[[0, 1], [1, 0]]
        torch.testing.assert_close(logprobs, expected)


def support(probs: Tensor, top_k: int | None, top_p: float | None) -> set[int]:
    """Worked by hand: sort, cut to k, renormalise, take tokens until their share reaches p."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i].item())[: top_k or len(probs)]
    total = sum(probs[i].item() for i in order)
    kept: set[int] = set()
    share = 0.0
    for i in order:
        if top_p is not None and share >= top_p * total:
            break
        kept.add(i)
        share += probs[i].item()
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, None), (5, None), (500, None), (None, 0.5), (None, 0.93), (None, 1e-6), (7, 0.6), (3, 1.0)]
)
def test_truncation_keeps_the_right_tokens_in_proportion(top_k: int | None, top_p: float | None) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(4)) * 3
    n = 20_000
    probs = logits.double().softmax(-1)
    kept = support(probs, top_k, top_p)
    tokens, logprobs = draw(logits.expand(n, -1), grid(n), top_k=top_k, top_p=top_p)
    inside = torch.zeros(200, dtype=torch.float64)
    inside[list(kept)] = 1
    expected = probs * inside / (probs * inside).sum()
    assert set(tokens.tolist()) <= kept
    assert (tokens.bincount(minlength=200) - n * expected).abs().max() <= 1.01
    torch.testing.assert_close(logprobs.double(), probs.log()[tokens], atol=2e-6, rtol=0)  # before truncation


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    logits = torch.tensor([3.0, 2.9, 2.8, 2.7, *[2.6] * 60]).expand(100, -1)
    assert set(draw(logits, grid(100), top_k=4, top_p=0.5)[0].tolist()) == {0, 1}
    assert set(draw(logits, grid(100), top_k=4, top_p=1.0)[0].tolist()) == {0, 1, 2, 3}
    assert len(set(draw(logits, grid(100), top_p=0.5)[0].tolist())) > 20


def test_rows_without_truncation_draw_the_same_beside_rows_with_it() -> None:
    logits = torch.randn(64, 90, generator=torch.Generator().manual_seed(2))
    alone, _ = draw(logits, grid(64))
    top_k = torch.full((64,), -1)
    top_k[::2] = 3
    mixed, _ = sample_tokens(
        logits, torch.ones(64), torch.zeros(64, dtype=torch.bool), grid(64), top_k_B=top_k, top_p_B=torch.ones(64)
    )
    assert mixed[1::2].tolist() == alone[1::2].tolist()
    assert mixed[::2].tolist() != alone[::2].tolist()


def test_edited_logits_are_drawn_from_and_logprobs_do_not_know_of_it() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(1000, 1)
    edited = logits.clone()
    edited[:, [0, 2]] = -torch.inf
    tokens, logprobs = draw(logits, grid(1000), edited=edited)
    share = logits[0, [1, 3]].softmax(-1)[0].item()
    assert set(tokens.tolist()) == {1, 3}
    assert (tokens == 1).sum().item() == pytest.approx(1000 * share, abs=1.01)
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[tokens])
    assert set(draw(logits, grid(1000), edited=edited, greedy=True)[0].tolist()) == {1}
    logits[:, 0] = 1000.0  # beside it the rest weighs nothing, but it is banned
    assert set(draw(logits, grid(1000), edited=edited)[0].tolist()) == {1, 3}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 2, "top_p": 0.5}, {"greedy": True}])
def test_non_finite_logits_are_told_by_a_nan_logprob(poison: float, options: dict) -> None:
    logits = torch.zeros(3, 130)
    logits[1, 129] = poison
    tokens, logprobs = draw(logits, grid(3), **options)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((tokens >= 0) & (tokens < 130)).all()


def test_settings_travel_to_their_slots() -> None:
    def sequence(slot: int, key: int, params: SamplingParams) -> Sequence:
        request = GenerationRequest(request_id=slot, prompt=[1], params=params)
        made = Sequence(request=request, sample=0, key=key, max_new=1, stop_ids=frozenset(), tokens=[1])
        made.slot = slot
        return made

    slot_sampler = SlotSampler(5, 300, torch.device("cpu"))
    hot = sequence(2, sample_keys(7, [1])[0], SamplingParams(temperature=0.3, top_k=5, top_p=0.9))
    cold = sequence(0, -3, SamplingParams(temperature=0.0))
    best = sequence(3, 9, SamplingParams(greedy=True, temperature=0.4, top_k=5))
    slot_sampler.assign_settings(torch.from_numpy(SlotSampler.pack_settings([hot, cold, best])))
    settings = slot_sampler.tensors
    assert settings.key[[2, 0]].tolist() == [sample_keys(7, [1])[0], -3]
    # The log-probability of a greedy draw is at its temperature; only temperature 0 stands for 1.
    assert settings.temperature[[2, 0, 3]].tolist() == pytest.approx([0.3, 1.0, 0.4])
    assert settings.top_k[[2, 0, 3]].tolist() == [5, -1, -1]
    assert settings.top_p[[2, 0]].tolist() == pytest.approx([0.9, 1.0])
    assert settings.greedy.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("texts", [((0, 290),), ((3, 100), (120, 290))])
def test_ids_without_a_text_are_never_drawn_and_keep_their_share_of_the_logprobs(texts: Texts) -> None:
    vocab, n = 300, 400
    gen, has_text = torch.Generator().manual_seed(5), torch.zeros(vocab, dtype=torch.bool)
    for first, end in texts:
        has_text[first:end] = True
    logits = torch.randn(1, vocab, generator=gen)
    lead = torch.where(has_text, logits, logits + 9)  # in most draws an id without a text would win
    params = [
        SamplingParams(temperature=0.7),
        SamplingParams(greedy=True),
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.9),
        SamplingParams(min_new_tokens=100),
        SamplingParams(frequency_penalty=1.0),
    ]
    for params_of_all in params:
        sampler, slots = settings_of(n + 2, vocab, [params_of_all] * n, "cpu", texts)
        flags = SamplingFlags(
            filtered=params_of_all.top_k > 0 or params_of_all.top_p < 1,
            n_banned=sampler.tensors.banned.shape[1],
            penalized=sampler.tensors.counts is not None,
        )
        for given in (logits, lead):
            rows = given.repeat(n, 1)
            tokens, logprobs = sampler.sample(rows, slots, torch.zeros_like(slots), flags)
            assert has_text[tokens.long()].all()
            temperature = params_of_all.temperature
            expected = (given.double() / temperature).log_softmax(-1)[0, tokens.long()]  # over all ids
            torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)
    kept = torch.where(has_text, logits, -torch.inf)
    sampler, slots = settings_of(n + 2, vocab, [SamplingParams(top_p=0.5)] * n, "cpu", texts)
    drawn = sampler.sample(lead.repeat(n, 1), slots, torch.zeros_like(slots), SamplingFlags(filtered=True))[0]
    assert set(drawn.long().tolist()) <= support(kept[0].double().softmax(-1), None, 0.5)  # of what has a text


def test_ids_that_all_have_a_text_change_no_draw() -> None:
    logits, n = torch.randn(50, 300, generator=torch.Generator().manual_seed(6)), 50
    drawn = []
    for texts in ((), ((0, 300),), ((0, 512),)):
        sampler, slots = settings_of(n + 2, 300, [SamplingParams()] * n, "cpu", texts)
        assert sampler.tensors.texts is None
        drawn.append(sampler.sample(logits, slots, torch.zeros_like(slots), SamplingFlags()))
    assert all(torch.equal(each, drawn[0]) for each in drawn)


def test_min_p_is_relative_to_an_id_with_a_text() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 299], logits[0, 5] = 50.0, 3.0
    sampler, slots = settings_of(3, 300, [SamplingParams(min_p=0.5)], "cpu", ((0, 290),))
    edits = LogitEdits(torch.tensor([0]), None, torch.zeros(1), torch.zeros(1), torch.tensor([0.5]), 0)
    edited = edits.apply(logits, slots, torch.zeros_like(slots), sampler, SamplingFlags())
    assert edited[0, :290].isfinite().nonzero().tolist() == [[5]]


FILTERED = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7, temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=40, top_p=0.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=1e-320),  # 0 in float32
    SamplingParams(top_k=10_000_000),
    SamplingParams(top_p=0.999),
    SamplingParams(top_k=9, top_p=0.5, temperature=30.0),  # the share is of nine nearly equal tokens
    SamplingParams(top_k=100, top_p=0.9, temperature=0.6),
]
EDITED = [
    SamplingParams(min_new_tokens=4),
    SamplingParams(min_new_tokens=100, greedy=True),
    SamplingParams(frequency_penalty=1.5),
    SamplingParams(frequency_penalty=-2, temperature=0.5),
    SamplingParams(min_new_tokens=100, frequency_penalty=0.7, top_k=20, top_p=0.8),
]


def compare_triton(device: str) -> None:
    """The kernels against the torch form on the same device. Run in a process of its own where interpreted."""
    from areno.kernels.sampling import reference
    from areno.kernels.sampling.triton import sample_slots as by_triton

    on_gpu = device == "cuda"
    few = PLAIN + FILTERED[:4] + EDITED[1::3]
    cases = [  # few, because the interpreter is slow
        (PLAIN, 150, 64, ()),
        (PLAIN + FILTERED + EDITED, 150, 64, ()),
        (PLAIN, 150, 64, ((0, 100),)),
        (few, 150, 64, ((2, 70), (80, 141))),
    ]
    if on_gpu:
        every = PLAIN + FILTERED + EDITED
        cases = [(PLAIN * 50, 151_936, 4096, ()), (every * 15, 151_936, 4096, ()), (every * 9, 3001, 512, ())]
        cases += [(PLAIN * 50, 151_936, 4096, ((0, 151_665),)), (every * 9, 3001, 512, ((4, 1500), (1600, 2990)))]
    for rows, vocab, span, texts in cases:
        gen = torch.Generator().manual_seed(vocab)
        logits = torch.randn(len(rows), vocab, generator=gen) * 3
        logits[1::3] = (logits[1::3] * 2).round() / 2  # equals at the border of what is kept
        logits[2::5, vocab // 2 :] = -torch.inf
        logits[:, 7] = 9.0  # a token that would be drawn often, were it not banned
        has_text = torch.tensor([not texts or any(first <= t < end for first, end in texts) for t in range(vocab)])
        logits[::3, ~has_text] = 12.0
        slot_sampler, slots = settings_of(len(rows) + 2, vocab, rows, device, texts)
        expecting = settings_of(len(rows) + 2, vocab, rows, device, texts)[0].tensors
        has_text = has_text.to(device)
        logits = logits.to(device)
        flags = SamplingFlags(
            filtered=any(row.top_k > 0 or row.top_p < 1 for row in rows),
            n_banned=expecting.banned.shape[1],
            penalized=expecting.counts is not None,
        )
        n_different = 0
        for position in range(20 if on_gpu else 2):
            strided = torch.nn.functional.pad(logits, (0, 5), value=1e9)[:, :vocab]
            positions = torch.arange(len(rows), device=device) % 6 + position
            got = by_triton(strided, slots, positions, slot_sampler.tensors, flags, span=span)
            expected = reference.sample_slots(logits, slots, positions, expecting, flags)
            assert torch.equal(slot_sampler.tensors.last_token[slots], got[0].long())
            assert has_text[torch.cat((got[0], expected[0])).long()].all()
            same = got[0] == expected[0]
            torch.testing.assert_close(got[1][same], expected[1][same], atol=1e-5, rtol=0)
            n_different += int((~same).sum())
            if expecting.counts is not None and slot_sampler.tensors.counts is not None:
                slot_sampler.tensors.counts.copy_(
                    expecting.counts
                )  # what follows shall not depend on a rare other draw
        assert n_different <= len(rows) * 20 // 1000, n_different
        for poison in (torch.nan, torch.inf):
            n = len(rows) if on_gpu else 3
            poisoned = logits[:n].clone()
            poisoned[0, vocab - 1] = poison
            got = by_triton(poisoned, slots[:n], slots[:n], slot_sampler.tensors, flags, span=span)
            assert got[1].isnan().tolist() == [True] + [False] * (n - 1)
            assert ((got[0] >= 0) & (got[0] < vocab)).all()


@pytest.mark.slow
def test_triton_kernels_in_the_interpreter_draw_what_torch_draws() -> None:
    run_interpreted("from tests.engine.decoder.test_sampler import compare_triton; compare_triton('cpu')")


@pytest.mark.gpu
def test_triton_kernels_on_the_gpu_draw_what_torch_draws() -> None:
    compare_triton("cuda")


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("n_valid", [8, 5])
def test_exact_logprobs_are_of_rows_as_far_apart_as_in_training(n_valid: int, overwrites: bool) -> None:
    """The second of two ranks, of gathered logits: the order of a kernel's sums depends on the distance of rows."""
    gathered = torch.randn(3, 16)
    local = gathered[:, 8 : 8 + n_valid]
    found = logits_to_score(local, 8, overwrites)
    assert torch.equal(found, local)
    assert found.stride() == (8, 1)
    assert logits_to_score(local, 8, overwrites, is_exact=False) is local


def test_exact_logits_are_copied_only_if_sampling_overwrites_them() -> None:
    logits = torch.randn(3, 8)[:, :5]
    assert logits_to_score(logits, 8) is logits
    copied = logits_to_score(logits, 8, overwrites=True)
    assert copied.stride() == (8, 1)
    assert torch.equal(copied, logits)
    assert copied.data_ptr() != logits.data_ptr()
