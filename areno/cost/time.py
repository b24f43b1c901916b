"""The time that phases of a training step take, estimated from the shape of a model and the rates of a device.

The estimate adds the parts of a phase: matrix products at a share of the measured rate of large products, keys and
values at a share of the copy rate, element-wise work and logits in bytes, the time in which the host launches kernels,
and the time in which the host works on rows while the device waits. The constants are fitted to measurements of models
with 25M to 35B parameters on an H100 and an H200. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from areno.config.optimizers import OPTIMIZERS, OptimizerType
from areno.cost.flops import TokenCost, mean_attention_pairs
from areno.layers.config import MoEConfig
from areno.models.config import TransformerConfig
from areno.models.parameters import n_matrix_parameters, qkv_size


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The measured speed of a device, or of several devices together."""

    copy_bytes_s: float  # in device memory, counting both the read and the write
    matmul_flops_s: float
    link_bytes_s: float = 200e9  # from a device to another one of the same host

    def for_devices(self, n_devices: int) -> Rates:
        return replace(self, copy_bytes_s=n_devices * self.copy_bytes_s, matmul_flops_s=n_devices * self.matmul_flops_s)

    def min_seconds(self, n_bytes: float, flops: float) -> float:
        """Return the time to move bytes (read plus written) and to compute FLOPs if both overlap fully."""
        return max(n_bytes / self.copy_bytes_s, flops / self.matmul_flops_s)


H100 = Rates(copy_bytes_s=3.0e12, matmul_flops_s=760e12)
"""Rates that `areno bench` measured on an H100 SXM with 80 GB."""

_LARGE_PRODUCTS = 0.82  # share of the rate of large products that the products of a layer reach in training
_PRODUCTS = 0.85  # the same for a decode step, of the longer of reading the weights and computing
_FP8 = 1.7  # rate of products on FP8 units, with the rounding of their inputs, in rates of large products
_FP8_LAYER_S = 40e-6  # additional time of a layer in a decode step, to round the inputs of its products
_ATTENTION, _ATTENTION_MOST = 0.25, 0.5  # as _LARGE_PRODUCTS, of attention: in rows of 512 tokens, in the longest rows
_KV = {False: 0.76, True: 0.56}  # share of the copy rate at which decode attention reads keys and values; in FP8
_EXPERT_ROWS = 0.55  # the same, at which rows of experts are sorted, activated, adapted and summed
_TRAIN_BYTES, _FORWARD_BYTES = 276, 57  # bytes of element-wise work per token, layer and element of the residual stream
_ADAPTER_BYTES = 8  # the same for the products of adapters in training
_DELTA_BYTES = 506  # the same, per element of the values, for the gated delta rule in training
_HEAD_BYTES = {True: 20, False: 8}  # bytes per predicted token and token of the vocabulary: training, scoring
_LOGIT_BYTES = 12  # bytes per row and token of the vocabulary, to sample from logits
_ADAPTER_LAYER_S = 25e-6  # additional time of a layer with adapters; adapters on experts take it twice
_LAYER_S = 36e-6  # time between the kernels of a layer in a decode step, which CUDA graphs launch
_KERNEL_S = {
    True: 40e-6,
    False: 40e-6 / 3,
}  # time in which the host launches a kernel; scoring launches a third of them
# Kernels of a layer in training, and more of them with experts and a shared expert.
_KERNELS, _OF_EXPERTS, _OF_SHARED = 75, 30, 45
_SEARCH_S = 14e-6  # time in which the host looks for the shared prefix of a row, and lays the row out
_BETWEEN_S = 0.004  # time between two micro-batches in which the device waits
_SUM_S, _SUMS = 9e-6, {True: 9, False: 4}  # a tensor-parallel sum in decoding; exchanges of a layer: training, scoring
_ROW_S, _NUMBER_S = 15e-6, 55e-9  # time in which the host packs and sends a row of a pass, and a number of the row
# Time of the host for a sample and for a sampled token: reading them, text, reward, advantages and records. A critic
# doubles the former.
_SAMPLE_S, _SAMPLED_S = 80e-6, 0.8e-6
_UPDATE_S = 5e-3  # time between the last micro-batch of an update and the next one: norm of the gradient, optimizer


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """The tokens of a forward pass, or of a forward and a backward pass, over all micro-batches of a phase."""

    row_lens: tuple[int, ...]  # tokens of each row
    n_predicted: int  # tokens whose logits are computed
    trains: bool
    n_recomputed: int = 0  # layers that recompute their large matrix products
    budget: int = 2**17  # tokens of a micro-batch
    tp_size: int = 1
    shared_lens: tuple[int, ...] = ()  # tokens of each prefix that is not computed again

    @property
    def n_tokens(self) -> int:
        return sum(self.row_lens) - sum(self.shared_lens)


def device_seconds(config: TransformerConfig, cost: TokenCost, work: PassWork, rates: Rates) -> float:
    """Estimate the device's time for a phase, without the time in which it waits for the host."""
    n, size, layers = work.n_tokens, config.hidden_size, config.num_layers
    frozen = bool(cost.adapter_params)
    passes = (2 if frozen else 3) if work.trains else 1
    flops = 2.0 * passes * (cost.body_params * n + cost.head_params * work.n_predicted)
    flops += 2.0 * size * n_saved_outputs(config) * work.n_recomputed * n
    flops -= 2.0 * cost.frozen_params * n if work.trains else 0.0
    flops -= (1 - 1 / _FP8) * _fp8_flops(config, cost, work)
    flops += (3 if work.trains else 1) * 2.0 * cost.active_adapter_params * n
    pairs = mean_attention_pairs(cost, work.row_lens) - (
        mean_attention_pairs(cost, work.shared_lens) if work.shared_lens else 0
    )
    attention = (3.5 if work.trains else 1) * cost.attn_flops * pairs
    rule = (3 if work.trains else 1) * cost.rule_flops * n
    n_bytes = float(n) * layers * size * (_TRAIN_BYTES if work.trains else _FORWARD_BYTES)
    n_bytes += float(work.n_predicted) * config.vocab_size * _HEAD_BYTES[work.trains]
    if frozen and work.trains:
        n_bytes += float(n) * layers * size * _ADAPTER_BYTES
    if cost.experts is not None:
        n_bytes += _expert_row_bytes(config, cost, cost.experts, work) / _EXPERT_ROWS
    if config.delta is not None:
        share = 1 if work.trains else 1 / 3
        n_bytes += share * _DELTA_BYTES * float(n) * len(config.delta.layers) * config.delta.inner_size
    of_attention = min(_ATTENTION_MOST, _ATTENTION * (max(work.row_lens, default=512) / 512) ** 0.35)
    products = flops / _LARGE_PRODUCTS + (attention + rule) / of_attention
    return products / rates.matmul_flops_s + n_bytes / rates.copy_bytes_s


def _expert_row_bytes(config: TransformerConfig, cost: TokenCost, experts: MoEConfig, work: PassWork) -> float:
    """Return the bytes that work on rows of experts moves, beside their products. Each expert of a token has a row."""
    size, inner, n_layers = config.hidden_size, experts.inner_size, config.num_layers
    # Forward: sort x and sum y, read gate and up and write act. Backward: the same of their gradients.
    elements = 6.0 * size + 9.0 * inner if work.trains else 3.0 * (size + inner)
    if cost.expert_adapter_params:  # read x and act; read and write gate, up and y. Recomputed: x, gate and up
        elements += (3 if work.trains else 1) * (3 * size + 5 * inner)
        elements += (size + 4 * inner) * work.n_recomputed / n_layers
    return work.n_tokens * cost.itemsize * experts.top_k * elements * len(experts.layers(n_layers))


def _fp8_flops(config: TransformerConfig, cost: TokenCost, work: PassWork) -> float:
    if not cost.fp8_params:
        return 0.0
    passes = 1 + sum(cost.fp8_gradients) * work.trains
    recomputed = config.hidden_size * n_saved_outputs(config) * work.n_recomputed
    recomputed *= cost.fp8_params / cost.body_params
    return 2.0 * work.n_tokens * (passes * cost.fp8_params + recomputed)


def pass_seconds(config: TransformerConfig, cost: TokenCost, work: PassWork, rates: Rates) -> float:
    n_micro_batches = -(-work.n_tokens // work.budget)
    launched = n_micro_batches * launch_seconds(config, trains=work.trains)
    exchanged = _SUMS[work.trains] * 2.0 * work.n_tokens * config.hidden_size * (1 - 1 / work.tp_size)
    seconds = device_seconds(config, cost, work, rates) + config.num_layers * exchanged / rates.link_bytes_s
    return max(seconds, launched) + n_micro_batches * _BETWEEN_S


def launch_seconds(config: TransformerConfig, *, trains: bool) -> float:
    """Estimate how long the host launches the kernels of a micro-batch, whatever its number of tokens."""
    n_kernels, experts = _KERNELS * config.num_layers, config.experts
    if experts is not None:
        n_kernels += (_OF_EXPERTS + _OF_SHARED * bool(experts.shared_size)) * len(experts.layers(config.num_layers))
    return n_kernels * _KERNEL_S[trains]


def host_seconds(n_rows: int, n_numbers: float) -> float:
    """Estimate how long the host packs `n_rows` rows with `n_numbers` values while the devices wait."""
    return _ROW_S * n_rows + _NUMBER_S * n_numbers


def host_rollout_seconds(n_samples: int, n_tokens: float, has_critic: bool) -> float:
    """Estimate how long the host works on the samples of a rollout while the devices wait."""
    return (1 + has_critic) * _SAMPLE_S * n_samples + _SAMPLED_S * n_tokens


def host_time_in_tokens(config: TransformerConfig, cost: TokenCost, *, trains: bool) -> tuple[int, float]:
    """Estimate the host's time for a pass, as the number of tokens that an H100 computes meanwhile.

    Returns one number for the launch of a pass's kernels, and one for the search for the shared prefix of a row. If
    passes have fewer tokens than the first number on average, the device waits for the host.
    """
    token_s = device_seconds(config, cost, PassWork(row_lens=(1024,), n_predicted=0, trains=trains), H100) / 1024
    return round(launch_seconds(config, trains=trains) / token_s), _SEARCH_S / token_s


def n_saved_outputs(config: TransformerConfig) -> float:
    """Return how many outputs per token a layer computes again under recompute, as a mean over the layers.

    These are the outputs of qkv or in_proj and of gate and up, also those of a token's experts.
    """
    delta, experts = config.delta, config.experts
    n_delta, n_sparse = (0 if delta is None else len(delta.layers)), 0
    found = (config.num_layers - n_delta) * qkv_size(config)
    found += 0 if delta is None else n_delta * delta.projected_size
    if experts is not None:
        n_sparse = len(experts.layers(config.num_layers))
        found += n_sparse * 2 * (experts.shared_size + experts.inner_size * experts.top_k)
    found += (config.num_layers - n_sparse) * 2 * config.intermediate_size
    return found / config.num_layers


def update_seconds(
    config: TransformerConfig, cost: TokenCost, optimizer: OptimizerType, rates: Rates, tp_size: int, n_parts: int
) -> float:
    """Return the seconds of an update. `n_parts`: the data-parallel ranks that divide the optimizer."""
    kind, n_trained = OPTIMIZERS[optimizer], cost.adapter_params or cost.n_params - cost.frozen_params
    # Every tensor-parallel rank computes with whole matrices. Those of adapters have one short side, and cost little.
    attention = not cost.frozen_params
    n_in_matrices = 0 if cost.adapter_params else n_matrix_parameters(config, attention=attention) / n_parts
    flops = kind.matrix_flops * config.hidden_size * n_in_matrices
    moved = kind.update_bytes * n_trained / (tp_size * n_parts)
    return _UPDATE_S + moved / rates.copy_bytes_s + flops / (_LARGE_PRODUCTS * rates.matmul_flops_s)


@dataclass(frozen=True, kw_only=True)
class RolloutWork:
    n_prompts: int
    n_samples: int  # of each prompt
    prompt_len: int
    answer_len: float  # on average
    n_running: int  # samples that decode at the same time
    tp_size: int = 1


def rollout_seconds(
    config: TransformerConfig, cost: TokenCost, work: RolloutWork, rates: Rates, copies: int
) -> tuple[float, float]:
    """Estimate (seconds of prefill, seconds of decoding) with `copies` replicas. `rates`: of one replica's devices."""
    n_prompts = -(-work.n_prompts // copies)
    prompt_lens = (work.prompt_len,) * n_prompts
    prefill = device_seconds(config, cost, PassWork(row_lens=prompt_lens, n_predicted=n_prompts, trains=False), rates)
    n_total = n_prompts * work.n_samples
    rows = min(n_total, max(1, -(-work.n_running // copies)))
    n_waves = n_total / rows
    groups = max(1.0, rows / work.n_samples)
    flops = 2.0 * (cost.active_params + cost.active_adapter_params) * rows
    flops -= (1 - 1 / _FP8) * 2.0 * cost.fp8_params * rows
    if cost.experts is not None:
        flops *= 1.5
    products = rates.min_seconds(cost.weight_bytes_read(rows), flops) / _PRODUCTS
    kv_tokens = _mean_keys_read(cost, work.prompt_len, groups) + _mean_keys_read(cost, work.answer_len / 2, rows)
    moved = kv_tokens * cost.kv_bytes + 2 * cost.state_bytes * rows
    attention = moved / rates.copy_bytes_s / _KV[cost.fp8_kv]
    sampling = rows * config.vocab_size * _LOGIT_BYTES / rates.copy_bytes_s
    layer_s = (
        _LAYER_S
        + _ADAPTER_LAYER_S * (bool(cost.adapter_params) + bool(cost.expert_adapter_params))
        + _FP8_LAYER_S * bool(cost.fp8_params)
    )
    sums = (2 * config.num_layers + 1) * _SUM_S if work.tp_size > 1 else 0.0
    step = products + attention + sampling + sums + config.num_layers * layer_s
    return prefill, n_waves * work.answer_len * step


def _mean_keys_read(cost: TokenCost, length: float, n_rows: float) -> float:
    """Return the number of keys that rows of equal length read, as the mean over the attention layers."""
    return n_rows * sum(share * min(length, window or length) for window, share in cost.windows)
