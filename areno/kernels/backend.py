"""The choice between Triton kernels and the torch reference for a device, and what the GPU's hardware supports."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from areno.config.fp8 import FP8_UNITS, no_units_problem
from areno.errors import ConfigError, Problem

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

AMPERE = (8, 0)  # the first compute capability with bfloat16, TF32 and flash attention
VOLTA = (7, 0)  # the first compute capability that Triton compiles for


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy without making the host wait for a GPU. On a CPU, the tensor shares the memory of the array."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor that is copied to the host. `ready` marks the end of a copy from a GPU."""

    tensor: Tensor
    ready: torch.cuda.Event | None = None

    def result(self) -> np.ndarray:
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensor.numpy()


def to_host(x: Tensor) -> HostCopy:
    """Start copying to the host. On a CPU, the result shares the memory of the tensor."""
    if x.device.type != "cuda":
        return HostCopy(x)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return HostCopy(host, ready)


def can_use_triton(x: Tensor) -> bool:
    return supports_triton(x.device)


def supports_triton(device: torch.device) -> bool:
    return ((device.type == "cuda" and can_compile_triton(device)) or is_triton_interpreted()) and is_triton_installed()


def kernel_module_for(x: Tensor, package: str) -> Any:
    """Import the module `triton` of a kernel package, or its module `reference` if Triton cannot run on x's device."""
    return importlib.import_module(f"{package}.{'triton' if can_use_triton(x) else 'reference'}")


def dispatch_by_device(reference: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return a function that chooses between `reference` and a Triton kernel by the device of its first tensor.

    The Triton kernel has the same name and arguments. It is in the module `triton` if `reference` is in `reference.py`,
    and in `triton_x` if `reference` is in another module `x`.
    """
    module, name = reference.__module__, reference.__name__
    package, _, own = module.rpartition(".")
    kernels = f"{package}.triton" if own == "reference" else f"{package}.triton_{own}"

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        x = next(each for each in args if isinstance(each, Tensor))
        return vars(importlib.import_module(kernels if can_use_triton(x) else module))[name](*args, **kwargs)

    return call


def compute_capability(device: torch.device | str) -> tuple[int, int] | None:
    """Return (major, minor) of a GPU. None for other devices, and if this machine does not have the GPU."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # there is no such device, or no CUDA
        return None


def is_before_ampere(device: torch.device | str) -> bool:
    """Return whether a device is an NVIDIA GPU without bfloat16, TF32 and flash attention, such as a V100 or T4."""
    found = compute_capability(device)
    return found is not None and found < AMPERE


def is_hopper(device: torch.device | str) -> bool:
    return (compute_capability(device) or (0, 0))[0] == 9


def default_dtype(devices: Iterable[torch.device | str]) -> torch.dtype:
    """Return the dtype of a model if none is set: bfloat16 if all devices are GPUs with bfloat16, otherwise float32."""
    on_gpus = all(torch.device(device).type == "cuda" and not is_before_ampere(device) for device in devices)
    return torch.bfloat16 if on_gpus else torch.float32


def check_dtype(dtype: torch.dtype | str, devices: Iterable[torch.device | str]) -> None:
    """Raise ConfigError if the dtype is bfloat16 and a device is a GPU without it."""
    for device in devices:
        if str(dtype).endswith("bfloat16") and is_before_ampere(device):
            text = "is bfloat16, which {} does not have; set it to float32"
            raise ConfigError(Problem("actor.dtype", text, gpu_description(device)))


def has_fp8_units(device: torch.device | str) -> bool:
    found = compute_capability(device)
    return found is not None and found >= FP8_UNITS


def check_fp8(devices: Iterable[torch.device | str], key: str = "actor.fp8_config") -> None:
    """Raise ConfigError about the setting `key` if a device is a GPU without FP8 units."""
    for device in devices:
        if compute_capability(device) is not None and not has_fp8_units(device):
            raise ConfigError(no_units_problem(key, gpu_description(device)))


def gpu_description(device: torch.device | str) -> str:
    """Return the name of a GPU for a message, such as `Tesla T4 (compute capability 7.5)`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


@functools.cache
def can_compile_triton(device: torch.device) -> bool:
    """Return whether Triton compiles for a device. False for GPUs before Volta, True for a GPU that is missing."""
    found = compute_capability(device)
    return found is None or found >= VOLTA


def is_triton_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
