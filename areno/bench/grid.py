"""Compare the settings that `tune.enabled` chooses with a grid of settings.

`run_grid` lets `areno/run/tuning.py` choose the number of samples at once, the size of micro-batches and the
recomputation of a GRPO step. Then it measures whole steps with these settings and with each point of a grid, all with
the same drawn lengths. A point that runs out of memory is reported as such.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from areno.bench.areno_contender import ArenoContender, requests
from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.bench.work import Work, rows_of_outputs
from areno.config.datasets import DatasetConfig
from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig, GenerationConfig, RolloutConfig, TuneConfig
from areno.config.run import EngineConfig
from areno.errors import EngineError
from areno.files.paths import find_file
from areno.plan.tuning_candidates import AT_ONCE, BATCH, BUDGET, DROP, RECOMPUTE
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.run.tuning import choose
from areno.specs.rollout import RolloutSpec

BUDGETS = (4096, 8192, 16384, 32768, 65536)
"""Numbers of tokens in a micro-batch, on the grid."""


@dataclass(frozen=True)
class Point:
    """Settings of memory and speed."""

    at_once: int
    budget: int | None  # tokens in a micro-batch; None is chosen by the engine
    recompute: bool  # activations
    drop: bool = False  # the KV cache after each rollout

    @staticmethod
    def from_settings(chosen: dict[str, Any], n_rows: int) -> Point:
        at_once = chosen.get(AT_ONCE, n_rows)
        return Point(at_once, chosen.get(BUDGET), chosen.get(RECOMPUTE, True), chosen.get(DROP, False))

    def __str__(self) -> str:
        budget = "automatic" if self.budget is None else f"{self.budget:,} tokens"
        recompute = "recomputed" if self.recompute else "kept"
        return f"{self.at_once} at once, {budget}, {recompute}{', cache dropped' if self.drop else ''}"


def grid_of(n_rows: int) -> Iterator[Point]:
    """Yield the 20 points of the grid. Points that can share an engine follow each other."""
    for recompute, at_once, budget in itertools.product((True, False), (n_rows, max(1, n_rows // 2)), BUDGETS):
        yield Point(at_once, budget, recompute)


def run_grid(settings: Settings, folder: str, random_init: bool) -> dict[str, Any]:
    """Choose settings by `tune`, and measure a step with them and with each point of the grid.

    The lengths of the work are the largest ones. `points` has the medians of each, the chosen one first, or why it
    `failed`. `ratio` is the time of a step with the chosen settings / the shortest time of all points. `steps` further
    steps ran with the chosen settings, and `steps_failed` says why one of them failed.
    """
    began = time.perf_counter()
    chosen = Point.from_settings(choose(_config(settings, folder, random_init), {BATCH}), settings.work.n_rows)
    tune_s = time.perf_counter() - began
    log_progress(f"grid: chosen in {tune_s:.0f} s: {chosen}")
    points, longest_s, steps_failed = [], 0.0, ""
    with _Bench(settings, folder, random_init) as bench:
        for number, point in enumerate([chosen, *grid_of(settings.work.n_rows)]):
            started = time.perf_counter()
            if started - began + longest_s > settings.limit_s and number:
                found: dict[str, Any] = {"failed": "not measured, see --limit-s"}
            else:
                found = bench.measure(point)
                longest_s = max(longest_s, time.perf_counter() - started)
            points.append({"name": f"{'tune: ' * (not number)}{point}", **found})
            log_progress(f"grid: {_line(points[-1])}")
        if settings.steps:
            steps_failed = bench.run_steps(chosen, settings.steps)
    times = [each["step_s"] for each in points if "step_s" in each]
    ratio = points[0]["step_s"] / min(times) if "step_s" in points[0] else None
    found = {"tune_s": tune_s, "chosen": str(chosen), "points": points, "ratio": ratio}
    return {**found, "steps": settings.steps, "steps_failed": steps_failed}


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
        tokenizer_path=settings.tokenizer or str(find_file("examples/quickstart/model")),
        engine=EngineConfig.of(settings, device="cpu" if on_cpu else "cuda", world_size=1),
        train_dataset=DatasetConfig(batch_size=len(work.prompt_lens), max_length=max(work.prompt_lens)),
        gconfig=GenerationConfig(n_samples=work.n_samples, max_new_tokens=max(work.new_lens)),
        rollout=RolloutConfig(**_decoder(settings)),
        tune=TuneConfig(enabled=True, max_samples=work.n_rows),
    )


def _decoder(settings: Settings) -> dict[str, Any]:
    names = ("max_prefill_tokens", "mem_fraction", "eager_decode")
    return {name: vars(settings)[name] for name in names}


class _Bench:
    """Measures steps. An engine is kept for the points that it can serve, and replaced after it has failed."""

    def __init__(self, settings: Settings, folder: str, random_init: bool):
        self._settings, self._model = settings, (folder, random_init)
        self._engine_of: bool | None = None  # whether the engine recomputes activations
        self._ours: ArenoContender | None = None
        self._tokens = random.Random(0)

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        ours, self._ours = self._ours, None
        if ours is not None:
            ours.engine.close()

    def measure(self, point: Point) -> dict[str, Any]:
        try:
            ours = self._contender(point)
            ours.engine.peak_memory_gib()  # begins to record a new peak
            # The same lengths in each step of each point, so that the warm-up records the CUDA graphs of the others.
            steps = [self._step(ours, point, random.Random(0)) for _ in range(1 + self._settings.repeats)][1:]
        except EngineError as error:
            self._close()
            return {"failed": str(error).partition("\n")[0]}
        rollout, train, peak = ([step[index] for step in steps] for index in range(3))
        return {
            "step_s": statistics.median(map(sum, zip(rollout, train, strict=True))),
            "rollout_s": statistics.median(rollout),
            "train_s": statistics.median(train),
            "peak_gib": max(peak),
        }

    def run_steps(self, point: Point, n_steps: int) -> str:
        """Run steps of drawn lengths, and return why one of them failed, or ""."""
        draw = random.Random(1)
        for number in range(n_steps):
            try:
                self._step(self._contender(point), point, draw)
            except EngineError as error:
                self._close()
                return f"step {number + 1}: {str(error).partition(chr(10))[0]}"
        return ""

    def _contender(self, point: Point) -> ArenoContender:
        if self._ours is None or self._engine_of != point.recompute:
            self._close()
            self._ours = ArenoContender(replace(self._settings, recompute=point.recompute), *self._model)
            self._engine_of = point.recompute
        self._ours.engine.spec.mb_spec = MicroBatchSpec(max_tokens_per_mb=point.budget)
        return self._ours

    def _step(self, ours: ArenoContender, point: Point, draw: random.Random) -> tuple[float, float, float]:
        """Run a step with lengths from `draw`, and return (seconds of rollout, of training, peak memory in GiB)."""
        limits, engine = self._settings.work, ours.engine
        lens = [tuple(draw.randint(1, most) for _ in limits.prompt_lens) for most in _most(limits)]
        work = Work(prompt_lens=lens[0], new_lens=lens[1], n_samples=limits.n_samples, name="")
        prompts = work.prompts(ours.vocab_size, self._tokens.randrange(2**31))
        spec = RolloutSpec(
            max_running=point.at_once,
            max_len=min(sum(_most(limits)), engine.info.context_len),
            decoder=DecoderConfig(**_decoder(self._settings)),
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


def _most(work: Work) -> tuple[int, int]:
    return max(work.prompt_lens), max(work.new_lens)


def _line(point: dict[str, Any]) -> str:
    if "failed" in point:
        return f"{point['name']:<56} {point['failed']}"
    seconds = " ".join(f"{point[f'{name}_s']:8.3f}" for name in ("step", "rollout", "train"))
    return f"{point['name']:<56} {seconds} {point['peak_gib']:9.2f}"


def grid_page(found: dict[str, Any]) -> str:
    columns = "".join(f"{name:>9}" for name in ("step, s", "rollout", "train"))
    heading = f"{'samples at once, micro-batch, activations':<56}{columns} peak, GiB"
    lines = [heading, *map(_line, found["points"]), f"chosen in {found['tune_s']:.0f} s: {found['chosen']}"]
    if found["ratio"] is not None:
        lines.append(f"a step takes {found['ratio']:.3f} times as long as with the best point")
    if found["steps"]:
        failed = found["steps_failed"]
        told = f"failed in {failed}" if failed else "ran without an error"
        lines.append(f"{found['steps']} steps with the chosen settings and drawn lengths {told}")
    return "\n".join(lines)
