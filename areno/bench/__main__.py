"""python -m areno.bench rollout|train|step: tokens per second, time by phase, agreement of logprobs, peak memory.

One engine does the work of a GSPO step on random prompts: sample, then one optimizer step on the samples. Medians
of several repeats after a warm-up; `--json` prints one line for machines. On CPU only ratios within one call mean
anything.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from areno.bench.profile import busy_s, idle_share, phase_table, traced
from areno.bench.shapes import model_folder
from areno.config.model_roles import MicroBatchSpec, OptimizerConfig
from areno.engine.engine import Engine
from areno.engine.spec import EngineSpec, RolloutSpec
from areno.engine.types import GenerationRequest, SamplingParams, TrainSequence
from areno.errors import ArenoError


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark and print its table."""
    args = _parse(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(args, Path(folder))
    except ArenoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value:,.4g}" if isinstance(value, float) else f"{name:28} {value}")
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one call."""
    path, random_init = model_folder(args.shape, folder)
    cuda = args.device.startswith("cuda")
    spec = EngineSpec(
        model_path=path,
        devices=[args.device],
        dtype="bfloat16" if cuda else "float32",
        random_init=random_init,
        optimizer=None if args.work == "rollout" else OptimizerConfig(lr=1e-6),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=args.tokens_per_mb),
        gradient_checkpointing=not args.no_recompute,
    )
    started = time.perf_counter()
    with Engine(spec, "inline" if args.profile else "auto") as engine:  # a tracer sees its own process only
        figures: dict[str, Any] = {
            "shape": args.shape,
            "work": f"{args.prompts}x{args.samples}, {args.prompt_len}+{args.new_tokens}",
            "device": engine.info.device,
            "attention": engine.info.attn_backend,
            "params_m": engine.info.n_params / 1e6,
            "start_s": time.perf_counter() - started,
        }
        seconds: dict[str, list[float]] = {"rollout": [], "train": []}
        stats: dict[str, float] = {}
        for repeat in range(args.repeats + 1):  # the first warms up: graphs, allocator, compiled kernels
            rows = _random_rows(args, engine.info.vocab_size, repeat)
            if args.work != "train":
                started = time.perf_counter()
                rows = _rollout(engine, args, rows)
                seconds["rollout"].append(time.perf_counter() - started)
            if args.work != "rollout":
                stats = engine.train(rows, _loss())
                seconds["train"].append(stats["step_train_time_s"])
        if args.profile:
            medians = {phase: statistics.median(times[1:]) for phase, times in seconds.items() if times}
            figures |= _profile(engine, args, rows, medians)
        n_new, n_all = args.prompts * args.samples * args.new_tokens, sum(len(row.tokens or []) for row in rows)
        if seconds["rollout"]:
            figures["rollout_s"] = statistics.median(seconds["rollout"][1:])
            figures["rollout_tok_s"] = n_new / figures["rollout_s"]
        if seconds["train"]:
            figures["train_s"] = statistics.median(seconds["train"][1:])
            figures["train_tok_s"] = n_all / figures["train_s"]
        if args.work == "step":
            figures["step_s"] = figures["rollout_s"] + figures["train_s"]
            for name in ("logp_abs_diff_mean", "logp_abs_diff_max"):
                figures[name] = stats[name]
        if "memory_gib" in stats:
            figures["peak_memory_gib"] = stats["memory_gib"]
    return figures


def _profile(
    engine: Engine, args: argparse.Namespace, rows: list[TrainSequence], plain_s: dict[str, float]
) -> dict[str, Any]:
    """Trace one more repeat and write the tables. plain_s: seconds of each phase without a tracer."""
    bodies: dict[str, Any] = {
        "rollout": lambda: _rollout(engine, args, rows),
        "train": lambda: engine.train(rows, _loss()),
    }
    figures: dict[str, Any] = {}
    text = f"{args.work} {args.shape} {args.prompts}x{args.samples}, {args.prompt_len}+{args.new_tokens}\n"
    for phase, seconds in plain_s.items():
        started = time.perf_counter()
        _, spans = traced(bodies[phase])
        text += phase_table(phase, spans, time.perf_counter() - started, seconds)
        figures[f"{phase}_idle_share"] = idle_share(busy_s(spans), seconds)
    Path(args.profile).write_text(text, encoding="utf-8")
    return figures


def _rollout(engine: Engine, args: argparse.Namespace, rows: list[TrainSequence]) -> list[TrainSequence]:
    """Sample the rows' prompts and return rows of what was sampled."""
    engine.begin_rollout(
        RolloutSpec(
            max_running=args.prompts * args.samples,
            max_len=args.prompt_len + args.new_tokens,
            eager_decode=args.eager_decode,
        )
    )
    params = SamplingParams(max_new_tokens=args.new_tokens, temperature=1.0, ignore_eos=True)
    prompts = [(rows[i].tokens or [])[: args.prompt_len] for i in range(0, len(rows), args.samples)]
    outputs = engine.generate(
        [
            GenerationRequest(request_id=i, prompt=prompt, n_samples=args.samples, params=params, seed=i)
            for i, prompt in enumerate(prompts)
        ]
    )
    engine.end_rollout()
    return [
        _row(prompts[request_id], output.tokens, output.logprobs, advantage=1.0 if output.sample % 2 else -1.0)
        for request_id, samples in outputs.items()
        for output in samples
    ]


def _random_rows(args: argparse.Namespace, vocab_size: int, seed: int) -> list[TrainSequence]:
    draw = random.Random(seed)
    rows = []
    for _ in range(args.prompts):
        prompt = [draw.randrange(vocab_size) for _ in range(args.prompt_len)]
        for sample in range(args.samples):
            response = [draw.randrange(vocab_size) for _ in range(args.new_tokens)]
            rows.append(_row(prompt, response, [-10.0] * args.new_tokens, 1.0 if sample % 2 else -1.0))
    return rows


def _row(prompt: list[int], response: list[int], logprobs: list[float], advantage: float) -> TrainSequence:
    return TrainSequence(
        prompt_mask=[True] * len(prompt) + [False] * len(response),
        tokens=prompt + response,
        logprobs=[0.0] * len(prompt) + logprobs,
        advantages=[0.0] * len(prompt) + [advantage] * len(response),
    )


def _loss() -> Any:
    from areno.loss_fns.gspo import gspo_loss_fn

    return partial(gspo_loss_fn, clip_eps=3e-4)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser(prog="python -m areno.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work", choices=["rollout", "train", "step"])
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape's name or a model folder")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-mb", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-recompute", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--eager-decode", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", metavar="FILE", help="trace one repeat: where the device's time goes (CUDA)")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
