"""What crosses the border between a script and the engine: plain records, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class SamplingParams:
    """How tokens are drawn. Log-probabilities are those of softmax(logits / temperature), before top-k and top-p.

    greedy: take the most likely token; its log-probability is at temperature 1 unless `temperature` says otherwise.
    top_k: -1 keeps every token. top_p: in (0, 1]. stop: strings that end a completion (kept in it).
    max_context_len: cap on prompt plus completion, in tokens; None is the model's own limit.
    max_prompt_len: prompts longer than this many tokens are refused.
    """

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 16
    max_context_len: int | None = None
    temperature: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_prompt_len: int | None = None
    min_new_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be sampled `n_samples` times.

    The random draw for a token is a function of (seed, sample index, position in the completion) and nothing else,
    so the caller gives every request its own `seed` (any int; 64 bits are used).
    """

    request_id: int
    prompt: list[int]
    n_samples: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class GenerationOutput:
    """One finished sample of a request. `tokens` are the completion only, with the stop token if one was drawn."""

    request_id: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass(slots=True)
class TrainSequence:
    """One row to train on. All lists are per token of `tokens` (prompt and response) and have its length.

    prompt_mask: True where the token is NOT trained (prompt, tool results); losses train on the False positions.
    logprobs: log-probability of `tokens[t]` given `tokens[:t]` under the policy that sampled it; 0.0 on the prompt.
    advantages, returns, values, ref_logprobs: per token, None where the loss does not need them.
    reward: of the whole row. eos_token_id: kept for callers that pad; the backend packs without padding.
    weights: factor on each token's policy loss, such as the importance weight of a stale sample; None is 1 everywhere.
    staleness: optimizer steps between the policy that sampled the row and the policy as it is; 0 is on-policy.
    """

    prompt_mask: list[bool] | None = None
    tokens: list[int] | None = None
    logprobs: list[float] | None = None
    advantages: list[float] | None = None
    returns: list[float] | None = None
    values: list[float] | None = None
    ref_logprobs: list[float] | None = None
    reward: float = 0.0
    eos_token_id: int = 0
    weights: list[float] | None = None
    staleness: int = 0
