"""The divergence from a teacher inside the chunked head, against plain float64 formulas over the whole vocabulary."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest
import torch

from areno.config.teacher import Divergence
from areno.kernels.logprobs import VocabSoftmax, selected_logprobs
from areno.kernels.logprobs.divergence import CommonTokenIds, FullVocabTeacher, TopKTeacher
from areno.kernels.matmul import float32_matmul
from tests.helpers.interpreted import run_interpreted
from tests.helpers.thread_ranks import ThreadRanks

K, V, D, E = 23, 37, 8, 5
KINDS = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd", 0.5), Divergence("jsd", 0.1)]
KINDS += [Divergence("tv")]
TEACHER, STUDENT = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)  # p and q of the worked example


def formula(p, q, kind, beta):
    """Of the distributions in the last dimension, in the words of the papers."""

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    if kind == "tv":
        return (p - q).abs().sum(-1) / 2
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def bucketed(p, tokens):
    """The probabilities of some tokens, and of all others together."""
    listed = p.gather(-1, tokens)
    return torch.cat((listed, 1 - listed.sum(-1, keepdim=True)), -1)


def inputs(dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    made = {"hidden": draw(K, D), "weight": draw(V, D), "their_hidden": draw(K, E), "their_weight": draw(V, E)}
    made = {name: x.to(dtype) for name, x in made.items()}
    return made, torch.randint(0, V, (K,), generator=rng), draw(K), draw(K)


def expected(made, targets, of_logprob, of_divergence, temperature, divergence, listed=None, ids=None):
    """Log-probabilities, divergences and gradients, by autograd in float64."""
    hidden, weight = (made[name].detach().double().requires_grad_() for name in ("hidden", "weight"))
    logits = hidden @ weight.t() / temperature
    theirs = made["their_hidden"].double() @ made["their_weight"].double().t() / temperature
    logq = torch.log_softmax(logits, -1)
    chosen, q, p = logq[torch.arange(K), targets], logq.exp(), torch.softmax(theirs, -1)
    if ids is not None:
        q, p = torch.softmax(logits[:, ids], -1), torch.softmax(theirs[:, ids], -1)
    if listed is not None:
        p, q = bucketed(p, listed), bucketed(q, listed)
    found = formula(p, q, divergence.kind, divergence.beta)
    (chosen * of_logprob + found * of_divergence).sum().backward()
    return chosen.detach(), found.detach(), hidden.grad, weight.grad


def teacher_of(made, divergence, temperature, listed=None):
    if listed is None:
        return FullVocabTeacher(
            made["their_hidden"], partial(float32_matmul, weight_OI=made["their_weight"]), divergence
        )
    logits = made["their_hidden"].double() @ made["their_weight"].double().t()
    return TopKTeacher(listed, torch.log_softmax(logits / temperature, -1).gather(1, listed), divergence)


def most_likely(made, n):
    return (made["their_hidden"].double() @ made["their_weight"].double().t()).topk(n).indices


def compare(dtype, tol, divergence, n_listed=None, keep=10**9, chunk=5, temperature=0.7):
    made, targets, *upstream = inputs(dtype)
    listed = None if n_listed is None else most_likely(made, n_listed)
    want = expected(made, targets, *upstream, temperature, divergence, listed)
    hidden, weight = made["hidden"].requires_grad_(), made["weight"].requires_grad_()
    teacher = teacher_of({name: x.detach() for name, x in made.items()}, divergence, temperature, listed)
    how = {"temperature": temperature, "chunk": chunk, "keep_bytes": keep}
    logprobs, entropy, found = selected_logprobs(hidden, weight, targets, VocabSoftmax(**how), teacher)
    (logprobs * upstream[0].to(logprobs.dtype) + found * upstream[1].to(found.dtype)).sum().backward()
    for got, wanted in zip((logprobs, found, hidden.grad, weight.grad), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=tol, rtol=tol)
    assert not entropy.requires_grad
    assert (found.detach() >= -tol).all()


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
@pytest.mark.parametrize("n_listed", [None, 1, 6])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_divergence_and_gradients_are_the_formula(divergence, n_listed, dtype, tol):
    compare(dtype, tol, divergence, n_listed)


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_an_absent_token_of_a_list_changes_nothing(divergence, n_ranks):
    """Lists of 3 tokens, and the same with an id of -1 between them, whose log-probability may be any number."""
    made, targets, *upstream = inputs()
    listed = most_likely(made, 3)
    one = teacher_of(made, divergence, 0.7, listed)
    absent = torch.full_like(listed[:, :1], -1)
    tokens = torch.cat((listed[:, :2], absent, listed[:, 2:]), 1)
    logprobs = torch.cat((one.logprobs_KJ[:, :2], absent * 0.5, one.logprobs_KJ[:, 2:]), 1)
    found = []
    for teacher in (one, TopKTeacher(tokens, logprobs, divergence)):
        shared, results = ([None] * n_ranks, threading.Barrier(n_ranks, timeout=20)), [None] * n_ranks

        def work(rank, teacher=teacher, shared=shared, results=results):
            hidden, weight = made["hidden"].clone().requires_grad_(), made["weight"].chunk(n_ranks)[rank]
            reduce = ThreadRanks(rank, shared).all_reduce if n_ranks > 1 else None
            head = VocabSoftmax(0.7, first=rank * len(made["weight"].chunk(n_ranks)[0]), all_reduce=reduce)
            values = selected_logprobs(hidden, weight, targets, head, teacher)[2]
            (values * upstream[1]).sum().backward()
            results[rank] = values.detach(), hidden.grad

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(results)
    for of_rank, other in zip(*found, strict=True):
        for value, wanted in zip(other, of_rank, strict=True):
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-12)


COMMON = [((0, 30),), ((2, 9), (12, 31)), ((20, 33),)]


def compare_common(dtype, tol, divergence, ranges, keep, n_ranks=1):
    """The student has 37 ids and the teacher 33, of which some are common."""
    made, targets, *upstream = inputs(dtype)
    made["their_weight"] = made["their_weight"][:33]
    ids = [token for first, end in ranges for token in range(first, end)]
    want = expected(made, targets, *upstream, 0.7, divergence, ids=ids)
    per_rank, results = -(-V // n_ranks), [None] * n_ranks
    shared = ([None] * n_ranks, threading.Barrier(n_ranks, timeout=200))

    def work(rank):
        first = rank * per_rank
        hidden = made["hidden"].clone().requires_grad_()
        weight = made["weight"][first : first + per_rank].clone().requires_grad_()
        theirs = partial(float32_matmul, weight_OI=made["their_weight"][first : first + per_rank])
        common = CommonTokenIds.from_ranges(ranges, first, max(0, min(33 - first, per_rank)), torch.device("cpu"))
        teacher = FullVocabTeacher(made["their_hidden"], theirs, divergence, common)
        how = {"temperature": 0.7, "chunk": 5, "keep_bytes": keep, "first": first, "most_rows": per_rank}
        if n_ranks > 1:
            how["all_reduce"] = ThreadRanks(rank, shared).all_reduce
        logprobs, _, found = selected_logprobs(hidden, weight, targets, VocabSoftmax(**how), teacher)
        (logprobs * upstream[0].to(logprobs.dtype) + found * upstream[1].to(found.dtype)).sum().backward()
        results[rank] = (logprobs.detach(), found.detach(), hidden.grad, weight.grad)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = (*results[0][:3], torch.cat([each[3] for each in results]))
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), wanted, atol=tol, rtol=tol)


@pytest.mark.parametrize("ranges", COMMON, ids=str)
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("keep", [0, 10**9])
def test_both_models_are_renormalized_over_common_ids(ranges, n_ranks, keep):
    for divergence in KINDS:
        compare_common(torch.float64, 1e-9, divergence, ranges, keep, n_ranks)


def plainly(x, y, kind, beta):
    logq, logp = x.log_softmax(-1), y.log_softmax(-1)
    if kind == "forward_kl":
        return (logp.exp() * (logp - logq)).sum(-1)
    if kind == "reverse_kl":
        return (logq.exp() * (logq - logp)).sum(-1)
    if kind == "tv":
        return (logp.exp() - logq.exp()).abs().sum(-1) / 2
    logm = torch.logaddexp(logp + math.log(beta), logq + math.log(1 - beta))
    return (beta * logp.exp() * (logp - logm) + (1 - beta) * logq.exp() * (logq - logm)).sum(-1)


def compare_accuracy(divergence, n=32, n_ids=600, deviations=(1, 22, 135)):
    """Root mean square errors of divergence and gradient in fp32, in those of plain torch in fp32."""
    for deviation in deviations:
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(n, n_ids, generator=rng) * deviation
        y = x + torch.randn(n, n_ids, generator=rng)
        teacher = FullVocabTeacher(y, torch.Tensor.clone, divergence)
        identity, targets = torch.eye(n_ids), torch.zeros(n, dtype=torch.int64)

        def ours(a, b, teacher=teacher, identity=identity, targets=targets):
            return selected_logprobs(a, identity, targets, VocabSoftmax(own_logits=torch.Tensor.clone), teacher)[2]

        by_torch, found = partial(plainly, kind=divergence.kind, beta=divergence.beta), []
        for function, dtype in ((by_torch, torch.float64), (by_torch, torch.float32), (ours, torch.float32)):
            hidden = x.to(dtype).clone().requires_grad_()
            values = function(hidden, y.to(dtype))
            values.sum().backward()
            found.append((values.detach().double(), hidden.grad.double()))
        for true, plain, own in zip(*found, strict=True):
            ratio = (own - true).square().mean() / (plain - true).square().mean()
            assert ratio <= 6, (deviation, ratio)  # about 4, which depends on the CPU


@pytest.mark.parametrize("divergence", KINDS[:3], ids=lambda d: d.kind)
def test_large_logits_are_as_accurate_as_in_plain_torch(divergence):
    compare_accuracy(divergence)


@pytest.mark.parametrize("kept_rows", [0, 1, 9, K])
@pytest.mark.parametrize("chunk", [1, 4, 4096])
@pytest.mark.parametrize("n_listed", [None, 3])
def test_neither_chunks_nor_what_is_kept_matter(kept_rows, chunk, n_listed):
    compare(torch.float64, 1e-9, KINDS[2], n_listed, keep=2 * kept_rows * V * 8 + 3, chunk=chunk)


@pytest.mark.parametrize(
    ("kind", "n_listed", "value"),
    [
        ("forward_kl", None, 0.085123),
        ("reverse_kl", None, 0.092033),
        ("jsd", None, 0.021901),
        ("forward_kl", 1, 0.082283),
    ],
)
def test_worked_example(kind, n_listed, value):
    """p = (.7, .2, .1) and q = (.5, .3, .2). The digits are those of the documentation; the formula has the rest."""
    p, q = (torch.tensor([each], dtype=torch.float64) for each in (TEACHER, STUDENT))
    identity, divergence = torch.eye(3, dtype=torch.float64), Divergence(kind)
    if n_listed is None:
        teacher, want = FullVocabTeacher(p.log(), lambda x: x.clone(), divergence), formula(p, q, kind, 0.5)
    else:
        listed = torch.tensor([[0]])
        teacher = TopKTeacher(listed, p.log()[:, :1], divergence)
        want = formula(bucketed(p, listed), bucketed(q, listed), kind, 0.5)
    found = selected_logprobs(q.log(), identity, torch.tensor([0]), None, teacher)[2]
    assert found.item() == pytest.approx(want.item(), abs=1e-12)
    assert round(found.item(), 6) == value


@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
@pytest.mark.parametrize("keep", [0, 10**9])
def test_equal_models_have_no_divergence_and_no_gradient(divergence, keep):
    made, targets, *_ = inputs(torch.float32)
    hidden, weight = made["hidden"].requires_grad_(), made["weight"].requires_grad_()
    same = partial(float32_matmul, weight_OI=weight.detach())
    teacher = FullVocabTeacher(hidden.detach(), same, divergence)
    found = selected_logprobs(hidden, weight, targets, VocabSoftmax(temperature=0.7, keep_bytes=keep), teacher)[2]
    found.sum().backward()
    assert not found.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_logprobs_have_the_bits_of_the_head_without_a_teacher():
    made, targets, of_logprob, _ = inputs(torch.float32)
    found = []
    for with_teacher in (False, True):
        hidden = made["hidden"].clone().requires_grad_()
        how = {"temperature": 0.7, "chunk": 4}
        if with_teacher:
            teacher = teacher_of(made, KINDS[0], 0.7)
            logprobs, entropy, _ = selected_logprobs(hidden, made["weight"], targets, VocabSoftmax(**how), teacher)
        else:
            logprobs, entropy = selected_logprobs(hidden, made["weight"], targets, VocabSoftmax(**how))
        (logprobs * of_logprob).sum().backward()
        found.append((logprobs, entropy, hidden.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_models_that_disagree_entirely_stay_finite():
    made, targets, *_ = inputs(torch.float32)
    for divergence in KINDS:
        for listed in (None, most_likely(made, 2)):
            hidden = (made["hidden"] * 1e3).requires_grad_()
            theirs = {**made, "their_hidden": made["their_hidden"] * -1e3}
            teacher = teacher_of(theirs, divergence, 1.0, listed)
            found = selected_logprobs(hidden, made["weight"], targets, None, teacher)[2]
            found.sum().backward()
            assert torch.isfinite(found).all()
            assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [37, 5])  # 5 over 4 ranks leaves the last rank with nothing but padding
@pytest.mark.parametrize("n_listed", [None, 3])
@pytest.mark.parametrize("divergence", [KINDS[0], KINDS[1], KINDS[3]], ids=lambda d: d.kind)
def test_divided_and_padded_vocabulary(size, vocab_size, n_listed, divergence):
    made, targets, *upstream = inputs()
    made = {name: x[:vocab_size] if "weight" in name else x for name, x in made.items()}
    targets = targets % vocab_size
    listed = None if n_listed is None else most_likely(made, n_listed)
    want = expected(made, targets, *upstream, 0.8, divergence, listed)
    per_rank = -(-vocab_size // size)
    shared, results = ([None] * size, threading.Barrier(size, timeout=200)), [None] * size

    def work(rank):
        first = min(rank * per_rank, vocab_size)
        mine = {
            name: x[first : first + per_rank].clone() if "weight" in name else x.clone() for name, x in made.items()
        }
        hidden, weight = mine["hidden"].requires_grad_(), mine["weight"].requires_grad_()
        teacher = teacher_of(mine, divergence, 0.8) if listed is None else teacher_of(made, divergence, 0.8, listed)
        how = {"temperature": 0.8, "chunk": 6, "first": first, "all_reduce": ThreadRanks(rank, shared).all_reduce}
        how |= {"keep_bytes": 9 * 16 * per_rank, "most_rows": per_rank}
        logprobs, _, found = selected_logprobs(hidden, weight, targets, VocabSoftmax(**how), teacher)
        (logprobs * upstream[0] + found * upstream[1]).sum().backward()
        results[rank] = (logprobs.detach(), found.detach(), hidden.grad, weight.grad)

    # The gradients of all results are computed in the threads, so autograd's own thread pool plays no part.
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logprobs, found, grad_hidden, _ in results:
        for got, wanted in zip((logprobs, found, grad_hidden), want[:3], strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(torch.cat([each[3] for each in results]), want[3], atol=1e-9, rtol=1e-9)


def compare_interpreted():
    """Run in a process of its own, since Triton decides at its import whether it interprets."""
    from areno.kernels.logprobs import triton

    triton._BLOCK = 128
    for divergence in (*KINDS[:3], *KINDS[-1:]):
        compare_accuracy(divergence, 8, 250, deviations=(22,))
    triton._BLOCK = 16
    for ranges in COMMON[:2]:
        compare_common(torch.float32, 1e-4, KINDS[2], ranges, 0)
    for divergence in KINDS:
        for keep in (0, 2000, 10**6):
            compare(torch.float32, 1e-4, divergence, keep=keep)
    compare(torch.float32, 1e-4, KINDS[0], n_listed=3)
    for divergence in KINDS:
        for keep in (0, 10**9):
            test_equal_models_have_no_divergence_and_no_gradient(divergence, keep)


@pytest.mark.slow
def test_triton_kernels():
    run_interpreted("from tests.kernels.test_divergence import compare_interpreted; compare_interpreted()")


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", KINDS, ids=lambda d: f"{d.kind}-{d.beta}")
@pytest.mark.parametrize("keep", [0, 10**9])
def test_bf16_models_on_cuda(divergence, keep):
    """The kernels against the formula, the sums of weight gradients in fp32, and equal models in bf16."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made, targets, *upstream = inputs(torch.bfloat16)
    want = expected(made, targets, *upstream, 0.7, divergence)
    made = {name: x.cuda() for name, x in made.items()}
    hidden, weight = made["hidden"].requires_grad_(), made["weight"].requires_grad_()
    buffer = torch.zeros(V, D, device="cuda")
    teacher = teacher_of({name: x.detach() for name, x in made.items()}, divergence, 0.7)
    how = {"temperature": 0.7, "chunk": 9, "keep_bytes": keep, "weight_grad": buffer}
    logprobs, _, found = selected_logprobs(hidden, weight, targets.cuda(), VocabSoftmax(**how), teacher)
    (logprobs * upstream[0].cuda().float() + found * upstream[1].cuda().float()).sum().backward()
    results = (logprobs, found, hidden.grad, buffer)
    for got, wanted, tol in zip(results, want, (1e-3, 1e-3, 0.3, 0.3), strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted, atol=tol, rtol=tol)
    same = FullVocabTeacher(hidden.detach(), partial(float32_matmul, weight_OI=weight.detach()), divergence)
    hidden.grad = None
    equal = selected_logprobs(hidden, weight.detach(), targets.cuda(), VocabSoftmax(temperature=0.7), same)[2]
    equal.sum().backward()
    assert not equal.any()
    assert not hidden.grad.any()
