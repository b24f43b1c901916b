"""Rewards of a judge, a language model. It scores each completion, or compares the completions of a prompt in pairs.

`Judging` turns the samples of a rollout into questions, which judge_readers.py answers, and turns the answers into
rewards. The number of a sample is its index in the rollout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from areno import heartbeat
from areno.config.judge import ANSWERS, JudgeConfig, template_fields
from areno.data.chat_template import END_THINK, Prompt
from areno.errors import DataError, Key
from areno.scoring.judge_readers import KEY, JudgeBackend, Score, Verdict, WriteReplies, strip_reasoning
from areno.scoring.pool import report_failures
from areno.scoring.records import CompletionRecord, Record, reward_problem
from areno.types import RewardOutcome
from areno.user_processes.pool import SlowCallTimer

logger = logging.getLogger("areno.scoring")

PART = "judge"
"""Name of the judge's part of a reward. Names of its further parts begin with it."""
_LOOK_S = 0.5


@dataclass(frozen=True)
class _JudgedCompletion:
    """An answer without its reasoning, and the other values to fill into the judge's question."""

    text: str
    fields: Mapping[str, str]

    @property
    def is_blank(self) -> bool:
        """Whether the answer has no letter and no digit."""
        return not any(map(str.isalnum, self.text))


def _field_text(value: Any) -> str:
    """Return a field of a row as text. A list of alternatives is joined by "or"."""
    if isinstance(value, list | tuple) and all(isinstance(each, str | int | float) for each in value):
        return " or ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    texts = [_field_text(message.get("content") or message.get("tool_calls") or "") for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(messages, texts, strict=True))


@dataclass(frozen=True)
class JudgeTask:
    """A prompt, and the numbers of its samples."""

    numbers: Sequence[int]
    prompt: Prompt
    opens_reasoning: bool = False  # the answers begin with reasoning


def check_fields(config: JudgeConfig, row: Mapping[str, Any]) -> None:
    """Raise DataError if a row lacks a field that the judge's question uses."""
    named = template_fields(config.question_template) - set(ANSWERS)
    if missing := [name for name in sorted(named) if row.get(name) is None]:
        text = "a row has no field {}, which the question of the judge names; add it to the dataset, or set {}"
        raise DataError(text, missing[0], Key(f"{KEY}.{'rubric' if config.template is None else 'template'}"))


class Judging(AbstractContextManager["Judging"]):
    """Judges the samples of a rollout as they arrive. Use it as a context manager.

    Only samples of the same task are compared with each other.
    """

    def __init__(self, config: JudgeConfig, reader: JudgeBackend, task_of: Callable[[int], JudgeTask]):
        self._config, self._reader, self._task_of = config, reader, task_of
        self._template = config.question_template
        self._field_names = template_fields(self._template) - set(ANSWERS)
        self._worst = 0.0 if config.weight >= 0 else 1.0  # the score with the lowest reward
        self._answers: dict[int, _JudgedCompletion] = {}
        self._asked: dict[str, Future[Verdict]] = {}
        self._verdicts: dict[tuple[int, ...], Future[Verdict]] = {}  # (number) or (first, second) -> verdict

    def add(self, records: Mapping[int, Record]) -> None:
        """Ask the judge about samples, which are given by number. This does not wait for the answers."""
        for number, record in records.items():
            answer = self._answers[number] = self._judged_completion(record, self._task_of(number))
            if not self._config.compare:
                if not self._is_refused(answer):
                    self._ask_judge((number,), {**answer.fields, "completion": answer.text})
                continue
            for other, theirs in self._opponents(number):
                if self._score_by_rule(answer, theirs) is None:
                    self._ask_judge((number, other), {**answer.fields, "first": answer.text, "second": theirs.text})
                    self._ask_judge((other, number), {**answer.fields, "first": theirs.text, "second": answer.text})

    def _is_refused(self, answer: _JudgedCompletion) -> bool:
        return self._config.refuse_blank and answer.is_blank

    def _opponents(self, number: int) -> list[tuple[int, _JudgedCompletion]]:
        """Return (number, answer) of the samples with which a sample is compared, as far as they have arrived."""
        group, most, found = self._task_of(number).numbers, self._config.opponents, []
        own, n = group.index(number), len(group)
        for index, other in enumerate(group):
            apart = min((own - index) % n, (index - own) % n)
            if other != number and other in self._answers and (most is None or apart <= most):
                found.append((other, self._answers[other]))
        return found

    def _score_by_rule(self, first: _JudgedCompletion, second: _JudgedCompletion) -> float | None:
        """Return the score of the first of two answers if it is known without the judge, otherwise None."""
        if self._is_refused(first):
            return self._worst
        if self._is_refused(second):
            return 1.0 - self._worst
        return 0.5 if first.text == second.text else None

    def _ask_judge(self, numbers: tuple[int, ...], fields: Mapping[str, str]) -> None:
        question = self._template.format_map(fields)
        if question not in self._asked:  # equal questions have one verdict, as rounding depends on the batch
            self._asked[question] = self._reader.ask(question)
        self._verdicts[numbers] = self._asked[question]

    def _judged_completion(self, record: Record, task: JudgeTask) -> _JudgedCompletion:
        if isinstance(record, CompletionRecord):
            row, answer, rendered = record.asked.item.record, record.completion, record.rendered
        else:
            row, answer, rendered = record.record, record.final_answer, record.rendered_completion
        if task.opens_reasoning and END_THINK not in rendered:
            answer = ""
        prompt = task.prompt if isinstance(task.prompt, str) else _conversation_text(task.prompt)
        known = {**row, "solutions": record.solutions, "prompt": prompt}
        check_fields(self._config, known)
        return _JudgedCompletion(
            strip_reasoning(answer), {name: _field_text(known[name]) for name in self._field_names}
        )

    @property
    def n_open(self) -> int:
        """Number of questions that are in progress, without a verdict yet."""
        return sum(not future.done() for future in self._asked.values()) if self._reader.is_early else 0

    def answer_questions(self, score: Score, write: WriteReplies) -> None:
        """If the judge is a model of the run, let it answer the questions. With an endpoint, this does nothing."""
        self._reader.answer_questions(score, write)

    def collect_outcomes(self) -> dict[int, RewardOutcome]:
        """Wait for all verdicts, and return the scores, 0 to 1 without weight. Call `answer_questions` before."""
        slow, futures = SlowCallTimer(), list(self._asked.values())
        while wait(futures, _LOOK_S).not_done:
            heartbeat.beat()
            if slow.is_due():
                logger.info(
                    "judge: %d of %d questions wait after %.0f s", self.n_open, len(futures), slow.elapsed_seconds
                )
        outcome = self._outcome_by_comparison if self._config.compare else self._outcome_by_score
        return {number: outcome(number) for number in self._answers}

    def _blank_part(self, number: int) -> dict[str, float]:
        """Return {"blank": 1 for a blank answer, else 0} if blank answers get the lowest reward, otherwise {}."""
        answer = self._answers[number]
        return {"blank": float(answer.is_blank)} if self._config.refuse_blank else {}

    def _outcome_by_score(self, number: int) -> RewardOutcome:
        parts = self._blank_part(number)
        if self._is_refused(self._answers[number]):
            return _judge_outcome(self._worst, parts)
        verdict = self._verdicts[number,].result()
        parts |= verdict.parts
        if not verdict.probabilities:
            return RewardOutcome(None, verdict.status, verdict.message, _judge_parts(parts))
        scores = np.linspace(0.0, 1.0, len(verdict.probabilities))
        return _judge_outcome(float(scores @ verdict.probabilities), parts)

    def _outcome_by_comparison(self, number: int) -> RewardOutcome:
        """Return the share of comparisons that a sample wins.

        Each pair is judged in both orders, and the mean score counts, so that a preference for a position cancels out.
        A sample has no score if there is nothing to compare it with, or if all its comparisons by the judge failed.
        """
        own, shares, failed, is_read = self._answers[number], [], Verdict(), False
        parts: dict[str, list[float]] = {}
        for other, theirs in self._opponents(number):
            if (share := self._score_by_rule(own, theirs)) is not None:
                shares.append(share)
                continue
            orders = [self._verdicts[numbers].result() for numbers in ((number, other), (other, number))]
            for verdict in orders:
                for name, value in {**verdict.parts, "failed": float(not verdict.probabilities)}.items():
                    parts.setdefault(name, []).append(value)
                failed = failed if verdict.probabilities else verdict
            if all(verdict.probabilities for verdict in orders):
                is_read = True
                as_first, as_second = orders[0].probabilities[0], orders[1].probabilities[1]
                shares.append((as_first + as_second) / 2)
                parts.setdefault("first", []).append((as_first + 1 - as_second) / 2)
                parts.setdefault("disagreement", []).append(float((as_first - 0.5) * (as_second - 0.5) < 0))
        means = self._blank_part(number) | {name: float(np.mean(values)) for name, values in parts.items()}
        if failed.status != "ok" and not is_read:
            return RewardOutcome(None, failed.status, failed.message, _judge_parts(means))
        if not shares:
            text = "judge: there is no other answer to this prompt, with which this one could be compared"
            return RewardOutcome(None, "error", text, _judge_parts(means))
        return _judge_outcome(float(np.mean(shares)), means)

    def __exit__(self, *exc: object) -> None:
        for future in self._asked.values():
            future.cancel()


def _judge_parts(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{PART}/{name}": value for name, value in parts.items()}


def _judge_outcome(score: float, parts: Mapping[str, float]) -> RewardOutcome:
    return RewardOutcome(score, parts={PART: score, **_judge_parts(parts)})


def add_judge_scores(
    records: Sequence[Record],
    outcomes: Sequence[RewardOutcome] | None,
    judged: Sequence[RewardOutcome],
    weight: float,
    source: str = "fn",
) -> list[RewardOutcome]:
    """Add the scores of a judge, times `weight`, to the outcomes of the other reward sources, if there are any.

    If an outcome has no named parts, its value becomes the part `source`. A sample without a verdict is a reward error.
    """
    before = [RewardOutcome(0.0)] * len(records) if outcomes is None else list(outcomes)
    found = []
    for own, verdict in zip(before, judged, strict=True):
        parts = dict(own.parts) or ({} if outcomes is None or own.value is None else {source: own.value})
        parts |= verdict.parts
        if own.value is None:
            found.append(own)
        elif verdict.value is None:
            found.append(RewardOutcome(None, verdict.status, verdict.message, parts, KEY))
        elif problem := reward_problem(value := own.value + weight * verdict.value):
            found.append(RewardOutcome(None, "not_finite", f"with the judge: {problem}", parts, KEY))
        else:
            found.append(RewardOutcome(value, parts=parts))
    asked = [index for index, own in enumerate(before) if own.value is not None]
    report_failures([records[index] for index in asked], [found[index] for index in asked])
    return found
