"""Checks of columns that the run does not read: texts that belong into the prompt, and marks that leave a row out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, green, not_checked, red, shortened
from areno.checks.inputs.subject import Dataset, Subject
from areno.checks.inputs.talks import contains, leaves, squeezed, text_of_row, tool_names
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.dataset_formats import similar_columns
from areno.data.row_schema import FIELDS, SHARED_FIELDS, VARIABLES

_ASKED = ("input", "context", "contexts", "system", "system_prompt", "passage", "document", "documents", "article")
_ASKED += ("history", "background", "choices", "options", "premise", "hypothesis", "paragraph", "table", "question")
_ASKED += ("problem", "query", "instruction", "instructions", "functions")
_REASONED = ("reasoning", "reasoning_content", "rationale", "thinking", "thought", "thoughts", "chain_of_thought")
_REASONED += ("cot", "explanation", "explanations")
_CONVERTED = {"conversations", "conversation"}  # of other formats, whose texts the messages of areno's form have
_FILLED = 0.02  # of the rows
_LEAST_ROWS = 3
_EXAMPLES = 3
_SHOWN = 60  # characters of a value
_LEAST_WORK, _END = 40, 20  # characters of a worked solution, and after its answer
_MOST = 0.5  # of the rows

_GOOD = ("correct", "is_correct", "correctness", "valid", "is_valid", "passed", "success", "successful", "solved")
_GOOD += ("accepted", "verified", "keep", "resolved", "approved", "train", "trainable", "include")
_BAD = ("exclude", "excluded", "skip", "drop", "removed", "deleted", "ignore", "is_bad", "flagged", "is_test")
_SPLITS = ("split", "fold", "partition", "subset")
_HELD_OUT = ("test", "valid", "validation", "val", "dev", "eval")
_NO = ("false", "no", "0", "incorrect", "wrong", "bad", "failed", "fail", "rejected")
_YES = ("true", "yes", "1")
_OF_MESSAGES = ("train", "trainable", "loss", "is_trained", "learn", "loss_weight")
_OF_MASKED = ("mask", "masked", "no_loss", "ignore", "skip")
_MARKED = 0.005  # of the rows


def unused_columns(subject: Subject) -> Iterator[Finding]:
    """Look for columns with texts that are in no message of their row."""
    if subject.kind == "prm":
        return
    trains_text = subject.kind == "sft"
    agent_reads = isinstance(subject.config, PolicyExperimentConfig) and bool(subject.config.agent.fn)
    for dataset in subject.datasets:
        rows = [row for row in subject.sample_of(dataset) if row.item is not None]
        lost: dict[str, list[EncodedRow]] = {}
        for row in rows:
            for name in _lost_columns(subject, dataset, row):
                lost.setdefault(name, []).append(row)
        least = max(_LEAST_ROWS, _FILLED * len(rows))
        similar = _similar_columns(subject, rows, lost)
        similar = {key: own for key, own in similar.items() if len(own) >= least}
        yield from _named_columns(subject, dataset, rows, similar, agent_reads)
        lost = {name: own for name, own in lost.items() if all(name != each for _, each in similar)}
        worked = {name for name, own in lost.items() if trains_text and _are_worked(name, own)}
        is_meant = {name for name in lost if name in worked or _is_meant(name, trains_text)}
        meant = {name: own for name, own in lost.items() if len(own) >= least and name in is_meant}
        others = [f"{name!r} ({len(own)} rows)" for name, own in lost.items() if name not in meant]
        for name, own in meant.items():
            n, known = len(own), name in worked or name.lower() in _REASONED
            text = f"{dataset.key}: the column {name!r} is filled in {n} of {len(rows)} rows"
            text += " and is not trained" if known else " and is in none of their prompts"
            text += ", although it works out the short answers that are" * (name in worked)
            if not known and agent_reads:
                yield not_checked("unused-columns", f"{text}; the agent may read it")
                continue
            wanted = "join it with the answer" if known else "join it with the prompt"
            shown = [f"row {row.index}: {name}: {shortened(repr(row.given[name]))}" for row in own[:_EXAMPLES]]
            yield red("unused-columns", f"{text}: {wanted} ({dataset.key}.loader), or leave out the column", shown)
        if not meant and not similar:
            text = f"{dataset.key}: no unread column has a name of texts for the prompt, such as 'context'"
            which = f"; in no message are {', '.join(others)}" if others else "; each column with texts is in a message"
            yield green("unused-columns", text + which)


def _lost_columns(subject: Subject, dataset: Dataset, row: EncodedRow) -> Iterator[str]:
    if not isinstance(row.given, Mapping):
        return
    renamed = set(dataset.section.columns.renamed_columns().values())
    known = {*FIELDS[subject.kind], *SHARED_FIELDS, VARIABLES, *renamed}
    known |= _CONVERTED if row.row is not row.given else set()
    text = ""
    for name, value in row.given.items():
        texts = [each for each in leaves(value) if each.strip()] if name not in known else []
        if not texts:
            continue
        text = text or squeezed("\n".join([text_of_row(subject.kind, row.row), str(row.row.get("tools") or "")]))
        if not all(contains(text, each) for each in texts):
            yield str(name)


def _similar_columns(
    subject: Subject, rows: Sequence[EncodedRow], lost: Mapping[str, Sequence[EncodedRow]]
) -> dict[tuple[str, str], list[EncodedRow]]:
    """Return (field, column) -> rows that lack the field, and whose column seems to hold it by its name."""
    found: dict[tuple[str, str], list[EncodedRow]] = {}
    lost_at = {name: {row.index for row in own} for name, own in lost.items()}
    for row in rows:
        if not isinstance(row.given, Mapping):
            continue
        for field, name in similar_columns(subject.kind, row.given).items():
            is_lost = row.index in lost_at.get(name, ()) and bool(tool_names(row.given[name]))
            if field in ("tools", "solutions") and not row.row.get(field) and (field != "tools" or is_lost):
                found.setdefault((field, name), []).append(row)
    return found


def _named_columns(
    subject: Subject,
    dataset: Dataset,
    rows: Sequence[EncodedRow],
    similar: Mapping[tuple[str, str], Sequence[EncodedRow]],
    agent_reads: bool,
) -> Iterator[Finding]:
    for (field, name), own in similar.items():
        is_part = any(row.row.get(field) for row in rows) or sum(of == field for of, _ in similar) > 1
        text = f"{dataset.key}: the column {name!r} looks like {field!r}, is filled in {len(own)} of {len(rows)} rows"
        text += f" without {field!r}, and is not read: "
        if is_part:
            text += f"rename it to {field} in the file"
        else:
            known, settings = dataset.section.columns.renamed_columns(), similar_columns(subject.kind, own[0].given)
            named = [f"{dataset.key}.columns.{each}={settings[each]}" for each in settings if each not in known]
            text += f"read it with {' '.join(named)}"
        shown = [f"row {row.index}: {name}: {shortened(repr(row.given[name]))}" for row in own[:_EXAMPLES]]
        if agent_reads:
            yield not_checked("unused-columns", f"{text}. Or does the agent read it?", shown)
        elif field == "solutions" and not is_part:
            yield not_checked("unused-columns", f"{text}. Or does the reward function read it?", shown)
        else:
            yield red("unused-columns", text, shown)


def _is_meant(name: str, trains_text: bool) -> bool:
    return name.lower() in _ASKED or (trains_text and name.lower() in _REASONED)


def _are_worked(name: str, rows: Sequence[EncodedRow]) -> bool:
    """Whether the texts of a column are long, and end with the short answer that is trained."""
    n_worked = 0
    for row in rows:
        answer = text_of_row("sft", row.row, is_asked=False).strip()
        text = "\n".join(leaves(row.given[name])).strip()
        is_long = len(text) > max(_LEAST_WORK, 2 * len(answer))
        n_worked += is_long and 0 < len(answer) <= _SHOWN and answer in text[-len(answer) - _END :]
    return n_worked > _MOST * len(rows)


def row_flags(subject: Subject) -> Iterator[Finding]:
    """Look for marks of rows and messages which say that they are not to be trained, and which nothing reads."""
    for dataset in subject.training_rows:
        rows = [row for row in subject.rows_of(dataset) if row.item is not None and isinstance(row.given, Mapping)]
        renamed = set(dataset.section.columns.renamed_columns().values())
        found: dict[tuple[str, str], list[int]] = {}  # (what is marked, how) -> rows
        for row in rows:
            for mark in {*_marks_of_row(subject, row, renamed), *_marks_of_messages(row.given.get("messages"))}:
                found.setdefault(mark, []).append(row.index)
        marked = {mark: at for mark, at in found.items() if len(at) > _MARKED * len(rows)}
        for (what, how), at in marked.items():
            text = f"{dataset.key}: {len(at)} of {len(rows)} training rows have {what} with {how}"
            yield red("row-flags", f"{text}, and they are trained like the others", [f"rows {at[:10]}"])
        if not marked:
            yield green("row-flags", f"{dataset.key}: no row is marked as wrong, left out or held out")


def _marks_of_row(subject: Subject, row: EncodedRow, renamed: set[str]) -> Iterator[tuple[str, str]]:
    for name, value in row.given.items():
        key = str(name).lower()
        if name in renamed or isinstance(value, list | Mapping):
            continue
        is_marked = (
            (subject.kind == "sft" and key in _GOOD and _is(value, _NO))
            or (subject.kind == "sft" and key == "label" and value is False)
            or (key in _BAD and _is(value, _YES))
            or (key in _SPLITS and str(value).strip().lower() in _HELD_OUT)
        )
        if is_marked:
            yield f"the column {name!r}", repr(value)


def _marks_of_messages(messages: Any) -> Iterator[tuple[str, str]]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            for name, value in message.items():
                if (name in _OF_MESSAGES and _is(value, _NO)) or (name in _OF_MASKED and _is(value, _YES)):
                    yield f"an assistant message with the field {name!r}", f"{value!r} (areno reads weight: 0)"


def _is(value: Any, words: tuple[str, ...]) -> bool:
    if isinstance(value, float):
        value = int(value) if value == int(value) else value
    return str(int(value) if isinstance(value, bool) else value).strip().lower() in words


def swapped_columns(subject: Subject) -> Iterator[Finding]:
    """Look for rows whose answers ask and whose prompts answer."""
    if subject.kind not in ("sft", "dpo", "kto", "rw"):
        return
    for dataset in subject.training_rows:
        rows = [row.row for row in subject.sample_of(dataset) if row.item is not None]
        texts = [
            (text_of_row(subject.kind, row, is_asked=True), text_of_row(subject.kind, row, is_asked=False))
            for row in rows
        ]
        n_asked, n_answered = (sum(_asks(pair[side]) for pair in texts) for side in (0, 1))
        text = f"{dataset.key}: {n_asked} of {len(rows)} prompts read like questions or tasks, {n_answered} answers do"
        if n_answered > max(len(rows) / 4, 2 * n_asked):
            shown = [
                f"prompt {shortened(repr(asked))}, answer {shortened(repr(said))}" for asked, said in texts[:_EXAMPLES]
            ]
            yield red("swapped-columns", f"{text}: they seem to be swapped", shown)
        else:
            yield green("swapped-columns", text)


_TASKS = (
    "what how why who when where which write describe explain give generate create list name find compute calculate"
)
_TASKS += (
    " calculate identify classify rewrite summarize summarise translate provide suggest tell compose construct design"
)
_TASKS += " develop discuss compare evaluate edit convert determine can could would please is are do does solve make"
_ASK: Callable[[str], bool] = frozenset(_TASKS.split()).__contains__


def _asks(text: str) -> bool:
    words = text.split(maxsplit=1)
    return text.rstrip().endswith("?") or (bool(words) and _ASK(words[0].strip(",.:").lower()))
