"""Checks of texts that were broken on their way: encoded, run together, doubled, or with something missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from areno.checks.inputs.findings import Finding, green, not_checked, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, text_of, text_of_row, words_of

_EXAMPLES = 3
_SHOWN = 60  # characters of a text
_MOST_ROWS = 5000
_LEAST = 3  # texts
_FEW = 0.005  # of the texts
_MOST_QUOTED = 0.5  # of the texts: many may well be a quotation
_MOST_TAGGED = 0.2  # of the texts: some may well be about HTML
# Fenced and `inline` code, and strings of Python with {fields} in them.
_CODE = re.compile(r"```[^`\n]*\n.*?(?:```|\Z)|(`+)[^`\n]+?\1|\bf([\"'])[^\"'\n]*\{[^\n]*?\2", re.DOTALL)
_CODE_WORDS = ("\\begin{", "def ", "#include", "printf(", "print(", "println(", "console.log", ".format(")
_ENTITY = re.compile(r"(\w?)&(?:lt|gt|amp|quot|apos|nbsp|#39|#34|#x27|#x2F);(\w?)")
_ABOUT_ENTITIES = {"html", "xml", "entity", "entities", "escape", "escaped", "page", "tag", "tags", "browser"}
_TAGS = ("<br>", "<br/>", "<br />", "<p>", "</p>", "</div>", "</span>", "</li>")
_PAGES = ("<html", "<!doctype", "<style", "<script")
_ESCAPES = re.compile(r"(?:\\[nrt])*\\n(?:\\[nrt])*")
_NOT_ESCAPED = frozenset("\"'`)%,")  # follow on a backslash and an n in code
_INVISIBLE = {chr(code) for code in (*range(9), 11, *range(14, 32), *range(127, 160), 0xAD, 0x200B, 0x2060, 0xFEFF)}
_MAY_BREAK = {"\u00ad", "\u200b", "\u2060"}  # say where lines of scripts without spaces may break
_WITHOUT_SPACES = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u4e00-\u9fff]")  # Thai to Burmese, Khmer, CJK
_JOINED = re.compile(r"(?<!\S)([^\W_](?:[^\W_]|['\u2019-])*)[.!?:;]([^\W\d_])[\w'\u2019-]*,?(?!\S)")
_LEAST_JOINED = 3
_LEAST_NAMED = 3  # times that a text has a backslash and an n between spaces: fewer may be about them
_LEAST_LONG = 40  # characters
_PLACES = ("question", "prompt", "instruction", "input", "context", "problem", "query", "user_input", "text")
_NOTHING = {"None", "nan", "NaN", "null", "<NA>", "undefined"}
_MOST_LABELS = 20  # different answers, each given five times
_NAMED = ("assistant:", "ai:", "bot:", "gpt:", "chatbot:", "model:", "response:", "<assistant>")
_NEXT_TURN = ("\nuser:", "\nhuman:", "\nq:", "\nquestion:", "\n### human", "\n### user", "\n<user>")


def encoded_texts(subject: Subject) -> Iterator[Finding]:
    """Look for texts that an export has encoded and nothing has decoded, such as a backslash and n for a line break."""
    for dataset in subject.datasets:
        faults = _faults_of_texts(_texts_by_role(subject, dataset), _ENCODED)
        for line, shown in faults:
            yield red("encoded-texts", f"{dataset.key}: {line}: they were not decoded", shown)
        if not faults:
            yield green("encoded-texts", f"{dataset.key}: no escapes, entities or wrong encodings in the texts")


def filled_texts(subject: Subject) -> Iterator[Finding]:
    """Look for texts in which something is missing: empty ones, None, and names of fields that nothing replaced."""
    for dataset in subject.datasets:
        texts = _texts_by_role(subject, dataset)
        faults = [*_faults_of_texts(texts, _UNFILLED), *_answers_of_nothing(texts)]
        for line, shown in faults:
            yield red("filled-texts", f"{dataset.key}: {line}", shown)
        if faults:
            continue
        for line, shown in _faults_of_texts(texts, _ASKED):
            yield not_checked("filled-texts", f"{dataset.key}: {line}: is this meant, or was there no value?", shown)
            break
        else:
            yield green("filled-texts", f"{dataset.key}: no text is empty or has a place that was not filled")


_Texts = Mapping[str, Sequence[tuple[int, str]]]  # name -> (index of the row, text)


class _Fault(NamedTuple):
    what: str  # texts with it do, after "5 of 90 answers"
    has: Callable[[str], bool]
    most: float = _FEW  # share that may be so
    is_of_prompts: bool = True
    is_of_answers: bool = True


def _faults_of_texts(texts: _Texts, kinds: Sequence[_Fault]) -> list[tuple[str, list[str]]]:
    """Return (line, examples) of each kind of fault that too many texts of prompts, answers or solutions have."""
    faults = dict[str, tuple[str, list[str]]]()
    for name, given in texts.items():
        plain = [(index, text, _without_code(text)) for index, text in given]
        for kind in kinds:
            if not (kind.is_of_prompts if name == "prompts" else kind.is_of_answers):
                continue
            found = [(index, text) for index, text, rest in plain if kind.has(rest)]
            if len(found) > max(_LEAST, kind.most * len(given)):
                faults.setdefault(kind.what, _told(name, kind.what, found, len(given)))
    return list(faults.values())


def _told(name: str, what: str, found: Sequence[tuple[int, str]], n: int) -> tuple[str, list[str]]:
    shown = [f"row {index}: {text[: 2 * _SHOWN]!r}" for index, text in found[:_EXAMPLES]]
    return f"{len(found)} of {n} {name} {what}", shown


def _without_code(text: str) -> str:
    """Return a text with `` in place of code and JSON, whose escapes, tags and braces are meant."""
    if text.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            json.loads(text)
            return "``"
    return "</think>".join(_CODE.sub("``", part) for part in text.split("</think>"))  # code may have no end there


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


def _is_code(text: str) -> bool:
    return any(word in text for word in _CODE_WORDS)


def _has_escapes(text: str) -> bool:
    r"""Whether a text has the two characters of a line break more often than the break, but for \nu, \neq and code."""
    if "\\n" not in text or _is_code(text):
        return False
    n_escaped = n_named = 0
    for found in _ESCAPES.finditer(text):
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        if before in "\"'( " and (after in " .?;:" or after in _NOT_ESCAPED):  # also at the ends of the text
            n_named += 1
        elif not after.islower() and after not in _NOT_ESCAPED:
            n_escaped += 1
    return n_escaped + n_named * (n_named >= _LEAST_NAMED) > text.count("\n")


def _has_escaped_quotes(text: str) -> bool:
    is_in_quotes = '"' in text.replace('\\"', "").strip('"')  # as in the string of a command
    return '\\"' in text and "{" not in text and "\n" not in text and not is_in_quotes


def _has_code_points(text: str) -> bool:
    parts = text.split("\\u")
    return not _is_code(text) and any(len(part) >= 4 and set(part[:4].lower()) <= _HEX for part in parts[1:])


_HEX = frozenset("0123456789abcdef")


def _has_entities(text: str) -> bool:
    """Whether a text has HTML entities: within words, or alone in a text that is not about them."""
    found = _ENTITY.findall(text) if "&" in text and "<" not in text else []
    return any(map(any, found)) or (bool(found) and _ABOUT_ENTITIES.isdisjoint(re.findall(r"\w+", text.lower())))


def _has_tags(text: str) -> bool:
    return any(mark in text for mark in _TAGS) and not any(mark in text.lower() for mark in _PAGES)


def _has_invisible_ones(text: str) -> bool:
    found = _INVISIBLE.intersection(text)
    return bool(found) and not (found <= _MAY_BREAK and _WITHOUT_SPACES.search(text))


def _has_fixed_spaces(text: str) -> bool:
    return text.count("\u00a0") > max(2, text.count(" "))


def _has_no_spaces(text: str) -> bool:
    """Whether a text is words that were joined, or base64. Proteins, molecules, paths and lists have no spaces, too."""
    plain = text.strip()
    if len(plain) <= 1.5 * _LEAST_LONG or not plain.isascii() or len(plain.split()) != 1:
        return False
    if re.fullmatch("[A-Za-z0-9+/=]+", plain) and all(re.search(part, plain) for part in ("[a-z]", "[A-Z]", "[0-9]")):
        return True
    letters = max(re.findall("[A-Za-z]+", plain), key=len, default="")
    n_vowels = sum(map(letters.count, "aeiou"))
    return len(letters) >= _LEAST_LONG and n_vowels > _VOWELS * len(letters) and len(set(letters)) > 8


_VOWELS = 0.28  # of the letters of words


def _has_joined_lines(text: str) -> bool:
    """Whether words such as `end.Begin` are in a text of one line. In code, such words have other marks around them."""
    n_joined = sum(one.islower() and other.isupper() for one, other in _JOINED.findall(text))
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


_ENCODED = (
    _Fault("have a backslash and an n in place of line breaks", _has_escapes),
    _Fault("have backslashes before quotes", _has_escaped_quotes),
    _Fault("have code points such as \\u00e9", _has_code_points),
    _Fault("have HTML entities such as &amp;", _has_entities),
    _Fault("have HTML tags", _has_tags, _MOST_TAGGED),
    _Fault("have letters of a wrong encoding", _has_wrong_encoding),
    _Fault("have control characters or invisible ones", _has_invisible_ones),
    _Fault("have no-break spaces in place of spaces", _has_fixed_spaces),
    _Fault("have no spaces between their words", _has_no_spaces),
    _Fault("have lines without breaks between them", _has_joined_lines),
    _Fault("say everything twice", _is_doubled),
    _Fault("are in quotes", lambda text: len(text) > 1 and text[0] == text[-1] and text[0] in "\"'", _MOST_QUOTED),
)


def _has_place(text: str) -> bool:
    for name in _PLACES if not _is_code(text) else ():
        before, mark, _ = text.partition(f"{{{name}}}")
        if mark and not before[-1:].isalnum() and before[-1:] != "$":  # else it is an argument of LaTeX, or JavaScript
            return True
    return False


def _has_no_value(text: str) -> bool:
    """Whether a line is None, or has it after the name of a text, such as `Context: None`."""
    return any(key.strip().lower() in ("", *_PLACES) for key in _keys_of_nothing(text))


def _keys_of_nothing(text: str) -> Iterator[str]:
    for line in text.splitlines():
        key, _, value = line.rpartition(":")
        if value.strip() in _NOTHING:
            yield key


def _answers_of_nothing(texts: _Texts) -> Iterator[tuple[str, list[str]]]:
    """Yield (line, examples) if answers are None, unless it is a label like the others, or the prompt names it."""
    asked = dict(texts.get("prompts", ()))
    for name, given in texts.items():
        labels = {text for _, text in given} - _NOTHING
        is_labelled = len(labels) <= min(_MOST_LABELS, len(given) / 5)
        found = list[tuple[int, str]]()
        for index, text in given if name != "prompts" else ():
            value = text.rpartition(":")[2].strip()
            is_label = is_labelled and value in ("None", "null") and {value.islower()} == set(map(str.islower, labels))
            if value in _NOTHING and not is_label and value.lower() not in re.findall(r"\w+", asked[index].lower()):
                found.append((index, text))
        if len(found) > max(_LEAST, _FEW * len(given)):
            yield _told(name, "have None or nan in place of a text", found, len(given))


_UNFILLED = (
    _Fault("are empty", lambda text: not text.strip()),
    _Fault("have None or nan in place of a text", _has_no_value, is_of_answers=False),
    _Fault("have the name of a field in braces, which nothing has replaced", _has_place),
    _Fault("are a list or dictionary as Python prints it", _is_printed, 0.05),
    _Fault("begin with the name of the speaker", lambda text: text.lstrip().lower().startswith(_NAMED), 0.2, False),
    _Fault(
        "go on with the next turn of a user", lambda text: any(mark in text.lower() for mark in _NEXT_TURN), 0.05, False
    ),
    _Fault("open <think> and never close it", lambda text: "<think>" in text and "</think>" not in text, _FEW, False),
)
_ASKED = (
    _Fault("have lines such as `Allergies: None`", lambda text: any(_keys_of_nothing(text)), is_of_answers=False),
)
