"""The endpoint /v1/chat/completions.

`ChatCompletions.prepare` builds the prompt tokens and the request to the engine. The methods `create_response` and
`chunks` of its result sample. Each finished turn is cached, so that the next turn of the conversation continues from
the same tokens.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from areno.errors import ArenoError, DataError
from areno.server import response_bodies
from areno.server.detokenize import TextStream, TokenTextCache, TokenTextStream, special_ids
from areno.server.errors import ApiError, PromptTooLong, invalid_field_error
from areno.server.messages import read_messages
from areno.server.parsers import MessageDelta, MessageStream, ToolCall, join_deltas
from areno.server.parsers.message import END_THINK, THINK
from areno.server.prompt_builder import EncodedPrompt, PromptBuilder, is_first_turn, template_names
from areno.server.requests import ChatRequest
from areno.server.returned_responses import message_digest, sampling_fields
from areno.server.sampling import EngineClient
from areno.server.threads import ThreadPool
from areno.types import GenerationOutput, GenerationRequest, Message

Json = dict[str, Any]


class ChatCompletions:
    """Answers chat requests. `session` is in each response, so that a session rejects trajectories sampled elsewhere.

    In a training session, no grammar enforces the calls that `tool_choice` asks for: the model must learn to call
    tools.
    """

    def __init__(self, prompts: PromptBuilder, sampler: EngineClient, *, session: str | None = None):
        self.prompts, self.sampler = prompts, sampler
        self._session, self._enforces_calls = session, session is None
        tokenizer = prompts.tokenizer
        self._grammars = ThreadPool(1, "areno-grammars")  # one thread, since the compiler is not thread-safe
        self._texts = TokenTextCache(tokenizer)
        self._special = special_ids(tokenizer, keep={*prompts.parser.tags, THINK, END_THINK})

    async def prepare(self, request: ChatRequest) -> _OpenChat:
        """Prepare a request for sampling. Raises ApiError 400 if it cannot be served."""
        try:
            # The server caches checked requests, because the samples of a prompt begin with the same one.
            if (prompt := request.prompt()) is None:
                template = self._template_variables(request)
                with self.sampler.engine.batcher.expecting():
                    prompt = await self.prompts.build_prompt_async(request.messages, request.tools, template)
                if is_first_turn(request.messages):
                    request.prompt = weakref.ref(prompt)
        except PromptTooLong as error:
            raise _with_conversation_size(error, request) from error
        except DataError as error:
            raise ApiError(400, str(error), param="messages") from error
        grammar = None
        if request.response_format is not None or (request.requires_call and self._enforces_calls):
            # A grammar of a large vocabulary takes a second the first time.
            grammar = await self._grammars.run(lambda: self._grammar_text(request, prompt))
        try:
            # An answer that is not streamed is read in pieces, too, so that its text is parsed before many samples
            # finish at once.
            sampled = self.sampler.generation_request(
                prompt.tokens,
                request.options,
                digest=prompt.digest,
                pieces=not request.options.stream,
                draft_scope=task_hash(request.messages, prompt),
                grammar=grammar,
            )
        except ApiError as error:
            if error.param not in ("prompt", "max_tokens"):
                raise
            raise _with_conversation_size(error, request, prompt.tokens) from error
        hidden = self.sampler.stop_ids | (self._special if request.options.params.skip_special_tokens else frozenset())
        return _OpenChat(self, request, prompt, sampled, hidden)

    def _template_variables(self, request: ChatRequest) -> Json:
        """Return the extra variables of the chat template, including the variable that `reasoning_effort` sets."""
        effort = request.reasoning_effort
        if effort is None:
            return request.template
        known = template_names(self.prompts.tokenizer.chat_template)
        if effort == "none" and "enable_thinking" in known:
            name, value = "enable_thinking", False
        else:
            name, value = "reasoning_effort", effort
        if name not in known:
            allowed = "; only none is possible" if "enable_thinking" in known else ""
            raise invalid_field_error(
                "reasoning_effort", f"is {effort}, which this model's chat template does not read{allowed}"
            )
        if request.template.get(name, value) != value:
            raise invalid_field_error("reasoning_effort", f"is {effort}, but chat_template_kwargs sets another {name}")
        return {**request.template, name: value}

    def _grammar_text(self, request: ChatRequest, prompt: EncodedPrompt) -> str | None:
        """Return the grammar that enforces `response_format` and `tool_choice`, or None if neither constrains."""
        from areno.server.output_grammars import Constraint, compile_grammar, reasoning_after

        requires_call, tokenizer = request.requires_call and self._enforces_calls, self.prompts.tokenizer
        constraint = Constraint(
            response_format=request.response_format,
            tools=request.tools,
            requires_call=requires_call,
            parallel_tool_calls=request.parallel_tool_calls and not (requires_call and request.named),
            parser=self.prompts.parser,
            reasoning=reasoning_after(prompt.text, tokenizer.chat_template),
        )
        try:
            grammar = compile_grammar(
                constraint, tokenizer, self.sampler.request_limits.vocab_size, self.sampler.stop_ids
            )
        except ArenoError as error:
            raise ApiError(400, str(error), param="tools" if requires_call else "response_format") from error
        return None if grammar is None else grammar.text


def task_hash(messages: Sequence[Message], prompt: EncodedPrompt) -> int:
    """Return a 60-bit hash of the messages before the first answer. It is the same for all turns of a conversation."""
    n_before = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return int(prompt.keys[max(0, n_before - 1)][:15], 16)


def _with_conversation_size(error: ApiError, request: ChatRequest, tokens: Sequence[int] | None = None) -> ApiError:
    """Return a copy of an error, with the size of the conversation at the end of the message."""
    roles = Counter(message["role"] for message in request.messages)
    counts = "" if tokens is None else f"tokens={len(tokens)} "
    counts += f"messages={len(request.messages)} assistant_turns={roles['assistant']} tool_results={roles['tool']}"
    param = "messages" if error.param == "prompt" else error.param
    return ApiError(error.status, f"{error.message} ({counts})", param=param, code=error.code)


@dataclass
class _OpenChat:
    endpoint: ChatCompletions
    request: ChatRequest
    prompt: EncodedPrompt
    sampled: GenerationRequest
    hidden: frozenset[int]  # tokens without text in the answer: stop tokens and, by default, special tokens

    def __post_init__(self) -> None:
        self.head = response_bodies.response_envelope("chat.completion", "chatcmpl", self.request.model)
        options = self.request.options
        self.returns_tokens = self.endpoint._session is not None if options.token_ids is None else options.token_ids

    async def create_response(self) -> bytes:
        n = self.request.options.n
        choices, outputs = list[_Choice](), list[Any]([None] * n)
        written, prompt = list[response_bodies.TokenFieldWriter](), b""
        async with aclosing(self.endpoint.sampler.outputs(self.sampled)) as stream:  # type: ignore[type-var]
            async for output in stream:
                if not choices:  # created late, because many requests may wait for the engine
                    choices = [_Choice(self, index) for index in range(n)]
                    if self.returns_tokens:
                        written = [response_bodies.TokenFieldWriter() for _ in range(n)]
                        prompt = to_json(self._prompt_field())
                if self.returns_tokens:
                    written[output.sample].add(output)
                choices[output.sample].feed(output)
                if output.finish_reason is not None:
                    outputs[output.sample] = output
        shown = [self._choice(index, output, choices[index]) for index, output in enumerate(outputs)]
        body = {**self.head, "choices": shown, "usage": self._usage(outputs), "system_fingerprint": None}
        if not self.returns_tokens:
            return to_json(body)
        tokens = [
            written[index].choice_bytes(index, output.finish_reason, message_digest(shown[index]["message"]))
            for index, output in enumerate(outputs)
        ]
        return response_bodies.with_token_field(body, prompt, tokens)

    def _choice(self, index: int, output: GenerationOutput, choice: _Choice) -> Json:
        """Return the JSON of a choice, and schedule the caching of its turn."""
        message: Json = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        message |= {name: value for name, value in choice.message().items() if value is not None}
        # Runs after the answers that are ready have been sent, and before a client can send the next turn.
        asyncio.get_running_loop().call_soon(self.cache_turn, output, message)
        logprobs = None if self.request.options.n_top is None else choice.logprobs()
        reason = self.finish_reason(output, choice.n_calls > 0)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def cache_turn(self, output: GenerationOutput, message: Json) -> None:
        """Cache a finished turn with the message as the client got it."""
        sent_back = {name: value for name, value in message.items() if value is not None}
        if "tool_calls" in sent_back:
            [message] = read_messages([sent_back])
        else:  # text has no other form, and most turns are text
            message = {"role": "assistant", "content": ""} | {
                name: sent_back[name] for name in ("content", "reasoning_content") if name in sent_back
            }
        ends = self.endpoint.sampler.stop_ids
        self.endpoint.prompts.cache_turn(self.prompt, output.tokens, ends, message, self.hidden)

    def finish_reason(self, output: GenerationOutput, has_calls: bool) -> str:
        """Return "stop", "length" or "tool_calls". As in OpenAI's API, a forced call ends with "stop"."""
        if output.finish_reason == "stop" and has_calls and self.request.named is None:
            return "tool_calls"
        return response_bodies.finish_reason(output)

    def _usage(self, outputs: Sequence[GenerationOutput]) -> Json:
        n_completion = sum(len(output.tokens) for output in outputs)
        return response_bodies.usage_field(len(self.prompt.tokens), n_completion, outputs[0].cached_tokens)

    def _token_field(self, outputs: Sequence[GenerationOutput], messages: Sequence[Json]) -> Json:
        if not self.returns_tokens:
            return {}
        digests = [message_digest(message) for message in messages]
        return {"areno": response_bodies.token_field(self._prompt_field(), outputs, digests)}

    def _prompt_field(self) -> Json:
        """Return the part of the field `areno` that is about the prompt."""
        return {
            "session": self.endpoint._session,
            "conversation": self.prompt.keys[-1],
            **sampling_fields(self.sampled.params),
            "prompt_token_ids": self.prompt.tokens,
            "sources": self.prompt.sources,
        }

    async def chunks(self) -> AsyncIterator[Json]:
        options = self.request.options
        base = {**self.head, "object": "chat.completion.chunk", "system_fingerprint": None}
        if options.include_usage:
            base["usage"] = None
        choices = [_Choice(self, index) for index in range(options.n)]
        outputs: list[Any] = [None] * options.n

        def chunk(index: int, delta: Json, reason: str | None = None) -> Json:
            logprobs = choices[index].logprobs() if choices[index].unreported else None
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return {**base, "choices": [choice]}

        for index in range(options.n):
            yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
        async with aclosing(self.endpoint.sampler.outputs(self.sampled)) as stream:  # type: ignore[type-var]
            async for output in stream:
                choice = choices[output.sample]
                for delta in choice.feed(output):
                    yield chunk(output.sample, choice.delta_body(delta))
                if output.finish_reason is None:
                    continue
                outputs[output.sample] = output
                self.cache_turn(output, choice.message())
                last = chunk(output.sample, {}, self.finish_reason(output, choice.n_calls > 0))
                is_whole = None not in outputs
                yield last | (self._token_field(outputs, [one.message() for one in choices]) if is_whole else {})
        if options.include_usage:
            yield {**base, "choices": [], "usage": self._usage(outputs)}


class _Choice:
    """One choice of an answer, parsed while its tokens arrive."""

    def __init__(self, chat: _OpenChat, index: int):
        request, endpoint = chat.request, chat.endpoint
        stream = TextStream(endpoint.prompts.tokenizer, chat.hidden, request.options.params.stop or ())
        self._texts = endpoint._texts
        token_texts = None if request.options.n_top is None else TokenTextStream(self._texts, chat.hidden)
        self._decoder = response_bodies.SampleDecoder(stream, token_texts)
        self._message: MessageStream = endpoint.prompts.parser.stream(
            request.tools,
            in_reasoning=chat.prompt.opens_reasoning,
            message_id=f"{chat.head['id'].removeprefix('chatcmpl-')}{index or ''}",
        )
        self._one_call = not request.parallel_tool_calls
        self.unreported: list[response_bodies.ScoredText] = []  # not yet returned by `logprobs`
        self._deltas: list[MessageDelta] = []
        self.n_calls = 0

    def feed(self, output: GenerationOutput) -> list[MessageDelta]:
        """Return the new message deltas. Text that later tokens may change is held back for a later call."""
        text, scored = self._decoder.decode(output)
        self.unreported += scored
        return self._record_deltas(
            self._message.feed(text) if output.finish_reason is None else self._message.finish(text)
        )

    def _record_deltas(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        """Record and return the deltas. Without `parallel_tool_calls`, calls after the first are dropped."""
        kept = []
        for delta in deltas:
            if delta.tool_call is not None:
                self.n_calls += 1
                if self._one_call and self.n_calls > 1:
                    continue
            kept.append(delta)
        self._deltas += kept
        return kept

    def message(self) -> Json:
        parsed = join_deltas(self._deltas)
        calls = [_call_body(call) for call in parsed.tool_calls]
        message = {"role": "assistant", "content": parsed.content, "reasoning_content": parsed.reasoning_content}
        return message | ({"tool_calls": calls} if calls else {})

    def delta_body(self, delta: MessageDelta) -> Json:
        if delta.tool_call is not None:
            index = sum(one.tool_call is not None for one in self._deltas[: self._deltas.index(delta)])
            return {"tool_calls": [{"index": index, **_call_body(delta.tool_call)}]}
        if delta.reasoning_content is not None:
            return {"reasoning_content": delta.reasoning_content}
        return {"content": delta.content}

    def logprobs(self) -> Json:
        """Return the `logprobs` object of the tokens since the last call."""
        scores, self.unreported = self.unreported, []
        return response_bodies.chat_logprobs(self._texts, scores)


def _call_body(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
