"""Routing of tokens to experts during an optimizer step: replayed routes, statistics, and the balancing loss.

The auxiliary loss is that of the Switch Transformer (arXiv 2101.03961, equations 4 to 6) over all layers together,
as in transformers (load_balancing_loss_func): E sum_e f_e P_e, where E is the number of experts in a layer. f_e is
the fraction of choices that fall on expert e, and P_e the mean router probability of e, both over all tokens and
layers. f_e is taken over the whole step and has no gradient. So it must be known before the first backward pass, and
an extra forward pass over all micro-batches counts the choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from areno.engine.train.packing import LocalTokens, PackedTokens
from areno.layers.parallel import ParallelGroup
from areno.layers.routing import Routing


class StepRouting:
    """Controls and counts the routing of tokens to experts in a step. Does nothing for a model without experts.

    Call `begin_step` for each step, then for each micro-batch `begin_pass` before its forward pass and `add` after it,
    and at last `add_statistics`. Scoring needs only `begin_pass`. `coefficient` is 0 for no auxiliary loss.
    """

    def __init__(self, routing: Routing | None, coefficient: float, dp: ParallelGroup):
        self._routing, self._coefficient, self._dp = routing, coefficient, dp
        self._balance_E: Tensor | None = None
        self._observes = False
        self.restart()

    def begin_pass(self, packed: PackedTokens, share: LocalTokens) -> None:
        """Set the experts to replay, and the auxiliary loss, for the forward pass of a micro-batch."""
        if self._routing is None:
            return
        n = len(share.tokens_n)
        n_here = max(0, min(n, share.n_tokens - share.first))  # the rest is padding
        counts_N = None if packed.shared is None else packed.shared.counts_N[share.first : share.first + n_here]
        self._n_tokens = n_here if counts_N is None else counts_N.sum().long()
        given = None if packed.routes_NLk is None else packed.routes_NLk[share.first : share.first + n]
        observes = self._observes or torch.is_grad_enabled()
        self._routing.configure(given, self._balance_E, n_here, counts_N, observes=observes)

    def free_tensors(self) -> None:
        """Free the tensors that the last forward passes have stored for routing."""
        if self._routing is not None:
            self._routing.configure()

    def begin_step(self, batches: Iterable[PackedTokens], run: Callable[[PackedTokens], object]) -> None:
        """Count how often the tokens of a step choose each expert, by a forward pass over its micro-batches.

        Does nothing without an auxiliary loss. With an auxiliary loss, all data-parallel ranks must call this.
        """
        self._balance_E = None
        if self._routing is None or not self._coefficient:
            return
        self.restart()
        self._observes = True
        with torch.no_grad():
            for packed in batches:
                run(packed)
                self.count_experts()
        self._observes = False
        n_chosen_E = self._sums_LX[:, : self._routing.experts.n_experts].sum(0)
        counts = self._dp.all_reduce(torch.cat([n_chosen_E, self._n_seen.view(1)]))
        # A step without tokens has none to balance either.
        rows = counts[-1].clamp(min=1) * self._routing.n_layers
        scale = self._coefficient * self._routing.experts.n_experts
        self._balance_E = (scale * counts[:-1] / rows.square()).float()

    def restart(self) -> None:
        self._sums_LX = self._n_seen = torch.zeros((), dtype=torch.float64)

    def count_experts(self) -> None:
        """Add the experts chosen in the last forward pass to the counts, unless the pass only scored rows."""
        if self._routing is None or not self._routing.observes:
            return
        loads = torch.stack([self._routing.loads[layer] for layer in range(self._routing.n_layers)])
        self._sums_LX = self._sums_LX.to(loads.device) + loads.sum(1, dtype=torch.float64)
        self._n_seen = self._n_seen.to(loads.device) + self._n_tokens

    def add_statistics(self, numbers: dict[str, float]) -> None:
        """Add statistics of the step over all data-parallel ranks, which must all call this.

        The violation of an expert is its load (tokens that chose it) divided by the mean load in its layer, minus 1.
        router_entropy is a fraction of its largest possible value. router_changed is the fraction of choices in which
        replayed experts differ from the router's own. router_aux_loss has no coefficient, and equals the number of
        experts per token if all loads are equal.
        """
        if self._routing is None:
            return
        experts, n_layers = self._routing.experts, self._routing.n_layers
        totals = self._dp.all_reduce(torch.cat([self._sums_LX.flatten(), self._n_seen.view(1)])).cpu()
        sums_LX, n_tokens = totals[:-1].view(n_layers, -1), float(totals[-1])
        chosen_LE, probability_LE, others_L2 = sums_LX.tensor_split((experts.n_experts, 2 * experts.n_experts), dim=1)
        probability_E, (entropy, changed) = probability_LE.sum(0), others_L2.sum(0).tolist()
        rows = max(1.0, n_tokens * n_layers)
        violation_LE = chosen_LE / chosen_LE.mean(1, keepdim=True).clamp(min=1e-9) - 1
        aux = experts.n_experts * float((chosen_LE.sum(0) * probability_E).sum()) / rows**2
        numbers |= {
            "router_max_violation": float(violation_LE.amax(1).mean()),
            "router_mean_violation": float(violation_LE.abs().mean()),
            "router_entropy": entropy / rows / max(math.log(experts.n_experts), 1e-9),
            "router_changed": changed / rows / experts.top_k,
            "router_aux_loss": aux,
        }
        numbers["total_loss"] += self._coefficient * aux
