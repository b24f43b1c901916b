"""Padded rows, as TRL and verl compute losses on them, and our losses on the same rows without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areno.loss_fns import DataPack

LENGTHS, LONGEST = [5, 1, 7, 4, 6, 3], 7
Batch = dict[str, Tensor]


def batch(dtype: torch.dtype, seed: int, by_token: bool = False) -> Batch:
    """Rows of different lengths, in one of which tokens of a tool are not trained."""
    rng = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), LONGEST)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).int()
    tools = torch.ones_like(mask)
    tools[2, 2:4] = 0
    old = -torch.empty(shape, dtype=dtype).exponential_(generator=rng)
    advantages = torch.randn(shape if by_token else (len(LENGTHS), 1), generator=rng, dtype=dtype)
    more = {
        name: (old + 0.5 * torch.randn(shape, generator=rng, dtype=dtype)).clamp(max=-0.01) for name in ("now", "ref")
    }
    entropy = torch.rand(shape, generator=rng, dtype=dtype)
    return {
        "mask": mask,
        "tools": tools,
        "old": old,
        "advantages": advantages.expand(shape),
        "entropy": entropy,
        **more,
    }


def ours(loss_fn: Any, given: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
    now, inside = given["now"].clone().requires_grad_(), given["mask"].bool()
    trained = (given["mask"] * given["tools"]).bool()
    n_rows = len(LENGTHS)
    pack = DataPack(
        tokens=torch.zeros(int(inside.sum()), dtype=torch.int64),
        row_of_token=torch.arange(n_rows)[:, None].expand(inside.shape)[inside],
        loss_mask=trained[inside],
        n_rows=n_rows,
        step_tokens=int(trained.sum()),
        step_rows=n_rows,
        old_logprobs=given["old"][inside],
        rollout_logprobs=given["old"][inside],
        ref_logprobs=given["ref"][inside],
        advantages=given["advantages"][inside],
    )
    loss = loss_fn(pack, now[inside], **settings)[0]
    return loss.detach(), torch.autograd.grad(loss, now)[0]


def assert_same(
    own: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], factor: float = 1.0, bar64: float = 1e-9
) -> None:
    """Compare (loss, gradient) with that of another implementation, 1e-6 in float32."""
    bar = bar64 if own[0].dtype == torch.float64 else 1e-6
    assert other[1].abs().max() > 1e-3
    assert (factor * own[0] - other[0]).abs() < bar * max(1.0, other[0].abs().item())
    assert (factor * own[1] - other[1]).abs().max() < bar
