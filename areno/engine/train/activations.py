"""Activation recomputation: the choice of how many layers keep their activations for the backward pass.

As many layers keep activations as free memory allows, and all other layers recompute them. The free memory is only an
estimate, because it may be fragmented. So a step that runs out of memory is repeated with fewer layers that keep
activations.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from areno.config.run import Layout
from areno.kernels.logprobs import FUSED_CHUNK
from areno.models.cost import activation_bytes, logits_bytes, token_bytes
from areno.models.transformer import Transformer

logger = logging.getLogger("areno")

HEAD_BYTES = 5 * 2**29  # for kept gradients of logits: 8.8k positions with a vocabulary of 152k in bf16
RESERVE = 0.06  # share of the device for memory that is not counted: workspaces, fragments, graphs


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a CUDA device, with 6 % of the device left as a reserve.

    Memory that torch has reserved but does not use counts as free.
    """
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + idle - int(RESERVE * total))


class KeptLayers:
    """Chooses how many layers keep the outputs of their large matrix products for the backward pass.

    All other layers recompute these outputs in the backward pass. The number is chosen for each micro-batch.

    Args:
        model: The model.
        free: Function that returns the number of bytes that can be allocated now. If None, all layers recompute.
        alone: Whether this rank computes the layers without collectives with other ranks. Only then can it repeat a
            step by itself.
        split: Whether sequence parallelism divides the tokens, see Transformer.forward.
    """

    def __init__(self, model: Transformer, free: Callable[[], int] | None, alone: bool = True, split: bool = False):
        self._model, self._free, self._alone, self._split = model, free, alone, split
        self._share = 1.0  # share of the free memory to use; lowered after running out of memory
        self._last = 0  # result of `count` for the current micro-batch

    def count(self, n_tokens: int) -> int:
        """Return the number of layers that keep their matrix products in a micro-batch of `n_tokens` tokens.

        The number is 0 if there is no backward pass.
        """
        if self._free is None or not torch.is_grad_enabled():
            return 0
        self._last = layers_to_keep(self._model, n_tokens, int(self._share * self._free()), self._split)
        return self._last

    def fitting(self) -> str:
        """Return the end of an error message that says how many tokens the largest possible micro-batch has.

        The text is "" on a CPU.
        """
        if self._free is None:
            return ""
        n_tokens = fitting_tokens(self._model, self._free(), self._split) // 256 * 256
        if not n_tokens:
            return "; beside the models and the KV cache no micro-batch fits"
        return f"; a micro-batch of {n_tokens:,} tokens would fit, with activations recomputed"

    def keep_less(self) -> bool:
        """Free unused memory after an out-of-memory error, and keep the products of fewer layers from now on.

        Returns:
            True if the step can be repeated. False if no layer has kept its products, so that nothing more can be
            freed, or if this rank cannot repeat by itself, because its layers have collectives with other ranks.
        """
        if not self._last or not self._alone:
            return False
        self._share *= 0.75
        gc.collect()
        torch.cuda.empty_cache()
        logger.warning("out of device memory in training; the step begins again and keeps fewer activations")
        return True


def layers_to_keep(model: Transformer, n_tokens: int, free: int, split: bool = False) -> int:
    """Return the number of layers whose matrix products can be kept in the free memory until the backward pass.

    Args:
        model: The model.
        n_tokens: Tokens of the micro-batch on this rank.
        free: Free memory in bytes.
        split: Whether sequence parallelism divides the tokens.
    """
    need = _Need.of(model, split)
    left = free - n_tokens * need.of_token - need.logits
    return max(0, min(len(model.layers), left // (n_tokens * need.of_kept_layer)))


def fitting_tokens(model: Transformer, free: int, split: bool = False) -> int:
    """Return the number of tokens in the largest micro-batch that fits if all layers recompute. 0 if none fits.

    Args:
        model: The model.
        free: Free memory in bytes.
        split: Whether sequence parallelism divides the tokens.
    """
    need = _Need.of(model, split)
    return max(0, (free - need.logits) // need.of_token)


@dataclass(frozen=True)
class _Need:
    """The bytes that training a model takes.

    Attributes:
        of_token: Bytes per token if all layers recompute.
        of_kept_layer: Additional bytes per token for each layer that keeps its matrix products.
        logits: Bytes for the logits of one chunk of tokens, and for the gradients of logits that are stored until the
            backward pass. 0 for a model with a value head.
    """

    of_token: int
    of_kept_layer: int
    logits: int

    @staticmethod
    def of(model: Transformer, split: bool = False) -> _Need:
        """Compute the bytes that training the model takes. `split` is whether sequence parallelism is on."""
        itemsize, layout = model.embed.weight.element_size(), Layout.one_copy(model.tp.size)
        kept = activation_bytes(model.config, itemsize, layout).kept
        logits = 0
        if model.score is None:
            logits = logits_bytes(model.config, FUSED_CHUNK, itemsize, layout) + HEAD_BYTES
        return _Need(token_bytes(model.config, itemsize, layout, split=split), kept, logits)
