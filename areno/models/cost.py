"""What one token costs in a model, in bytes and in arithmetic, computed from its config alone. Imports no torch.

What a model takes in memory, computed from its config alone. This module imports no torch.

itemsize: bytes of a weight, an activation, or a cached key or value. layout: the ranks that divide the model; memory is
that of one of them. Bytes count tensors, not what an allocator adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areno.config.models import OptimizerType
from areno.config.run import ALONE, Layout
from areno.layers.config import AdapterSpec, Delta, Experts
from areno.models.adapter_shapes import adapter_parameters, copied_parameters
from areno.models.config import TransformerConfig


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
            attn_flops=4 * len(config.attention_layers) * q_size(config),
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


BUCKET = 2**25  # parameters of layers whose gradients are reduced at once, at least: enough for the full speed of links
_CHUNK = 64  # tokens of a chunk of the gated delta rule: CHUNK of areno/kernels/delta
_CODES = 256  # 8-bit moments that share a scale: BLOCK of areno/kernels/adam


def parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Elements of all parameters."""
    size, table = config.hidden_size, layout.share_up(config.vocab_size) * config.hidden_size
    head = size if config.head == "value" else 0 if config.tie_word_embeddings else table
    return body_parameters(config, layout) + table + head


def body_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Elements of the layers and the final norm."""
    experts = 0 if config.experts is None else layout.share(config.experts.n_experts)
    return _body(config, layout, experts)


def active_body_parameters(config: TransformerConfig) -> int:
    """Those that a token is multiplied with: all but the experts that it does not go through."""
    return _body(config, ALONE, 0 if config.experts is None else config.experts.top_k)


def layer_parameters(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Elements of the largest layer."""
    size, experts, layer = config.hidden_size, config.experts, _plain_layer(config, layout)
    if config.delta is not None:
        of_attention = _attention(config, layout)
        layer += max(0, _delta(config, layout) - of_attention)
    if experts is None:
        return layer
    sparse = layer - _plain_mlp(config, layout) + experts.parameters(size, layout.share(experts.n_experts))
    return max(layer, sparse) if experts.dense_layers else sparse


def _body(config: TransformerConfig, layout: Layout, n_experts: int) -> int:
    """With so many experts in a layer that has some."""
    body = config.num_layers * _plain_layer(config, layout) + config.hidden_size
    if config.experts is not None:
        of_layer = config.experts.parameters(config.hidden_size, n_experts) - _plain_mlp(config, layout)
        body += len(config.experts.layers(config.num_layers)) * of_layer
    if config.delta is not None:
        of_layer = _delta(config, layout) - _attention(config, layout)
        body += len(config.delta.layers) * of_layer
    return body


def _plain_layer(config: TransformerConfig, layout: Layout) -> int:
    norms = config.hidden_size * (4 if config.norms == "both" else 2)
    return _attention(config, layout) + norms + _plain_mlp(config, layout)


def _attention(config: TransformerConfig, layout: Layout) -> int:
    """What another kind of layer has not."""
    qkv, heads = _qkv_size(config, layout), q_size(config, layout)
    found = config.hidden_size * (qkv + heads) + qkv * config.qkv_bias + config.hidden_size * config.o_bias
    if config.qk_norm_whole:
        found += heads + kv_heads(config, layout) * config.head_dim
    return found + 2 * config.head_dim * config.qk_norm


def _delta(config: TransformerConfig, layout: Layout) -> int:
    """Return the elements of the gated delta rule of one layer."""
    assert config.delta is not None
    return layout.share(config.delta.divided_parameters(config.hidden_size)) + config.delta.value_dim


def _plain_mlp(config: TransformerConfig, layout: Layout) -> int:
    size, inner = config.hidden_size, layout.share(config.intermediate_size)
    return 3 * size * inner + (2 * inner + size) * config.mlp_bias


def kv_bytes(config: TransformerConfig, itemsize: int, layout: Layout = ALONE) -> int:
    """Cached keys and values of one token in all layers that have them."""
    return 2 * len(config.attention_layers) * kv_heads(config, layout) * config.head_dim * itemsize


def state_bytes(config: TransformerConfig, itemsize: int, layout: Layout = ALONE) -> int:
    """What the layers with a recurrent state remember of one sequence, however long it is."""
    return 0 if config.delta is None else layout.share(config.delta.state_bytes(itemsize))


def kv_bytes_of_row(config: TransformerConfig, n_tokens: int, itemsize: int, layout: Layout = ALONE) -> int:
    """What layers need of the keys and values of one row: those with a window, of its last tokens alone."""
    layers = config.attention_layers
    n_kept = sum(min(kind.window or n_tokens, n_tokens) for kind in map(config.kind, layers))
    return n_kept * kv_bytes(config, itemsize, layout) // len(layers)


def kv_heads(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Key-value heads of one rank. Where there are fewer than ranks, several ranks hold the same one."""
    return layout.share_up(config.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What one model takes on each device, whatever it works on. All but the weights is there for training only."""

    weights: int
    gradients: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def model_bytes(
    config: TransformerConfig,
    itemsize: int,
    optimizer: OptimizerType | None = None,
    *,
    layout: Layout = ALONE,
    zero_stage: int = 0,
    adapters: AdapterSpec | None = None,
    copies_a: bool = False,
) -> ModelBytes:
    """Of a model that the devices of `layout` train with this optimizer; None is a frozen one.

    <<<<<<< HEAD
        zero_stage: see EngineConfig. adapters: all that is trained; None trains every parameter. copies_a: the weights have
        copies of the adapters' A below them (`Adapter.stack`). Without the padding that makes parameters start at
    =======
        zero_stage: see EngineSpec. adapters: all that is trained; None trains every parameter. copies_a: the weights have
        copies of the adapters' A below them (`Adapter.stack`). Without the padding that makes parameters start at
    >>>>>>> 2ef0816 (Layers: docstrings with shapes and dtypes, collectives by their usual names, checked by pydocstyle)
        multiples of some elements.
    """
    n_weights = n = parameters(config, layout)
    layer, of_layers = layer_parameters(config, layout), body_parameters(config, layout) - config.hidden_size
    if adapters is not None:
        n = of_layers = adapter_parameters(config, adapters, layout)
        n_weights, layer = n_weights + n, n // config.num_layers
        n_weights += copied_parameters(config, adapters, layout) if copies_a else 0
    if optimizer is None:
        return ModelBytes(weights=n_weights * itemsize)
    divided = layout.dp_size if zero_stage else 1
    moment = {"adam": 4, "adam_8bit": 1 + 4 / _CODES, "sgd": 0}[optimizer]
    n_grads = n
    if zero_stage == 2 and layout.dp_size > 1:
        at_once = min(-(-BUCKET // layer), config.num_layers) * layer
        n_grads = n - of_layers + of_layers // layout.dp_size + 2 * min(at_once, of_layers)  # see ReducedGradients
    is_master = itemsize == 4 and divided == 1
    return ModelBytes(
        weights=n_weights * itemsize,
        gradients=4 * n_grads,
        masters=0 if is_master else 4 * n // divided,
        moments=int(2 * moment * n) // divided,
    )


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """What one layer holds for each token in training, in bytes.

    always: from the forward pass to the backward pass, under recompute too: the float32 residual stream before and
    after attention, attention's output, and those of both halves where norms follow. kept: in addition, where the layer
    is not recomputed: the results of the qkv and gate-up products. at_work: while the backward pass is in the layer, a
    bound on what it holds at once.
    """

    always: int
    kept: int
    at_work: int


def activation_bytes(
    config: TransformerConfig, itemsize: int, layout: Layout = ALONE, *, split: bool = False
) -> ActivationBytes:
    """Of one fused layer and one token. With experts, a rank makes room for all of a token's copies.

    Where layers are of two kinds, of the larger of each.

    split: the ranks divide the tokens of the residual stream.
    """
    experts, inner, size = config.experts, layout.share(2 * config.intermediate_size), config.hidden_size
    residual = layout if split else ALONE
    ids = copies = scores = 0
    if experts is not None:
        ids, copies, scores = experts.top_k * experts.id_bytes, 3 * experts.top_k * size, experts.n_experts
        of_experts = 2 * experts.inner_size * experts.top_k
        inner = max(inner, of_experts) if experts.dense_layers else of_experts
    behind = 0 if config.norms == "before" else itemsize  # what norms behind attention and MLP are given
    first, mixed, rule = _qkv_size(config, layout), q_size(config, layout), 0
    if config.delta is not None:
        first = max(first, layout.share(config.delta.projected))
        mixed = max(mixed, layout.share(config.delta.inner_size))
        rule = layout.share(_rule_bytes(config.delta, itemsize))
    products = first + inner
    return ActivationBytes(
        always=residual.share(2 * size * (4 + behind)) + mixed * itemsize + ids,
        kept=products * itemsize,
        # Products and their gradients, and both halves of the layer at once; experts' copies of inputs and of their
        # gradients. A third of what has the size of the residual stream goes into products or comes out of them, and
        # is there for all tokens.
        at_work=(3 * products + (4 + residual.share(8)) * size + copies) * itemsize + 24 * scores + rule,
    )


def _rule_bytes(delta: Delta, itemsize: int) -> int:
    """What the backward pass of a layer with the gated delta rule holds at most between its two products.

    What the rule is given and gives, with its gradients. And what its kernels keep from the forward pass, in float32,
    and write for one another: see areno/kernels/delta/triton_chunks.py and triton_chunks_backward.py.
    """
    key, value = delta.key_dim, delta.value_dim
    given = (itemsize + 4) * delta.n_channels + 2 * itemsize * delta.inner_size
    kept = 4 * (_CHUNK + key + 2 * value + key * value // _CHUNK) * delta.n_value_heads
    between = itemsize * (key + value + key * value // _CHUNK) * delta.n_value_heads
    return given + kept + between + 4 * _CHUNK * delta.n_key_heads


def token_bytes(
    config: TransformerConfig, itemsize: int, layout: Layout = ALONE, *, recompute: bool = True, split: bool = False
) -> int:
    """Of one token in training, apart from logits; without `recompute`, all layers keep what can be kept."""
    layer = activation_bytes(config, itemsize, layout, split=split)
    kept = 0 if recompute else layer.kept
    return config.num_layers * (layer.always + kept) + layer.at_work


def logits_bytes(config: TransformerConfig, n_positions: int, itemsize: int, layout: Layout = ALONE) -> int:
    """Float32 logits of so many positions, with their gradients."""
    return n_positions * layout.share_up(config.vocab_size) * (4 + itemsize)


def q_size(config: TransformerConfig, layout: Layout = ALONE) -> int:
    """Return the elements of one token's queries on one rank."""
    return layout.share(config.num_heads) * config.head_dim


def _qkv_size(config: TransformerConfig, layout: Layout) -> int:
    """Of what the first product gives, gates of the queries included."""
    of_queries = layout.share(config.num_heads) * (1 + config.attention_gate)
    return (of_queries + 2 * kv_heads(config, layout)) * config.head_dim
