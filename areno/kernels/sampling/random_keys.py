"""The random numbers of samples: the key of each sample, and a number for each position of its completion.

A number is a hash of (key of the sample, position in the completion). It does not depend on other rows, the device or
earlier calls. The hash is splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") in
wrapping int64, with the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _to_signed_64(value: int) -> int:
    """Return the signed 64-bit integer with the same low 64 bits."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _splitmix64_finalizer(value: int) -> int:
    value &= _WORD
    value = (value ^ (value >> 30)) * _MIX_1 & _WORD
    value = (value ^ (value >> 27)) * _MIX_2 & _WORD
    return value ^ (value >> 31)


def sample_keys(seed: int, samples: Iterable[int]) -> list[int]:
    """Return the key that seeds the random numbers of each sample of a request."""
    of_request = _splitmix64_finalizer(seed + _GOLDEN)
    return [_to_signed_64(_splitmix64_finalizer(of_request + (sample + 1) * _GOLDEN)) for sample in samples]


def mix_bits(value_B: Tensor) -> Tensor:
    """Mix the bits with the finalizer of splitmix64, so that each input bit changes about half of the output bits."""
    value_B = (value_B ^ logical_shift_right(value_B, 30)) * _to_signed_64(_MIX_1)
    value_B = (value_B ^ logical_shift_right(value_B, 27)) * _to_signed_64(_MIX_2)
    return value_B ^ logical_shift_right(value_B, 31)


def logical_shift_right(value_B: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros. torch's own shift fills with the sign."""
    return (value_B >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key_B: Tensor, position_B: Tensor) -> Tensor:
    """Return a float64 in [0, 1) with 53 random bits for each row, which depends only on key and position."""
    return logical_shift_right(mix_bits(key_B + (position_B + 1) * _to_signed_64(_GOLDEN)), 11).double() * 2.0**-53
