"""Counts of parameters, heads and projected features of a model on one rank of a layout. Does not import torch."""

from __future__ import annotations

from areno.config.layout import ALONE, Layout
from areno.models.config import TransformerConfig


def n_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    size, table = config.hidden_size, layout.share_rounded_up(config.vocab_size) * config.hidden_size
    scores = config.n_labels * size + (config.n_labels if config.head == "step" else 0)  # with biases
    head = scores or (0 if config.tie_word_embeddings else table)
    return n_body_parameters(config, layout) + table + head


def n_body_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of parameters of all layers and the final norm."""
    experts = 0 if config.experts is None else layout.share_rounded_down(config.experts.n_experts)
    return _n_body_parameters(config, layout, experts)


def n_float32_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of parameters that are float32 whatever the dtype of the model."""
    delta, experts, sizes = config.delta, config.experts, dict[str, int]()
    if delta is not None:
        n = len(delta.layers)
        sizes["linear_attn.A_log"] = n * layout.share_rounded_down(delta.n_value_heads)
        sizes["linear_attn.norm.weight"] = n * delta.value_dim
    if experts is not None:
        sizes["mlp.gate.e_score_correction_bias"] = len(experts.layers(config.num_layers)) * experts.n_experts
    return sum(sizes[name] for name in config.float32)


def n_attention_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of parameters that `Transformer.freeze_attention` freezes."""
    n_delta = 0 if config.delta is None else len(config.delta.layers)
    of_delta = _n_delta_parameters(config, layout) if n_delta else 0
    return n_delta * of_delta + (config.num_layers - n_delta) * _n_attention_parameters(config, layout)


def n_matrix_parameters(config: TransformerConfig, layout: Layout = ALONE, *, attention: bool = True) -> int:
    """Return the number of parameters of the projections of all layers, `Transformer.matrix_parts`."""
    size, experts, delta = config.hidden_size, config.experts, config.delta
    n_delta, n_sparse = (0 if delta is None else len(delta.layers)), 0
    found = 0
    if experts is not None:
        n_sparse = len(experts.layers(config.num_layers))
        found += n_sparse * 3 * size * experts.inner_size * layout.share_rounded_down(experts.n_experts)
        found += n_sparse * _n_shared_parameters(config, layout)
    if attention:
        if delta is not None:
            found += n_delta * layout.share_rounded_down(size * (sum(delta.projection_sizes) + delta.inner_size))
        found += (config.num_layers - n_delta) * size * (qkv_size(config, layout) + q_size(config, layout))
    mlp = 3 * size * layout.share_rounded_down(config.intermediate_size)
    return found + (config.num_layers - n_sparse) * mlp


def n_active_body_parameters(config: TransformerConfig) -> int:
    """Return the number of body parameters that one token uses, over all ranks. Of the experts, only `top_k` count."""
    return _n_body_parameters(config, ALONE, 0 if config.experts is None else config.experts.top_k)


def n_layer_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of parameters of the largest layer."""
    size, experts, layer = config.hidden_size, config.experts, _n_layer_parameters(config, layout)
    if config.delta is not None:
        of_attention = _n_attention_parameters(config, layout)
        layer += max(0, _n_delta_parameters(config, layout) - of_attention)
    if experts is None:
        return layer
    sparse = (
        layer
        - _n_mlp_parameters(config, layout)
        + experts.n_parameters(size, layout.share_rounded_down(experts.n_experts))
        + _n_shared_parameters(config, layout)
    )
    return max(layer, sparse) if experts.dense_layers else sparse


def _n_body_parameters(config: TransformerConfig, layout: Layout, n_experts: int) -> int:
    """Return the number of body parameters with `n_experts` experts in each layer that has experts."""
    body = config.num_layers * _n_layer_parameters(config, layout) + config.hidden_size
    if config.experts is not None:
        of_layer = config.experts.n_parameters(config.hidden_size, n_experts) + _n_shared_parameters(config, layout)
        of_layer -= _n_mlp_parameters(config, layout)
        body += len(config.experts.layers(config.num_layers)) * of_layer
    if config.delta is not None:
        of_layer = _n_delta_parameters(config, layout) - _n_attention_parameters(config, layout)
        body += len(config.delta.layers) * of_layer
    return body


def _n_layer_parameters(config: TransformerConfig, layout: Layout) -> int:
    norms = config.hidden_size * (4 if config.norms == "both" else 2)
    return _n_attention_parameters(config, layout) + norms + _n_mlp_parameters(config, layout)


def _n_attention_parameters(config: TransformerConfig, layout: Layout) -> int:
    qkv, heads = qkv_size(config, layout), q_size(config, layout)
    found = config.hidden_size * (qkv + heads) + qkv * config.qkv_bias + config.hidden_size * config.o_bias
    if config.qk_norm_whole:
        found += heads + n_kv_heads(config, layout) * config.head_dim
    found += layout.share_rounded_down(config.num_heads) * config.attention_sinks
    return found + 2 * config.head_dim * config.qk_norm


def _n_delta_parameters(config: TransformerConfig, layout: Layout) -> int:
    assert config.delta is not None
    return layout.share_rounded_down(config.delta.n_sharded_parameters(config.hidden_size)) + config.delta.value_dim


def _n_mlp_parameters(config: TransformerConfig, layout: Layout) -> int:
    size, inner = config.hidden_size, layout.share_rounded_down(config.intermediate_size)
    return 3 * size * inner + (2 * inner + size) * config.mlp_bias


def _n_shared_parameters(config: TransformerConfig, layout: Layout) -> int:
    """Return the number of parameters of the shared expert of a layer, without its gate."""
    assert config.experts is not None
    return 3 * config.hidden_size * layout.share_rounded_down(config.experts.shared_size)


def n_kv_heads(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of key-value heads on one rank, at least 1: with fewer heads than ranks, ranks share heads."""
    return layout.share_rounded_up(config.num_kv_heads)


def q_size(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the number of elements of one token's queries in one layer, on one rank."""
    return layout.share_rounded_down(config.num_heads) * config.head_dim


def qkv_size(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the output size of the qkv projection, including gates."""
    of_queries = layout.share_rounded_down(config.num_heads) * (1 + config.attention_gate)
    return (of_queries + 2 * n_kv_heads(config, layout)) * config.head_dim
