"""How device memory is taken, and what to say when it runs out: which settings lower what was needed.

Which changes of settings help when memory has run out: the best first, and none that has been made already.

Each function yields options for `out_of_memory_hint`. This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from areno.config.models import MicroBatchSpec
from areno.config.run import DecoderConfig
from areno.engine.spec import EngineSpec, RoleSpec
from areno.errors import EngineError, Key

# Not every allocation is torch's own: CUDA graphs, cuBLAS and the CPU's allocator have their own words.
_WORDS = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")


def use_expandable_segments() -> None:
    """Let CUDA memory that was freed serve tensors of any size, also where it lies between others in use.

    Otherwise what training leaves in pieces is lost to the KV cache, and the other way round. A choice of the user in
    PYTORCH_CUDA_ALLOC_CONF stands.
    """
    import torch  # here, since processes that never use it know this module

    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def device_bytes(device: Any, n_sharing: int) -> int:
    """Memory that a worker may take: free on its CUDA device, or its share of all there is for a number on one CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // n_sharing


def host_bytes_free() -> int:
    """Memory of this machine that is available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that an allocation failed."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error).partition("\n")[0] for word in _WORDS)


@contextmanager
def out_of_memory_hint(when: str, advice: Callable[[], Iterable[tuple[Any, ...]]], *args: Any) -> Iterator[None]:
    """Turn an out-of-memory error of the body into an EngineError that names the settings to change.

    when: what the memory was for, a text with a {} for each of `args`: Keys, values, and functions that give a value
    once the memory has run out. advice: gives the changes that would help then; see `areno/engine/memory.py`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EngineError) or not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        said = ". ".join(said.split(". ")[:2])  # how much was asked for; the rest helps few
        said = said.replace("{", "{{").replace("}", "}}")
        options = list(advice())
        values = [arg() if callable(arg) else arg for arg in args] + [arg for _, *args in options for arg in args]
        raise EngineError(
            f"out of device memory {when} ({said}): {_either([o[0] for o in options])}", *values
        ) from error


def _either(texts: Sequence[str]) -> str:
    """Join texts as `a, b or c`."""
    return " or ".join([", ".join(texts[:-1])] * (len(texts) > 1) + [*texts[-1:]])


Option = tuple[Any, ...]
"""A change that lowers the memory needed: a text with a {} for each Key or value that follows it."""

MORE_DEVICES: Option = ("divide the model over more devices ({})", Key("engine.tp_size"))

RESTING = ("ref", "reward", "critic")
"""Sections of models that may rest in host memory while they are not used."""


def in_loading(
    spec: EngineSpec, role: RoleSpec, others: Iterable[RoleSpec], *, has_bf16: bool, can_offload: bool
) -> Iterator[Option]:
    """Yield what helps to load the model of a role beside others.

    has_bf16: the device computes in bfloat16. can_offload: it has memory of its own, beside that of the host.
    """
    if spec.layout.dp_size > 1:
        yield ("raise {} to divide the model over more devices", Key("engine.tp_size"))
    else:
        yield ("divide the model over more devices with {} and {}", Key("engine.world_size"), Key("engine.tp_size"))
    if spec.dtype == "float32" and has_bf16:
        yield ("set {}=bfloat16", Key("actor.dtype"))
    if can_offload:
        for each in (role, *others):
            section = each.key.removesuffix(".path")
            if section in RESTING and not each.offload:
                yield ("set {}=true", Key(f"{section}.offload"))
    yield from _smaller_optimizer(role)
    if role.key == spec.actor.key and may_have_adapters(spec):
        yield ("train adapters alone with {}=true", Key("actor.use_lora"))
    yield ("choose a smaller model ({})", Key(role.key))


def training_hint(
    section: str,
    mb_spec: MicroBatchSpec,
    fitting: Callable[[], str],
    beside: Callable[[], Iterable[Option]],
    *,
    recomputes: bool,
    in_adam: bool,
) -> AbstractContextManager[None]:
    """Return the `out_of_memory_hint` of forward and backward passes.

    fitting: says which micro-batches would fit. beside: gives what lowers the memory of the KV cache; see `in_training`
    for the rest.
    """
    return out_of_memory_hint(
        "in training, with {}={} and mini_bs={}{}",
        lambda: in_training(section, mb_spec, recomputes=recomputes, beside=beside(), in_adam=in_adam),
        Key(f"{section}.mb_spec.max_tokens_per_mb"),
        mb_spec.max_tokens_per_mb,
        mb_spec.mini_bs,
        fitting,
    )


def in_training(
    section: str, mb_spec: MicroBatchSpec, *, recomputes: bool, beside: Iterable[Option], in_adam: bool
) -> Iterator[Option]:
    """Yield what helps forward and backward passes of micro-batches.

    section: of the settings of the model. recomputes: activations are computed again in the backward pass. beside: what
    lowers the memory of the KV cache. in_adam: the moments are in float32.
    """
    if mb_spec.max_tokens_per_mb is not None:
        yield ("lower {}", Key(f"{section}.mb_spec.max_tokens_per_mb"))
    elif mb_spec.mini_bs > 1:
        yield ("lower {}", Key(f"{section}.mb_spec.mini_bs"))
    if not recomputes:
        yield ("set {}=true", Key(f"{section}.gradient_checkpointing"))
    yield from beside
    if in_adam:
        yield ("set {}=adam_8bit", Key(f"{section}.optimizer.type"))
    yield MORE_DEVICES


def in_rollout(decoder: DecoderConfig, *, on_cuda: bool) -> Iterator[Option]:
    """Yield what leaves more memory beside the KV cache."""
    yield from smaller_cache(decoder)
    yield ("lower {}", Key("rollout.max_prefill_tokens"))
    yield FEWER_AT_ONCE
    if on_cuda and not decoder.eager_decode:
        yield ("set {}=true to do without CUDA graphs", Key("rollout.eager_decode"))


def beside_training(decoder: DecoderConfig) -> Iterator[Option]:
    """Yield what leaves more memory to training than the KV cache does."""
    yield ("free the KV cache between rollouts with {}=true", Key("rollout.drop_rollout_state"))
    yield from smaller_cache(decoder)


def smaller_cache(decoder: DecoderConfig) -> Iterator[Option]:
    """Yield what makes the KV cache smaller. A given number of tokens overrides the fraction of the memory."""
    if decoder.max_kv_tokens is None:
        yield ("lower {}", Key("rollout.mem_fraction"))
        yield ("set {}", Key("rollout.max_kv_tokens"))
    else:
        yield ("lower {}", Key("rollout.max_kv_tokens"))


FEWER_AT_ONCE: Option = ("lower {}", Key("rollout.max_concurrent_rollouts"))


def may_have_adapters(spec: EngineSpec, within: str = "") -> bool:
    """Return whether the actor is trained as a whole and could have adapters. Random weights cannot.

    within: the kind of model that the actor is a part of, which cannot either; "" is none.
    """
    actor = spec.actor
    return actor.optimizer is not None and actor.lora is None and not actor.random_init and not within


def _smaller_optimizer(role: RoleSpec) -> Iterator[Option]:
    if role.optimizer is not None and role.optimizer.type == "adam":
        yield ("set {}=adam_8bit", Key(f"{role.section}.optimizer.type"))
