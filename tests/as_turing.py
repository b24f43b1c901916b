"""Runs a benchmark as on a T4, with whatever GPU there is.

    python -m tests.as_turing step --shape tiny --profile trace.json

torch says that the GPU has compute capability 7.5, so areno chooses what runs there. Triton compiles its kernels for
7.5 and leaves them as PTX, which the driver translates for the GPU at hand. --profile keeps the work in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

CAPABILITY = (7, 5)


def pretend() -> None:
    """From here on the GPUs of this process are taken for a T4."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver

    torch.cuda.get_device_capability = lambda device=None: CAPABILITY  # type: ignore[assignment]
    target: Any = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    CudaDriver.get_current_target = lambda self: target
    # Triton hands the driver what this returns, which may be PTX as well as machine code.
    CUDABackend.make_cubin = lambda self, ptx, *_: ptx.encode()


def main(command: Sequence[str]) -> int:
    """Run one benchmark."""
    pretend()
    from benchmarks.__main__ import main as run_benchmark

    return run_benchmark(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
