"""Settings and results of routing tokens to experts, shared by all expert layers of a model.

Shape letters: N tokens of a pass, L expert layers, E experts, k experts of a token. `layer` counts only the expert
layers; G groups of experts, g groups of a token, e experts of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.kernels.experts import expert_load
from areno.kernels.experts.reference import router_scores
from areno.layers.config import MoEConfig


def ranking(experts: MoEConfig, logits_NE: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return numbers of which the largest `top_k` are the router's choice. `bias_E`: with `sigmoid`."""
    if bias_E is None:
        return logits_NE
    ranked_NE = router_scores(logits_NE, experts.sigmoid) + bias_E
    if experts.n_groups == 1:
        return ranked_NE
    ranked_NGe = ranked_NE.unflatten(-1, (experts.n_groups, -1))
    best_Ng = ranked_NGe.topk(2, dim=-1).values.sum(-1).topk(experts.top_groups, dim=-1).indices
    is_used_NG = torch.zeros_like(ranked_NGe[..., 0], dtype=torch.bool).scatter_(-1, best_Ng, True)
    return ranked_NGe.masked_fill(~is_used_NG.unsqueeze(-1), -torch.inf).flatten(-2)


@dataclass
class Routing:
    """Settings and results of routing in a forward pass.

    If a backward pass computes parts of its forward pass again, the settings must still be those of the forward pass.

    Attributes:
        given_NLk: recorded experts to use in place of the router's choice (routing replay), of any integer dtype. The
            router chooses if the first index of a token is `unknown_expert`, and for tokens after the tensor's end.
        balance_E: float32, the gradient of the load-balancing loss with respect to the router's probabilities. It is
            the same for each token.
        n_tokens: the number of tokens before the padding, if any.
        counts_N: float32, how often each token before the padding counts in `loads` and in the balancing loss. None
            means once.
        records: whether to store the used experts in `chosen`.
        observes: whether to store statistics in `loads`.
        chosen: layer -> the experts that the last pass used, (N, k) int64.
        loads: layer -> the statistics of the last pass, see `areno.kernels.experts.expert_load`.
    """

    experts: MoEConfig
    n_layers: int
    given_NLk: Tensor | None = None
    balance_E: Tensor | None = None
    n_tokens: int | None = None
    counts_N: Tensor | None = None
    records: bool = False
    observes: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of recorded expert indices, uint8 or int16."""
        return torch.uint8 if self.experts.id_bytes == 1 else torch.int16

    @property
    def unknown_expert(self) -> int:
        """The largest value of `dtype`. In place of an expert index, it means "not recorded"."""
        return torch.iinfo(self.dtype).max

    def configure(
        self,
        given_NLk: Tensor | None = None,
        balance_E: Tensor | None = None,
        n_tokens: int | None = None,
        counts_N: Tensor | None = None,
        *,
        records: bool = False,
        observes: bool = False,
    ) -> None:
        """Set the settings of the next passes, and clear the results."""
        self.given_NLk, self.balance_E, self.n_tokens, self.counts_N = given_NLk, balance_E, n_tokens, counts_N
        self.records, self.observes = records, observes
        self.chosen, self.loads = {}, {}

    def recorded_experts(self) -> Tensor:
        """Return the experts that the last pass used, (N, L, k), in `dtype`. Requires `records`."""
        return torch.stack([self.chosen[layer] for layer in range(self.n_layers)], dim=1).to(self.dtype)

    @property
    def can_use_fused_routing(self) -> bool:
        """Whether a faster kernel can be used: the router chooses, in one group."""
        return self.given_NLk is None and self.experts.n_groups == 1

    @torch.no_grad()
    def record(self, layer: int, logits_NE: Tensor, chosen_Nk: Tensor, own_Nk: Tensor | None = None) -> None:
        """Record used experts and statistics as set. `own_Nk`: the router's choice, if others may have been used."""
        if self.records:
            self.chosen[layer] = chosen_Nk
        if self.observes:
            n = len(logits_NE) if self.n_tokens is None else self.n_tokens
            self.loads[layer] = expert_load(logits_NE, chosen_Nk, own_Nk, self.experts.sigmoid, n, self.counts_N)

    def choose_experts(self, layer: int, logits_NE: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """Return and record the experts of each token: those in `given_NLk`, else the router's choice, best first."""
        with torch.no_grad():
            own_Nk = ranking(self.experts, logits_NE, bias_E).topk(self.experts.top_k, dim=-1).indices
            chosen_Nk = own_Nk
            if self.given_NLk is not None:
                given_Nk = self.given_NLk[:, layer].long()
                n = len(given_Nk)
                known_N1 = given_Nk[:, :1] != self.unknown_expert
                chosen_Nk = torch.cat([torch.where(known_N1, given_Nk, own_Nk[:n]), own_Nk[n:]])
        self.record(layer, logits_NE, chosen_Nk, None if self.given_NLk is None else own_Nk)
        return chosen_Nk
