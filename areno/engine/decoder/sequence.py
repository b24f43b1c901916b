"""One sample of a request, as the host sees it, and the search for its stop strings. Contains no tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from areno.engine.decoder.block_manager import BlockTables
from areno.engine.decoder.grammar import GrammarState
from areno.types import FinishReason, GenerationOutput, GenerationRequest, TokenScores

Detokenize = Callable[[list[int]], str]

# Tokens beyond the bytes of a stop string in which to look for it: special tokens may add no text at all.
_EXTRA_TAIL = 16
_PART_OF_A_CHARACTER = "\ufffd"


class StopStrings:
    """Finds stop strings without decoding every token.

    A stop string ends inside the text of the token that completes it. The text of most tokens fits no stop string. This
    is looked up once for each token, and only the other tokens cause the completion to be decoded.

    Args:
        strings: The stop strings of a request.
        detokenize: Turns tokens into text.
    """

    def __init__(self, strings: tuple[str, ...], detokenize: Detokenize):
        self._strings = strings
        self._detokenize = detokenize
        self._n_tail = max(len(string.encode()) for string in strings) + _EXTRA_TAIL
        self._can_end: dict[int, bool] = {}

    def are_in(self, tokens: list[int]) -> bool:
        """Return whether the end of a completion contains one of the strings."""
        text = self._detokenize(tokens[-self._n_tail :])
        return any(string in text for string in self._strings)

    def can_end_with(self, token: int) -> bool:
        """Return whether this token can contribute the last character of a stop string."""
        can_end = self._can_end.get(token)
        if can_end is None:
            # A token whose text depends on what is before it can always end one; but for a space, which most
            # tokenizers of that kind drop before a first token.
            first, text = self._detokenize([token]), self._detokenize([token, token])
            depends = text not in (first + first, f"{first} {first}")
            can_end = self._can_end[token] = depends or self._fits(first) or self._fits(text[len(first) :])
        return can_end

    def _fits(self, text: str) -> bool:
        """Return whether a token's text contains a stop string, or the end of one."""
        if _PART_OF_A_CHARACTER in text:
            return True
        return any(
            string in text or any(string.endswith(text[:n]) for n in range(1, min(len(text), len(string)) + 1))
            for string in self._strings
        )


logger = logging.getLogger("areno")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample of a request. The host knows only the tokens that have arrived from the device."""

    request: GenerationRequest
    sample: int
    key: int  # seeds its random numbers
    max_new: int  # most completion tokens, by all limits together
    stop_ids: frozenset[int]
    tokens: list[int]  # prompt and completion
    stop_strings: StopStrings | None = None
    grammar: GrammarState | None = None  # as far as the tokens that have arrived
    logprobs: list[float] = field(default_factory=list)  # of the completion
    versions: list[int] = field(default_factory=list)  # of the weights, for each token of the completion
    top_logprobs: list[TokenScores] = field(default_factory=list)  # of the completion, where the request wants them
    prompt_logprobs: list[tuple[float, TokenScores]] = field(default_factory=list)
    n_cached: int = 0  # prompt tokens that needed no prefill when it was first admitted
    n_streamed: int = 0  # completion tokens that partial outputs have returned
    n_sampled: int = 0  # completion tokens sampled on the device
    finish_reason: FinishReason | None = None

    slot: int = -1  # its row in the device's tables, -1 while waiting
    n_kv: int = 0  # positions whose keys and values are in the cache, or will be when the planned step has run
    block_tables: BlockTables = field(init=False)  # its blocks, there while it has a slot
    needs_edits: bool = field(init=False)  # whether its draws need more than the sampling kernel: see LogitEdits

    def __post_init__(self) -> None:
        self.needs_edits = self.request.edits_logits or self.request.top_logprobs > 0

    @property
    def blocks(self) -> list[int]:
        """The group blocks of the group of layers with the longest window."""
        return self.block_tables.group_blocks[0]

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been sampled, so that it can share the prefill of another sample."""
        return len(self.tokens) == self.n_prompt

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p restricts its draws."""
        params = self.request.params
        return not params.is_greedy and (params.top_k > 0 or params.top_p < 1)

    @property
    def is_penalized(self) -> bool:
        """Whether its logits depend on its own tokens."""
        return self.request.params.frequency_penalty != 0 or self.request.params.presence_penalty != 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.n_prompt - 1

    @property
    def reached_max_new(self) -> bool:
        """Whether the last token by length has been sampled, even if the token has not arrived."""
        return self.n_sampled >= self.max_new

    @property
    def awaits_token(self) -> bool:
        """Whether its grammar needs a token that is still in flight before the next draw."""
        return self.grammar is not None and self.n_sampled > len(self.logprobs)

    @property
    def min_new(self) -> int:
        """Number of completion tokens before which no token of `stop_ids` is sampled."""
        return min(self.request.params.min_new_tokens, self.max_new) if self.stop_ids else 0

    @property
    def bans_stop(self) -> bool:
        """Whether the token being sampled (already counted in `n_sampled`) must not be in `stop_ids`."""
        return self.n_sampled <= self.min_new

    def accept(self, token: int, logprob: float, version: int, top: TokenScores | None = None) -> bool:
        """Append a token that has arrived.

        Args:
            token: Token id.
            logprob: Its log-probability.
            version: Version of the weights that sampled it.
            top: Most likely tokens with their log-probabilities.

        Returns:
            Whether the sequence ends with this token. `finish_reason` is set then.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.request.top_logprobs and top is not None:
            self.top_logprobs.append(top[: self.request.top_logprobs])
        n_new = len(self.logprobs)
        if self.grammar is not None:
            self.grammar.accept(token)
        ends_grammar = self.grammar is not None and self.grammar.finished  # with `ignore_eos`, too: nothing can follow
        has_stopped = token in self.stop_ids or ends_grammar
        if has_stopped or (self.stop_strings is not None and self._has_stop_string(self.stop_strings)):
            self.finish_reason = "stop"
        elif n_new >= self.max_new:
            self.finish_reason = "length"
        if self.grammar is not None and self.grammar.error:
            logger.warning("a sample of request %d ends early: %s", self.request.request_id, self.grammar.error)
            self.finish_reason = "abort"
        return self.finish_reason is not None

    def _has_stop_string(self, stop_strings: StopStrings) -> bool:
        """Return whether the last token completes a stop string."""
        n_new, least = len(self.logprobs), self.request.params.min_new_tokens
        if n_new < least or (n_new > least and not stop_strings.can_end_with(self.tokens[-1])):
            return False
        return stop_strings.are_in(self.tokens[self.n_prompt :])

    def leave_cache(self) -> None:
        """Forget slot and blocks. Tokens that have arrived stay."""
        self.slot, self.n_kv = -1, 0
        if self.is_fresh:  # its prompt will be scored again from the first token on, maybe for other samples, too
            self.prompt_logprobs = []
        del self.block_tables

    def output(self) -> GenerationOutput:
        """Return the whole completion if it is finished, else the tokens since the previous partial output."""
        start = self.n_streamed if self.finish_reason is None else 0
        self.n_streamed = len(self.logprobs)
        return GenerationOutput(
            request_id=self.request.request_id,
            sample=self.sample,
            tokens=self.tokens[self.n_prompt + start :],
            logprobs=self.logprobs[start:],
            versions=self.versions[start:],
            finish_reason=self.finish_reason,
            cached_tokens=self.n_cached,
            top_logprobs=self.top_logprobs[start:],
            prompt_logprobs=[] if self.finish_reason is None else self.prompt_logprobs,
        )
