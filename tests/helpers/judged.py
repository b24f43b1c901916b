"""Samples for a judge, and their judging."""

from __future__ import annotations

from typing import Any

from areno.config.judge import JudgeConfig
from areno.scoring.judge import JudgeTask, Judging
from areno.scoring.judge_readers import JudgeBackend
from areno.types import RewardRecord


def record(completion: str, prompt: str = "1+1?", **row: Any) -> RewardRecord:
    row = {"solutions": ["2"], **row}
    return RewardRecord(
        prompt=prompt, completion=completion, final_answer=completion, solutions=row.get("solutions"), record=row
    )


def judging_of(
    config: JudgeConfig, reader: JudgeBackend, n_samples: int = 1, prompt: Any = "1+1?", **task: Any
) -> Judging:
    """A judging in which each prompt has n_samples consecutive samples."""

    def task_of(place: int) -> JudgeTask:
        return JudgeTask(range(place // n_samples * n_samples, (place // n_samples + 1) * n_samples), prompt, **task)

    return Judging(config, reader, task_of)
