"""Settings and results of routing in a pass, shared by all expert layers of a model.

`Routing.begin` sets which experts to use, and what to record, for the next passes. The fields `chosen` and `loads` hold
the results. Shape letters: N tokens of a pass, L expert layers, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.layers.config import Experts


@dataclass
class LayerLoad:
    """How one layer spread the tokens of a pass over its experts, on the device.

    Attributes:
        chosen_E: int64, the (token, choice) pairs of each expert.
        probability_E: float32, the router's probabilities, summed over tokens.
        entropy: the router's entropy, summed over tokens.
        changed: the number of given choices that the router would not have made.
    """

    chosen_E: Tensor
    probability_E: Tensor
    entropy: Tensor
    changed: Tensor


@dataclass
class Routing:
    """Settings and results of routing in a pass. A backward pass that recomputes needs the same settings.

    Attributes:
        experts: number and sizes of the experts.
        n_layers: L.
        given_NLk: the experts to use, any integer dtype. The router routes tokens whose first number is `none`, and
            tokens after its end. None: the router routes all tokens.
        balance_E: float32, the gradient of an auxiliary loss by the probabilities of each token. None: no such loss.
        n_tokens: the number of tokens that are not padding. None: all.
        records: keep `chosen`.
        observes: keep `loads`.
        chosen: the experts of each layer, (N, k) int64, after a pass.
        loads: the load of each layer, after a pass.
    """

    experts: Experts
    n_layers: int
    given_NLk: Tensor | None = None
    balance_E: Tensor | None = None
    n_tokens: int | None = None
    records: bool = False
    observes: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, LayerLoad] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of recorded expert indices."""
        return torch.uint8 if self.experts.id_bytes == 1 else torch.int16

    @property
    def none(self) -> int:
        """The index that means no expert."""
        return torch.iinfo(self.dtype).max

    def begin(
        self,
        given_NLk: Tensor | None = None,
        balance_E: Tensor | None = None,
        n_tokens: int | None = None,
        *,
        records: bool = False,
        observes: bool = False,
    ) -> None:
        """Set how the next passes are routed. Without arguments the router decides, and nothing is recorded.

        Args:
            given_NLk: the experts to use.
            balance_E: the gradient of an auxiliary loss.
            n_tokens: the number of tokens that are not padding.
            records: keep `chosen`.
            observes: keep `loads`.
        """
        self.given_NLk, self.balance_E, self.n_tokens = given_NLk, balance_E, n_tokens
        self.records, self.observes = records, observes
        self.chosen, self.loads = {}, {}

    def recorded(self) -> Tensor:
        """Return the experts of the last pass, (N, L, k), in `dtype`."""
        return torch.stack([self.chosen[layer] for layer in range(self.n_layers)], dim=1).to(self.dtype)

    @property
    def is_free(self) -> bool:
        """Whether the router alone decides, and only its choices are recorded."""
        return self.given_NLk is None and not self.observes

    def record_experts(self, layer: int, chosen_Nk: Tensor) -> None:
        """Record the router's own choice of a layer.

        Args:
            layer: the index among the expert layers.
            chosen_Nk: the experts.
        """
        if self.records:
            self.chosen[layer] = chosen_Nk

    def choose(self, layer: int, logits_NE: Tensor) -> Tensor:
        """Choose the experts of each token, and record them.

        Args:
            layer: the index among the expert layers.
            logits_NE: the router's logits.

        Returns:
            (N, k) int64: the given experts, or the most probable ones, in descending order.
        """
        with torch.no_grad():
            own_Nk = logits_NE.topk(self.experts.top_k, dim=-1).indices
            chosen_Nk = own_Nk
            if self.given_NLk is not None:
                given_Nk = self.given_NLk[:, layer].long()
                n = len(given_Nk)
                known_N1 = given_Nk[:, :1] != self.none
                chosen_Nk = torch.cat([torch.where(known_N1, given_Nk, own_Nk[:n]), own_Nk[n:]])
            self.record_experts(layer, chosen_Nk)
            if self.observes:
                self.loads[layer] = self._load(logits_NE, own_Nk, chosen_Nk)
        return chosen_Nk

    def _load(self, logits_NE: Tensor, own_Nk: Tensor, chosen_Nk: Tensor) -> LayerLoad:
        """Return the load of a layer. own_Nk: the router's choice; chosen_Nk: the experts that were used."""
        n = len(logits_NE) if self.n_tokens is None else self.n_tokens
        probs_NE, own_Nk, chosen_Nk = logits_NE[:n].softmax(-1), own_Nk[:n], chosen_Nk[:n]
        flat = chosen_Nk.flatten()
        chosen_E = torch.zeros(self.experts.n_experts, dtype=torch.int64, device=flat.device)
        is_own_Nk = (chosen_Nk.unsqueeze(-1) == own_Nk.unsqueeze(-2)).any(-1)
        return LayerLoad(
            chosen_E=chosen_E.scatter_add_(0, flat, torch.ones_like(flat)),
            probability_E=probs_NE.sum(0),
            entropy=torch.special.entr(probs_NE).sum(),
            changed=(~is_own_Nk).sum(),
        )
