"""Measure which share of a step of supervised fine-tuning is not the device's work.

`run_sft` trains a model on random texts with the default settings of areno. It reports the seconds of a whole step and
the seconds that the worker took for it. The rest is the time that the device waits for the driver: encoding rows,
sending them, logging.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areno.bench.arguments import Settings
from areno.bench.timing import log_progress
from areno.bench.work import Texts, Work, model_folder
from areno.config.datasets import DatasetConfig
from areno.config.models import ModelConfig
from areno.config.run import EngineConfig, SaverConfig
from areno.recipes.sft import SFTConfig
from areno.tracking.tracker import END_OF_STEP, Tracker
from areno.trainers.sft import SFTTrainer

# Steps of warm-up: the first ones compile kernels, and the processes that encode rows start after some seconds. On a
# CPU, steps take longer.
_WARM_UP, _WARM_UP_ON_CPU = 60, 3


class _StepTimes(Tracker):
    """Measures the steps of a run, from the end of a step to the end of the next one.

    Set `trainer` before the first.
    """

    trainer: SFTTrainer

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.device: list[float] = []
        self.outside: dict[str, list[float]] = {}
        self.n_tokens: list[float] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if END_OF_STEP not in scalars:
            return
        self.ends.append(time.perf_counter())
        self.device.append(self.trainer.setup.trainer.engine.train_seconds)
        train_s = scalars["time/train"]
        found = {"in train": train_s - self.device[-1], "before and after train": scalars[END_OF_STEP] - train_s}
        for name, value in found.items():
            self.outside.setdefault(name, []).append(value)
        self.n_tokens.append(scalars["train/tokens_per_second"] * train_s)


def run_sft(settings: Settings, folder: str, random_init: bool) -> dict[str, float]:
    """Train on random texts, and return medians of the steps after a warm-up.

    `device_s` is the worker's work in a step, and `outside_s` the rest: `train_outside_s` (inside the training call:
    checking, dividing and sending rows), `other_s` (outside the call, in the run's step: waiting for rows) and
    `between_s` (logs and states). `n_encoders` processes encoded the rows, 0 for a thread of the driver.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    n_warm_up = _WARM_UP_ON_CPU if settings.device == "cpu" else _WARM_UP
    n_steps = n_warm_up + settings.repeats
    rows = _random_rows(tokenizer, settings, n_steps)
    with tempfile.TemporaryDirectory() as run_dir:
        if random_init and not Path(settings.shape).is_dir():
            ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
            folder, _ = model_folder(settings.shape, Path(run_dir) / "model", **ids)
        times = _StepTimes()
        config = _config(settings, folder, random_init, n_steps)
        log_progress(f"sft: {n_steps} steps of {settings.rows} rows on {settings.device}")
        with SFTTrainer(config, run_dir=Path(run_dir) / "run", train_dataset=rows, trackers=[times]) as trainer:
            times.trainer = trainer
            trainer.fit()
            n_encoders = len(trainer.setup.loader.encoder_pids)
    return _figures(times, settings.rows, n_warm_up) | {"n_encoders": n_encoders}


def _random_rows(tokenizer: Any, settings: Settings, n_steps: int) -> list[dict[str, Any]]:
    """Return rows of random words for all steps, in the form that the settings ask for. No row occurs twice."""
    work, words = settings.work, Texts(tokenizer)
    answers = Work.fixed(len(work.prompt_lens), 1, work.new_lens[0], 1)
    texts = [
        pair
        for step in range(n_steps)
        for pair in zip(words.draw(work, "prompt", step), words.draw(answers, "response", step), strict=True)
    ]
    if not settings.messages:
        return [{"prompt": prompt, "response": response} for prompt, response in texts]
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in texts
    ]


def _config(settings: Settings, folder: str, random_init: bool, n_steps: int) -> SFTConfig:
    max_length = 8 * max(settings.work.row_lens) + 64
    dtype: Any = settings.dtype
    return SFTConfig(
        experiment_name="bench",
        actor=ModelConfig(path=folder, init_from_scratch=random_init, dtype=dtype),
        tokenizer_path=settings.tokenizer,
        engine=EngineConfig(device="cpu" if settings.device == "cpu" else "cuda", workers="spawn", world_size=1),
        total_train_steps=n_steps,
        train_dataset=DatasetConfig(batch_size=settings.rows, max_length=max_length),
        saver=SaverConfig(freq_steps=None, freq_epochs=None),
    )


def _figures(times: _StepTimes, n_rows: int, n_warm_up: int) -> dict[str, float]:
    places = range(n_warm_up, len(times.ends))
    steps = [times.ends[place] - times.ends[place - 1] for place in places]
    devices = [times.device[place] for place in places]
    outside = [step - device for step, device in zip(steps, devices, strict=True)]
    shares = [each / step for each, step in zip(outside, steps, strict=True)]
    in_train, other = (
        [values[place] for place in places]
        for values in (times.outside["in train"], times.outside["before and after train"])
    )
    between = [each - train - rest for each, train, rest in zip(outside, in_train, other, strict=True)]
    median = statistics.median
    return {
        "step_s": median(steps),
        "device_s": median(devices),
        "outside_s": median(outside),
        "outside_share": median(shares),
        "worst_outside_share": max(shares),
        "train_outside_s": median(in_train),
        "other_s": median(other),
        "between_s": median(between),
        "row_tokens": median(times.n_tokens) / n_rows,
    }


def sft_page(found: dict[str, float]) -> str:
    lines = {
        "step": f"{found['step_s']:.4f} s, rows of {found['row_tokens']:.0f} tokens",
        "the device's work": f"{found['device_s']:.4f} s",
        "outside the device's work": f"{found['outside_s']:.4f} s: {100 * found['outside_share']:.1f} % of a step, "
        f"at most {100 * found['worst_outside_share']:.1f} %",
        "  checking and sending rows": f"{found['train_outside_s']:.4f} s",
        "  waiting for rows": f"{found['other_s']:.4f} s",
        "  logs and states": f"{found['between_s']:.4f} s",
        "rows encoded by": f"{found['n_encoders']:.0f} processes" if found["n_encoders"] else "a thread of the driver",
    }
    return "\n".join(f"{name:<32} {text}" for name, text in lines.items())
