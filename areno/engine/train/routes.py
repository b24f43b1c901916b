"""The experts of a model over the micro-batches of an optimizer step: replayed, counted, and balanced.

The auxiliary loss is that of the Switch Transformer (arXiv 2101.03961, equations 4 to 6) over all layers together, as
in transformers (load_balancing_loss_func): E sum_e f_e P_e. f_e is the share of choices of expert e, and P_e the mean
router probability of e, both over all tokens and layers. f_e belongs to the whole step and has no gradient. So the
gradient of a micro-batch depends on the choices in all micro-batches, and a forward pass over all of them comes
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from areno.engine.train.packing import PackedTokens, TokenShare
from areno.layers.parallel import ParallelGroup
from areno.layers.routing import Routing


class StepRouting:
    """Routing of experts during an optimizer step.

    Call `begin_step` for each step; then for each micro-batch `begin` before its forward pass and `add` after it; then
    `finish`. A pass without statistics needs only `begin`.

    Args:
        routing: Routing of the model's layers.
        coefficient: Coefficient of the auxiliary loss. 0 for none.
        dp: Ranks that hold copies of the model.
    """

    def __init__(self, routing: Routing, coefficient: float, dp: ParallelGroup):
        self._routing, self._coefficient, self._dp = routing, coefficient, dp
        self._balance_E: Tensor | None = None
        self._observes = False
        self.restart()

    def begin(self, packed: PackedTokens, share: TokenShare) -> None:
        """Set the experts and the balance of the layers for this rank's share of a micro-batch."""
        n = len(share.tokens_n)
        self._n_tokens = max(0, min(n, share.n_tokens - share.first))  # the rest is padding
        given = None if packed.routes_NLk is None else packed.routes_NLk[share.first : share.first + n]
        observes = self._observes or torch.is_grad_enabled()
        self._routing.begin(given, self._balance_E, self._n_tokens, observes=observes)

    def end(self) -> None:
        """Free the tensors of the last passes."""
        self._routing.begin()

    def begin_step(self, batches: Iterable[PackedTokens], run: Callable[[PackedTokens], object]) -> None:
        """Count the choices of a step for the auxiliary loss. All copies must call this if there is such a loss.

        Args:
            batches: Micro-batches of the step.
            run: Forward pass.
        """
        self._balance_E = None
        if not self._coefficient:
            return
        self.restart()
        self._observes = True
        with torch.no_grad():
            for packed in batches:
                run(packed)
                self.add()
        self._observes = False
        counts = self._dp.all_reduce(torch.cat([self._chosen_LE.sum(0), self._n_seen.view(1)]))
        # A step without tokens has none to balance either.
        rows = counts[-1].clamp(min=1).double() * self._routing.n_layers
        scale = self._coefficient * self._routing.experts.n_experts
        self._balance_E = (scale * counts[:-1] / rows.square()).float()

    def restart(self) -> None:
        """Set all counts to 0, because the step starts or is repeated."""
        self._chosen_LE = self._probability_E = self._entropy = self._changed = torch.zeros(())
        self._n_seen = torch.zeros((), dtype=torch.int64)

    def add(self) -> None:
        """Count the choices of the last pass."""
        loads = [self._routing.loads[layer] for layer in range(self._routing.n_layers)]
        chosen_LE = torch.stack([load.chosen_E for load in loads])
        where = chosen_LE.device
        self._chosen_LE = self._chosen_LE.to(where, torch.int64) + chosen_LE
        probability_E = torch.stack([load.probability_E for load in loads]).double().sum(0)
        self._probability_E = self._probability_E.to(where) + probability_E
        self._entropy = self._entropy.to(where) + torch.stack([load.entropy for load in loads]).double().sum()
        self._changed = self._changed.to(where) + torch.stack([load.changed for load in loads]).double().sum()
        self._n_seen = self._n_seen.to(where) + self._n_tokens

    def finish(self) -> dict[str, float]:
        """Return the statistics of the step. Waits for the device. All copies must call this.

        Returns:
            router_max_violation, router_mean_violation: How far the load of an expert is above an even load, as a
                fraction of
            the even load; the largest, and the mean of absolute values; averaged over layers. router_entropy: Entropy
            of the
            router's probabilities as a fraction of the largest entropy. router_changed: With replayed experts, the
            share of
            choices that the router would not make. router_aux_loss: Before its coefficient; with k choices of each
            token,
            an even load gives k.
        """
        experts, n_layers = self._routing.experts, self._routing.n_layers
        counted = [self._chosen_LE.flatten(), self._probability_E, self._entropy, self._changed, self._n_seen]
        numbers = self._dp.all_reduce(torch.cat([each.double().reshape(-1) for each in counted])).cpu()
        chosen_LE = numbers[: n_layers * experts.n_experts].view(n_layers, experts.n_experts)
        probability_E, (entropy, changed, n_tokens) = numbers[chosen_LE.numel() : -3], numbers[-3:].tolist()
        rows = max(1.0, n_tokens * n_layers)
        violation_LE = chosen_LE / chosen_LE.mean(1, keepdim=True).clamp(min=1e-9) - 1
        aux = experts.n_experts * float((chosen_LE.sum(0) * probability_E).sum()) / rows**2
        return {
            "router_max_violation": float(violation_LE.amax(1).mean()),
            "router_mean_violation": float(violation_LE.abs().mean()),
            "router_entropy": entropy / rows / max(math.log(experts.n_experts), 1e-9),
            "router_changed": changed / rows / experts.top_k,
            "router_aux_loss": aux,
        }

    def weighed(self, aux_loss: float) -> float:
        """Return the auxiliary loss times its coefficient."""
        return self._coefficient * aux_loss
