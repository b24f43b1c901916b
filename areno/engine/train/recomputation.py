"""Chooses how many layers keep their activations for the backward pass. All other layers recompute them.

As many layers keep activations as free memory allows. The free memory is only an estimate, because it may be
fragmented. So a step that runs out of memory is repeated with fewer layers that keep activations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from areno.config.layout import Layout
from areno.cost.footprint import RESERVE
from areno.cost.memory import PassBytes
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
    is True with sequence parallelism.
    """

    def __init__(self, model: Transformer, free: Callable[[], int] | None, alone: bool = True, split: bool = False):
        self._model, self._free, self._alone = model, free, alone
        itemsize, layout = model.embed.weight.element_size(), Layout.single_replica(model.tp.size)
        self.teacher: object | None = None
        self._of_model = PassBytes.for_training(model.config, itemsize, layout, split=split)
        self._share = 1.0  # share of the free memory to use; lowered after running out of memory
        self._last = 0  # result of `n_kept_layers` for the current pass

    @property
    def _pass_bytes(self) -> PassBytes:
        return self._of_model if self.teacher is None else self._of_model.with_teacher_logits()

    def n_kept_layers(self, n_tokens: int, waits: bool = False) -> int:
        """Return how many layers keep their products: none if other passes precede the backward pass (`waits`)."""
        if self._free is None or not torch.is_grad_enabled():
            return 0
        if waits:
            self._last = 0
            return 0
        room = int(self._share * self._free())
        self._last = self._pass_bytes.fitting_layers(n_tokens, room, len(self._model.layers))
        return self._last

    def fitting_micro_batch_text(self) -> str:
        """Return the end of an error message that says how many tokens the largest possible micro-batch has."""
        if self._free is None:
            return ""
        n_tokens = self._pass_bytes.fitting_tokens(self._free()) // 256 * 256
        if not n_tokens:
            return "; beside the models and the KV cache no micro-batch fits"
        return f"; a micro-batch of {n_tokens:,} tokens would fit, with activations recomputed"

    def recompute_more(self) -> bool:
        """Keep fewer products from now on. Returns False if that cannot help, or if the rank is not alone."""
        if not self._last or not self._alone:
            return False
        self._share *= 0.75
        logger.warning("out of device memory in training; the step begins again and keeps fewer activations")
        return True
