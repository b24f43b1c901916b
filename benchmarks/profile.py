"""Profile a phase on a CUDA device.

`trace` records the kernels that a function runs. `phase_table` shows the time per group of kernels, the longest
kernels, and how long the device was idle. Only device activity is traced, no Python or torch operators, so the host is
slowed down little. A kernel's group is found by its name: areno's own kernels by the folder of their source, others by
the names that CUDA, cuBLAS, cuDNN and torch give them.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from areno import kernels

# Folders of areno/kernels -> group of their kernels.
OWN_FOLDERS = {
    "paged": "attention",
    "fixed_order": "attention",
    "copies": "attention",
    "delta": "recurrent state",
    "symmetric_memory": "between GPUs",
    "matmul": "gemm",
    "fp8": "gemm",
    "experts": "gemm",
    "adapters": "gemm",
    "elementwise": "norm/rope/activation",
    "logprobs": "head",
    "sampling": "sampling",
    "adam": "optimizer",
    "digests": "optimizer",
}
# (group, pattern). The first pattern that matches the lower-case name decides.
_GROUPS: tuple[tuple[str, str], ...] = (
    ("between GPUs", r"nccl|symm_mem|one_shot|two_shot"),
    ("copies", r"memcpy|memset|copy_kernel|copy_device|direct_copy|catarray"),
    ("attention", r"attention|attn|flash|fmha|sdpa|varlen"),
    ("recurrent state", r"delta|trsm|trisolve"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("sampling", r"sampl|gumbel|multinomial|topk|radix|bitonic|philox|argmax|distribution|sort"),
    ("head", r"logprob|log_softmax|logsumexp|cross_entropy|softmax"),
    ("gemm", r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|matmul|splitk"),
    ("norm/rope/activation", r"rms|norm|rope|rotary|silu|swiglu"),
    ("norm/rope/activation", r"triton_(poi|red|per)_"),  # by torch.compile, which compiles the small operations
    ("embedding/index", r"embed|index|gather|scatter"),
    ("small torch kernels", r"at::native|elementwise|reduce_kernel|vectorized"),
)
_MAX_LISTED = 40  # kernels that are listed one by one
GROUPS = (*dict.fromkeys(name for name, _ in _GROUPS), "other")


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """The time interval of one kernel, copy or fill on the device."""

    name: str
    start: int  # nanoseconds
    end: int


def kernel_group(name: str) -> str:
    """Return the group of a kernel in the table, such as "attention" or "gemm"."""
    if name in _own_kernels():
        return _own_kernels()[name]
    lower = name.lower()
    return next((group for group, pattern in _GROUPS if re.search(pattern, lower)), "other")


@functools.cache
def _own_kernels() -> dict[str, str]:
    """Return kernel of areno -> group, read from source files, which a machine without Triton cannot import."""
    folder = Path(kernels.__file__ or "").parent
    return {
        kernel: group
        for name, group in OWN_FOLDERS.items()
        for form in ("triton", "gluon")
        for file in (folder / name).rglob(f"{form}*.py")
        for kernel in re.findall(r"^ *def (\w+)\(", file.read_text(encoding="utf-8"), re.M)
    }


def busy_s(spans: Iterable[KernelSpan]) -> float:
    """Return the seconds in which at least one kernel ran. Kernels of several streams may overlap."""
    busy, reached = 0, 0
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return busy / 1e9


def trace(body: Callable[[], object]) -> list[KernelSpan]:
    """Run a function, and record all activity on this process's CUDA device.

    The raw events are used, since torch's own summary takes minutes for the hundred thousands of kernels in a rollout.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    raw: Any = profiler.profiler
    return [
        KernelSpan(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in raw.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0 and not event.is_user_annotation()
    ]


def phase_table(phase: str, spans: Sequence[KernelSpan], wall_s: float) -> str:
    """Format the profile of a phase that takes `wall_s` without the profiler."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for span in spans:
        seconds[span.name] += (span.end - span.start) / 1e9
        counts[span.name] += 1
    busy, total = busy_s(spans), sum(seconds.values()) or 1e-12
    lines = [
        f"== {phase}: {wall_s:.4f} s, device busy {busy:.4f} s, idle {100 * idle_share(busy, wall_s):.1f} %, "
        f"{len(spans)} kernels",
        f"{'group':24}{'seconds':>10}{'share %':>9}{'calls':>9}{'us each':>10}",
    ]
    for group in GROUPS:
        names = [name for name in seconds if kernel_group(name) == group]
        if names:
            lines.append(
                _table_line(group.ljust(24), sum(seconds[n] for n in names), total, sum(counts[n] for n in names))
            )
    lines.append(f"-- the longest {min(_MAX_LISTED, len(seconds))} kernels, with their group")
    for name in sorted(seconds, key=lambda name: -seconds[name])[:_MAX_LISTED]:
        lines.append(
            _table_line(" " * 24, seconds[name], total, counts[name]) + f"  [{kernel_group(name)}] {name[:160]}"
        )
    return "\n".join(lines) + "\n"


def idle_share(busy: float, wall_s: float) -> float:
    """Return the share of a phase in which the device was idle. 0 if the profiler's overhead exceeds it."""
    return max(0.0, 1 - busy / wall_s)


def _table_line(head: str, seconds: float, total: float, calls: int) -> str:
    return f"{head}{seconds:10.5f}{100 * seconds / total:9.2f}{calls:9d}{1e6 * seconds / calls:10.2f}"
