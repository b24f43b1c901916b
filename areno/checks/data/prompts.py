"""Checks of prompts: where the model begins to write, and that training and serving see the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from areno.checks.inputs.encoded_rows import EncodedRow
from areno.checks.inputs.findings import Finding, NotChecked, green, red
from areno.checks.inputs.subject import Subject
from areno.checks.inputs.talks import answers_of, markers_of, rendered, squeezed, without_think_tags
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.data.messages import with_template_variables
from areno.data.row_schema import template_variables
from areno.errors import DataError
from areno.server.errors import ApiError
from areno.server.messages import read_messages
from areno.server.parsers import parser_for_template
from areno.server.prompt_builder import PromptBuilder

_SHOWN = 3
_LONGEST_MARK = 30  # characters of a control token
_WORD = "areno"  # an answer that no template changes
_CHECKED = 200  # rows: building a prompt as the server does takes about a millisecond


def prompt_end(subject: Subject) -> Iterator[Finding]:
    """Check that a prompt ends where the template lets the assistant's text begin."""
    tokenizer = subject.tokenizer
    if tokenizer.chat_template is None:
        raise NotChecked("the tokenizer has no chat template: the model continues the text")
    asked = [{"role": "user", "content": "?"}]
    prompt = rendered(tokenizer, asked, None, True)
    talk = rendered(tokenizer, [*asked, {"role": "assistant", "content": _WORD}], None, False)
    if prompt is None or talk is None or _WORD not in talk:
        raise NotChecked("the chat template refuses a question and its answer")
    before = talk[: talk.rindex(_WORD)]
    opened = rendered(tokenizer, asked, None, False) or ""
    # A template may open the assistant's turn and leave the channel of the answer to the model.
    missing = _without_tags(before).removeprefix(_without_tags(prompt))
    if missing and prompt == opened:
        text = f"the template writes {_from_mark(before, before.find(missing))!r} before an answer, which no prompt of"
        text += " the rollout ends with: it does not read add_generation_prompt"
        yield red("prompt-end", text, [f"a prompt ends with {_from_mark(prompt, len(prompt) - 40)!r}"])
        return
    thinking = _variables(_thinking_modes(subject)[0])
    if (told := other_prompt(tokenizer, asked, None, thinking)) is not None:
        yield red("prompt-end", *told)
        return
    end = prompt[len(opened) :] if prompt.startswith(opened) else ""
    for dataset in subject.datasets:
        rows = [row for row in subject.sample_of(dataset) if row.item is not None and not row.sequences]
        wrong = [row for row in rows if not row.item.text.endswith(_end_of(subject, row, end))]
        if wrong:
            text = f"{dataset.key}: {len(wrong)} of {len(rows)} prompts do not end where the assistant begins"
            yield red("prompt-end", text, [f"row {row.index}: {row.item.text[-40:]!r}" for row in wrong[:_SHOWN]])
            return
    yield green("prompt-end", f"a prompt ends with {(end or prompt[-20:])!r}, and the assistant begins")


def other_prompt(
    tokenizer: Any, messages: Sequence[Any], tools: Any, variables: dict[str, Any]
) -> tuple[str, list[str]] | None:
    """Return (line, details) if a prompt is not how the template begins the same conversation with its answer.

    Texts are compared, because a token may reach over the end of a prompt: one or two line breaks after <think>.
    """
    prompt = rendered(tokenizer, messages, tools, True, **variables)
    talk = rendered(tokenizer, [*messages, {"role": "assistant", "content": _WORD}], tools, False, **variables)
    if prompt is None or talk is None or _WORD not in talk:
        return None
    before = talk[: talk.rindex(_WORD)]
    n_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before, strict=False)))
    same = prompt[:n_equal]
    n_same = same.rindex("<") if same.rfind("<") > same.rfind(">") else len(same)
    left, written = prompt[n_same:], before[n_same:]
    # Some templates open the reasoning in the prompt alone, and write an answer without reasoning without tags.
    has_own_tags = not _without_tags(left) and not (left.strip() and _tags_of(left) <= _tags_of(written))
    # The model itself writes a line break after a control token, but none within the name of its role.
    is_cut = not left and same[-1:].isalnum() and written.startswith("\n")
    if has_own_tags and not is_cut:
        return None
    text = "the template ends a prompt otherwise than it begins an answer in a whole conversation: {!r}, there {!r}"
    ours, theirs = _from_mark(prompt, n_same - 12)[:60], _from_mark(before, n_same - 12)[:60]
    return text.format(ours, theirs), [f"a prompt ends with {prompt[-60:]!r}", f"an answer follows {before[-60:]!r}"]


def _from_mark(text: str, at: int) -> str:
    """Return the text from here on, and before it the beginning of a control token such as <|im_start|>."""
    at = max(0, at)
    opened = text.rfind("<", max(0, at - _LONGEST_MARK), at)
    return text[opened if opened > text.rfind(">", 0, at) else at :]


def _tags_of(text: str) -> set[str]:
    return {tag for tag in ("<think>", "</think>") if tag in text}


def serving(subject: Subject) -> Iterator[Finding]:
    """Compare the tokens of prompts with those that the server makes of the same messages, and with transformers'."""
    if subject.tokenizer.chat_template is None:
        raise NotChecked("the tokenizer has no chat template: the server encodes texts as they are")
    if subject.kind == "prm":
        raise NotChecked("a process reward model is not served")
    for dataset in subject.training_rows:
        rows = [row for row in subject.sample_of(dataset, _CHECKED) if row.item is not None]
        first = [(row.index, next(_serving_faults(subject, row), None)) for row in rows]
        faults, n_rows = [f"row {index}: {fault}" for index, fault in first if fault is not None], len(rows)
        if faults:
            text = f"{dataset.key}: prompts of {len(faults)} of {n_rows} rows have other tokens than in serving"
            yield red("serving", text, faults[:_SHOWN])
        else:
            yield green("serving", f"{dataset.key}: the prompts of {n_rows} rows have the tokens that the server makes")


def _serving_faults(subject: Subject, row: EncodedRow) -> Iterator[str]:
    tokenizer = with_template_variables(subject.tokenizer, template_variables(row.row))
    marks = list(map(squeezed, markers_of(subject.tokenizer)))
    for messages, tools, tokens in _prompts(subject, row):
        found = list[list[int]]()
        for thinking in _thinking_modes(subject):
            builder = PromptBuilder(tokenizer, parser_for_template(tokenizer.chat_template), thinking=thinking)
            try:
                found.append(builder.build_prompt(read_messages(_with_ids(messages)), tools).tokens)
            except (DataError, ApiError) as error:
                yield f"the server refuses it: {error}"
                return
        if tokens not in found:
            if any(_begins_as(row, each) for each in found):
                continue  # the row has the same tokens, but earlier ones are trained: see only-answers
            yield _difference(subject, tokens, found[0])
            continue
        text = rendered(tokenizer, messages, tools, True, **_variables(_thinking_modes(subject)[found.index(tokens)]))
        plain = squeezed(str(messages))
        if text is None or any(token in plain for token in (*map(str, tokenizer.all_special_tokens), *marks)):
            continue  # control tokens in messages are encoded as text, which transformers does not do
        of_transformers = tokenizer.encode(text, add_special_tokens=False)
        if of_transformers != tokens:
            yield f"transformers: {_difference(subject, tokens, of_transformers)}"


def _begins_as(row: EncodedRow, tokens: Sequence[int]) -> bool:
    return any(np.asarray(each.tokens)[: len(tokens)].tolist() == list(tokens) for each in row.sequences)


def _prompts(subject: Subject, row: EncodedRow) -> Iterator[tuple[list[dict[str, Any]], Any, list[int]]]:
    """Yield (messages, tools, tokens) of each prompt of a row: the tokens before its first trained token."""
    if not row.sequences:
        given = row.row["prompt"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else [dict(each) for each in given]
        yield messages, row.row.get("tools") or None, list(row.item.tokens)
        return
    answers = answers_of(subject.kind, row.row)
    of_sequences = answers if len(answers) == len(row.sequences) else [answers[0]] * len(row.sequences)
    for number, (sequence, turns) in enumerate(zip(row.sequences, of_sequences, strict=True)):
        trained = np.flatnonzero(~np.asarray(sequence.prompt_mask, dtype=bool))
        if not len(trained) or not turns:
            continue
        turn = turns[number] if len(answers) == 1 and len(row.sequences) == len(turns) else turns[0]
        if len(answers) == 1 and len(row.sequences) == 1 and subject.changed_turns == "last_turn":
            continue  # which turn it is depends on the template
        yield turn.before, turn.tools, np.asarray(sequence.tokens)[: trained[0]].tolist()


def _with_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form of OpenAI's API, in which calls and their results have ids and no weight."""
    found, n_calls = [], 0
    for message in messages:
        copied = {key: value for key, value in message.items() if key != "weight" and value is not None}
        if isinstance(copied.get("tool_calls"), list):
            calls = [
                {"id": f"call_{n_calls + n}", "type": "function", **call} for n, call in enumerate(copied["tool_calls"])
            ]
            copied["tool_calls"], n_calls = calls, n_calls + len(calls)
        if copied.get("role") == "tool":
            copied.setdefault("tool_call_id", f"call_{max(0, n_calls - 1)}")
        found.append(copied)
    return found


def _thinking_modes(subject: Subject) -> Sequence[bool | None]:
    if isinstance(subject.config, PolicyExperimentConfig):
        return [subject.config.rollout.enable_thinking]
    return [None, True, False]


def _variables(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"enable_thinking": thinking}


def _end_of(subject: Subject, row: EncodedRow, end: str) -> str:
    """Return how the prompt of a row ends: as transformers renders it with the row's variables."""
    given = row.row["prompt"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    how = {**_variables(_thinking_modes(subject)[0]), **template_variables(row.row)}
    opened = rendered(subject.tokenizer, messages, row.row.get("tools"), True, **how)
    closed = rendered(subject.tokenizer, messages, row.row.get("tools"), False, **how)
    return opened[len(closed) :] if opened and closed and opened.startswith(closed) else end


def _without_tags(text: str) -> str:
    return squeezed(without_think_tags(text))


def _difference(subject: Subject, tokens: Sequence[int], other: Sequence[int]) -> str:
    n_same = next((n for n, (one, two) in enumerate(zip(tokens, other, strict=False)) if one != two), None)
    at = min(len(tokens), len(other)) if n_same is None else n_same
    ours, theirs = (subject.tokenizer.decode(each[at : at + 8]) for each in (tokens, other))
    return f"from token {at} on, training has {ours!r}, serving {theirs!r}"
