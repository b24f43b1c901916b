"""The MLP of a layer: a gated MLP, or a mixture of experts of which each tensor-parallel rank has some.

In a mixture, a router gives each token a probability for each expert. The token goes through the most probable experts,
and their outputs are summed with these probabilities as weights (Shazeer et al. 2017, arXiv 1701.06538; Fedus et al.
2021, "Switch Transformers", arXiv 2101.03961). No token is dropped. Each rank computes its own experts for all tokens.
So the ranks communicate as in a row-parallel layer: they sum their outputs once. If not `whole`, they return the
partial sums. `split` is sequence parallelism, as in `linear.py`. A shared expert is a gated MLP that every token uses
(Dai et al. 2024, "DeepSeekMoE", arXiv 2401.06066). Its partial sum joins that of the other experts before the sum over
the ranks.

Both kinds of MLP have `forward` for autograd. The fused layers call two methods without autograd:

- `fused_forward` returns (output, kept, saved). `kept` holds the outputs of gate and up, side by side, or nothing
  unless `keep`. `saved` holds the chosen experts, if any.
- `fused_backward` computes `kept` again if it is empty. It returns the gradient with respect to x, summed over the
  ranks, and adds the gradients of the parameters to their `.grad`.

A gated MLP computes long rows in pieces (`mlp_piece_tokens`), because its inner activations take several times the
memory of its input. `kept` has a tensor for each piece.

Shape letters: N tokens, D hidden size, E experts (of all ranks for the router, of this rank elsewhere), k experts of a
token, M = N k copies of tokens, sorted by expert, I inner size of this rank or of an expert, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from areno.kernels.experts import (
    BiasedClamp,
    ExpertGroups,
    choose_experts,
    combine,
    expert_glu,
    expert_weights,
    group_by_expert,
    reference,
    weighted_glu_backward,
)
from areno.kernels.fp8.matmul import QuantizedMatrix
from areno.kernels.matmul import float32_matmul
from areno.layers.config import MoEConfig, mlp_piece_tokens
from areno.layers.experts import ExpertMatrices
from areno.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from areno.layers.parallel import wait_for
from areno.layers.routing import Routing
from areno.layers.shard import Layout, TensorPart, WeightSpec


class GatedMLP(nn.Module):
    """The MLP down(silu(gate x) * up x), arXiv 2002.05202. With `gelu`, the tanh form of GELU replaces SiLU."""

    def __init__(self, hidden_size: int, inner_size: int, spec: WeightSpec, *, bias: bool, gelu: bool = False):
        super().__init__()
        self.gelu = gelu
        self.gate_up = ColumnParallelLinear(hidden_size, (inner_size, inner_size), spec, bias=bias)
        self.down = RowParallelLinear(inner_size, hidden_size, spec, bias=bias)

    def forward(self, x_ND: Tensor, split: bool = False, whole: bool = True) -> Tensor:
        gate, up = self.gate_up(x_ND, split).chunk(2, dim=-1)
        return self.down((F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * up, split, whole)

    def fused_forward(
        self, x_ND: Tensor, split: bool, whole: bool, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return (output, kept, saved). If `gate_up` has a `stacked_adapter`, `kept` is empty."""
        from areno.kernels.elementwise.triton_swiglu import swiglu
        from areno.kernels.elementwise.triton_swiglu_fp8 import swiglu_codes

        if (adapter := self.gate_up.stacked_adapter()) is not None:
            assert not split, "sampling is not sequence-parallel"
            act_NI = adapter.swiglu_stacked(adapter.stacked_product(x_ND), self.gelu)
            return self.down(act_NI, split, whole), (), ()
        kept: list[Tensor] = []
        x_ND = self.down.tp.all_gather_rows(x_ND) if split else x_ND

        def compute(part: slice) -> Tensor:
            gate_up_N2I = self.gate_up(x_ND[part])
            if keep:
                kept.append(gate_up_N2I)
            if (quantized := self._quantized_down(gate_up_N2I)) is not None:
                codes = swiglu_codes(gate_up_N2I, self.gelu, quantized.row_multiple)
                return quantized.matmul_codes(*codes, len(gate_up_N2I), gate_up_N2I.dtype)
            return self.down(swiglu(gate_up_N2I, self.gelu), whole=False)

        out_ND = self._in_pieces(compute, len(x_ND))
        return self.down.sum_over_ranks(out_ND, split) if whole else out_ND, tuple(kept), ()

    def fused_backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        kept: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        split: bool,
        whole: bool = True,
    ) -> Tensor:
        from areno.kernels.elementwise.triton_swiglu import swiglu_backward
        from areno.kernels.elementwise.triton_swiglu_fp8 import swiglu_backward_codes

        work = None
        if split:  # gather the input while the gradient of `down` is computed
            grad_ND = self.down.tp.all_gather_rows(grad_ND)
            x_ND, work = self.down.tp.begin_all_gather_rows(x_ND)
            if not kept:
                wait_for(work)
        pieces = iter(kept)

        def compute(part: slice) -> Tensor:
            gate_up_N2I = next(pieces) if kept else self.gate_up(x_ND[part])
            grad_h_Nr = self.down.inner_gradient(grad_ND[part])
            grad_act_NI = self.down.input_gradient(grad_ND[part], grad_h_Nr)
            given, codes, quantized = (grad_act_NI, gate_up_N2I, self.gelu), None, self.gate_up.quantized
            takes_codes = self._quantized_down(gate_up_N2I) is not None
            if takes_codes and quantized is not None and quantized.dgrad and not quantized.wgrad:
                grad_gate_up_N2I, act_NI, codes = swiglu_backward_codes(*given, quantized.exponents_O)
            else:
                grad_gate_up_N2I, act_NI = swiglu_backward(*given)
            del given, gate_up_N2I, grad_act_NI
            self.down.accumulate_grad(grad_ND[part], act_NI, grad_h_Nr, is_rounded=codes is not None)
            del act_NI
            if work is not None:
                wait_for(work)
            grad_h_Nr = self.gate_up.inner_gradient(grad_gate_up_N2I)
            self.gate_up.accumulate_grad(grad_gate_up_N2I, x_ND[part], grad_h_Nr)
            return self.gate_up.partial_input_gradient(grad_gate_up_N2I, grad_h_Nr, codes)

        grad_x_ND = self._in_pieces(compute, len(grad_ND))
        return self.gate_up.sum_input_gradient(grad_x_ND, split) if whole else grad_x_ND

    def partial_output(self, kept: tuple[Tensor, ...]) -> Tensor:
        """Return this rank's partial sum again, from what `fused_forward` has kept."""
        from areno.kernels.elementwise.triton_swiglu import swiglu

        pieces = [self.down(swiglu(gate_up_N2I, self.gelu), whole=False) for gate_up_N2I in kept]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _quantized_down(self, gate_up_N2I: Tensor) -> QuantizedMatrix | None:
        """Return the weight of `down` in FP8 if the activation may round its results for it, else None."""
        linears = self.gate_up, self.down
        takes_codes = all(
            linear.quantized is not None and linear.adapter is None and linear.quantized.uses_units(gate_up_N2I)
            for linear in linears
        )
        return self.down.quantized if takes_codes else None

    def _in_pieces(self, compute: Callable[[slice], Tensor], n_tokens: int) -> Tensor:
        """Return the rows that `compute` returns for all tokens, computed for some of them at a time."""
        size = mlp_piece_tokens(sum(self.gate_up.local_sizes))
        if n_tokens <= size:
            return compute(slice(0, n_tokens))
        first_ND = compute(slice(0, size))
        out_ND = first_ND.new_empty((n_tokens, first_ND.shape[1]))
        out_ND[:size] = first_ND
        for start in range(size, n_tokens, size):
            part = slice(start, min(start + size, n_tokens))
            out_ND[part] = compute(part)
        return out_ND


class Router(Linear):
    """The linear layer that scores the experts. Every rank has the whole weight and computes the same gradient.

    Logits are sums in fp32, because a rounding error may change the chosen experts. With one output, it is the gate of
    the shared expert.
    """

    def __init__(self, hidden_size: int, n_experts: int, spec: WeightSpec, bias: bool = False):
        super().__init__(n_experts, hidden_size, spec, bias=bias)
        self.layout: Layout = {"weight": (TensorPart((n_experts, hidden_size)),), "bias": (TensorPart((n_experts,)),)}
        self.e_score_correction_bias: nn.Parameter | None = None

    def add_correction_bias(self, spec: WeightSpec) -> None:
        """Add the bias that only changes which experts are chosen. It is float32, and never trained.

        It has memory of its own from the start, since buffers hold trained parameters only.
        """
        wide = WeightSpec(torch.float32, spec.device, spec.tp)
        self.e_score_correction_bias = wide.empty(len(self.weight))
        self.e_score_correction_bias.requires_grad = False
        self.layout["e_score_correction_bias"] = (TensorPart((len(self.weight),)),)

    def forward(self, x_ND: Tensor) -> Tensor:
        if x_ND.is_cuda and not torch.is_grad_enabled():
            y_NO = float32_matmul(x_ND, self.weight)
        else:
            y_NO = F.linear(x_ND.float(), self.weight.float())
        return y_NO if self.bias is None else y_NO + self.bias.float()


class ExpertMLP(nn.Module):
    """The sum of down(silu(gate x) * up x) over a token's experts, weighted by the router, and of the shared expert.

    With `experts.clamped`, another activation replaces silu(gate) * up.

    `layer` counts only the layers with experts. With `engine.exact`, `forward` pads each expert's rows to a multiple of
    `row_multiple`.
    """

    def __init__(self, hidden_size: int, experts: MoEConfig, layer: int, routing: Routing, spec: WeightSpec):
        super().__init__()
        self.tp, self.experts, self.layer, self.routing = spec.tp, experts, layer, routing
        self.row_multiple = 1
        inner = experts.inner_size
        self.router = Router(hidden_size, experts.n_experts, spec, experts.biased)
        if experts.sigmoid:
            self.router.add_correction_bias(spec)
        sizes, alternating = ((inner, inner), 1) if experts.clamped is None else ((2 * inner,), 2)
        given = experts.n_experts, sizes, hidden_size, spec, experts.biased
        self.experts_gate_up = ExpertMatrices(*given, alternating)
        self.experts_down = ExpertMatrices(experts.n_experts, (hidden_size,), inner, spec, experts.biased)
        self.shared = GatedMLP(hidden_size, experts.shared_size, spec, bias=False) if experts.shared_size else None
        self.shared_gate = Router(hidden_size, 1, spec) if experts.shared_gated else None

    def forward(self, x_ND: Tensor, split: bool = False) -> Tensor:
        if split:  # the router's gradient is equal on all ranks, and `copy_in` sums that of the experts
            x_ND = self.tp.gather_rows_equal(x_ND)
        logits_NE = self.router(x_ND)
        chosen_Nk = self.routing.choose_experts(self.layer, logits_NE, self.router.e_score_correction_bias)
        weights_Nk = self.tp.copy_in(self._routing_weights(logits_NE, chosen_Nk))
        groups = self._group_by_expert(chosen_Nk)
        rows_MD = self.tp.copy_in(x_ND).index_select(0, groups.tokens_M)
        how = groups.ends_E, self.row_multiple
        gate_up_M2I = self.experts_gate_up(rows_MD, *how)
        y_MD = self.experts_down(reference.expert_glu(gate_up_M2I, groups.ends_E, self._clamp), *how)
        out_ND = reference.combine(y_MD, groups.copies_Nk, weights_Nk, groups.ends_E, *self._output_bias(chosen_Nk))
        if self.shared is not None:
            shared_ND = self.shared(x_ND, whole=False)
            if self.shared_gate is not None:
                shared_ND = shared_ND * self.tp.copy_in(self.shared_gate(x_ND)).sigmoid().to(shared_ND.dtype)
            out_ND = out_ND + shared_ND
        return self.tp.scatter_rows(out_ND) if split else self.tp.reduce_out(out_ND)

    @property
    def _clamp(self) -> BiasedClamp | None:
        clamped, bias_EO = self.experts.clamped, self.experts_gate_up.bias_EO
        return None if clamped is None or bias_EO is None else BiasedClamp(bias_EO, clamped.alpha, clamped.limit)

    def _output_bias(self, chosen_Nk: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the biases of `down` and the chosen experts as indices of this rank's, or None without biases."""
        bias_ED = self.experts_down.bias_EO
        if bias_ED is None:
            return None, None
        return bias_ED, chosen_Nk.long() - self.tp.rank * self.experts_down.n_local

    def _group_by_expert(self, chosen_Nk: Tensor) -> ExpertGroups:
        n_local = self.experts_gate_up.n_local
        return group_by_expert(chosen_Nk, self.tp.rank * n_local, n_local)

    def _routing_weights(self, logits_NE: Tensor, chosen_Nk: Tensor) -> Tensor:
        experts, routing = self.experts, self.routing
        weights_Nk = expert_weights(logits_NE, chosen_Nk, experts.normalised, experts.sigmoid, experts.scale)
        if routing.balance_E is None or not torch.is_grad_enabled():
            return weights_Nk
        balance = routing.balance_E, routing.n_tokens, routing.counts_N
        probs_NE = reference.probabilities(logits_NE, experts.sigmoid)
        return _BalanceGradient.apply(weights_Nk, probs_NE, *balance)  # type: ignore[return-value]

    def fused_forward(
        self, x_ND: Tensor, split: bool, whole: bool, keep: bool
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        if split:
            x_ND = self.tp.all_gather_rows(x_ND)
        logits_NE, routing = self.router(x_ND), self.routing
        if routing.can_use_fused_routing:
            chosen_Nk, weights_Nk = choose_experts(
                logits_NE,
                self.experts.top_k,
                self.experts.normalised,
                self.router.e_score_correction_bias,
                self.experts.scale,
            )
            routing.record(self.layer, logits_NE, chosen_Nk)
        else:
            chosen_Nk = routing.choose_experts(self.layer, logits_NE, self.router.e_score_correction_bias)
            weights_Nk = self._routing_weights(logits_NE, chosen_Nk)
        groups = self._group_by_expert(chosen_Nk)
        rows_MD = x_ND.index_select(0, groups.tokens_M)
        gate_up_M2I = self.experts_gate_up.matmul(rows_MD, groups.ends_E)
        del rows_MD
        act_MI = expert_glu(gate_up_M2I, groups.ends_E, self._clamp)
        y_MD = self.experts_down.matmul(act_MI, groups.ends_E)
        del act_MI
        out_ND = combine(y_MD, groups.copies_Nk, weights_Nk, groups.ends_E, *self._output_bias(chosen_Nk))
        del y_MD
        of_shared: tuple[Tensor, ...] = ()
        if self.shared is not None:
            from areno.kernels.elementwise.triton_gate import add_gated

            shared_ND, of_shared, _ = self.shared.fused_forward(x_ND, False, False, keep)
            if self.shared_gate is None:
                out_ND.add_(shared_ND)
            else:
                add_gated(out_ND, shared_ND, self.shared_gate(x_ND))
        if whole:
            out_ND = self.tp.reduce_scatter_rows(out_ND) if split else self.tp.reduce_out(out_ND)
        return out_ND, (gate_up_M2I, *of_shared) if keep else (), (chosen_Nk.to(routing.dtype),)

    def fused_backward(
        self, grad_ND: Tensor, x_ND: Tensor, kept: tuple[Tensor, ...], saved: tuple[Tensor, ...], split: bool
    ) -> Tensor:
        if split:
            grad_ND, x_ND = self.tp.all_gather_rows(grad_ND), self.tp.all_gather_rows(x_ND)
        (chosen_Nk,) = saved
        groups = self._group_by_expert(chosen_Nk)
        gate_up, down, ends_E = self.experts_gate_up, self.experts_down, groups.ends_E
        logits_NE = self.router(x_ND)
        with torch.enable_grad():
            weights_Nk = self._routing_weights(logits_NE.requires_grad_(), chosen_Nk)
        rows_MD = x_ND.index_select(0, groups.tokens_M)
        gate_up_M2I = kept[0] if kept else gate_up.matmul(rows_MD, ends_E)
        grad_MD = grad_ND.index_select(0, groups.tokens_M)
        grad_h_Mr = down.inner_gradient(grad_MD, ends_E)
        grad_MI = down.input_gradient(grad_MD, grad_h_Mr, ends_E)
        grad_gate_up_M2I, act_MI, grad_weights_Nk = weighted_glu_backward(
            grad_MI, gate_up_M2I, weights_Nk.detach(), groups.choices_M, ends_E, self._clamp
        )
        del gate_up_M2I, grad_MI
        down.accumulate_grad(grad_MD, act_MI, grad_h_Mr, groups, weights_Nk.detach())
        del grad_MD, act_MI
        grad_h_Mr = gate_up.inner_gradient(grad_gate_up_M2I, ends_E)
        gate_up.accumulate_grad(grad_gate_up_M2I, rows_MD, grad_h_Mr, groups)
        del rows_MD
        grad_x_MD = gate_up.input_gradient(grad_gate_up_M2I, grad_h_Mr, ends_E)
        grad_x_ND = combine(grad_x_MD, groups.copies_Nk, None, ends_E)
        bias_ED, experts_Nk = self._output_bias(chosen_Nk)
        if bias_ED is not None and experts_Nk is not None:
            grad_weights_Nk = grad_weights_Nk + _products_with_chosen(grad_ND, bias_ED, experts_Nk)
        grad_gate_N1 = None
        if self.shared is not None:
            grad_shared_ND, grad_gate_N1 = self._shared_backward(grad_ND, x_ND, kept[1:])
            grad_x_ND = grad_x_ND.add_(grad_shared_ND)
        grad_x_ND = self.tp.reduce_scatter_rows(grad_x_ND) if split else self.tp.all_reduce(grad_x_ND)
        # The parts of router and gate are the same on all ranks, so they are added after the sum.
        if grad_gate_N1 is None or self.tp.size == 1:
            grad_weights_Nk = self.tp.all_reduce(grad_weights_Nk)
        else:
            both = self.tp.all_reduce(torch.cat((grad_weights_Nk.float(), grad_gate_N1), dim=1))
            grad_weights_Nk, grad_gate_N1 = both.tensor_split((-1,), dim=1)
        (grad_logits_NE,) = torch.autograd.grad(weights_Nk, logits_NE, grad_weights_Nk)
        self._replicated_backward(grad_x_ND, self.router, grad_logits_NE, x_ND, split)
        if self.shared_gate is not None and grad_gate_N1 is not None:
            self._replicated_backward(grad_x_ND, self.shared_gate, grad_gate_N1, x_ND, split)
        return grad_x_ND

    def _replicated_backward(
        self, grad_x_ND: Tensor, linear: Linear, grad_NO: Tensor, x_ND: Tensor, split: bool
    ) -> None:
        """Add the gradient of a replicated weight, and that with respect to x to `grad_x_ND` (own rows if split)."""
        grad_NO = grad_NO.to(x_ND.dtype)
        linear.accumulate_grad(grad_NO, x_ND)
        grad_x_ND.addmm_(self.tp.own_rows(grad_NO) if split else grad_NO, linear.weight)

    def _shared_backward(self, grad_ND: Tensor, x_ND: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of the gradients with respect to x and to the logit of the gate, if there is one."""
        assert self.shared is not None
        if self.shared_gate is None:
            return self.shared.fused_backward(grad_ND, x_ND, kept, (), False, whole=False), None
        from areno.kernels.elementwise.triton_gate import add_gated_backward

        if kept:
            shared_ND = self.shared.partial_output(kept)
        else:
            shared_ND, kept, _ = self.shared.fused_forward(x_ND, False, False, True)
        grad_ND, grad_gate_N1 = add_gated_backward(grad_ND, shared_ND, self.shared_gate(x_ND))
        del shared_ND
        return self.shared.fused_backward(grad_ND, x_ND, kept, (), False, whole=False), grad_gate_N1


def _products_with_chosen(x_ND: Tensor, bias_ED: Tensor, experts_Nk: Tensor) -> Tensor:
    """Return the product of each token with the biases of its experts, 0 for those of other ranks, (N, k)."""
    is_here_Nk = (experts_Nk >= 0) & (experts_Nk < len(bias_ED))
    products_Nk = float32_matmul(x_ND, bias_ED).gather(1, experts_Nk.clamp(0, len(bias_ED) - 1))
    return products_Nk.masked_fill(~is_here_Nk, 0)


class _BalanceGradient(torch.autograd.Function):
    """Returns the weights, and gives `balance_E` (times `counts_N`) as the gradient of each token's probabilities.

    This is the gradient of the load-balancing loss. Padding after `n_tokens` gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, weights_Nk: Tensor, probs_NE: Tensor, balance_E: Tensor, n_tokens: int | None, counts_N: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(balance_E)
        ctx.n_tokens, ctx.counts_N, ctx.n_rows = n_tokens, counts_N, len(probs_NE)
        return weights_Nk.view_as(weights_Nk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (balance_E,) = ctx.saved_tensors
        grad_NE = balance_E.new_zeros(ctx.n_rows, len(balance_E))
        grad_NE[: ctx.n_tokens] = balance_E if ctx.counts_N is None else ctx.counts_N.unsqueeze(-1) * balance_E
        return grads[0], grad_NE, None, None, None
