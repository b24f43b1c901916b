"""Checks that no texts of a column were cut: they would pile up at a largest length, or end within a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Dataset, Subject

_EXAMPLES = 3
_SHOWN = 60  # characters of a text
_LEAST_TEXTS = 20
_SHORTEST_CUT = 64  # characters: shorter texts often have the same length by their nature
_CUT = 0.02  # of the texts of a column that have its largest length
_PILED = 8  # times as many as have one of the other lengths on average
_LONGEST = 0.05  # of the texts
_OPEN = 0.6  # of the longest texts end within a sentence, and a third as many of the shorter ones
_OPEN_SIDE = 0.4  # of the longer answers of one side end within a sentence, and a fourth as many of the other
_LEAST_LENGTHS = 8  # with fewer, the texts may be made of a form
_PAST = 0.02  # as many as have the largest length may have a larger one
_MOST_TOKENIZED = 1000  # texts of a column
_LONGEST_TEXT = 20_000  # characters
_LEFT_OUT = ("...", "\u2026")  # after a cut
_SENTENCE_ENDS = tuple(".!?:;)]}\"'`*>|$\u3002\uff01\uff1f\u201d\u2019\u2026")


def cut_texts(subject: Subject) -> Iterator[Finding]:
    """Look for columns whose texts were cut: many of them have the largest number of characters, words or tokens."""
    for dataset in subject.datasets:
        columns: dict[str, dict[str, int]] = {}  # column -> text -> row
        for row in subject.rows_of(dataset):
            for name, text in _texts_of(row.given):
                columns.setdefault(name, {}).setdefault(text, row.index)
        faults = [found for name, texts in columns.items() for found in _cut_column(subject, name, texts)]
        faults += _cut_side(subject, dataset, columns)
        clearest = {name: (line, ends) for name, line, ends in reversed(faults)}
        for name, (line, ends) in clearest.items():
            shown = [f"row {columns[name][text]}: ...{text[-_SHOWN:]!r}" for text in ends[:_EXAMPLES]]
            yield red("cut-texts", f"{dataset.key}: {line}", shown)
        if not faults:
            looked = ", ".join(map(repr, columns))
            text = f"{dataset.key}: the texts of {looked} do not pile up at a largest number of characters, words or"
            yield green("cut-texts", f"{text} tokens, and the longest end like the others")


def _cut_column(subject: Subject, name: str, texts: Mapping[str, int]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (column, what is wrong, texts that show it), the clearest first."""
    lengths = Counter(map(len, texts))
    longest = max(lengths)
    n = lengths.pop(longest)
    is_pile = n > max(_CUT * len(texts), _PILED * float(np.mean([*lengths.values()] or [n])))
    # A cut falls within a sentence. Texts of a form with numbers in it have one length and whole sentences.
    n_cut = sum(_is_open(each) or each.endswith(_LEFT_OUT) for each in texts if len(each) == longest)
    if longest >= _SHORTEST_CUT and is_pile and n_cut >= n / 2:
        text = f"{n} texts of {name!r} have exactly {longest} characters, and none has more"
        text += ": they seem to be cut there, so that their ends are lost"
        yield name, text, [each for each in texts if len(each) == longest]
        return
    if (pile := _pile_of_lengths(subject, list(texts))) is not None:
        unit, length, piled = pile
        n_open = sum(_is_open(text) for text in piled)
        text = f"{len(piled)} of {len(texts)} texts of {name!r} have {length} {unit}, none or nearly none has more, and"
        yield name, f"{text} {n_open} of these end within a sentence: they seem to be cut at {length} {unit}", piled
    if (open_ends := _open_ends(list(texts))) is not None:
        text = f"{open_ends[0]:.0%} of the longest texts of {name!r} end within a sentence, and {open_ends[1]:.0%} of"
        yield name, f"{text} the shorter ones: the longest seem to be cut at a number of tokens", open_ends[2]


def _pile_of_lengths(subject: Subject, texts: list[str]) -> tuple[str, int, list[str]] | None:
    """Return (unit, length, texts of this length) if many texts have the largest length and end within a sentence."""
    texts = texts[:: max(1, -(-len(texts) // _MOST_TOKENIZED))]
    if len(texts) < _LEAST_TEXTS or max(map(len, texts)) < _SHORTEST_CUT:
        return None
    for unit in ("tokens", "words"):
        if unit == "tokens":
            encoded = subject.tokenizer([text[:_LONGEST_TEXT] for text in texts], add_special_tokens=False)["input_ids"]
            sizes = list(map(len, encoded))
        else:
            sizes = [len(text.split()) for text in texts]
        lengths = Counter(sizes)
        [(length, n)] = lengths.most_common(1)
        others = [count for size, count in lengths.items() if size != length]
        n_longer = sum(count for size, count in lengths.items() if size > length + 1)  # a cut may fall within a letter
        piled = [text for text, size in zip(texts, sizes, strict=True) if size == length]
        is_pile = n > max(_CUT * len(texts), _PILED * float(np.mean(others or [n]))) and n_longer <= _PAST * n
        is_long = len(lengths) >= _LEAST_LENGTHS and float(np.median(list(map(len, piled)))) >= _SHORTEST_CUT
        if is_pile and is_long and sum(map(_is_open, piled)) >= _OPEN * n:
            return unit, length, piled
    return None


def _cut_side(
    subject: Subject, dataset: Dataset, columns: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, str, list[str]]]:
    """Look for one side of pairs whose long answers end within a sentence, as after a limit of another tokenizer."""
    renamed = dataset.section.columns.renamed_columns()
    plain = [renamed.get(side, side) for side in ("chosen", "rejected")]
    forms = ("{} of assistant", "{} of gpt", "{}")
    sides = [next((form.format(name) for form in forms if form.format(name) in columns), "") for name in plain]
    if subject.kind != "dpo" or not all(sides):
        return
    for name, other in (sides, sides[::-1]):
        long = [[text for text in columns[each] if len(text) >= _SHORTEST_CUT] for each in (name, other)]
        if min(map(len, long)) < _LEAST_TEXTS:
            continue
        own, theirs = ([text for text in part if _is_open(text)] for part in long)
        shares = len(own) / len(long[0]), len(theirs) / len(long[1])
        if shares[0] > _OPEN_SIDE and shares[0] > 4 * shares[1]:
            text = f"{shares[0]:.0%} of the {len(long[0])} longer texts of {name!r} end within a sentence, and of"
            yield name, f"{text} {other!r} {shares[1]:.0%}: they seem to be cut", own


def _is_open(text: str) -> bool:
    return not text.rstrip().endswith(_SENTENCE_ENDS)


def _open_ends(texts: list[str]) -> tuple[float, float, list[str]] | None:
    """Return (share of the longest texts that end within a sentence, of the shorter ones, examples), None if alike."""
    texts = sorted(texts, key=len)
    longest, shorter = texts[-max(1, int(_LONGEST * len(texts))) :], texts[: len(texts) // 2]
    if len(longest) < _LEAST_TEXTS // 2 or len(longest[0]) < _SHORTEST_CUT:
        return None
    ends = [[text for text in part if _is_open(text)] for part in (longest, shorter)]
    shares = len(ends[0]) / len(longest), len(ends[1]) / len(shorter)
    return (*shares, ends[0][:_EXAMPLES]) if shares[0] > max(_OPEN, 3 * shares[1]) else None


def _texts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (column, text) of each text in a row. Messages are apart by their roles."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        role = value.get("role") if "content" in value else value.get("from") if "value" in value else None
        for key, each in value.items():
            yield from _texts_of(each, f"{name} of {role}" if isinstance(role, str) and name else name or str(key))
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts_of(each, name)
