"""Check and encode the rows of a run with a teacher: fields for the prompt and name of the teacher, and the answer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.policy_experiments import DistillExperimentConfig, PolicyExperimentConfig
from areno.data.chat_template import render_generation_prompt
from areno.data.dataset_formats import MAX_CHECKED
from areno.data.encode import RenderedRow
from areno.data.row_rendering import render_prompt
from areno.data.row_schema import Rows, RowTooLong, choice_problem, row_problem
from areno.errors import DataError, Key
from areno.types import PromptItem


@dataclass(frozen=True)
class TeacherRowRenderer:
    """Checks and encodes the rows of a run with a teacher."""

    names: tuple[str, ...]  # of several teachers
    by: str  # field with the name of the row's teacher
    prompt_key: str | None  # field with the prompt that the teacher reads; None: the row's
    needs_answer: bool  # rows need a response, since the student does not answer all of them
    context_len: int
    max_new_tokens: int

    def check(self, row: Any) -> None:
        """Raise DataError if a row lacks a field that the run needs for its teacher."""
        if self.names and (problem := choice_problem(row, self.by, self.names)):
            raise DataError("{} ({})", problem, Key("teacher.by"))
        if self.prompt_key is not None and (problem := row_problem(row, "prompt", self.prompt_key)):
            raise DataError("{}, which {} asks for", problem, Key("teacher.prompt_key"))
        if self.needs_answer and (problem := row_problem(row, "sft")):
            text = "{}; the rows that the student does not answer need one, or set {}=1"
            raise DataError(text, problem, Key("on_policy_share"))

    def check_all(self, rows: Rows, key: str) -> None:
        """Check all rows, or an even sample of more than a million. The other rows are checked when they are used."""
        if self.prompt_key is None and not self.needs_answer:
            # A dataset of Hugging Face reads a column faster than its rows. Other rows, and columns of lists, raise.
            with contextlib.suppress(AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
                if set(rows.unique(self.by)) <= set(self.names):  # type: ignore[attr-defined]
                    return
        for index in range(0, len(rows), max(1, -(-len(rows) // MAX_CHECKED))):
            try:
                self.check(rows[index])
            except DataError as error:
                [problem] = error.problems
                raise DataError("{} row {}: " + problem.template, Key(key), index, *problem.args) from error

    def render(
        self, tokenizer: Any, row: Mapping[str, Any], index: int, thinking: bool | None
    ) -> RenderedRow[PromptItem]:
        """Render a row and the teacher's prompt. `finish` raises TooLong if the prompt is too long for an answer."""
        self.check(row)
        own, key = render_prompt(tokenizer, row, index, thinking), self.prompt_key
        if key is None:
            return own
        rendered = render_generation_prompt(tokenizer, row[key], thinking)

        def finish(tokens: list[list[int]]) -> PromptItem:
            item, item_tokens = own.finish(tokens[:-1]), tokens[-1]
            room = min(self.max_new_tokens, self.context_len - len(item.tokens))
            if 0 < self.context_len - room < len(item_tokens):
                text = "field {} ({}) has {} tokens, which leave no room for {} tokens of an answer ({}) in the "
                text += "model's context of {}"
                keys = Key("teacher.prompt_key"), Key("gconfig.max_new_tokens")
                raise RowTooLong(
                    len(item_tokens), text, key, keys[0], len(item_tokens), room, keys[1], self.context_len
                )
            item.teacher_tokens = item_tokens
            return item

        return RenderedRow([*own.texts, (rendered, tokenizer.chat_template is None)], finish)


def teacher_row_renderer(config: Any, context_len: int) -> TeacherRowRenderer | None:
    """Return the `TeacherRowRenderer` of a run. None if its rows need no fields for a teacher."""
    teacher = config.teacher if isinstance(config, PolicyExperimentConfig) else None
    if teacher is None:
        return None
    names = () if teacher.models is None else tuple(teacher.models)
    needs_answer = isinstance(config, DistillExperimentConfig) and config.on_policy_share < 1
    if not (names or teacher.prompt_key is not None or needs_answer):
        return None
    return TeacherRowRenderer(
        names, teacher.by or "", teacher.prompt_key, needs_answer, context_len, config.gconfig.max_new_tokens
    )
