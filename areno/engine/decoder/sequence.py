"""The state of one sample of one request, as the host knows it. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from areno.engine.decoder.blocks import ROOT
from areno.engine.types import FinishReason, GenerationOutput, GenerationRequest

# A stop string ends within the last few tokens: a token adds a byte or more, except special ones, which this covers.
_EXTRA_TAIL = 16


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample: prompt, what was drawn so far, and its place in the cache.

    The device runs one step ahead of the host: `n_drawn` counts the completion tokens drawn there, `tokens` and
    `logprobs` hold those that have arrived. `n_kv` counts the positions whose keys and values are (about to be) in the
    cache.
    """

    request: GenerationRequest
    sample: int
    key: int  # of its random numbers
    max_new: int  # completion tokens at most, by every limit
    stop_ids: frozenset[int]
    tokens: list[int]  # prompt and completion
    logprobs: list[float] = field(default_factory=list)  # of the completion
    n_drawn: int = 0
    finish_reason: FinishReason | None = None

    slot: int = -1  # its row in the device's tables; -1 while waiting
    n_kv: int = 0
    blocks: list[int] = field(default_factory=list)
    n_uploaded: int = 0  # of `blocks`, how many the device's table has
    n_registered: int = 0  # of `blocks`, how many can be found by content
    entry: int = ROOT  # of the last registered block

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def is_fresh(self) -> bool:
        """Nothing drawn yet: it can share the prefill of another sample of its request."""
        return len(self.tokens) == self.n_prompt

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p changes what can be drawn."""
        params = self.request.params
        return not params.greedy and (params.top_k > 0 or params.top_p < 1)

    @property
    def is_drawn_out(self) -> bool:
        """Its last token by length is drawn, if not yet arrived: no further step."""
        return self.n_drawn >= self.max_new

    @property
    def bans_stop(self) -> bool:
        """The token being drawn (`n_drawn` counts it) must not be one of `stop_ids`."""
        return self.n_drawn <= self.request.params.min_new_tokens and bool(self.stop_ids)

    def accept(self, token: int, logprob: float, detokenize: Callable[[list[int]], str] | None) -> bool:
        """Append a token that has arrived; returns whether the sequence ends with it (then `finish_reason` is set)."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        n_new = len(self.logprobs)
        if token in self.stop_ids or (self.request.params.stop and self._has_stop_string(n_new, detokenize)):
            self.finish_reason = "stop"
        elif n_new >= self.max_new:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _has_stop_string(self, n_new: int, detokenize: Callable[[list[int]], str] | None) -> bool:
        params = self.request.params
        if detokenize is None or not params.stop or n_new < params.min_new_tokens:
            return False
        tail = max(len(text.encode()) for text in params.stop) + _EXTRA_TAIL
        text = detokenize(self.tokens[-min(tail, n_new) :])
        return any(stop in text for stop in params.stop)

    def leave_cache(self) -> None:
        """Forget its place in the cache; what was drawn and has arrived stays."""
        self.slot = -1
        self.n_kv = 0
        self.blocks = []
        self.n_uploaded = 0
        self.n_registered = 0
        self.entry = ROOT

    def output(self) -> GenerationOutput:
        """The finished sample."""
        assert self.finish_reason is not None
        return GenerationOutput(
            request_id=self.request.request_id,
            sample=self.sample,
            tokens=self.tokens[self.n_prompt :],
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
        )
