"""Rewards of a judge: a language model that reads completions, scores them, or compares those of a prompt in pairs.

`Judging` turns the samples of a rollout into questions, and the verdicts on them into rewards. The questions are
answered either by `RoleReader`, with a model of the run, or by `EndpointReader`, with requests to a server. Both give
for each question a probability for each label.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from areno import heartbeat
from areno.config.judge import ANSWERS, JudgeConfig, fields_of
from areno.data.encode import encode_generation_prompt
from areno.errors import ConfigError, DataError, Key, Problem, printable
from areno.rewards.pool import report_failures
from areno.rewards.records import CompletionRecord, Record, reward_problem
from areno.types import RewardOutcome
from areno.user_processes.pool import SlowTimer

logger = logging.getLogger("areno.rewards")

KEY = "reward.judge"
PART = "judge"
"""Name of the judge's part of a reward, and beginning of the names of other parts."""
_LOOK_S = 0.5
_LABEL_TOKENS = 16  # of a reply that should be a label; a server without log-probabilities may add a few words
_TOP = 20  # the most log-probabilities that endpoints list for a token
_SHOWN_CHARS = 200

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Function that computes the log-probability of each token of rows of token ids."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a judge to one question.

    Attributes:
        probabilities: Probability of each label, with a sum of 1. Empty if there is no verdict.
        status: "ok", or why there is no verdict. "error": the reply holds no label, or the endpoint failed.
        message: Why there is no verdict, in words.
        parts: Numbers about the verdict by name, which become parts of the reward.
    """

    probabilities: tuple[float, ...] = ()
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


class Reader(Protocol):
    """Answers the questions of a judge."""

    def ask(self, question: str) -> Future[Verdict]:
        """Take a question, and return the future of its verdict.

        Args:
            question: The text of the question.
        """
        ...

    def complete(self, score: Score | None) -> None:
        """Begin to answer all questions that are not cancelled, if that has not begun yet.

        Args:
            score: Scores rows with the judge of the run. None if there is none.
        """
        ...


class RoleReader:
    """Answers questions with a model of the run, by the probabilities of the labels after the question.

    A question and the first token of a label are a row, of which the model computes the log-probability of the last
    token. The rows of a question share all tokens but one, and the engine computes shared tokens once.

    Args:
        config: Settings of the judge.
        tokenizer: Tokenizer of the judge's folder.
        context_len: Longest row in tokens.

    Raises:
        ConfigError: Labels have no tokens, or begin with the same token.
    """

    def __init__(self, config: JudgeConfig, tokenizer: Any, context_len: int):
        self._tokenizer, self._context_len = tokenizer, context_len
        self._waiting: list[tuple[str, Future[Verdict]]] = []
        # Without a chat template the question is continued as text, with a space if the vocabulary has such tokens.
        for space in ("",) if tokenizer.chat_template is not None else (" ", ""):
            encoded = [tokenizer.encode(space + name, add_special_tokens=False) for name in config.names]
            self._labels = [tokens[0] for tokens in encoded if tokens]
            if len(set(self._labels)) == len(config.names):
                break
        else:
            found = ", ".join(f"{name} {tokens}" for name, tokens in zip(config.names, encoded, strict=True))
            text = "has labels that do not differ in their first token of the judge's tokenizer ({}); choose others"
            raise ConfigError(Problem(f"{KEY}.labels", text, found))

    def ask(self, question: str) -> Future[Verdict]:
        """Take a question, which `complete` answers. Returns the future of its verdict.

        Args:
            question: The text of the question.
        """
        future: Future[Verdict] = Future()
        self._waiting.append((question, future))
        return future

    def complete(self, score: Score | None) -> None:
        """Answer all questions that are not cancelled.

        Args:
            score: Scores rows with the model.
        """
        waiting, self._waiting = self._waiting, []
        futures, rows = [], []
        for question, future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            tokens = encode_generation_prompt(self._tokenizer, question, enable_thinking=False)
            if len(tokens) >= self._context_len:
                text = f"the judge's question has {len(tokens)} tokens, the model's context {self._context_len}"
                future.set_result(Verdict(status="error", message=text))
                continue
            futures.append(future)
            rows += [[*tokens, label] for label in self._labels]
        if not rows:
            return
        assert score is not None, "the model of the judge is not loaded"
        found = np.array([row[-1] for row in score(rows)], np.float64).reshape(len(futures), -1)
        for future, logprobs in zip(futures, found, strict=True):
            future.set_result(_of_logprobs(logprobs))


def _of_logprobs(logprobs: np.ndarray) -> Verdict:
    """Return the verdict of log-probabilities of the labels, -inf for labels that are not listed."""
    shares = np.exp(logprobs - logprobs.max())
    mass = float(np.exp(logprobs).sum())
    return Verdict(tuple((shares / shares.sum()).tolist()), parts={"label_mass": mass})


class EndpointReader(AbstractContextManager["EndpointReader"]):
    """Answers questions with requests to an OpenAI-compatible endpoint, many at the same time.

    Use it as a context manager, or call `close`.

    Args:
        config: Settings of the judge.

    Raises:
        ConfigError: The environment lacks the key, or the endpoint does not answer a first question.
    """

    def __init__(self, config: JudgeConfig):
        import openai  # takes most of a second

        self._config, self._labels, self._openai = config, [name.casefold() for name in config.names], openai
        key = os.environ.get(config.api_key_env or "")
        if config.api_key_env is not None and not key:
            text = "is {}, but the environment has no variable of this name"
            raise ConfigError(Problem(f"{KEY}.api_key_env", text, config.api_key_env))
        self._client = openai.OpenAI(
            base_url=config.base_url, api_key=key or "none", timeout=config.timeout_s, max_retries=config.retries
        )
        self._is_plain = False  # whether the endpoint refuses requests for log-probabilities or JSON of a schema
        self._pool = ThreadPoolExecutor(config.concurrency, "areno-judge")
        try:
            self._reply([{"role": "user", "content": f"Reply with {config.names[0]}."}])
        except openai.OpenAIError as error:
            self.close()
            text = "is {}, which does not answer: {}; check that the server runs, and base_url, model and api_key_env"
            raise ConfigError(Problem(f"{KEY}.base_url", text, config.base_url, _said(error))) from error

    def ask(self, question: str) -> Future[Verdict]:
        """Begin to ask the endpoint a question. Returns the future of the verdict.

        Args:
            question: The text of the question.
        """
        return self._pool.submit(self._verdict, question)

    def complete(self, score: Score | None) -> None:
        """Do nothing: all questions have begun.

        Args:
            score: Ignored.
        """

    def close(self) -> None:
        """Drop the questions that are not answered, and close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _verdict(self, question: str) -> Verdict:
        """Ask a question, and once more if the reply holds no label."""
        started, messages, said = time.perf_counter(), [{"role": "user", "content": question}], ""
        try:
            for _ in range(2):
                reply = self._reply(messages)
                said = reply.message.content or ""
                found = self._read(reply, said)
                if found.any():
                    parts = {"unreadable": 0.0, "seconds": time.perf_counter() - started}
                    return Verdict(tuple((found / found.sum()).tolist()), parts=parts)
                asked = f"Reply with nothing but one of: {', '.join(self._config.names)}."
                if self._config.verdict == "json":
                    asked = f"Reply with JSON alone: {_EXAMPLE}."
                messages += [{"role": "assistant", "content": said or "..."}, {"role": "user", "content": asked}]
        except self._openai.APITimeoutError:
            text = f"no answer within {self._config.timeout_s:g} s ({KEY}.timeout_s)"
            return Verdict(status="timeout", message=f"judge: {text}")
        except self._openai.OpenAIError as error:
            return Verdict(status="error", message=f"judge: {_said(error)}")
        text = f"judge: the reply names none of {', '.join(self._config.names)}: {printable(said)[:_SHOWN_CHARS]!r}"
        return Verdict(status="error", message=text, parts={"unreadable": 1.0})

    def _reply(self, messages: list[dict[str, str]]) -> Any:
        """Return the choice with which the endpoint answers messages. Raises OpenAIError."""
        how: dict[str, Any] = {"logprobs": True, "top_logprobs": _TOP}
        if self._config.verdict == "json":
            how = {"response_format": {"type": "json_schema", "json_schema": self._schema()}}
        is_json = self._config.verdict == "json"
        fixed: dict[str, Any] = {
            "model": self._config.model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._config.max_tokens if is_json else _LABEL_TOKENS,
        }
        if self._config.enable_thinking is not None:
            fixed["extra_body"] = {"chat_template_kwargs": {"enable_thinking": self._config.enable_thinking}}
        create: Any = self._client.chat.completions.create
        if not self._is_plain:
            try:
                return create(**fixed, **how).choices[0]
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                reply = create(**fixed).choices[0]  # raises the same error if `how` is not the reason
                if not self._is_plain:
                    self._is_plain = True
                    logger.warning(
                        "judge: the endpoint refuses %s (%s); replies are read as text", next(iter(how)), _said(error)
                    )
                return reply
        return create(**fixed).choices[0]

    def _schema(self) -> dict[str, Any]:
        """Return the schema of a reply in JSON."""
        verdict = {"type": "string", "enum": list(self._config.names)}
        shape = {"type": "object", "properties": {"reason": {"type": "string"}, "verdict": verdict}}
        return {
            "name": "verdict",
            "strict": True,
            "schema": {**shape, "required": ["reason", "verdict"], "additionalProperties": False},
        }

    def _read(self, reply: Any, said: str) -> np.ndarray:
        """Return the probability of each label according to a reply, not normalised. All are 0 without a verdict."""
        found = np.zeros(len(self._labels))
        text = without_thoughts(said)
        if self._config.verdict == "json":
            try:
                text = str(json.loads(text[text.find("{") : text.rfind("}") + 1])["verdict"])
            except (ValueError, KeyError, TypeError):
                return found
        elif reply.logprobs is not None and reply.logprobs.content:
            for each in reply.logprobs.content[0].top_logprobs:
                if (index := self._label_of(each.token)) is not None:
                    found[index] += np.exp(each.logprob)
        if not found.any() and (index := _first_label(text, self._labels)) is not None:
            found[index] = 1.0
        return found

    def _label_of(self, token: str) -> int | None:
        """Return the index of the label that a token begins. None if there is none, or more than one."""
        start = token.strip().casefold()
        found = [index for index, label in enumerate(self._labels) if start and label.startswith(start)]
        return found[0] if len(found) == 1 else None


_EXAMPLE = '{"reason": "...", "verdict": "..."}'


def _first_label(text: str, labels: Sequence[str]) -> int | None:
    """Return the index of the label with which a text begins, after quotes and asterisks. None without a label."""
    start = text.lstrip(" \t\r\n*\"'`([").casefold()
    found = [index for index, label in enumerate(labels) if start.startswith(label)]
    best = max(found, key=lambda index: len(labels[index]), default=None)
    if best is None or start[len(labels[best]) :][:1].isalnum():
        return None
    return best


def _said(error: Exception) -> str:
    """Return an error of the client as one line: its text, and the cause of a lost connection."""
    cause = f" ({error.__cause__})" if error.__cause__ is not None and str(error.__cause__) else ""
    return printable(" ".join(f"{error}{cause}".split()))[:_SHOWN_CHARS]


def without_thoughts(text: str) -> str:
    """Return a text without its reasoning between <think> and </think>, which may be unclosed.

    Args:
        text: A completion, or a reply of a judge.
    """
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


@dataclass(frozen=True)
class _Answer:
    """An answer to judge, with the fields of its question.

    Attributes:
        text: The answer, without reasoning.
        fields: The other fields of the template.
    """

    text: str
    fields: Mapping[str, str]

    @property
    def is_blank(self) -> bool:
        """Whether the answer has no letter and no digit."""
        return not any(map(str.isalnum, self.text))


def _text(value: Any) -> str:
    """Return a field of a row as text. A list of alternatives is joined by "or"."""
    if isinstance(value, list | tuple) and all(isinstance(each, str | int | float) for each in value):
        return " or ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages as text. A single message is its content."""
    texts = [_text(message.get("content") or message.get("tool_calls") or "") for message in messages]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(messages, texts, strict=True))


class Judging(AbstractContextManager["Judging"]):
    """Judges the samples of a rollout as they arrive. Use it as a context manager.

    Args:
        config: Settings of the judge.
        reader: Answers the questions.
        n_samples: Number of samples of a prompt, which are compared with each other.
    """

    def __init__(self, config: JudgeConfig, reader: Reader, n_samples: int):
        self._config, self._reader, self._n_samples = config, reader, n_samples
        self._template = config.question
        self._named = fields_of(self._template) - set(ANSWERS)
        self._answers: dict[int, _Answer] = {}
        self._asked: dict[str, Future[Verdict]] = {}
        self._verdicts: dict[tuple[int, ...], Future[Verdict]] = {}  # (place) or (first, second) -> verdict

    def add(self, records: Mapping[int, Record]) -> None:
        """Add samples, and begin to judge them.

        Args:
            records: Index of a sample in the rollout -> its record. The samples of a prompt have consecutive indices.

        Raises:
            DataError: A row of the dataset lacks a field that the question names.
        """
        for place, record in records.items():
            answer = self._answers[place] = self._answer(record)
            if not self._config.compare:
                if not (self._config.refuse_blank and answer.is_blank):
                    self._ask((place,), {**answer.fields, "completion": answer.text})
                continue
            for other, theirs in self._opponents(place):
                if self._by_rule(answer, theirs) is None:
                    self._ask((place, other), {**answer.fields, "first": answer.text, "second": theirs.text})
                    self._ask((other, place), {**answer.fields, "first": theirs.text, "second": answer.text})

    def _opponents(self, place: int) -> list[tuple[int, _Answer]]:
        """Return (place, answer) of the samples so far with which a sample is compared."""
        n, most, found = self._n_samples, self._config.opponents, []
        for other in range(place // n * n, (place // n + 1) * n):
            apart = min((place - other) % n, (other - place) % n)
            if other != place and other in self._answers and (most is None or apart <= most):
                found.append((other, self._answers[other]))
        return found

    def _by_rule(self, first: _Answer, second: _Answer) -> float | None:
        """Return the score of the first of two answers if the judge need not read them, else None."""
        blank = [self._config.refuse_blank and answer.is_blank for answer in (first, second)]
        if first.text == second.text or all(blank):
            return 0.5
        return float(blank[1]) if any(blank) else None

    def _ask(self, places: tuple[int, ...], fields: Mapping[str, str]) -> None:
        question = self._template.format_map(fields)
        if question not in self._asked:  # equal questions have one verdict, as rounding depends on the batch
            self._asked[question] = self._reader.ask(question)
        self._verdicts[places] = self._asked[question]

    def _answer(self, record: Record) -> _Answer:
        """Return the answer of a record with the fields that the template names."""
        if isinstance(record, CompletionRecord):
            item = record.asked.item
            row, prompt, answer = item.record, item.prompt, record.completion
            prompt = prompt if item.messages is None else _conversation(item.messages)
        else:
            row, answer = record.record, record.final_answer
            prompt = _conversation(record.messages[:-1]) if len(record.messages) > 1 else record.prompt
        known = {**row, "solutions": record.solutions, "prompt": prompt}
        if missing := [name for name in sorted(self._named) if known.get(name) is None]:
            text = "a row has no field {}, which the question of the judge names; add it to the dataset, or set {}"
            raise DataError(text, missing[0], Key(f"{KEY}.{'rubric' if self._config.template is None else 'template'}"))
        return _Answer(without_thoughts(answer), {name: _text(known[name]) for name in self._named})

    @property
    def n_open(self) -> int:
        """Number of questions without a verdict that have begun to be answered."""
        return sum(not future.done() for future in self._asked.values())

    def outcomes(self, score: Score | None = None) -> dict[int, RewardOutcome]:
        """Wait for all verdicts, and return the rewards.

        Args:
            score: Scores rows with the judge of the run. None for an endpoint.

        Returns:
            Index of each sample -> its score from 0 to 1, before the weight. The named part `judge` is the score, too.
        """
        self._reader.complete(score)
        slow, futures = SlowTimer(), list(self._asked.values())
        while wait(futures, _LOOK_S).not_done:
            heartbeat.beat()
            if slow.is_due():
                logger.info("judge: %d of %d questions wait after %.0f s", self.n_open, len(futures), slow.seconds)
        compared = self._config.compare
        return {place: self._compared(place) if compared else self._scored(place) for place in self._answers}

    def _scored(self, place: int) -> RewardOutcome:
        """Return the outcome of a sample that is judged by itself."""
        future = self._verdicts.get((place,))
        guard = {"blank": float(future is None)} if self._config.refuse_blank else {}
        if future is None:
            return _outcome(0.0, guard)
        verdict = future.result()
        parts = {**guard, **verdict.parts}
        if not verdict.probabilities:
            return RewardOutcome(None, verdict.status, verdict.message, _named(parts))
        scores = np.linspace(0.0, 1.0, len(verdict.probabilities))
        return _outcome(float(scores @ verdict.probabilities), parts)

    def _compared(self, place: int) -> RewardOutcome:
        """Return the outcome of a sample that is compared with others: the share of comparisons that it wins.

        The score of a comparison is the mean of both orders, so that a preference for a position cancels out.
        """
        own, shares, failed = self._answers[place], [], Verdict()
        parts: dict[str, list[float]] = {}
        for other, theirs in self._opponents(place):
            if (share := self._by_rule(own, theirs)) is not None:
                shares.append(share)
                continue
            orders = [self._verdicts[places].result() for places in ((place, other), (other, place))]
            for verdict in orders:
                for name, value in verdict.parts.items():
                    parts.setdefault(name, []).append(value)
                failed = failed if verdict.probabilities else verdict
            if all(verdict.probabilities for verdict in orders):
                as_first, as_second = orders[0].probabilities[0], orders[1].probabilities[1]
                shares.append((as_first + as_second) / 2)
                parts.setdefault("first", []).append((as_first + 1 - as_second) / 2)
                parts.setdefault("disagreement", []).append(float((as_first - 0.5) * (as_second - 0.5) < 0))
        means = {name: float(np.mean(values)) for name, values in parts.items()}
        if not shares and not failed.probabilities and failed.status != "ok":
            return RewardOutcome(None, failed.status, failed.message, _named(means))
        return _outcome(float(np.mean(shares)) if shares else 0.5, means)

    def __exit__(self, *exc: object) -> None:
        for future in self._asked.values():
            future.cancel()


def _named(parts: Mapping[str, float]) -> dict[str, float]:
    return {f"{PART}/{name}": value for name, value in parts.items()}


def _outcome(score: float, parts: Mapping[str, float]) -> RewardOutcome:
    return RewardOutcome(score, parts={PART: score, **_named(parts)})


def add_judged(
    records: Sequence[Record],
    outcomes: Sequence[RewardOutcome] | None,
    judged: Sequence[RewardOutcome],
    weight: float,
) -> list[RewardOutcome]:
    """Add the scores of a judge to the rewards that samples already have.

    Args:
        records: Records of the samples, which warnings about failures quote.
        outcomes: For each sample, the outcome of all other sources of rewards. None if there are none.
        judged: Outcome of the judge for each sample.
        weight: Factor on the score of the judge.

    Returns:
        The outcome of each sample. A sample without a verdict is a reward error.
    """
    before = [RewardOutcome(0.0)] * len(records) if outcomes is None else list(outcomes)
    found = []
    for own, verdict in zip(before, judged, strict=True):
        parts = dict(own.parts) or ({} if outcomes is None or own.value is None else {"fn": own.value})
        parts |= verdict.parts
        if own.value is None:
            found.append(own)
        elif verdict.value is None:
            found.append(RewardOutcome(None, verdict.status, verdict.message, parts))
        elif problem := reward_problem(value := own.value + weight * verdict.value):
            found.append(RewardOutcome(None, "not_finite", f"with the judge: {problem}", parts))
        else:
            found.append(RewardOutcome(value, parts=parts))
    asked = [index for index, own in enumerate(before) if own.value is not None]
    report_failures([records[index] for index in asked], [found[index] for index in asked], KEY)
    return found
