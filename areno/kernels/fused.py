"""Whether the fused kernels of a layer can be used. Where not, the plain torch layers do the same work."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

from torch import Tensor


def fused_kernels(x: Tensor) -> ModuleType | None:
    """`fused_triton` on CUDA (anywhere, where Triton interprets) if Triton is installed, else None."""
    return _module() if x.is_cuda or _interprets() else None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _module() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from areno.kernels import fused_triton

    return fused_triton
