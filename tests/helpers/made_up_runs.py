"""Run folders with made-up numbers, for the readers of runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

SETTINGS = "seed: {seed}\nactor:\n  optimizer:\n    lr: 0.1\ntrial_name: {name}\n"


def make_run(folder: Path, name: str, seed: int, n_steps: int, n_samples: int = 0) -> Path:
    """A run of made-up numbers."""
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text(SETTINGS.format(seed=seed, name=name))
    (run / "versions.json").write_text('{"areno": "1"}')
    lines = []
    for step in range(1, n_steps + 1):
        scalars = {"rollout/rewards_mean": step / 10, "train/loss": math.sin(step), "time/step": 2.0, "time/train": 1.5}
        lines.append(json.dumps({"step": step, "time": 1000.0 + 2 * step, **scalars, "odd/number": seed}) + "\n")
    (run / "logs" / "metrics.jsonl").write_text("".join(lines))
    if n_samples:
        (run / "rollouts").mkdir()
    for step in range(1, n_steps + 1) if n_samples else ():
        samples = [sample(step, number) for number in range(n_samples)]
        (run / "rollouts" / f"{step:06d}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    return run


def sample(step: int, number: int) -> dict[str, object]:
    tokens = [f"{step}", "+", f"{number}", "</script><b>", "é"]
    return {
        "row": number // 2,
        "prompt": f"prompt {number // 2} <i>",
        "completion": "".join(tokens),
        "reward": number % 2,
        "status": "ok",
        "message": "",
        "solutions": ["4"],
        "prompt_tokens": 3,
        "response_tokens": 5,
        "finish_reason": "stop",
        "advantage": 0.5,
        "tokens": tokens,
        "logprobs": [-0.1, -5.0, math.nan, -1.0, 0.0],
    }
