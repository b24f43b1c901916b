"""Checks of the rows of the run: their forms, which are left out, and marks and numbers that mean something else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areno.checks.inputs.encoded_rows import form_of
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red, shortened
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import answers_of, text_of_row, words_of

_LEAST_DIFFERENT = 0.5  # of the training rows; with less, a task has few rows in all
_MOST_DROPPED = 0.5  # of the rows: more than that are hardly meant
_CONTENT = ("prompt", "messages", "response", "chosen", "rejected", "answers", "completions")
_SHOWN = 60  # characters of a value
_EXAMPLES = 3
_MOST_MARKED = 0.05  # of the rows: a few may well write about templates
_MOST = 0.95  # of the answers of one side that have a mark, while at most 1 - _MOST of the other side have it
_LEAST_PAIRS = 20
_ALL = 0.98  # of the answers
_ANSWERS = ("answer", "solution", "solutions", "response", "output", "completion", "reasoning")
_LEAST_ANSWER = 20  # characters: a shorter text may stand in a prompt by chance
_SMALL_IS_GOOD = ("rank", "ranks", "ranking", "rankings", "place", "places", "position", "positions", "loss", "losses")
_SMALL_IS_GOOD += ("nll", "perplexity", "ppl", "error", "errors", "cost", "costs", "distance", "distances")


def forms_of_rows(subject: Subject) -> Iterator[Finding]:
    """Show an example of each form of row in the files, and what it becomes."""
    for dataset in subject.datasets:
        forms: dict[tuple[Any, ...], list[Any]] = {}
        for encoded in subject.rows_of(dataset):
            forms.setdefault(form_of(encoded.given), []).append(encoded)
        details = []
        for rows in forms.values():
            first = next((row for row in rows if row.item is not None), rows[0])
            details.append(f"{len(rows)} rows such as row {first.index}: {_fields(first.given)}")
            if first.row is not first.given:
                details.append(f"    read as {_fields(first.row)}")
            made = "left out" if first.item is None else f"{first.n_tokens} tokens"
            details.append(f"    becomes {made}")
        n_rows = len(dataset.loader.rows)
        text = f"{dataset.key}: {n_rows:,} rows in {len(forms)} form{'s' * (len(forms) > 1)}"
        yield green("row-forms", text, details)


def dropped_rows(subject: Subject) -> Iterator[Finding]:
    """Count the rows that the run leaves out."""
    for dataset in subject.datasets:
        rows = subject.rows_of(dataset)
        dropped = [row for row in rows if row.item is None]
        if not dropped:
            longest = max(row.n_tokens for row in rows)
            yield green("dropped-rows", f"{dataset.key}: no row is left out; the longest has {longest} tokens")
            continue
        reasons = Counter(row.dropped for row in dropped)
        details = [
            f"{count} rows: {reason}, the first is row {next(row.index for row in dropped if row.dropped == reason)}"
            for reason, count in reasons.most_common()
        ]
        share = len(dropped) / len(rows)
        verdict = red if share > _MOST_DROPPED else green
        yield verdict("dropped-rows", f"{dataset.key}: {share:.1%} of the rows are left out", details)


def validation_rows(subject: Subject) -> Iterator[Finding]:
    """Look for rows of the validation sets in the training data."""
    training: dict[str, int] = {}
    repeated = dict[str, str]()  # row of a dataset that has few different rows -> how few
    for dataset in subject.training_rows:
        rows = subject.rows_of(dataset)
        contents = {_content(row.row): row.index for row in reversed(rows)}
        training = {**contents, **training}
        if len(contents) < _LEAST_DIFFERENT * len(rows):
            repeated |= dict.fromkeys(
                contents, f"{len(rows)} training rows have only {len(contents)} different contents"
            )
    valid = [dataset for dataset in subject.datasets if not dataset.trains]
    if not valid:
        raise NotChecked("the run has no validation set")
    for dataset in valid:
        rows = subject.rows_of(dataset)
        same = [row for row in rows if _content(row.row) in training]
        details = [f"row {row.index} is row {training[_content(row.row)]} of the training data" for row in same[:3]]
        text = f"{dataset.key}: {len(same)} of {len(rows)} rows are in the training data, too"
        if same and (few := repeated.get(_content(same[0].row))):
            yield not_checked("validation-rows", f"{text}; but the {few}")
            continue
        yield red("validation-rows", text, details) if same else green("validation-rows", text)


def given_answers(subject: Subject) -> Iterator[Finding]:
    """Look for prompts that already hold their answer, such as a question joined with its solution."""
    if subject.kind != "prompt":
        return
    for dataset in subject.training_rows:
        faults, n_known = list[str](), 0
        for row in subject.sample_of(dataset):
            if row.item is None:
                continue
            given = [row.item.record.get(name) for name in _ANSWERS]
            worked = [text.strip() for text in given if isinstance(text, str) and len(text.strip()) >= _LEAST_ANSWER]
            n_known += bool(worked)
            if any(text in row.item.text for text in worked):
                faults.append(f"row {row.index}: ...{row.item.text[-80:]!r}")
        text = f"{dataset.key}: {len(faults)} of {n_known} prompts contain the answer of their row"
        if not n_known:
            yield not_checked("given-answers", f"{dataset.key}: no row has a text of an answer that could stand there")
        elif len(faults) > _MOST_MARKED * n_known:
            yield red("given-answers", f"{text}: the model would learn to copy it", faults[:_EXAMPLES])
        else:
            yield green("given-answers", text, faults[:_EXAMPLES])


def same_answers(subject: Subject) -> Iterator[Finding]:
    """Look for answers that are all the same."""
    if subject.kind not in ("sft", "dpo", "kto"):
        return
    for dataset in subject.training_rows:
        said, asked = list[str](), set[str]()
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        for row in rows:
            of_row = [[_said(turn.message) for turn in turns] for turns in answers_of(subject.kind, row.row)]
            said += ["".join(texts) for texts in of_row[:1]]
            asked.add(text_of_row(subject.kind, row.row, is_asked=True))
        if not said:
            continue
        [(answer, count)] = Counter(said).most_common(1)
        name, text = "same-answers", f"{dataset.key}: {count} of {len(said)} rows have the same answer"
        if count >= _ALL * len(said) and len(asked) >= _LEAST_PAIRS:
            yield red(name, f"{text} to {len(asked)} different prompts: {answer[:_SHOWN]!r}")
        else:
            yield green(name, text)


def _said(message: Mapping[str, Any]) -> str:
    return "\n".join(words_of(message))


def rating_order(subject: Subject) -> Iterator[Finding]:
    """Look for ratings in which the smallest is the best, such as ranks."""
    if subject.kind != "rw":
        return
    for dataset in subject.datasets:
        rows = [row.row["ratings"] for row in subject.sample_of(dataset) if row.row.get("ratings") is not None]
        if not rows:
            continue
        column = dataset.section.columns.renamed_columns().get("ratings", "ratings")
        is_rank = bool(set(column.lower().replace("-", "_").replace(".", "_").split("_")) & set(_SMALL_IS_GOOD))
        n_ranked = sum(_is_permutation(ratings) for ratings in rows)
        are_ranks = n_ranked >= _MOST * len(rows)
        text = f"{dataset.key}: the ratings of {n_ranked} of {len(rows)} rows are the numbers from 1 or 0 on, each once"
        wanted = "the largest rating is the best, so 1 would be the worst"
        if is_rank:
            named = f"{dataset.key}: by its name, the column {column!r} has small numbers for good answers"
            known = f"{text}, and the column is {column!r}" if are_ranks else named
            yield red("rating-order", f"{known}: {wanted}", [f"ratings {ratings}" for ratings in rows[:_EXAMPLES]])
        elif are_ranks and max(map(len, rows)) > 2:
            yield not_checked("rating-order", f"{text}. If they are ranks, negate them: {wanted}")
        else:
            yield green("rating-order", f"{dataset.key}: the ratings of {len(rows)} rows are no ranks")


def _content(row: Any) -> str:
    """Return what makes a row the same as another: all of its fields of text and messages, without white space."""
    fields = {name: row.get(name) for name in _CONTENT if row.get(name) is not None}
    return "".join(json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str).lower().split())


def _fields(row: Any) -> str:
    if not isinstance(row, Mapping):
        return shortened(repr(row))
    return ", ".join(f"{name}: {shortened(repr(value))}" for name, value in row.items() if value is not None)


def _is_permutation(ratings: Sequence[float]) -> bool:
    return len(ratings) > 1 and sorted(ratings) in ([*range(len(ratings))], [*range(1, len(ratings) + 1)])
