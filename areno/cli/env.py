"""The command `areno env`, which prints versions, extras, devices and kernels for bug reports and scripts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints the versions of areno and the packages that it uses, the extras that are installed, the devices, and "
        "which kernels run on them. Put it into a bug report."
    )
    parser.add_argument("--json", action="store_true", help="print the output as JSON")


def run(arguments: argparse.Namespace) -> int:
    found = collect_environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, value in _labelled_values(found):
        print(f"{name:<16}{value}")
    return 0


def collect_environment() -> dict[str, Any]:
    import torch

    from areno.kernels.attention import BACKENDS, choose_backend
    from areno.kernels.backend import default_dtype
    from areno.tracking.run_folder import versions

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "versions": {**versions(), "cuda": torch.version.cuda},
        "extras": {
            name: {"installed": not missing, "missing": missing} for name, missing in missing_requirements().items()
        },
        "cpu": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "devices": [
            _device_record(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())
        ],
        "kernels": {
            "attention": BACKENDS[choose_backend("auto", device, default_dtype([device]))],
            "flash_attn": find_spec("flash_attn") is not None,
            "triton": find_spec("triton") is not None,
        },
    }


def missing_requirements() -> dict[str, list[str]]:
    """Return {extra of areno: its requirements that are not installed}. Empty if areno itself is not installed."""
    try:
        declared = metadata.metadata("areno").get_all("Provides-Extra") or []
        needed = {extra: installed_versions(extra) for extra in declared}
    except metadata.PackageNotFoundError:
        return {}
    return {extra: [text for text, found in packages.items() if not found] for extra, packages in needed.items()}


def installed_versions(extra: str = "") -> dict[str, str]:
    """Return {requirement of an extra or of areno itself: installed version}. "" for one that is not satisfied."""
    from packaging.requirements import Requirement

    found = {}
    for one in map(Requirement, metadata.requires("areno") or []):
        if one.marker.evaluate({"extra": extra}) if one.marker else not extra:
            version = _version(one.name)
            found[str(one).partition(";")[0].strip()] = version if version and version in one.specifier else ""
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _device_record(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / _GIB, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _labelled_values(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, value or "-") for name, value in found["versions"].items())
    for name, extra in found["extras"].items():
        lacking = f"not installed: {', '.join(extra['missing'])} (pip install 'areno[{name}]')"
        yield f"extra {name}", "installed" if extra["installed"] else lacking
    yield "cpu", f"{found['cpu']['cores']} cores, {found['cpu']['torch_threads']} threads of torch"
    for number, device in enumerate(found["devices"]):
        about = f"{device['memory_gib']} GiB, compute capability {device['compute_capability']}"
        yield f"cuda:{number}", f"{device['name']}, {about}"
    if not found["devices"]:
        yield "gpu", "none that torch can use"
    kernels = found["kernels"]
    yield "attention", kernels["attention"]
    for name in ("triton", "flash_attn"):
        yield name, "installed" if kernels[name] else "not installed"
