"""FLOPs and bytes that one token costs, and the FLOPs of passes over rows.

The LM head is computed for `head_tokens` tokens of a pass. None means all tokens of the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areno.config.fp8 import FP8Config
from areno.cost.memory import kv_bytes_per_token, state_bytes
from areno.layers.config import AdapterSpec, MoEConfig
from areno.models.adapter_shapes import n_adapter_parameters, n_expert_adapter_parameters
from areno.models.config import TransformerConfig
from areno.models.fp8_layers import n_quantized_parameters
from areno.models.parameters import n_active_body_parameters, n_attention_parameters, n_parameters, q_size


@dataclass(frozen=True, kw_only=True)
class TokenCost:
    """The cost of one token in a model, over all tensor-parallel ranks. KV bytes and FLOPs are sums over all layers."""

    n_params: int
    body_params: int  # parameters a token is multiplied with, without the LM head: of the experts, its own
    head_params: int
    kv_bytes: int  # of a token
    attn_flops: int  # forward, of one (query, key) pair of tokens
    itemsize: int  # bytes of a weight, and of a cached key or value
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)  # (tokens or None for all, share of layers)
    state_bytes: int = 0  # recurrent states of a sequence
    rule_flops: float = 0.0  # forward, of a token's recurrent updates
    experts: MoEConfig | None = None
    expert_params: int = 0  # of one expert, summed over the layers with experts
    adapter_params: int = 0  # 0: all parameters but `frozen_params` are trained
    frozen_params: int = 0  # of attention that is not trained
    expert_adapter_params: int = 0  # those of one expert, summed over the layers with experts
    fp8_params: int = 0  # those of `body_params` whose products are on FP8 units
    int8_params: int = 0  # those that a product dequantizes first
    fp8_gradients: tuple[bool, bool] = (False, False)  # whether those of inputs and of weights are, too
    fp8_kv: bool = False

    @staticmethod
    def from_config(
        config: TransformerConfig,
        itemsize: int,
        adapters: AdapterSpec | None = None,
        fp8: FP8Config | None = None,
        freeze_attention: bool = False,
    ) -> TokenCost:
        """Return the cost of a model. `fp8`: of its linear layers, None if the device emulates FP8."""
        experts, of_experts = config.experts, 0
        n_quantized = 0 if fp8 is None else n_quantized_parameters(config, fp8)
        windows = Counter(config.layer_kind(layer).window for layer in config.attention_layers)
        if experts is not None:
            of_experts = 3 * experts.inner_size * config.hidden_size * len(experts.layers(config.num_layers))
        return TokenCost(
            experts=experts,
            expert_params=of_experts,
            adapter_params=0 if adapters is None else n_adapter_parameters(config, adapters),
            frozen_params=n_attention_parameters(config) if freeze_attention else 0,
            expert_adapter_params=0 if adapters is None else n_expert_adapter_parameters(config, adapters),
            n_params=n_parameters(config),
            body_params=n_active_body_parameters(config),
            head_params=config.vocab_size * config.hidden_size,
            kv_bytes=kv_bytes_per_token(config, itemsize),
            attn_flops=4 * len(config.attention_layers) * q_size(config),
            state_bytes=state_bytes(config, itemsize),
            rule_flops=0.0 if config.delta is None else config.delta.flops,
            itemsize=itemsize,
            fp8_params=n_quantized if fp8 is None or fp8.rounds_inputs else 0,
            int8_params=0 if fp8 is None or fp8.rounds_inputs else n_quantized,
            fp8_gradients=(False, False) if fp8 is None else (fp8.dgrad, fp8.wgrad and adapters is None),
            fp8_kv=config.fp8_kv,
            windows=tuple((window, n / windows.total()) for window, n in windows.items()),
        )

    @property
    def active_params(self) -> int:
        return self.body_params + self.head_params

    @property
    def active_adapter_params(self) -> int:
        """Adapter parameters that a token is multiplied with: of the experts, those of its own."""
        others = 0 if self.experts is None else self.experts.n_experts - self.experts.top_k
        return self.adapter_params - others * self.expert_adapter_params

    def weight_bytes_read(self, n_tokens: float) -> float:
        """Return the bytes of weights that a batch moves. A code takes one. Dequantized weights are written, too."""
        more = self.int8_params * (1 + self.itemsize) - self.fp8_params * (self.itemsize - 1)
        return self.params_read(n_tokens) * self.itemsize + more

    def params_read(self, n_tokens: float) -> float:
        """Return the number of parameters that a batch reads. With experts, this is an expected value."""
        read = float(self.active_params + self.active_adapter_params)
        if self.experts is not None:
            others = self.experts.expected_distinct(n_tokens) - self.experts.top_k
            read += others * (self.expert_params + self.expert_adapter_params)
        return read


def forward_flops(cost: TokenCost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    n_tokens = sum(row_lens)
    flops = _weight_flops(cost, n_tokens, head_tokens) + (2.0 * cost.active_adapter_params + cost.rule_flops) * n_tokens
    return flops + cost.attn_flops * mean_attention_pairs(cost, row_lens)


def train_flops(cost: TokenCost, row_lens: Sequence[int], head_tokens: int | None = None) -> float:
    """Return the FLOPs of a forward and a backward pass.

    A backward pass takes twice the FLOPs of the forward pass. For products with frozen weights, it takes only the same
    FLOPs, because the weights' gradient is not computed.
    """
    n_tokens = sum(row_lens)
    frozen = _weight_flops(cost, n_tokens, head_tokens) if cost.adapter_params else 2.0 * cost.frozen_params * n_tokens
    return 3.0 * forward_flops(cost, row_lens, head_tokens) - frozen


def _weight_flops(cost: TokenCost, n_tokens: int, head_tokens: int | None) -> float:
    """Return the forward FLOPs of products with the model's own weights, without adapters and attention."""
    return 2.0 * (cost.body_params * n_tokens + cost.head_params * (n_tokens if head_tokens is None else head_tokens))


def mean_attention_pairs(cost: TokenCost, row_lens: Sequence[int]) -> float:
    """Return the number of (query, key) pairs in causal attention, as the mean over the attention layers."""
    return sum(share * attention_pairs(row_lens, window) for window, share in cost.windows)


def attention_pairs(row_lens: Iterable[int], window: int | None = None) -> float:
    """Return the number of (query, key) pairs in a layer. A query sees at most `window` keys, its own included."""
    found = 0
    for n in row_lens:
        beyond = 0 if window is None else max(0, n - window)
        found += n * (n + 1) // 2 - beyond * (beyond + 1) // 2
    return float(found)
