"""Render rows, as `RenderedRow`: prompts, supervised rows, preference pairs or ranked answers.

Messages always go through the chat template. If the tokenizer has a template, a plain text becomes one user message,
and its answer one message of the assistant. Without a template, the text itself is encoded, with the special tokens
that the tokenizer adds (such as BOS). Control tokens inside messages are encoded as ordinary text, see
control_tokens.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from areno.config.datasets import ChangedTurns
from areno.data.chat_template import Prompt, render_generation_prompt
from areno.data.control_tokens import BREAK
from areno.data.encode import RenderedRow
from areno.data.messages import separate_calls, template_messages
from areno.data.row_schema import (
    TiedAnswers,
    describe_json_error,
    parse_labelled_row,
    parse_preference_row,
    parse_ranked_row,
    with_joined_text,
)
from areno.data.template_omissions import check_rendered
from areno.data.token_boundaries import render_sequence
from areno.data.trained_turns import training_texts
from areno.errors import DataError, Key
from areno.types import AnswersItem, Item, PairItem, PromptItem, TrainSequence


def render_prompt(
    tokenizer: Any,
    row: Mapping[str, Any],
    index: int,
    enable_thinking: bool | None = None,
    *,
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
) -> RenderedRow[PromptItem]:
    prompt, plain = row[prompt_key], isinstance(row[prompt_key], str)
    rendered = render_checked_prompt(tokenizer, prompt, enable_thinking, tools_of(row))
    text = rendered.replace(BREAK, "")

    def finish(tokens: list[list[int]]) -> PromptItem:
        return PromptItem(
            prompt=prompt if plain else text,
            text=text,
            tokens=tokens[0],
            messages=None if plain else with_joined_text(prompt, template_messages(tokenizer, prompt)),
            solutions=row.get(solutions_key),
            record=row,
            index=index,
        )

    return RenderedRow([(rendered, tokenizer.chat_template is None)], finish)


def render_sft(
    tokenizer: Any,
    row: Mapping[str, Any],
    index: int = 0,
    enable_thinking: bool | None = None,
    changed: ChangedTurns = "split",
) -> RenderedRow[AnswersItem]:
    """Render a row for supervised fine-tuning, which trains the response or every assistant turn of the messages.

    Some templates render a turn differently once more messages follow. In this case,
    `changed="split"` makes each turn a sequence.
    """
    prompt, answer = (row["prompt"], row["response"]) if row.get("response") is not None else ([], row["messages"])
    drafts = _render_answer(tokenizer, prompt, answer, enable_thinking, tools_of(row), changed)
    return _join_rendered(drafts, lambda rows: AnswersItem(rows=rows, index=index))


def render_pair(tokenizer: Any, row: Mapping[str, Any], index: int) -> RenderedRow[PairItem]:
    """Render a row with a chosen and a rejected answer, for DPO.

    Assistant turns in the prompt are not trained, and an answer of several turns stays one sequence. `finish` raises
    DataError if an answer has no token to train on, and Tie if both answers have the same tokens.
    """
    prompt, *answers = parse_preference_row(row)
    tools = tools_of(row)
    drafts = [draft for answer in answers for draft in _render_answer(tokenizer, prompt, answer, None, tools)]

    def make_item(rows: list[TrainSequence]) -> PairItem:
        found = dict(zip(("chosen", "rejected"), rows, strict=True))
        for name, sequence in found.items():
            if np.all(sequence.prompt_mask[1:]):  # type: ignore[index]
                raise DataError(f"the answer in field {name} has no token to train on")
        if _have_equal_tokens(found["chosen"], found["rejected"]):
            raise TiedAnswers("fields chosen and rejected have the same tokens, so none is preferred")
        return PairItem(**found, index=index)

    return _join_rendered(drafts, make_item)


def render_labelled(tokenizer: Any, row: Mapping[str, Any], index: int) -> RenderedRow[AnswersItem]:
    """Render a row with one labelled answer, for KTO. The reward is 1 for a desirable answer and 0 otherwise."""
    prompt, answer, label = parse_labelled_row(row)
    return _render_answers(tokenizer, prompt, [answer], tools_of(row), [float(label)], index)


def render_ranked(tokenizer: Any, row: Mapping[str, Any], index: int) -> RenderedRow[AnswersItem]:
    """Render a row with ranked answers, for a reward model. The item has a sequence for each answer, the best first.

    The reward of a sequence is the rating of its answer. Every token has the answer's level (`RankedAnswers.levels`) in
    `returns`. The margin between two answers is the difference of their levels.
    """
    found = parse_ranked_row(row)
    draft = _render_answers(tokenizer, found.prompt, found.answers, tools_of(row), found.ratings, index)

    def finish(tokens: list[list[int]]) -> AnswersItem:
        item = draft.finish(tokens)
        pairs = itertools.combinations(item.rows, 2)
        if all(one.reward == other.reward or _have_equal_tokens(one, other) for one, other in pairs):
            raise TiedAnswers("no answer is preferred to one with other tokens")
        for sequence, level in zip(item.rows, found.levels, strict=True):
            sequence.returns = np.full(len(sequence.tokens), level, np.float32)  # type: ignore[arg-type]
        return item

    return RenderedRow(draft.texts, finish)


def _have_equal_tokens(one: TrainSequence, other: TrainSequence) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.prompt_mask, other.prompt_mask)  # type: ignore[arg-type]


def _render_answers(
    tokenizer: Any, prompt: Any, answers: Sequence[Any], tools: Any, ratings: Sequence[float], index: int
) -> RenderedRow[AnswersItem]:
    drafts = [draft for answer in answers for draft in _render_answer(tokenizer, prompt, answer, None, tools)]

    def make_item(rows: list[TrainSequence]) -> AnswersItem:
        for number, sequence in enumerate(rows):
            if np.all(sequence.prompt_mask[1:]):  # type: ignore[index]
                raise DataError(f"answer {number} has no token to train on")
            sequence.reward = ratings[number]
        return AnswersItem(rows=rows, index=index)

    return _join_rendered(drafts, make_item)


def _join_rendered(drafts: Sequence[RenderedRow[Any]], make: Callable[[list[Any]], Item]) -> RenderedRow[Item]:
    """Join several rendered rows to one. `make` makes a single item from the items of the rows."""
    ends = list(itertools.accumulate(len(draft.texts) for draft in drafts))

    def finish(tokens: list[list[int]]) -> Item:
        parts = zip(drafts, [0, *ends], ends, strict=False)
        return make([draft.finish(tokens[start:end]) for draft, start, end in parts])

    return RenderedRow([text for draft in drafts for text in draft.texts], finish)


def render_checked_prompt(tokenizer: Any, prompt: Prompt, thinking: bool | None, tools: Any) -> str:
    """Render a prompt by `render_generation_prompt`. Raises DataError if the template leaves out a message."""
    if not isinstance(prompt, str):
        prompt = separate_calls(tokenizer, template_messages(tokenizer, prompt))
        check_rendered(tokenizer, prompt, tools, thinking, True)
    return render_generation_prompt(tokenizer, prompt, thinking, tools)


def _render_answer(
    tokenizer: Any, prompt: Any, answer: Any, thinking: bool | None, tools: Any, changed: ChangedTurns | None = None
) -> list[RenderedRow[TrainSequence]]:
    """Render a prompt and its answer, each a text or messages, as training sequences. See `training_texts`."""
    if tokenizer.chat_template is None and isinstance(prompt, str) and isinstance(answer, str):
        if tokenizer.eos_token_id is None:
            text = "the tokenizer has no end-of-sequence token; set {} to one that has it"
            raise DataError(text, Key("tokenizer_path"))
        text = prompt + answer
        return [render_sequence(tokenizer, text, [(len(prompt), len(text))], plain=True)]
    before, after = (
        [{"role": role, "content": part}] if isinstance(part, str) else part
        for role, part in (("user", prompt), ("assistant", answer))
    )
    texts = training_texts(tokenizer, [*before, *after], len(before), thinking, tools, changed)
    return [render_sequence(tokenizer, *found) for found in texts]


def tools_of(row: Mapping[str, Any]) -> Any:
    """Return the tools of a row, parsed if they are JSON text."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"field tools is text, but not JSON: {describe_json_error(error)}") from error
