"""Losses of distillation: against loops, and the mean gradient of the sampled form over all answers there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from areno.config.teacher import Divergence
from areno.errors import DataError
from areno.loss_fns.data_pack import DataPack
from areno.loss_fns.distillation import distillation_loss_fn, sampled_reverse_kl
from areno.loss_fns.grpo import grpo_loss_fn
from tests.helpers.loss_rows import PRECISIONS, all_trained, pack_of, random_rows, trained


def with_teacher(rows, dtype=torch.float64, **how):
    """The reference's log-probabilities of the rows stand for the teacher's."""
    pack, outputs = pack_of(rows, dtype=dtype, **how)
    pack.teacher_logprobs = pack.ref_logprobs
    return pack, outputs


def by_hand(rows, discount, weighted=False):
    """(loss, gradient) of the mean over tokens of -r A, as loops."""
    n_tokens, loss, grads = sum(sum(row["mask"]) for row in rows), 0.0, []
    for row in rows:
        places, grad = trained(row), [0.0] * len(row["mask"])
        for at, t in enumerate(places):
            later = [row["outputs"][u] - row["ref_logprobs"][u] for u in places[at:]]
            kl = sum(discount**n * each for n, each in enumerate(later))
            ratio = torch.tensor(row["outputs"][t] - row["old_logprobs"][t], dtype=torch.float64).exp().item()
            grad[t] = ratio * kl * (row["weights"][t] if weighted else 1.0) / n_tokens
            loss += grad[t]
        grads += grad
    return loss, grads


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), PRECISIONS)
def test_sampled_form_is_the_formula(discount, weighted, dtype, tol):
    rows = random_rows()
    pack, outputs = with_teacher(rows, dtype, weighted=weighted)
    loss, stats = distillation_loss_fn(pack, outputs, sampled=True, kl_discount=discount, distill_loss_weight=3.0)
    loss.backward()
    want, grads = by_hand(rows, discount, weighted)
    assert loss.item() == pytest.approx(3 * want, abs=tol)
    assert stats["distill_loss"].item() == pytest.approx(want, abs=tol)
    apart = [a - b for a, b in zip(all_trained(rows, "outputs"), all_trained(rows, "ref_logprobs"), strict=True)]
    assert stats["teacher_kl"].item() == pytest.approx(sum(apart) / len(apart), abs=tol)
    torch.testing.assert_close(outputs.grad, 3 * torch.tensor(grads, dtype=dtype), atol=tol, rtol=tol)


def test_joint_loss_is_the_weighted_sum():
    rows = random_rows()
    parts = []
    for rl, distill in ((1.0, 0.0), (0.0, 1.0), (0.25, 2.0)):
        pack, outputs = with_teacher(rows)
        how = {"policy_loss_fn": grpo_loss_fn, "rl_loss_weight": rl, "distill_loss_weight": distill}
        loss, stats = distillation_loss_fn(pack, outputs, sampled=True, **how)
        loss.backward()
        assert ("rl_loss" in stats) == (rl > 0)
        parts.append((loss.item(), outputs.grad))
    (of_rl, rl_grad), (of_teacher, teacher_grad), (joint, joint_grad) = parts
    assert joint == pytest.approx(0.25 * of_rl + 2 * of_teacher, abs=1e-12)
    torch.testing.assert_close(joint_grad, 0.25 * rl_grad + 2 * teacher_grad, atol=1e-12, rtol=0)


def test_another_teacher_gives_another_gradient():
    """A loss that differentiates log q - log p has a gradient without the teacher."""
    rows, grads = random_rows(), []
    for shift in (0.0, 0.3):
        pack, outputs = with_teacher(rows)
        pack.teacher_logprobs = pack.teacher_logprobs - shift
        distillation_loss_fn(pack, outputs, sampled=True)[0].backward()
        grads.append(outputs.grad)
    assert (grads[0] - grads[1]).abs()[torch.tensor([m for row in rows for m in row["mask"]]).bool()].min() > 1e-3


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_teacher_equal_to_the_student_has_no_gradient(discount):
    pack, outputs = with_teacher(random_rows(), torch.float32)
    pack.teacher_logprobs = outputs.detach().clone()
    loss, _ = distillation_loss_fn(pack, outputs, sampled=True, kl_discount=discount)
    loss.backward()
    assert loss.item() == 0.0
    assert not outputs.grad.any()


def test_divergence_of_the_training_pass_is_averaged_over_tokens():
    pack, outputs = pack_of(random_rows())
    with pytest.raises(DataError, match="divergence"):
        distillation_loss_fn(pack, outputs)
    pack.divergence = torch.arange(len(outputs), dtype=torch.float64, requires_grad=True)
    loss, stats = distillation_loss_fn(pack, outputs, distill_loss_weight=0.5)
    loss.backward()
    mask = pack.loss_mask.double()
    assert loss.item() == pytest.approx(0.5 * (pack.divergence.detach() * mask).sum().item() / mask.sum().item())
    torch.testing.assert_close(pack.divergence.grad, 0.5 * mask / mask.sum())
    assert outputs.grad is None
    assert "entropy" in stats


def test_divergences_are_checked():
    with pytest.raises(ValueError, match="kind is 'kl'"):
        Divergence("kl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta is 1\.0"):
        Divergence("jsd", 1.0)


VOCABULARY, LENGTH = 3, 3


def tables(seed, requires_grad=False):
    """Logits of the next token after each beginning of an answer, at random."""
    rng = torch.Generator().manual_seed(seed)
    beginnings = [b for n in range(LENGTH) for b in itertools.product(range(VOCABULARY), repeat=n)]
    return {
        b: torch.randn(VOCABULARY, generator=rng, dtype=torch.float64).requires_grad_(requires_grad) for b in beginnings
    }


def logprobs_of(table, answer):
    return torch.stack([torch.log_softmax(table[answer[:t]], -1)[token] for t, token in enumerate(answer)])


def answers_with_probability(table):
    for answer in itertools.product(range(VOCABULARY), repeat=LENGTH):
        yield answer, logprobs_of(table, answer).sum().exp().detach()


def gradients(table, value):
    found = torch.autograd.grad(value, list(table.values()))
    return torch.cat(found)


@pytest.mark.parametrize("discount", [0, 1])
def test_mean_gradient_over_all_answers(discount):
    """Discount 0: of each position's reverse KL, given the beginnings. Discount 1: of that of whole answers."""
    student, teacher = tables(1, requires_grad=True), tables(2)
    expected = torch.zeros((), dtype=torch.float64)
    for answer, probability in answers_with_probability(student):
        ours, theirs = logprobs_of(student, answer), logprobs_of(teacher, answer)
        if discount:  # the whole expectation depends on the student
            expected = expected + ours.sum().exp() * (ours.sum() - theirs.sum())
        else:
            for t in range(LENGTH):
                q, p = (torch.log_softmax(table[answer[:t]], -1) for table in (student, teacher))
                expected = expected + probability * (q.exp() * (q - p)).sum()
    sampled = torch.zeros((), dtype=torch.float64)
    for answer, probability in answers_with_probability(student):
        ours, theirs = logprobs_of(student, answer), logprobs_of(teacher, answer)
        pack = DataPack(
            tokens=torch.tensor(answer),
            row_of_token=torch.zeros(LENGTH, dtype=torch.int64),
            loss_mask=torch.ones(LENGTH, dtype=torch.bool),
            n_rows=1,
            step_tokens=LENGTH,
            step_rows=1,
            old_logprobs=ours.detach(),
            teacher_logprobs=theirs,
        )
        sampled = sampled + probability * sampled_reverse_kl(pack, ours, float(discount)).sum()
    torch.testing.assert_close(gradients(student, sampled), gradients(student, expected), atol=1e-12, rtol=0)
