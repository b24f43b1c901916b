"""Drawing only tokens that a mask allows, with the log-probabilities of the policy as it is.

Shape letters: S slots, B rows (one token to draw for each), V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Finite, so that a row which allows nothing still draws some token. Its grammar refuses that one, and the sample ends.
_FORBIDDEN = -1e30


def allowed_tokens(masks_SW: Tensor, slots_B: Tensor, vocab_size: int) -> Tensor:
    """(B, V) bool. masks_SW: int32, token t of a slot is allowed if bit t % 32 of word t // 32 is set."""
    bytes_BN = masks_SW[slots_B].view(torch.uint8)
    bits_8 = torch.arange(8, dtype=torch.uint8, device=masks_SW.device)
    return ((bytes_BN[:, :, None] >> bits_8) & 1).flatten(1)[:, :vocab_size].bool()


def apply_masks(logits_BV: Tensor, masks_SW: Tensor, slots_B: Tensor) -> Tensor:
    """A copy of the logits in which no forbidden token can be drawn."""
    return logits_BV.masked_fill(~allowed_tokens(masks_SW, slots_B, logits_BV.shape[1]), _FORBIDDEN)


def policy_logprobs(logits_BV: Tensor, temperature_B: Tensor, tokens_B: Tensor) -> Tensor:
    """Log-probabilities (B,) float64 of tokens under softmax(logits / temperature) over the whole vocabulary."""
    scaled_BV = logits_BV.float() / temperature_B[:, None]
    return (scaled_BV.gather(1, tokens_B[:, None]).squeeze(1) - scaled_BV.logsumexp(-1)).double()
