"""/v1/completions: text or tokens to text, as the older API has it. Evaluation harnesses score with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic_core import to_json

from areno.agents.protocol.bounds import has_more_tokens
from areno.agents.protocol.requests import CompletionRequest
from areno.agents.server import answers
from areno.agents.server.sampling import Sampler
from areno.agents.server.text import TextStream, TokenTexts, special_ids
from areno.agents.server.threads import Threads
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

    def _stream(self) -> TextStream:
        return TextStream(self._endpoint._tokenizer, self._hidden, self._request.options.params.stop or ())

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
        for sampled, outputs in zip(self._sampled, found, strict=True):
            for output in outputs:
                choices.append(self._choice(len(choices), sampled.prompt, output))
        body = {**self._head, "choices": choices, "usage": self._usage(found), "system_fingerprint": None}
        return to_json(body | self._token_field(found))

    def _choice(self, index: int, prompt: list[int], output: GenerationOutput) -> Json:
        request, endpoint = self._request, self._endpoint
        stream = self._stream()
        text = stream.feed(output.tokens) + stream.finish() if request.wants_new else ""
        scores: list[Any] = answers.scores_of(output) if request.wants_new else []
        if request.echo:
            said = endpoint._tokenizer.decode(prompt, skip_special_tokens=False)
            text = said + text
            if request.options.n_top is not None:
                first = [(prompt[0], None, [])]
                pairs = zip(prompt[1:], output.prompt_logprobs, strict=True)
                scores = [*first, *((token, logprob, top) for token, (logprob, top) in pairs), *scores]
        logprobs = None
        if request.options.n_top is not None:
            logprobs = answers.text_logprobs(endpoint._texts, scores, request.options.n_top)
        reason = answers.finish_reason(output) if request.wants_new else "length"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

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
            streams, taken, offsets = [self._stream() for _ in range(options.n)], [0] * options.n, [0] * options.n
            done: list[Any] = [None] * options.n
            async with aclosing(self._endpoint._sampler.outputs(sampled)) as stream:  # type: ignore[type-var]
                async for output in stream:
                    sample, is_last = output.sample, output.finish_reason is not None
                    start = taken[sample] if is_last else 0
                    scores = answers.scores_of(output)[start:]
                    text = streams[sample].feed(output.tokens[start:]) + (streams[sample].finish() if is_last else "")
                    taken[sample] += len(scores)
                    logprobs = None
                    if options.n_top is not None and scores:
                        logprobs = answers.text_logprobs(self._endpoint._texts, scores, options.n_top, offsets[sample])
                        offsets[sample] += sum(map(len, logprobs["tokens"]))
                    if is_last:
                        done[sample] = output
                    if text or logprobs or is_last:
                        choice = {"index": number * options.n + sample, "text": text, "logprobs": logprobs}
                        reason = answers.finish_reason(output) if is_last else None
                        yield {**base, "choices": [{**choice, "finish_reason": reason}]}
            found.append(done)
        if options.include_usage:
            yield {**base, "choices": [], "usage": self._usage(found)} | self._token_field(found)


async def _all_of(waiting: list[Any]) -> list[Any]:
    """What all of them return. Where one raises, or the caller is cancelled, the others end, too."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
