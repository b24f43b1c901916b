"""Checks that the parts of a row belong together, by the rare words that a question and its answer share."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.checks.inputs.findings import Finding, green, not_checked, quoted, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, text_of, text_of_row
from areno.data.row_schema import rows_at

_MOST_ROWS = 3000
_BLOCK = 5  # rows that follow each other
_RARE = 0.02  # of the rows have a word that says something about a row
_LEAST_SHARED = 2  # rare words
_LEAST_WORDS = 5  # of an answer: a shorter one need not share any with its question
_CLEARER = 1.5  # times the weight of the words that a row shares with itself
_LARGEST_SHIFT = 50  # rows
_SHIFTED = 0.02  # of the rows fit the row at one distance: by chance, about one in a thousand does
_FOREIGN = 0.2  # of the rows fit any other row better than themselves, and fewer fit themselves
_LEAST_FAULTS = 10
_ALIKE = 0.8  # of the rare words of two questions: an answer to one fits the other, too
_FEW = 0.25  # of the rows
_LEAST_WORK = 40  # characters: a shorter text of a row is no worked solution
_EXAMPLES = 3


@dataclass
class _Matches:
    """For each row, whether its answer or that of another row shares most with its question."""

    own: int = 0
    foreign: list[tuple[int, int]] = field(default_factory=list)  # (row, the row whose answer fits)


def own_answers(subject: Subject) -> Iterator[Finding]:
    """Look for answers that belong to the question of another row, as in two columns of which one is shifted."""
    for dataset in subject.training_rows:
        indices = _blocks(len(dataset.loader.rows), min(_MOST_ROWS, subject.options.most_rows))
        rows = dict(zip(indices, rows_at(dataset.loader.rows, indices), strict=True))
        n_compared = 0
        for name, asked, answers in _columns(subject, dataset, rows):
            found = _match(indices, asked, answers)
            n_compared += found.own + len(found.foreign)
            if (fault := _fault(found, name)) is not None:
                line, of_others = fault
                shown = [
                    f"row {row}: {quoted(asked[indices.index(row)])} fits the answer of row {other}: "
                    f"{quoted(answers[indices.index(other)])}"
                    for row, other in of_others[:_EXAMPLES]
                ]
                yield red("own-answers", f"{dataset.key}: {line}", shown)
                break
        else:
            if n_compared < _LEAST_FAULTS:
                why = "questions and answers share no rare words by which they could be compared"
                yield not_checked("own-answers", f"{dataset.key}: {why}")
            else:
                text = f"{dataset.key}: the answers of {n_compared} rows were compared with the questions of others"
                yield green("own-answers", f"{text}; they belong to their own")


def _fault(found: _Matches, name: str) -> tuple[str, list[tuple[int, int]]] | None:
    """Return (what is wrong, pairs of rows that show it)."""
    shifts = Counter(other - row for row, other in found.foreign if abs(other - row) <= _LARGEST_SHIFT)
    n_all = found.own + len(found.foreign)
    shift, count = shifts.most_common(1)[0] if shifts else (0, 0)
    if count >= max(_LEAST_FAULTS, _SHIFTED * n_all):
        pairs = [pair for pair in found.foreign if pair[1] - pair[0] == shift]
        beside = f"{abs(shift)} row{'s' * (abs(shift) > 1)} {'after' if shift > 0 else 'before'} them"
        text = f"{count} of {n_all} questions, between rows {pairs[0][0]} and {pairs[-1][0]}, fit {name} {beside}"
        perhaps = "perhaps " * (count < _FEW * n_all)
        return f"{text} better than their own: {perhaps}the columns are shifted", pairs
    if len(found.foreign) > max(_LEAST_FAULTS, _FOREIGN * n_all, found.own):
        text = f"{len(found.foreign)} of {n_all} questions fit {name} of another row better than their own"
        return text, found.foreign
    return None


def _blocks(n_rows: int, most: int) -> list[int]:
    """Return the indices of all rows, or of many blocks of rows that follow each other."""
    if n_rows <= most:
        return list(range(n_rows))
    n_blocks = max(2, most // _BLOCK)
    starts = (number * (n_rows - _BLOCK) // (n_blocks - 1) for number in range(n_blocks))
    return sorted({start + place for start in starts for place in range(_BLOCK)})


def _columns(subject: Subject, dataset: Dataset, rows: Mapping[int, Any]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (name, text of each question, text of each answer) of the answers that the rows have."""
    kind, given = subject.kind, list(rows.values())
    asked = [text_of_row(kind, row, is_asked=True) for row in given]
    if kind in ("prompt", "prm"):
        fields = Counter(name for row in given for name, value in row.items() if _is_work(value))
        for name in [name for name, count in fields.items() if count > len(given) / 2 and name != "prompt"]:
            texts = [_joined(row.get(name)) for row in given]
            if sum(text in question for text, question in zip(texts, asked, strict=True)) < len(given) / 2:
                yield f"the text of {name!r}", asked, texts
        return
    answers = [[_said(turns) for turns in answers_of(kind, row)] for row in given]
    names = ("the chosen answer", "the rejected answer") if kind == "dpo" else ("the answer",)
    for number, name in enumerate(names):
        yield name, asked, [texts[number] if number < len(texts) else "" for texts in answers]


def _is_work(value: Any) -> bool:
    return (isinstance(value, str) and len(value) >= _LEAST_WORK) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
    )


def _joined(value: Any) -> str:
    return "\n".join(value) if isinstance(value, list) else str(value or "")


def _said(turns: Sequence[Any]) -> str:
    return "\n".join(text_of(turn.message) for turn in turns)


def _match(indices: Sequence[int], asked: Sequence[str], answers: Sequence[str]) -> _Matches:
    questions, texts = list(map(_words, asked)), list(map(_words, answers))
    n, most = len(texts), max(3, int(_RARE * len(texts)))
    in_texts = Counter(word for words in texts for word in words)
    in_questions = Counter(word for words in questions for word in words)
    rare = {word for word, count in in_texts.items() if count <= most and in_questions[word] <= most}
    asked_rarely = {word for word, count in in_questions.items() if count <= most}
    places: dict[str, list[int]] = {}
    for place, words in enumerate(texts):
        for word in words & rare:
            places.setdefault(word, []).append(place)
    found = _Matches()
    for place, words in enumerate(questions):
        weights, shared = defaultdict[int, float](float), Counter[int]()
        for word in words & rare:
            for other in places[word]:
                weights[other] += math.log(n / in_texts[word])
                shared[other] += 1
        if not weights or len(texts[place]) < _LEAST_WORDS:
            continue
        # Another answer to the same question says nothing, as in rows of good and bad answers.
        asks = words & asked_rarely
        ranked = sorted(weights, key=lambda other: (-weights[other], other != place))
        best = next((at for at in ranked if at == place or not _are_alike(asks, questions[at] & asked_rarely)), None)
        if best is None:
            continue
        if best == place:
            found.own += 1
        elif shared[best] >= _LEAST_SHARED and weights[best] >= _CLEARER * weights[place]:
            found.foreign.append((indices[place], indices[best]))
    return found


def _are_alike(one: set[str], other: set[str]) -> bool:
    return bool(one) and len(one & other) >= _ALIKE * len(one | other)


def _words(text: str) -> set[str]:
    return set("".join(char if char.isalnum() else " " for char in text.lower()).split())
