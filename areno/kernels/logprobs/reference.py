"""The softmax of the LM head in plain torch: its statistics and its gradient for one chunk of positions.

x = logits / temperature over this rank's columns. A norm (2, C) has the maximum of x over all ranks, and the
log-sum-exp of the differences from it. `kind` is "forward_kl", "reverse_kl" or "jsd". In "jsd", `beta` is the weight of
the teacher. The Triton kernels compute the same in fp32, and do not overwrite logits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_statistics(logits_CV: Tensor, targets_C: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    """Return (4, C): the maximum of x, and for y = x - maximum the sums of exp(y) and of y exp(y), and y at the target.

    The last one is 0 if another rank has the target's column. The caller combines the ranks.
    """
    if not logits_CV.shape[1]:  # a rank whose part of the vocabulary is all padding
        none_C = logits_CV.new_zeros(logits_CV.shape[0])
        return torch.stack([none_C - 1e30, none_C, none_C, none_C])
    x_CV = logits_CV / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    top_C = x_CV.amax(-1)
    x_CV.sub_(top_C.unsqueeze(-1))
    row_C, here_C = local_rows(targets_C, first, logits_CV.shape[1])
    target_C = x_CV.gather(-1, row_C.unsqueeze(-1)).squeeze(-1).where(here_C, 0.0)
    exp_CV = x_CV.exp()
    return torch.stack([top_C, exp_CV.sum(-1), exp_CV.mul_(x_CV).sum(-1), target_C])


def logprob_gradient(
    logits_CV: Tensor, lse_C: Tensor, targets_C: Tensor, first: int, temperature: float, out_CV: Tensor
) -> None:
    """Write onehot - softmax(x). `lse_C` is the log-sum-exp of x over all ranks. The logits are overwritten."""
    if logits_CV.shape[1]:
        grad_CV = logits_CV.div_(temperature).sub_(lse_C.unsqueeze(-1)).exp_().neg_()
        row_C, here_C = local_rows(targets_C, first, logits_CV.shape[1])
        grad_CV.scatter_add_(-1, row_C.unsqueeze(-1), here_C.to(grad_CV.dtype).unsqueeze(-1))
        out_CV.copy_(grad_CV)


def local_rows(tokens: Tensor, first: int, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return each token's index among this rank's rows, 0 for tokens of other ranks, and whether this rank has it."""
    local = tokens - first
    is_here = (local >= 0) & (local < n_rows)
    return local.where(is_here, 0), is_here


def log_softmax_from_norm(logits_CV: Tensor, norm_2C: Tensor, temperature: float) -> Tensor:
    """Return log softmax(x) for this rank's columns, in new memory."""
    return (logits_CV / temperature).sub_(norm_2C[0].unsqueeze(-1)).sub_(norm_2C[1].unsqueeze(-1))


def divergence_terms(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Return summands of the divergence, from log q (`student`) and log p (`teacher`), 0 where they are equal."""
    if kind == "forward_kl":
        return teacher.exp() * (teacher - student)
    if kind == "reverse_kl":
        return student.exp() * (student - teacher)
    if kind == "tv":
        return (teacher.exp() - student.exp()).abs() / 2
    mixed = _mixture_minus_student(student, teacher, beta)
    return beta * teacher.exp() * (teacher - student - mixed) - (1 - beta) * student.exp() * mixed


def gradient_factors(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    """Return h, the derivative of the divergence with respect to q, up to a constant.

    The gradient of the divergence with respect to the student's x is q (h - sum of q h).
    """
    if kind == "forward_kl":
        return -(teacher - student).exp()
    if kind == "reverse_kl":
        return student - teacher
    if kind == "tv":
        return (student - teacher).sign() / 2
    return -(1 - beta) * _mixture_minus_student(student, teacher, beta)


def _mixture_minus_student(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return log m - log q with m = beta p + (1 - beta) q. Exactly 0 where p = q, and finite for every p and q."""
    d = teacher - student
    smaller = torch.where(d > 0, d.new_tensor(1 - beta), d.new_tensor(beta))  # the weight of the smaller probability
    return torch.log1p(torch.expm1(-d.abs()) * smaller) + d.clamp(min=0.0)


def divergence_sums(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    norm_2C: Tensor,
    teacher_norm_2C: Tensor,
    temperature: float,
    kind: str,
    beta: float,
) -> Tensor:
    """Return (2, C): the sum of `divergence_terms`, and the sum of q h (see `gradient_factors`, 0 for "forward_kl")."""
    if not logits_CV.shape[1]:
        return torch.zeros_like(norm_2C)
    student = log_softmax_from_norm(logits_CV, norm_2C, temperature)
    teacher = log_softmax_from_norm(teacher_CV, teacher_norm_2C, temperature)
    total_C = divergence_terms(student, teacher, kind, beta).sum(-1)
    if kind == "forward_kl":
        return torch.stack((total_C, torch.zeros_like(total_C)))
    return torch.stack((total_C, (student.exp() * gradient_factors(student, teacher, kind, beta)).sum(-1)))


def divergence_gradient(
    logits_CV: Tensor,
    teacher_CV: Tensor,
    norm_2C: Tensor,
    teacher_norm_2C: Tensor,
    mean_C: Tensor,
    temperature: float,
    kind: str,
    beta: float,
    out_CV: Tensor,
) -> None:
    """Write the gradient with respect to x. `mean_C` is the second row of `divergence_sums`, summed over all ranks."""
    if not logits_CV.shape[1]:
        return
    student = log_softmax_from_norm(logits_CV, norm_2C, temperature)
    teacher = log_softmax_from_norm(teacher_CV, teacher_norm_2C, temperature)
    if kind == "forward_kl":
        out_CV.copy_(student.exp_().sub_(teacher.exp_()))
        return
    factors = gradient_factors(student, teacher, kind, beta).sub_(mean_C.unsqueeze(-1))
    out_CV.copy_(factors.mul_(student.exp_()))
