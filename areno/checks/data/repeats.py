"""Checks of what rows share: one row, prompt or solution many times, labels, and the form of validation prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from areno.checks.inputs.answer_forms import reference_text
from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import text_of_row
from areno.config.policy_experiments import PolicyExperimentConfig

_MOST_REPEATED = 0.05  # of the rows are one row, where most are different
_LEAST_ROWS = 20
_DIFFERENT = 0.5  # of the rows: with less, the task has few rows in all
_CONTRADICTED = 0.05  # of the rows
_ALL = 0.98
_COMMON, _RARE = 0.9, 0.1  # of the prompts
_LEAST_LINE = 12  # characters of a line that prompts share
_LEAST_CORE = 30  # characters of a question without what all prompts share
_EXAMPLES = 3


def repeated_rows(subject: Subject) -> Iterator[Finding]:
    """Look for one row that is there many times among others that are all different."""
    if _plays(subject):
        return
    for dataset in subject.training_rows:
        rows = [row for row in subject.rows_of(dataset) if row.item is not None]
        counts = Counter(text_of_row(subject.kind, row.row) for row in rows)
        if len(rows) < _LEAST_ROWS:
            continue
        [(text, count)] = counts.most_common(1)
        line = f"{dataset.key}: of {len(rows)} rows, {len(counts)} are different"
        line += f"; one is there {count} times" if count > 1 else ""
        is_repeated = count > max(_LEAST_ROWS, _MOST_REPEATED * len(rows))
        is_repeated = is_repeated and len(counts) > _LEAST_ROWS
        if is_repeated and len(counts) > _DIFFERENT * (len(rows) - count):
            yield red("repeated-rows", line, [repr(text[:100])])
        else:
            yield green("repeated-rows", line)


def _plays(subject: Subject) -> bool:
    """Whether agents may begin with the same prompt and go on otherwise, as in a game."""
    return isinstance(subject.config, PolicyExperimentConfig) and subject.config.agent.fn is not None


def contradictions(subject: Subject) -> Iterator[Finding]:
    """Look for a prompt with different solutions, and for different prompts that have all the same."""
    if subject.kind != "prompt" or _plays(subject):
        return
    for dataset in subject.training_rows:
        rows = [row for row in subject.rows_of(dataset) if row.item is not None and row.item.solutions is not None]
        if len(rows) < _LEAST_ROWS:
            continue
        solutions: dict[str, set[str]] = {}
        for row in rows:
            solutions.setdefault(row.item.text, set()).add(json.dumps(row.item.solutions, sort_keys=True, default=str))
        wrong = [row for row in rows if len(solutions[row.item.text]) > 1]
        name, n = "contradictions", len(rows)
        [(solution, count)] = Counter(each for found in solutions.values() for each in found).most_common(1)
        if len(wrong) > _CONTRADICTED * n:
            text = (
                f"{dataset.key}: the prompts of {len(wrong)} of {n} rows are those of other rows with other solutions"
            )
            yield red(name, text, [f"row {row.index}: {row.item.text[-100:]!r}" for row in wrong[:_EXAMPLES]])
        elif len(solutions) >= _LEAST_ROWS and count >= _ALL * len(solutions) and reference_text(rows[0].item):
            yield red(
                name, f"{dataset.key}: {count} of {len(solutions)} prompts have the same solution, {solution[:60]}"
            )
        else:
            yield green(name, f"{dataset.key}: no prompt has two solutions, and not all have the same")


def validation_form(subject: Subject) -> Iterator[Finding]:
    """Compare the lines that all prompts share, in training and in validation, and the questions without them."""
    if subject.kind != "prompt":
        return
    prompts = [
        (dataset, [_asked(row) for row in subject.rows_of(dataset) if row.item is not None])
        for dataset in subject.datasets
    ]
    trained = [text for dataset, texts in prompts for text in texts if dataset.trains]
    common = _common_lines(trained)
    for dataset, texts in prompts:
        if dataset.trains or not texts or not trained:
            continue
        own = _common_lines(texts)
        lost = [line for line in common if sum(line in text for text in texts) <= _RARE * len(texts)]
        more = [line for line in own if sum(line in text for text in trained) <= _RARE * len(trained)]
        cores = {_core(text, common) for text in trained}
        known = [text for text in texts if len(core := _core(text, own)) >= _LEAST_CORE and core in cores]
        exact = set(trained)
        if any(text not in exact for text in known):
            line = (
                f"{dataset.key}: {len(known)} of {len(texts)} questions are in the training data, too, in another form"
            )
            yield red("validation-rows", line, [repr(text[:100]) for text in known[:_EXAMPLES]])
        if lost or more:
            which = f"no prompt has the line {lost[0]!r}" if lost else f"prompts have the line {more[0]!r}"
            others = "nearly all of training do" if lost else "none of training does"
            yield red("validation-form", f"{dataset.key}: {which}, and {others}: the model is asked otherwise there")
        else:
            yield green("validation-form", f"{dataset.key}: its prompts have the lines that those of training share")


def _asked(row: EncodedRow) -> str:
    return text_of_row("prompt", row.row, is_asked=True)


def _common_lines(texts: Sequence[str]) -> list[str]:
    lines = Counter(line for text in texts for line in {each.strip() for each in text.splitlines()})
    is_one = len(set(texts)) == 1
    return [
        line
        for line, count in lines.most_common(2 * _EXAMPLES)
        if count >= _COMMON * len(texts) and len(line) >= _LEAST_LINE and len(texts) >= _LEAST_ROWS and not is_one
    ]


def _core(text: str, common: Sequence[str]) -> str:
    """Return the letters and digits of a prompt without the lines that others have, too."""
    kept = [line for line in text.splitlines() if line.strip() not in common and len(line) >= _LEAST_LINE]
    return "".join(char for char in "".join(kept).lower() if char.isalnum())
