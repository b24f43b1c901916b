"""The choice between the Triton kernels and the torch reference of an operation, by the device of its tensors.

Every package of `areno.kernels` calls `use_triton` or `form`. `to_device` copies inputs to the device. The other
functions tell what a GPU supports, such as bfloat16, from its compute capability.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.errors import ConfigError, Problem

AMPERE = (8, 0)  # the first compute capability with bfloat16, TF32 and flash attention
VOLTA = (7, 0)  # the first compute capability that Triton compiles for


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor on a device. The host does not wait for a GPU, which copies from pinned memory.

    Args:
        array: the array, which must not change afterwards: on a CPU, the tensor has the same memory.
        device: the device.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def use_triton(x: Tensor) -> bool:
    """Return whether operations on a tensor run as Triton kernels instead of the torch reference.

    Args:
        x: an input of the operation. Only its device matters.

    Returns:
        True if Triton is installed and `x` is on a GPU that Triton compiles for, or if TRITON_INTERPRET=1.
    """
    return runs_triton(x.device)


def runs_triton(device: torch.device) -> bool:
    """Return whether operations on tensors of a device run as Triton kernels instead of the torch reference.

    Args:
        device: device of the tensors.

    Returns:
        True if Triton is installed and either compiles for the device or interprets its kernels
        (TRITON_INTERPRET=1).
    """
    return ((device.type == "cuda" and compiles_for(device)) or interprets()) and is_installed()


def form(x: Tensor, package: str) -> Any:
    """Import the Triton or the plain torch implementation of a kernel package, depending on the device of a tensor.

    Args:
        x: an input of the operation. Only its device matters.
        package: name of the package, such as "areno.kernels.adam".

    Returns:
        The package's module `triton`, or its module `reference` where Triton cannot run.
    """
    return importlib.import_module(f"{package}.{'triton' if use_triton(x) else 'reference'}")


def capability(device: torch.device | str) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU.

    Args:
        device: a device of this machine.

    Returns:
        (major, minor), such as (9, 0). None for other kinds of device, and if this machine does not have the GPU.
    """
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # there is no such device, or no CUDA
        return None


def is_before_ampere(device: torch.device | str) -> bool:
    """Return whether a device is an NVIDIA GPU without bfloat16, TF32 and flash attention, such as a V100 or T4.

    Args:
        device: a device of this machine.
    """
    found = capability(device)
    return found is not None and found < AMPERE


def is_hopper(device: torch.device | str) -> bool:
    """Return whether a device is an NVIDIA GPU of compute capability 9, such as an H100 or H200.

    Args:
        device: a device of this machine.
    """
    return (capability(device) or (0, 0))[0] == 9


def default_dtype(devices: Iterable[torch.device | str]) -> torch.dtype:
    """Return the dtype that a model has if none is set.

    Args:
        devices: devices that hold the model.

    Returns:
        bfloat16 if all devices are GPUs with bfloat16, otherwise float32.
    """
    on_gpus = all(torch.device(device).type == "cuda" and not is_before_ampere(device) for device in devices)
    return torch.bfloat16 if on_gpus else torch.float32


def check_dtype(dtype: torch.dtype | str, devices: Iterable[torch.device | str]) -> None:
    """Raise ConfigError if a device does not support the dtype of a model.

    Args:
        dtype: dtype of the model, or its name.
        devices: devices that hold the model.

    Raises:
        ConfigError: the dtype is bfloat16, and a device is a GPU without bfloat16.
    """
    for device in devices:
        if str(dtype).endswith("bfloat16") and is_before_ampere(device):
            text = "is bfloat16, which {} does not have; set it to float32"
            raise ConfigError(Problem("actor.dtype", text, described(device)))


def described(device: torch.device | str) -> str:
    """Return the name of an NVIDIA GPU for a message, such as `Tesla T4 (compute capability 7.5)`.

    Args:
        device: a CUDA device of this machine.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Return whether Triton can compile kernels for a device. False for NVIDIA GPUs before Volta, such as a P100.

    Args:
        device: the device. This machine need not have it, as in tests of the compiler; the result is then True.
    """
    found = capability(device)
    return found is None or found >= VOLTA


def interprets() -> bool:
    """Return whether Triton interprets kernels on the CPU, which TRITON_INTERPRET=1 requests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
