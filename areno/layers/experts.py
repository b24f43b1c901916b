"""The matrices of a layer's experts, stacked, and their LoRA adapters.

Rows are copies of tokens, sorted by expert (`areno/kernels/experts`). A rank has whole experts, so adapters need no
collective. Shape letters: E experts of this rank, M rows, I input features, O output features, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from areno.kernels.experts import ExpertGroups, add_expert_lora, add_grouped_matmul, grouped_matmul, reference
from areno.layers.adapter import draw_adapter
from areno.layers.config import AdapterSpec
from areno.layers.shard import Layout, TensorPart, WeightSpec


def _parts(
    n_experts: int, n_local: int, rank: int, shapes: Sequence[tuple[int, ...]], alternating: int = 1
) -> tuple[TensorPart, ...]:
    """Return the parts of a parameter that stacks tensors of `shapes` for each of the experts `rank` has."""
    parts, offset = [], 0
    for expert in range(n_experts):
        holder = expert // n_local
        for shape in shapes:
            held = shape[0] if holder == rank else 0
            parts.append(TensorPart(shape, offset, 0, size=held, holder=holder, alternating=alternating))
            offset += held
    return tuple(parts)


class ExpertAdapter(nn.Module):
    """A LoRA adapter of each expert of this rank: y = x W^T + scaling * (x A^T) B^T.

    The projections that an expert's matrix stacks, gate and up, share one A, as in peft.

    Attributes:
        a: the A matrices, stacked by rows (E r, I).
        b: the B matrices, stacked by rows (E O, r).
        layout: for "a" and "b", the matrices of all experts.
        on: if False, the layer computes as if it had no adapter.
    """

    def __init__(self, matrices: ExpertMatrices, adapters: AdapterSpec):
        super().__init__()
        weight, n_local, rank = matrices.weight, matrices.n_local, adapters.rank
        spec = WeightSpec(weight.dtype, weight.device, matrices.tp)
        self.scaling, self.rank, self.on, self.n_local = adapters.scaling, rank, True, n_local
        n_in, n_out = weight.shape[1], matrices.out_size
        self.a, self.b = spec.empty(n_local * rank, n_in), spec.empty(n_local * n_out, rank)
        given = n_local * spec.tp.size, n_local, spec.tp.rank
        self.layout: Layout = {"a": _parts(*given, [(rank, n_in)]), "b": _parts(*given, [(n_out, rank)])}

    @property
    def a_ErI(self) -> Tensor:
        return self.a.unflatten(0, (self.n_local, self.rank))

    @property
    def b_EOr(self) -> Tensor:
        return self.b.unflatten(0, (self.n_local, -1))

    def forward(self, y_MO: Tensor, x_MI: Tensor, ends_E: Tensor, row_multiple: int = 1) -> Tensor:
        """Return `y_MO`, the products without adapters, plus the adapters' outputs. For autograd, in plain torch."""
        h_Mr = reference.grouped_matmul(x_MI, self.a_ErI, ends_E, False, row_multiple)
        return reference.add_expert_lora(y_MO, h_Mr, self.b_EOr, ends_E, self.scaling, False, row_multiple)

    def add_output(self, y_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Do the same outside autograd. May change `y_MO` in place."""
        h_Mr = grouped_matmul(x_MI, self.a_ErI, ends_E)
        return add_expert_lora(y_MO, h_Mr, self.b_EOr, ends_E, self.scaling)

    def inner_gradient(self, grad_MO: Tensor, ends_E: Tensor) -> Tensor:
        """Return the gradient with respect to scaling * x A^T, (M, r)."""
        return grouped_matmul(grad_MO, self.b_EOr, ends_E, transposed=True)

    def add_input_gradient(self, grad_x_MI: Tensor, grad_h_Mr: Tensor, ends_E: Tensor) -> Tensor:
        """Return `grad_x_MI`, the gradient through the weight, plus that through the adapter. May change it."""
        return add_expert_lora(grad_x_MI, grad_h_Mr, self.a_ErI, ends_E, self.scaling, transposed=True)

    def accumulate_grad(self, grad_MO: Tensor, x_MI: Tensor, grad_h_Mr: Tensor, ends_E: Tensor) -> None:
        """Add the gradients of A and B to their float32 `.grad`, unless they are frozen or the adapter is off."""
        if not (self.on and self.a.requires_grad):
            return
        assert self.a.grad is not None
        assert self.b.grad is not None
        h_Mr = grouped_matmul(x_MI, self.a_ErI, ends_E)
        add_grouped_matmul(self.b.grad.view_as(self.b_EOr), grad_MO, h_Mr, ends_E, self.scaling)
        add_grouped_matmul(self.a.grad.view_as(self.a_ErI), grad_h_Mr, x_MI, ends_E, self.scaling)

    def init_weights(self, generator: torch.Generator) -> None:
        draw_adapter(self.layout["a"], self.a, self.b, generator)

    @torch.no_grad()
    def merged_weight(self, stack_EOI: Tensor) -> Tensor:
        """Compute weight + scaling * B A of each expert in fp32. Return (E O, I) in the dtype of the weight."""
        out = stack_EOI.detach().clone()
        for out_OI, a_rI, b_Or in zip(out, self.a_ErI, self.b_EOr, strict=True):
            out_OI.copy_(out_OI.float() + self.scaling * (b_Or.float() @ a_rI.float()))
        return out.flatten(0, 1)


class ExpertMatrices(nn.Module):
    """One weight matrix of each expert of this rank, stacked by rows: `weight` is (E * O, I).

    Each expert's matrix may itself stack several checkpoint tensors, such as gate and up. `sizes`: their output sizes.
    Or it is one checkpoint tensor in which the rows of several matrices alternate, see `TensorPart.alternating`.
    Products leave `bias` (E * O,) out. The caller adds it in the next step.
    """

    def __init__(
        self,
        n_experts: int,
        sizes: tuple[int, ...],
        in_size: int,
        spec: WeightSpec,
        bias: bool = False,
        alternating: int = 1,
    ):
        super().__init__()
        self.tp = spec.tp
        self.n_local = spec.tp.shard_size(n_experts, "experts")
        self.out_size = sum(sizes)
        self.weight = spec.empty(self.n_local * self.out_size, in_size)
        shapes = [(size, in_size) for size in sizes]
        self.layout: Layout = {"weight": _parts(n_experts, self.n_local, spec.tp.rank, shapes, alternating)}
        self.bias = spec.empty(self.n_local * self.out_size) if bias else None
        if bias:
            self.layout["bias"] = _parts(n_experts, self.n_local, spec.tp.rank, [(size,) for size in sizes])
        self.adapter: ExpertAdapter | None = None

    def add_adapter(self, adapters: AdapterSpec) -> ExpertAdapter:
        """Add LoRA adapters with uninitialised weights."""
        self.adapter = ExpertAdapter(self, adapters)
        return self.adapter

    @property
    def stack_EOI(self) -> Tensor:
        return self.weight.unflatten(0, (self.n_local, self.out_size))

    @property
    def bias_EO(self) -> Tensor | None:
        return None if self.bias is None else self.bias.view(self.n_local, self.out_size)

    @property
    def active_adapter(self) -> ExpertAdapter | None:
        return self.adapter if self.adapter is not None and self.adapter.on else None

    def forward(self, x_MI: Tensor, ends_E: Tensor, row_multiple: int = 1) -> Tensor:
        """Return the product of each row with its expert's matrix, (M, O). For autograd, in plain torch."""
        y_MO = reference.grouped_matmul(x_MI, self.stack_EOI, ends_E, False, row_multiple)
        adapter = self.active_adapter
        return y_MO if adapter is None else adapter(y_MO, x_MI, ends_E, row_multiple)

    def matmul(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        """Do the same outside autograd."""
        y_MO = grouped_matmul(x_MI, self.stack_EOI, ends_E)
        return y_MO if self.active_adapter is None else self.active_adapter.add_output(y_MO, x_MI, ends_E)

    def inner_gradient(self, grad_MO: Tensor, ends_E: Tensor) -> Tensor | None:
        """Return `ExpertAdapter.inner_gradient` for the next two functions, None without an adapter."""
        return None if self.active_adapter is None else self.active_adapter.inner_gradient(grad_MO, ends_E)

    def input_gradient(self, grad_MO: Tensor, grad_h_Mr: Tensor | None, ends_E: Tensor) -> Tensor:
        grad_MI = grouped_matmul(grad_MO, self.stack_EOI, ends_E, transposed=True)
        adapter = self.active_adapter
        if adapter is None or grad_h_Mr is None:
            return grad_MI
        return adapter.add_input_gradient(grad_MI, grad_h_Mr, ends_E)

    def accumulate_grad(
        self,
        grad_MO: Tensor,
        x_MI: Tensor,
        grad_h_Mr: Tensor | None,
        groups: ExpertGroups,
        weights_Nk: Tensor | None = None,
    ) -> None:
        """Add the gradients of weight, bias and adapter to their float32 `.grad`. Frozen parameters are skipped.

        `weights_Nk`, the router's weights (None: 1), are for the bias. `x_MI` is multiplied by them already.
        """
        if self.bias is not None and self.bias.requires_grad:
            assert self.bias.grad is not None
            weights_M = None if weights_Nk is None else weights_Nk.flatten().index_select(0, groups.choices_M)
            of_rows_M = grad_MO.new_ones(len(grad_MO)) if weights_M is None else weights_M.to(grad_MO)
            add_grouped_matmul(self.bias.grad.view(self.n_local, -1, 1), grad_MO, of_rows_M.unsqueeze(1), groups.ends_E)
        if self.weight.requires_grad:
            assert self.weight.grad is not None
            add_grouped_matmul(self.weight.grad.view_as(self.stack_EOI), grad_MO, x_MI, groups.ends_E)
        if self.adapter is not None and grad_h_Mr is not None:
            self.adapter.accumulate_grad(grad_MO, x_MI, grad_h_Mr, groups.ends_E)

    def merged_weight(self) -> Tensor:
        """Return the weight, or a copy of it with the adapter merged in if one is on."""
        return self.weight if self.active_adapter is None else self.active_adapter.merged_weight(self.stack_EOI)
