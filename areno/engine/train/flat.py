"""All trained parameters of a model in one buffer, their gradients in another, their fp32 masters in a third.

One buffer means one collective for all gradients, and an update in a few large elementwise operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 16  # elements; every parameter starts at a multiple, so vectorised loads stay aligned in every dtype
CHUNK = 2**24  # elements worked on at once, which bounds the temporaries of the optimizer to 64 MiB each


@dataclass(frozen=True)
class Segment:
    """A stretch of the buffers whose parameters are treated alike."""

    start: int
    stop: int
    decayed: bool  # weight decay applies: matrices, but not norm weights and biases
    sharded: bool  # tensor-parallel ranks hold different pieces, not equal copies
    n_params: int  # elements without alignment padding


def flatten(
    named: Sequence[tuple[str, nn.Parameter]], is_sharded: Callable[[str], bool] | None = None, align: int = ALIGN
) -> tuple[torch.Tensor, list[Segment], dict[str, slice]]:
    """Make named parameters views of one buffer of their dtype: (buffer, its segments, name -> place in it)."""
    dtypes = {parameter.dtype for _, parameter in named}
    assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
    kinds: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        kind = (parameter.dim() >= 2, is_sharded is not None and is_sharded(name))
        kinds.setdefault(kind, []).append((name, parameter))

    segments: list[Segment] = []
    places: dict[str, slice] = {}
    end = 0
    for (decayed, sharded), members in sorted(kinds.items(), key=lambda item: item[0], reverse=True):
        start = end
        for name, parameter in members:
            places[name] = slice(end, end + parameter.numel())
            end += -(-parameter.numel() // align) * align
        segments.append(Segment(start, end, decayed, sharded, sum(p.numel() for _, p in members)))

    first = named[0][1]
    buffer = torch.zeros(end, dtype=first.dtype, device=first.device)
    for name, parameter in named:
        view = buffer[places[name]].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return buffer, segments, places


class FlatParameters:
    """Moves the trained parameters of `model` into one buffer and gives each a gradient in another.

    places: name -> its slice of params, grads and masters. shapes: name -> shape. grads: float32, whatever the model's
    dtype. Each `parameter.grad` is a view of it, so it is cleared by `grads.zero_()` and must never be set to None.
    masters: float32, the values that the optimizer updates; `params` itself where that is float32.
    frozen: the parameters whose requires_grad is False, in a buffer of their own; None where there are none.
    is_sharded: whether tensor-parallel ranks hold different pieces of a named parameter.
    align: elements; every trained parameter starts at a multiple of it.
    """

    def __init__(self, model: nn.Module, is_sharded: Callable[[str], bool] | None = None, align: int = ALIGN):
        named = list(model.named_parameters())  # a tied parameter appears once
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self.frozen = flatten(frozen)[0] if frozen else None
        self.params, self.segments, self.places = flatten(trained, is_sharded, align)
        self.shapes = {name: parameter.shape for name, parameter in trained}
        self.grads = torch.zeros(self.params.numel(), dtype=torch.float32, device=self.params.device)
        for name, parameter in trained:
            parameter.grad_dtype = torch.float32  # a bfloat16 parameter may then have, and accumulates in, fp32
            parameter.grad = self.grads[self.places[name]].view(parameter.shape)
        self.masters = self.params if self.params.dtype == torch.float32 else self.params.float()

    def chunks(self) -> Iterator[tuple[slice, Segment]]:
        """The buffers in slices of at most CHUNK elements, each within one segment."""
        for segment in self.segments:
            for start in range(segment.start, segment.stop, CHUNK):
                yield slice(start, min(start + CHUNK, segment.stop)), segment
