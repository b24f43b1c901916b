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
        """The most tokens that each sample of the request may get. Raises EngineError if it cannot be served.

        The values of `request.params` are taken as valid: check_params looks at them.
        """

        def refused(why: str, *args: Any) -> EngineError:
            return EngineError("request {} cannot be served: " + why, request.request_id, *args)

        params, n_prompt = request.params, len(request.prompt)
        context = self.context_len
        if params.max_context_len is not None:
            context = min(context, params.max_context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            raise refused("n_samples is {}; at least 1 is needed ({})", request.n_samples, Key("gconfig.n_samples"))
        if n_prompt == 0:
            raise refused("the prompt has no tokens; at least one is needed")
        if min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            raise refused(
                "the prompt has token ids {}..{}, the model's vocabulary is 0..{}; check {}",
                *(min(request.prompt), max(request.prompt), self.vocab_size - 1, Key("tokenizer_path")),
            )
        if params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            key = Key("max_prompt_len")
            raise refused("the prompt has {} tokens, more than {}={}", n_prompt, key, params.max_prompt_len)
        if max_new < 1:
            raise refused(
                "the prompt has {} tokens, which leaves no room for a completion in a context of {}; "
                "shorten the prompt or raise {} (the model's own limit is {})",
                *(n_prompt, context, Key("gconfig.max_tokens"), self.context_len),
            )
        if n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            raise refused(
                "a prompt of {} tokens with up to {} new ones does not fit the KV cache of {} tokens even alone; "
                "raise {} (or {}), or lower {} or {}",
                *(n_prompt, max_new, self.kv_tokens, Key("rollout.max_kv_tokens"), Key("rollout.mem_fraction")),
                *(Key("gconfig.max_tokens"), Key("gconfig.max_new_tokens")),
            )
        if params.stop and not self.stop_strings:
            raise refused("stop strings need a tokenizer, and there is none; use {}", Key("gconfig.stop_token_ids"))
        if request.grammar is not None and not self.grammars:
            raise refused("a grammar needs a tokenizer, and there is none; set {}", Key("tokenizer_path"))
        if request.grammar is not None and params.min_new_tokens:
            raise refused("it has a grammar, which decides when it ends; leave {} at 0", Key("gconfig.min_new_tokens"))
        if request.logit_bias and not 0 <= min(request.logit_bias) <= max(request.logit_bias) < self.vocab_size:
            raise refused("logit_bias has token ids outside of the vocabulary of 0..{}", self.vocab_size - 1)
        if not 0 <= request.top_logprobs <= self.vocab_size:
            raise refused("top_logprobs is {}; 0 to {} are there", request.top_logprobs, self.vocab_size)
        return max_new


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
