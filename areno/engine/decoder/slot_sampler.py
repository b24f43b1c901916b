"""Sampling with the settings of each sequence in the batch, which are kept on the device.

How a token is drawn from logits is in `kernels/sampling`. Here the settings find their rows, and the penalties, which
depend on the tokens that a sequence has, change the logits before the draw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.sequence import Sequence
from areno.kernels.sampling import SamplingSettings, sample_slots


class SamplingFlags(NamedTuple):
    """What the sampling of a batch needs beside a plain draw. Constants of a captured graph.

    filtered: some row has top-k or top-p. penalized: some row has a frequency penalty.
    """

    filtered: bool
    penalized: bool

    @classmethod
    def of(cls, sequences: list[Sequence]) -> SamplingFlags:
        """The flags of a batch."""
        return cls(any(s.is_filtered for s in sequences), any(s.is_penalized for s in sequences))


class SlotSampler:
    """Device tensors with one entry for each slot of the batch.

    A sequence's settings are written when it takes its slot, so a decode step sends slot numbers only. Temperature 0
    means greedy, with log-probabilities at temperature 1.
    """

    def __init__(self, n_slots: int, vocab_size: int, device: torch.device):
        self.tensors = SamplingSettings(
            key=torch.zeros(n_slots, dtype=torch.int64, device=device),
            temperature=torch.ones(n_slots, dtype=torch.float32, device=device),
            greedy=torch.zeros(n_slots, dtype=torch.bool, device=device),
            top_k=torch.full((n_slots,), -1, dtype=torch.int64, device=device),
            top_p=torch.ones(n_slots, dtype=torch.float32, device=device),
            last_token=torch.zeros(n_slots, dtype=torch.int64, device=device),
        )
        self.frequency_penalty = torch.zeros(n_slots, dtype=torch.float32, device=device)
        self._counts_shape = (n_slots, vocab_size)
        self._counts: Tensor | None = None  # float32, how often each completion has each token; made when needed

    @staticmethod
    def pack(sequences: list[Sequence]) -> np.ndarray:
        """Slots and settings of new sequences as one int64 array (7, len(sequences)), to be sent in one copy.

        Floats are stored by their float64 bits.
        """
        packed = np.empty((7, len(sequences)), dtype=np.int64)
        floats = packed.view(np.float64)
        for column, sequence in enumerate(sequences):
            params = sequence.request.params
            packed[0, column] = sequence.slot
            packed[1, column] = sequence.key
            packed[2, column] = params.greedy or params.temperature == 0
            # Top-k and top-p do not change a greedy draw; without them the row skips the slow path.
            packed[3, column] = params.top_k if sequence.is_filtered else -1
            floats[4, column] = params.temperature or 1.0
            floats[5, column] = params.top_p if sequence.is_filtered else 1.0
            floats[6, column] = params.frequency_penalty
        return packed

    def assign(self, packed: Tensor) -> None:
        """Write what `pack` returned, once it is on the device."""
        slots, tensors = packed[0], self.tensors
        tensors.key[slots] = packed[1]
        tensors.greedy[slots] = packed[2].bool()
        tensors.top_k[slots] = packed[3]
        tensors.temperature[slots] = packed[4].view(torch.float64).float()
        tensors.top_p[slots] = packed[5].view(torch.float64).float()
        self.frequency_penalty[slots] = packed[6].view(torch.float64).float()

    @staticmethod
    def pack_counts(sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray] | None:
        """(slots, (slot, token) pairs as (2, n)) of new sequences with a penalty; None without any.

        A sequence that was preempted has completion tokens when it takes a slot again.
        """
        penalized = [sequence for sequence in sequences if sequence.is_penalized]
        if not penalized:
            return None
        pairs = [(sequence.slot, token) for sequence in penalized for token in sequence.tokens[sequence.n_prompt :]]
        slots = np.array([sequence.slot for sequence in penalized], dtype=np.int64)
        return slots, np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()

    def assign_counts(self, slots: Tensor, pairs_2N: Tensor) -> None:
        """Write what `pack_counts` returned, once it is on the device."""
        if self._counts is None:
            self._counts = torch.zeros(self._counts_shape, dtype=torch.float32, device=slots.device)
        self._counts[slots] = 0
        self._counts.index_put_((pairs_2N[0], pairs_2N[1]), self._counts.new_ones(()), accumulate=True)

    def sample(
        self,
        logits_BV: Tensor,
        slots_B: Tensor,
        index_B: Tensor,
        flags: SamplingFlags,
        banned: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Sample a token for each row: (2, B) float64, tokens and log-probabilities, as `sample_slots` returns them."""
        tensors = self.tensors
        if not flags.penalized:
            return sample_slots(logits_BV, slots_B, index_B, tensors, filtered=flags.filtered, banned=banned)
        assert self._counts is not None
        penalty_B = self.frequency_penalty[slots_B]
        # Rows without a penalty keep their bits: they lose 0 times a finite count.
        penalized_BV = logits_BV - penalty_B[:, None] * self._counts[slots_B]
        out = sample_slots(penalized_BV, slots_B, index_B, tensors, filtered=flags.filtered, banned=banned)
        tokens_B = tensors.last_token[slots_B]
        self._counts[slots_B, tokens_B] += 1
        # The log-probability is that of the policy itself, which training computes as well.
        scaled_BV = logits_BV / tensors.temperature[slots_B][:, None]
        logprobs_B = scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - scaled_BV.logsumexp(-1)
        # A NaN stays, since it says that the logits were not finite.
        out[1] = torch.where((penalty_B != 0) & ~out[1].isnan(), logprobs_B.double(), out[1])
        return out
