"""How Triton kernels are compiled, whatever a release of Triton has as its defaults.

`kernel` stands in the place of `triton.jit` before each function that is launched. Functions that kernels call are
compiled along with them and keep `triton.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import triton


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function as `triton.jit` does, with products and sums fused (FMA) where the compiler can.

    Fused operations round once, so the setting decides about bits. Releases of Triton have different defaults.

    Args:
        function: the kernel. Without it, a decorator is returned.
        options: of `triton.jit`.
    """
    if function is None:
        return functools.partial(kernel, **options)
    made = triton.jit(function, **options)
    if isinstance(made, triton.JITFunction):  # and not interpreted
        made.__class__ = _Kernel
    return made


@functools.cache
def has_option(name: str) -> bool:
    """Return whether this Triton can be given a launch option of this name for NVIDIA GPUs."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return name in {field.name for field in dataclasses.fields(CUDAOptions)}


class _Kernel(triton.JITFunction):
    def run(self, *args: Any, **how: Any) -> Any:
        """Launch, or only compile. Every launch comes through here."""
        if has_option("enable_fp_fusion"):
            how.setdefault("enable_fp_fusion", True)
        return super().run(*args, **how)
