"""Checks of the fields of /v1/chat/completions and /v1/completions.

Names that OpenAI's API lacks, such as `top_k`, `min_tokens` and `chat_template_kwargs`, are those of vLLM. A wrong
field raises ApiError 400.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from areno.config.rollout import SamplingConfig
from areno.data.row_schema import NOT_VARIABLES, json_value_problem
from areno.schema.fields import settings
from areno.schema.values import format_value
from areno.server.errors import ApiError, exceeds_size, invalid_field_error
from areno.server.json_bodies import RequestFields
from areno.server.messages import MAX_SCHEMA, TOO_LARGE, Tool, read_messages, read_tool_choice, read_tools
from areno.types import Message, SamplingParams

MAX_CHOICES = 128
MAX_TOP = 20
MAX_MESSAGES = 10_000
_MAX_TOKENS = 2**31 - 1
_MAX_STOP = 1000  # characters of a stop string
_MAX_DIGITS = 10  # of a token id
# Each sampling setting that is a float with two bounds is also a field of requests. OpenAI limits temperature to 2.
_NUMBERS = {
    name: (known.bounds["ge"], known.bounds["le"])
    for name, known in settings(SamplingConfig).items()
    if known.hint is float and {"ge", "le"} <= known.bounds.keys()
} | {"temperature": (0, 2)}
_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
_GENERATE_IGNORED = (
    "detokenize",
    "output_kind",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "routed_experts_prompt_start",  # verifiers sends it from the second turn on, to any model
)
_UNSUPPORTED = (
    "audio",
    "function_call",
    "functions",
    "modalities",
    "prediction",
    "verbosity",
    "web_search_options",
    "suffix",
    "repetition_penalty",
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(kw_only=True)
class SampleOptions:
    """Sampling options of a request, and the extra fields of its answer."""

    params: SamplingParams
    n: int = 1  # samples of each prompt
    seed: int | None = None  # None: the server chooses it
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> number added to its logit
    n_top: int | None = None  # alternatives at each position; None: no log-probabilities
    stream: bool = False
    include_usage: bool = False
    token_ids: bool | None = None  # whether the answer has the field `areno`; None: the server's default


@dataclass(kw_only=True)
class ChatRequest:
    """A checked request to /v1/chat/completions.

    `prompt()` returns the cached prompt of an earlier request with the same body, if it was a first turn, else None.
    """

    model: str
    messages: list[Message]
    tools: list[Tool]
    requires_call: bool  # whether `tool_choice` forces a call
    named: str | None  # function that `tool_choice` forces
    parallel_tool_calls: bool
    response_format: dict[str, Any] | None
    template: dict[str, Any]  # extra variables of the chat template
    reasoning_effort: str | None
    options: SampleOptions
    prompt: Callable[[], Any] = field(default=lambda: None, repr=False, compare=False)


@dataclass(kw_only=True)
class CompletionRequest:
    model: str
    prompts: list[str | list[int]]
    echo: bool
    wants_new: bool  # False for `max_tokens=0`, which only scores the prompt
    options: SampleOptions


def read_chat(values: Any, defaults: SamplingParams, max_messages: int = MAX_MESSAGES) -> ChatRequest:
    fields = RequestFields(values)
    model = _model_name(fields)
    messages = read_messages(fields.array("messages", max_items=max_messages))
    tools = read_tools(fields.array("tools", max_items=1024))
    choice = read_tool_choice(fields.get("tool_choice"), tools)
    limits = (fields.integer(name, 1, _MAX_TOKENS) for name in ("max_tokens", "max_completion_tokens"))
    given = [limit for limit in limits if limit is not None]
    options = _sample_options(fields, defaults, min(given) if given else None)
    if fields.flag("logprobs"):
        options.n_top = fields.integer("top_logprobs", 0, MAX_TOP) or 0
    elif fields.integer("top_logprobs", 0, MAX_TOP):
        raise invalid_field_error("top_logprobs", "needs logprobs=true")
    template = fields.get("chat_template_kwargs", {})
    if not isinstance(template, Mapping):
        raise invalid_field_error("chat_template_kwargs", f"is {format_value(template)}; an object is expected")
    if reserved := sorted(NOT_VARIABLES & template.keys()):
        purpose = "it holds extra variables of the chat template"
        raise invalid_field_error("chat_template_kwargs", f"may not set {', '.join(reserved)}; {purpose}")
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=choice.tools,
        requires_call=choice.requires_call,
        named=choice.named,
        parallel_tool_calls=fields.flag("parallel_tool_calls", default=True),
        response_format=_response_format(fields.get("response_format")),
        template=dict(template),
        reasoning_effort=fields.choice("reasoning_effort", _EFFORTS),
        options=options,
    )
    fields.reject_unread(_IGNORED, _UNSUPPORTED)
    return request


def read_completion(values: Any, defaults: SamplingParams) -> CompletionRequest:
    fields = RequestFields(values)
    model = _model_name(fields)
    prompts = _completion_prompts(fields.get("prompt"))
    max_tokens = fields.integer("max_tokens", 0, _MAX_TOKENS)
    options = _sample_options(fields, defaults, 16 if max_tokens is None else max(max_tokens, 1))
    options.n_top = fields.integer("logprobs", 0, MAX_TOP)
    echo = fields.flag("echo")
    if max_tokens == 0 and not echo:
        raise invalid_field_error(
            "max_tokens", "is 0, which leaves nothing to answer; set echo=true for the prompt alone"
        )
    fields.reject_unread(_IGNORED, _UNSUPPORTED)
    return CompletionRequest(model=model, prompts=prompts, echo=echo, wants_new=max_tokens != 0, options=options)


def read_generate(values: Any, defaults: SamplingParams) -> CompletionRequest:
    """Read a request to /inference/v1/generate, vLLM's endpoint for token ids."""
    fields = RequestFields(values)
    model, tokens = fields.text("model") or "", fields.get("token_ids")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise invalid_field_error("token_ids", f"is {format_value(tokens)}; a list of token ids is expected")
    params = RequestFields(fields.get("sampling_params") or {}, "sampling_params")
    options = _sample_options(params, defaults, params.integer("max_tokens", 1, _MAX_TOKENS))
    params.integer("logprobs", -1, MAX_TOP)
    params.integer("prompt_logprobs", -1, MAX_TOP)
    params.reject_unread(_GENERATE_IGNORED)
    for name in ("stream", "features"):
        if fields.get(name):
            raise invalid_field_error(name, "is not supported by this endpoint")
    fields.reject_unread((*_IGNORED, "priority", "cache_salt", "request_id", "stream_options"))
    prompts = _completion_prompts(tokens)
    return CompletionRequest(model=model, prompts=prompts, echo=False, wants_new=True, options=options)


def _model_name(fields: RequestFields) -> str:
    model = fields.text("model")
    if model is None:
        raise invalid_field_error("model", "is missing; the name of a model is expected")
    return model


def _sample_options(fields: RequestFields, defaults: SamplingParams, max_new: int | None) -> SampleOptions:
    """Read the fields that both endpoints share. If `max_new` is None, the default stays."""
    params = replace_params(
        defaults,
        **{name: fields.number(name, *bounds) for name, bounds in _NUMBERS.items()},
        top_p=fields.number("top_p", 0, 1),
        top_k=fields.integer("top_k", -1, _MAX_TOKENS),
        max_new_tokens=max_new,
        min_new_tokens=fields.integer("min_tokens", 0, _MAX_TOKENS),
        stop=_stop_strings(fields.get("stop")),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.flag("ignore_eos", defaults.ignore_eos),
        skip_special_tokens=fields.flag("skip_special_tokens", defaults.skip_special_tokens),
    )
    if params.min_new_tokens > params.max_new_tokens:
        raise invalid_field_error(
            "min_tokens", f"is {params.min_new_tokens}, more than max_tokens={params.max_new_tokens}"
        )
    stream = fields.flag("stream")
    stream_options = RequestFields(fields.get("stream_options", {}), "stream_options")
    include_usage = stream_options.flag("include_usage")
    stream_options.reject_unread(ignored=("include_obfuscation",))
    if include_usage and not stream:
        raise invalid_field_error("stream_options", "is for stream=true")
    n, best_of = fields.integer("n", 1, MAX_CHOICES) or 1, fields.integer("best_of", 1, MAX_CHOICES)
    if best_of not in (None, n):
        raise invalid_field_error(
            "best_of", f"is {best_of} and n is {n}; all samples are returned, so both must be equal"
        )
    return SampleOptions(
        params=params,
        n=n,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        logit_bias=_logit_bias(fields.get("logit_bias")),
        stream=stream,
        include_usage=include_usage,
        token_ids=fields.flag("return_token_ids") if "return_token_ids" in fields else None,
    )


def replace_params(defaults: SamplingParams, **given: Any) -> SamplingParams:
    """Replace defaults by the values of a request. None keeps the default.

    As in the APIs of OpenAI and vLLM, `temperature` 0 and `top_p` 0 sample greedily, and `top_k` 0 sets no limit.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("top_k") == 0:
        given["top_k"] = -1
    if given.get("top_p") == 0:  # the smallest set of tokens is the best one
        given |= {"top_k": 1, "top_p": 1.0}
    if given.get("temperature"):
        given["greedy"] = False
    params = copy(defaults)
    vars(params).update(given)
    return params


def _stop_token_ids(fields: RequestFields) -> list[int] | None:
    """Read a list of at most 64 token ids. The engine checks later whether the model has them."""
    ids = fields.array("stop_token_ids", 64)
    for token in ids or []:
        if type(token) is not int or token < 0:
            raise invalid_field_error("stop_token_ids", f"holds {format_value(token)}; token ids are expected")
    return ids


def _stop_strings(value: Any) -> list[str] | None:
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > 16 or not all(isinstance(one, str) and one for one in strings):
        raise invalid_field_error(
            "stop", f"is {format_value(value)}; a string or a list of at most 16 strings is expected"
        )
    if problem := json_value_problem(strings):
        raise invalid_field_error("stop", problem)
    if max(map(len, strings), default=0) > _MAX_STOP:
        raise invalid_field_error("stop", f"has a string of more than {_MAX_STOP} characters")
    return strings


def _logit_bias(value: Any) -> dict[int, float]:
    bias: dict[int, float] = {}
    if value is None:
        return bias
    if not isinstance(value, Mapping) or len(value) > 4096:
        raise invalid_field_error(
            "logit_bias", f"is {format_value(value)}; an object of at most 4096 token ids and numbers is expected"
        )
    for token, number in value.items():
        if not (token.isdecimal() and token.isascii() and len(token) <= _MAX_DIGITS):
            raise invalid_field_error("logit_bias", f"has the key {format_value(token)}; token ids are expected")
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise invalid_field_error(
                "logit_bias", f"of token {token} is {format_value(number)}; a number from -100 to 100 is expected"
            )
        bias[int(token)] = float(number)
    return bias


def _response_format(value: Any) -> dict[str, Any] | None:
    """Return the format, or None for text. A `json_object` with a schema becomes a `json_schema`."""
    if value is None:
        return None
    fields = RequestFields(value, "response_format")
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise invalid_field_error("response_format.type", "is missing; text, json_object or json_schema is expected")
    if kind == "json_object" and (schema := fields.get("schema")) is not None:  # the form of llama.cpp and Together
        _check_schema(schema, "response_format.schema")
        schema = {"type": "object", **schema} if isinstance(schema, Mapping) else schema
        value = {"type": "json_schema", "json_schema": {"schema": schema}}
    elif kind == "json_schema":
        inner = RequestFields(fields.get("json_schema"), "response_format.json_schema")
        if inner.text("name") is None:
            raise invalid_field_error("response_format.json_schema.name", "is missing; a string is expected")
        _check_schema(inner.get("schema"), "response_format.json_schema.schema")
        inner.reject_unread(ignored=("description", "strict"))
    fields.reject_unread()
    return None if kind == "text" else value


def _check_schema(schema: Any, where: str) -> None:
    if exceeds_size(schema, MAX_SCHEMA):
        raise invalid_field_error(where, TOO_LARGE)
    if not isinstance(schema, Mapping | bool):
        raise invalid_field_error(where, f"is {format_value(schema)}; a JSON schema is expected")


def _completion_prompts(value: Any) -> list[str | list[int]]:
    def are_token_ids(one: Any) -> bool:
        return isinstance(one, list) and bool(one) and all(type(token) is int for token in one)

    if isinstance(value, str) or are_token_ids(value):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) or are_token_ids(one) for one in value):
        shown = "missing" if value is None else f"{format_value(value)}"
        raise invalid_field_error("prompt", f"is {shown}; a string, token ids, or a list of either is expected")
    if len(value) > 1024:
        raise invalid_field_error("prompt", f"has {len(value)} elements; at most 1024 are allowed")
    for one in value:
        if isinstance(one, str):
            RequestFields({"prompt": one}).text("prompt")
        elif max(one) > _MAX_TOKENS or min(one) < 0:
            raise ApiError(400, "prompt has token ids outside of the vocabulary", param="prompt")
    return value
