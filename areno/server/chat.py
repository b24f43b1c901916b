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
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import to_json

from areno.data.messages import template_traits
from areno.errors import ArenoError, DataError
from areno.server import response_bodies
from areno.server.detokenize import TextStream, TokenTextCache, TokenTextStream, special_ids
from areno.server.errors import ApiError, PromptTooLong, invalid_field_error
from areno.server.messages import conversation_keys, read_messages
from areno.server.parsers import MessageDelta, MessageStream, ToolCall, join_deltas
from areno.server.parsers.message import END_THINK, THINK
from areno.server.prompt_builder import EncodedPrompt, PromptBuilder, is_first_turn, template_names
from areno.server.requests import ChatRequest, SampleOptions, replace_params
from areno.server.returned_responses import TurnTokens, message_digest, sampling_fields
from areno.server.sample_sessions import SampleSession
from areno.server.sampling import EngineClient
from areno.server.threads import ThreadPool
from areno.types import GenerationOutput, GenerationRequest, Message

Json = dict[str, Any]
_STOP_TOKENS = 1000  # at the end of an answer: a stop string has at most as many characters


class ChatCompletions:
    """Answers chat requests. `session` is in each response, so that a session rejects trajectories sampled elsewhere.

    In a training session, no grammar enforces what `tool_choice` and `response_format` ask for: a token that is trained
    is sampled from the policy alone.
    """

    def __init__(self, prompts: PromptBuilder, sampler: EngineClient, *, session: str | None = None):
        self.prompts, self.sampler = prompts, sampler
        self._session, self._is_training = session, session is not None
        tokenizer = prompts.tokenizer
        self._grammars = ThreadPool(1, "areno-grammars")  # one thread, since the compiler is not thread-safe
        self._texts = TokenTextCache(tokenizer)
        self._special = special_ids(tokenizer, keep={*prompts.parser.tags, THINK, END_THINK})

    @property
    def takes_later_system(self) -> bool:
        """Whether the chat template renders system messages after the first message."""
        return template_traits(self.prompts.tokenizer).takes_later_system

    async def prepare(self, request: ChatRequest, sample: SampleSession | None = None) -> OpenChat:
        """Prepare a request for sampling, in the session of a sample or in none.

        Raises ApiError 400 if it cannot be served.
        """
        given = request.messages
        if sample is not None and not is_first_turn(given):
            request = replace(request, messages=sample.restored_messages(given))
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
        grammar, forces = None, self._may_force(request, prompt, sample)
        if forces and (request.response_format is not None or request.requires_call):
            # A grammar of a large vocabulary takes a second the first time.
            grammar = await self._grammars.run(lambda: self._grammar_text(request, prompt))
        if sample is not None and sample.uses_run_sampling:
            request = replace(request, options=self._options_with_room(request.options, len(prompt.tokens)))
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
        returns_tokens = self._is_training if sample is None else sample.returns_tokens
        # An agent that returns its turns returns the messages as it has sent them.
        conversation = prompt.keys[-1] if request.messages == given else conversation_keys(given)[-1]
        return OpenChat(self, request, prompt, sampled, hidden, returns_tokens, conversation)

    def _may_force(self, request: ChatRequest, prompt: EncodedPrompt, sample: SampleSession | None) -> bool:
        """Return whether a grammar may choose tokens. In training, it may for auxiliary requests alone."""
        if not self._is_training:
            return True
        if sample is None:
            return False
        has_tools = bool(request.tools)
        # Without the run's sampling, the agent may return its turns, which are then trained.
        may_force = sample.uses_run_sampling and sample.is_auxiliary(prompt.keys, has_tools)
        sample.note_request(prompt.keys, has_tools)
        is_asked = request.requires_call or request.response_format is not None
        sample.counts["not_forced"] += is_asked and not may_force
        return may_force

    def _options_with_room(self, options: SampleOptions, n_prompt: int) -> SampleOptions:
        """Lower `max_tokens` to the default, and to what fits into the KV cache beside the prompt."""
        room = max(self.sampler.request_limits.kv_tokens + 1 - n_prompt, 1)
        most = min(options.params.max_new_tokens, self.sampler.defaults.max_new_tokens, room)
        least = min(options.params.min_new_tokens, most)
        return replace(options, params=replace_params(options.params, max_new_tokens=most, min_new_tokens=least))

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

        requires_call, tokenizer = request.requires_call, self.prompts.tokenizer
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
    roles = Counter(message["role"] for message in request.messages)
    counts = "" if tokens is None else f"tokens={len(tokens)} "
    counts += f"messages={len(request.messages)} assistant_turns={roles['assistant']} tool_results={roles['tool']}"
    param = "messages" if error.param == "prompt" else error.param
    return ApiError(error.status, f"{error.message} ({counts})", param=param, code=error.code)


@dataclass
class OpenChat:
    """A chat request in progress. Sampling begins with `create_response`, `chunks` or `deltas`, one of which is called.

    After its end, `choices` has the choices of the answer.
    """

    endpoint: ChatCompletions
    request: ChatRequest
    prompt: EncodedPrompt
    sampled: GenerationRequest
    hidden: frozenset[int]  # tokens without text in the answer: stop tokens and, by default, special tokens
    returns_tokens: bool  # whether the answer has the field `areno`, if the request does not say
    conversation: str  # key of the messages
    place: AbstractAsyncContextManager[None] = field(default_factory=nullcontext)  # entered to sample

    def __post_init__(self) -> None:
        self.head = response_bodies.response_envelope("chat.completion", "chatcmpl", self.request.model)
        options = self.request.options
        self.returns_tokens = self.returns_tokens if options.token_ids is None else options.token_ids
        self.choices: list[_Choice] = []

    async def create_response(self) -> bytes:
        n = self.request.options.n
        choices, outputs = self.choices, list[Any]([None] * n)
        written, prompt = list[response_bodies.TokenFieldWriter](), b""
        async with self.place, aclosing(self.endpoint.sampler.outputs(self.sampled)) as stream:  # type: ignore[type-var]
            async for output in stream:
                if not choices:  # created late, because many requests may wait for the engine
                    choices += [_Choice(self, index) for index in range(n)]
                    if self.returns_tokens:
                        written = [response_bodies.TokenFieldWriter() for _ in range(n)]
                        prompt = to_json(self._prompt_field())
                if self.returns_tokens:
                    written[output.sample].add(output)
                choices[output.sample].feed(output)
                if output.finish_reason is not None:
                    outputs[output.sample] = output
        shown = [self._choice(index, output, choices[index]) for index, output in enumerate(outputs)]
        body = {**self.head, "choices": shown, "usage": self.usage(), "system_fingerprint": None}
        if self.request.options.token_ids:
            body["prompt_token_ids"] = self.prompt.tokens
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
        choice.output = output
        logprobs = None if self.request.options.n_top is None else choice.logprobs()
        body = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason()}
        return body | ({"token_ids": output.tokens} if self.request.options.token_ids else {})

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

    @property
    def id_suffix(self) -> str:
        """The end of the response's id, which is the same in all dialects."""
        return self.head["id"].removeprefix("chatcmpl-")

    def turns(self) -> list[Json]:
        """Return the finished choices as turns of an agent, for RowBuilder."""
        request = self.request
        asked = {"messages": request.messages, "tools": request.tools or None, "tool_choice": None}
        if self.sampled.grammar is not None:
            asked["forced"] = True  # its tokens are not trained
        return [{**asked, **choice.turn(), "choice": [self.head["id"], choice.index]} for choice in self.choices]

    @property
    def is_finished(self) -> bool:
        return bool(self.choices) and all(choice.output is not None for choice in self.choices)

    def usage(self) -> Json:
        outputs = [choice.finished_output for choice in self.choices]
        n_completion = sum(len(output.tokens) for output in outputs)
        return response_bodies.usage_field(len(self.prompt.tokens), n_completion, outputs[0].cached_tokens)

    def _token_field(self) -> Json:
        if not self.returns_tokens:
            return {}
        outputs = [choice.finished_output for choice in self.choices]
        digests = [message_digest(choice.message()) for choice in self.choices]
        return {"areno": response_bodies.token_field(self._prompt_field(), outputs, digests)}

    def _prompt_field(self) -> Json:
        return {
            "session": self.endpoint._session,
            "conversation": self.conversation,
            **sampling_fields(self.sampled.params),
            "prompt_token_ids": self.prompt.tokens,
            "sources": self.prompt.sources,
        }

    async def chunks(self) -> AsyncIterator[Json]:
        options = self.request.options
        base = {**self.head, "object": "chat.completion.chunk", "system_fingerprint": None}
        if options.include_usage:
            base["usage"] = None

        def chunk(choice: _Choice, delta: Json, reason: str | None = None) -> Json:
            logprobs = choice.logprobs() if choice.unreported else None
            body: Json = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            if options.token_ids:
                body["token_ids"] = choice.pop_token_ids()
            return {**base, "choices": [body]}

        self.choices = [_Choice(self, index) for index in range(options.n)]
        for choice in self.choices:
            first = chunk(choice, {"role": "assistant", "content": "", "refusal": None})
            yield first | ({"prompt_token_ids": self.prompt.tokens} if options.token_ids else {})
        async for choice, delta in self.deltas():
            if delta is not None:
                yield chunk(choice, choice.delta_body(delta))
            else:
                yield chunk(choice, {}, choice.finish_reason()) | (self._token_field() if self.is_finished else {})
        if options.include_usage:
            yield {**base, "choices": [], "usage": self.usage()}

    async def deltas(self) -> AsyncIterator[tuple[_Choice, MessageDelta | None]]:
        """Sample, and yield (choice, increment of its message), with None at the end of each choice."""
        self.choices = self.choices or [_Choice(self, index) for index in range(self.request.options.n)]
        async with self.place, aclosing(self.endpoint.sampler.outputs(self.sampled)) as stream:  # type: ignore[type-var]
            async for output in stream:
                choice = self.choices[output.sample]
                for delta in choice.feed(output):
                    yield choice, delta
                if output.finish_reason is not None:
                    choice.output = output
                    self.cache_turn(output, choice.message())
                    yield choice, None


class _Choice:
    """One choice of an answer, parsed while its tokens arrive."""

    def __init__(self, chat: OpenChat, index: int):
        request, endpoint = chat.request, chat.endpoint
        self._chat, self.index, self._named = chat, index, request.named
        self.output: GenerationOutput | None = None  # the last one, which has the whole completion
        stream = TextStream(endpoint.prompts.tokenizer, chat.hidden, request.options.params.stop or ())
        self._texts = endpoint._texts
        token_texts = None if request.options.n_top is None else TokenTextStream(self._texts, chat.hidden)
        self._decoder = response_bodies.SampleDecoder(stream, token_texts)
        self._message: MessageStream = endpoint.prompts.parser.stream(
            request.tools, in_reasoning=chat.prompt.opens_reasoning, message_id=f"{chat.id_suffix}{index or ''}"
        )
        self._one_call = not request.parallel_tool_calls
        self.unreported: list[response_bodies.ScoredText] = []  # not yet returned by `logprobs`
        self._deltas: list[MessageDelta] = []
        self.n_calls = 0
        self._token_ids: list[int] = []  # not yet returned by `pop_token_ids`

    @property
    def finished_output(self) -> GenerationOutput:
        assert self.output is not None
        return self.output

    def finish_reason(self) -> str:
        """Return "stop", "length" or "tool_calls". As in OpenAI's API, a forced call ends with "stop"."""
        output = self.finished_output
        if output.finish_reason == "stop" and self.n_calls > 0 and self._named is None:
            return "tool_calls"
        return response_bodies.finish_reason(output)

    def feed(self, output: GenerationOutput) -> list[MessageDelta]:
        """Return the new message deltas. Text that later tokens may change is held back for a later call."""
        text, scored = self._decoder.decode(output)
        self.unreported += scored
        if self._chat.request.options.token_ids:
            self._token_ids += self._decoder.new_tokens
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

    def pop_token_ids(self) -> list[int]:
        tokens, self._token_ids = self._token_ids, []
        return tokens

    def message(self) -> Json:
        parsed = join_deltas(self._deltas)
        calls = [_call_body(call) for call in parsed.tool_calls]
        message = {"role": "assistant", "content": parsed.content, "reasoning_content": parsed.reasoning_content}
        return message | ({"tool_calls": calls} if calls else {})

    def turn(self) -> Json:
        prompt, output = self._chat.prompt, self.finished_output
        message = {"role": "assistant", **{name: one for name, one in self.message().items() if one is not None}}
        tokens = TurnTokens(
            prompt=prompt.tokens,
            sources=prompt.sources,
            sampled=output.tokens,
            message=message_digest(message),
            logprobs=output.logprobs,
            versions=output.versions,
            temperature=self._chat.sampled.params.logprob_temperature,
            keys=prompt.keys,
        )
        return {"message": message, "finish_reason": self.finish_reason(), "tokens": tokens}

    def matched_stop(self, stop: Sequence[str]) -> str | None:
        output, sampler = self.finished_output, self._chat.endpoint.sampler
        if not stop or output.finish_reason != "stop" or output.tokens[-1] in sampler.stop_ids:
            return None
        text = self._chat.endpoint.prompts.tokenizer.decode(output.tokens[-_STOP_TOKENS:], skip_special_tokens=False)
        return next((one for one in stop if one in text), None)

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
