"""Measure the speed of a device, and compute the least time that a batch of work can take on it (the floor).

The floors count the bytes to move and the FLOPs to compute, at measured rates:

- Decoding. Each step reads the weights once, and the keys and values of every running sequence once ("ordinary" floor).
  If the samples of a prompt read its keys and values together, these are read once for each prompt ("shared" floor).
  Only experts that some token uses are read, assuming a uniform choice. A recurrent state is read and written in each
  step, and written once for each sample after its prompt. Adapters are read and computed beside the weights.
- Prefill. Each prompt is computed once.
- Training. 6 FLOPs for each parameter and token, plus causal attention. Nothing is recomputed.

A table that is only looked up (an input embedding that is not shared with the LM head) counts neither bytes nor
FLOPs.
"""

from __future__ import annotations

import threading
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from areno.bench.work import Workload
from areno.cost.flops import TokenCost, forward_flops, mean_attention_pairs, train_flops
from areno.cost.time import Rates


def min_decode_s(cost: TokenCost, work: Workload, rates: Rates, *, shared: bool, copies: int = 1) -> float:
    """Return the least seconds of all decoding steps, if all samples run at once.

    The first token of a sample comes from the prefill. Step j = 1, 2, ... samples the next token for each sample with
    more than j new tokens, and attends to the prompt and j tokens. `rates` are those of all devices together, and
    `copies` is the number of copies of the model. With `shared`, the samples of a prompt read its keys and values
    together.
    """
    prompt_P, new_P = np.array(work.prompt_lens, np.float64), np.array(work.new_lens, np.float64)
    n_samples = work.n_samples
    total = 0.0
    for j in range(1, max(work.new_lens)):
        prompt_L = prompt_P[new_P > j]
        seen_L = _mean_keys_attended(cost, prompt_L + j)
        seen = n_samples * float(seen_L.sum())
        moved = float((seen_L + (n_samples - 1) * _mean_keys_attended(cost, j)).sum()) if shared else seen
        n_rows = n_samples * len(prompt_L)
        products = 2.0 * (cost.active_params + cost.active_adapter_params)
        flops = (products + cost.rule_flops) * n_rows + cost.attn_flops * seen
        weights = copies * cost.params_read(n_rows / copies) * cost.itemsize
        total += rates.min_seconds(weights + cost.kv_bytes * moved + 2 * cost.state_bytes * n_rows, flops)
    return total


def _mean_keys_attended(cost: TokenCost, lengths: np.ndarray | int) -> np.ndarray:
    """Return the number of keys that the last token of each row attends to, averaged over the attention layers."""
    return sum((share * np.minimum(lengths, window or np.inf) for window, share in cost.windows), np.zeros(()))


def min_prefill_s(cost: TokenCost, work: Workload, rates: Rates, copies: int = 1) -> float:
    """Return the least seconds to compute every prompt once, with the LM head only for its last token."""
    n_tokens = sum(work.prompt_lens)
    flops = 2.0 * (cost.body_params + cost.active_adapter_params) * n_tokens
    flops += 2.0 * cost.head_params * len(work.prompt_lens)
    flops += cost.attn_flops * mean_attention_pairs(cost, work.prompt_lens) + cost.rule_flops * n_tokens
    weights = copies * cost.params_read(n_tokens / copies) * cost.itemsize
    return rates.min_seconds(weights + cost.kv_bytes * n_tokens + cost.state_bytes * work.n_rows, flops)


def phase_floors(cost: TokenCost, work: Workload, rates: Rates, kind: str, copies: int = 1) -> dict[str, float]:
    """Return the least seconds, the FLOPs and the most tokens per second of each phase in one kind of work.

    With `_shared` in the name, the samples of a prompt read its keys and values together. With `_ordinary`, each sample
    reads them for itself. `train_needed_flops` counts the LM head only for sampled tokens.
    """
    out: dict[str, float] = {}
    if kind in ("rollout", "step"):
        out["prefill_s"] = min_prefill_s(cost, work, rates, copies)
        for name in ("ordinary", "shared"):
            out[f"decode_{name}_s"] = min_decode_s(cost, work, rates, shared=name == "shared", copies=copies)
            out[f"rollout_{name}_s"] = out["prefill_s"] + out[f"decode_{name}_s"]
            out[f"rollout_{name}_tok_s"] = work.n_new_tokens / out[f"rollout_{name}_s"]
    n_tokens = sum(work.row_lens)
    if kind in ("train", "step"):
        out["train_flops"] = train_flops(cost, work.row_lens)
        out["train_needed_flops"] = train_flops(cost, work.row_lens, head_tokens=work.n_new_tokens)
        out["train_s"] = out["train_flops"] / rates.matmul_flops_s
        out["train_tok_s"] = n_tokens / out["train_s"]
    if kind == "logprob":
        out["logprob_flops"] = forward_flops(cost, work.row_lens)
        out["logprob_s"] = out["logprob_flops"] / rates.matmul_flops_s
        out["logprob_tok_s"] = n_tokens / out["logprob_s"]
    if kind == "step":
        out["step_s"] = out["rollout_ordinary_s"] + out["train_s"]
    return out


_GIB = 2**30


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def measured_rates(device: str, dtype: torch.dtype) -> Rates:
    """Measure the best speed of several matmuls, and of several copies of a buffer larger than any cache."""
    cuda = device.startswith("cuda")
    times, size = (20, 8192) if cuda else (2, 512)  # in bfloat16, some CPUs need a second for a size of 1024
    source = torch.zeros(_GIB if cuda else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device, times)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    matmul_s = _best_s(lambda: torch.mm(left, right, out=out), device, times)
    copied = 2.0 * source.numel()  # read and written
    rates = Rates(copy_bytes_s=copied / copy_s, matmul_flops_s=2.0 * size**3 / matmul_s)
    if cuda:
        del source, target, left, right, out
        torch.cuda.empty_cache()
    return rates


def _best_s(body: Callable[[], object], device: str, times: int) -> float:
    """Return the seconds of one call of `body`, averaged over the fastest of five rounds after a warm-up."""

    def one_round() -> None:
        for _ in range(times):
            body()
        synchronize(device)

    one_round()
    return min(timeit.repeat(one_round, number=1, repeat=5)) / times


@contextmanager
def memory_watched(device: str, *, on: bool) -> Iterator[dict[str, float]]:
    """Measure the peak memory of a device during this `with` block, by polling in a thread.

    Yields a dictionary that gets the key `peak_device_gib`. For a CPU, it stays empty. The peak includes all processes
    and the memory that allocators keep. `on` must be False if this process may capture CUDA graphs in the block.
    """
    peak: dict[str, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            free, total = torch.cuda.mem_get_info(device)
            peak["peak_device_gib"] = max(peak.get("peak_device_gib", 0.0), (total - free) / _GIB)
            done.wait(0.05)

    thread = threading.Thread(target=watch, daemon=True, name="areno-memory-watch")
    if on and device.startswith("cuda"):
        thread.start()
    try:
        yield peak
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
