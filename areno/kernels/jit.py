# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
"""Compilation of Triton kernels, and the early start of a kernel by programmatic dependent launch (PDL).

`kernel` replaces `triton.jit` for every function that is launched, so that all releases of Triton compile it with the
same options. Functions that kernels call keep `triton.jit`.

`launch_gluon` launches a kernel in Gluon, the lower-level language of Triton, in which a kernel says when it copies and
when it waits. Gluon is experimental: a release of Triton may lack it, or fail to compile a kernel. So each of these
kernels has the same results as a kernel in Triton, which runs where `can_run_gluon` or `launch_gluon` returns False.

`pdl_options`, `launch_dependents` and `wait_for_previous` use CUDA's PDL. A decoding step launches hundreds of kernels
that take a few microseconds each, with a gap of about one microsecond between two kernels. In a chain of kernels with
PDL, the first kernel is launched as usual, and the others with `pdl_options`. A kernel of the chain may begin as soon
as every program of the previous kernel has called `launch_dependents` or has ended. It first does the work that does
not depend on the chain, such as loading weights, and then calls `wait_for_previous`, which returns when the previous
kernel has ended and its results are visible. Three rules follow.

- Before `wait_for_previous`, a kernel reads only memory that was complete before the chain began. The third kernel of a
  chain may begin while the first still runs, because the second may call `launch_dependents` before it waits. A kernel
  that never calls `launch_dependents` also lets the next kernel begin before its results are visible. A kernel that
  reads nothing before it waits may always be launched with `pdl_options`.
- Before `wait_for_previous`, a kernel writes nothing. After it, no earlier kernel of the chain still runs, so nothing
  else accesses the same memory. This requires that at least one program of each kernel waits. Programs that have no
  work and write nothing may return without waiting.
- The kernel after the chain is launched as usual, so it begins after all kernels of the chain. `launch_dependents` in
  the last kernel of the chain has no effect.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from areno.kernels.backend import compute_capability, is_hopper

try:  # names that the kernels in Gluon import from here, so that all of them exist or none
    from triton.experimental import gluon  # noqa: F401
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: F401
        mbarrier,
        mma_v2,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name in Triton 3.6
    HAS_GLUON = True
except (ImportError, AttributeError):
    HAS_GLUON = False

logger = logging.getLogger("areno")
_uncompiled: set[str] = set()  # names of kernels in Gluon that Triton has failed to compile

# Line numbers of the source in compiled kernels take a quarter of the time to compile. Only debuggers and profilers of
# single instructions use them (cuda-gdb, compute-sanitizer, Nsight Compute). TRITON_DISABLE_LINE_INFO=0 keeps them. The
# variable is for all Triton kernels of this process and of its children.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether a device has PDL (compute capability 9.0), and Triton compiles for it and has PDL."""
    if (compute_capability(device) or (0, 0)) < (9, 0):
        return False
    if not isinstance(wait_for_previous, triton.JITFunction):  # the interpreter runs
        return False
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401
    except ImportError:
        return False
    return has_option("launch_pdl")


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options for a kernel that calls `wait_for_previous`, empty if the device has no PDL.

    The constexpr `PDL` tells the kernel that it has to wait. Without it, the kernel must not wait.
    """
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {}


@triton.jit
def launch_dependents():
    """Allow the next kernel to begin early, once every program of this kernel has called this function or has ended."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the previous kernel has ended and its results are visible. Needs a launch with PDL."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def program_id_64(AXIS: tl.constexpr):
    """Return the index of the program in int64, because offsets in large tensors exceed int32."""
    return tl.program_id(AXIS).to(tl.int64)


@triton.jit
def load_masked(ptr, mask):
    """Load elements, and zeros where `mask` is False."""
    return tl.load(ptr, mask=mask, other=0)


@triton.jit
def load_fp32(ptr, mask):
    return load_masked(ptr, mask).to(tl.float32)


@triton.jit
def round_to_dtype(x, ptr):
    """Round x to the element type of a pointer, and return it in fp32."""
    return x.to(ptr.dtype.element_ty).to(tl.float32)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function as `triton.jit` does, and fuse multiplications and additions (FMA) where possible.

    A fused operation rounds once, so fusing changes results in the last bit. Whether Triton fuses by default differs
    between its releases.
    """
    if function is None:
        return functools.partial(kernel, **options)
    made = triton.jit(function, **options)
    if isinstance(made, triton.JITFunction):  # not with TRITON_INTERPRET=1
        made.__class__ = _Kernel
    return made


@functools.lru_cache(maxsize=None, typed=True)  # for the same object a launch takes 10 us, for an equal one 33
def as_constants(sizes: Any) -> Any:
    """Return a NamedTuple of numbers as one constexpr argument of a kernel. The interpreter takes plain numbers."""
    return type(sizes)(*map(tl.constexpr, sizes)) if isinstance(wait_for_previous, triton.JITFunction) else sizes


@functools.cache
def has_option(name: str) -> bool:
    """Return whether the installed Triton has a launch option for NVIDIA GPUs."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    return name in {field.name for field in dataclasses.fields(CUDAOptions)}


@functools.cache
def _fma_options() -> dict[str, bool]:
    return {"enable_fp_fusion": True} if has_option("enable_fp_fusion") else {}


def can_run_gluon(device: torch.device, name: str) -> bool:
    """Return whether the Gluon kernel `name` runs on a device. It needs a Hopper GPU and a Triton that can compile it.

    Matrix products need instructions that only Hopper GPUs have. The other kernels were not measured on newer GPUs.
    """
    return _has_gluon(device) and name not in _uncompiled


@functools.cache
def _has_gluon(device: torch.device) -> bool:
    return HAS_GLUON and supports_pdl(device) and is_hopper(device)


def launch_gluon(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> bool:
    """Launch a kernel in Gluon, and return whether it was launched.

    If Triton cannot compile the kernel, a warning is logged, and `can_run_gluon` returns False for it from then on.
    Other errors of CUDA are raised.
    """
    options |= _fma_options()
    try:
        function[grid](*arguments, **options)
        return True
    except OutOfResources as error:  # the compiled kernel needs more shared memory than the GPU has
        reason: Exception = error
    except Exception:  # of whatever kind, because Gluon is experimental and the kernel in Triton takes over
        try:
            function.warmup(*arguments, grid=grid, **options)
        except Exception as error:
            reason = error
        else:  # the kernel compiles, so CUDA has failed
            raise
    name = function.__name__
    _uncompiled.add(name)
    logger.warning("decoding is slower, because Triton cannot compile the kernel %s in Gluon: %s", name, reason)
    return False


def tile_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor by which a kernel in Gluon copies tiles of a matrix to shared memory with Hopper's TMA.

    The matrix must be contiguous and of a dtype below, begin at a multiple of 16 bytes, and have rows of a multiple of
    16 bytes. Elements of a tile beyond the matrix are zeros.
    """
    dtypes = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.uint8: gl.uint8,
        torch.int16: gl.int16,
    }
    layout = _shared_layout(rows, columns, dtypes[matrix.dtype])
    # `stride` of a matrix of one row may be any number, and TMA needs a multiple of 16 bytes.
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns], layout)


@functools.cache
def _shared_layout(rows: int, columns: int, dtype: gl.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


class _Kernel(triton.JITFunction):
    def run(self, *args: Any, **how: Any) -> Any:
        """Launch with FMA switched on. Triton calls this method for every launch."""
        return super().run(*args, **{**_fma_options(), **how})
