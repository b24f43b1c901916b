"""Opens the rows of a dataset as the training loop reads them: encoded, and within the limits of the run."""

from __future__ import annotations

import contextlib
from typing import Any

from areno.config.datasets import DatasetConfig
from areno.config.experiments import ExperimentConfig
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.loader import BatchLoader, TokenLimit, row_encoder, row_loader
from areno.data.row_schema import RowKind
from areno.data.solution_steps import check_separator
from areno.data.sources import open_rows
from areno.data.teacher_rows import teacher_row_renderer
from areno.plan.plan import TrainerPlan
from areno.scoring.judge import check_fields


def open_loader(
    config: ExperimentConfig,
    kind: RowKind,
    plan: TrainerPlan,
    section: DatasetConfig,
    given: Any,
    key: str,
    source: str = "",
    n_processes: int = 0,
) -> BatchLoader[Any]:
    """Open the loader of one dataset. `given`: rows of a script; None: `section` names them. `key`: of the section."""
    thinking, trains = None, key.startswith("train_dataset")
    context = TokenLimit(plan.spec.context_len, "the model's context")
    rows, section = open_rows(section, given, kind, key)
    teacher = teacher_row_renderer(config, plan.spec.context_len) if trains else None
    if teacher is not None:
        teacher.check_all(rows, key)
    separator = plan.spec.actor.step_separator or ""
    if separator:
        check_separator(plan.tokenizer, separator, rows, key)
    if isinstance(config, PolicyExperimentConfig):
        thinking, name, gconfig = config.rollout.enable_thinking, "gconfig", config.gconfig
        if not trains and config.eval_gconfig is not None:
            name, gconfig = "eval_gconfig", config.eval_gconfig
        if gconfig.max_tokens:
            context = TokenLimit(gconfig.max_tokens, f"{name}.max_tokens")
    if isinstance(config, PolicyExperimentConfig) and config.reward.judge.is_set:
        with contextlib.suppress(KeyError, TypeError):  # a row of another form has an error of its own
            check_fields(config.reward.judge, rows[0])
    turns = section.changed_turns
    encode = row_encoder(kind, plan.tokenizer, turns, thinking=thinking, separator=separator, teacher=teacher)
    how: dict[str, Any] = {"seed": config.seed, "key": key, "n_processes": n_processes, "source": source}
    return row_loader(kind, rows, encode, section, context, **how)
