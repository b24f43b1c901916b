"""How much of a forward pass may be kept for the backward pass: as much as there is memory for.

Recompute is the price of memory that is short; where it is not, nothing has to be computed twice.
"""

from __future__ import annotations

import torch

from areno.kernels.logprobs import FUSED_CHUNK
from areno.models.cost import activation_bytes, logits_bytes
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
    itemsize, tp_size, n_layers = model.embed.weight.element_size(), model.tp.size, len(model.layers)
    layer = activation_bytes(model.config, itemsize, tp_size)
    logits = 0
    if model.score is None:
        logits = logits_bytes(model.config, FUSED_CHUNK, itemsize, tp_size) + HEAD_BYTES
    left = free - n_tokens * (n_layers * layer.always + layer.at_work) - logits
    return max(0, min(n_layers, left // (n_tokens * layer.kept)))
