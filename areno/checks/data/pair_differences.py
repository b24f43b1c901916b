"""Checks of preference data: chosen and rejected answers that are the same, or that a mark alone tells apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from areno.checks.data.texts import end_texts
from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, text_of

_EXAMPLES = 3
_MOST, _APART = 0.95, 0.75  # share of one side that has a mark, by which it has it more often than the other side
_LEAST_PAIRS = 20
_ALWAYS, _LONGER = 0.93, 1.3  # of the pairs, times as long
_SHORTEST_CUT = 64  # characters: shorter texts often have the same length by their nature
_BEGIN = 3  # words
_MOST_SAME, _MOST_LEFT_OUT = 0.02, 0.2  # of the pairs. A run leaves out those that are equal to the letter


def same_pairs(subject: Subject) -> Iterator[Finding]:
    """Look for pairs whose two answers are the same, but for white space, case and punctuation."""
    if subject.kind != "dpo":
        return
    for dataset in subject.training_rows:
        pairs = [(row.index, *pair) for row, pair in _pairs(subject, dataset)]
        same = [(index, chosen) for index, chosen, rejected in pairs if _plain(chosen) == _plain(rejected)]
        n_left_out = sum(chosen == rejected for _, chosen, rejected in pairs)
        text = f"{dataset.key}: in {len(same)} of {len(pairs)} pairs, chosen and rejected are the same text"
        most = max(_EXAMPLES, _MOST_SAME * len(pairs))
        if len(same) - n_left_out > most or n_left_out > max(most, _MOST_LEFT_OUT * len(pairs)):
            shown = [f"row {index}: {chosen[:60]!r}" for index, chosen in same[:_EXAMPLES]]
            yield red("same-pairs", f"{text}: nothing tells the better one, and equal ones are left out", shown)
        else:
            yield green("same-pairs", text)


def _pairs(subject: Subject, dataset: Dataset) -> Iterator[tuple[EncodedRow, tuple[str, str]]]:
    """Yield (row, (text of the chosen answer, of the rejected one)). Equal ones are there, too."""
    for row in subject.rows_of(dataset):
        if "chosen" in row.row:
            sides = [turns[-1] if turns else None for turns in answers_of(subject.kind, row.row)]
            texts = ["" if turn is None else text_of(turn.message) or "\n".join(turn.words) for turn in sides]
            yield row, (texts[0], texts[1])


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum()) or "".join(text.split())


def pair_marks(subject: Subject) -> Iterator[Finding]:
    """Look for a mark that tells chosen from rejected answers, whatever they say: both would be learned by it alone."""
    if subject.kind != "dpo":
        return
    ends = end_texts(subject)
    for dataset in subject.training_rows:
        sides: list[list[str]] = [[], []]
        for row in subject.sample_of(dataset):
            if row.item is not None:
                for side, turns in zip(sides, answers_of(subject.kind, row.row), strict=True):
                    said = text_of(turns[-1].message) if turns else ""
                    for mark in ends:  # see end_tokens
                        said = said.replace(mark, "")
                    side.append(said)
        if len(sides[0]) < _LEAST_PAIRS:
            yield not_checked("pair-marks", f"{dataset.key}: it has fewer than {_LEAST_PAIRS} pairs")
            continue
        if (longer := _longer_side(sides)) is not None:
            yield red("pair-marks", f"{dataset.key}: {longer}: they can be told apart by this alone")
            continue
        is_long = float(np.median([len(text) for side in sides for text in side])) >= _SHORTEST_CUT
        for name, has in _marks(subject, sides, is_long).items():
            shares = [float(np.mean([has(text) for text in side])) for side in sides]
            is_sure = max(shares) >= _MOST and min(shares) <= 1 - _MOST
            if is_sure or (is_long and abs(shares[0] - shares[1]) >= _APART):
                text = (
                    f"{dataset.key}: {shares[0]:.0%} of the chosen answers {name}, and {shares[1]:.0%} of the rejected"
                )
                shown = [
                    f"{word}: {side[0][:60]!r} ... {side[0][-60:]!r}"
                    for word, side in zip(("chosen", "rejected"), sides, strict=True)
                ]
                yield red("pair-marks", f"{text}: they can be told apart by this alone", shown)
                break
        else:
            yield green("pair-marks", f"{dataset.key}: no word, form or length tells chosen from rejected answers")


def _longer_side(sides: Sequence[Sequence[str]]) -> str | None:
    """Return which side is much longer in all pairs, None if neither is."""
    ratios = [(len(one) + 1) / (len(other) + 1) for one, other in zip(*sides, strict=True)]
    if float(np.median([len(text) for side in sides for text in side])) < _SHORTEST_CUT:
        return None
    for name, share in (("chosen", np.mean(np.array(ratios) > 1)), ("rejected", np.mean(np.array(ratios) < 1))):
        if share >= _ALWAYS and max(np.median(ratios), 1 / np.median(ratios)) > _LONGER:
            return f"the {name} answer is the longer one in {share:.0%} of {len(ratios)} pairs"
    return None


def _marks(subject: Subject, sides: Sequence[Sequence[str]], is_long: bool) -> Mapping[str, Callable[[str], bool]]:
    found: dict[str, Callable[[str], bool]] = {
        "are empty": lambda text: not text.strip(),
        "end with white space": lambda text: text != text.rstrip(),
        "begin with white space": lambda text: text != text.lstrip(),
        "end a sentence": lambda text: text.rstrip()[-1:] in tuple(".!?\u3002\uff01\uff1f"),
        "contain <think>": lambda text: "<think>" in text,
        "have no capital letter": lambda text: text == text.lower() and text != text.upper(),
    }
    endings = Counter(text.split()[-1] for side in sides for text in side if len(text.split()) > 1)
    for word, _ in endings.most_common(_EXAMPLES):
        found[f"end with {word!r}"] = lambda text, word=word: text.split()[-1:] == [word]
    if is_long:  # short answers may well begin with the same words
        for n in range(1, _BEGIN + 1):
            begins = Counter(" ".join(text.split()[:n]) for side in sides for text in side)
            for words, _ in begins.most_common(_EXAMPLES):
                found[f"begin with {words!r}"] = lambda text, words=words: " ".join(text.split()).startswith(words)
    chars = {char for side in sides for text in side[:_LEAST_PAIRS] for char in text if not char.isalnum()}
    for char in sorted(chars):
        found[f"contain {char!r}"] = lambda text, char=char: char in text
    for token in map(str, subject.tokenizer.all_special_tokens):
        found[f"contain {token!r}"] = lambda text, token=token: token in text
    if is_long and (word := _word_apart(sides)):
        found[f"have the word {word!r}"] = lambda text: word in _words(text)
    return found


def _word_apart(sides: Sequence[Sequence[str]]) -> str:
    """Return the word that is in most answers of one side and in fewest of the other."""
    counts = [Counter(word for text in side for word in _words(text)) for side in sides]
    words = counts[0].keys() | counts[1].keys()
    return max(sorted(words), key=lambda word: abs(counts[0][word] - counts[1][word]), default="")


def _words(text: str) -> set[str]:
    return {word.strip(".,:;!?()[]*'\"") for word in text.lower().split()}
