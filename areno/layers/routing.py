"""Settings and results of routing tokens to experts, shared by all expert layers of a model.

`Routing.begin` sets which experts to use in the next passes, and which results to record. The fields `chosen` and
`loads` hold the results.

Shape letters: N tokens of a pass, L expert layers, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from areno.layers.config import Experts


@dataclass
class LayerLoad:
    """Statistics of the experts that the tokens of one pass used in one layer, as tensors on the device.

    Attributes:
        chosen_E: int64, for each expert, the number of times that a token used the expert.
        probability_E: float32, the router's probability of each expert, summed over tokens.
        entropy: scalar float32, the entropy of the router's probabilities in nats, summed over tokens.
        changed: scalar int64, the number of used experts that the router would not have chosen, over all tokens.
    """

    chosen_E: Tensor
    probability_E: Tensor
    entropy: Tensor
    changed: Tensor


@dataclass
class Routing:
    """Settings and results of routing in a forward pass.

    If a backward pass computes parts of its forward pass again, the settings must still be those of the forward pass.

    Attributes:
        experts: number and sizes of the experts.
        n_layers: L, the number of layers with experts.
        given_NLk: recorded experts to use in place of the router's choice (routing replay), of any integer dtype. The
            router chooses for tokens whose first entry is `none`, and for tokens after the end of this tensor. None
            means that the router chooses for all tokens.
        balance_E: float32, the gradient of the load-balancing loss with respect to the router's probabilities, the same
            for each token. None means that there is no such loss.
        n_tokens: the number of tokens before the padding. None means that there is no padding.
        counts_N: float32, how often each token before the padding counts in `loads` and in the load-balancing loss.
            None means once.
        records: whether to store the used experts in `chosen`.
        observes: whether to store statistics in `loads`.
        chosen: for each layer, the experts that the last pass used, (N, k) int64.
        loads: for each layer, the statistics of the last pass.
    """

    experts: Experts
    n_layers: int
    given_NLk: Tensor | None = None
    balance_E: Tensor | None = None
    n_tokens: int | None = None
    counts_N: Tensor | None = None
    records: bool = False
    observes: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, LayerLoad] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of recorded expert indices, uint8 or int16."""
        return torch.uint8 if self.experts.id_bytes == 1 else torch.int16

    @property
    def none(self) -> int:
        """The value that means "not recorded" in place of an expert index, the largest value of `dtype`."""
        return torch.iinfo(self.dtype).max

    def begin(
        self,
        given_NLk: Tensor | None = None,
        balance_E: Tensor | None = None,
        n_tokens: int | None = None,
        counts_N: Tensor | None = None,
        *,
        records: bool = False,
        observes: bool = False,
    ) -> None:
        """Set how the next passes are routed, and clear the results.

        By default the router chooses all experts, and nothing is recorded.

        Args:
            given_NLk: recorded experts to use in place of the router's choice (routing replay). None means that the
                router chooses.
            balance_E: the gradient of the load-balancing loss with respect to the router's probabilities. None means
                that there is no such loss.
            n_tokens: the number of tokens before the padding. None means that there is no padding.
            counts_N: float32, how often each token before the padding counts. None means once.
            records: whether to store the used experts in `chosen`.
            observes: whether to store statistics in `loads`.
        """
        self.given_NLk, self.balance_E, self.n_tokens, self.counts_N = given_NLk, balance_E, n_tokens, counts_N
        self.records, self.observes = records, observes
        self.chosen, self.loads = {}, {}

    def recorded(self) -> Tensor:
        """Return the experts that the last pass used, (N, L, k), in `dtype`. Requires `records`."""
        return torch.stack([self.chosen[layer] for layer in range(self.n_layers)], dim=1).to(self.dtype)

    @property
    def is_free(self) -> bool:
        """Whether the router chooses all experts and no statistics are recorded. A faster kernel can then be used."""
        return self.given_NLk is None and not self.observes

    def record_experts(self, layer: int, chosen_Nk: Tensor) -> None:
        """Store the experts that a layer used, if `records` is set.

        Args:
            layer: the index among the expert layers.
            chosen_Nk: int64, the experts of each token.
        """
        if self.records:
            self.chosen[layer] = chosen_Nk

    def choose(self, layer: int, logits_NE: Tensor) -> Tensor:
        """Choose the experts of each token, and record the results that `begin` asked for.

        Args:
            layer: the index among the expert layers.
            logits_NE: the router's logits.

        Returns:
            (N, k) int64. For tokens without recorded experts in `given_NLk`, the most probable experts, in descending
            order of probability.
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
        """Return the statistics of a layer.

        Args:
            logits_NE: the router's logits.
            own_Nk: the experts that the router would choose.
            chosen_Nk: the experts that were used.
        """
        n = len(logits_NE) if self.n_tokens is None else self.n_tokens
        probs_NE, own_Nk, chosen_Nk = logits_NE[:n].softmax(-1), own_Nk[:n], chosen_Nk[:n]
        is_own_Nk = (chosen_Nk.unsqueeze(-1) == own_Nk.unsqueeze(-2)).any(-1)
        entropy_N, changed_N = torch.special.entr(probs_NE).sum(-1), (~is_own_Nk).sum(-1)
        times_Nk = torch.ones_like(chosen_Nk)
        if (counts_N := self.counts_N) is not None:
            probs_NE, entropy_N = probs_NE * counts_N.unsqueeze(-1), entropy_N * counts_N
            times_Nk, changed_N = times_Nk * counts_N.long().unsqueeze(-1), changed_N * counts_N.long()
        chosen_E = torch.zeros(self.experts.n_experts, dtype=torch.int64, device=probs_NE.device)
        return LayerLoad(
            chosen_E=chosen_E.scatter_add_(0, chosen_Nk.flatten(), times_Nk.flatten()),
            probability_E=probs_NE.sum(0),
            entropy=entropy_N.sum(),
            changed=changed_N.sum(),
        )
