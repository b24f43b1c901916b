"""Checks requests before they are queued, traces them, and makes requests that continue parked samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from areno import trace
from areno.engine.reports import RolloutStats
from areno.errors import ConfigError, EngineError, Key, Problem
from areno.schema.fields import partial_section, section_problems, settings
from areno.schema.values import InvalidValue, format_value
from areno.types import BegunCompletion, GenerationOutput, GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of the requests that a decoder can serve."""

    vocab_size: int
    context_len: int
    kv_tokens: int  # longest sequence that fits the KV cache if no other sequence runs
    cache_tokens: int = 0  # memory of the KV cache, in tokens of all layers

    def max_new(self, request: GenerationRequest) -> int:
        """Return how many completion tokens a sample may have. Raises RequestRefused if the request is invalid."""
        params, n_prompt = request.params, len(request.prompt)
        context = min(self.context_len, params.max_context_len or self.context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            raise _refusal(
                request,
                "n_samples",
                f"n_samples is {request.n_samples}; at least 1 is needed",
                "set {}",
                "gconfig.n_samples",
            )
        if n_prompt == 0:
            raise _refusal(request, "prompt", "the prompt has no tokens; at least one is needed")
        if params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            why = f"the prompt has {n_prompt} tokens, and at most {params.max_prompt_len} may be"
            raise _refusal(request, "prompt", why, "shorten it or raise {}", "max_prompt_len")
        if max_new < 1:
            why = f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}"
            advice = f"shorten the prompt or raise {{}} (the model's own limit is {self.context_len})"
            raise _refusal(request, "prompt", why, advice, "gconfig.max_tokens")
        if n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            why = f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of "
            why += f"{self.kv_tokens} tokens even alone"
            keys = "rollout.max_kv_tokens", "rollout.mem_fraction", "gconfig.max_tokens", "gconfig.max_new_tokens"
            raise _refusal(request, "max_new_tokens", why, "raise {} (or {}), or lower {} or {}", *keys)
        if request.grammar is not None and params.min_new_tokens:
            why = "its grammar decides when a completion ends"
            raise _refusal(request, "min_new_tokens", why, "leave {} at 0", "gconfig.min_new_tokens")
        if not 0 <= request.top_logprobs <= max(self.vocab_size, params.top_logprobs):
            why = f"it asks for {request.top_logprobs} top log-probabilities; 0 to {self.vocab_size} are there"
            raise _refusal(request, "top_logprobs", why)
        if request.begun is not None:
            self._check_begun(request, request.begun, max_new)
        self._check_ids(request)
        return max_new

    def _check_begun(self, request: GenerationRequest, begun: BegunCompletion, max_new: int) -> None:
        """Raise RequestRefused if a partly generated sample (`begun`) cannot be continued."""
        n_tokens = len(begun.tokens)
        if request.n_samples != 1:
            why = f"it continues a sample and asks for {request.n_samples} samples; a request continues one sample"
        elif not 0 < n_tokens < max_new:
            why = f"it continues after {n_tokens} tokens; 1 to {max_new - 1} are possible"
        elif not len(begun.logprobs) == len(begun.versions) == n_tokens:
            why = f"it continues after {n_tokens} tokens with {len(begun.logprobs)} log-probabilities and "
            why += f"{len(begun.versions)} versions; one for each token is needed"
        elif request.top_logprobs and len(begun.top_logprobs) != n_tokens:
            why = f"it continues after {n_tokens} tokens with top log-probabilities of {len(begun.top_logprobs)}"
        elif request.raw_logprobs or request.stream or request.pieces:
            why = "it continues a sample and asks for raw log-probabilities or partial outputs; none is kept"
        else:
            return
        raise _refusal(request, "begun", why)

    def _check_ids(self, request: GenerationRequest) -> None:
        """Raise RequestRefused if a token id in the request is outside the model's vocabulary."""
        for field, ids, key in (
            ("prompt", request.prompt, "tokenizer_path"),
            ("begun", None if request.begun is None else request.begun.tokens, ""),
            ("stop_token_ids", request.params.stop_token_ids, "gconfig.stop_token_ids"),
            ("logit_bias", request.logit_bias, ""),
        ):
            if not ids:
                continue
            least, most = min(ids), max(ids)
            if least < 0 or most >= self.vocab_size:
                wrong = format_value(int(least if least < 0 else most))
                why = f"{field} holds the token id {wrong}; the model's vocabulary is 0..{self.vocab_size - 1}"
                raise _refusal(request, field, why, *(["check {}", key] if key else []))


class RequestRefused(EngineError):
    """Raised for a request that a decoder cannot serve.

    `field` names the invalid field of the request. `why` is the reason without request id and settings, to send to a
    client of the server.
    """

    field = why = ""


def _refusal(request: GenerationRequest, field: str, why: str, advice: str = "", *keys: str) -> RequestRefused:
    """Return the error for a request. `advice` has one {} for each of `keys`, which are names of settings."""
    advice = advice and f"; {advice}"
    error = RequestRefused("request {} cannot be served: {}" + advice, request.request_id, why, *map(Key, keys))
    error.field, error.why = field, why
    return error


_MAX_KNOWN = 1024
_known_good: set[str] = set()  # parameters that were checked: requests with the same ones come by the thousand


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError if sampling parameters are out of the bounds that SamplingConfig declares."""
    if (text := repr(params)) in _known_good:
        return
    problems, known = [], {}
    for name, value in asdict(params).items():
        field, value = settings(SamplingParams)[name], _to_plain_values(value)
        try:
            known[name] = field.convert(value)
            # `convert` also accepts a number written as text, for files. In a script this is a mistake.
            if known[name] != value:
                raise InvalidValue(f"is {format_value(value)}; expected {field.type_text}")
        except InvalidValue as error:
            known.pop(name, None)
            problems.append(Problem(name, str(error)))
    problems += section_problems(partial_section(SamplingParams, known))
    if problems:
        raise ConfigError([problem.under("SamplingParams") for problem in problems])
    if len(_known_good) >= _MAX_KNOWN:
        _known_good.clear()
    _known_good.add(text)


def _to_plain_values(value: Any) -> Any:
    """Convert numpy numbers to Python numbers, and tuples to lists, also inside lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [_to_plain_values(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


def phase_spans(phases: trace.Phases) -> list[tuple[str, int, int]]:
    """Convert the phases of a finished sample to (name, start, end) of each phase."""
    return [(name, start, end) for (name, start), (_, end) in itertools.pairwise(phases)]


def trace_request(output: GenerationOutput) -> None:
    lane, phases = f"requests#{output.request_id}.{output.sample}", output.phases
    arguments = {"tokens": len(output.tokens), "cached_tokens": output.cached_tokens}
    trace.add(lane, "request", phases[0][1], phases[-1][1], **arguments, **version_range(vars(output)["versions"]))
    for name, start, end in phase_spans(phases):
        trace.add(lane, name, start, end)


def version_range(versions: Sequence[int]) -> dict[str, int]:
    """Return the first and, if it differs, the last version of the weights, as arguments of a trace event."""
    if not len(versions):
        return {}
    first, last = int(versions[0]), int(versions[-1])
    return {"weights_version": first} | ({"last_weights_version": last} if last != first else {})


def continuation_requests(
    request: GenerationRequest, parked: Iterable[GenerationOutput], ids: Iterator[int]
) -> list[GenerationRequest]:
    """Return requests, with new ids, that continue the unfinished samples `parked` of a request.

    Each sample with tokens gets a request of its own. Consecutive samples without tokens share a request.
    """
    requests: list[GenerationRequest] = []
    for output in sorted(parked, key=lambda output: output.sample):
        sample = output.sample
        if output.tokens:
            begun = BegunCompletion(output.tokens, output.logprobs, output.versions, vars(output)["top_logprobs"])
            requests.append(replace(request, request_id=next(ids), first_sample=sample, n_samples=1, begun=begun))
        elif requests and (last := requests[-1]).begun is None and last.first_sample + last.n_samples == sample:
            requests[-1] = replace(last, n_samples=last.n_samples + 1)
        else:
            requests.append(replace(request, request_id=next(ids), first_sample=sample, n_samples=1, begun=None))
    return requests


OnProgress = Callable[[list[GenerationOutput], list[RolloutStats]], None]
