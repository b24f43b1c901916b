# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
"""What the kernels of rows, of their backward pass and of a single token have in common. Letters as in the package."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from areno.kernels.delta.parts import DeltaWeights

LENGTH_EPS = tl.constexpr(1e-6)  # of the lengths of q and k, as in `reference.py`


def sizes_of(weights: DeltaWeights) -> dict[str, Any]:
    """Constants of the kernels of rows. A block is the power of two that holds a head, or all heads' gates."""
    key, value = weights.key_dim, weights.value_dim
    return {
        "KEY_HEADS": weights.n_key_heads,
        "HEADS": weights.n_heads,
        "KEY": key,
        "VALUE": value,
        "WIDTH": weights.conv_XW.shape[1],
        "KEY_BLOCK": triton.next_power_of_2(key),
        "VALUE_BLOCK": triton.next_power_of_2(value),
        "HEAD_BLOCK": triton.next_power_of_2(weights.n_heads),
    }


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as torch has it: x itself where it is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def rounded(x, ptr):
    """As it is kept in memory of this type, in fp32."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def convolved(
    given_ptr, conv_ptr, before_ptr, rows_ptr, token, age, is_token, channel, is_channel,
    GIVEN: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The convolution of some channels of some tokens, in the order of `triton_step.py`: the token, then the oldest."""
    inside = is_token[:, None] & is_channel[None, :]
    place = token.to(tl.int64)[:, None] * GIVEN + channel[None, :]
    weight = tl.load(conv_ptr + channel * WIDTH + WIDTH - 1, mask=is_channel, other=0.0).to(tl.float32)
    total = tl.load(given_ptr + place, mask=inside, other=0.0).to(tl.float32) * weight[None, :]
    for earlier in tl.static_range(WIDTH - 1):
        shift = WIDTH - 1 - earlier
        in_row = (age >= shift)[:, None]
        x = tl.load(given_ptr + place - shift * GIVEN, mask=inside & in_row, other=0.0).to(tl.float32)
        if before_ptr is not None:
            row = tl.load(rows_ptr + token, mask=is_token, other=0)
            kept = (row[:, None] * CHANNELS + channel[None, :]) * (WIDTH - 1) + earlier + age[:, None]
            x += tl.load(before_ptr + kept, mask=inside & (age < shift)[:, None], other=0.0).to(tl.float32)
        weight = tl.load(conv_ptr + channel * WIDTH + earlier, mask=is_channel, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    return total
