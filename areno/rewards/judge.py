"""Rewards of a judge: a language model that reads completions, scores them, or compares those of a prompt in pairs.

`Judging` turns the samples of a rollout into questions, and the verdicts on them into rewards. The questions are
answered either by `RoleReader`, with a model of the run, or by `EndpointReader`, with requests to a server. Both give
for each question a probability for each label.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from areno import heartbeat
from areno.config.judge import ANSWERS, JudgeConfig, fields_of
from areno.data.chat_template import Prompt, render_generation_prompt
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
_TOP = (20, 5)  # numbers of log-probabilities of a token that endpoints list at most
_LEAST_MASS = 0.1  # of the labels at an endpoint; below, the model would rather begin with something else
_CONNECT_S = 10.0
_CLOSE_S = 5.0
_SHOWN_CHARS = 200

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Function that computes the log-probability of each token of rows of token ids."""


@dataclass(frozen=True)
class Verdict:
    """The answer of a judge to one question.

    Attributes:
        probabilities: Probability of each label, with a sum of 1. Empty if there is no verdict.
        status: "ok", or why there is no verdict. "error": the reply has no label, or the endpoint failed. "timeout":
            the endpoint gave no verdict within reward.judge.timeout_s.
        message: Why there is no verdict, in words.
        parts: Numbers about the verdict by name, which become parts of the reward.
    """

    probabilities: tuple[float, ...] = ()
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


class Reader(Protocol):
    """Answers the questions of a judge.

    Attributes:
        is_early: Whether questions are answered as soon as they are asked, and not only by `complete`.
    """

    is_early: bool

    def ask(self, question: str) -> Future[Verdict]:
        """Take a question, and return the future of its verdict.

        Args:
            question: The text of the question.
        """
        ...

    def complete(self, score: Score) -> None:
        """Answer the waiting questions.

        Args:
            score: Scores rows with the judge of the run. Only a reader that is not early needs it.
        """
        ...


class RoleReader:
    """Answers questions with a model of the run, by the probabilities of the labels after the question.

    A row is a question, the tokens with which all labels begin (in some vocabularies a space), and the next token of a
    label. The model computes the log-probability of the tokens after the question. The rows of a question share all
    tokens but one, and the engine computes shared tokens once.

    Args:
        config: Settings of the judge.
        tokenizer: Tokenizer of the judge's folder.
        context_len: Longest row in tokens.

    Raises:
        ConfigError: Some labels do not differ in the token after their common beginning, or the chat template of the
            judge begins with reasoning.
    """

    is_early = False

    def __init__(self, config: JudgeConfig, tokenizer: Any, context_len: int):
        self._tokenizer, self._context_len = tokenizer, context_len
        self._waiting: list[tuple[str, Future[Verdict]]] = []
        if opens_thoughts(render_generation_prompt(tokenizer, "?", enable_thinking=False)):
            text = "is a model whose chat template begins with <think>, so that no label can follow; choose another "
            text += "one, or serve it, and set {} and {}=json"
            raise ConfigError(Problem(f"{KEY}.path", text, Key(f"{KEY}.base_url"), Key(f"{KEY}.verdict")))
        self._labels = _labels_of(config.names, tokenizer)

    def ask(self, question: str) -> Future[Verdict]:
        """Take a question, which `complete` answers. Returns the future of its verdict.

        Args:
            question: The text of the question.
        """
        future: Future[Verdict] = Future()
        self._waiting.append((question, future))
        return future

    def complete(self, score: Score) -> None:
        """Answer the waiting questions that are not cancelled.

        Args:
            score: Scores rows with the model.
        """
        waiting, self._waiting = self._waiting, []
        futures, rows = [], []
        for question, future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            tokens = encode_generation_prompt(self._tokenizer, question, enable_thinking=False)
            if len(tokens) + len(self._labels[0]) > self._context_len:
                text = f"the judge's question has {len(tokens)} tokens, the model's context {self._context_len}"
                future.set_result(Verdict(status="error", message=text))
                continue
            futures.append(future)
            rows += [[*tokens, *label] for label in self._labels]
        if not rows:
            return
        n_last = len(self._labels[0])
        found = np.array([sum(row[-n_last:]) for row in score(rows)], np.float64).reshape(len(futures), -1)
        for future, logprobs in zip(futures, found, strict=True):
            future.set_result(Verdict(_shares(logprobs), parts={"label_mass": float(np.exp(logprobs).sum())}))


def _labels_of(names: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return tokens that tell labels apart: those with which all begin, and the next one. Raises ConfigError."""
    found = []
    # Without a chat template the question is continued as text, with a space if the vocabulary has such tokens.
    for space in ("",) if tokenizer.chat_template is not None else (" ", ""):
        encoded = [tokenizer.encode(space + name, add_special_tokens=False) for name in names]
        n_shared = next((n for n, each in enumerate(zip(*encoded, strict=False)) if len(set(each)) > 1), 0)
        labels = [tokens[: n_shared + 1] for tokens in encoded if len(tokens) > n_shared]
        if len({tokens[-1] for tokens in labels}) == len(names):
            found.append(labels)
    if not found:
        shown = ", ".join(f"{name} {tokens}" for name, tokens in zip(names, encoded, strict=True))
        text = "has labels that do not differ in their first token of the judge's tokenizer ({}); choose others"
        raise ConfigError(Problem(f"{KEY}.labels", text, shown))
    return min(found, key=lambda labels: len(labels[0]))


def _shares(logprobs: np.ndarray) -> tuple[float, ...]:
    """Return the share of each label in the probability of all labels, of which one has a finite log-probability."""
    shares = np.exp(logprobs - logprobs.max())
    return tuple((shares / shares.sum()).tolist())


class EndpointReader(AbstractContextManager["EndpointReader"]):
    """Answers questions with requests to an OpenAI-compatible endpoint, many at the same time.

    Use it as a context manager, or call `close`. The requests run in the event loop of a daemon thread, which does not
    keep the process alive.

    Args:
        config: Settings of the judge.

    Raises:
        ConfigError: The environment lacks the key, or the endpoint does not answer a first question.
    """

    is_early = True

    def __init__(self, config: JudgeConfig):
        import openai  # takes most of a second

        self._config, self._labels, self._openai = config, [name.casefold() for name in config.names], openai
        self._key = os.environ.get(config.api_key_env or "", "").strip()
        if config.api_key_env is not None and not self._key:
            text = "names a variable that the environment lacks; export the key of the endpoint under this name"
            raise ConfigError(Problem(f"{KEY}.api_key_env", text))
        self._way = 0  # index in _ways of the request that the endpoint accepts
        self._room = asyncio.Semaphore(config.concurrency)
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="areno-judge", daemon=True)
        self._thread.start()
        logger.info("judge: asking %s for a first reply", config.base_url)
        try:
            self._client = self._new_client()
            self._begin(self._answered(f"Reply with {config.names[0]}.", attempts=1)).result()
        except Exception as error:  # of the client, of its parsers, or of a reply that is no completion
            self.close()
            text = "is {}, which does not answer: {}; check that the server runs, and base_url, model and api_key_env"
            raise ConfigError(Problem(f"{KEY}.base_url", text, config.base_url, self._said(error))) from error

    def _new_client(self) -> Any:
        limit = self._config.timeout_s
        client = self._openai.AsyncOpenAI(
            base_url=self._config.base_url,
            api_key=self._key or "none",
            timeout=self._openai.Timeout(limit, connect=min(_CONNECT_S, limit)),
            max_retries=self._config.retries,
        )
        # The client reads both from the environment. They belong to another service.
        client.organization = client.project = None
        return client

    def _begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, question: str) -> Future[Verdict]:
        """Begin to ask the endpoint a question. Returns the future of the verdict.

        Args:
            question: The text of the question.
        """
        return self._begin(self._verdict(question))

    def complete(self, score: Score) -> None:
        """Do nothing: all questions have begun.

        Args:
            score: Ignored.
        """

    def close(self) -> None:
        """Drop the questions that are not answered, and close the connections."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(Exception):  # an error of a connection that is no longer needed
            self._begin(self._end()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _verdict(self, question: str) -> Verdict:
        """Ask a question when fewer than `concurrency` are in progress. Raises nothing."""
        async with self._room:
            started = time.perf_counter()
            try:
                found = await self._answered(question)
            except Exception as error:  # replies may be anything, and so may the errors of their parsers
                is_late = isinstance(error, asyncio.TimeoutError | self._openai.APITimeoutError)
                found = Verdict(status="timeout" if is_late else "error", message=f"judge: {self._said(error)}")
            return replace(found, parts={**found.parts, "seconds": time.perf_counter() - started})

    async def _answered(self, question: str, attempts: int = 2) -> Verdict:
        """Return the verdict on a question, which is asked once more if the reply has no label."""
        return await asyncio.wait_for(self._asked(question, attempts), self._config.timeout_s)

    async def _asked(self, question: str, attempts: int) -> Verdict:
        found, said, messages = Verdict(), "", [{"role": "user", "content": question}]
        for _ in range(attempts):
            said, top = await self._reply(messages)
            found = self._read(said, top)
            if found.probabilities:
                return found
            asked = f"Reply with nothing but one of: {', '.join(self._config.names)}."
            if self._config.verdict == "json":
                asked = f"Reply with JSON alone: {_EXAMPLE}."
            messages += [{"role": "assistant", "content": said or "..."}, {"role": "user", "content": asked}]
        text = f"judge: the reply names none of {', '.join(self._config.names)}: {printable(said)[:_SHOWN_CHARS]!r}"
        if self._config.verdict == "labels":
            text += f"; a model that reasons first needs {KEY}.enable_thinking=false or {KEY}.verdict=json"
        return replace(found, status="error", message=text)

    async def _reply(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[str, float]]]:
        """Return (text, log-probabilities of the most likely first tokens), with which the endpoint answers messages.

        A request that the endpoint refuses is sent again in a simpler way, which is kept for later requests.
        """
        is_json, refused, ways = self._config.verdict == "json", None, self._ways()
        fixed: dict[str, Any] = {
            "model": self._config.model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._config.max_tokens if is_json else _LABEL_TOKENS,
        }
        if self._config.enable_thinking is not None:
            fixed["extra_body"] = {"chat_template_kwargs": {"enable_thinking": self._config.enable_thinking}}
        create = self._client.chat.completions.create
        for way in range(self._way, len(ways)):
            try:
                reply = await create(**fixed, **ways[way][1])
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                refused = refused or error
                if way == len(ways) - 1:  # the reason is another one
                    raise
                continue
            if refused is not None and way > self._way:
                text = "judge: the endpoint refuses %s (%s); %s"
                then = f"asking for {ways[way][0]}" if ways[way][1] else "replies are read as text"
                logger.warning(text, ways[self._way][0], self._said(refused), then)
                self._way = way
            return _content(reply)
        raise AssertionError("there is a way without conditions")

    def _ways(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, fields) of the forms of a request, from the most exact one to a plain one."""
        if self._config.verdict == "labels":
            asked = [(f"top_logprobs={n}", {"logprobs": True, "top_logprobs": n}) for n in _TOP]
        else:
            asked = [("response_format", {"response_format": {"type": "json_schema", "json_schema": self._schema()}})]
        return [*asked, ("", {})]

    def _schema(self) -> dict[str, Any]:
        """Return the schema of a reply in JSON."""
        verdict = {"type": "string", "enum": list(self._config.names)}
        shape = {"type": "object", "properties": {"reason": {"type": "string"}, "verdict": verdict}}
        return {
            "name": "verdict",
            "strict": True,
            "schema": {**shape, "required": ["reason", "verdict"], "additionalProperties": False},
        }

    def _read(self, said: str, top: Sequence[tuple[str, float]]) -> Verdict:
        """Return the verdict of a reply, without probabilities if there is none.

        The log-probabilities `top` count if the labels have enough of the probability. Otherwise the model would begin
        with something else, such as reasoning, and the label at the beginning of the reply counts.
        """
        text, parts = without_thoughts(said), {"unreadable": 0.0}
        if self._config.verdict == "json":
            try:
                text = str(json.loads(text[text.find("{") : text.rfind("}") + 1])["verdict"])
            except (ValueError, KeyError, TypeError):
                text = ""
        elif top:
            logprobs = np.full(len(self._labels), -np.inf)
            for token, logprob in top:
                if (index := self._label_of(token)) is not None:
                    logprobs[index] = np.logaddexp(logprobs[index], logprob)
            parts["label_mass"] = float(np.exp(logprobs).sum())
            if parts["label_mass"] >= _LEAST_MASS:
                return Verdict(_shares(logprobs), parts=parts)
        if (index := _first_label(text, self._labels)) is None:
            return Verdict(parts=parts | {"unreadable": 1.0})
        return Verdict(tuple(float(other == index) for other in range(len(self._labels))), parts=parts)

    def _label_of(self, token: str) -> int | None:
        """Return the index of the label that a token begins, or with which it begins. None without a label."""
        start = token.strip().casefold()
        # At most one, since the labels differ in their first letter.
        begun = [index for index, label in enumerate(self._labels) if start and label.startswith(start)]
        return begun[0] if begun else _first_label(start, self._labels)

    def _said(self, error: Exception) -> str:
        """Return an error of the client as one line without the key: its text, and the cause of a lost connection."""
        if isinstance(error, asyncio.TimeoutError | self._openai.APITimeoutError):
            return f"no verdict within {self._config.timeout_s:g} s ({KEY}.timeout_s)"
        cause = f" ({error.__cause__})" if error.__cause__ is not None and str(error.__cause__) else ""
        text = f"{str(error) or type(error).__name__}{cause}"
        text = text.replace(self._key, "***") if self._key else text
        return printable(" ".join(text.split()))[:_SHOWN_CHARS]


def _content(reply: Any) -> tuple[str, list[tuple[str, float]]]:
    """Return (text, log-probabilities of the most likely first tokens) of a reply, which may be anything."""
    try:
        choice = reply.choices[0]
        text = choice.message.content or ""
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"the reply is no chat completion: {reply!r}") from error
    listed = getattr(getattr(choice, "logprobs", None), "content", None) or [None]
    return text, [(each.token, each.logprob) for each in getattr(listed[0], "top_logprobs", None) or []]


_EXAMPLE = '{"reason": "...", "verdict": "..."}'


def _first_label(text: str, labels: Sequence[str]) -> int | None:
    """Return the index of the label with which a text begins, after quotes and asterisks. None without a label."""
    start = text.lstrip(" \t\r\n*\"'`([").casefold()
    found = [index for index, label in enumerate(labels) if start.startswith(label)]
    best = max(found, key=lambda index: len(labels[index]), default=None)
    if best is None or start[len(labels[best]) :][:1].isalnum():
        return None
    return best


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


@dataclass(frozen=True)
class Task:
    """The prompt of samples, as a judge needs it.

    Attributes:
        places: Index of each sample of the prompt in the rollout.
        prompt: Text or messages of the prompt.
        opens_thoughts: Whether the rendered prompt ends with <think>, so that the answers begin with reasoning.
    """

    places: Sequence[int]
    prompt: Prompt
    opens_thoughts: bool = False


def opens_thoughts(rendered: str) -> bool:
    """Return whether a rendered prompt ends with <think>, so that a reply begins with reasoning.

    Args:
        rendered: The prompt, up to the start of the reply.
    """
    return rendered.rstrip().endswith("<think>")


class Judging(AbstractContextManager["Judging"]):
    """Judges the samples of a rollout as they arrive. Use it as a context manager.

    Args:
        config: Settings of the judge.
        reader: Answers the questions.
        task_of: Function from the index of a sample in the rollout to its prompt. The samples of a prompt are compared
            with each other.
    """

    def __init__(self, config: JudgeConfig, reader: Reader, task_of: Callable[[int], Task]):
        self._config, self._reader, self._task_of = config, reader, task_of
        self._template = config.question
        self._named = fields_of(self._template) - set(ANSWERS)
        self._worst = 0.0 if config.weight >= 0 else 1.0  # the score with the lowest reward
        self._answers: dict[int, _Answer] = {}
        self._asked: dict[str, Future[Verdict]] = {}
        self._verdicts: dict[tuple[int, ...], Future[Verdict]] = {}  # (place) or (first, second) -> verdict

    def add(self, records: Mapping[int, Record]) -> None:
        """Add samples, and begin to judge them.

        Args:
            records: Index of a sample in the rollout -> its record.

        Raises:
            DataError: A row of the dataset lacks a field that the question names.
        """
        for place, record in records.items():
            answer = self._answers[place] = self._answer(record, self._task_of(place))
            if not self._config.compare:
                if not self._is_refused(answer):
                    self._ask((place,), {**answer.fields, "completion": answer.text})
                continue
            for other, theirs in self._opponents(place):
                if self._by_rule(answer, theirs) is None:
                    self._ask((place, other), {**answer.fields, "first": answer.text, "second": theirs.text})
                    self._ask((other, place), {**answer.fields, "first": theirs.text, "second": answer.text})

    def _is_refused(self, answer: _Answer) -> bool:
        return self._config.refuse_blank and answer.is_blank

    def _opponents(self, place: int) -> list[tuple[int, _Answer]]:
        """Return (place, answer) of the samples so far with which a sample is compared."""
        group, most, found = self._task_of(place).places, self._config.opponents, []
        own, n = group.index(place), len(group)
        for index, other in enumerate(group):
            apart = min((own - index) % n, (index - own) % n)
            if other != place and other in self._answers and (most is None or apart <= most):
                found.append((other, self._answers[other]))
        return found

    def _by_rule(self, first: _Answer, second: _Answer) -> float | None:
        """Return the score of the first of two answers if the judge need not read them, else None."""
        if self._is_refused(first):
            return self._worst
        if self._is_refused(second):
            return 1.0 - self._worst
        return 0.5 if first.text == second.text else None

    def _ask(self, places: tuple[int, ...], fields: Mapping[str, str]) -> None:
        question = self._template.format_map(fields)
        if question not in self._asked:  # equal questions have one verdict, as rounding depends on the batch
            self._asked[question] = self._reader.ask(question)
        self._verdicts[places] = self._asked[question]

    def _answer(self, record: Record, task: Task) -> _Answer:
        """Return the answer of a record with the fields that the template names."""
        if isinstance(record, CompletionRecord):
            row, answer, rendered = record.asked.item.record, record.completion, record.rendered
        else:
            row, answer, rendered = record.record, record.final_answer, record.rendered_completion
        if task.opens_thoughts and "</think>" not in rendered:
            answer = ""
        prompt = task.prompt if isinstance(task.prompt, str) else _conversation(task.prompt)
        known = {**row, "solutions": record.solutions, "prompt": prompt}
        if missing := [name for name in sorted(self._named) if known.get(name) is None]:
            text = "a row has no field {}, which the question of the judge names; add it to the dataset, or set {}"
            raise DataError(text, missing[0], Key(f"{KEY}.{'rubric' if self._config.template is None else 'template'}"))
        return _Answer(without_thoughts(answer), {name: _text(known[name]) for name in self._named})

    @property
    def n_open(self) -> int:
        """Number of questions without a verdict that have begun to be answered."""
        return sum(not future.done() for future in self._asked.values()) if self._reader.is_early else 0

    def complete(self, score: Score) -> None:
        """Answer the questions that wait for the judge of the run.

        Args:
            score: Scores rows with the judge of the run. Unused for an endpoint.
        """
        self._reader.complete(score)

    def outcomes(self) -> dict[int, RewardOutcome]:
        """Wait for all verdicts, and return the rewards. Call this after `complete`.

        Returns:
            Index of each sample -> its score from 0 to 1, before the weight. The named part `judge` is the score, too.
        """
        slow, futures = SlowTimer(), list(self._asked.values())
        while wait(futures, _LOOK_S).not_done:
            heartbeat.beat()
            if slow.is_due():
                logger.info("judge: %d of %d questions wait after %.0f s", self.n_open, len(futures), slow.seconds)
        compared = self._config.compare
        return {place: self._compared(place) if compared else self._scored(place) for place in self._answers}

    def _guard(self, place: int) -> dict[str, float]:
        """Return the part that tells whether an answer is blank, if blank answers get the lowest reward."""
        answer = self._answers[place]
        return {"blank": float(answer.is_blank)} if self._config.refuse_blank else {}

    def _scored(self, place: int) -> RewardOutcome:
        """Return the outcome of a sample that is judged by itself."""
        parts = self._guard(place)
        if self._is_refused(self._answers[place]):
            return _outcome(self._worst, parts)
        verdict = self._verdicts[place,].result()
        parts |= verdict.parts
        if not verdict.probabilities:
            return RewardOutcome(None, verdict.status, verdict.message, _named(parts))
        scores = np.linspace(0.0, 1.0, len(verdict.probabilities))
        return _outcome(float(scores @ verdict.probabilities), parts)

    def _compared(self, place: int) -> RewardOutcome:
        """Return the outcome of a sample that is compared with others: the share of comparisons that it wins.

        The score of a comparison is the mean of both orders, so that a preference for a position cancels out. A sample
        has no score if there is nothing to compare it with, or if all its comparisons by the judge failed.
        """
        own, shares, failed, is_read = self._answers[place], [], Verdict(), False
        parts: dict[str, list[float]] = {}
        for other, theirs in self._opponents(place):
            if (share := self._by_rule(own, theirs)) is not None:
                shares.append(share)
                continue
            orders = [self._verdicts[places].result() for places in ((place, other), (other, place))]
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
        means = self._guard(place) | {name: float(np.mean(values)) for name, values in parts.items()}
        if failed.status != "ok" and not is_read:
            return RewardOutcome(None, failed.status, failed.message, _named(means))
        if not shares:
            text = "judge: there is no other answer to this prompt, with which this one could be compared"
            return RewardOutcome(None, "error", text, _named(means))
        return _outcome(float(np.mean(shares)), means)

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
    source: str = "fn",
) -> list[RewardOutcome]:
    """Add the scores of a judge to the rewards that samples already have.

    Args:
        records: Records of the samples, which warnings about failures quote.
        outcomes: For each sample, the outcome of all other sources of rewards. None if there are none.
        judged: Outcome of the judge for each sample.
        weight: Factor on the score of the judge.
        source: Name of the part of the reward in `outcomes`, for those without named parts.

    Returns:
        The outcome of each sample. A sample without a verdict is a reward error.
    """
    before = [RewardOutcome(0.0)] * len(records) if outcomes is None else list(outcomes)
    found = []
    for own, verdict in zip(before, judged, strict=True):
        parts = dict(own.parts) or ({} if outcomes is None or own.value is None else {source: own.value})
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
