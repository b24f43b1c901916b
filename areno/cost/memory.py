"""Bytes on one rank: keys and values, recurrent states, weights with their optimizer, and the activations of a pass."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from areno.config.fp8 import FP8Config
from areno.config.layout import ALONE, Layout
from areno.config.optimizers import OPTIMIZERS, OptimizerType
from areno.layers.config import AdapterSpec, DeltaConfig, mlp_piece_tokens
from areno.models.adapter_shapes import n_adapter_parameters, n_stacked_parameters
from areno.models.config import TransformerConfig
from areno.models.fp8_layers import n_quantized_parameters
from areno.models.parameters import (
    n_attention_parameters,
    n_body_parameters,
    n_float32_parameters,
    n_kv_heads,
    n_layer_parameters,
    n_matrix_parameters,
    n_parameters,
    q_size,
    qkv_size,
)

LOGITS_KEPT = 5 * 2**29  # bytes of the gradients of logits that a GPU keeps: 8.8k positions of 152k tokens in bf16
LOGITS_CHUNK = 2048  # positions whose logits are computed at once
# Fitted to peaks of training steps and scoring passes of models with 0.6B to 8B parameters on an H100.
_WORK_EXPECTED = 0.35  # share of the upper bound of temporary bytes that a backward pass takes
_FORWARD_RESIDUAL, _FORWARD_PRODUCTS = 28, 0.47  # bytes per element of the residual stream, share of the products
BUCKET = 2**25  # fewest parameters of layers that are reduced together: enough for the full bandwidth of links
WINDOW = 2**24  # parameters whose masters and moments pass the device at once, if they are in host memory
WINDOWS = 3  # windows on the device at the same time: one arrives, one is updated, one leaves
_CHUNK = 64  # tokens of a chunk of the gated delta rule: CHUNK of areno/kernels/delta


def kv_bytes_per_token(config: TransformerConfig, itemsize: int, layout: Layout = ALONE) -> int:
    """Return the bytes of a token's keys and values, in all layers with attention."""
    of_head = config.head_dim + 1 if config.fp8_kv else config.head_dim * itemsize  # FP8: codes and one scale
    return 2 * len(config.attention_layers) * n_kv_heads(config, layout) * of_head


def state_bytes(config: TransformerConfig, itemsize: int, layout: Layout = ALONE) -> int:
    """Return the bytes of a sequence's recurrent states, in all layers that have such states."""
    return 0 if config.delta is None else layout.share_rounded_down(config.delta.state_bytes(itemsize))


def kv_bytes_of_row(config: TransformerConfig, n_tokens: int, itemsize: int, layout: Layout = ALONE) -> int:
    """Return the bytes of a sequence's keys and values. Layers with a window keep its last tokens only."""
    layers = config.attention_layers
    n_kept = sum(min(kind.window or n_tokens, n_tokens) for kind in map(config.layer_kind, layers))
    return n_kept * kv_bytes_per_token(config, itemsize, layout) // len(layers)


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """The bytes of one model on each device. Frozen models have weights only."""

    weights: int
    gradients: int = 0
    masters: int = 0  # fp32 master weights
    moments: int = 0  # of the optimizer
    windows: int = 0  # see WINDOW, not part of `total`

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def model_bytes(
    config: TransformerConfig,
    itemsize: int,
    optimizer: OptimizerType | None,
    *,
    layout: Layout = ALONE,
    zero_stage: int = 0,
    adapters: AdapterSpec | None = None,
    copies_a: bool = False,
    fp8: FP8Config | None = None,
    freeze_attention: bool = False,
) -> ModelBytes:
    """Return the bytes of a model on each device, without padding between parameters.

    `adapters` are trained in place of the weights. With `copies_a`, adapted weights have room for the copy of the
    LoRA matrix A that sampling uses. `fp8` adds a byte for each weight in FP8, which with `adapters` is all there is.
    """
    n_weights = n = n_parameters(config, layout)
    layer, of_layers = n_layer_parameters(config, layout), n_body_parameters(config, layout) - config.hidden_size
    if adapters is not None:
        n = of_layers = n_adapter_parameters(config, adapters, layout)
        n_weights, layer = n_weights + n, n // config.num_layers
        n_weights += n_stacked_parameters(config, adapters, layout) if copies_a and fp8 is None else 0
    weights = n_weights * itemsize + (4 - itemsize) * n_float32_parameters(config, layout)
    if fp8 is not None:
        weights += (1 if adapters is None else 1 - itemsize) * n_quantized_parameters(config, fp8, layout)
    if optimizer is None:
        return ModelBytes(weights=weights)
    if freeze_attention:
        frozen = n_attention_parameters(config, layout)
        n, of_layers, layer = n - frozen, of_layers - frozen, layer - frozen // config.num_layers
    divided = layout.dp_size if zero_stage else 1
    n_grads = n
    if zero_stage == 2 and layout.dp_size > 1:
        at_once = min(-(-BUCKET // layer), config.num_layers) * layer
        n_grads = n - of_layers + of_layers // layout.dp_size + 2 * min(at_once, of_layers)  # see ReducedGradients
    is_master = itemsize == 4 and divided == 1
    n_in_matrices = n
    if adapters is None:
        n_in_matrices = n_matrix_parameters(config, layout, attention=not freeze_attention)
    masters, moments = (
        0 if is_master else 4 * n // divided,
        OPTIMIZERS[optimizer].state_bytes(n, n_in_matrices) // divided,
    )
    return ModelBytes(
        weights=weights,
        gradients=4 * n_grads,
        masters=masters,
        moments=moments,
        windows=int((masters + moments) * min(1.0, WINDOWS * WINDOW / (n / divided))),
    )


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """The bytes of activations that one layer holds for each token in training.

    `always` is held from the forward to the backward pass, also under recompute: the float32 residual stream before and
    after attention, the output of attention, and the inputs of norms after attention and MLP. `inputs` is the part of
    it from which the backward pass can compute the rest again.
    """

    always: int
    inputs: int
    kept: int  # additional without recompute: outputs of the qkv and gate-up products
    at_work: int  # upper bound of temporary bytes during the layer's backward pass
    in_pieces: int  # the part of `at_work` that an MLP takes for at most `piece_tokens` tokens
    piece_tokens: int


def activation_bytes(
    config: TransformerConfig, itemsize: int, layout: Layout = ALONE, *, split: bool = False
) -> ActivationBytes:
    """Return the bytes of activations that one layer holds for one token. If layers differ, the largest counts.

    With experts, the copies of a token for all of its experts count, even if these experts are on other ranks. With
    `split`, sequence parallelism divides the residual stream.
    """
    experts, inner, size = config.experts, layout.share_rounded_down(2 * config.intermediate_size), config.hidden_size
    residual = layout if split else ALONE
    ids = copies = scores = 0
    if experts is not None:
        ids, copies, scores = experts.top_k * experts.id_bytes, 3 * experts.top_k * size, experts.n_experts
        of_experts = 2 * experts.inner_size * experts.top_k + layout.share_rounded_down(2 * experts.shared_size)
        copies += size if experts.shared_gated else 0  # the shared expert's output, beside its gradient
        inner = max(inner, of_experts) if experts.dense_layers else of_experts
    after = 0 if config.norms == "before" else itemsize  # inputs of the norms after attention and MLP
    first, mixed, rule = qkv_size(config, layout), q_size(config, layout), 0
    if config.delta is not None:
        first = max(first, layout.share_rounded_down(config.delta.projected_size))
        mixed = max(mixed, layout.share_rounded_down(config.delta.inner_size))
        rule = layout.share_rounded_down(_delta_rule_bytes(config.delta, itemsize))
    products = first + inner
    always = residual.share_rounded_down(2 * size * (4 + after)) + mixed * itemsize + ids
    return ActivationBytes(
        always=always,
        inputs=always - (size * (4 + after) if layout.tp_size == 1 else 0),
        kept=products * itemsize,
        # Outputs of products and their gradients, attention and MLP together; experts' copies of inputs and of their
        # gradients. A third of the tensors of the residual stream's size are inputs or outputs of products, which
        # have all tokens.
        at_work=(3 * products + (4 + residual.share_rounded_down(8)) * size + copies) * itemsize + 24 * scores + rule,
        in_pieces=3 * inner * itemsize if experts is None else 0,
        piece_tokens=mlp_piece_tokens(inner),
    )


def _delta_rule_bytes(delta: DeltaConfig, itemsize: int) -> int:
    """Return the temporary bytes per token of the backward pass of the gated delta rule.

    These are the projected inputs, the result and their gradients, and the fp32 tensors that the kernels of
    areno/kernels/delta/triton_chunks.py and triton_chunks_backward.py save and exchange.
    """
    key, value = delta.key_dim, delta.value_dim
    projected = (itemsize + 4) * delta.n_channels + 2 * itemsize * delta.inner_size
    kept = 4 * (_CHUNK + key + 2 * value + key * value // _CHUNK) * delta.n_value_heads
    between = itemsize * (key + value + key * value // _CHUNK) * delta.n_value_heads
    return projected + kept + between + 4 * _CHUNK * delta.n_key_heads


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """The bytes that the passes over a micro-batch take on one rank, beside the model itself.

    `total` is an upper bound, by which sizes are chosen. `expected` is what a GPU measures, within a few percent. Both
    count `n_kept` layers that keep the outputs of their large matrix products. The fields are bytes of one token.
    """

    of_token: int  # activations that stay until the backward pass
    at_work: int = 0  # upper bound of the temporary bytes in the layer that is computed
    at_work_expected: float = 0.0
    in_pieces: int = 0  # the part of `at_work` that at most `piece_tokens` tokens take
    piece_tokens: int = 0  # for tokens beyond them, the upper bound is expected
    of_inputs: int = 0  # the least that a layer keeps until the backward pass, in host memory if necessary
    of_kept_layer: int = 0  # outputs of the large matrix products that a layer keeps
    logits_of_token: int = 0  # upper bound, for LOGITS_CHUNK tokens at a time
    logits_expected: int = 0
    stored_of_token: int = 0  # gradients of logits until the backward pass, up to LOGITS_KEPT in all

    @staticmethod
    def for_training(
        config: TransformerConfig, itemsize: int, layout: Layout = ALONE, *, recompute: bool = True, split: bool = False
    ) -> PassBytes:
        layer = activation_bytes(config, itemsize, layout, split=split)
        of_token = config.num_layers * (layer.always + (0 if recompute else layer.kept))
        n_vocab = 0 if config.head != "lm" else layout.share_rounded_up(config.vocab_size)
        return PassBytes(
            of_token=of_token,
            at_work=layer.at_work,
            at_work_expected=_WORK_EXPECTED * layer.at_work,
            in_pieces=layer.in_pieces,
            piece_tokens=layer.piece_tokens,
            of_inputs=layer.inputs if recompute else 0,
            of_kept_layer=layer.kept if recompute else 0,
            logits_of_token=n_vocab * (4 + itemsize),
            logits_expected=n_vocab * 4,
            stored_of_token=n_vocab * itemsize,
        )

    @staticmethod
    def for_scoring(
        config: TransformerConfig, itemsize: int, layout: Layout = ALONE, *, split: bool = False
    ) -> PassBytes:
        """Return the bytes of a forward pass without gradient, which holds the activations of one layer at a time."""
        layer = activation_bytes(config, itemsize, layout, split=split)
        n_vocab = 0 if config.head != "lm" else layout.share_rounded_up(config.vocab_size)
        return PassBytes(
            of_token=0,
            at_work=layer.always + layer.at_work,
            at_work_expected=_FORWARD_RESIDUAL * config.hidden_size + _FORWARD_PRODUCTS * layer.kept,
            logits_of_token=n_vocab * (4 + itemsize),
            logits_expected=n_vocab * (4 + itemsize),
        )

    def with_teacher_logits(self) -> PassBytes:
        two = {"logits_of_token": 2 * self.logits_of_token, "logits_expected": 2 * self.logits_expected}
        return replace(self, **two, stored_of_token=2 * self.stored_of_token)

    def offloading(self, n_layers: int, n_offloaded: int) -> PassBytes:
        """Return the bytes of a pass that keeps the inputs of the first `n_offloaded` layers in host memory.

        No layer keeps more than its inputs. Two of the layers in host memory are on the device at a time: one is
        computed while the other arrives or leaves.
        """
        of_layer = self.of_token // n_layers
        return replace(
            self,
            of_token=max(2, n_layers - n_offloaded + 1) * self.of_inputs,
            at_work=self.at_work + of_layer - self.of_inputs,
            of_kept_layer=0,
        )

    def layers_to_offload(self, n_tokens: int, room: int, n_layers: int) -> int:
        """Return how many layers must have their inputs in host memory, so that a pass takes at most `room` bytes.

        The last of them stays on the device, where the backward pass needs it first. 0 without recompute.
        """
        if not self.of_inputs or self.total(n_tokens) <= room:
            return 0
        n_more = (room - self.offloading(n_layers, n_layers).total(n_tokens)) // (n_tokens * self.of_inputs)
        return min(n_layers, max(1, n_layers - 1 - max(0, n_more)))

    def _work(self, n_tokens: int) -> int:
        return n_tokens * (self.at_work - self.in_pieces) + min(n_tokens, self.piece_tokens) * self.in_pieces

    def total(self, n_tokens: int, n_kept: int = 0) -> int:
        head = min(LOGITS_KEPT, n_tokens * self.stored_of_token) + min(LOGITS_CHUNK, n_tokens) * self.logits_of_token
        return n_tokens * (self.of_token + n_kept * self.of_kept_layer) + self._work(n_tokens) + head

    def expected(self, n_tokens: int, n_kept: int = 0, n_predicted: int | None = None) -> int:
        n = n_tokens if n_predicted is None else n_predicted
        at_once = min(n_tokens, self.piece_tokens) if self.in_pieces else n_tokens
        head = min(LOGITS_KEPT, n * self.stored_of_token) + min(LOGITS_CHUNK, n) * self.logits_expected
        work = at_once * self.at_work_expected + self._work(n_tokens) - self._work(at_once)
        return int(n_tokens * (self.of_token + n_kept * self.of_kept_layer) + work) + head

    def fitting_tokens(self, room: int) -> int:
        """Return the largest number of tokens whose pass takes at most `room` bytes if no layer keeps its products."""
        # `total` is the smallest of eight linear functions of the tokens, so the pass fits if one of them fits.
        found = 0
        for all_stored, all_logits, a_piece in itertools.product((0, 1), repeat=3):
            left = room - all_stored * LOGITS_KEPT - all_logits * LOGITS_CHUNK * self.logits_of_token
            left -= a_piece * self.piece_tokens * self.in_pieces
            slope = (1 - all_stored) * self.stored_of_token + (1 - all_logits) * self.logits_of_token
            slope -= a_piece * self.in_pieces
            found = max(found, left // (self.of_token + self.at_work + slope))
        return found

    def fitting_layers(self, n_tokens: int, room: int, n_layers: int) -> int:
        """Return how many layers can keep the outputs of their large products if a pass may take `room` bytes."""
        if not self.of_kept_layer:
            return 0
        return max(0, min(n_layers, (room - self.total(n_tokens)) // (n_tokens * self.of_kept_layer)))
