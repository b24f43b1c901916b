"""A server whose policy is a function from the text of a prompt to the text of an answer, with a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from areno.agents.proxy import SampleServer
from areno.data.turn_ends import stop_token_ids
from areno.engine.requests import RequestLimits
from areno.server.app import build_server
from areno.server.sampling import EngineClient, ServerLimits
from areno.types import GenerationOutput, GenerationRequest, SamplingParams
from tests.helpers.tokenizers import shared_tokenizer

Say = Callable[[str], str]


class ScriptedEngine:
    """`prompts` has the text of each prompt that was sampled from, `n_aborted` counts samples that were given up."""

    def __init__(self, tokenizer: Any, say: Say):
        self.tokenizer, self.say = tokenizer, say
        self._ends = stop_token_ids(tokenizer)
        self.spec = SimpleNamespace(eos_token_ids=sorted(self._ends))
        self.batcher = SimpleNamespace(expecting=nullcontext, announce=lambda n: None)
        self.prompts: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.n_aborted = self.n_running = 0
        self.before_tokens: Callable[[], Any] = lambda: None  # may wait: its result is awaited before the first token

    async def generate_stream(self, request: GenerationRequest, timeout_s: float) -> AsyncIterator[GenerationOutput]:
        prompt = self.tokenizer.decode(request.prompt)
        self.prompts.append(prompt)
        self.requests.append(request)
        self.n_running += 1
        done = False
        try:
            if (wait := self.before_tokens()) is not None:
                await wait
            for sample in range(request.n_samples):
                said = self.tokenizer.encode(self.say(prompt))
                ended = said and said[-1] in self._ends
                tokens = self._up_to_stop(said if ended else [*said, self.tokenizer.eos_token_id], request)
                most = request.params.max_new_tokens
                is_cut, tokens = len(tokens) > most, tokens[:most]
                for start in range(0, len(tokens), 16) if request.stream else ():
                    yield _output(request, sample, tokens[start : start + 16], None)
                    await asyncio.sleep(0)
                yield _output(request, sample, tokens, "length" if is_cut else "stop")
            done = True
        finally:
            self.n_running -= 1
            self.n_aborted += not done

    def _up_to_stop(self, tokens: list[int], request: GenerationRequest) -> list[int]:
        for n in range(1, len(tokens)) if request.params.stop else ():
            text = self.tokenizer.decode(tokens[:n])
            if any(stop in text for stop in request.params.stop or ()):
                return tokens[:n]
        return tokens

    def rollout_stats(self) -> list[Any]:
        return []

    def draft_counts(self) -> Any:
        return SimpleNamespace(drafted=0, accepted=0)


def _output(request: GenerationRequest, sample: int, tokens: list[int], reason: Any) -> GenerationOutput:
    return GenerationOutput(
        request_id=request.request_id,
        sample=sample,
        tokens=tokens,
        logprobs=[-0.25] * len(tokens),
        versions=[0] * len(tokens),
        finish_reason=reason,
    )


@contextmanager
def scripted_server(
    say: Say,
    *,
    tokenizer: Any = "qwen3",  # or a tokenizer
    params: SamplingParams | None = None,
    context: int = 40_960,
    session: str | None = "session",
    **limits: Any,
) -> Iterator[tuple[SampleServer, ScriptedEngine]]:
    """Serve a policy that says `say(text of the prompt)`. With `session` None, it is the server of `areno serve`."""
    loaded = shared_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    engine: Any = ScriptedEngine(loaded, say)
    bounds = RequestLimits(vocab_size=len(loaded), context_len=context, kv_tokens=context)
    client = EngineClient(engine, bounds, params or SamplingParams(max_new_tokens=4096), ServerLimits(**limits), seed=1)
    server = SampleServer(build_server(client, loaded, models=["policy"], keys=["secret"], session=session))
    engine.server = server
    server.start()
    try:
        yield server, engine
    finally:
        server.stop()
