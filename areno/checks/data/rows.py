"""Checks of the rows of the run: their forms, which are left out, and marks and numbers that mean something else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areno.checks.inputs.encoded_rows import EncodedRow, form_of
from areno.checks.inputs.findings import Finding, NotChecked, green, not_checked, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import answers_of, markers_of, text_of, words_of

_LEAST_DIFFERENT = 0.5  # of the training rows; with less, a task has few rows in all
_MOST_DROPPED = 0.5  # of the rows: more than that are hardly meant
_CONTENT = ("prompt", "messages", "response", "chosen", "rejected", "answers", "completions")
_SCORES = ("score", "scores", "rating", "ratings", "reward", "rewards", "quality")
_SHORTEST_CUT = 64  # characters: shorter texts often have the same length by their nature
_CUT = 0.02  # of the texts of a column that have its largest length
_PILED = 8  # times as many as have one of the other lengths on average
_SHOWN = 60  # characters of a value
_EXAMPLES = 3
_MOST_MARKED = 0.05  # of the rows: a few may well write about templates
_MOST = 0.95  # of the answers of one side that have a mark, while at most 1 - _MOST of the other side have it
_LEAST_PAIRS = 20
_ALL = 0.98  # of the answers
_ANSWERS = ("answer", "solution", "solutions", "response", "output", "completion", "reasoning")
_LEAST_ANSWER = 20  # characters: a shorter text may stand in a prompt by chance
_BAR = "\uff5c"  # of DeepSeek's tokens
_FOREIGN = ("im_start", "im_end", "system", "user", "assistant", "start_header_id", "end_header_id", "eot_id")
_FOREIGN += ("begin_of_text", "endoftext", "end", "start", "message", "channel", "START_OF_TURN_TOKEN")
_FOREIGN = (*(f"<|{name}|>" for name in _FOREIGN), *(f"<{_BAR}{name}{_BAR}>" for name in ("User", "Assistant")))
_FOREIGN += ("[INST]", "[/INST]", "<<SYS>>", "<start_of_turn>", "<end_of_turn>")
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


def cut_texts(subject: Subject) -> Iterator[Finding]:
    """Look for columns whose texts were cut at a number of characters: many of them have the largest length."""
    for dataset in subject.datasets:
        rows = subject.rows_of(dataset)
        columns: dict[str, dict[str, int]] = {}  # column -> text -> row
        for row in rows:
            for name, text in _texts_of(row.given):
                columns.setdefault(name, {}).setdefault(text, row.index)
        for name, texts in columns.items():
            lengths = Counter(map(len, texts))
            longest = max(lengths)
            n = lengths.pop(longest)
            is_pile = n > max(_CUT * len(texts), _PILED * float(np.mean([*lengths.values()] or [n])))
            if longest >= _SHORTEST_CUT and is_pile:
                text = f"{dataset.key}: {n} texts of {name!r} have exactly {longest} characters, and none has more"
                ends = [f"row {row}: ...{each[-_SHOWN:]!r}" for each, row in texts.items() if len(each) == longest]
                yield red(
                    "cut-texts", f"{text}: they seem to be cut there, so that their ends are lost", ends[:_EXAMPLES]
                )
                break
        else:
            yield green("cut-texts", f"{dataset.key}: no column is cut")


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
            scores = _scores(row.given, columns)
            n_scored += scores is not None
            if scores is not None and scores[0] < scores[1]:
                faults.append(f"row {row.index}: chosen has the score {scores[0]:g}, rejected {scores[1]:g}")
            elif (other := preferred.get(_pair(row.row, "rejected", "chosen"))) is not None:
                faults.append(f"row {row.index}: row {other} has the same answers, the other way round")
        if faults:
            text = f"{dataset.key}: in {len(faults)} of {len(pairs)} pairs, the rejected answer may be the better one"
            yield red("pair-scores", text, faults[:3])
        elif n_scored:
            yield green("pair-scores", f"{dataset.key}: in all {n_scored} pairs, chosen has the better score")
        else:
            why = f"{dataset.key}: the rows have no scores; only contradictions of pairs were looked for"
            yield not_checked("pair-scores", why)


def template_markers(subject: Subject) -> Iterator[Finding]:
    """Look for messages that a chat template has already rendered: this run's own, or another."""
    if subject.tokenizer.chat_template is None:
        raise NotChecked("the tokenizer has no chat template: texts are encoded as they are")
    own, ends = markers_of(subject.tokenizer), set(_end_texts(subject))
    for dataset in subject.datasets:
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        found: dict[str, list[int]] = {}
        for row in rows:
            texts = [_all_text(subject, row, is_asked) for is_asked in (True, False)]
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
            shown = [f"row {row.index}: {_around(_all_text(subject, row), mark)}" for row in first]
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
    for token in map(str, subject.tokenizer.all_special_tokens):
        found[f"contain {token!r}"] = lambda text, token=token: token in text
    return found


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
            asked.add(_all_text(subject, row, is_asked=True))
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


def _texts_of(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (column, text) of each text in a row. Texts of messages belong to the column of the messages."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts_of(each, name or str(key))
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts_of(each, name)


def _pair(row: Any, better: str, worse: str) -> str:
    return json.dumps([row.get("prompt"), row[better], row[worse]], sort_keys=True, default=str)


def _scores(row: Any, columns: Mapping[str, str]) -> tuple[float, float] | None:
    """Return the scores of the chosen and the rejected answer, if the row has them under usual names.

    A score in the file belongs to the column whose name it has. `columns` says as which answer the run reads a column.
    """
    found = list[float]()
    for field in ("chosen", "rejected"):
        answer = columns.get(field, field)
        names = [f"{answer}_{word}" for word in _SCORES] + [f"{word}_{answer}" for word in _SCORES]
        values = [row.get(name) for name in names if isinstance(row.get(name), int | float)]
        found += values[:1]
    return (found[0], found[1]) if len(found) == 2 else None


def _fields(row: Any) -> str:
    if not isinstance(row, Mapping):
        return _shown(row)
    return ", ".join(f"{name}: {_shown(value)}" for name, value in row.items() if value is not None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _is_permutation(ratings: Sequence[float]) -> bool:
    return len(ratings) > 1 and sorted(ratings) in ([*range(len(ratings))], [*range(1, len(ratings) + 1)])


def _all_text(subject: Subject, row: EncodedRow, is_asked: bool | None = None) -> str:
    """Return the text of all messages of a row. `is_asked`: only of those that are trained (False), or not (True)."""
    given = row.row.get("prompt")
    asked = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
    answered: list[Mapping[str, Any]] = []
    if subject.kind not in ("prompt", "prm"):
        turns = [turn for answer in answers_of(subject.kind, row.row) for turn in answer]
        answered = [turn.message for turn in turns]
        asked = [message for turn in turns[:1] for message in turn.talk if message not in answered] or asked
    chosen = [*(asked if is_asked is not False else ()), *(answered if is_asked is not True else ())]
    return "\n".join(map(text_of, chosen))


def _around(text: str, mark: str) -> str:
    at = text.find(mark)
    return repr(text[max(0, at - 30) : at + len(mark) + 30])
