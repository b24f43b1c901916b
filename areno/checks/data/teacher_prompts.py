"""Checks of the prompts that a teacher reads in place of the student's (teacher.prompt_key)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.config.policy_experiments import PolicyExperimentConfig

_MOST_EQUAL, _MOST_LACKING = 0.05, 0.05  # of the rows
_USUAL = 0.5  # of the rows: then all of them should
_EXAMPLES = 3
_SHOWN = 80  # characters


def teacher_prompts(subject: Subject) -> Iterator[Finding]:
    """Whether the teacher reads what the student does not, such as the answer of the row."""
    config, name = subject.config, "teacher-prompts"
    teacher = config.teacher if isinstance(config, PolicyExperimentConfig) else None
    if teacher is None or teacher.prompt_key is None:
        return
    for dataset in subject.training_rows:
        where, equal, told, lacking, n_known = f"{dataset.key}, {teacher.prompt_key}", list[str](), 0, list[str](), 0
        items = [row.item for row in subject.sample_of(dataset) if row.item is not None]
        for item in items:
            read = subject.tokenizer.decode(item.teacher_tokens or [])
            if item.teacher_tokens is None or list(item.teacher_tokens) == list(item.tokens):
                equal.append(f"row {item.index}: {read[-_SHOWN:]!r}")
            answer = _answer(item.solutions)
            if not answer:
                continue
            n_known += 1
            own = answer in subject.tokenizer.decode(item.tokens)
            told += answer in read and not own
            if answer not in read:
                lacking.append(f"row {item.index}: {answer[:_SHOWN]!r} is not in ...{read[-_SHOWN:]!r}")
        if len(equal) > _MOST_EQUAL * len(items):
            text = f"{where}: in {len(equal)} of {len(items)} rows, the teacher reads the prompt of the student"
            yield red(name, f"{text}, so it knows no more", equal[:_EXAMPLES])
        elif n_known and told > _USUAL * n_known and len(lacking) > _MOST_LACKING * n_known:
            text = f"{where}: {len(lacking)} of {n_known} prompts of the teacher lack the answer of their row"
            yield red(name, f"{text}, which the others have", lacking[:_EXAMPLES])
        elif n_known and told:
            text = f"{where}: {told} of {n_known} prompts of the teacher have the answer, and those of the student not"
            yield green(name, text, lacking[:_EXAMPLES])
        else:
            yield green(name, f"{where}: the teacher reads other prompts than the student")


def _answer(solutions: Any) -> str:
    """Return the reference answer of a row as it may stand in a prompt, or ""."""
    first = solutions[0] if isinstance(solutions, list) and solutions else solutions
    return str(first).strip() if isinstance(first, str | int | float) else ""


CHECKS = [teacher_prompts]
