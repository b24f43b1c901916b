"""The number of tokens in a micro-batch, chosen if the settings `mb_spec.mini_bs` and `max_tokens_per_mb` are null.

The choice depends on the shapes of the models, the settings of the run and the total memory of a device. It does not
depend on the memory that happens to be free, so the same run makes the same choice again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areno.cost.flops import TokenCost
from areno.cost.footprint import RESERVE, Footprint, ModelFootprint
from areno.cost.memory import PassBytes, activation_bytes
from areno.cost.time import launch_seconds

TRAIN, SCORE = "train", "score"

_MOST_TOKENS = 2**17
_LEAST_TOKENS = 256
_LEAST_TOKENS_CPU = 512
_CPU_BYTES = 2**27  # activations of a micro-batch on a CPU: larger ones no longer fit its caches, and are no faster
_NEARLY_BEST = 1.02  # estimated times that differ by less count as equal
_LARGER_IF_SHARED = 2  # so many times as large may a micro-batch be if its rows share prefixes

# Fitted to training steps of models with 31M to 4B parameters on an H100.
_FLOPS = 400e12  # FLOPs in a second, in large matrix products
_HALF_TOKENS = 500  # tokens at which products reach half of _FLOPS
_BETWEEN_S = 0.025  # time between two micro-batches in which the device waits


@dataclass(frozen=True, kw_only=True)
class _BudgetedWork:
    """The work of micro-batches of one model in one phase, on one device."""

    need: PassBytes
    n_layers: int
    flops: float  # per token, without recomputation
    of_recomputed_layer: float  # FLOPs per token of each layer that recomputes its matrix products
    host_s: float  # for the launch of the kernels of a micro-batch

    @staticmethod
    def from_model(footprint: Footprint, model: ModelFootprint, phase: str) -> _BudgetedWork:
        config, layout, itemsize = model.config, footprint.layout, footprint.itemsize
        cost, recomputed = TokenCost.from_config(config, itemsize, model.adapters), 0.0
        flops = 2.0 * cost.active_params / layout.tp_size
        need = footprint.scoring_pass_bytes(model)
        if phase == TRAIN:
            need = footprint.training_pass_bytes(model)
            flops *= 2 if model.adapters else 3  # frozen weights need no gradient
            if model.gradient_checkpointing:
                recomputed = 2.0 * config.hidden_size * activation_bytes(config, itemsize, layout).kept / itemsize
        return _BudgetedWork(
            need=need,
            n_layers=config.num_layers,
            flops=flops,
            of_recomputed_layer=recomputed,
            host_s=launch_seconds(config, trains=phase == TRAIN),
        )

    def seconds_per_token(self, n_tokens: int, room: int) -> float:
        """Estimate the time per token on a GPU. With more free bytes, fewer layers recompute their matrix products."""
        n_recomputed = self.n_layers - self.need.fitting_layers(n_tokens, room, self.n_layers)
        flops = self.flops + n_recomputed * self.of_recomputed_layer
        device_s = (n_tokens + _HALF_TOKENS) * flops / _FLOPS
        return (max(device_s, self.host_s) + _BETWEEN_S) / n_tokens


def choose_token_budget(
    footprint: Footprint, model: ModelFootprint, phase: str, device_bytes: int, cache_bytes: int
) -> int:
    """Choose how many tokens a micro-batch of one model may have, on one device.

    On a GPU, this is the smallest number whose estimated time per token is within 2 % of the best number that fits the
    memory. The smallest one leaves most memory free. If rows share prefixes, the number may be twice as large, because
    more groups of rows then fit a micro-batch. On a CPU, it is the largest number whose activations take at most 128
    MiB.
    """
    extra = footprint.extra_bytes_in_use(model, training=phase == TRAIN)
    room = int((1 - RESERVE) * device_bytes) - footprint.total_resident_bytes - extra - cache_bytes
    work = _BudgetedWork.from_model(footprint, model, phase)
    sizes = list(_candidate_budgets(work.need.fitting_tokens(room)))
    if not footprint.on_cuda:
        of_token = work.need.of_token + work.need.at_work
        small = [size for size in sizes if size <= max(_CPU_BYTES // of_token, _LEAST_TOKENS_CPU)]
        return small[-1]
    seconds = {size: work.seconds_per_token(size, room) for size in sizes}
    nearly_best = [size for size in sizes if seconds[size] <= _NEARLY_BEST * min(seconds.values())]
    larger = _LARGER_IF_SHARED if footprint.share_prefixes and model.config.shares_prefixes else 1
    return max(size for size in nearly_best if size <= larger * nearly_best[0])


def _candidate_budgets(most: int) -> Iterator[int]:
    """Yield powers of two and 1.5 times each of them, up to `most` tokens. The smallest is always yielded."""
    size = _LEAST_TOKENS
    yield size
    while size < _MOST_TOKENS:
        for larger in (size * 3 // 2, size * 2):
            if larger <= most:
                yield larger
        size *= 2
