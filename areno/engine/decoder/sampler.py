"""The sampling settings that each sequence brings along, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.sequence import Sequence
from areno.kernels.sampling import Settings, sample_slots


class Sampler:
    """The sampling settings of each slot, on the device, and the draw itself.

    The settings are written when a sequence takes its slot, so a step sends nothing but slot numbers. Temperature 0 is
    greedy, with the log-probabilities of temperature 1.
    """

    def __init__(self, n_slots: int, device: torch.device):
        self.settings = Settings(
            key=torch.zeros(n_slots, dtype=torch.int64, device=device),
            temperature=torch.ones(n_slots, dtype=torch.float32, device=device),
            greedy=torch.zeros(n_slots, dtype=torch.bool, device=device),
            top_k=torch.full((n_slots,), -1, dtype=torch.int64, device=device),
            top_p=torch.ones(n_slots, dtype=torch.float32, device=device),
            last_token=torch.zeros(n_slots, dtype=torch.int64, device=device),
        )

    @staticmethod
    def pack(sequences: list[Sequence]) -> np.ndarray:
        """Slots and settings as one int64 array (6, len(sequences)), to be sent at once; floats by their bits."""
        packed = np.empty((6, len(sequences)), dtype=np.int64)
        floats = packed.view(np.float64)
        for column, sequence in enumerate(sequences):
            params = sequence.request.params
            packed[0, column] = sequence.slot
            packed[1, column] = sequence.key
            packed[2, column] = params.greedy or params.temperature == 0
            # A greedy row is cut by nothing, or it would take the slow way for no use.
            packed[3, column] = params.top_k if sequence.is_filtered else -1
            floats[4, column] = params.temperature or 1.0
            floats[5, column] = params.top_p if sequence.is_filtered else 1.0
        return packed

    def assign(self, packed: Tensor) -> None:
        """Take over what `pack` made, now on the device."""
        slots, settings = packed[0], self.settings
        settings.key[slots] = packed[1]
        settings.greedy[slots] = packed[2].bool()
        settings.top_k[slots] = packed[3]
        settings.temperature[slots] = packed[4].view(torch.float64).float()
        settings.top_p[slots] = packed[5].view(torch.float64).float()

    def draw(
        self,
        logits_BV: Tensor,
        slots_B: Tensor,
        positions_B: Tensor,
        *,
        filtered: bool,
        banned: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One token for each row: see `sample_slots`."""
        return sample_slots(logits_BV, slots_B, positions_B, self.settings, filtered=filtered, banned=banned)
