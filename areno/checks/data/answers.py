"""Checks of what is trained: the answers of the rows, whole, up to the token that ends them, and nothing else."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, MarkedText, NotChecked, examples, green, not_checked, quoted, red
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import (
    Answer,
    answers_of,
    contains,
    expected_text,
    squeezed,
    text_of,
    without_think_tags,
    words_of,
)
from areno.data.row_schema import template_variables
from areno.types import TrainSequence

_SHOWN_ROWS = 10
_SHOWN_FAULTS = 3
_short = functools.partial(quoted, most=80)
_CLIPPED = 600  # characters of a piece
_START = 12  # characters of an answer by which its start is found
_LEAST_PROMPT = 16  # characters: an answer may begin with a shorter prompt by chance
_MOST_REPEATED = 0.2  # of the answers: an answer may well begin by repeating its question
_ROLES = ("human:", "user:", "question:", "assistant:", "answer:")  # as some files write them into texts
_SHORT = 4  # characters: shorter words may stand anywhere by chance


@dataclass
class _Review:
    """The faults of the rows of a dataset, by the name of the finding."""

    n_rows: int = 0
    n_answers: int = 0
    n_reasoning: int = 0
    faults: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.faults.setdefault(name, []).append(text)


def trained_text(subject: Subject) -> Iterator[Finding]:
    """Compare the trained tokens with the answers of the rows."""
    if subject.kind == "prompt":
        raise NotChecked("the rows have no answers that are trained; the model writes them")
    if subject.kind == "prm":
        raise NotChecked("the labels of steps are trained, and no answers; see step-labels")
    for dataset in subject.datasets:
        yield from _findings(dataset.key, _review(subject, dataset))


def step_labels(subject: Subject) -> Iterator[Finding]:
    """Compare the labels of a process reward model with those of the rows."""
    if subject.kind != "prm":
        return
    for dataset in subject.datasets:
        faults, n_steps = list[str](), 0
        for row in subject.sample_of(dataset):
            for sequence in row.sequences:
                trained = np.flatnonzero(~np.asarray(sequence.prompt_mask))
                found, labels = np.asarray(sequence.returns)[trained].tolist(), list(map(float, row.row["labels"]))
                n_steps += len(found)
                if len(found) != len(labels) or not np.allclose(found, labels):
                    faults.append(f"row {row.index}: the labels are {labels}, trained are {found}")
        if faults:
            yield red("step-labels", f"{dataset.key}: {len(faults)} rows with other labels", faults[:_SHOWN_FAULTS])
        else:
            yield green("step-labels", f"{dataset.key}: all {n_steps} steps are trained, each with its label")


def repeated_prompts(subject: Subject) -> Iterator[Finding]:
    """Look for answers that begin with the text of their prompt, which the model would learn to repeat."""
    if subject.kind in ("prompt", "prm"):
        return
    for dataset in subject.datasets:
        faults, n_answers = list[str](), 0
        for row in subject.sample_of(dataset):
            for turns in answers_of(subject.kind, row.row) if row.item is not None else ():
                for answer in turns[:1]:
                    n_answers += 1
                    if _repeats_prompt(answer):
                        faults.append(f"row {row.index}: {_short(text_of(answer.message))}")
        text = f"{dataset.key}: {len(faults)} of {n_answers} answers begin with the text of their prompt"
        if len(faults) > _MOST_REPEATED * n_answers:
            yield red("repeated-prompts", f"{text}, so it is trained too", examples(faults, _SHOWN_FAULTS))
        else:
            yield green("repeated-prompts", text, examples(faults, _SHOWN_FAULTS))


def _repeats_prompt(answer: Answer) -> bool:
    asked = [message for message in answer.before if message.get("role") != "system"]
    said = _plain(text_of(answer.message))
    for messages in (asked, asked[-1:]):
        text = _plain("".join(map(text_of, messages)))
        if len(text) >= _LEAST_PROMPT and said.startswith(text):
            return True
    return False


def _plain(text: str) -> str:
    plain = squeezed(text).lower()
    for role in _ROLES:
        plain = plain.replace(role, "")
    return plain


def shown_rows(subject: Subject) -> Iterator[Finding]:
    """Show ten rows with what is trained."""
    for dataset in subject.training_rows:
        rows = [row for row in subject.sample_of(dataset, 2 * _SHOWN_ROWS) if row.item is not None]
        details = [text for row in rows for text in _marked_texts(subject, row)]
        details = details[:: max(1, len(details) // _SHOWN_ROWS)][:_SHOWN_ROWS]
        about = "the model writes what follows" if subject.kind == "prompt" else "what is trained is marked"
        yield green("shown-rows", f"{dataset.key}: {len(details)} of them; {about}", details)


def _marked_texts(subject: Subject, row: EncodedRow) -> Iterator[MarkedText]:
    if not row.sequences:
        tokens = list(row.item.tokens)
        answer = "" if row.item.solutions is None else f"; its answer: {_short(str(row.item.solutions))}"
        text = _clipped(subject.tokenizer.decode(tokens, skip_special_tokens=False))
        yield MarkedText(f"row {row.index}, {len(tokens)} tokens{answer}", [(text, False)])
    names = ("chosen", "rejected") if subject.kind == "dpo" else ()
    for number, sequence in enumerate(row.sequences):
        pieces = [
            (_clipped(subject.tokenizer.decode(tokens, skip_special_tokens=False)), trained)
            for tokens, trained in _runs(sequence)
        ]
        name = f", {names[number]}" if names else f", answer {number + 1}" if len(row.sequences) > 1 else ""
        yield MarkedText(f"row {row.index}{name}, {len(_tokens(sequence))} tokens", pieces)


def _findings(key: str, review: _Review) -> Iterator[Finding]:
    said = {
        "answers": f"{key}: all {review.n_answers} answers of {review.n_rows} rows are trained, whole",
        "only-answers": f"{key}: nothing but answers is trained",
        "turn-end": f"{key}: each answer ends with a token that ends the rollout",
        "padding": f"{key}: no padding is trained",
        "context": f"{key}: every row fits into the context of the model",
    }
    wrong = {
        "answers": "answers that are not trained, or not whole",
        "only-answers": "rows in which something else is trained",
        "turn-end": "answers whose end is not trained: the model would not learn to stop",
        "padding": "rows whose padding is trained",
        "context": "rows with labels beyond the context of the model",
        "reasoning": "answers whose reasoning is not trained",
        "answer-order": "rows whose answers are in another order than in the file",
    }
    for name, text in said.items():
        if name not in review.faults:
            yield green(name, text)
    if "reasoning" not in review.faults:
        if review.n_reasoning:
            yield green("reasoning", f"{key}: the reasoning of {review.n_reasoning} answers is trained")
        else:
            yield not_checked("reasoning", f"{key}: no answer has reasoning")
    for name, faults in review.faults.items():
        shown = examples(faults, _SHOWN_FAULTS)
        more = [f"and {len(faults) - len(shown)} more"] * (len(faults) > len(shown))
        yield red(name, f"{key}: {len(faults)} {wrong[name]}", [*shown, *more])


def _review(subject: Subject, dataset: Dataset) -> _Review:
    review, context = _Review(), subject.context
    for row in subject.rows_of(dataset):  # a cheap check, of all rows
        longest = max((len(_tokens(sequence)) for sequence in row.sequences), default=0)
        if longest > context:
            review.add("context", f"row {row.index} has {longest} tokens; the model reads {context}")
    for row in subject.sample_of(dataset):
        if row.item is None:
            continue
        review.n_rows += 1
        asked = answers_of(subject.kind, row.row)
        if subject.kind == "sft":
            _review_answers(subject, row, row.sequences, asked[0], dataset, review)
            continue
        if (order := _other_order(subject, row, asked)) is not None:
            review.add("answer-order", f"row {row.index}: the sequences train the answers {order}")
            continue
        for sequence, turns in zip(row.sequences, asked, strict=True):
            _review_answers(subject, row, [sequence], turns, dataset, review)
    return review


def _other_order(subject: Subject, row: EncodedRow, asked: Sequence[Sequence[Answer]]) -> list[int] | None:
    """Return the numbers of the answers that the sequences train, None if each trains its own or it is unclear."""
    order = list[int]()
    for sequence in row.sequences:
        text = squeezed("".join(_decoded(subject, tokens)[0] for tokens, trained in _runs(sequence) if trained))
        fits = [
            number
            for number, turns in enumerate(asked)
            if text and all(contains(text, words) for turn in turns for words in turn.words)
        ]
        order += fits if len(fits) == 1 else []
    return order if sorted(order) == list(range(len(asked))) and order != sorted(order) else None


def _review_answers(
    subject: Subject,
    row: EncodedRow,
    sequences: Sequence[TrainSequence],
    answers: Sequence[Answer],
    dataset: Dataset,
    review: _Review,
) -> None:
    """Compare the trained runs of sequences with the answers that should be trained, in order."""
    runs = [
        (*_decoded(subject, tokens), tokens) for sequence in sequences for tokens, trained in _runs(sequence) if trained
    ]
    only_last = dataset.section.changed_turns == "last_turn" and len(runs) == 1
    left = list(answers[-1:] if only_last else answers)
    where = f"row {row.index}"
    for text, ends, tokens in runs:
        if subject.tokenizer.pad_token_id in tokens and subject.tokenizer.pad_token_id not in subject.end_ids:
            review.add("padding", f"{where}: {subject.tokenizer.pad_token!r} is trained")
        answer = next((each for each in left if _has_words(text, each)), None)
        if answer is None:
            with_reasoning = (each for each in left if each.reasoning)
            answer = next((each for each in with_reasoning if _has_words(text, _without_reasoning(each))), None)
            if answer is not None:
                review.add("reasoning", f"{where}: trained is {_short(text)}")
        if answer is None:
            review.add("only-answers", f"{where}: trained is {_short(text)}, which is no answer of the row")
            continue
        left.remove(answer)
        review.n_answers += 1
        review.n_reasoning += bool(answer.reasoning)
        for name, fault in _differences(subject, row, text, answer):
            review.add(name, f"{where}: {fault}")
        if not ends:
            review.add("turn-end", f"{where}: the last trained token is {subject.tokenizer.decode(tokens[-1:])!r}")
    for answer in left:
        if answer.words:
            review.add("answers", f"{where}: {_short(' '.join(answer.words))} is not trained, or not whole")


def _has_words(text: str, answer: Answer) -> bool:
    return all(contains(squeezed(text), words) for words in answer.words)


def _without_reasoning(answer: Answer) -> Answer:
    text = text_of(answer.message).rpartition("</think>")[2]
    kept = {key: value for key, value in answer.message.items() if key in ("role", "tool_calls")}
    return Answer(answer.before, {**kept, "content": text}, answer.tools, answer.talk)


def _differences(subject: Subject, row: EncodedRow, text: str, answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield (name of a finding, fault) if a trained text has more or less than its answer."""
    found, tokenizer = squeezed(text), subject.tokenizer
    if tokenizer.chat_template is None:
        expected = text_of(answer.message)
        if found != squeezed(expected):
            yield "only-answers", f"trained is {_short(text)}, the answer is {_short(expected)}"
        return
    written = squeezed(expected_text(tokenizer, answer, **template_variables(row.row)) or "")
    if written and found and written.startswith(found):
        return
    own = squeezed("".join(words_of(answer.message)))
    for message in answer.talk:
        for words in words_of(message) if message.get("role") != "assistant" else ():
            if len(squeezed(words)) >= _SHORT and contains(found, words) and squeezed(words) not in own:
                yield "only-answers", f"the text of the role {message.get('role')} is trained: {_short(words)}"
                return
    if found and (start := written.find(found)) > 0:
        yield "answers", f"the first part of the answer is not trained: {_short(written[:start])}"
    elif written and (start := found.find(written[: len(found)][:_START])) > 0 and not _is_part(found[:start], own):
        yield "only-answers", f"{_short(found[:start])} before the answer is trained"


def _is_part(text: str, own: str) -> bool:
    """Whether a text is a part of an answer's own words, such as its reasoning, which a template may leave out."""
    return without_think_tags(text) in own


def _runs(sequence: TrainSequence) -> list[tuple[list[int], bool]]:
    """Return (tokens, whether they are trained) of each run. The first token of a row is never trained."""
    tokens, trained = _tokens(sequence), ~np.asarray(sequence.prompt_mask, dtype=bool)
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    return [(tokens[start:end], bool(trained[start])) for start, end in itertools.pairwise(edges)]


def _tokens(sequence: TrainSequence) -> list[int]:
    return np.asarray(sequence.tokens).tolist()


def _decoded(subject: Subject, tokens: Sequence[int]) -> tuple[str, bool]:
    """Return (text without the token that ends it, whether there is such a token)."""
    ends = bool(tokens) and tokens[-1] in subject.end_ids
    return subject.tokenizer.decode(tokens[:-1] if ends else tokens, skip_special_tokens=False), ends


def _clipped(text: str) -> str:
    half = _CLIPPED // 2
    return text if len(text) <= _CLIPPED else f"{text[:half]} ... {text[-half:]}"
