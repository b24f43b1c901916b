"""Sampling in plain torch, with sampling settings per slot and masks of allowed tokens.

C chunks of the vocabulary; S slots; W words of 32 tokens: token t is bit t % 32 of word t // 32, int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areno.config.rollout import SamplingConfig
from areno.kernels.sampling.random_keys import uniform

_CHUNK = 128  # vocabulary entries in a chunk; the inverse CDF first finds the chunk, then the entry


@dataclass(frozen=True, slots=True)
class DecodableIds:
    """The token ids that have a text, which are the only ones that are sampled."""

    n_first: int  # the ids below this one all have a text
    words_W: Tensor
    absent_N: Tensor  # int64, ascending

    @classmethod
    def from_ranges(
        cls, ranges: Iterable[tuple[int, int]], vocab_size: int, device: torch.device
    ) -> DecodableIds | None:
        """Return the ids in ranges (first, end). None if these are all ids, or if there are no ranges."""
        has_text = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        for first, end in ranges:
            has_text[first : min(end, vocab_size)] = True
        absent = np.flatnonzero(~has_text[:vocab_size])
        if len(absent) in (0, vocab_size):
            return None
        words = torch.from_numpy(np.packbits(has_text, bitorder="little").view(np.int32)).to(device)
        return cls(int(absent[0]), words, torch.from_numpy(absent).to(device))


class SlotSetting(NamedTuple):
    """One sampling setting: its dtype, its value in an unused slot, and the function that reads it from a request.

    If there is no function, the decoder sets the value for each sample.
    """

    dtype: torch.dtype
    unused: float
    of_request: Callable[[SamplingConfig], float] | None = None


def slot_setting(*declared: Any) -> Any:
    return field(metadata={"column": SlotSetting(*declared)})


@dataclass
class SamplingSettings:
    """The sampling settings of all slots, one entry per slot. A slot belongs to one sample at a time."""

    banned: Tensor  # int64 (S, n_banned), padded with -1
    counts: Tensor | None  # int32 (S, V), occurrences in the completion; None until some slot has a penalty
    key: Tensor = slot_setting(torch.int64, 0)  # from `sample_keys`
    # Length of the completion below which `banned` tokens are not sampled.
    min_new: Tensor = slot_setting(torch.int64, 0)
    last_token: Tensor = slot_setting(torch.int64, 0)
    temperature: Tensor = slot_setting(torch.float32, 1, lambda params: params.logprob_temperature)  # above 0
    greedy: Tensor = slot_setting(torch.bool, 0, lambda params: params.is_greedy)
    # Top-k and top-p do not change a greedy draw; without them the row skips the slow path. top_k below 1: all tokens.
    top_k: Tensor = slot_setting(torch.int64, -1, lambda params: -1 if params.is_greedy else params.top_k)
    top_p: Tensor = slot_setting(torch.float32, 1, lambda params: 1 if params.is_greedy else params.top_p)
    # subtracted from a token's logit for each occurrence in the completion
    penalty: Tensor = slot_setting(torch.float32, 0, lambda params: params.frequency_penalty)
    texts: DecodableIds | None = None  # None means all ids

    def overwrites_logits(self, flags: SamplingFlags) -> bool:
        """Return whether kernels write into the logits: with edits, or with top-k or top-p if some ids have no text."""
        return flags.edits_logits or (flags.filtered and self.texts is not None)


COLUMNS: dict[str, SlotSetting] = {
    each.name: each.metadata["column"] for each in fields(SamplingSettings) if each.metadata
}


class SamplingFlags(NamedTuple):
    """The optional steps that at least one row of a batch needs. A CUDA graph is valid for one value of it."""

    filtered: bool = False  # by top-k or top-p
    n_banned: int = 0  # width of `SamplingSettings.banned`, or 0 if every row has reached its `min_new`
    penalized: bool = False  # by a frequency penalty
    masked: bool = False  # to the tokens that a mask allows

    @property
    def edits_logits(self) -> bool:
        return self.penalized or self.n_banned > 0


def sample_slots(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    tokens_B, logprobs_B = sample_tokens(
        logits_BV,
        settings.temperature[slots_B],
        settings.greedy[slots_B],
        uniform(settings.key[slots_B], positions_B),
        top_k_B=settings.top_k[slots_B] if flags.filtered else None,
        top_p_B=settings.top_p[slots_B] if flags.filtered else None,
        edited_BV=_with_penalties_and_bans(logits_BV, slots_B, positions_B, settings, flags)
        if flags.edits_logits
        else None,
        absent_N=None if settings.texts is None else settings.texts.absent_N,
    )
    settings.last_token[slots_B] = tokens_B
    if flags.penalized:
        assert settings.counts is not None
        settings.counts[slots_B, tokens_B] += 1
    return torch.stack((tokens_B.double(), logprobs_B.double()))


def _with_penalties_and_bans(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    edited_BV = logits_BV.clone()
    if flags.penalized:
        assert settings.counts is not None
        edited_BV -= settings.penalty[slots_B, None] * settings.counts[slots_B]
    return mask_banned_tokens(edited_BV, slots_B, positions_B, settings) if flags.n_banned else edited_BV


def mask_banned_tokens(logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings) -> Tensor:
    banned_BK, vocab = settings.banned[slots_B], logits_BV.shape[1]
    holds_BK = (banned_BK >= 0) & (positions_B < settings.min_new[slots_B])[:, None]
    index_BK = torch.where(holds_BK, banned_BK, vocab)  # unused entries write to an extra column
    return F.pad(logits_BV, (0, 1)).scatter_(1, index_BK, -torch.inf)[:, :vocab]


def sample_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    greedy_B: Tensor,
    uniform_B: Tensor,
    *,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    edited_BV: Tensor | None = None,
    absent_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row by the inverse CDF. Return its id and the policy's log-probability, float32.

    `edited_BV` are the logits to sample from, with penalties and bans, if they differ from those of the policy.
    `absent_N` are ascending ids that are not sampled. Set both `top_k_B` and `top_p_B`, or neither. A row with a NaN or
    +inf logit gets log-probability NaN and any token.
    """
    scaled_BV = logits_BV / temperature_B[:, None]
    weights_BV, best_B, sums_BC, log_norm_B = _softmax_weights(scaled_BV)
    scaled_drawn_BV = scaled_BV
    if edited_BV is not None:
        scaled_drawn_BV = edited_BV / temperature_B[:, None]
        weights_BV, best_B, sums_BC, _ = _softmax_weights(scaled_drawn_BV)
    if absent_N is not None:
        weights_BV, best_B, sums_BC = _mask_ids_without_text(absent_N, scaled_drawn_BV, weights_BV, best_B, sums_BC)
    if top_k_B is not None and top_p_B is not None:
        weights_BV *= _top_k_top_p_mask(weights_BV, top_k_B, top_p_B)
        sums_BC = _chunk_sums(weights_BV)
    drawn_B = _inverse_cdf(weights_BV, sums_BC, uniform_B)
    # Take the most likely token if rounding gave an entry of weight 0, which is rare, or if the weight is NaN.
    drawable_B = weights_BV.gather(1, drawn_B[:, None]).squeeze(1) > 0
    tokens_B = torch.where(greedy_B | ~drawable_B, best_B, drawn_B)
    logprobs_B = scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - log_norm_B
    return tokens_B, logprobs_B


def _softmax_weights(scaled_BV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights exp(x - maximum), the best token, chunk sums (B, C) float64, and the log-sum-exp of each row."""
    top_B, best_B = scaled_BV.max(dim=-1)
    weights_BV = (scaled_BV - top_B[:, None]).exp_()
    sums_BC = _chunk_sums(weights_BV)
    return weights_BV, best_B, sums_BC, top_B + sums_BC.sum(-1).log().float()


def _mask_ids_without_text(
    absent_N: Tensor, scaled_BV: Tensor, weights_BV: Tensor, best_B: Tensor, sums_BC: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, best tokens and chunk sums without the ids `absent_N`. The weights may be changed."""
    if scaled_BV.is_cuda or torch.isin(best_B, absent_N).any():  # a GPU would have to wait for the answer
        return _softmax_weights(scaled_BV.index_fill(1, absent_N, -torch.inf))[:3]
    weights_BV.index_fill_(1, absent_N, 0)
    first = int(absent_N[0]) // _CHUNK
    sums_BC[:, first:] = _chunk_sums(weights_BV[:, first * _CHUNK :])
    return weights_BV, best_B, sums_BC


def _top_k_top_p_mask(weights_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Return which tokens top-k and top-p keep, (B, V) bool.

    Top-k keeps the k most likely tokens. Of these k tokens, top-p keeps the most likely ones until their weights sum to
    top_p times the weight of all k tokens, but at least one token. Among equally likely tokens, lower ids come first.
    """
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    all_k_B, all_p_B = top_k_B < 1, top_p_B >= 1
    rank_V = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    inside_BV = (rank_V < top_k_B[:, None]) | all_k_B[:, None]
    sorted_BV = sorted_BV.double() * inside_BV
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    inside_BV &= (before_BV < top_p_B[:, None] * sorted_BV.sum(-1, keepdim=True)) | all_p_B[:, None]
    return torch.empty_like(inside_BV).scatter_(1, order_BV, inside_BV)


def _split_into_chunks(weights_BV: Tensor) -> Tensor:
    n_rows, vocab = weights_BV.shape
    return F.pad(weights_BV, (0, -vocab % _CHUNK)).view(n_rows, -1, _CHUNK)


def _chunk_sums(weights_BV: Tensor) -> Tensor:
    """Sum each chunk, (B, C) float64, which avoids a float64 tensor of shape (B, V)."""
    return _split_into_chunks(weights_BV).sum(-1, dtype=torch.float64)


def _inverse_cdf(weights_BV: Tensor, sums_BC: Tensor, uniform_B: Tensor) -> Tensor:
    """Return, for each row, the first token at which the running sum of weights exceeds `uniform` times their total."""
    cumulated_BC = sums_BC.cumsum(-1)
    chunk_B, rest_B = _first_above(cumulated_BC, uniform_B * cumulated_BC[:, -1])
    index = chunk_B[:, None, None].expand(-1, 1, _CHUNK)
    inner = _split_into_chunks(weights_BV).gather(1, index).squeeze(1).double().cumsum(-1)
    inner_B, _ = _first_above(inner, rest_B)
    return (chunk_B * _CHUNK + inner_B).clamp_(max=weights_BV.shape[1] - 1)


def _first_above(cumulated_BC: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first running sum above the target, and the target minus the sum before that index."""
    target_B = torch.minimum(target_B.clamp(min=0), cumulated_BC[:, -1] * (1 - 2.0**-50))
    index_B1 = torch.searchsorted(cumulated_BC, target_B[:, None], right=True)
    index_B1 = index_B1.clamp_(max=cumulated_BC.shape[1] - 1)
    before_B1 = cumulated_BC.gather(1, (index_B1 - 1).clamp(min=0)) * (index_B1 > 0)
    return index_B1.squeeze(1), target_B - before_B1.squeeze(1)


# Finite, so that a row without allowed tokens still samples a token. The grammar rejects the token and ends the sample.
_FORBIDDEN = -1e30


def allowed_tokens(masks_SW: Tensor, slots_B: Tensor, vocab_size: int) -> Tensor:
    bytes_BN = masks_SW[slots_B].view(torch.uint8)
    bits_8 = torch.arange(8, dtype=torch.uint8, device=masks_SW.device)
    return ((bytes_BN[:, :, None] >> bits_8) & 1).flatten(1)[:, :vocab_size].bool()


def apply_masks(logits_BV: Tensor, masks_SW: Tensor, slots_B: Tensor) -> Tensor:
    """Return a copy of the logits with -1e30 for tokens that the mask of the row's slot does not allow."""
    return logits_BV.masked_fill(~allowed_tokens(masks_SW, slots_B, logits_BV.shape[1]), _FORBIDDEN)


def policy_logprobs(logits_BV: Tensor, temperature_B: Tensor, tokens_B: Tensor) -> Tensor:
    """Return the float64 log-probability of each row's token under softmax(logits / temperature) over all tokens."""
    scaled_BV = logits_BV.float() / temperature_B[:, None]
    return (scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - scaled_BV.logsumexp(-1)).double()
