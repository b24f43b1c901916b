"""Samplers whose slots hold given sampling parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.decoder.sampler import SlotSampler
from areno.engine.decoder.sequence import Sequence
from areno.kernels.sampling.random_keys import sample_keys
from areno.types import GenerationRequest, SamplingParams

Texts = tuple[tuple[int, int], ...]


def settings_of(
    slots: int, vocab: int, params: list[SamplingParams], device: str, texts: Texts = ()
) -> tuple[SlotSampler, Tensor]:
    """SlotSampler with those of row i in some slot, and the slots. Each row has had some tokens."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(5))[: len(params)]
    sequences = [
        Sequence(
            request=GenerationRequest(request_id=i, prompt=[1], params=given),
            sample=0,
            key=sample_keys(11, [i])[0],
            max_new=1,
            stop_ids=frozenset({7, 8, 9 + i % 5}),
            tokens=[1, *torch.randint(vocab, (40,), generator=torch.Generator().manual_seed(i)).tolist() * 2],
            slot=slot,
        )
        for i, (slot, given) in enumerate(zip(order.tolist(), params, strict=True))
    ]
    slot_sampler = SlotSampler(slots, vocab, torch.device(device), texts)
    slot_sampler.assign_settings(torch.from_numpy(SlotSampler.pack_settings(sequences)).to(device))
    if (counts := SlotSampler.pack_counts(sequences)) is not None:
        slot_sampler.assign_counts(*(torch.from_numpy(part).to(device) for part in counts))
    return slot_sampler, order.to(device)


PLAIN = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(greedy=True),
    SamplingParams(temperature=0),
]
