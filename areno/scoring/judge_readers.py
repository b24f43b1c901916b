"""The two ways to ask a judge: `RoleJudge` asks a model of the run, `EndpointJudge` asks a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from areno.config.judge import REASON, VERDICT, JudgeConfig, json_reply_text
from areno.data.chat_template import END_THINK, THINK, opens_reasoning, render_generation_prompt
from areno.data.encode import decode_all, encode_generation_prompt
from areno.engine.decoder.grammar import Vocabulary
from areno.errors import ConfigError, GrammarError, Key, Problem, printable
from areno.types import RolloutSequence, SamplingParams

logger = logging.getLogger("areno.scoring")

KEY = "reward.judge"
_LABEL_TOKENS = 16  # of a reply that should be a label; a server without log-probabilities may add a few words
_TOP = (20, 5)  # numbers of log-probabilities of a token that endpoints list at most
_LEAST_MASS = 0.1  # of the labels at an endpoint; below, the model would rather begin with something else
_CONNECT_S = 10.0
_CLOSE_S = 5.0
_SHOWN_CHARS = 200

_NO_THOUGHTS = "\n</think>\n\n"  # after a template that opens reasoning; templates without thinking write the same
_REASON = r"/[^\"\\\x00-\x1F\x7F]*/"

Score = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[float]]]
"""Rows of token ids -> the log-probability of each token."""


class WriteReplies(Protocol):
    """Completes rows of token ids under a grammar with the judge, which is a model of the run."""

    def __call__(
        self, token_rows: Sequence[Sequence[int]], sampling_params: SamplingParams, *, grammar: str | None
    ) -> Sequence[RolloutSequence]: ...


@dataclass(frozen=True)
class Verdict:
    """The answer of a judge to one question: the probabilities of the labels, with a sum of 1, or none.

    If there are none, the status is "error" (the reply has no label, or the endpoint failed) or "timeout". `parts`
    become parts of the reward.
    """

    probabilities: tuple[float, ...] = ()
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


class JudgeBackend(Protocol):
    """Answers the questions of a judge: at once if `is_early`, otherwise only when `answer_questions` is called."""

    is_early: bool

    def ask(self, question: str) -> Future[Verdict]: ...

    def answer_questions(self, score: Score, write: WriteReplies) -> None:
        """Answer all questions asked so far. `score` and `write` are functions that call the judge."""
        ...


class RoleJudge:
    """Lets a model of the run answer questions, by the probabilities of the labels or by replies in JSON."""

    is_early = False

    def __init__(self, config: JudgeConfig, vocabulary: Vocabulary):
        self._vocabulary, tokenizer = vocabulary, vocabulary.tokenizer
        self._waiting: list[tuple[str, Future[Verdict]]] = []
        thinks = opens_reasoning(render_generation_prompt(tokenizer, "?", enable_thinking=False))
        if config.verdict == "labels" and thinks:
            text = "is a model whose chat template begins with <think>, so that no label can follow; choose another "
            raise ConfigError(Problem(f"{KEY}.path", text + "one, or set {}=json", Key(f"{KEY}.verdict")))
        # The reason in the reply takes the place of the reasoning that the template has opened.
        self._closing = tokenizer.encode(_NO_THOUGHTS, add_special_tokens=False) if thinks else []
        self._way = (_JsonVerdicts if config.verdict == "json" else _LabelVerdicts)(config, vocabulary)

    def ask(self, question: str) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        self._waiting.append((question, future))
        return future

    def answer_questions(self, score: Score, write: WriteReplies) -> None:
        """Answer the waiting questions, except those that are cancelled."""
        waiting, self._waiting = self._waiting, []
        futures, questions = [], []
        for question, future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            tokens = encode_generation_prompt(self._vocabulary.tokenizer, question, enable_thinking=False)
            tokens = [*tokens, *self._closing]
            if len(tokens) + self._way.n_more > self._vocabulary.context_len:
                text = f"judge: a question has {len(tokens)} tokens, and {self._way.more}; the model has a context "
                text += f"of {self._vocabulary.context_len} tokens"
                future.set_result(Verdict(status="error", message=text))
                continue
            futures.append(future)
            questions.append(tokens)
        if questions:
            for future, verdict in zip(futures, self._way.verdicts(questions, score, write), strict=True):
                future.set_result(verdict)


class _LabelVerdicts:
    """Reads verdicts from the probabilities of the labels after the question.

    The model scores a row of tokens for each label: the question, the tokens with which all labels begin (in some
    vocabularies a space), and the first token in which this label differs. The rows of a question share all tokens but
    the last, and the engine computes shared tokens once. `n_more` is the number of tokens after a question.
    """

    def __init__(self, config: JudgeConfig, vocabulary: Vocabulary):
        self._labels = _label_tokens(config.label_names, vocabulary.tokenizer)
        self.n_more = len(self._labels[0])
        self.more = f"its label {self.n_more}"

    def verdicts(self, questions: Sequence[list[int]], score: Score, write: WriteReplies) -> list[Verdict]:
        rows = [[*tokens, *label] for tokens in questions for label in self._labels]
        found = np.array([sum(row[-self.n_more :]) for row in score(rows)], np.float64).reshape(len(questions), -1)
        parts = [{"label_mass": float(np.exp(logprobs).sum())} for logprobs in found]
        return [Verdict(_label_shares(logprobs), parts=each) for logprobs, each in zip(found, parts, strict=True)]


class _JsonVerdicts:
    """Reads verdicts from JSON replies. The grammar makes each reply contain a verdict before the token limit."""

    def __init__(self, config: JudgeConfig, vocabulary: Vocabulary):
        self._config, self._tokenizer, self._grammar = config, vocabulary.tokenizer, json_grammar(config)
        self._params = SamplingParams(greedy=True, max_new_tokens=config.max_tokens)
        self.n_more, self.more = config.max_tokens, f"its reply up to {config.max_tokens} ({KEY}.max_tokens)"
        problems = []
        if config.max_tokens >= vocabulary.context_len:
            text = "is {}; the context of the judge, {} tokens, must also hold a question"
            problems.append(Problem(f"{KEY}.max_tokens", text, config.max_tokens, vocabulary.context_len))
        try:
            compiled = vocabulary.grammars.compile(self._grammar)
        except GrammarError as error:
            raise ConfigError(Problem(f"{KEY}.verdict", "is json, but {}", error)) from error
        replies = [json_reply_text("", name) for name in config.label_names]
        if missing := [reply for reply in replies if not vocabulary.grammars.allows_start(compiled, reply)]:
            text = "is a model whose tokenizer cannot write {}; choose another one, or set {}=labels"
            problems.append(Problem(f"{KEY}.path", text, missing[0], Key(f"{KEY}.verdict")))
        if problems:
            raise ConfigError(problems)

    def verdicts(self, questions: Sequence[list[int]], score: Score, write: WriteReplies) -> list[Verdict]:
        replies = [list(each.resp_tokens) for each in write(questions, self._params, grammar=self._grammar)]
        labels = [name.casefold() for name in self._config.label_names]
        found = []
        for said in decode_all(self._tokenizer, replies, skip_special_tokens=True):
            verdict = _parse_json_verdict(said, labels)
            found.append(verdict if verdict.probabilities else _failed_verdict(verdict, said, self._config))
        return found


def json_grammar(config: JudgeConfig) -> str:
    """Return the grammar of a JSON reply of at most reward.judge.max_tokens tokens, including an end token.

    The reason has no quotation marks and no escapes, because its token limit could cut an escape in two.
    """
    before, after = config.json_reply_parts
    ends = " | ".join(map(json.dumps, after))
    limit = f"[max_tokens={config.max_tokens - config.n_verdict_tokens}]"
    return f"start: {json.dumps(before)} reason ({ends})\nreason{limit}: {_REASON}"


def _label_tokens(names: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return for each label the tokens with which all labels begin, and the first token in which it differs."""
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


def _label_shares(logprobs: np.ndarray) -> tuple[float, ...]:
    """Return softmax(logprobs), the labels' shares of their total probability. One logprob must be finite."""
    shares = np.exp(logprobs - logprobs.max())
    return tuple((shares / shares.sum()).tolist())


class EndpointJudge(AbstractContextManager["EndpointJudge"]):
    """Sends questions to an OpenAI-compatible endpoint, many at the same time.

    Use it as a context manager, or call `close`. The requests run in the event loop of a daemon thread, which does not
    keep the process alive. Raises ConfigError if the API key is missing, or if the endpoint does not answer a first
    question.
    """

    is_early = True

    def __init__(self, config: JudgeConfig):
        import openai  # takes most of a second

        self._config, self._labels, self._openai = config, [name.casefold() for name in config.label_names], openai
        self._key = os.environ.get(config.api_key_env or "", "").strip()
        if config.api_key_env is not None and not self._key:
            text = "names a variable that the environment lacks; export the key of the endpoint under this name"
            raise ConfigError(Problem(f"{KEY}.api_key_env", text))
        self._way = 0  # index in `_request_variants` of the request that the endpoint accepts
        self._room = asyncio.Semaphore(config.concurrency)
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="areno-judge", daemon=True)
        self._thread.start()
        logger.info("judge: asking %s for a first reply", config.base_url)
        try:
            self._client = self._new_client()
            self._submit(self._ask_with_timeout(f"Reply with {config.label_names[0]}.", attempts=1)).result()
        except Exception as error:  # of the client, of its parsers, or of a reply that is no completion
            self.close()
            text = "is {}, which does not answer: {}; check that the server runs, and base_url, model and api_key_env"
            raise ConfigError(Problem(f"{KEY}.base_url", text, config.base_url, self._error_line(error))) from error

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

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, question: str) -> Future[Verdict]:
        return self._submit(self._request_verdict(question))

    def answer_questions(self, score: Score, write: WriteReplies) -> None:
        """Do nothing, because `ask` has already sent each question."""

    def close(self) -> None:
        """Drop the questions that are not answered, and close the connections."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(Exception):  # an error of a connection that is no longer needed
            self._submit(self._cancel_tasks()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _request_verdict(self, question: str) -> Verdict:
        """Ask a question as soon as fewer than `concurrency` are in progress. Exceptions become failed verdicts."""
        async with self._room:
            started = time.perf_counter()
            try:
                found = await self._ask_with_timeout(question)
            except Exception as error:  # replies may be anything, and so may the errors of their parsers
                is_late = isinstance(error, asyncio.TimeoutError | self._openai.APITimeoutError)
                found = Verdict(status="timeout" if is_late else "error", message=f"judge: {self._error_line(error)}")
            return replace(found, parts={**found.parts, "seconds": time.perf_counter() - started})

    async def _ask_with_timeout(self, question: str, attempts: int = 2) -> Verdict:
        """Ask a question up to `attempts` times, until the reply has a label."""
        return await asyncio.wait_for(self._ask_endpoint(question, attempts), self._config.timeout_s)

    async def _ask_endpoint(self, question: str, attempts: int) -> Verdict:
        found, said, messages = Verdict(), "", [{"role": "user", "content": question}]
        for _ in range(attempts):
            said, top = await self._request_reply(messages)
            found = self._parse_reply(said, top)
            if found.probabilities:
                return found
            asked = f"Reply with nothing but one of: {', '.join(self._config.label_names)}."
            if self._config.verdict == "json":
                asked = f"Reply with JSON alone: {_EXAMPLE}."
            messages += [{"role": "assistant", "content": said or "..."}, {"role": "user", "content": asked}]
        return _failed_verdict(found, said, self._config)

    async def _request_reply(self, messages: list[dict[str, str]]) -> tuple[str, list[tuple[str, float]]]:
        """Return (text without reasoning, log-probabilities of the most likely first tokens) of the endpoint's reply.

        If the endpoint refuses a request, a simpler form of it is sent, and also used for later requests.
        """
        is_json, refused, ways = self._config.verdict == "json", None, self._request_variants()
        fixed: dict[str, Any] = {
            "model": self._config.model,
            "messages": messages,
            "temperature": 0.0,
            "max_tokens": self._config.max_tokens if is_json else _LABEL_TOKENS,
        }
        if self._config.enable_thinking is not None:
            fixed["extra_body"] = {"chat_template_kwargs": {"enable_thinking": self._config.enable_thinking}}
        create = self._client.chat.completions.with_raw_response.create  # read here, since it may be anything
        for way in range(self._way, len(ways)):
            try:
                reply = await create(**fixed, **ways[way][1])
            except (self._openai.BadRequestError, self._openai.UnprocessableEntityError) as error:
                refused = refused or error
                if way == len(ways) - 1:  # the reason is another one
                    raise
                continue
            if refused is not None and way > self._way:
                then = f"asking for {ways[way][0]}" if ways[way][1] else "replies are read as text"
                named, said = ways[self._way][0], self._error_line(refused)
                logger.warning("judge: the endpoint refuses %s (%s); %s", named, said, then)
                self._way = way
            return _parse_body(reply.text)
        raise AssertionError("there is a way without conditions")

    def _request_variants(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, further fields) for each form of a request, the simplest one last."""
        if self._config.verdict == "labels":
            asked = [(f"top_logprobs={n}", {"logprobs": True, "top_logprobs": n}) for n in _TOP]
        else:
            asked = [("response_format", {"response_format": {"type": "json_schema", "json_schema": self._schema()}})]
        return [*asked, ("", {})]

    def _schema(self) -> dict[str, Any]:
        verdict = {"type": "string", "enum": list(self._config.label_names)}
        properties = {REASON: {"type": "string"}, VERDICT: verdict}
        shape = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return {"name": "verdict", "strict": True, "schema": shape}

    def _parse_reply(self, said: str, top: Sequence[tuple[str, float]]) -> Verdict:
        """Return the verdict of a reply.

        If the labels have enough of the probability in `top`, the verdict is the labels' shares of it. Otherwise the
        model tends to begin with something else, such as reasoning. Then the label at the start of the text counts.
        """
        if self._config.verdict == "json":
            return _parse_json_verdict(said, self._labels)
        parts = {}
        if top:
            logprobs = np.full(len(self._labels), -np.inf)
            for token, logprob in top:
                if (index := self._label_index(token)) is not None:
                    logprobs[index] = np.logaddexp(logprobs[index], logprob)
            parts["label_mass"] = float(np.exp(logprobs).sum())
            if parts["label_mass"] >= _LEAST_MASS:
                return Verdict(_label_shares(logprobs), parts={"unreadable": 0.0, **parts})
        return _verdict_of_label(said, self._labels, parts)

    def _label_index(self, token: str) -> int | None:
        """Return the index of the label that begins with a token, or with which the token begins."""
        start = token.strip().casefold()
        # At most one, since the labels differ in their first letter.
        begun = [index for index, label in enumerate(self._labels) if start and label.startswith(start)]
        return begun[0] if begun else _first_label_index(start, self._labels)

    def _error_line(self, error: Exception) -> str:
        """Return the message of an error as one line, with its cause and without the API key."""
        if isinstance(error, asyncio.TimeoutError | self._openai.APITimeoutError):
            return f"no verdict within {self._config.timeout_s:g} s ({KEY}.timeout_s)"
        cause = f" ({error.__cause__})" if error.__cause__ is not None and str(error.__cause__) else ""
        text = f"{str(error) or type(error).__name__}{cause}"
        text = text.replace(self._key, "***") if self._key else text
        return printable(" ".join(text.split()))[:_SHOWN_CHARS]


def _parse_body(body: str) -> tuple[str, list[tuple[str, float]]]:
    """Return what `_request_reply` returns, from the body of a response."""
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"].get("content") or ""
        listed = (choice.get("logprobs") or {}).get("content") or [{}]
        top = [(str(each["token"]), float(each["logprob"])) for each in listed[0].get("top_logprobs") or []]
        return strip_reasoning(text), top
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the reply is no chat completion: {body}") from error


_EXAMPLE = json_reply_text("...", "...")


def _parse_json_verdict(said: str, labels: Sequence[str]) -> Verdict:
    """Return the verdict of a reply in JSON, which may have text around it."""
    try:
        text = str(json.loads(said[said.find("{") : said.rfind("}") + 1])[VERDICT])
    except (ValueError, KeyError, TypeError):
        text = ""
    return _verdict_of_label(text, labels, {})


def _failed_verdict(found: Verdict, said: str, config: JudgeConfig) -> Verdict:
    """Return `found` with an error, for a reply `said` that contains no label."""
    text = f"judge: the reply names none of {', '.join(config.label_names)}: {printable(said)[:_SHOWN_CHARS]!r}"
    if config.verdict == "labels":
        text += f"; a model that reasons first needs {KEY}.enable_thinking=false or {KEY}.verdict=json"
    return replace(found, status="error", message=text)


def _verdict_of_label(text: str, labels: Sequence[str], parts: Mapping[str, float]) -> Verdict:
    index = _first_label_index(text, labels)
    if index is None:
        return Verdict(parts={"unreadable": 1.0, **parts})
    return Verdict(tuple(float(other == index) for other in range(len(labels))), parts={"unreadable": 0.0, **parts})


def _first_label_index(text: str, labels: Sequence[str]) -> int | None:
    """Return the index of the label with which a text begins. Quotes and asterisks before it are skipped."""
    labels = [label.strip() for label in labels]
    for marks in ("", "*\"'`(["):  # a label may itself begin with a mark
        start = text.lstrip(f" \t\r\n{marks}").casefold()
        found = [index for index, label in enumerate(labels) if start.startswith(label)]
        best = max(found, key=lambda index: len(labels[index]), default=None)
        if best is not None and not start[len(labels[best]) :][:1].isalnum():
            return best
    return None


def strip_reasoning(text: str) -> str:
    """Remove the reasoning between <think> and </think> from a text, also if one of the tags is missing."""
    return text.rpartition(END_THINK)[2].partition(THINK)[0].strip()
