"""/v1/completions: text or tokens to text, as the older API has it. Evaluation harnesses score with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic_core import to_json

from areno.server import answers
from areno.server.errors import has_more_tokens
from areno.server.host import Threads
from areno.server.requests import CompletionRequest
from areno.server.sampling import Sampler
from areno.server.text import Spelled, Spelling, TextStream, TokenTexts, n_begun, special_ids, spelled_prompt
from areno.types import GenerationOutput, GenerationRequest

Json = dict[str, Any]


_LONG = 1000  # characters or tokens: what is made of them takes about a millisecond


class Completions:
    """The endpoint. tells_tokens: whether answers have the extra field of tokens unless a request says otherwise.

    threads: make tokens of long prompts, and long answers.
    """

    def __init__(self, tokenizer: Any, sampler: Sampler, threads: Threads, *, tells_tokens: bool = False):
        self._tokenizer, self._sampler, self._tells_tokens = tokenizer, sampler, tells_tokens
        self._threads = threads
        self._texts = TokenTexts(tokenizer)
        self._special = special_ids(tokenizer)

    async def open(self, request: CompletionRequest) -> _Completion:
        """Return the request with its prompts as tokens. Raises ApiError 400 where one cannot be served."""
        scores_prompt = request.echo and request.options.n_top is not None
        is_large = sum(map(len, request.prompts)) > _LONG
        sampled = []
        for prompt in request.prompts:
            tokens = await self._threads.run(partial(self._encoded, prompt)) if is_large else self._encoded(prompt)
            sampled.append(self._sampler.request(tokens, request.options, prompt_logprobs=scores_prompt))
        return _Completion(self, request, sampled)

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        most = self._sampler.most_prompt
        if isinstance(prompt, str):
            if has_more_tokens(self._tokenizer, prompt, most):
                raise self._sampler.too_long()
            return self._tokenizer.encode(prompt)
        if len(prompt) > most:
            raise self._sampler.too_long()
        return prompt


class _Completion:
    """One request under way. sampled: of each prompt."""

    def __init__(self, endpoint: Completions, request: CompletionRequest, sampled: list[GenerationRequest]):
        self._endpoint, self._request, self._sampled = endpoint, request, sampled
        self._head = answers.envelope("text_completion", "cmpl", request.model)
        skips = request.options.params.skip_special_tokens
        self._hidden = endpoint._sampler.stop_ids | (endpoint._special if skips else frozenset())

    def _begin(self, number: int) -> tuple[TextStream, Spelling]:
        """Return the text of a completion of a prompt, and its tokens. Both go on from the prompt."""
        prompt, endpoint = self._sampled[number].prompt, self._endpoint
        n_whole = len(prompt) - self._n_begun(number)
        places = {"before": prompt[:n_whole], "begun": prompt[n_whole:]}
        stream = TextStream(endpoint._tokenizer, self._hidden, self._request.options.params.stop or (), **places)
        return stream, Spelling(endpoint._texts, self._hidden, **places)

    def _n_begun(self, number: int) -> int:
        """Return how many tokens of a prompt are the beginning of a character that is the completion's."""
        is_text = isinstance(self._request.prompts[number], str) or not self._request.wants_new
        return 0 if is_text else n_begun(self._endpoint._tokenizer, self._sampled[number].prompt)

    def _said(self, number: int) -> tuple[str, list[Spelled]]:
        """Return a prompt as it was sent, and its tokens where they have log-probabilities."""
        given, tokens, endpoint = self._request.prompts[number], self._sampled[number].prompt, self._endpoint
        whole = tokens[: len(tokens) - self._n_begun(number)]
        text = given if isinstance(given, str) else endpoint._tokenizer.decode(whole, skip_special_tokens=False)
        if self._request.options.n_top is None:
            return text, []
        if isinstance(given, str) and endpoint._tokenizer.is_fast:
            return text, spelled_prompt(endpoint._tokenizer, given)
        spelling = Spelling(endpoint._texts, frozenset())
        spelling.feed(tokens)
        return text, spelling.finish(len(text))

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        found = await _all_of([self._endpoint._sampler.finished(one) for one in self._sampled])
        n_tokens = sum(len(one.prompt) for one in self._sampled) + sum(
            len(one.tokens) for all_ in found for one in all_
        )
        is_large = n_tokens > _LONG
        return await self._endpoint._threads.run(lambda: self._written(found)) if is_large else self._written(found)

    def _written(self, found: Sequence[Sequence[GenerationOutput]]) -> bytes:
        choices = []
        for number, outputs in enumerate(found):
            said = self._said(number) if self._request.echo else ("", [])
            choices += [self._choice(len(choices) + n, number, output, *said) for n, output in enumerate(outputs)]
        body = {**self._head, "choices": choices, "usage": self._usage(found), "system_fingerprint": None}
        return to_json(body | self._token_field(found))

    def _choice(self, index: int, number: int, output: GenerationOutput, said: str, prompt: list[Spelled]) -> Json:
        """Return one choice of the answer to prompt `number`. said, prompt: text and tokens to echo in front."""
        request, text = self._request, ""
        scores: list[answers.SpelledScore] = []
        if prompt:
            tokens = self._sampled[number].prompt
            pairs = [(None, []), *output.prompt_logprobs]
            scores = [((token, *pair), one) for token, pair, one in zip(tokens, pairs, prompt, strict=True)]
        if request.wants_new:
            stream, spelling = self._begin(number)
            text = stream.feed(output.tokens) + stream.finish()
            if request.options.n_top is not None:
                spelling.feed(output.tokens)
                scores += zip(answers.scores_of(output), spelling.finish(len(text)), strict=True)
        logprobs = None
        if request.options.n_top is not None:
            logprobs = answers.text_logprobs(self._endpoint._texts, scores, request.options.n_top)
        reason = answers.finish_reason(output) if request.wants_new else "length"
        return {"index": index, "text": said + text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, found: Sequence[Sequence[GenerationOutput]]) -> Json:
        n_prompt = sum(len(one.prompt) for one in self._sampled)
        n_new = sum(len(output.tokens) for outputs in found for output in outputs) if self._request.wants_new else 0
        return answers.usage(n_prompt, n_new, sum(outputs[0].cached_tokens for outputs in found))

    def _token_field(self, found: Sequence[Sequence[GenerationOutput]]) -> Json:
        told = self._request.options.token_ids
        if not (self._endpoint._tells_tokens if told is None else told):
            return {}
        prompt = {"prompt_token_ids": [one.prompt for one in self._sampled]}
        return {"areno": answers.token_field(prompt, [output for outputs in found for output in outputs])}

    async def chunks(self) -> AsyncIterator[Json]:
        """The answer in pieces, one prompt after the other, each as it is written."""
        options = self._request.options
        base = {**self._head, "system_fingerprint": None} | ({"usage": None} if options.include_usage else {})
        found: list[list[GenerationOutput]] = []
        for number, sampled in enumerate(self._sampled):
            parts = [_Part(*self._begin(number)) for _ in range(options.n)]
            done: list[Any] = [None] * options.n
            async with aclosing(self._endpoint._sampler.outputs(sampled)) as stream:  # type: ignore[type-var]
                async for output in stream:
                    sample, is_last = output.sample, output.finish_reason is not None
                    text, scores, offset = parts[sample].take(output, options.n_top is not None)
                    logprobs = None
                    if scores:
                        logprobs = answers.text_logprobs(self._endpoint._texts, scores, options.n_top or 0, offset)
                    if is_last:
                        done[sample] = output
                    if text or logprobs or is_last:
                        choice = {"index": number * options.n + sample, "text": text, "logprobs": logprobs}
                        reason = answers.finish_reason(output) if is_last else None
                        yield {**base, "choices": [{**choice, "finish_reason": reason}]}
            found.append(done)
        if options.include_usage:
            yield {**base, "choices": [], "usage": self._usage(found)} | self._token_field(found)


class _Part:
    """A choice as it is written."""

    def __init__(self, stream: TextStream, spelling: Spelling):
        self._stream, self._spelling = stream, spelling
        self._n_taken = self._n_characters = self._offset = 0
        self._scores: list[answers.TokenScore] = []  # of tokens that are not spelled yet

    def take(self, output: GenerationOutput, wants_scores: bool) -> tuple[str, list[answers.SpelledScore], int]:
        """Return the text that is certain with an output, the tokens in it, and the characters before them."""
        is_last = output.finish_reason is not None
        start = self._n_taken if is_last else 0  # the last one has the whole completion
        tokens = output.tokens[start:]
        self._n_taken += len(tokens)
        text = self._stream.feed(tokens) + (self._stream.finish() if is_last else "")
        self._n_characters += len(text)
        if not wants_scores:
            return text, [], 0
        self._scores += answers.scores_of(output)[start:]
        self._spelling.feed(tokens)
        spelling, n = self._spelling, self._n_characters
        spelled, offset = spelling.finish(n) if is_last else spelling.take(n), self._offset
        found, self._scores = list(zip(self._scores, spelled, strict=False)), self._scores[len(spelled) :]
        self._offset += sum(len(one.text) for one in spelled)
        return text, found, offset


async def _all_of(waiting: list[Any]) -> list[Any]:
    """What all of them return. Where one raises, or the caller is cancelled, the others end, too."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
