"""Which form of an operation runs: Triton kernels or plain torch."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor


def use_triton(x: Tensor) -> bool:
    """Whether operations on x run as Triton kernels: on CUDA, or anywhere with TRITON_INTERPRET=1, if it is installed.

    Every operation in `areno.kernels` asks here. Where the answer is no, its torch reference runs.
    """
    return runs_triton(x.device)


def runs_triton(device: torch.device) -> bool:
    """Return whether operations on tensors of a device run as Triton kernels. See `use_triton`."""
    return (device.type == "cuda" or _interprets()) and _is_installed()


def form(x: Tensor, package: str) -> Any:
    """The module of a package of `areno.kernels` whose functions run on x: `triton` or `reference`."""
    return importlib.import_module(f"{package}.{'triton' if use_triton(x) else 'reference'}")


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
