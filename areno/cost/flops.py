"""FLOPs and bytes that one token costs, and the FLOPs of passes over rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areno.cost.memory import kv_bytes, state_bytes
from areno.layers.config import AdapterSpec, Experts
from areno.models.adapter_shapes import adapter_parameters
from areno.models.config import TransformerConfig
from areno.models.parameters import active_body_parameters, parameters, q_size


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one token in a model, over all tensor-parallel ranks.

    Attributes:
        n_params: the number of parameters of the model.
        body_params: the number of parameters that a token is multiplied with, without the LM head. Only the experts
            that the token is routed to count.
        head_params: the number of parameters of the LM head, which only tokens need whose next token is predicted.
        kv_bytes: the bytes of a token's keys and values, in all layers.
        attn_flops: the forward FLOPs of one (query, key) pair of tokens, in all layers and heads.
        itemsize: the bytes of a weight, and of a cached key or value.
        windows: pairs of an attention window in tokens and the share of the attention layers that have it. A window of
            None means all tokens.
        state_bytes: the bytes of a sequence's recurrent states, in all layers.
        rule_flops: the forward FLOPs of a token's recurrent updates, in all layers.
        experts: number and sizes of the experts. None: the model has none.
        expert_params: the number of parameters of one expert in each layer, summed over the layers with experts.
        adapter_params: the number of parameters of the adapters, if only these are trained. 0: all parameters are
            trained.
    """

    n_params: int
    body_params: int
    head_params: int
    kv_bytes: int
    attn_flops: int
    itemsize: int
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    state_bytes: int = 0
    rule_flops: float = 0.0
    experts: Experts | None = None
    expert_params: int = 0
    adapter_params: int = 0

    @staticmethod
    def of(config: TransformerConfig, itemsize: int, adapters: AdapterSpec | None = None) -> Cost:
        """Compute the cost from the shape of a model.

        Args:
            config: the shape of the model.
            itemsize: the bytes of a weight, and of a cached key or value.
            adapters: the adapters that are trained. None: all parameters are trained.
        """
        experts, of_experts = config.experts, 0
        windows = Counter(config.kind(layer).window for layer in config.attention_layers)
        if experts is not None:
            of_experts = 3 * experts.inner_size * config.hidden_size * len(experts.layers(config.num_layers))
        return Cost(
            experts=experts,
            expert_params=of_experts,
            adapter_params=0 if adapters is None else adapter_parameters(config, adapters),
            n_params=parameters(config),
            body_params=active_body_parameters(config),
            head_params=config.vocab_size * config.hidden_size,
            kv_bytes=kv_bytes(config, itemsize),
            attn_flops=4 * len(config.attention_layers) * q_size(config),
            state_bytes=state_bytes(config, itemsize),
            rule_flops=0.0 if config.delta is None else config.delta.flops,
            itemsize=itemsize,
            windows=tuple((window, n / windows.total()) for window, n in windows.items()),
        )

    @property
    def active_params(self) -> int:
        """The number of parameters that one token is multiplied with, including the LM head."""
        return self.body_params + self.head_params

    def moved_params(self, n_tokens: float) -> float:
        """Return the number of parameters that must be read from memory to compute a batch.

        Only experts that some token is routed to are read. Their number is an expected value; see `Experts.distinct`.

        Args:
            n_tokens: the number of tokens of the batch.
        """
        if self.experts is None:
            return self.active_params
        return self.active_params + self.expert_params * (self.experts.distinct(n_tokens) - self.experts.top_k)


def forward_flops(cost: Cost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    """Return the FLOPs of a forward pass over sequences, such as to compute log-probabilities.

    Args:
        cost: the cost of a token.
        row_lens: the number of tokens of each sequence.
        head_tokens: the number of tokens for which the LM head is computed. None: all, as is customary.
    """
    n_tokens = sum(row_lens)
    flops = _weight_flops(cost, n_tokens, head_tokens) + (2.0 * cost.adapter_params + cost.rule_flops) * n_tokens
    return flops + cost.attn_flops * mean_pairs(cost, row_lens)


def train_flops(cost: Cost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    """Return the FLOPs of a forward and a backward pass over sequences.

    A backward pass takes twice the FLOPs of the forward pass. For products with frozen weights it takes the same FLOPs
    as the forward pass, because the gradient with respect to the weights is not computed.

    Args:
        cost: the cost of a token.
        row_lens: the number of tokens of each sequence.
        head_tokens: the number of tokens for which the LM head is computed. None: all.
    """
    frozen = _weight_flops(cost, sum(row_lens), head_tokens) if cost.adapter_params else 0.0
    return 3.0 * forward_flops(cost, row_lens, head_tokens) - frozen


def _weight_flops(cost: Cost, n_tokens: int, head_tokens: int | None) -> float:
    """Return the forward FLOPs of products with the model's own weights, without adapters and attention."""
    return 2.0 * (cost.body_params * n_tokens + cost.head_params * (n_tokens if head_tokens is None else head_tokens))


def mean_pairs(cost: Cost, row_lens: Sequence[int]) -> float:
    """Return the number of (query, key) pairs of causal attention, as the mean over the attention layers.

    Args:
        cost: the cost of a token, which has the windows of the layers.
        row_lens: the number of tokens of each sequence.
    """
    return sum(share * pairs(row_lens, window) for window, share in cost.windows)


def pairs(row_lens: Iterable[int], window: int | None = None) -> float:
    """Return the number of (query, key) pairs of causal attention in one layer.

    Args:
        row_lens: the number of tokens of each sequence.
        window: the number of last tokens that a token attends to, itself included. None: all.
    """
    found = 0
    for n in row_lens:
        beyond = 0 if window is None else max(0, n - window)
        found += n * (n + 1) // 2 - beyond * (beyond + 1) // 2
    return float(found)
