"""Which requests a decoder has room for. Checked before a request is queued, so that its caller gets the error."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from areno.config.schema.fields import partial_section, problems_between, settings
from areno.config.schema.values import InvalidValue, show
from areno.errors import ConfigError, EngineError, Key, Problem
from areno.types import GenerationRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a decoder has room for. context_len: tokens of the model's context. kv_tokens: of the longest sequence that
    fits the KV cache by itself. cache_tokens: how many would fill its memory with keys and values of all layers.
    """

    vocab_size: int
    context_len: int
    kv_tokens: int
    cache_tokens: int = 0
    stop_strings: bool  # whether there is a tokenizer, without which stop strings cannot be found
    grammars: bool = False  # whether grammars can be compiled, which needs the tokenizer, too

    def max_new(self, request: GenerationRequest) -> int:
        """Return the most tokens that each sample of the request may get. Raises RequestRefused if it has no room.

        The values of `request.params` are taken as valid: check_params looks at them.
        """
        params, n_prompt = request.params, len(request.prompt)
        context = min(self.context_len, params.max_context_len or self.context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            raise _refused(request, "n_samples", f"n_samples is {request.n_samples}; at least 1 is needed",
                           "set {}", "gconfig.n_samples")  # fmt: skip
        if n_prompt == 0:
            raise _refused(request, "prompt", "the prompt has no tokens; at least one is needed")
        if params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            why = f"the prompt has {n_prompt} tokens, and at most {params.max_prompt_len} may be"
            raise _refused(request, "prompt", why, "shorten it or raise {}", "max_prompt_len")
        if max_new < 1:
            why = f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}"
            advice = f"shorten the prompt or raise {{}} (the model's own limit is {self.context_len})"
            raise _refused(request, "prompt", why, advice, "gconfig.max_tokens")
        if n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            why = f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of "
            why += f"{self.kv_tokens} tokens even alone"
            keys = "rollout.max_kv_tokens", "rollout.mem_fraction", "gconfig.max_tokens", "gconfig.max_new_tokens"
            raise _refused(request, "max_new_tokens", why, "raise {} (or {}), or lower {} or {}", *keys)
        if params.stop and not self.stop_strings:
            why = "stop strings need a tokenizer, and there is none"
            raise _refused(request, "stop", why, "use {}", "gconfig.stop_token_ids")
        if request.grammar is not None and not self.grammars:
            raise _refused(request, "grammar", "a grammar needs a tokenizer, and there is none",
                           "set {}", "tokenizer_path")  # fmt: skip
        if request.grammar is not None and params.min_new_tokens:
            why = "its grammar decides when a completion ends"
            raise _refused(request, "min_new_tokens", why, "leave {} at 0", "gconfig.min_new_tokens")
        if not 0 <= request.top_logprobs <= self.vocab_size:
            why = f"it asks for {request.top_logprobs} top log-probabilities; 0 to {self.vocab_size} are there"
            raise _refused(request, "top_logprobs", why)
        self._check_ids(request)
        return max_new

    def _check_ids(self, request: GenerationRequest) -> None:
        """Raise RequestRefused for a token id that the model does not have."""
        for field, ids, key in (
            ("prompt", request.prompt, "tokenizer_path"),
            ("stop_token_ids", request.params.stop_token_ids, "gconfig.stop_token_ids"),
            ("logit_bias", request.logit_bias, ""),
        ):
            if not ids:
                continue
            least, most = min(ids), max(ids)
            if least < 0 or most >= self.vocab_size:
                wrong = show(int(least if least < 0 else most))
                why = f"{field} holds the token id {wrong}; the model's vocabulary is 0..{self.vocab_size - 1}"
                raise _refused(request, field, why, *(["check {}", key] if key else []))


class RequestRefused(EngineError):
    """A request that a decoder cannot serve.

    Attributes:
        field: The field of the request or of its sampling parameters that is wrong.
        why: What is wrong, without the number of the request and without settings, for a client of a server.
    """

    field = why = ""


def _refused(request: GenerationRequest, field: str, why: str, advice: str = "", *keys: str) -> RequestRefused:
    """Return the error of a request. advice: a text with {} for each of the settings `keys`."""
    advice = advice and f"; {advice}"
    error = RequestRefused("request {} cannot be served: {}" + advice, request.request_id, why, *map(Key, keys))
    error.field, error.why = field, why
    return error


_MOST_KNOWN = 1024
_known_good: set[str] = set()  # parameters that were checked: requests with the same ones come by the thousand


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError with every value that is out of the bounds that SamplingConfig declares."""
    if (text := repr(params)) in _known_good:
        return
    problems, known = [], {}
    for name, value in asdict(params).items():
        field, value = settings(SamplingParams)[name], _plain(value)
        try:
            known[name] = field.convert(value)
            # A file may have numbers as text and the other way round; in a script this is a mistake.
            if known[name] != value:
                raise InvalidValue(f"is {show(value)}; expected {field.type_text}")
        except InvalidValue as error:
            known.pop(name, None)
            problems.append(Problem(name, str(error)))
    problems += problems_between(partial_section(SamplingParams, known))
    if problems:
        raise ConfigError([problem.under("SamplingParams") for problem in problems])
    if len(_known_good) >= _MOST_KNOWN:
        _known_good.clear()
    _known_good.add(text)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, a tuple as a list."""
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value
