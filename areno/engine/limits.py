"""Which requests an engine can serve: checked at its door, so that the caller who made a bad one gets the error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from areno.engine.types import GenerationRequest
from areno.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a decoder has room for. context_len, kv_tokens: in tokens, the latter of the whole KV cache."""

    vocab_size: int
    context_len: int
    kv_tokens: int
    stop_strings: bool  # whether tokens can be turned into text, to look for stop strings in it

    def max_new(self, request: GenerationRequest) -> int:
        """The most tokens each sample may get; EngineError where the request is not one that can be served."""
        params, n_prompt = request.params, len(request.prompt)
        context = self.context_len
        if params.max_context_len is not None:
            context = min(context, params.max_context_len)
        max_new = min(params.max_new_tokens, context - n_prompt)
        if request.n_samples < 1:
            problem = f"n_samples is {request.n_samples}; at least 1 is needed (gconfig.n_samples)"
        elif n_prompt == 0:
            problem = "the prompt has no tokens; at least one is needed"
        elif min(request.prompt) < 0 or max(request.prompt) >= self.vocab_size:
            problem = (
                f"the prompt has token ids {min(request.prompt)}..{max(request.prompt)}, the model's vocabulary is "
                f"0..{self.vocab_size - 1}; check tokenizer_path"
            )
        elif params.max_prompt_len is not None and n_prompt > params.max_prompt_len:
            problem = f"the prompt has {n_prompt} tokens, more than max_prompt_len={params.max_prompt_len}"
        elif params.max_new_tokens < 1:
            problem = f"max_new_tokens is {params.max_new_tokens}; at least 1 is needed (gconfig.max_new_tokens)"
        elif max_new < 1:
            problem = (
                f"the prompt has {n_prompt} tokens, which leaves no room for a completion in a context of {context}; "
                f"shorten the prompt or raise gconfig.max_tokens (the model's own limit is {self.context_len})"
            )
        elif n_prompt + max_new - 1 > self.kv_tokens:  # the last token is never an input
            problem = (
                f"a prompt of {n_prompt} tokens with up to {max_new} new ones does not fit the KV cache of "
                f"{self.kv_tokens} tokens even alone; raise rollout.max_kv_tokens (or rollout.mem_fraction), or lower "
                "gconfig.max_tokens or gconfig.max_new_tokens"
            )
        elif not 0 <= params.temperature < math.inf:
            problem = f"temperature is {params.temperature}; a number of at least 0 is needed (gconfig.temperature)"
        elif not 0 < params.top_p <= 1:
            problem = f"top_p is {params.top_p}; it must be above 0 and at most 1 (gconfig.top_p)"
        elif params.top_k == 0 or params.top_k < -1:
            problem = f"top_k is {params.top_k}; use -1 for all tokens or a positive number (gconfig.top_k)"
        elif params.stop and not self.stop_strings:
            problem = "stop strings need a tokenizer, and there is none; use stop_token_ids"
        else:
            return max_new
        raise EngineError(f"request {request.request_id} cannot be served: {problem}")
