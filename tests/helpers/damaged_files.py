"""Files with damaged bytes, for tests of hypothesis."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

examples = settings(derandomize=True, database=None, deadline=None)


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """The bytes with some of them replaced, left out or repeated."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        piece = draw(
            st.binary(max_size=6) | st.sampled_from([b"\xff", b"\x00", b'"', b"\n", b"\r", b",", b"[", b"{", b"\\u"])
        )
        data = data[:start] + piece + data[end:]
    return data
