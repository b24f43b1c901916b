"""The rule of flash-linear-attention (`pip install 'areno[fla]'`), where it is there and is right.

It keeps a chunk on the chip, where ours writes each product to memory; in exchange q, k and v are rounded to bfloat16.
It chooses the tiles of its kernels by their time, so two runs may add in different orders.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.kernels.delta.row_chunks import RowChunks

logger = logging.getLogger("areno")

Rule = Callable[..., "tuple[Tensor, Tensor]"]
_TRIED = (150, 64, 1, 3)  # lengths of rows
_AWAY = 0.02  # of the largest number that is right


@dataclass
class Library:
    """Of the whole process. allowed: whether it may be used; False where nothing may follow from the clock."""

    allowed: bool = True


LIBRARY = Library()


def library_rule(given: Tensor, own: Rule) -> Rule:
    """The library's rule for what has the dtype and device of `given`, with the arguments of `own`; else `own`."""
    if not LIBRARY.allowed or not given.is_cuda or given.dtype != torch.bfloat16:
        return own
    found = _tried(given.device.index or 0, own)
    return own if found is None else functools.partial(by_library, found)


def by_library(
    rule: Rule,
    q_NGK: Tensor,
    k_NGK: Tensor,
    v_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    chunks: RowChunks,
    before_RHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `chunked_delta`; rule: the library's function."""
    q, k, v = (each.to(torch.bfloat16).unsqueeze(0) for each in (q_NGK, k_NGK, v_NHV))
    out, after = rule(
        q, k, v, g=decay_NH.unsqueeze(0), beta=beta_NH.unsqueeze(0), scale=1.0, initial_state=before_RHKV,
        output_final_state=True, cu_seqlens=chunks.borders,
    )  # fmt: skip
    return out.squeeze(0).float(), after.float()


@functools.cache
def _tried(device: int, own: Rule) -> Rule | None:
    """The library's function, after it gave what ours gives on this device, gradients included. None without."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    with torch.cuda.device(device):
        try:
            problem = _problem(rule, own, torch.device("cuda", device))
        except Exception as error:  # whatever a library of another version raises
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if problem:
        logger.warning("recurrent states by areno's own products, not by flash-linear-attention: %s", problem)
        return None
    logger.info("recurrent states in training and prefill: flash-linear-attention")
    return rule


def _problem(rule: Rule, own: Rule, device: torch.device) -> str:
    """What is wrong with the library's results, if anything."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    n, starts = sum(_TRIED), torch.tensor([0, *_TRIED]).cumsum(0).tolist()
    q, k, v = draw(n, 2, 128), draw(n, 2, 128), draw(n, 4, 128)
    q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    given = [q * 128**-0.5, k, v, -draw(n, 4).square(), draw(n, 4).sigmoid()]
    before, upstream, results = draw(len(_TRIED), 4, 128, 128), draw(n, 4, 128), []
    with torch.enable_grad():
        rules: list[Rule] = [functools.partial(by_library, rule), own]
        for each in rules:
            leaves: list[Any] = [one.clone().requires_grad_() for one in given]
            out, after = each(*leaves, RowChunks.of(starts, device), before)
            results.append((out, after, *torch.autograd.grad(out, leaves, upstream)))
    for name, found, expected in zip(("results", "states", *"qkvgb"), *results, strict=True):
        away = (found.float() - expected).abs().max() / expected.abs().max()
        if not away < _AWAY:
            return f"its {name} are wrong by {away.item():.2g} of the largest"
    return ""
