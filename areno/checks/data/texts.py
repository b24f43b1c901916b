"""Checks of the texts of rows: marks that do not belong there, and texts that are empty or encoded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import answers_of, markers_of, text_of, text_of_row, words_of

_EXAMPLES = 3
_SHOWN = 60  # characters of a text
_MOST_MARKED = 0.05  # of the rows: a few may well write about templates
_MOST = 0.95  # of the answers of one side that have a mark, while at most 1 - _MOST of the other side have it
_LEAST_PAIRS = 20
_ALWAYS, _LONGER = 0.98, 1.3  # of the pairs, times as long
_SHORTEST_CUT = 64  # characters: shorter texts often have the same length by their nature
_BAR = "\uff5c"  # of DeepSeek's tokens
_FOREIGN = ("im_start", "im_end", "system", "user", "assistant", "start_header_id", "end_header_id", "eot_id")
_FOREIGN += ("begin_of_text", "endoftext", "end", "start", "message", "channel", "START_OF_TURN_TOKEN")
_FOREIGN = (*(f"<|{name}|>" for name in _FOREIGN), *(f"<{_BAR}{name}{_BAR}>" for name in ("User", "Assistant")))
_FOREIGN += ("[INST]", "[/INST]", "<<SYS>>", "<start_of_turn>", "<end_of_turn>", "### Instruction:", "### Response:")
_FOREIGN += ("\nAssistant:", "\nHuman:", "ASSISTANT:", "\n### User:", "\n### Assistant:")
_LEAST = 3  # texts
_MOST_ENCODED = 0.02  # of the texts
_MOST_QUOTED = 0.5  # of the texts: many may well be a quotation
_MOST_TAGGED = 0.2  # of the texts: some may well be about HTML
_ENTITIES = ("&lt;", "&gt;", "&amp;", "&quot;", "&apos;", "&nbsp;", "&#39;", "&#34;", "&#x27;", "&#x2F;")
_TAGS = ("<br>", "<br/>", "<br />", "<p>", "</p>", "</div>", "</span>", "</li>")
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
    for row in subject.sample_of(dataset):
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
    r"""Whether a text of one line has the two characters of a line break, other than those of \nu or \neq."""
    parts = text.split("\\n") if "\n" not in text else []
    return any(not part[:1].islower() for part in parts[1:])


def _has_escaped_quotes(text: str) -> bool:
    return '\\"' in text and "{" not in text and "\n" not in text


def _has_code_points(text: str) -> bool:
    parts = text.split("\\u")
    return any(len(part) >= 4 and set(part[:4].lower()) <= set("0123456789abcdef") for part in parts[1:])


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
    ("have a backslash and an n in place of line breaks", _MOST_ENCODED, lambda text, _: _has_escapes(text)),
    ("have backslashes before quotes", _MOST_ENCODED, lambda text, _: _has_escaped_quotes(text)),
    ("have code points such as \\u00e9", _MOST_ENCODED, lambda text, _: _has_code_points(text)),
    ("have HTML entities such as &amp;", _MOST_ENCODED, lambda text, _: any(mark in text for mark in _ENTITIES)),
    ("have HTML tags", _MOST_TAGGED, lambda text, _: any(mark in text for mark in _TAGS)),
    ("have letters of a wrong encoding", _MOST_ENCODED, lambda text, _: _has_wrong_encoding(text)),
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
    ("are empty", 0.01, lambda text, is_asked: not text.strip()),
    ("have None or nan in place of a text", 0.02, _has_nothing),
    ("have the name of a field in braces, which nothing has replaced", 0.02, lambda text, is_asked: _has_place(text)),
    ("are a list or dictionary as Python prints it", 0.05, lambda text, is_asked: _is_printed(text)),
    ("begin with the name of the speaker", 0.2, lambda text, is_asked: not is_asked and _names_speaker(text)),
    ("go on with the next turn of a user", 0.05, lambda text, is_asked: not is_asked and _goes_on(text)),
    (
        "open <think> and never close it",
        0.02,
        lambda text, is_asked: not is_asked and _opens_reasoning_only(text),
    ),
)


def template_markers(subject: Subject) -> Iterator[Finding]:
    """Look for messages that a chat template has already rendered: this run's own, or another."""
    if subject.tokenizer.chat_template is None:
        raise NotChecked("the tokenizer has no chat template: texts are encoded as they are")
    own, ends = markers_of(subject.tokenizer), set(_end_texts(subject))
    for dataset in subject.datasets:
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        found: dict[str, list[int]] = {}
        for row in rows:
            texts = [text_of_row(subject.kind, row.row, is_asked) for is_asked in (True, False)]
            of_texts = [{mark for mark in (*own, *_FOREIGN) if mark in text} for text in texts]
            for mark in of_texts[0] | (of_texts[1] - ends):  # see end_tokens for those in answers
                found.setdefault(mark, []).append(row.index)
        whole = {mark: at for mark, at in found.items() if mark in own}
        marked = whole or found
        # The longest of the marks that most rows have says most.
        mark = max(marked, key=lambda each: (len(marked[each]), len(each)), default="")
        n = len(marked.get(mark, ()))
        text = f"{dataset.key}: the messages of {n} of {len(rows)} rows contain {mark!r}"
        if n > _MOST_MARKED * len(rows):
            why = "they are already rendered, and the chat template would be around them twice"
            if not whole:
                why = "they are written for another chat template than that of the tokenizer"
            first = [row for row in rows if row.index in marked[mark][:_EXAMPLES]]
            shown = [f"row {row.index}: {_around(text_of_row(subject.kind, row.row), mark)}" for row in first]
            yield red("template-markers", f"{text}: {why}", shown)
        elif n:
            yield green("template-markers", f"{text}, the first is row {marked[mark][0]}")
        else:
            yield green("template-markers", f"{dataset.key}: no message contains marks of a chat template")


def end_tokens(subject: Subject) -> Iterator[Finding]:
    """Look for answers that have a token at which the rollout stops before their end, or the text of one."""
    if subject.kind in ("prompt", "prm"):
        return
    texts = _end_texts(subject)
    for dataset in subject.datasets:
        faults, n_answers, sides = list[str](), 0, Counter[int]()
        for row in subject.sample_of(dataset):
            if row.item is None:
                continue
            for number, turns in enumerate(answers_of(subject.kind, row.row)):
                for answer in turns:
                    n_answers += 1
                    said = text_of(answer.message)
                    if mark := next((text for text in texts if text in said), ""):
                        sides[number] += 1
                        faults.append(f"row {row.index}: {_around(said, mark)}")
        names = ("chosen", "rejected")
        where = f" (all of them {names[next(iter(sides))]})" if subject.kind == "dpo" and len(sides) == 1 else ""
        text = f"{dataset.key}: {len(faults)} of {n_answers} answers{where} contain the text of a token that ends them"
        if len(faults) > _MOST_MARKED * n_answers:
            yield red("end-tokens", f"{text}, so it is there twice", faults[:_EXAMPLES])
        else:
            yield green("end-tokens", text, faults[:_EXAMPLES])


def _end_texts(subject: Subject) -> list[str]:
    found = [subject.tokenizer.decode([token], skip_special_tokens=False) for token in sorted(subject.end_ids)]
    return [text for text in found if text.strip()]


def pair_marks(subject: Subject) -> Iterator[Finding]:
    """Look for a mark that tells chosen from rejected answers, whatever they say: both would be learned by it alone."""
    if subject.kind != "dpo":
        return
    ends = _end_texts(subject)
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
        for name, has in _marks(subject, sides).items():
            shares = [float(np.mean([has(text) for text in side])) for side in sides]
            if max(shares) >= _MOST and min(shares) <= 1 - _MOST:
                text = (
                    f"{dataset.key}: {shares[0]:.0%} of the chosen answers {name}, and {shares[1]:.0%} of the rejected"
                )
                shown = [
                    f"{word}: ...{side[0][-60:]!r}" for word, side in zip(("chosen", "rejected"), sides, strict=True)
                ]
                yield red("pair-marks", f"{text}: they can be told apart by this alone", shown)
                break
        else:
            yield green("pair-marks", f"{dataset.key}: no mark at the end tells chosen from rejected answers")


def _longer_side(sides: Sequence[Sequence[str]]) -> str | None:
    """Return which side is much longer in all pairs, None if neither is."""
    ratios = [(len(one) + 1) / (len(other) + 1) for one, other in zip(*sides, strict=True)]
    if float(np.median([len(text) for side in sides for text in side])) < _SHORTEST_CUT:
        return None
    for name, share in (("chosen", np.mean(np.array(ratios) > 1)), ("rejected", np.mean(np.array(ratios) < 1))):
        if share >= _ALWAYS and max(np.median(ratios), 1 / np.median(ratios)) > _LONGER:
            return f"the {name} answer is the longer one in {share:.0%} of {len(ratios)} pairs"
    return None


def _marks(subject: Subject, sides: Sequence[Sequence[str]]) -> Mapping[str, Callable[[str], bool]]:
    found: dict[str, Callable[[str], bool]] = {
        "are empty": lambda text: not text.strip(),
        "end with white space": lambda text: text != text.rstrip(),
        "begin with white space": lambda text: text != text.lstrip(),
        "end a sentence": lambda text: text.rstrip()[-1:] in tuple(".!?\u3002\uff01\uff1f"),
        "contain <think>": lambda text: "<think>" in text,
    }
    endings = Counter(text.split()[-1] for side in sides for text in side if len(text.split()) > 1)
    for word, _ in endings.most_common(_EXAMPLES):
        found[f"end with {word!r}"] = lambda text, word=word: text.split()[-1:] == [word]
    chars = {char for side in sides for text in side[:_LEAST_PAIRS] for char in text if not char.isalnum()}
    for char in sorted(chars):
        found[f"contain {char!r}"] = lambda text, char=char: char in text
    for token in map(str, subject.tokenizer.all_special_tokens):
        found[f"contain {token!r}"] = lambda text, token=token: token in text
    return found


def _around(text: str, mark: str) -> str:
    at = text.find(mark)
    return repr(text[max(0, at - 30) : at + len(mark) + 30])
