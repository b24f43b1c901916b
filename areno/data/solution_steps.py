"""Split solutions into steps and encode them, for process reward models.

As in TRL, each step is encoded by itself and followed by the separator. The score at the last token of the separator is
the score of the step. Solutions of a dataset and answers of a policy are encoded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from areno.config.experiments import ProcessRewardActorConfig
from areno.config.models import ModelConfig
from areno.config.reward import StepScore
from areno.data.control_tokens import control_tokens
from areno.data.encode import RenderedRow, Text, encode_continuations
from areno.data.encode_ahead import CHUNK
from areno.data.row_rendering import render_checked_prompt, tools_of
from areno.data.row_schema import Rows, parse_step_row, rows_at
from areno.errors import DataError, Key, Problem
from areno.models.config import TransformerConfig
from areno.types import AnswersItem, TrainSequence

_REDUCE: dict[StepScore, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
    "prod": math.prod,
}


def step_separator(actor: ModelConfig, model: TransformerConfig) -> str | None:
    """Return the text that a process reward model is trained to read after each step. None for other models.

    It is actor.step_separator, else the text that config.json of the model records, else a line break.
    """
    if not isinstance(actor, ProcessRewardActorConfig):
        return None
    return actor.step_separator or model.hf.get("step_separator") or "\n"


def separator_problem(tokenizer: Any, separator: str) -> str | None:
    """Return the reason why a tokenizer cannot encode a separator of steps. None if it can."""
    tokens = tokenizer.encode(separator, add_special_tokens=False)
    if not tokens:
        return f"is {separator!r}, of which the tokenizer makes no token; choose another text"
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        return f"is {separator!r}, which the tokenizer has no token for ({tokenizer.unk_token}); choose another text"
    return None


def check_separator(tokenizer: Any, separator: str, rows: Rows, key: str) -> None:
    """Raise DataError if the tokenizer cannot encode the separator, or a step has it anywhere but at the end."""
    setting, problems = "actor.step_separator", []
    if problem := separator_problem(tokenizer, separator):
        problems.append(Problem(setting, problem))
    found = [
        (index, number)
        for start in range(0, len(rows), CHUNK)
        for index, row in enumerate(rows_at(rows, range(start, min(start + CHUNK, len(rows)))), start)
        for number, step in enumerate(row["completions"])
        if separator in step.removesuffix(separator)
    ]
    if found:
        text = "is {!r}, which is inside of steps, so that answers would be cut there; choose a text that no step "
        text += "contains. Number of these steps: {}; the first is in {} row {}, completions[{}]"
        problems.append(Problem(setting, text, separator, len(found), Key(key), *found[0]))
    if problems:
        raise DataError(problems)


def split_steps(answer: str, separator: str) -> list[str]:
    """Split an answer at the separators, and drop blank steps. If all steps are blank, they count as a single step."""
    pieces = answer.split(separator)
    return [piece for piece in pieces if piece.strip()] or ["".join(pieces)]


def _join_steps(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], separator: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Put the separator after each step. Return (all tokens, index of the last token of each separator)."""
    tokens, ends = list(prompt), []
    for step in steps:
        tokens += [*step, *separator]
        ends.append(len(tokens) - 1)
    return tokens, ends


def render_steps(tokenizer: Any, row: Mapping[str, Any], index: int, separator: str) -> RenderedRow[AnswersItem]:
    """Render a row with labelled steps, for a process reward model.

    prompt_mask is False only at the last token of each separator, where `returns` has the label of the step. A step
    that already ends with the separator gets no second one.
    """
    prompt, steps, labels = parse_step_row(row)
    rendered = render_checked_prompt(tokenizer, prompt, None, tools_of(row))
    rest = [separator, *(step.removesuffix(separator) for step in steps)]
    joins = control_tokens(tokenizer).adds_no_space
    texts: list[Text] = [(rendered, tokenizer.chat_template is None), *((text, False) for text in rest if joins)]

    def finish(encoded: list[list[int]]) -> AnswersItem:
        before, mark, *found = encoded if joins else [*encoded, *encode_continuations(tokenizer, rest)]
        tokens, ends = _join_steps(before, found, mark)
        prompt_mask, returns = np.ones(len(tokens), bool), np.zeros(len(tokens), np.float32)
        prompt_mask[ends], returns[ends] = False, labels
        return AnswersItem(
            rows=[TrainSequence(tokens=np.array(tokens, np.int64), prompt_mask=prompt_mask, returns=returns)],
            index=index,
        )

    return RenderedRow(texts, finish)


@dataclass(frozen=True)
class StepEncoder:
    """Encodes answers for a process reward model, and reduces the scores of their steps to rewards."""

    tokenizer: Any
    separator: str
    score: StepScore
    limit: int  # tokens of a row

    def encode(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[str]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Encode answers, which are texts without special tokens. Returns (token ids, index of each step's last token).

        The last step of an answer also gets a separator. A row that is too long is cut: the step at the limit is
        shortened, so that its separator fits, and later steps are left out. If the prompt alone reaches the limit, the
        last token is returned as the end of a step.
        """
        of_answers = [split_steps(answer, self.separator) for answer in answers]
        texts = [self.separator, *(step for steps in of_answers for step in steps)]
        mark, *encoded = encode_continuations(self.tokenizer, texts)
        rest, found = iter(encoded), []
        for prompt, steps in zip(prompts, of_answers, strict=True):
            tokens, ends = _join_steps(prompt, [next(rest) for _ in steps], mark)
            if len(tokens) > self.limit:
                tokens = tokens[: self.limit - len(mark)]
                ends = [end for end in ends if end < len(tokens)]
                if len(tokens) >= (ends[-1] + 2 if ends else len(prompt)):  # a part of a step, or none so far
                    tokens += mark
                    ends.append(len(tokens) - 1)
                ends = ends or [len(tokens) - 1]
            found.append((tuple(tokens), tuple(ends)))
        return found

    def reward_of_step_scores(self, scores: Sequence[float]) -> float:
        return _REDUCE[self.score](scores)
