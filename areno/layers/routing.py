"""What the expert layers of a model are told for a pass, and what they tell of it. One object serves all of them.

Shape letters: N tokens of a pass, L expert layers, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.layers.config import Experts


@dataclass
class LayerLoad:
    """How one layer spread the tokens of a pass, on the device.

    chosen_E: (token, choice) pairs of each expert, int64. probability_E: the router's probabilities, added up, float32.
    entropy: of the router, added up over the tokens. changed: choices that were given and that the router would not
    have made itself.
    """

    chosen_E: Tensor
    probability_E: Tensor
    entropy: Tensor
    changed: Tensor


@dataclass
class Routing:
    """Set the fields below before a pass, and read the others after it. A backward pass that recomputes needs them too.

    given_NLk: the experts to use, of any integer dtype; tokens whose first number is `none`, or that are beyond its
    end, are routed by the router. None: all are.
    balance_E: the gradient of an auxiliary loss by each token's probabilities, float32. None: there is no such loss.
    n_tokens: of the pass, those that are not padding. None: all.
    records: keep `chosen`, the experts of each layer, (N, k) int64. observes: keep `loads`.
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
        """In which numbers of experts are kept."""
        return torch.uint8 if self.experts.id_bytes == 1 else torch.int16

    @property
    def none(self) -> int:
        """What stands in the place of an expert's number where it is not known."""
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
        """Say all that holds for the next passes. Without arguments: the router decides, and nothing is kept."""
        self.given_NLk, self.balance_E, self.n_tokens = given_NLk, balance_E, n_tokens
        self.records, self.observes = records, observes
        self.chosen, self.loads = {}, {}

    def recorded(self) -> Tensor:
        """The experts of the last pass, (N, L, k), in `dtype`."""
        return torch.stack([self.chosen[layer] for layer in range(self.n_layers)], dim=1).to(self.dtype)

    @property
    def is_free(self) -> bool:
        """Whether the router alone decides, and nothing is asked of it but its choice."""
        return self.given_NLk is None and not self.observes

    def note(self, layer: int, chosen_Nk: Tensor) -> None:
        """What a layer has chosen by itself."""
        if self.records:
            self.chosen[layer] = chosen_Nk

    def choose(self, layer: int, logits_NE: Tensor) -> Tensor:
        """The experts of each token, (N, k) int64: those given, or the most probable ones, the most probable first."""
        with torch.no_grad():
            own_Nk = logits_NE.topk(self.experts.top_k, dim=-1).indices
            chosen_Nk = own_Nk
            if self.given_NLk is not None:
                given_Nk = self.given_NLk[:, layer].long()
                n = len(given_Nk)
                known_N1 = given_Nk[:, :1] != self.none
                chosen_Nk = torch.cat([torch.where(known_N1, given_Nk, own_Nk[:n]), own_Nk[n:]])
            self.note(layer, chosen_Nk)
            if self.observes:
                self.loads[layer] = self._load(logits_NE, own_Nk, chosen_Nk)
        return chosen_Nk

    def _load(self, logits_NE: Tensor, own_Nk: Tensor, chosen_Nk: Tensor) -> LayerLoad:
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
