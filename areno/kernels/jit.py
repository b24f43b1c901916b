# pyright: reportAttributeAccessIssue=false
"""Kernels that begin before the one in front of them has ended (CUDA's programmatic dependent launch).

A step of decoding is hundreds of kernels of a few microseconds. Between two of them the device stands still for about
one, and each begins with loads that wait for each other: a number of a row, then what it points to. In a chain of
kernels, the first is an ordinary launch: everything before it has ended when it begins. The others get `options`. Such
a kernel may begin as soon as every program of the one before has called `let_next_begin` or ended. It does what does
not need the others, and then calls `wait`, which returns when the kernel before has ended and what it wrote can be
seen. So

- before `wait` it reads only what was complete before the first of the chain began. The last of three kernels may
  begin while the first still runs, since a program may let the next kernel begin before it waits itself. And a kernel
  that calls nothing lets the next one begin when its programs have ended, which is before all can see what they wrote;
- it writes nothing before `wait`. Then no kernel still runs that could read or write the same memory: the one before
  has ended, and it could not end before the one before that. For this, some program of each kernel has to wait. Others
  that have nothing to do, and write nothing, may end without;
- after the chain comes an ordinary launch. It begins when the last kernel has ended, and so all of them. To let it
  begin changes nothing.

How Triton kernels are compiled, whatever a release of Triton has as its defaults.

`kernel` stands in the place of `triton.jit` before each function that is launched. Functions that kernels call are
compiled along with them and keep `triton.jit`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from areno.kernels.backend import capability


@functools.cache
def is_possible(device: torch.device) -> bool:
    """Whether this device and this Triton can do it: an NVIDIA GPU of compute capability 9.0 or more."""
    if (capability(device) or (0, 0)) < (9, 0):
        return False
    if not isinstance(wait, triton.JITFunction):  # but interpreted
        return False
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401
    except ImportError:
        return False
    return has_option("launch_pdl")


def options(device: torch.device) -> dict[str, bool]:
    """Of the launch of a kernel in a chain but the first: that it is early, and the kernel's constant that says so.

    Empty where it is not possible; the kernel is an ordinary one then.
    """
    return {"EARLY": True, "launch_pdl": True} if is_possible(device) else {}


@triton.jit
def let_next_begin():
    """Of a program: as far as it is concerned, an early kernel behind this one may begin."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Of a program: until the kernel before has ended."""
    tl.extra.cuda.gdc_wait()


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
