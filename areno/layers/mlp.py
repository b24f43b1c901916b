"""The MLP of a layer.

Shape letters: N tokens, D hidden size, I inner size of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from areno.layers.linear import ColumnParallelLinear, RowParallelLinear
from areno.layers.parallel import wait_for
from areno.layers.shard import WeightSpec


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x), arXiv 2002.05202; gelu: with the tanh form of GELU instead.

    split: see Linear. Input and output, and their gradients, are then shares of the tokens.

    `forward` runs under autograd, the two fused halves outside it.
    """

    def __init__(self, hidden_size: int, inner_size: int, spec: WeightSpec, *, bias: bool, gelu: bool = False):
        super().__init__()
        self.gelu = gelu
        self.gate_up = ColumnParallelLinear(hidden_size, (inner_size, inner_size), spec, bias=bias)
        self.down = RowParallelLinear(inner_size, hidden_size, spec, bias=bias)

    def forward(self, x_ND: Tensor, split: bool = False) -> Tensor:
        gate, up = self.gate_up(x_ND, split).chunk(2, dim=-1)
        return self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up, split)

    def fused_forward(
        self, x_ND: Tensor, split: bool = False, whole: bool = True
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The output, the intermediate result that `fused_backward` takes if it is kept, and what it always needs.

        whole: of RowParallelLinear.
        """
        from areno.kernels.elementwise.triton_swiglu import swiglu

        if (adapter := self.gate_up.adapter_below()) is not None:
            assert not split, "sampling divides no tokens"
            both_NX = adapter.with_first_product(x_ND)
            return self.down(adapter.swiglu_below(both_NX, self.gelu), split, whole), both_NX, ()
        gate_up_N2I = self.gate_up(x_ND, split)
        return self.down(swiglu(gate_up_N2I, self.gelu), split, whole), gate_up_N2I, ()

    def fused_backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        kept: Tensor | None,
        saved: tuple[Tensor, ...] = (),
        split: bool = False,
    ) -> Tensor:
        """The gradient of x. Adds to the gradients of the parameters. kept: None is computed again."""
        from areno.kernels.elementwise.triton_swiglu import swiglu_backward

        work = None
        if split:  # the input comes while the output's gradient goes through what was kept
            grad_ND = self.down.tp.joined(grad_ND)
            x_ND, work = self.down.tp.begin_join(x_ND)
            if kept is None:
                wait_for(work)
        gate_up_N2I = self.gate_up(x_ND) if kept is None else kept
        grad_gate_up_N2I, act_NI = swiglu_backward(self.down.input_gradient(grad_ND), gate_up_N2I, self.gelu)
        self.down.accumulate(grad_ND, act_NI)
        del act_NI, gate_up_N2I
        if work is not None:
            wait_for(work)
        self.gate_up.accumulate(grad_gate_up_N2I, x_ND)
        return self.gate_up.input_gradient(grad_gate_up_N2I, split)
