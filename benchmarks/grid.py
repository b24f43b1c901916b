"""The settings that tune.enabled chooses for a GRPO step, against a grid of settings.

`areno/run/tuning.py` chooses the number of samples at once, the size of micro-batches and the recomputation.
Whole steps are measured with these settings and with each point of the grid, all with the same lengths, drawn up to
--prompt-len and --new-tokens. A point that runs out of memory is reported as such.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.bench.__main__ import checked_model
from areno.bench.areno_contender import ArenoContender, requests
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.bench.work import Workload, rows_of_outputs
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig, GenerationConfig, RolloutConfig, TuneConfig
from areno.config.run import EngineConfig
from areno.config.sources import PromptDatasetConfig
from areno.errors import EngineError
from areno.files.paths import find_file
from areno.plan.tuning_candidates import AT_ONCE, BATCH, BUDGET, DROP, RECOMPUTE
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.run.tuning import choose_settings
from areno.specs.rollout import RolloutSpec

BUDGETS = (4096, 8192, 16384, 32768, 65536)
"""Numbers of tokens in a micro-batch, on the grid."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(kind="step")
    steps = "further steps with the chosen settings, each with other lengths (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=0, help=steps)


@dataclass(frozen=True)
class GridPoint:
    """Settings of memory and speed."""

    at_once: int
    budget: int | None  # tokens in a micro-batch; None is chosen by the engine
    recompute: bool  # activations
    drop: bool = False  # the KV cache after each rollout

    def __str__(self) -> str:
        budget = "automatic" if self.budget is None else f"{self.budget:,} tokens"
        recompute = "recomputed" if self.recompute else "kept"
        return f"{self.at_once} at once, {budget}, {recompute}{', cache dropped' if self.drop else ''}"


def grid_points(n_rows: int) -> Iterator[GridPoint]:
    """Yield the 20 points of the grid. Points that can share an engine follow each other."""
    for recompute, at_once, budget in itertools.product((True, False), (n_rows, max(1, n_rows // 2)), BUDGETS):
        yield GridPoint(at_once, budget, recompute)


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return medians of each point, the chosen one first, or why it `failed`.

    `ratio` is the time of a step with the chosen settings / the shortest time of all points.
    """
    model, n_rows = checked_model(settings, folder), settings.work.n_rows
    began = time.perf_counter()
    of = choose_settings(_config(settings, *model), {BATCH})
    chosen = GridPoint(of.get(AT_ONCE, n_rows), of.get(BUDGET), of.get(RECOMPUTE, True), of.get(DROP, False))
    tune_s, points = time.perf_counter() - began, dict[str, dict[str, Any]]()
    with closing(_Bench(settings, model)) as bench:
        for point in [chosen, *grid_points(n_rows)]:
            name = str(point) if points else f"tune: {point}"
            # The same lengths in each step of each point, so that the warm-up records the CUDA graphs of the others.
            points[name] = bench.measure(point, [0] * (1 + settings.repeats))
            log_progress(f"{name}: {points[name]}")
        times = [each.get("step_s") for each in points.values()]
        if settings.steps:
            points["tune: further steps"] = bench.measure(chosen, range(1 + settings.steps))
    ratio = None if times[0] is None else times[0] / min(filter(None, times))
    return {**points, "tune_s": tune_s, "ratio": ratio}


def _config(settings: Settings, folder: str, random_init: bool) -> GRPOConfig:
    """Return the settings of a GRPO run whose steps are the benchmark's work."""
    work, on_cpu = settings.work, settings.device == "cpu"
    lora = settings.lora_rank
    adapters: dict[str, Any] = {} if lora is None else {"use_lora": True, "lora_rank": lora, "lora_alpha": 2 * lora}
    dtype: Any = settings.dtype
    return GRPOConfig(
        experiment_name="bench",
        actor=GRPOActorConfig(
            path=folder,
            init_from_scratch=random_init,
            dtype=dtype,
            optimizer=OptimizerConfig(type=settings.optimizer),
            offload=settings.offload,
            **adapters,
        ),
        tokenizer_path=str(find_file("examples/quickstart/model")),
        engine=EngineConfig.of(settings, device="cpu" if on_cpu else "cuda", world_size=1),
        train_dataset=PromptDatasetConfig(batch_size=len(work.prompt_lens), max_length=max(work.prompt_lens)),
        gconfig=GenerationConfig(n_samples=work.n_samples, max_new_tokens=max(work.new_lens)),
        rollout=RolloutConfig.of(settings),
        tune=TuneConfig(enabled=True, max_samples=work.n_rows),
    )


class _Bench:
    """Measures steps. Points share an engine as long as it can serve them. An engine that has failed is replaced."""

    def __init__(self, settings: Settings, model: tuple[str, bool]):
        self._settings, self._model = settings, model
        self._engine_of: bool | None = None  # whether the engine recomputes activations
        self._ours: ArenoContender | None = None
        self._tokens = random.Random(0)

    def close(self) -> None:
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.engine.close()

    def measure(self, point: GridPoint, seeds: Sequence[int]) -> dict[str, Any]:
        """Run a step for each seed, which draws its lengths. The first step is a warm-up."""
        try:
            ours = self._contender(point)
            ours.engine.peak_memory_gib()  # begins to record a new peak
            steps = [self._step(ours, point, random.Random(seed)) for seed in seeds][1:]
        except EngineError as error:
            self.close()
            return {"failed": str(error).partition("\n")[0]}
        rollout, train, peak = zip(*steps, strict=True)
        return {
            "step_s": statistics.median(map(sum, zip(rollout, train, strict=True))),
            "rollout_s": statistics.median(rollout),
            "train_s": statistics.median(train),
            "peak_gib": max(peak),
        }

    def _contender(self, point: GridPoint) -> ArenoContender:
        if self._ours is None or self._engine_of != point.recompute:
            self.close()
            self._ours = ArenoContender(self._settings.replaced(recompute=point.recompute), *self._model)
            self._engine_of = point.recompute
        self._ours.engine.spec.mb_spec = MicroBatchSpec(max_tokens_per_mb=point.budget)
        return self._ours

    def _step(self, ours: ArenoContender, point: GridPoint, draw: random.Random) -> tuple[float, float, float]:
        """Run a step with lengths from `draw`, and return (seconds of rollout, of training, peak memory in GiB)."""
        limits, engine = self._settings.work, ours.engine
        lens = [tuple(draw.randint(1, most) for _ in limits.prompt_lens) for most in _max_lens(limits)]
        work = Workload(prompt_lens=lens[0], new_lens=lens[1], n_samples=limits.n_samples, name="")
        prompts = work.random_prompts(ours.vocab_size, self._tokens.randrange(2**31))
        spec = RolloutSpec(
            max_running=point.at_once,
            max_len=min(sum(_max_lens(limits)), engine.info.context_len),
            decoder=DecoderConfig.of(self._settings),
            keeps_cache=not point.drop,
        )
        began = time.perf_counter()
        engine.begin_rollout(spec)
        outputs = engine.generate(requests(work, prompts))
        engine.end_rollout(point.drop)
        sampled = time.perf_counter()
        peak = engine.peak_memory_gib()
        stats = ours.train(rows_of_outputs(prompts, outputs))
        return sampled - began, time.perf_counter() - sampled, max(peak, stats["memory_gib"])


def _max_lens(work: Workload) -> tuple[int, int]:
    return max(work.prompt_lens), max(work.new_lens)
