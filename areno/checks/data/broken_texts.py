"""Checks of texts that were broken on their way: encoded, run together, doubled, or with something missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from areno.checks.inputs.findings import Finding, green, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, text_of, text_of_row, words_of

_EXAMPLES = 3
_SHOWN = 60  # characters of a text
_MOST_ROWS = 5000
_LEAST = 3  # texts
_FEW = 0.005  # of the texts
_MOST_QUOTED = 0.5  # of the texts: many may well be a quotation
_MOST_TAGGED = 0.2  # of the texts: some may well be about HTML
_ENTITIES = ("&lt;", "&gt;", "&amp;", "&quot;", "&apos;", "&nbsp;", "&#39;", "&#34;", "&#x27;", "&#x2F;")
_TAGS = ("<br>", "<br/>", "<br />", "<p>", "</p>", "</div>", "</span>", "</li>")
_CODE = ("```", "\\begin{", "def ", "#include", "printf(", "print(", "console.log")
_NOT_ESCAPED = frozenset("\"'`)%,")  # follow on a backslash and an n in code
_INVISIBLE = {chr(code) for code in (*range(9), 11, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0x2060, 0xFEFF)}
_LEAST_JOINED = 3
_LEAST_LONG = 40  # characters
_PLACES = ("question", "prompt", "instruction", "input", "context", "problem", "query", "user_input", "text")
_NOTHING = ("none", "nan", "null", "<na>", "undefined")
_NAMED = ("assistant:", "ai:", "bot:", "gpt:", "chatbot:", "model:", "response:", "<assistant>")
_NEXT_TURN = ("\nuser:", "\nhuman:", "\nq:", "\nquestion:", "\n### human", "\n### user", "\n<user>")


def encoded_texts(subject: Subject) -> Iterator[Finding]:
    """Look for texts that an export has encoded and nothing has decoded, such as a backslash and n for a line break."""
    for dataset in subject.datasets:
        faults = _faults_of_texts(subject, dataset, _ENCODED)
        for line, shown in faults:
            yield red("encoded-texts", f"{dataset.key}: {line}: they were not decoded", shown)
        if not faults:
            yield green("encoded-texts", f"{dataset.key}: no escapes, entities or wrong encodings in the texts")


def filled_texts(subject: Subject) -> Iterator[Finding]:
    """Look for texts in which something is missing: empty ones, None, and names of fields that nothing replaced."""
    for dataset in subject.datasets:
        faults = _faults_of_texts(subject, dataset, _UNFILLED)
        for line, shown in faults:
            yield red("filled-texts", f"{dataset.key}: {line}", shown)
        if not faults:
            yield green("filled-texts", f"{dataset.key}: no text is empty or has a place that was not filled")


_Fault = tuple[str, float, Callable[[str, bool], bool]]  # (what texts are, share that may be so, test (text, is asked))


def _faults_of_texts(subject: Subject, dataset: Dataset, kinds: Sequence[_Fault]) -> list[tuple[str, list[str]]]:
    """Return (line, examples) of each kind of fault that too many texts of prompts, answers or solutions have."""
    faults = dict[str, tuple[str, list[str]]]()
    for name, texts in _texts_by_role(subject, dataset).items():
        is_asked = name == "prompts"
        for what, most, has in kinds:
            found = [(index, text) for index, text in texts if has(text, is_asked)]
            if len(found) > max(_LEAST, most * len(texts)):
                shown = [f"row {index}: {text[: 2 * _SHOWN]!r}" for index, text in found[:_EXAMPLES]]
                faults.setdefault(what, (f"{len(found)} of {len(texts)} {name} {what}", shown))
    return list(faults.values())


def _texts_by_role(subject: Subject, dataset: Dataset) -> dict[str, list[tuple[int, str]]]:
    """Return name -> (index of the row, text) of prompts, answers and short reference answers."""
    found: dict[str, list[tuple[int, str]]] = {}
    names = ("chosen answers", "rejected answers") if subject.kind == "dpo" else ("answers",)
    rows = subject.rows_of(dataset)
    for row in rows[:: max(1, -(-len(rows) // _MOST_ROWS))]:
        if row.item is None:
            continue
        found.setdefault("prompts", []).append((row.index, text_of_row(subject.kind, row.row, is_asked=True)))
        if subject.kind == "prompt":
            given = row.row.get("solutions")
            given = given[0] if isinstance(given, list) and len(given) == 1 else given
            text = json.dumps(given) if isinstance(given, list | dict) else "" if given is None else str(given)
            found.setdefault("solutions", []).append((row.index, text))
        elif subject.kind != "prm":
            for name, turns in zip(names, answers_of(subject.kind, row.row), strict=False):
                messages = [turn.message for turn in turns]
                said = [text_of(message) or "\n".join(words_of(message)) for message in messages]
                found.setdefault(name, []).extend((row.index, text) for text in said)
    if all(not text for _, text in found.get("solutions", ())):  # rows may well have none
        found.pop("solutions", None)
    return found


def _has_escapes(text: str) -> bool:
    r"""Whether a text has the two characters of a line break more often than the break, but for \nu, \neq and code."""
    _, *parts = text.split("\\n")
    if not parts or any(mark in text for mark in _CODE):
        return False
    n_escaped = sum(not part[:1].islower() and part[:1] not in _NOT_ESCAPED for part in parts)
    return n_escaped > text.count("\n")


def _has_escaped_quotes(text: str) -> bool:
    return '\\"' in text and "{" not in text and "\n" not in text


def _has_code_points(text: str) -> bool:
    parts = text.split("\\u")
    is_code = any(mark in text for mark in _CODE)
    return not is_code and any(len(part) >= 4 and set(part[:4].lower()) <= _HEX for part in parts[1:])


_HEX = frozenset("0123456789abcdef")


def _has_entities(text: str) -> bool:
    return "&" in text and "<" not in text and "```" not in text and any(mark in text for mark in _ENTITIES)


def _has_fixed_spaces(text: str) -> bool:
    return text.count("\u00a0") > max(2, text.count(" "))


def _has_no_spaces(text: str) -> bool:
    plain = text.strip()
    is_words = plain.isascii() and sum(map(str.isalpha, plain)) > len(plain) / 2
    return len(plain) > 1.5 * _LEAST_LONG and is_words and not plain.startswith("http") and len(plain.split()) == 1


def _has_joined_lines(text: str) -> bool:
    n_joined = sum(
        one.islower() and mark in ".!?:;" and other.isupper()
        for one, mark, other in zip(text, text[1:], text[2:], strict=False)
    )
    return n_joined >= _LEAST_JOINED and "\n" not in text


def _is_doubled(text: str) -> bool:
    plain = text.strip()
    half = len(plain) // 2
    is_same = half >= _LEAST_LONG and plain[:half].strip() == plain[len(plain) - half :].strip()
    return is_same and plain.count(plain[: _LEAST_LONG // 2]) == 2  # else it is a text of repetitions


def _has_wrong_encoding(text: str) -> bool:
    """Whether a word is UTF-8 that was read as Latin-1 or Windows-1252."""
    if text.isascii():
        return False
    for word in text.split() if "\ufffd" not in text else ():
        for encoding in ("cp1252", "latin-1") if not word.isascii() else ():
            with suppress(UnicodeError):
                if word.encode(encoding).decode("utf-8") != word:
                    return True
    return "\ufffd" in text


def _is_printed(text: str) -> bool:
    """Whether a text is a list or dictionary as Python prints it."""
    plain = text.strip()
    return plain.startswith(("['", "{'", "[{'")) and plain.endswith(("]", "}"))


_ENCODED: Sequence[_Fault] = (
    ("have a backslash and an n in place of line breaks", _FEW, lambda text, _: _has_escapes(text)),
    ("have backslashes before quotes", _FEW, lambda text, _: _has_escaped_quotes(text)),
    ("have code points such as \\u00e9", _FEW, lambda text, _: _has_code_points(text)),
    ("have HTML entities such as &amp;", _FEW, lambda text, _: _has_entities(text)),
    ("have HTML tags", _MOST_TAGGED, lambda text, _: any(mark in text for mark in _TAGS)),
    ("have letters of a wrong encoding", _FEW, lambda text, _: _has_wrong_encoding(text)),
    ("have control characters or invisible ones", _FEW, lambda text, _: not _INVISIBLE.isdisjoint(text)),
    ("have no-break spaces in place of spaces", _FEW, lambda text, _: _has_fixed_spaces(text)),
    ("have no spaces between their words", _FEW, lambda text, _: _has_no_spaces(text)),
    ("have lines without breaks between them", _FEW, lambda text, _: _has_joined_lines(text)),
    ("say everything twice", _FEW, lambda text, _: _is_doubled(text)),
    ("are in quotes", _MOST_QUOTED, lambda text, _: len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"),
)


def _has_place(text: str) -> bool:
    for name in _PLACES:
        before, mark, _ = text.partition(f"{{{name}}}")
        if mark and not before[-1:].isalnum():  # else it is an argument of LaTeX
            return True
    return False


def _has_nothing(text: str, is_asked: bool) -> bool:
    lines = text.splitlines() if is_asked else [text]
    return any(line.rpartition(":")[2].strip().lower() in _NOTHING for line in lines)


def _names_speaker(text: str) -> bool:
    return text.lstrip().lower().startswith(_NAMED)


def _goes_on(text: str) -> bool:
    return any(mark in text.lower() for mark in _NEXT_TURN)


def _opens_reasoning_only(text: str) -> bool:
    return "<think>" in text and "</think>" not in text


_UNFILLED: Sequence[_Fault] = (
    ("are empty", _FEW, lambda text, is_asked: not text.strip()),
    ("have None or nan in place of a text", _FEW, _has_nothing),
    ("have the name of a field in braces, which nothing has replaced", _FEW, lambda text, is_asked: _has_place(text)),
    ("are a list or dictionary as Python prints it", 0.05, lambda text, is_asked: _is_printed(text)),
    ("begin with the name of the speaker", 0.2, lambda text, is_asked: not is_asked and _names_speaker(text)),
    ("go on with the next turn of a user", 0.05, lambda text, is_asked: not is_asked and _goes_on(text)),
    (
        "open <think> and never close it",
        _FEW,
        lambda text, is_asked: not is_asked and _opens_reasoning_only(text),
    ),
)
