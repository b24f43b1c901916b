"""Log-probabilities of given tokens under the LM head, without the logits of all positions in memory at once.

`selected_logprobs` is differentiable and is used in training and scoring. `sampled_logprobs` is used by the decoder,
and gives exactly the same values for the same logits. Both compute softmax(hidden W^T / temperature) in fp32 (float64
for float64 inputs).

Under tensor parallelism, a rank has the vocabulary rows from `first` on, and `all_reduce(x, op=SUM)` reduces x over the
ranks in place. `hidden_KD` and `targets_K` must be equal on every rank, and so are the results and the gradient with
respect to `hidden_KD`.

Shape letters: K positions, C positions of one chunk, V vocabulary rows of this rank, D hidden size, B sampled tokens, S
numbers of a position that a teacher saves, G gradients: that of the log-probability and that of the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from areno.kernels.backend import kernel_module_for
from areno.kernels.logprobs import reference
from areno.kernels.matmul import add_matmul, float32_matmul

CHUNK = 1024  # positions; with a vocabulary of 152k, a chunk takes 1.7 GiB of temporary memory in plain torch
FUSED_CHUNK = 2048  # positions with Triton; the same vocabulary takes 1.2 GiB
KEEP_BYTES = 2**26  # of onehot - softmax, kept for the backward pass; with a small vocabulary, for all positions


def selected_logprobs(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    targets_K: Tensor,
    head: VocabSoftmax | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor, ...]:
    """Return the log-probability of each position's target token, and the entropy (detached), (K,) each.

    With a teacher, the third result is the divergence from it, (K,). Its gradient goes to the student alone.

    Chunks of positions are computed one after the other. The gradient is onehot - softmax, times 1 / temperature. The
    forward pass keeps onehot - softmax, and the gradient of the divergence, for as many positions as `head.keep_bytes`
    allows. For all other positions, the backward pass computes the logits again.
    """
    return _SelectedLogprobs.apply(hidden_KD, weight_VD, targets_K, head or VocabSoftmax(), teacher)  # type: ignore[return-value]


def sampled_logprobs(
    logits_BV: Tensor,
    tokens_B: Tensor,
    temperature_B: Tensor,
    *,
    first: int = 0,
    all_reduce: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return the log-probability of each sampled token, equal to `selected_logprobs` for logits of the same stride."""
    return log_softmax(logits_BV, tokens_B, first, temperature_B, all_reduce)[0]


def kernels_for(x: Tensor) -> Any:
    # The Triton kernels compute in fp32.
    return reference if x.dtype == torch.float64 else kernel_module_for(x, __name__)


def log_softmax(
    logits_CV: Tensor,
    targets_C: Tensor,
    first: int,
    temperature: float | Tensor,
    all_reduce: Callable[..., Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probability (C,), entropy (C,), norm (2, C)) of logits / temperature at each position.

    The norm has the maximum x of a position, and the log-sum-exp of the differences from x. These two numbers are not
    added, because the sum would be less precise.
    """
    stats = kernels_for(logits_CV).softmax_statistics(logits_CV, targets_C, first, temperature)
    top_C, sums_3C = stats[0], stats[1:]
    if all_reduce is not None:
        mine_C = top_C.clone()
        all_reduce(top_C, dist.ReduceOp.MAX)
        shift_C, (total_C, weighted_C, target_C) = mine_C - top_C, sums_3C
        sums_3C = torch.stack(
            [
                total_C * shift_C.exp(),
                (weighted_C + shift_C * total_C) * shift_C.exp(),
                (target_C + shift_C).where(reference.local_rows(targets_C, first, logits_CV.shape[1])[1], 0.0),
            ]
        )
        all_reduce(sums_3C)
    total_C, weighted_C, target_C = sums_3C
    log_total_C = total_C.log()
    return target_C - log_total_C, log_total_C - weighted_C / total_C, torch.stack((top_C, log_total_C))


@dataclass(frozen=True, slots=True)
class VocabSoftmax:
    """How the softmax over the vocabulary is computed.

    Attributes:
        temperature: divides the logits of the student and of a teacher. Both vocabularies are split over the ranks in
            the same way.
        chunk: number of positions computed at once. None means CHUNK, or FUSED_CHUNK with Triton.
        weight_grad: float32 buffer (V, D), to which the weight's gradient is added. Autograd then gets None for the
            weight, which saves two copies of it.
        own_logits: function that computes hidden W^T in fp32, (C, V), outside autograd. None means `float32_matmul`.
        most_rows: largest number of vocabulary rows of any rank, if the ranks differ. All ranks then keep the same
            positions, and so call `all_reduce` for the same chunks.
    """

    temperature: float = 1.0
    chunk: int | None = None
    first: int = 0
    all_reduce: Callable[..., Tensor] | None = None
    weight_grad: Tensor | None = None
    keep_bytes: int = KEEP_BYTES
    own_logits: Callable[[Tensor], Tensor] | None = None
    most_rows: int | None = None

    def chunk_size(self, hidden_KD: Tensor) -> int:
        return self.chunk or (CHUNK if kernels_for(hidden_KD) is reference else FUSED_CHUNK)

    def n_stored_positions(self, hidden_KD: Tensor, weight_VD: Tensor, n_matrices: int) -> int:
        """Return for how many positions the forward pass keeps gradients of logits. Each has `n_matrices` rows."""
        n_rows = len(weight_VD) if self.most_rows is None else self.most_rows
        return min(len(hidden_KD), self.keep_bytes // max(1, n_matrices * n_rows * hidden_KD.element_size()))

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
        return float32_matmul(hidden_CD, weight_VD) if self.own_logits is None else self.own_logits(hidden_CD)

    def log_softmax(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return log_softmax(logits_CV, targets_C, self.first, self.temperature, self.all_reduce)

    def write_gradient(self, logits_CV: Tensor, norm_2C: Tensor, targets_C: Tensor, out_CV: Tensor) -> None:
        """Write onehot - softmax, the log-probability's gradient times the temperature. Logits may be overwritten."""
        lse_C = norm_2C[0] + norm_2C[1]
        kernels_for(logits_CV).logprob_gradient(logits_CV, lse_C, targets_C, self.first, self.temperature, out_CV)


class StudentChunk(NamedTuple):
    """The positions that are computed at once: the student's logits, and their norm as in `log_softmax`."""

    head: VocabSoftmax
    part: slice  # of the K positions
    logits_CV: Tensor
    norm_2C: Tensor


class Teacher(Protocol):
    """The teacher's distribution at each of the K positions. The student's logits are not changed.

    `entropy.Negentropy` is a teacher, too, for which the divergence is the negative entropy of the student.
    """

    @property
    def n_saved(self) -> int: ...

    def compute_divergence(self, student: StudentChunk) -> tuple[Tensor, Tensor, Any]:
        """Return (divergence (C,), saved values (C, S), an object for `write_gradient`)."""
        ...

    def write_gradient(self, student: StudentChunk, saved_CS: Tensor, out_CV: Tensor, made: Any) -> None:
        """Write the gradient of the divergence with respect to logits / temperature to `out_CV`.

        `made` is the third result of `compute_divergence`, or None to compute that again.
        """
        ...


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Tensor, weight_VD: Tensor, targets_K: Tensor, head: VocabSoftmax, teacher: Teacher | None
    ) -> tuple[Tensor, ...]:
        n, n_saved, n_matrices = len(hidden_KD), *((0, 1) if teacher is None else (teacher.n_saved, 2))
        dtype = torch.promote_types(hidden_KD.dtype, torch.float32)
        logprobs_K, entropy_K, divergence_K = (hidden_KD.new_empty(n, dtype=dtype) for _ in range(3))
        norm_2K = hidden_KD.new_empty((2, n), dtype=dtype)
        saved_KS = hidden_KD.new_empty((n, n_saved), dtype=dtype)
        n_kept, chunk = head.n_stored_positions(hidden_KD, weight_VD, n_matrices), head.chunk_size(hidden_KD)
        # The same chunks with and without gradients, so that both give exactly the same numbers.
        parts = chunk_slices(0, n_kept, chunk) + chunk_slices(n_kept, n, chunk)
        n_kept = n_kept if any(ctx.needs_input_grad) else 0
        kept_GCV = hidden_KD.new_empty((n_matrices, n_kept, len(weight_VD)))
        for part in parts:
            logits_CV, made = head.logits(hidden_KD[part], weight_VD), None
            logprobs_K[part], entropy_K[part], norm_2C = head.log_softmax(logits_CV, targets_K[part])
            norm_2K[:, part] = norm_2C
            student = StudentChunk(head, part, logits_CV, norm_2C)
            if teacher is not None:
                divergence_K[part], saved_KS[part], made = teacher.compute_divergence(student)
            if part.stop <= n_kept:
                if teacher is not None:
                    teacher.write_gradient(student, saved_KS[part], kept_GCV[1, part], made)
                head.write_gradient(logits_CV, norm_2C, targets_K[part], kept_GCV[0, part])  # overwrites
            del logits_CV, student, made  # before the next chunk allocates its own
        ctx.save_for_backward(hidden_KD, weight_VD, targets_K, norm_2K, saved_KS, kept_GCV)
        ctx.head, ctx.teacher = head, teacher
        ctx.mark_non_differentiable(entropy_K)
        ctx.set_materialize_grads(False)
        return (logprobs_K, entropy_K) if teacher is None else (logprobs_K, entropy_K, divergence_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_KD, weight_VD, _, norm_2K, _, kept_GCV = ctx.saved_tensors
        head: VocabSoftmax = ctx.head
        n, n_kept, chunk = len(hidden_KD), kept_GCV.shape[1], head.chunk_size(hidden_KD)
        grads_K = grads[::2]  # without that of the entropy
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden_KD = torch.zeros_like(hidden_KD) if want_hidden else None
        grad_weight_VD = head.weight_grad
        if grad_weight_VD is None and want_weight:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=norm_2K.dtype)
        kept_at_once = max(1, n_kept) if ctx.teacher is None else chunk
        for part in chunk_slices(0, n_kept, kept_at_once) + chunk_slices(n_kept, n, chunk):
            made_GCV = list(kept_GCV[:, part]) if part.stop <= n_kept else _recompute_gradients(ctx, part, grads_K)
            grad_CV, factor_C1 = _combine_gradients(
                made_GCV, [each_K if each_K is None else each_K[part, None] for each_K in grads_K]
            )
            if grad_CV is None:
                continue
            factor_C1 = factor_C1 / head.temperature
            # Each position has a factor in both products. It is multiplied into a (C, D) matrix, not into grad (C, V).
            if grad_hidden_KD is not None:
                torch.mul(grad_CV @ weight_VD, factor_C1, out=grad_hidden_KD[part])
            if want_weight and grad_weight_VD is not None:
                scaled_CD = (hidden_KD[part] * factor_C1).to(hidden_KD.dtype)
                add_matmul(grad_weight_VD, grad_CV.t(), scaled_CD)
        if grad_hidden_KD is not None and head.all_reduce is not None:
            head.all_reduce(grad_hidden_KD)
        if head.weight_grad is not None or not want_weight:
            return grad_hidden_KD, None, None, None, None
        assert grad_weight_VD is not None
        return grad_hidden_KD, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _recompute_gradients(ctx: Any, part: slice, grads_K: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Compute a chunk's gradients with respect to logits / temperature again, None where `grads_K` is None."""
    hidden_KD, weight_VD, targets_K, norm_2K, saved_KS, _ = ctx.saved_tensors
    head: VocabSoftmax = ctx.head
    norm_2C = norm_2K[:, part]
    logits_CV = head.logits(hidden_KD[part], weight_VD)
    made = [None if each_K is None else torch.empty_like(logits_CV, dtype=hidden_KD.dtype) for each_K in grads_K]
    if made[1:] and made[1] is not None:
        ctx.teacher.write_gradient(StudentChunk(head, part, logits_CV, norm_2C), saved_KS[part], made[1], None)
    if made[0] is not None:
        head.write_gradient(logits_CV, norm_2C, targets_K[part], made[0])
    return made


def _combine_gradients(made_GCV: list[Tensor | None], grads_GC1: list[Tensor | None]) -> tuple[Tensor | None, Any]:
    """Return a matrix (C, V) or None, and a factor (C, 1), whose product is the gradient with respect to the logits.

    The caller applies the factor to matrices (C, D), which are smaller.
    """
    pairs = [
        (made, grad) for made, grad in zip(made_GCV, grads_GC1, strict=True) if made is not None and grad is not None
    ]
    if len(pairs) < 2:
        return pairs[0] if pairs else (None, None)
    (of_logprobs_CV, a_C1), (of_divergence_CV, b_C1) = pairs
    factor_C1 = torch.maximum(a_C1.abs(), b_C1.abs())
    safe_C1 = factor_C1.where(factor_C1 > 0, 1.0)  # both are 0 where the loss does not use the position
    dtype = of_logprobs_CV.dtype
    grad_CV = of_logprobs_CV * (a_C1 / safe_C1).to(dtype)
    return grad_CV.addcmul_(of_divergence_CV, (b_C1 / safe_C1).to(dtype).expand_as(grad_CV)), factor_C1


def chunk_slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]
