"""How much of a forward pass may be kept for the backward pass: as much as there is memory for.

Recompute is the price of memory that is short; where it is not, nothing has to be computed twice.
"""

from __future__ import annotations

import torch

from areno.kernels.logprobs import FUSED_CHUNK
from areno.models.transformer import Transformer

HEAD_BYTES = 5 * 2**29  # of logit gradients kept: 8.8k positions of a 152k vocabulary in bf16
RESERVE = 0.06  # of the device, for what is not counted: workspaces, fragments, graphs


def free_bytes(device: torch.device) -> int:
    """What could be allocated: free on the device, or held by torch without use."""
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + idle - int(RESERVE * total))


def layers_to_keep(model: Transformer, n_tokens: int, free: int) -> int:
    """Of how many layers the large matrix products can be kept over a micro-batch of n_tokens within `free` bytes."""
    layer = model.layers[0]
    size, itemsize = model.config.hidden_size, model.embed.weight.element_size()
    qkv, gate_up = (sum(linear.local_sizes) for linear in (layer.attention.qkv, layer.mlp.gate_up))  # type: ignore[union-attr]
    heads = layer.attention.qkv.local_sizes[0]  # type: ignore[union-attr]
    always = len(model.layers) * (2 * size * 4 // itemsize + heads)  # the stream is fp32
    at_work = 3 * (qkv + gate_up) + 12 * size  # products, their gradients, and both halves of a layer at once
    logits = 0
    if model.score is None:
        logits = FUSED_CHUNK * model.head_weight.shape[0] * (4 + itemsize) + HEAD_BYTES
    left = free - n_tokens * itemsize * (always + at_work) - logits
    return max(0, min(len(model.layers), left // (n_tokens * itemsize * (qkv + gate_up))))
