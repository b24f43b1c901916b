"""Draws a token for each row of logits, with the settings that each sequence brought along."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.sequence import Sequence
from areno.kernels.sampling import sample_tokens, uniform


class Sampler:
    """The sampling settings of each slot, on the device, and the draw itself.

    The settings are written when a sequence takes its slot, so a step sends nothing but slot numbers. Temperature 0 is
    greedy, with the log-probabilities of temperature 1.
    """

    def __init__(self, n_slots: int, device: torch.device):
        self.key = torch.zeros(n_slots, dtype=torch.int64, device=device)
        self.temperature = torch.ones(n_slots, dtype=torch.float32, device=device)
        self.greedy = torch.zeros(n_slots, dtype=torch.bool, device=device)
        self.top_k = torch.full((n_slots,), -1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(n_slots, dtype=torch.float32, device=device)

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
            packed[3, column] = params.top_k
            floats[4, column] = params.temperature or 1.0
            floats[5, column] = params.top_p
        return packed

    def assign(self, packed: Tensor) -> None:
        """Take over what `pack` made, now on the device."""
        slots = packed[0]
        self.key[slots] = packed[1]
        self.greedy[slots] = packed[2].bool()
        self.top_k[slots] = packed[3]
        self.temperature[slots] = packed[4].view(torch.float64).float()
        self.top_p[slots] = packed[5].view(torch.float64).float()

    def draw(
        self,
        logits_BV: Tensor,
        slots_B: Tensor,
        positions_B: Tensor,
        *,
        filtered: bool,
        banned: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One token for each row: (2, B) float64, the tokens and their log-probabilities, so that they travel together.

        positions_B: which token of the completion is drawn. filtered: whether some row has a top-k or top-p.
        banned: (rows, token ids) that must not be drawn. A log-probability of NaN tells that the logits were not
        finite.
        """
        tokens_B, logprobs_B = sample_tokens(
            logits_BV,
            self.temperature[slots_B],
            self.greedy[slots_B],
            uniform(self.key[slots_B], positions_B),
            top_k_B=self.top_k[slots_B] if filtered else None,
            top_p_B=self.top_p[slots_B] if filtered else None,
            banned=banned,
        )
        return torch.stack((tokens_B.double(), logprobs_B.double()))
