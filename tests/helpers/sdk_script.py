"""What tests of the SDK share: an initialised Trainer of the quickstart's model, and a script's usual calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from areno import ArenoConfig, SamplingParams, Trainer, TrainSequence

MODEL = str(Path(__file__).parents[2] / "examples" / "quickstart" / "model")

SAMPLING = SamplingParams(max_new_tokens=6)

LR = {"lr": 1e-2, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0}


def made(world_size: int = 1, metrics_log_dir: Any = None, **config: Any) -> Trainer:
    """Initialised, on the CPU, with a learning rate that shows after one step."""
    config["runtime"] = {"device": "cpu", "gradient_checkpointing": False, **config.get("runtime", {})}
    settings = ArenoConfig(**{"optimizer": LR, **config})
    trainer = Trainer(world_size, MODEL, custom_config=settings, metrics_log_dir=metrics_log_dir)
    trainer.init()
    return trainer


def session(trainer: Trainer, **how: Any) -> Any:
    return trainer.rollout_session(sampling_params=SAMPLING, proxy=False, **how)


def sampled(
    trainer: Trainer, prompts: Any = ("12+19=", "8+7="), n_samples: int = 2, params: Any = SAMPLING, **how: Any
):
    with session(trainer):
        return trainer.rollout_batch(list(prompts), n_samples, params, **how)


def tokens_of(results: Any) -> list[list[int]]:
    return [sequence.resp_tokens for result in results for sequence in result.sequences]


def rows_of(results: Any) -> list[TrainSequence]:
    """Advantages +1 and -1 in turn."""
    rows = []
    for result in results:
        prompt = result.prompt_tokens
        for number, sequence in enumerate(result.sequences):
            n_prompt, n_new = len(prompt), len(sequence.resp_tokens)
            rows.append(
                TrainSequence(
                    prompt_mask=[True] * n_prompt + [False] * n_new,
                    tokens=prompt + sequence.resp_tokens,
                    logprobs=[0.0] * n_prompt + sequence.resp_logprobs,
                    advantages=[0.0] * n_prompt + [1.0 - 2 * (number % 2)] * n_new,
                    reward=float(number % 2),
                )
            )
    return rows


def plain_rows(n: int = 2, **changes: Any) -> list[TrainSequence]:
    row = TrainSequence(
        prompt_mask=[True, True, False, False], tokens=[4, 5, 6, 1], logprobs=[0.0] * 4, advantages=[1.0] * 4
    )
    return [replace(row) for _ in range(n - 1)] + [replace(row, **changes)]


def loss(pack: Any, logprobs: Any) -> Any:
    return -pack.token_mean(pack.trained(logprobs)), {}
