"""Teachers: the divergence from their distribution, without all logits in memory at once.

With teacher p, student q, and log probabilities under softmax(logits / temperature) on both sides:

    forward_kl   D = sum_v p log(p / q)                                          dD/dx_v = q_v - p_v
    reverse_kl   D = sum_v q log(q / p)                                          dD/dx_v = q_v (log(q_v / p_v) - D)
    tv           D = sum_v |p - q| / 2                 dD/dx_v = q_v (s_v - sum_u q_u s_u), s = sign(q - p) / 2
    jsd          D = beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q
                 dD/dx_v = (1 - beta) q_v (log(q_v / m_v) - sum_u q_u log(q_u / m_u))

x are the student's logits divided by the temperature. jsd is the generalised Jensen-Shannon divergence of GKD (arXiv
2306.13649). Divided by beta, it tends to forward_kl for beta -> 0, and divided by 1 - beta to reverse_kl for beta -> 1.
If p and q are exactly equal, D and its gradient are exactly 0.

Shape letters: K positions, C positions of one chunk, V vocabulary rows of this rank, D and E hidden sizes of student
and teacher, S saved numbers of a position, J tokens that a teacher lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.config.teacher import Divergence
from areno.kernels.logprobs import StudentChunk, VocabSoftmax, kernels_for, reference

LEAST_TAIL = -30.0
"""Log-probability that the tail of a listed distribution has at least, so that no divergence is infinite."""
_NOTHING = -1e30  # a logit whose probability is 0; the difference of two such log-probabilities is no NaN


@dataclass(frozen=True, slots=True)
class CommonTokenIds:
    """The token ids over which two models with different vocabularies are compared, in this rank's columns.

    Both distributions are renormalized over these ids. The gradient with respect to all other logits is 0.
    """

    n_columns: int  # after these columns, there is no such id
    absent_V: Tensor | None = None  # bool, ids among the columns that are left out

    @staticmethod
    def from_ranges(
        ranges: Iterable[tuple[int, int]], first: int, n_valid: int, device: torch.device
    ) -> CommonTokenIds:
        """Return the ids in ranges (first, end), for a rank with the columns `first` to `first + n_valid` - 1."""
        absent_V = torch.ones(n_valid, dtype=torch.bool)
        for start, end in ranges:
            absent_V[max(0, start - first) : max(0, end - first)] = False
        n_columns = int((~absent_V).nonzero().max()) + 1 if n_valid and not absent_V.all() else 0
        absent_V = absent_V[:n_columns]
        return CommonTokenIds(n_columns, absent_V.to(device) if absent_V.any() else None)

    def mask_logits(self, logits_CV: Tensor) -> Tensor:
        """Return the logits of the compared columns. All other ids get a finite logit that makes their weight 0."""
        logits_CV = logits_CV[:, : self.n_columns]
        return logits_CV if self.absent_V is None else logits_CV.masked_fill(self.absent_V, _NOTHING)


@dataclass(frozen=True, slots=True)
class FullVocabTeacher:
    """A teacher whose logits are computed here, over the whole vocabulary."""

    hidden_KE: Tensor
    logits: Callable[[Tensor], Tensor]  # (C, E) -> this rank's columns (C, V), fp32 or float64, no autograd
    divergence: Divergence
    common: CommonTokenIds | None = None  # None compares all ids, which both models have

    @property
    def n_saved(self) -> int:
        """S = 5: two numbers for each norm (student and teacher), and the mean that the gradient subtracts."""
        return 5

    def compute_divergence(self, student: StudentChunk) -> tuple[Tensor, Tensor, Any]:
        head, part, logits_CV, norm_2C = student
        teacher_CV = self.logits(self.hidden_KE[part])
        first_C = torch.zeros(len(logits_CV), dtype=torch.int64, device=logits_CV.device)  # no target is needed
        if self.common is not None:
            logits_CV, teacher_CV = self.common.mask_logits(logits_CV), self.common.mask_logits(teacher_CV)
            norm_2C = head.log_softmax(logits_CV, first_C)[2]
        teacher_norm_2C = head.log_softmax(teacher_CV, first_C)[2]
        sums_2C = kernels_for(logits_CV).divergence_sums(
            logits_CV,
            teacher_CV,
            norm_2C,
            teacher_norm_2C,
            head.temperature,
            self.divergence.kind,
            self.divergence.beta,
        )
        if head.all_reduce is not None:
            head.all_reduce(sums_2C)
        return sums_2C[0], torch.cat((norm_2C, teacher_norm_2C, sums_2C[1:])).t(), teacher_CV

    def write_gradient(self, student: StudentChunk, saved_CS: Tensor, out_CV: Tensor, made: Any) -> None:
        head, part, logits_CV, _ = student
        teacher_CV = self.logits(self.hidden_KE[part]) if made is None else made
        if self.common is not None:
            logits_CV = self.common.mask_logits(logits_CV)
            teacher_CV = teacher_CV if made is not None else self.common.mask_logits(teacher_CV)
            out_CV[:, self.common.n_columns :].zero_()
            out_CV = out_CV[:, : self.common.n_columns]
        saved_5C = saved_CS.t().contiguous()  # kernels read rows with stride 1
        kind, beta = self.divergence.kind, self.divergence.beta
        args = (logits_CV, teacher_CV, saved_5C[:2], saved_5C[2:4], saved_5C[4], head.temperature, kind, beta)
        kernels_for(logits_CV).divergence_gradient(*args, out_CV)


@dataclass(frozen=True, slots=True)
class TopKTeacher:
    """A teacher that lists the log-probabilities of J tokens at each position. All other tokens count as one token.

    This last token, the tail, has the rest of the probability. So the divergence is that of two distributions over J +
    1 tokens, which is at least 0 and at most the divergence over the whole vocabulary.
    """

    tokens_KJ: Tensor  # int64, different at each position; -1 for no token, where a list is shorter
    logprobs_KJ: Tensor  # at the temperature of the student
    divergence: Divergence

    @property
    def n_saved(self) -> int:
        """S = J + 1: the gradient of each listed token, and that of the tail divided by the tail's probability."""
        return self.tokens_KJ.shape[1] + 1

    def compute_divergence(self, student: StudentChunk) -> tuple[Tensor, Tensor, Any]:
        head, part, logits_CV, norm_2C = student
        student_CJ = self._student_logprobs(head, part, logits_CV, norm_2C)
        absent_CJ = self.tokens_KJ[part] < 0
        teacher_CJ = _append_tail(self.logprobs_KJ[part].to(student_CJ.dtype).masked_fill(absent_CJ, _NOTHING))
        kind, beta = self.divergence.kind, self.divergence.beta
        divergence_C = reference.divergence_terms(student_CJ, teacher_CJ, kind, beta).sum(-1)
        q_CJ = student_CJ.exp()
        if kind == "forward_kl":  # not q (h - mean): h overflows where the student excludes what the teacher says
            listed_CJ, tail_C = (q_CJ - teacher_CJ.exp())[:, :-1], 1.0 - (teacher_CJ - student_CJ)[:, -1].exp()
        else:
            factors_CJ = reference.gradient_factors(student_CJ, teacher_CJ, kind, beta)
            factors_CJ = factors_CJ - (q_CJ * factors_CJ).sum(-1, keepdim=True)
            listed_CJ, tail_C = (q_CJ * factors_CJ)[:, :-1], factors_CJ[:, -1]
        return divergence_C, torch.cat((listed_CJ, tail_C.unsqueeze(-1)), 1), None

    def write_gradient(self, student: StudentChunk, saved_CS: Tensor, out_CV: Tensor, made: Any) -> None:
        head, part, logits_CV, norm_2C = student
        if not logits_CV.shape[1]:
            return
        listed_CJ, tail_C1 = saved_CS[:, :-1], saved_CS[:, -1:]
        grad_CV = reference.log_softmax_from_norm(logits_CV, norm_2C, head.temperature).exp_().mul_(tail_C1)
        local_CJ, here_CJ = reference.local_rows(self.tokens_KJ[part], head.first, logits_CV.shape[1])
        more_CJ = (listed_CJ - grad_CV.gather(1, local_CJ)).where(here_CJ, 0.0)
        out_CV.copy_(grad_CV.scatter_add_(1, local_CJ, more_CJ))

    def _student_logprobs(self, head: VocabSoftmax, part: slice, logits_CV: Tensor, norm_2C: Tensor) -> Tensor:
        """Return the student's log-probabilities of the listed tokens and of the tail, (C, J + 1)."""
        if not logits_CV.shape[1]:  # a rank whose part of the vocabulary is all padding
            sums_CJ = norm_2C.new_zeros((len(logits_CV), self.tokens_KJ.shape[1] + 1))
        else:
            x_CV = reference.log_softmax_from_norm(logits_CV, norm_2C, head.temperature)
            local_CJ, here_CJ = reference.local_rows(self.tokens_KJ[part], head.first, logits_CV.shape[1])
            listed_CJ = x_CV.gather(1, local_CJ).where(here_CJ, 0.0)
            # Listed tokens of other ranks have index 0 here, whose probability must stay in the tail.
            hit_CV = torch.zeros_like(x_CV).scatter_add_(1, local_CJ, here_CJ.to(x_CV.dtype))
            tail_C1 = x_CV.exp_().masked_fill_(hit_CV > 0, 0.0).sum(-1, keepdim=True)
            sums_CJ = torch.cat((listed_CJ, tail_C1), 1)
        if head.all_reduce is not None:
            head.all_reduce(sums_CJ)
        listed_CJ = sums_CJ[:, :-1].masked_fill(self.tokens_KJ[part] < 0, _NOTHING)
        return torch.cat((listed_CJ, sums_CJ[:, -1:].log().clamp(min=LEAST_TAIL)), 1)


def _append_tail(logprobs_CJ: Tensor) -> Tensor:
    """Append the log-probability of all tokens that are not listed, at least LEAST_TAIL."""
    tail_C1 = (1.0 - logprobs_CJ.exp().sum(-1, keepdim=True)).clamp(min=0.0).log().clamp(min=LEAST_TAIL)
    return torch.cat((logprobs_CJ, tail_C1), 1)
