"""Digests of buffers: each bit counts, wherever the buffer lies in its storage."""

from __future__ import annotations

import pytest
import torch

from areno.engine.state import digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
@pytest.mark.parametrize("n", [1, 7, 1000, 2048 * 3 + 5])
@pytest.mark.parametrize("offset", [0, 1])
def test_one_other_bit_gives_another_digest(
    n: int, offset: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PART", 1024)
    buffer = torch.arange(offset + n).to(dtype)[offset:]
    digest = digests._digest(buffer)
    assert torch.equal(digest, digests._digest(buffer.clone()))
    for byte in {0, n // 3, n * buffer.itemsize - 1}:
        other = buffer.clone()
        other.view(torch.uint8)[byte] ^= 1
        assert not torch.equal(digest, digests._digest(other))


def test_words_that_change_places_give_another_digest() -> None:
    buffer = torch.randn(4096)
    assert not torch.equal(digests._digest(buffer), digests._digest(buffer.roll(2)))


def test_signs_that_change_together_give_another_digest() -> None:
    buffer = torch.randn(4096)
    other = buffer.clone()
    other[torch.tensor([1, 3])] *= -1
    assert not torch.equal(digests._digest(buffer), digests._digest(other))
