"""The endpoint /v1/completions, which continues a text or token ids.

Evaluation harnesses use it to score given texts with `echo` and `logprobs`. `Completions.prepare` encodes the prompts.
The methods `create_response` and `chunks` of its result sample their completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic_core import to_json

from areno.server import response_bodies
from areno.server.detokenize import (
    TextStream,
    TokenText,
    TokenTextCache,
    TokenTextStream,
    n_partial_tokens,
    prompt_token_texts,
    special_ids,
)
from areno.server.errors import check_prompt_length
from areno.server.requests import CompletionRequest
from areno.server.returned_responses import TurnTokens, message_digest
from areno.server.sampling import EngineClient
from areno.server.threads import ThreadPool
from areno.server.token_sources import TokenSource, token_digest
from areno.types import GenerationOutput, GenerationRequest

Json = dict[str, Any]


_LONG = 1000  # characters or tokens: encoding or decoding more takes over a millisecond, so a thread does it


class Completions:
    def __init__(self, tokenizer: Any, sampler: EngineClient, threads: ThreadPool, *, returns_tokens: bool = False):
        self._tokenizer, self._sampler, self._returns_tokens = tokenizer, sampler, returns_tokens
        self._threads = threads
        self._texts = TokenTextCache(tokenizer)
        self._special = special_ids(tokenizer)

    async def prepare(self, request: CompletionRequest) -> _OpenCompletion:
        """Encode the prompts of a request. Raises ApiError 400 if one cannot be served."""
        scores_prompt = request.echo and request.options.n_top is not None
        is_large = sum(map(len, request.prompts)) > _LONG
        sampled = []
        for prompt in request.prompts:
            tokens = (
                await self._threads.run(partial(self._encode_prompt, prompt))
                if is_large
                else self._encode_prompt(prompt)
            )
            sampled.append(self._sampler.generation_request(tokens, request.options, prompt_logprobs=scores_prompt))
        return _OpenCompletion(self, request, sampled)

    def _encode_prompt(self, prompt: str | list[int]) -> list[int]:
        check_prompt_length(self._tokenizer, prompt, self._sampler.max_prompt_tokens)
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


class _OpenCompletion:
    """A request in progress. `number` is the index of a prompt, `index` the index of a choice in the response."""

    def __init__(self, endpoint: Completions, request: CompletionRequest, sampled: list[GenerationRequest]):
        self._endpoint, self._request, self._sampled = endpoint, request, sampled
        self._outputs: list[GenerationOutput] = []
        self._head = response_bodies.response_envelope("text_completion", "cmpl", request.model)
        skips = request.options.params.skip_special_tokens
        self._hidden = endpoint._sampler.stop_ids | (endpoint._special if skips else frozenset())

    def _decoder(self, number: int) -> response_bodies.SampleDecoder:
        prompt, endpoint = self._sampled[number].prompt, self._endpoint
        n_whole = len(prompt) - self._n_partial_tokens(number)
        places = {"before": prompt[:n_whole], "partial": prompt[n_whole:]}
        stream = TextStream(endpoint._tokenizer, self._hidden, self._request.options.params.stop or (), **places)
        is_scored = self._request.options.n_top is not None
        token_texts = TokenTextStream(endpoint._texts, self._hidden, **places) if is_scored else None
        return response_bodies.SampleDecoder(stream, token_texts)

    def _n_partial_tokens(self, number: int) -> int:
        """Return how many tokens at the end of a tokenized prompt form an incomplete character, 0 for a text prompt."""
        is_text = isinstance(self._request.prompts[number], str) or not self._request.wants_new
        return 0 if is_text else n_partial_tokens(self._endpoint._tokenizer, self._sampled[number].prompt)

    def _echoed_texts(self, number: int) -> tuple[str, list[TokenText]]:
        """Return the text of a prompt. If log-probabilities are requested, also the text of each of its tokens."""
        given, tokens, endpoint = self._request.prompts[number], self._sampled[number].prompt, self._endpoint
        whole = tokens[: len(tokens) - self._n_partial_tokens(number)]
        text = given if isinstance(given, str) else endpoint._tokenizer.decode(whole, skip_special_tokens=False)
        if self._request.options.n_top is None:
            return text, []
        if isinstance(given, str) and endpoint._tokenizer.is_fast:
            return text, prompt_token_texts(endpoint._tokenizer, given)
        token_texts = TokenTextStream(endpoint._texts, frozenset())
        token_texts.feed(tokens)
        return text, token_texts.finish(len(text))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Sample, and yield the server-sent events of a streamed response."""
        async with aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield response_bodies.server_sent_event(chunk)
        yield response_bodies.END

    async def create_token_response(self) -> bytes:
        """Return the response of /inference/v1/generate: token ids with log-probabilities, and no text."""
        self._outputs = await self._endpoint._sampler.finished_outputs(self._sampled[0])
        choices = [
            {
                "index": output.sample,
                "token_ids": output.tokens,
                "finish_reason": response_bodies.finish_reason(output),
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(output.tokens, output.logprobs, strict=True)
                    ]
                },
            }
            for output in self._outputs
        ]
        return to_json({"request_id": self._head["id"], "choices": choices, "prompt_logprobs": None})

    def turns(self) -> list[Json]:
        """Return what `create_token_response` has sampled as turns of an agent, without messages, for RowBuilder."""
        request = self._sampled[0]
        turns = []
        for output in self._outputs:
            text = self._endpoint._tokenizer.decode(output.tokens, skip_special_tokens=True)
            message = {"role": "assistant", "content": text}
            tokens = TurnTokens(
                prompt=request.prompt,
                sources=[(int(TokenSource.USER), len(request.prompt))],
                sampled=output.tokens,
                message=message_digest(message),
                logprobs=output.logprobs,
                versions=output.versions,
                temperature=request.params.logprob_temperature,
                keys=[str(token_digest(request.prompt))],
            )
            turn = {"messages": [], "tools": None, "tool_choice": None, "message": message, "tokens": tokens}
            reason = response_bodies.finish_reason(output)
            turns.append({**turn, "finish_reason": reason, "choice": [self._head["id"], output.sample]})
        return turns

    async def create_response(self) -> bytes:
        found = await _gather_or_cancel([self._endpoint._sampler.finished_outputs(one) for one in self._sampled])
        n_tokens = sum(len(one.prompt) for one in self._sampled) + sum(
            len(one.tokens) for all_ in found for one in all_
        )
        is_large = n_tokens > _LONG
        return await self._endpoint._threads.run(lambda: self._response(found)) if is_large else self._response(found)

    def _response(self, found: Sequence[Sequence[GenerationOutput]]) -> bytes:
        choices = []
        for number, outputs in enumerate(found):
            echo = self._echoed_texts(number) if self._request.echo else ("", [])
            choices += [self._choice(len(choices) + n, number, output, *echo) for n, output in enumerate(outputs)]
        body = {**self._head, "choices": choices, "usage": self._usage(found), "system_fingerprint": None}
        return to_json(body | self._token_field(found))

    def _choice(self, index: int, number: int, output: GenerationOutput, echo: str, prompt: list[TokenText]) -> Json:
        request, text = self._request, ""
        scores = self._prompt_scores(number, output, prompt)
        if request.wants_new:
            text, scored = self._decoder(number).decode(output)
            scores += scored
        logprobs = None
        if request.options.n_top is not None:
            logprobs = response_bodies.text_logprobs(self._endpoint._texts, scores, request.options.n_top)
        reason = response_bodies.finish_reason(output) if request.wants_new else "length"
        return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_scores(
        self, number: int, output: GenerationOutput, prompt: list[TokenText]
    ) -> list[response_bodies.ScoredText]:
        if not prompt:
            return []
        pairs = [(None, []), *output.prompt_logprobs]
        return [
            ((token, *pair), one) for token, pair, one in zip(self._sampled[number].prompt, pairs, prompt, strict=True)
        ]

    def _usage(self, found: Sequence[Sequence[GenerationOutput]]) -> Json:
        n_prompt = sum(len(one.prompt) for one in self._sampled)
        n_new = sum(len(output.tokens) for outputs in found for output in outputs) if self._request.wants_new else 0
        return response_bodies.usage_field(n_prompt, n_new, sum(outputs[0].cached_tokens for outputs in found))

    def _token_field(self, found: Sequence[Sequence[GenerationOutput]]) -> Json:
        wanted = self._request.options.token_ids
        if not (self._endpoint._returns_tokens if wanted is None else wanted):
            return {}
        prompt = {"prompt_token_ids": [one.prompt for one in self._sampled]}
        return {"areno": response_bodies.token_field(prompt, [output for outputs in found for output in outputs])}

    async def chunks(self) -> AsyncIterator[Json]:
        options = self._request.options
        base = {**self._head, "system_fingerprint": None} | ({"usage": None} if options.include_usage else {})
        found: list[list[GenerationOutput]] = []
        for number, sampled in enumerate(self._sampled):
            done: list[Any] = [None] * options.n
            parts = [_StreamedChoice(self, number) for _ in range(options.n)]
            async with aclosing(self._endpoint._sampler.outputs(sampled)) as stream:  # type: ignore[type-var]
                async for output in stream:
                    for choice in parts[output.sample].feed(output):
                        yield {**base, "choices": [{"index": number * options.n + output.sample, **choice}]}
                    if output.finish_reason is not None:
                        done[output.sample] = output
            found.append(done)
        if options.include_usage:
            yield {**base, "choices": [], "usage": self._usage(found)} | self._token_field(found)


class _StreamedChoice:
    def __init__(self, completion: _OpenCompletion, number: int):
        self._completion, self._number = completion, number
        self._decoder, self._offset = completion._decoder(number), 0
        self._echoes = completion._request.echo

    def feed(self, output: GenerationOutput) -> list[Json]:
        """Return the new elements of `choices`, without their index. With `echo`, the first element is the prompt."""
        request, is_last = self._completion._request, output.finish_reason is not None
        choices = []
        if self._echoes:
            self._echoes = False
            text, prompt = self._completion._echoed_texts(self._number)
            choices.append(self._choice(text, self._completion._prompt_scores(self._number, output, prompt), 0))
            self._offset = len(text)
        if request.wants_new:
            text, scored = self._decoder.decode(output)
            choices.append(self._choice(text, scored, self._offset))
            self._offset += sum(len(one.text) for _, one in scored)
        if is_last:
            choices = choices or [self._choice("", [], 0)]
            choices[-1]["finish_reason"] = response_bodies.finish_reason(output) if request.wants_new else "length"
        return [choice for choice in choices if choice["text"] or choice["logprobs"] or choice["finish_reason"]]

    def _choice(self, text: str, scores: list[response_bodies.ScoredText], offset: int) -> Json:
        n_top, texts = self._completion._request.options.n_top, self._completion._endpoint._texts
        logprobs = response_bodies.text_logprobs(texts, scores, n_top or 0, offset) if scores else None
        return {"text": text, "logprobs": logprobs, "finish_reason": None}


async def _gather_or_cancel(waiting: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
