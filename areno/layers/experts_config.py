"""The description of a model's experts, without torch: a model's config holds one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Layers whose MLP is a mixture of experts: a router chooses `top_k` of `n_experts` MLPs for each token.

    inner_size: of each expert. normalised: the weights of the chosen experts add up to 1; otherwise they are their
    shares of the softmax over all experts. dense_layers: the layers that have one plain MLP instead.
    field: what config.json calls the number of experts, for messages.
    """

    n_experts: int
    top_k: int
    inner_size: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()
    field: str = "num_experts"

    def layers(self, num_layers: int) -> list[int]:
        """Those of a model's layers that have experts."""
        return [index for index in range(num_layers) if index not in self.dense_layers]

    def parameters(self, hidden_size: int, n_experts: int) -> int:
        """Elements of the router and of so many experts, in one layer."""
        return hidden_size * (self.n_experts + 3 * self.inner_size * n_experts)

    def distinct(self, n_tokens: float) -> float:
        """How many experts a layer needs for so many tokens that choose evenly and by themselves, on average."""
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** n_tokens)

    @property
    def id_bytes(self) -> int:
        """Bytes in which the number of an expert is kept. The largest number of the type stands for none."""
        return 1 if self.n_experts < 2**8 else 2
