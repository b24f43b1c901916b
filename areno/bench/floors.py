"""The least time that a piece of work can take on a device: what must be moved and multiplied, at measured rates.

Rollout: a decode step moves the weights once, and the keys and values of every live sequence once ("ordinary" floor);
where the samples of a prompt read its part together, that part moves once for each prompt ("shared" floor). Of experts,
those move that the tokens go through, if these choose evenly. A recurrent state is read and written in each step, and
written once behind a prompt for each of its samples. A prompt is prefilled once. Training: 6 FLOPs for each
parameter and token, plus causal attention; nothing is computed twice.
A table that is only looked up into (an input embedding that is not the head as well) is neither moved nor multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from areno.bench.work import Work
from areno.models.cost.arithmetic import Cost, forward_flops, mean_pairs, train_flops


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device was measured to do: bytes per second (read plus written) of a copy, FLOPs per second of matmul."""

    copy_bytes_s: float
    matmul_flops_s: float

    def of(self, n_devices: int) -> Rates:
        """Of several such devices together."""
        return Rates(copy_bytes_s=n_devices * self.copy_bytes_s, matmul_flops_s=n_devices * self.matmul_flops_s)

    def seconds(self, n_bytes: float, flops: float) -> float:
        """Moving and multiplying may overlap."""
        return max(n_bytes / self.copy_bytes_s, flops / self.matmul_flops_s)


def decode_s(cost: Cost, work: Work, rates: Rates, *, shared: bool, copies: int = 1) -> float:
    """Seconds of all decode steps, all samples running at once.

    The first token of a sample comes from the prefill. Step j = 1, 2, .. gives each sample with more than j new tokens
    its next one; it reads the prompt and j tokens. copies: of the model, each with its share of the samples.
    """
    prompt_P, new_P = np.array(work.prompt_lens, np.float64), np.array(work.new_lens, np.float64)
    n_samples = work.n_samples
    total = 0.0
    for j in range(1, max(work.new_lens)):
        prompt_L = prompt_P[new_P > j]
        seen_L = _seen(cost, prompt_L + j)
        seen = n_samples * float(seen_L.sum())
        moved = float((seen_L + (n_samples - 1) * _seen(cost, j)).sum()) if shared else seen
        n_rows = n_samples * len(prompt_L)
        flops = (2.0 * cost.active_params + cost.rule_flops) * n_rows + cost.attn_flops * seen
        weights = copies * cost.moved_params(n_rows / copies) * cost.itemsize
        total += rates.seconds(weights + cost.kv_bytes * moved + 2 * cost.state_bytes * n_rows, flops)
    return total


def _seen(cost: Cost, lengths: np.ndarray | int) -> np.ndarray:
    """How many of its last tokens a query sees in rows of these lengths, as the mean over layers."""
    return sum((share * np.minimum(lengths, window or np.inf) for window, share in cost.windows), np.zeros(()))


def prefill_s(cost: Cost, work: Work, rates: Rates, copies: int = 1) -> float:
    """Seconds of computing every prompt once; the head only for its last token. copies: as of `decode_s`."""
    n_tokens = sum(work.prompt_lens)
    flops = 2.0 * cost.body_params * n_tokens + 2.0 * cost.head_params * len(work.prompt_lens)
    flops += cost.attn_flops * mean_pairs(cost, work.prompt_lens) + cost.rule_flops * n_tokens
    weights = copies * cost.moved_params(n_tokens / copies) * cost.itemsize
    return rates.seconds(weights + cost.kv_bytes * n_tokens + cost.state_bytes * work.n_rows, flops)


def floors(cost: Cost, work: Work, rates: Rates, kind: str, copies: int = 1) -> dict[str, float]:
    """Seconds, and tokens per second, for one kind of work: rollout, train, step or logprob.

    rates: of all devices together. copies: of the model on them.
    """
    out: dict[str, float] = {}
    if kind in ("rollout", "step"):
        out["prefill_s"] = prefill_s(cost, work, rates, copies)
        for name in ("ordinary", "shared"):
            out[f"decode_{name}_s"] = decode_s(cost, work, rates, shared=name == "shared", copies=copies)
            out[f"rollout_{name}_s"] = out["prefill_s"] + out[f"decode_{name}_s"]
            out[f"rollout_{name}_tok_s"] = work.n_new / out[f"rollout_{name}_s"]
    n_tokens = sum(work.row_lens)
    if kind in ("train", "step"):
        out["train_flops"] = train_flops(cost, work.row_lens)
        out["train_needed_flops"] = train_flops(cost, work.row_lens, head_tokens=work.n_new)
        out["train_s"] = out["train_flops"] / rates.matmul_flops_s
        out["train_tok_s"] = n_tokens / out["train_s"]
    if kind == "logprob":
        out["logprob_flops"] = forward_flops(cost, work.row_lens)
        out["logprob_s"] = out["logprob_flops"] / rates.matmul_flops_s
        out["logprob_tok_s"] = n_tokens / out["logprob_s"]
    if kind == "step":
        out["step_s"] = out["rollout_ordinary_s"] + out["train_s"]
    return out
