"""Sampling in plain torch, with the settings of each slot, random numbers, and masks of allowed tokens.

The random number of a sampled token is a hash of (key of the sample, position in the completion). It depends on no
other row, device or earlier call. The hash is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators") in wrapping int64, the same bits on every device.

Shape letters: B rows (one token is sampled for each), V vocabulary, C chunks of the vocabulary; S slots; W words of 32
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 128  # vocabulary entries of a chunk of the two-level inverse CDF
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(slots=True)
class SamplingSettings:
    """The sampling settings of all slots: tensors with one entry for each slot.

    Attributes:
        key: int64, seeds the random numbers of the sample.
        temperature: float32, above 0.
        greedy: bool, take the most likely token.
        top_k: int64, sample from the k most likely tokens. Below 1: from all.
        top_p: float32, sample from the most likely tokens whose probabilities sum to this.
        min_new: int64, tokens of `banned` are not sampled before the completion has this many tokens.
        banned: int64 (slots, n_banned) token ids, padded with -1.
        penalty: float32, subtracted from a logit for each time the completion has the token.
        counts: int32 (slots, vocab), how often the completion has each token. None until a slot has a penalty.
        last_token: int64, the token sampled last.
    """

    key: Tensor
    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    min_new: Tensor
    banned: Tensor
    penalty: Tensor
    counts: Tensor | None
    last_token: Tensor


class SamplingFlags(NamedTuple):
    """The operations that some row of a batch needs. They are constants of a captured CUDA graph.

    Attributes:
        filtered: some row has top-k or top-p.
        n_banned: the width of `SamplingSettings.banned`, or 0 if no row is below its `min_new`.
        penalized: some row has a penalty.
        masked: some row may sample only the tokens of a mask.
    """

    filtered: bool = False
    n_banned: int = 0
    penalized: bool = False
    masked: bool = False

    @property
    def edits(self) -> bool:
        """Whether tokens are sampled from edited logits: with bans or penalties."""
        return self.penalized or self.n_banned > 0


def sample_slots(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    """Sample one token for each row in plain torch; arguments as of `areno.kernels.sampling.sample_slots`."""
    tokens_B, logprobs_B = sample_tokens(
        logits_BV,
        settings.temperature[slots_B],
        settings.greedy[slots_B],
        uniform(settings.key[slots_B], positions_B),
        top_k_B=settings.top_k[slots_B] if flags.filtered else None,
        top_p_B=settings.top_p[slots_B] if flags.filtered else None,
        edited_BV=_edited(logits_BV, slots_B, positions_B, settings, flags) if flags.edits else None,
    )
    settings.last_token[slots_B] = tokens_B
    if flags.penalized:
        assert settings.counts is not None
        settings.counts[slots_B, tokens_B] += 1
    return torch.stack((tokens_B.double(), logprobs_B.double()))


def _edited(
    logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings, flags: SamplingFlags
) -> Tensor:
    """Return a copy of the logits with penalties and bans."""
    edited_BV = logits_BV.clone()
    if flags.penalized:
        assert settings.counts is not None
        edited_BV -= settings.penalty[slots_B, None] * settings.counts[slots_B]
    return without_banned(edited_BV, slots_B, positions_B, settings) if flags.n_banned else edited_BV


def without_banned(logits_BV: Tensor, slots_B: Tensor, positions_B: Tensor, settings: SamplingSettings) -> Tensor:
    """Return a copy of the logits with -inf for the banned tokens of each row that is below its `min_new`.

    Args:
        logits_BV: float32.
        slots_B: int64, the slot of each row.
        positions_B: int64, the index of the sampled token in the completion.
        settings: the sampling settings of all slots.
    """
    banned_BK, vocab = settings.banned[slots_B], logits_BV.shape[1]
    holds_BK = (banned_BK >= 0) & (positions_B < settings.min_new[slots_B])[:, None]
    index_BK = torch.where(holds_BK, banned_BK, vocab)  # a column after the vocabulary takes tokens that are not banned
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
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    Args:
        logits_BV: float32 logits of the policy.
        temperature_B: float32, above 0.
        greedy_B: bool, rows that take the most likely token.
        uniform_B: float64 in [0, 1).
        top_k_B: int64; below 1: all tokens. Given with top_p_B, or not at all.
        top_p_B: float32. None: no row has top-k or top-p.
        edited_BV: float32, the logits to sample from. None: the logits of the policy.

    Returns:
        Tokens (B,) int64, and their logprobs (B,) float32 under softmax(logits / temperature), before top-k, top-p and
        edits. A row with a logit that is NaN or +inf gets logprob NaN and any token of the vocabulary.
    """
    scaled_BV = logits_BV / temperature_B[:, None]
    weights_BV, best_B, sums_BC, log_norm_B = _weights(scaled_BV)
    if edited_BV is not None:
        weights_BV, best_B, sums_BC, _ = _weights(edited_BV / temperature_B[:, None])
    if top_k_B is not None and top_p_B is not None:
        weights_BV *= _kept(weights_BV, top_k_B, top_p_B)
        sums_BC = _chunk_sums(weights_BV)
    drawn_B = _inverse_cdf(weights_BV, sums_BC, uniform_B)
    # Rounding may, rarely, give an entry of weight 0. NaN compares as false. Both take the most likely token.
    drawable_B = weights_BV.gather(1, drawn_B[:, None]).squeeze(1) > 0
    tokens_B = torch.where(greedy_B | ~drawable_B, best_B, drawn_B)
    logprobs_B = scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - log_norm_B
    return tokens_B, logprobs_B


def _weights(scaled_BV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's weights relative to its maximum, most likely token, chunk sums, and log of the norm."""
    top_B, best_B = scaled_BV.max(dim=-1)
    weights_BV = (scaled_BV - top_B[:, None]).exp_()
    sums_BC = _chunk_sums(weights_BV)
    return weights_BV, best_B, sums_BC, top_B + sums_BC.sum(-1).log().float()


def _kept(weights_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Return (B, V) bool: the k most likely tokens, of which the fewest whose share reaches top_p (at least one).

    Of equally likely tokens the lower ids come first. Rows without top-k and top-p keep all tokens.
    """
    sorted_BV, order_BV = weights_BV.sort(dim=-1, descending=True, stable=True)
    all_k_B, all_p_B = top_k_B < 1, top_p_B >= 1
    rank_V = torch.arange(weights_BV.shape[-1], device=weights_BV.device)
    inside_BV = (rank_V < top_k_B[:, None]) | all_k_B[:, None]
    sorted_BV = sorted_BV.double() * inside_BV
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    inside_BV &= (before_BV < top_p_B[:, None] * sorted_BV.sum(-1, keepdim=True)) | all_p_B[:, None]
    return torch.empty_like(inside_BV).scatter_(1, order_BV, inside_BV)


def _chunks(weights_BV: Tensor) -> Tensor:
    """Cut rows into chunks, (B, C, _CHUNK), padded with zeros."""
    n_rows, vocab = weights_BV.shape
    return F.pad(weights_BV, (0, -vocab % _CHUNK)).view(n_rows, -1, _CHUNK)


def _chunk_sums(weights_BV: Tensor) -> Tensor:
    """Return the sums of chunks (B, C) float64. Two levels need no (B, V) float64 tensor for exact sums."""
    return _chunks(weights_BV).sum(-1, dtype=torch.float64)


def _inverse_cdf(weights_BV: Tensor, sums_BC: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first entry at which the running sum of the weights exceeds `uniform` of the total: (B,) int64."""
    cumulated_BC = sums_BC.cumsum(-1)
    chunk_B, rest_B = _first_above(cumulated_BC, uniform_B * cumulated_BC[:, -1])
    index = chunk_B[:, None, None].expand(-1, 1, _CHUNK)
    inner = _chunks(weights_BV).gather(1, index).squeeze(1).double().cumsum(-1)
    inner_B, _ = _first_above(inner, rest_B)
    return (chunk_B * _CHUNK + inner_B).clamp_(max=weights_BV.shape[1] - 1)


def _first_above(cumulated_BC: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first entry above `target`, and the rest of the target after the entries before it."""
    target_B = torch.minimum(target_B.clamp(min=0), cumulated_BC[:, -1] * (1 - 2.0**-50))
    index_B1 = torch.searchsorted(cumulated_BC, target_B[:, None], right=True)
    index_B1 = index_B1.clamp_(max=cumulated_BC.shape[1] - 1)
    before_B1 = cumulated_BC.gather(1, (index_B1 - 1).clamp(min=0)) * (index_B1 > 0)
    return index_B1.squeeze(1), target_B - before_B1.squeeze(1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """Return the finalizer of splitmix64."""
    value &= _WORD
    value = (value ^ (value >> 30)) * _MIX_1 & _WORD
    value = (value ^ (value >> 27)) * _MIX_2 & _WORD
    return value ^ (value >> 31)


def sample_key(seed: int, sample: int) -> int:
    """Return the key of one sample of a request, which seeds its random numbers.

    Args:
        seed: the seed of the request.
        sample: the index of the sample.

    Returns:
        An int64 hash of the two.
    """
    return _signed(_mix(_mix(seed + _GOLDEN) + (sample + 1) * _GOLDEN))


def _shift(value_B: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically (torch's own shift is arithmetic)."""
    return (value_B >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key_B: Tensor, position_B: Tensor) -> Tensor:
    """Return a random number in [0, 1) for each row, a function of key and position alone.

    Args:
        key_B: int64, the keys of the samples.
        position_B: int64, the index of the sampled token in the completion.

    Returns:
        (B,) float64 with 53 random bits.
    """
    value = key_B + (position_B + 1) * _signed(_GOLDEN)
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    value = value ^ _shift(value, 31)
    return _shift(value, 11).double() * 2.0**-53


# Finite, so that a row without allowed tokens still samples a token. Its grammar then rejects it and ends the sample.
_FORBIDDEN = -1e30


def allowed_tokens(masks_SW: Tensor, slots_B: Tensor, vocab_size: int) -> Tensor:
    """Return the allowed tokens of each row.

    Args:
        masks_SW: int32; token t of a slot is allowed if bit t % 32 of word t // 32 is set.
        slots_B: int64, the slot of each row.
        vocab_size: V.

    Returns:
        (B, V) bool.
    """
    bytes_BN = masks_SW[slots_B].view(torch.uint8)
    bits_8 = torch.arange(8, dtype=torch.uint8, device=masks_SW.device)
    return ((bytes_BN[:, :, None] >> bits_8) & 1).flatten(1)[:, :vocab_size].bool()


def apply_masks(logits_BV: Tensor, masks_SW: Tensor, slots_B: Tensor) -> Tensor:
    """Return a copy of the logits in which no forbidden token can be sampled.

    Args:
        logits_BV: float32.
        masks_SW: int32 masks, as of `allowed_tokens`.
        slots_B: int64, the slot of each row.
    """
    return logits_BV.masked_fill(~allowed_tokens(masks_SW, slots_B, logits_BV.shape[1]), _FORBIDDEN)


def policy_logprobs(logits_BV: Tensor, temperature_B: Tensor, tokens_B: Tensor) -> Tensor:
    """Return log-probabilities of tokens under softmax(logits / temperature) over the whole vocabulary.

    Args:
        logits_BV: logits.
        temperature_B: float32.
        tokens_B: int64.

    Returns:
        (B,) float64.
    """
    scaled_BV = logits_BV.float() / temperature_B[:, None]
    return (scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - scaled_BV.logsumexp(-1)).double()
