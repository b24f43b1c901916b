"""Checks of preferences by the scores that their own rows have: pairs the other way round, and swapped labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import text_of_row

_SCORES = {
    "score",
    "scores",
    "rating",
    "ratings",
    "reward",
    "rewards",
    "quality",
    "stars",
    "overall",
    "points",
    "votes",
}
_SMALL_IS_GOOD = {"loss", "rank", "perplexity", "ppl", "error", "toxicity", "harm", "count", "length", "tokens", "id"}
_MARGINS = ("margin", "score_diff", "score_margin", "score_difference", "reward_margin", "rating_diff")
_LEAST = 3  # rows
_FEW = 0.01  # of the rows: scores of people and of judges are not exact, and some users change their mind
_LEAST_ROWS = 20
_AGREE = 0.85  # of the labels are on the right side of one score, so that the others look swapped
_FEW_LABELS = 0.02  # of the answers
_EXAMPLES = 3


def pair_scores(subject: Subject) -> Iterator[Finding]:
    """Look for pairs whose own scores, or another pair, say that the rejected answer is the better one."""
    if subject.kind not in ("dpo", "rw"):
        return
    for dataset in subject.datasets:
        faults, n_scored = list[str](), 0
        preferred: dict[str, int] = {}
        rows = [row for row in subject.rows_of(dataset) if "chosen" in row.row]
        pairs = [row for row in rows if row.row["chosen"] != row.row["rejected"]]  # else the run leaves it out
        columns = dataset.section.columns.renamed_columns()
        for row in pairs:
            preferred.setdefault(_pair(row.row, "chosen", "rejected"), row.index)
        for row in pairs:
            scores = list(_scores(row.given, columns))
            n_scored += bool(scores)
            worse = [(name, chosen, rejected) for name, chosen, rejected in scores if chosen < rejected]
            if 2 * len(worse) > len(scores):
                name, chosen, rejected = worse[0]
                faults.append(f"row {row.index}: chosen has the {name} {chosen:g}, rejected {rejected:g}")
            elif (other := preferred.get(_pair(row.row, "rejected", "chosen"))) is not None:
                faults.append(f"row {row.index}: row {other} has the same answers, the other way round")
        if faults:
            text = f"{dataset.key}: in {len(faults)} of {len(pairs)} pairs, the rejected answer may be the better one"
            verdict = red if len(faults) > _FEW * len(pairs) else green
            yield verdict("pair-scores", text, faults[:_EXAMPLES])
        elif n_scored:
            yield green("pair-scores", f"{dataset.key}: in all {n_scored} pairs, chosen has the better score")
        else:
            why = f"{dataset.key}: the rows have no scores; only contradictions of pairs were looked for"
            yield not_checked("pair-scores", why)


def _pair(row: Any, better: str, worse: str) -> str:
    return json.dumps([row.get("prompt"), row[better], row[worse]], sort_keys=True, default=str)


def _scores(row: Any, columns: Mapping[str, str]) -> Iterator[tuple[str, float, float]]:
    """Yield (name, score of the chosen answer, of the rejected one) of each score that both have in a row.

    A score in the file belongs to the column whose name it has. `columns` says as which answer the run reads a column.
    """
    sides: list[dict[str, float]] = [{}, {}]
    for path, value in _numbers(row):
        for field, own in zip(("chosen", "rejected"), sides, strict=True):
            name = columns.get(field, field).lower()
            words = set(path.replace(name, " ").replace("_", " ").replace("-", " ").split())
            if name in path and words & _SCORES and not words & _SMALL_IS_GOOD:
                own[" ".join(path.replace(name, "").replace("_", " ").split())] = value
            elif path in _MARGINS:
                own[path] = value if field == "chosen" else 0.0
    for name in sides[0].keys() & sides[1].keys():
        yield name, sides[0][name], sides[1][name]


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(each, f"{path} {key}".strip().lower())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def labels(subject: Subject) -> Iterator[Finding]:
    """Look for labels that are all the same, that two rows give one answer, or that scores of the rows contradict."""
    if subject.kind != "kto":
        return
    for dataset in subject.training_rows:
        rows = [row for row in subject.rows_of(dataset) if row.item is not None]
        n_good = sum(bool(row.row["label"]) for row in rows)
        text = f"{dataset.key}: {n_good} answers are labelled good, {len(rows) - n_good} bad"
        fewer = min(n_good, len(rows) - n_good)
        given: dict[str, set[bool]] = {}
        for row in rows:
            given.setdefault(text_of_row("kto", row.row), set()).add(bool(row.row["label"]))
        n_both = sum(len(each) > 1 for each in given.values())
        if rows and not fewer:
            yield red("labels", f"{text}: nothing tells one from the other")
        elif len(rows) > 5 * _LEAST_ROWS and fewer < _FEW_LABELS * len(rows):
            yield red("labels", f"{text}: hardly anything tells one from the other")
        elif n_both > max(_LEAST, _FEW * len(given)):
            yield red("labels", f"{text}, but {n_both} of {len(given)} answers have both labels")
        elif fault := next(_contradicted(rows), None):
            yield red("labels", f"{text}, but {fault[0]}", fault[1])
        else:
            yield green("labels", f"{text}, and {n_both} both" if n_both else text)


def _contradicted(rows: Sequence[EncodedRow]) -> Iterator[tuple[str, list[str]]]:
    """Yield (what is wrong, examples) of each column of scores that contradicts labels: most of them, or some."""
    names = Counter(name for row in rows if isinstance(row.given, Mapping) for name, _ in _numbers(row.given))
    for name in names:
        if not set(name.replace("_", " ").split()) & _SCORES:
            continue
        scored = [
            (value, bool(row.row["label"]), row) for row in rows for key, value in _numbers(row.given) if key == name
        ]
        scored.sort(key=lambda each: each[0])
        n_good, n = sum(label for _, label, _ in scored), len(scored)
        if n < _LEAST_ROWS or not 0 < n_good < n:
            continue
        # Good answers are those from a place on: the place with the fewest contradictions.
        wrong = [n - n_good]  # if all are good
        for _, label, _ in scored:
            wrong.append(wrong[-1] + (1 if label else -1))
        places = [at for at in range(n + 1) if at in (0, n) or scored[at - 1][0] < scored[at][0]]
        place = min(places, key=wrong.__getitem__)
        if wrong[place] == min(n_good, n - n_good):
            means = [
                sum(v for v, label, _ in scored if label is side) / max(1, n_side)
                for side, n_side in ((True, n_good), (False, n - n_good))
            ]
            if means[0] < means[1]:
                yield (
                    f"the column {name!r} of the good ones is on average {means[0]:.3g}, of the bad {means[1]:.3g}",
                    [],
                )
            continue
        odd = [row for at, (_, label, row) in enumerate(scored) if label != (at >= place)]
        if max(_LEAST, _FEW * n) < len(odd) <= (1 - _AGREE) * n:
            limit = scored[min(place, n - 1)][0]
            shown = [f"row {row.index}: label {bool(row.row['label'])}" for row in odd[:_EXAMPLES]]
            yield f"the column {name!r} of the good ones is {limit:g} or more, except in {len(odd)} of {n} rows", shown
