"""Which form of an operation runs: Triton kernels or plain torch, and what a GPU can do by its compute capability."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from areno.errors import ConfigError, Problem

AMPERE = (8, 0)  # the first with bfloat16 and TF32, and the first that flash attention has kernels for
VOLTA = (7, 0)  # the first that Triton compiles for


def use_triton(x: Tensor) -> bool:
    """Whether operations on x run as Triton kernels: on CUDA, or anywhere with TRITON_INTERPRET=1, if it is installed.

    Every operation in `areno.kernels` asks here. Where the answer is no, its torch reference runs.
    """
    return runs_triton(x.device)


def runs_triton(device: torch.device) -> bool:
    """Return whether operations on tensors of a device run as Triton kernels. See `use_triton`."""
    return ((device.type == "cuda" and _compiles_for(device)) or _interprets()) and _is_installed()


def form(x: Tensor, package: str) -> Any:
    """The module of a package of `areno.kernels` whose functions run on x: `triton` or `reference`."""
    return importlib.import_module(f"{package}.{'triton' if use_triton(x) else 'reference'}")


def capability(device: torch.device | str) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU. None for other devices, and for GPUs of other machines."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):  # there is no such device, or no CUDA
        return None


def is_before_ampere(device: torch.device | str) -> bool:
    """Return whether a device is a GPU without bfloat16, TF32 and flash attention, such as a T4 (7.5) or V100 (7.0)."""
    found = capability(device)
    return found is not None and found < AMPERE


def default_dtype(devices: Iterable[torch.device | str]) -> torch.dtype:
    """Return the dtype of models on these devices: bfloat16 if all are GPUs that have it, else float32."""
    on_gpus = all(torch.device(device).type == "cuda" and not is_before_ampere(device) for device in devices)
    return torch.bfloat16 if on_gpus else torch.float32


def check_dtype(dtype: torch.dtype | str, devices: Iterable[torch.device | str]) -> None:
    """Raise ConfigError naming actor.dtype if one of these devices is a GPU without bfloat16 and dtype is that."""
    for device in devices:
        if str(dtype).endswith("bfloat16") and is_before_ampere(device):
            text = "is bfloat16, which {} does not have; set it to float32"
            raise ConfigError(Problem("actor.dtype", text, described(device)))


def described(device: torch.device | str) -> str:
    """Return the name of an NVIDIA GPU and its compute capability: `Tesla T4 (compute capability 7.5)`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    found = capability(device)
    return found is None or found >= VOLTA


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
