"""Log-probabilities of given tokens under the LM head, without ever holding the logits of all positions.

Shape letters: K positions, C of them in one chunk, V vocabulary rows of this rank, D hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1024  # positions; the work on a chunk of a 152k vocabulary takes 1.7 GiB, and larger ones are hardly faster


class Ranks(Protocol):
    """The processes that hold the pieces of one vocabulary; `layers.parallel.TensorParallel` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        """Sum (or `op`) over the ranks, in place."""
        ...


def selected_logprobs(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    targets_K: Tensor,
    *,
    temperature: float,
    chunk: int = CHUNK,
    tp: Ranks | None = None,
    vocab_size: int | None = None,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden W^T / temperature)[target] and the entropy of that softmax: (K,) each, the entropy detached.

    Computed in fp32 (float64 inputs stay float64) in chunks of `chunk` positions; the backward pass computes the logits
    of each chunk again. hidden and targets are the same on every rank of tp, and so are the results and the gradient of
    hidden.

    tp: the ranks that share the vocabulary; None = this one alone. Rank r holds the rows from
    r * ceil(vocab_size / tp.size) on. vocab_size: of all ranks together, needed where there are several; padding rows
    below it take no part.
    weight_grad: (V, D) float32. If given, the gradient of the weight is added into it, and autograd gets none: this
    saves two copies of the largest matrix of a small model.
    """
    size = 1 if tp is None else tp.size
    if size > 1 and vocab_size is None:
        raise ValueError("vocab_size is needed where the vocabulary is divided over ranks")
    n_rows, first = weight_VD.shape[0], 0
    if vocab_size is not None:
        per_rank = -(-vocab_size // size)
        first = min((tp.rank if tp else 0) * per_rank, vocab_size)
        n_rows = min(n_rows, per_rank, vocab_size - first)
    head = _Head(n_rows, first, temperature, chunk, tp if size > 1 else None, weight_grad)
    return _SelectedLogprobs.apply(hidden_KD, weight_VD, targets_K, head)  # type: ignore[return-value]


class _Head:
    """One rank's part of the vocabulary: rows `first .. first + n_rows` of the whole are rows `0 .. n_rows` here."""

    def __init__(
        self, n_rows: int, first: int, temperature: float, chunk: int, tp: Ranks | None, weight_grad: Tensor | None
    ):
        self.n_rows, self.first, self.temperature = n_rows, first, temperature
        self.chunk, self.tp, self.weight_grad = chunk, tp, weight_grad

    def all_reduce(self, x: Tensor, op: Any = None) -> Tensor:
        return x if self.tp is None else self.tp.all_reduce(x, op)

    def logits(self, hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
        """(C, V) float32. The product is kept in fp32 where the device can: in bf16 a logit of 20 is off by 0.06."""
        weight_VD = weight_VD[: self.n_rows]
        if hidden_CD.is_cuda and hidden_CD.dtype in (torch.bfloat16, torch.float16):
            logits_CV = torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
        else:
            logits_CV = torch.mm(hidden_CD, weight_VD.t())
            logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return logits_CV if self.temperature == 1.0 else logits_CV.div_(self.temperature)

    def local(self, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target in this rank's part, and whether it is there (elsewhere the row is 0)."""
        local_C = targets_C - self.first
        here_C = (local_C >= 0) & (local_C < self.n_rows)
        return local_C.where(here_C, 0).unsqueeze(-1), here_C


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Tensor, weight_VD: Tensor, targets_K: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        n = hidden_KD.shape[0]
        dtype = torch.promote_types(hidden_KD.dtype, torch.float32)
        logprobs_K, entropy_K, lse_K = (hidden_KD.new_empty(n, dtype=dtype) for _ in range(3))
        for start in range(0, n, head.chunk):
            part = slice(start, start + head.chunk)
            logits_CV = head.logits(hidden_KD[part], weight_VD)
            # A rank whose part of the vocabulary is all padding has no maximum of its own.
            top_C = logits_CV.amax(-1) if head.n_rows else logits_CV.new_full(logits_CV.shape[:1], -torch.inf)
            head.all_reduce(top_C, dist.ReduceOp.MAX)
            logits_CV.sub_(top_C.unsqueeze(-1))
            row_C1, here_C = head.local(targets_K[part])
            target_C = logits_CV.gather(-1, row_C1).squeeze(-1).where(here_C, 0.0) if head.n_rows else top_C * 0
            exp_CV = logits_CV.exp()
            sums_3C = torch.stack([target_C, exp_CV.sum(-1), exp_CV.mul_(logits_CV).sum(-1)])
            target_C, total_C, weighted_C = head.all_reduce(sums_3C)
            log_total_C = total_C.log()
            logprobs_K[part] = target_C - log_total_C
            entropy_K[part] = log_total_C - weighted_C / total_C
            lse_K[part] = top_C + log_total_C
        ctx.save_for_backward(hidden_KD, weight_VD, targets_K, lse_K)
        ctx.head = head
        ctx.mark_non_differentiable(entropy_K)
        return logprobs_K, entropy_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_KD, weight_VD, targets_K, lse_K = ctx.saved_tensors
        head: _Head = ctx.head
        grad_K = grads[0] / head.temperature
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden_KD = torch.empty_like(hidden_KD) if want_hidden else None
        grad_weight_VD = head.weight_grad
        if grad_weight_VD is None and want_weight:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=lse_K.dtype)
        for start in range(0, hidden_KD.shape[0], head.chunk):
            part = slice(start, start + head.chunk)
            logits_CV = head.logits(hidden_KD[part], weight_VD)
            grad_C1 = grad_K[part].unsqueeze(-1)
            # d logprob / d logit = onehot - softmax
            grad_CV = logits_CV.sub_(lse_K[part].unsqueeze(-1)).exp_().mul_(-grad_C1)
            row_C1, here_C = head.local(targets_K[part])
            if head.n_rows:
                grad_CV.scatter_add_(-1, row_C1, grad_C1.where(here_C.unsqueeze(-1), 0.0))
            grad_CV = grad_CV.to(hidden_KD.dtype)
            if grad_hidden_KD is not None:
                torch.mm(grad_CV, weight_VD[: head.n_rows], out=grad_hidden_KD[part])
            if want_weight and grad_weight_VD is not None:
                _add_product(grad_weight_VD[: head.n_rows], grad_CV.t(), hidden_KD[part])
        if grad_hidden_KD is not None:
            head.all_reduce(grad_hidden_KD)
        if head.weight_grad is not None or not want_weight:
            return grad_hidden_KD, None, None, None
        assert grad_weight_VD is not None
        return grad_hidden_KD, grad_weight_VD.to(weight_VD.dtype), None, None


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in the precision of out where the device can multiply so."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += torch.mm(a, b)
