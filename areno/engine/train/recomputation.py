"""Chooses how many layers keep their activations for the backward pass. All other layers recompute them.

As many layers keep activations as free memory allows. If even the inputs of all layers do not fit, those of the first
layers go to host memory. The free memory is only an estimate, because it may be fragmented. So a step that runs out of
memory is repeated with fewer layers that keep activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from areno.config.layout import Layout
from areno.cost.footprint import RESERVE, gib_text
from areno.cost.memory import PassBytes
from areno.engine.device_memory import host_bytes_free
from areno.models.activation_offload import ActivationOffload
from areno.models.transformer import Transformer

logger = logging.getLogger("areno")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated, including torch's unused cache, less a reserve of 6 %."""
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + idle - int(RESERVE * total))


class RecomputationPolicy:
    """Chooses how many layers keep the outputs of their large matrix products for the backward pass.

    All other layers recompute these outputs. `free` returns the free bytes of the device. If it is None, all layers
    recompute. Only a rank that is `alone`, without collectives with other ranks, can repeat a step by itself. `split`
    is True with sequence parallelism. `n_sharing` ranks use the host memory of this machine. `free_cache`
    frees a KV cache that no sample uses, and returns False if there is none.
    """

    def __init__(
        self,
        model: Transformer,
        free: Callable[[], int] | None,
        alone: bool = True,
        split: bool = False,
        n_sharing: int = 1,
        free_cache: Callable[[], bool] = bool,
    ):
        self._model, self._free, self._alone, self._n_sharing = model, free, alone, n_sharing
        self._free_cache = free_cache
        itemsize, layout = model.embed.weight.element_size(), Layout.single_replica(model.tp.size)
        self.teacher: object | None = None
        self._of_model = PassBytes.for_training(model.config, itemsize, layout, split=split)
        self._share = 1.0  # share of the free memory to use; lowered after running out of memory
        self._last = 0  # result of `n_kept_layers` for the current pass
        self._offload: ActivationOffload | None = None
        self._can_offload_more = False  # in the current pass
        self._most_logged = 0  # tokens of a pass with layer inputs in host memory

    @property
    def _pass_bytes(self) -> PassBytes:
        return self._of_model if self.teacher is None else self._of_model.with_teacher_logits()

    def n_kept_layers(self, n_tokens: int, waits: bool = False) -> int:
        """Return how many layers keep their products: none if other passes precede the backward pass (`waits`)."""
        if self._free is None or not torch.is_grad_enabled():
            return 0
        if self._offload is not None:
            self._offload.begin(0)  # frees the tensors of a pass that ran out of memory
        if waits:
            self._last = 0
            return 0
        room = int(self._share * self._free())
        self._last = self._pass_bytes.fitting_layers(n_tokens, room, len(self._model.layers))
        return self._last

    def begin_offload(self, n_tokens: int) -> ActivationOffload | None:
        """Return where the layers of a pass save their inputs, or None if these fit on the device.

        Call `n_kept_layers` for the pass before. No other pass may come between this one and its backward pass.
        """
        if self._free is None or not torch.is_grad_enabled():
            return None
        self._can_offload_more = False
        if self._last:
            return None
        n_layers, need, room = len(self._model.layers), self._pass_bytes, int(self._share * self._free())
        if need.offloading(n_layers, n_layers).expected(n_tokens) > room and self.free_cache():
            room = int(self._share * self._free())
        held = 0 if self._offload is None else self._offload.host_bytes
        in_host = held + int((1 - RESERVE) * host_bytes_free()) // self._n_sharing
        most = min(n_layers - 1, in_host // (n_tokens * need.of_inputs))
        n_offloaded = min(most, need.layers_to_offload(n_tokens, room, n_layers))
        self._can_offload_more = n_offloaded < most
        if not n_offloaded:
            return None
        if n_tokens > self._most_logged:
            self._most_logged = n_tokens
            host = gib_text(n_offloaded * n_tokens * need.of_inputs)
            text = "a micro-batch of %s tokens keeps the inputs of %d of %d layers in %s GiB of host memory"
            logger.info(text, f"{n_tokens:,}", n_offloaded, n_layers, host)
        self._offload = self._offload or ActivationOffload(self._model.device)
        self._offload.begin(n_offloaded)
        return self._offload

    def fitting_micro_batch_text(self) -> str:
        """Return the end of an error message that says how many tokens the largest possible micro-batch has."""
        if self._free is None:
            return ""
        n_layers, need, room = len(self._model.layers), self._pass_bytes, self._free()
        n_tokens = need.fitting_tokens(room) // 256 * 256
        longer = need.offloading(n_layers, n_layers).fitting_tokens(room) // 256 * 256
        if not longer:
            return "; beside the models and the KV cache no micro-batch fits"
        host = gib_text(longer * (n_layers - 1) * need.of_inputs)
        return (
            f"; a micro-batch of {n_tokens:,} tokens would fit, with activations recomputed, and one of {longer:,} "
            f"tokens with {host} GiB of host memory for the inputs of layers"
        )

    def recompute_more(self) -> bool:
        """Keep fewer products from now on. Returns False if that cannot help, or if the rank is not alone."""
        return bool(self._last) and self._use_less()

    def offload_more(self) -> bool:
        """Keep the inputs of more layers in host memory from now on. Returns False as `recompute_more` does."""
        return self._can_offload_more and self._use_less()

    def free_cache(self) -> bool:
        """Free the KV cache. Returns False if there is none, if samples use it, or if the rank is not alone."""
        if not (self._alone and self._free_cache()):
            return False
        logger.info("training does not fit beside the KV cache, which is freed until the next rollout")
        return True

    def _use_less(self) -> bool:
        if self._alone:
            self._share *= 0.75
            logger.warning("out of device memory in training; the step begins again and keeps fewer activations")
        return self._alone
