"""The memory of layers with a recurrent state: one state for each slot."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.kernels.delta import DeltaStates, DeltaWeights, RowChunks, delta_rows, delta_step
from areno.models.transformer import Transformer


class StateCache:
    """What each layer remembers of the sequence in a slot, behind its last position that is computed.

    A state cannot be cut back to an earlier position, nor found by its content. So the samples of a prompt each get a
    copy of the state behind it, and a sequence that was preempted is computed from its first token.

    layers: the states of each layer that has some, n_slots of them. The last slot belongs to rows that pad a batch.
    """

    def __init__(self, model: Transformer, n_slots: int):
        delta, weight, tp_size = model.config.delta, model.embed.weight, model.tp.size
        assert delta is not None, "a model without recurrent states"
        n, on = len(delta.layers), weight.device
        heads = (delta.n_value_heads // tp_size, delta.key_dim, delta.value_dim)
        # Zeros, because padding rows read theirs, and a nan would be kept for ever.
        inputs = torch.zeros(n, n_slots, delta.n_channels // tp_size, delta.width - 1, dtype=weight.dtype, device=on)
        matrices = torch.zeros(n, n_slots, *heads, dtype=torch.float32, device=on)
        self.layers = [DeltaStates(inputs[layer], matrices[layer]) for layer in range(n)]
        self._all = (inputs, matrices)

    def step(self, layer: int, given_BP: Tensor, weights: DeltaWeights, slots_B: Tensor) -> Tensor:
        """One token of the sequences in these slots."""
        return delta_step(given_BP, weights, self.layers[layer], slots_B)

    def rows(
        self,
        layer: int,
        given_NP: Tensor,
        weights: DeltaWeights,
        chunks: RowChunks,
        slots_R: Tensor,
        goes_on_R: Tensor | None,
    ) -> Tensor:
        """Packed tokens of the sequences in these slots. goes_on_R: which have earlier tokens; None: none has."""
        states, before = self.layers[layer], None
        if goes_on_R is not None:
            given = [each.index_select(0, slots_R) for each in states]
            before = DeltaStates(*(_where(goes_on_R, each) for each in given))
        out_NI, after = delta_rows(given_NP, weights, chunks, before, keep=True)
        assert after is not None
        for mine, new in zip(states, after, strict=True):
            mine.index_copy_(0, slots_R, new)
        return out_NI

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Give the target slots the states of the source slots, in all layers."""
        for each in self._all:
            each.index_copy_(1, targets, each.index_select(1, sources))


def _where(chosen_R: Tensor, x: Tensor) -> Tensor:
    """Zeros in the other rows, whatever they hold."""
    return torch.where(chosen_R.view(-1, *[1] * (x.dim() - 1)), x, 0.0)
