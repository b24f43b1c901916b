"""The probability that two tokens drawn from the next-token distribution are equal, sum_v q_v^2.

With q = softmax(x) and x = logits / temperature, its logarithm is logsumexp(2 x) - 2 logsumexp(x). So the kernel of the
softmax statistics computes it at half the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from areno.kernels.logprobs import StudentChunk, log_softmax


@dataclass(frozen=True, slots=True)
class Collision:
    """The collision probability of the student, in place of the divergence from a teacher. It has no gradient."""

    @property
    def n_saved(self) -> int:
        return 0

    def compute_divergence(self, student: StudentChunk) -> tuple[Tensor, Tensor, Any]:
        head, norm_2C = student.head, student.norm_2C
        no_targets_C = norm_2C.new_zeros(norm_2C.shape[1]).long()
        half = head.temperature / 2
        doubled_2C = log_softmax(student.logits_CV, no_targets_C, head.first, half, head.all_reduce)[2]
        top_C, rest_C = doubled_2C - 2 * norm_2C
        return (top_C + rest_C).exp(), norm_2C.new_empty((len(no_targets_C), 0)), None

    def write_gradient(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the collision probability has no gradient")


def logit_gradient(logprobs: Tensor, collision: Tensor) -> Tensor:
    """Return the squared norm of the gradient of log-probabilities with respect to the logits. 0 if not computed."""
    return (1.0 - 2.0 * logprobs.exp() + collision).where(collision > 0, 0.0)
