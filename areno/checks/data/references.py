"""Checks that the short answer of a row is the one that a worked text of the same row ends with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from areno.checks.inputs.findings import Finding, green, not_checked, quoted, red
from areno.checks.inputs.known_answers import number_of
from areno.checks.inputs.subject import Dataset, Subject
from areno.data.row_schema import rows_at
from areno.reward_fns.answers import marked_answer
from areno.reward_fns.math_reward import reward_fn

_AT_ONCE = 512
_MOST_ROWS = 100_000
_ANSWERS = ("answer", "final_answer", "solution", "solutions", "ground_truth", "expected_answer", "target", "gold")
_LONGEST = 60  # characters of a short answer
_LONGER = 10  # characters, by which a worked text is longer
_LEAST_ROWS = 20
_AGREE = 0.9  # of the rows: else the text may have the answer of a model
_MOST = 0.8  # of the answers that differ
_NEAR = 0.03
_BLOCK = 1.3  # times as many rows as there are, from the first to the last of them
_OFTEN = 0.5  # of the texts of a column have a mark of the answer
_LEAST_UNMARKED = 3  # rows: the last number of a text may well be no answer
_MOST_COMPARED = 200  # by value, which takes milliseconds
_EXAMPLES = 3
_SHOWN = 60  # characters


@dataclass
class _Compared:
    n: int = 0
    other: list[tuple[int, str, str, str]] = field(default_factory=list)  # (row, answer, that of the text, text)
    same: dict[int, str] = field(default_factory=dict)  # row -> answer


def answers_of_texts(subject: Subject) -> Iterator[Finding]:
    """Compare the answer of each row with the marked answer, or the last number, of the worked texts beside it."""
    if subject.kind not in ("prompt", "sft"):
        return
    for dataset in subject.datasets:
        columns = _compared(subject, dataset)
        faults, agreed = list[Finding](), list[str]()
        for (name, is_marked), found in columns.items():
            if found.n < _LEAST_ROWS:
                continue
            if (why := _pattern(found) if is_marked else None) is not None:
                shown = [
                    f"row {row}: the answer is {quoted(answer)}, {name} has {quoted(own)}"
                    for row, answer, own, _ in found.other[:_EXAMPLES]
                ]
                text = f"{dataset.key}: in {len(found.other)} of {found.n} rows, the answer is not that which column"
                faults.append(red("answer-columns", f"{text} {name!r} marks: {why}", shown))
                continue
            if len(found.other) > (1 - _AGREE) * found.n:
                continue
            wrong = _different(found.other)
            where = f"that which column {name!r} marks" if is_marked else f"the last number of column {name!r}"
            if len(wrong) >= (1 if is_marked else _LEAST_UNMARKED):
                text = (
                    f"{dataset.key}: in {len(wrong)} of {found.n} rows, the answer is not {where}; in the others it is"
                )
                shown = [
                    f"row {row}: the answer is {quoted(answer)}, {name} has {quoted(own)}: ...{said[-_SHOWN:]!r}"
                    for row, answer, own, said in wrong[:_EXAMPLES]
                ]
                faults.append(red("answer-columns", text, shown))
            else:
                agreed.append(f"{where} ({found.n} rows)")
        yield from faults
        if agreed and not faults:
            yield green("answer-columns", f"{dataset.key}: the answer of a row is {', '.join(agreed)}")
        elif not faults and subject.kind == "prompt":
            yield not_checked("answer-columns", f"{dataset.key}: no other column of the rows ends with their answer")


def _pattern(found: _Compared) -> str | None:
    """Return how the answers that differ come from those of the texts: shifted by rows, or rounded."""
    if len(found.other) < max(_LEAST_ROWS, (1 - _AGREE) * found.n):
        return None
    of_texts = {**found.same, **{row: own for row, _, own, _ in found.other}}
    for shift in (1, -1, 2, -2):
        pairs = [(answer, of_texts.get(row + shift)) for row, answer, _, _ in found.other]
        if sum(other is not None and _plain(answer) == _plain(other) for answer, other in pairs) > _MOST * len(pairs):
            first, last = found.other[0][0], found.other[-1][0]
            beside = f"{abs(shift)} row{'s' * (abs(shift) > 1)} {'after' if shift > 0 else 'before'}"
            return f"between rows {first} and {last}, it is that of the text {beside} it"
    values = [(_value(answer), _value(own)) for _, answer, own, _ in found.other]
    known = [(one, other) for one, other in values if one is not None and other is not None]
    near = [abs(one - other) <= max(0.5, _NEAR * abs(other)) or _rounds(one, other) for one, other in known]
    if sum(near) > _MOST * len(values):
        return "it seems to be rounded or cut"
    if len(found.other) < found.n / 2 and found.other[-1][0] - found.other[0][0] < _BLOCK * len(found.other):
        return f"all of them are between rows {found.other[0][0]} and {found.other[-1][0]}"
    return None


def _rounds(one: float, other: float) -> bool:
    return any(one in (round(other, n), other // 10**-n * 10**-n) for n in (0, -1, -2, -3))


def _compared(subject: Subject, dataset: Dataset) -> dict[tuple[str, bool], _Compared]:
    """Return (column, whether its texts mark their answer) -> how the answers of the rows agree with it."""
    rows = dataset.loader.rows
    renamed = dataset.section.columns.renamed_columns()
    skipped = {"prompt", "solutions", renamed.get("prompt", "prompt")}
    indices = range(0, len(rows), max(1, -(-len(rows) // _MOST_ROWS)))
    compared = dict[tuple[str, bool], _Compared]()
    for start in range(0, len(indices), _AT_ONCE):
        part = indices[start : start + _AT_ONCE]
        for index, row in zip(part, rows_at(rows, part), strict=True):
            answer = _answer_of(subject, row) if isinstance(row, Mapping) else ""
            for name, text in row.items() if answer else ():
                if name in skipped or not isinstance(text, str) or len(text) < len(answer) + _LONGER:
                    continue
                if (marked := marked_answer(text)) is not None:
                    _add(compared.setdefault((name, True), _Compared()), index, answer, marked, text)
                elif _value(answer) is not None and (numbers := _numbers(text)):
                    # A number that stands elsewhere in the text may well be the answer.
                    is_there = any(_value(number) == _value(answer) for number in numbers)
                    own = answer if is_there else numbers[-1]
                    _add(compared.setdefault((name, False), _Compared()), index, answer, own, text)
    largest = {name: max(each.n for (other, _), each in compared.items() if other == name) for name, _ in compared}
    return {key: found for key, found in compared.items() if found.n > _OFTEN * largest[key[0]]}


def _answer_of(subject: Subject, row: Mapping[str, Any]) -> str:
    """Return the short answer of a row, or an empty text."""
    for name in ("solutions",) if subject.kind == "prompt" else _ANSWERS:
        given = row.get(name)
        given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        if isinstance(given, str | int | float) and not isinstance(given, bool) and 0 < len(str(given)) <= _LONGEST:
            return marked_answer(str(given)) or str(given).strip()
    return ""


def _add(found: _Compared, index: int, answer: str, own: str, text: str) -> None:
    found.n += 1
    is_same = _plain(answer) == _plain(own) or (_value(own) is not None and _value(answer) == _value(own))
    if is_same:
        found.same[index] = answer
    else:
        found.other.append((index, answer, own, text))


def _numbers(text: str) -> list[str]:
    parts = "".join(char if char in "-.,0123456789" else " " for char in text.replace("-", " -")).split()
    found = [part.rstrip("-.,").lstrip(".,") for part in parts]
    return [part for part in found if part and number_of(part) is not None]


def _plain(text: str) -> str:
    return "".join(text.lower().split()).strip("$.*")


def _value(text: str) -> float | None:
    return number_of(text.strip().strip("$€£%*. ").replace(" ", ""))


@dataclass(frozen=True)
class _Asked:
    completion: str
    solutions: str


def _different(cases: list[tuple[int, str, str, str]]) -> list[tuple[int, str, str, str]]:
    """Return the cases with other values, not only other texts. Formulas are compared in at most _MOST_COMPARED."""
    numbers = [_value(answer) is not None and _value(own) is not None for _, answer, own, _ in cases]
    formulas = [case for case, is_number in zip(cases, numbers, strict=True) if not is_number][:_MOST_COMPARED]
    wrong = {case[0] for case in formulas if not (_is_right(case[1], case[2]) or _is_right(case[2], case[1]))}
    return [case for case, is_number in zip(cases, numbers, strict=True) if is_number or case[0] in wrong]


def _is_right(answer: str, solution: str) -> bool:
    """Whether the built-in reward for mathematics takes the answer, or cannot read one of both."""
    try:
        return reward_fn(_Asked(f"\\boxed{{{answer}}}", solution)) > 0
    except Exception:  # math-verify and sympy raise many kinds of errors
        return True
