"""The entropy of the next-token distribution with its gradient, without all logits in memory at once.

With q = softmax(x) and x = logits / temperature, the negative entropy is sum_v q_v log q_v. Its gradient with respect
to x_v is q_v (log q_v - sum_u q_u log q_u). So it is computed as the reverse KL divergence from a teacher whose
log-probabilities are all 0, by the kernels of `divergence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.kernels.logprobs import StudentChunk, kernels_for


@dataclass(frozen=True, slots=True)
class Negentropy:
    """The negative entropy of the student, in nats, in place of the divergence from a teacher."""

    @property
    def n_saved(self) -> int:
        """S = 1: the negative entropy."""
        return 1

    def compute_divergence(self, student: StudentChunk) -> tuple[Tensor, Tensor, Any]:
        head, _, logits_CV, norm_2C = student
        zeros_CV, zeros_2C = _log_ones(logits_CV, norm_2C)
        kernels = kernels_for(logits_CV)
        sums_2C = kernels.divergence_sums(logits_CV, zeros_CV, norm_2C, zeros_2C, head.temperature, "reverse_kl", 0.0)
        if head.all_reduce is not None:
            head.all_reduce(sums_2C)
        return sums_2C[0], sums_2C[:1].t(), None

    def write_gradient(self, student: StudentChunk, saved_CS: Tensor, out_CV: Tensor, made: Any) -> None:
        head, _, logits_CV, norm_2C = student
        zeros_CV, zeros_2C = _log_ones(logits_CV, norm_2C)
        args = (logits_CV, zeros_CV, norm_2C, zeros_2C, saved_CS[:, 0].contiguous(), head.temperature)
        kernels_for(logits_CV).divergence_gradient(*args, "reverse_kl", 0.0, out_CV)


def _log_ones(logits_CV: Tensor, norm_2C: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of 0 in the shape of the logits, in the memory of one row, and their norm of 0."""
    return logits_CV.new_zeros((1, logits_CV.shape[1])).expand_as(logits_CV), torch.zeros_like(norm_2C)
