"""Measure the host time of a decoding step: planning it, and reading its tokens, with a device that takes no time.

`run_host` decodes batches of several sizes whose rows all go on. The forward pass is replaced by a function that
returns the same tokens at once, so what is left is the scheduler, the division of attention, the inputs of the step and
the acceptance of its tokens. These run on one CPU core, whatever the device. The time per row limits large batches.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.config.rollout import DecoderConfig
from areno.engine.decoder.decoder import Decoder
from areno.engine.decoder.grammar import Vocabulary
from areno.models.registry import build_model, load_config
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.specs.rollout import RolloutSpec
from areno.types import GenerationRequest, SamplingParams

ROWS = (64, 256, 1024, 4096)
_BLOCK_SIZE, _SAMPLES, _PROMPT_LEN = 32, 8, 40
_WARM_UP, _STEPS = 6, 60
_N_MULTIPROCESSORS = 132  # of an H100, for which the division of attention is planned


def run_host(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Return the median microseconds of a decoding step for each number of ROWS, in process CPU time.

    `us_per_row` is the growth from the smallest to the largest batch, for each row more.
    """
    medians = [_median_us(settings, folder, n_rows) for n_rows in ROWS]
    growth = (medians[-1] - medians[0]) / (ROWS[-1] - ROWS[0])
    return {"rows": list(ROWS), "step_us": medians, "us_per_row": growth}


def _median_us(settings: Settings, folder: str, n_rows: int) -> float:
    log_progress(f"host: {n_rows} rows")
    decoder = _decoder_without_device(folder, n_rows)
    times: list[float] = []
    for repeat in range(settings.repeats):
        decoder.clear()
        decoder.reset_cache()
        for request in range(n_rows // _SAMPLES):
            prompt = [1 + (request + position) % 8 for position in range(_PROMPT_LEN + request % _BLOCK_SIZE)]
            params = SamplingParams(max_new_tokens=_WARM_UP + _STEPS + 1, ignore_eos=True)
            decoder.submit(
                GenerationRequest(request_id=request, prompt=prompt, n_samples=_SAMPLES, seed=repeat, params=params)
            )
        for number in range(_WARM_UP + _STEPS):
            began = time.process_time()
            ended = decoder.step()
            assert not ended, "a row has ended"
            if number >= _WARM_UP:
                times.append(1e6 * (time.process_time() - began))
    return statistics.median(times)


def _decoder_without_device(folder: str, n_rows: int) -> Decoder:
    """Return a decoder on the CPU that plans for a GPU, and whose forward passes return token 2 for each row."""
    config = load_config(folder)
    model = build_model(config, dtype=torch.float32, device="cpu")
    max_len = _PROMPT_LEN + 2 * _BLOCK_SIZE + _WARM_UP + _STEPS
    decoder = Decoder(
        model,
        Vocabulary(folder, config, (), texts=()),
        EngineSpec(actor=RoleSpec(path=folder), devices=["cpu"]),
        RolloutSpec(max_running=n_rows, max_len=max_len, decoder=DecoderConfig(max_prefill_tokens=n_rows * max_len)),
        n_blocks=n_rows * (2 + -(-max_len // _BLOCK_SIZE)),
        block_size=_BLOCK_SIZE,
        attn_backend="sdpa",
        runs_ahead=True,
    )
    runner = decoder.runner
    runner.uses_prefix_groups, runner.n_multiprocessors = True, _N_MULTIPROCESSORS

    def decode(rows: Tensor, *_: Any) -> Tensor:
        return torch.tensor([[2.0], [-1.0]], dtype=torch.float64).repeat(1, rows.shape[1])

    def sample_first(scheduled: Any, prefilled: Any, slots_B: Any, logits_KV: Any) -> Tensor:
        return decode(torch.empty(4, len(slots_B)))

    def prefill(chunks: Any) -> Tensor:
        return torch.empty(len(chunks), 1)

    runner._decode, runner._prefill, runner._sample_first = decode, prefill, sample_first  # type: ignore[method-assign]
    return decoder


def host_page(found: dict[str, Any]) -> str:
    lines = [
        f"{rows:>6} rows: {step_us:,.0f} us a decoding step"
        for rows, step_us in zip(found["rows"], found["step_us"], strict=True)
    ]
    return "\n".join([*lines, f"growth: {found['us_per_row']:.2f} us per row"])
