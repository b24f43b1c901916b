"""Checks of preference data: chosen and rejected answers that are the same, or that a mark alone tells apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from areno.checks.data.texts import end_texts
from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, text_of

_EXAMPLES = 3
_MOST, _APART = 0.95, 0.75  # share of one side that has a mark, by which it has it more often than the other side
_NEARLY_ALL = 0.9  # share of one side that has words which few of the other side have
_LEAST_PAIRS = 20
_ALWAYS, _OFTEN, _LONGER = 0.98, 0.93, 1.3  # of the pairs, of the pairs, times as long
_SHORTEST_CUT = 64  # characters: shorter texts often have the same length by their nature
_BEGIN = 3  # words
_STYLE = 3  # words of each side that the other side hardly has, as in another language
_REFUSALS = (
    "i'm sorry",
    "i am sorry",
    "i can't",
    "i cannot",
    "i won't",
    "unable to",
    "not able to",
    "as an ai",
    "decline",
)
_TEACHES = "is this what the run should teach? It may learn nothing else"
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
        line, is_fault, shown = _difference(subject, sides)
        if not line:
            yield green("pair-marks", f"{dataset.key}: no word, form or length tells chosen from rejected answers")
        elif is_fault:
            yield red("pair-marks", f"{dataset.key}: {line}: they can be told apart by this alone", shown)
        else:
            yield not_checked("pair-marks", f"{dataset.key}: {line}: {_TEACHES}", shown)


def _difference(subject: Subject, sides: Sequence[Sequence[str]]) -> tuple[str, bool, list[str]]:
    """Return (what tells chosen from rejected answers, whether it is surely a fault, examples), the clearest first.

    What an accident leaves is a fault. So are words and lengths, unless the sides are of other kinds: refusals, JSON.
    """
    is_long = float(np.median([len(text) for side in sides for text in side])) >= _SHORTEST_CUT
    is_other_kind = _are_other_kinds(sides)
    found = list[tuple[str, bool, list[str]]]()
    if is_long and (longer := _longer_side(sides)) is not None:
        line, share = longer
        found.append((line, share >= _ALWAYS and not is_other_kind, []))
    accidents, words, forms = _accidents(subject, sides), _phrases(sides, is_long), _forms(sides)
    for name, has in (accidents | words | forms).items():
        shares = [float(np.mean([has(text) for text in side])) for side in sides]
        is_sure = max(shares) >= _MOST and min(shares) <= 1 - _MOST
        if is_sure or (is_long and abs(shares[0] - shares[1]) >= _APART):
            line = f"{shares[0]:.0%} of the chosen answers {name}, and {shares[1]:.0%} of the rejected"
            is_of_all = max(shares) >= _NEARLY_ALL and min(shares) <= 1 - _NEARLY_ALL
            shown = [
                f"{word}: {side[0][:60]!r} ... {side[0][-60:]!r}"
                for word, side in zip(("chosen", "rejected"), sides, strict=True)
            ]
            found.append((line, name in accidents or (name in words and is_of_all and not is_other_kind), shown))
    return max(found, key=lambda each: each[1], default=("", False, []))


def _longer_side(sides: Sequence[Sequence[str]]) -> tuple[str, float] | None:
    """Return (which side is much longer, share of the pairs), None if neither is."""
    ratios = [(len(one) + 1) / (len(other) + 1) for one, other in zip(*sides, strict=True)]
    for name, share in (("chosen", np.mean(np.array(ratios) > 1)), ("rejected", np.mean(np.array(ratios) < 1))):
        if share >= _OFTEN and max(np.median(ratios), 1 / np.median(ratios)) > _LONGER:
            return f"the {name} answer is the longer one in {share:.0%} of {len(ratios)} pairs", float(share)
    return None


_Marks = dict[str, Callable[[str], bool]]  # what answers do -> whether one does it


def _accidents(subject: Subject, sides: Sequence[Sequence[str]]) -> _Marks:
    found: _Marks = {
        "are empty": lambda text: not text.strip(),
        "end with white space": lambda text: text != text.rstrip(),
        "begin with white space": lambda text: text != text.lstrip(),
        "end within a sentence": _is_open,
        "contain <think>": lambda text: "<think>" in text,
        "have no capital letter": lambda text: _is_prose(text) and text == text.lower() and text != text.upper(),
    }
    unseen = [char for char in _chars_of(sides) if char not in " \n\t" and (char.isspace() or not char.isprintable())]
    for mark in (*unseen, *map(str, subject.tokenizer.all_special_tokens)):
        found[f"contain {mark!r}"] = lambda text, mark=mark: mark in text
    return found


def _phrases(sides: Sequence[Sequence[str]], is_long: bool) -> _Marks:
    found: _Marks = {}
    endings = Counter(text.split()[-1] for side in sides for text in side if len(text.split()) > 1)
    for word, _ in endings.most_common(_EXAMPLES):
        found[f"end with {word!r}"] = lambda text, word=word: text.split()[-1:] == [word]
    if not is_long:  # short answers may well begin with the same words
        return found
    for n in range(1, _BEGIN + 1):
        begins = Counter(" ".join(text.split()[:n]) for side in sides for text in side)
        for words, _ in begins.most_common(_EXAMPLES):
            found[f"begin with {words!r}"] = lambda text, words=words: " ".join(text.split()).startswith(words)
    if word := _word_apart(sides):
        found[f"have the word {word!r}"] = lambda text: word in _words(text)
    return found


def _forms(sides: Sequence[Sequence[str]]) -> _Marks:
    return {f"contain {char!r}": lambda text, char=char: char in text for char in _chars_of(sides)}


def _chars_of(sides: Sequence[Sequence[str]]) -> list[str]:
    return sorted({char for side in sides for text in side[:_LEAST_PAIRS] for char in text if not char.isalnum()})


def _is_prose(text: str) -> bool:
    return sum(char.isalpha() or char == " " for char in text) > 0.8 * len(text) and len(text.split()) > _BEGIN


def _is_open(text: str) -> bool:
    """Whether a text of several words ends within a sentence, and not with a line of a list."""
    is_long = len(text.split()) > _BEGIN or (not text.isascii() and len(text) > _SHORTEST_CUT / 2)
    last = text.strip().rpartition("\n")[2]
    return is_long and (last[-1].isalnum() or last[-1] in ",;") and last.split()[0].strip("*.)").isalpha()


def _are_other_kinds(sides: Sequence[Sequence[str]]) -> bool:
    """Whether one side is refusals, JSON, code, marked up or of few words, or each side has words of its own."""
    for is_kind in _KINDS:
        shares = [float(np.mean([is_kind(text) for text in side])) for side in sides]
        if abs(shares[0] - shares[1]) >= _APART:
            return True
    counts, n = _counts_of(sides), len(sides[0])
    own = [
        sum(one[word] >= _NEARLY_ALL * n and other[word] <= (1 - _NEARLY_ALL) * n for word in one)
        for one, other in (counts, counts[::-1])
    ]
    return min(own) >= _STYLE


def _is_refusal(text: str) -> bool:
    plain = text.lower().replace("\u2019", "'")
    return any(words in plain for words in _REFUSALS)


def _is_json(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict | list)
    return False


_KINDS: Sequence[Callable[[str], bool]] = (
    _is_refusal,
    _is_json,
    lambda text: "```" in text,
    lambda text: text.lstrip().startswith("<"),
    lambda text: len(text.split()) <= _BEGIN,
)


def _counts_of(sides: Sequence[Sequence[str]]) -> list[Counter[str]]:
    return [Counter(word for text in side for word in _words(text)) for side in sides]


def _word_apart(sides: Sequence[Sequence[str]]) -> str:
    """Return the word that is in most answers of one side and in fewest of the other."""
    counts = _counts_of(sides)
    words = counts[0].keys() | counts[1].keys()
    return max(sorted(words), key=lambda word: abs(counts[0][word] - counts[1][word]), default="")


def _words(text: str) -> set[str]:
    """Return the words of a text, without those in bold or in a heading, which are a form."""
    lines = [line for line in text.lower().split("\n") if not line.startswith("#")]
    plain = " ".join("".join(line.split("**")[::2]) for line in lines)
    return {word.strip(".,:;!?()[]*'\"") for word in plain.split()}
