"""What one token costs in a model, in bytes and in arithmetic, computed from its config alone. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areno.layers.adapters.config import AdapterSpec
from areno.layers.experts_config import Experts
from areno.models.adapters.shapes import adapter_parameters
from areno.models.config import TransformerConfig
from areno.models.cost.memory import active_body_parameters, kv_bytes, parameters, q_size, state_bytes


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one token costs in a model. itemsize: bytes of a weight, and of a cached key or value."""

    n_params: int
    body_params: int  # multiplied with every token; of experts, those that it goes through
    head_params: int  # multiplied with tokens whose successor matters
    kv_bytes: int  # of one token, all layers
    attn_flops: int  # of one query with one key, all layers and heads, forward
    itemsize: int
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)  # how far layers see, and the share that sees so far
    state_bytes: int = 0  # of one sequence, all layers, whatever its length
    rule_flops: float = 0.0  # of one token with the states of all layers, forward
    experts: Experts | None = None
    expert_params: int = 0  # of one expert, in all layers that have experts
    adapter_params: int = 0  # the only ones that are trained; 0: all are

    @staticmethod
    def of(config: TransformerConfig, itemsize: int, adapters: AdapterSpec | None = None) -> Cost:
        """From the shape alone, of all ranks together."""
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
            attn_flops=4 * len(config.attention_layers) * q_size(config, 1),
            state_bytes=state_bytes(config, itemsize),
            rule_flops=0.0 if config.delta is None else config.delta.flops,
            itemsize=itemsize,
            windows=tuple((window, n / windows.total()) for window, n in windows.items()),
        )

    @property
    def active_params(self) -> int:
        """What one token is multiplied with."""
        return self.body_params + self.head_params

    def moved_params(self, n_tokens: float) -> float:
        """What is read to compute so many tokens: of the experts, those that some token goes through, on average."""
        if self.experts is None:
            return self.active_params
        return self.active_params + self.expert_params * (self.experts.distinct(n_tokens) - self.experts.top_k)


def forward_flops(cost: Cost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    """Of scoring rows. head_tokens: those that the head is computed for; None is all, as is customary."""
    n_tokens = sum(row_lens)
    flops = _weight_flops(cost, n_tokens, head_tokens) + (2.0 * cost.adapter_params + cost.rule_flops) * n_tokens
    return flops + cost.attn_flops * mean_pairs(cost, row_lens)


def train_flops(cost: Cost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    """Of training on rows: the backward pass multiplies twice what the forward pass does, but frozen weights once."""
    frozen = _weight_flops(cost, sum(row_lens), head_tokens) if cost.adapter_params else 0.0
    return 3.0 * forward_flops(cost, row_lens, head_tokens) - frozen


def _weight_flops(cost: Cost, n_tokens: int, head_tokens: int | None) -> float:
    """Of products with the model's own weights, forward."""
    return 2.0 * (cost.body_params * n_tokens + cost.head_params * (n_tokens if head_tokens is None else head_tokens))


def mean_pairs(cost: Cost, row_lens: Sequence[int]) -> float:
    """(query, key) pairs of causal attention, as the mean over layers."""
    return sum(share * pairs(row_lens, window) for window, share in cost.windows)


def pairs(row_lens: Iterable[int], window: int | None = None) -> float:
    """Those of a layer in which a token sees the last `window` ones, itself included; None is all."""
    found = 0
    for n in row_lens:
        beyond = 0 if window is None else max(0, n - window)
        found += n * (n + 1) // 2 - beyond * (beyond + 1) // 2
    return float(found)
