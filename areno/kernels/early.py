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
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from areno.kernels.backend import capability
from areno.kernels.jit import has_option


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
