"""The devices that a run can be planned for: their memory and their speed. Imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from areno.config.fp8 import FP8_UNITS
from areno.cost.footprint import GIB, RESERVE
from areno.cost.time import H100, Rates
from areno.errors import ConfigError, Problem, did_you_mean

_CONTEXT_BYTES = int(0.68 * 2**30)
_COPY, _PRODUCTS, _LINK = 0.88, 0.78, 0.44  # shares of the rates of a data sheet that an H100 and an H200 reach


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A kind of device."""

    name: str  # for the option `--device`
    title: str  # in texts
    memory: int  # that CUDA reports, or of the machine for a CPU
    rates: Rates  # of copies and of large matrix products in bfloat16 (float32 on a CPU)
    is_cuda: bool = True
    has_fp8_units: bool = True  # also if that is unknown

    @property
    def cuda_context_bytes(self) -> int:
        """Bytes of a device that the CUDA context takes. torch does not count them. 0 for a CPU."""
        return _CONTEXT_BYTES if self.is_cuda else 0

    @property
    def usable_bytes(self) -> int:
        """Bytes that torch can use. On a GPU, the CUDA context and the share RESERVE are left out."""
        return int((1 - RESERVE) * self.memory) - self.cuda_context_bytes if self.is_cuda else self.memory


def _gpu_from_data_sheet(
    name: str, title: str, gib: float, bytes_s: float, flops_s: float, link: float, fp8: bool = True
) -> Hardware:
    """Return a GPU from data sheet values: memory, bandwidth, dense bfloat16 FLOP/s, bandwidth of the GPU link."""
    rates = Rates(copy_bytes_s=_COPY * bytes_s, matmul_flops_s=_PRODUCTS * flops_s, link_bytes_s=_LINK * link)
    return Hardware(name=name, title=title, memory=int(gib * GIB), rates=rates, has_fp8_units=fp8)


_GPUS = (
    Hardware(name="h100-80gb", title="H100 80 GB", memory=85_017_493_504, rates=H100),
    Hardware(
        name="h200",
        title="H200",
        memory=int(139.8 * GIB),
        rates=Rates(copy_bytes_s=4.23e12, matmul_flops_s=780e12),  # measured by areno bench
    ),
    # Rates of NVIDIA's data sheets.
    _gpu_from_data_sheet("a100-40gb", "A100 40 GB", 39.4, 1.555e12, 312e12, 300e9, fp8=False),
    _gpu_from_data_sheet("a100-80gb", "A100 80 GB", 79.2, 2.039e12, 312e12, 300e9, fp8=False),
    _gpu_from_data_sheet("rtx-4090", "RTX 4090", 23.6, 1.008e12, 165e12, 32e9),
    _gpu_from_data_sheet("l40s", "L40S", 44.4, 0.864e12, 362e12, 32e9),
)


def local_cpu() -> Hardware:
    """Return the CPU of this machine. Its speed is a rough estimate from the number of cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rates = Rates(copy_bytes_s=8e9 + 2e9 * cores, matmul_flops_s=4e10 * cores)
    return Hardware(name="cpu", title=f"CPU with {cores} cores", memory=memory, rates=rates, is_cuda=False)


def hardware_names() -> list[str]:
    return [*(gpu.name for gpu in _GPUS), "cpu"]


def hardware_of(name: str) -> Hardware:
    """Return a device by its name or by a prefix that no other name has, such as "h100"."""
    called = name.lower()
    if called == "cpu":
        return local_cpu()
    found = [gpu for gpu in _GPUS if gpu.name.startswith(called)]
    if not called or len(found) != 1:
        text = f"is {name!r}{did_you_mean(called, hardware_names())}; expected one of {', '.join(hardware_names())}"
        raise ConfigError(Problem("--device", text))
    return found[0]


def local_devices() -> list[Hardware]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, as `nvidia-smi` lists them. Without a GPU, return the CPU."""
    command = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return [local_cpu()]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer has no GPU to offer either
        return [local_cpu()]
    gpus = [[part.strip() for part in line.split(",")] for line in listed if line.count(",") == 3]
    found = [
        gpu_by_name(name, int(0.9945 * float(mib) * 2**20), _version(capability))
        for _, name, mib, capability in _visible_gpus(gpus)
    ]
    return found or [local_cpu()]


def _visible_gpus(gpus: list[list[str]]) -> list[list[str]]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES makes visible. The first value of each is its UUID."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    found: list[list[str]] = []
    for each in (part.strip() for part in wanted.split(",")):
        named = [gpu for index, gpu in enumerate(gpus) if each == str(index) or (each and gpu[0].startswith(each))]
        if len(named) != 1:
            break  # CUDA ignores an unknown device and all devices after it
        found += named
    return found


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())


def gpu_by_name(title: str, memory: int, capability: tuple[int, ...] = ()) -> Hardware:
    """Return a GPU by the name that its driver reports, such as "NVIDIA H100 80GB HBM3".

    An unknown GPU gets the rates of the known GPU whose memory size is nearest. `capability`: () if it is unknown.
    """
    words = title.upper().replace("-", " ").split()
    alike = [gpu for gpu in _GPUS if gpu.title.split()[0] in words or gpu.title.upper() in title.upper()] or [*_GPUS]
    nearest = min(alike, key=lambda gpu: abs(gpu.memory - memory))
    units = not capability or capability >= FP8_UNITS
    return Hardware(name=nearest.name, title=title, memory=memory, rates=nearest.rates, has_fp8_units=units)
