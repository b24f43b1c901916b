"""The state of one sample on the host, and the search for its stop strings. Contains no tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno import trace
from areno.engine.decoder.block_manager import BlockTables
from areno.engine.decoder.grammar import GrammarState
from areno.engine.decoder.slots import SlotTable
from areno.types import Begun, FinishReason, GenerationOutput, GenerationRequest, TokenScores

Detokenize = Callable[[list[int]], str]

# Tokens to decode beyond the bytes of the longest stop string, because special tokens may add no text.
_EXTRA_TAIL = 16
_PART_OF_A_CHARACTER = "\ufffd"


class StopStrings:
    """Finds stop strings in completions, without decoding the text after every token.

    A stop string can only be completed by a token whose text contains the end of the string. Most tokens cannot end any
    stop string. `can_end_with` checks this once per token id and keeps the answer. Only after tokens that can end a
    stop string, the text of the completion is decoded and searched.

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
        """Return whether the end of a completion contains a stop string.

        Only as many last tokens are decoded as a stop string can span.

        Args:
            tokens: Token ids of the completion.
        """
        text = self._detokenize(tokens[-self._n_tail :])
        return any(string in text for string in self._strings)

    def can_end_with(self, token: int) -> bool:
        """Return whether a token can contribute the last character of a stop string."""
        can_end = self._can_end.get(token)
        if can_end is None:
            # A token whose text depends on the text before it may always end a stop string. A leading space does not
            # count as dependence, because many tokenizers drop it before a first token.
            first, text = self._detokenize([token]), self._detokenize([token, token])
            depends = text not in (first + first, f"{first} {first}")
            can_end = self._can_end[token] = depends or self._fits(first) or self._fits(text[len(first) :])
        return can_end

    def _fits(self, text: str) -> bool:
        """Return whether the text of a token contains a stop string, or begins with the end of a stop string.

        The result is also True if `text` contains an incomplete UTF-8 character.
        """
        if _PART_OF_A_CHARACTER in text:
            return True
        return any(
            string in text or any(string.endswith(text[:n]) for n in range(1, min(len(text), len(string)) + 1))
            for string in self._strings
        )


logger = logging.getLogger("areno")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sample of a request, as the host knows it.

    A token is first sampled on the device, and arrives on the host later. While the sequence is in the batch, its
    numbers are in a SlotTable, and so are its newest tokens until `settle` appends them to the lists here.

    Attributes:
        request: The request.
        sample: Index of the sample within the request.
        key: Seed of the sample's random numbers.
        max_new: Largest number of completion tokens, the minimum of all limits.
        stop_ids: Token ids that end the completion.
        tokens: Token ids of the prompt and of the completion so far, without those that `settle` would append. The same
            holds for the other lists.
        stop_strings: Search for stop strings. None if the request has none.
        grammar: State of the grammar after the last token that has arrived. None without a grammar.
        logprobs: Log-probability of each completion token.
        versions: For each completion token, version of the weights that sampled it.
        top_logprobs: For each completion token, the most likely tokens. Empty unless requested.
        raw_logprobs: Log-probability of each completion token without the temperature. Empty unless requested.
        prompt_logprobs: For each scored prompt token, (log-probability, most likely tokens). Empty unless requested.
        n_cached: Number of prompt tokens found in the prefix cache when the sample was first admitted.
        n_streamed: Number of completion tokens already returned in partial outputs.
        finish_reason: None while the sample is unfinished.
        slot: Row of the sequence in the block tables and sampling settings on the device. -1 while it waits.
        table: The numbers of all slots. None while the sequence is not in the batch.
        block_tables: KV blocks of the sequence. Only set while it has a slot.
        completion: Tokens, log-probabilities and versions of the whole completion as arrays. Set when a sample finishes
            with all its tokens in the slot table. `settle` moves them to the lists and sets None.
        phases: (name, start) of each phase so far, such as "prefill". Empty unless the run is traced.
    """

    request: GenerationRequest
    sample: int
    key: int
    max_new: int
    stop_ids: frozenset[int]
    tokens: list[int]
    stop_strings: StopStrings | None = None
    grammar: GrammarState | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TokenScores] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TokenScores]] = field(default_factory=list)
    n_cached: int = 0
    n_streamed: int = 0
    finish_reason: FinishReason | None = None
    phases: list[tuple[str, int]] = field(default_factory=list)

    slot: int = -1  # its row in the device's tables, -1 while waiting
    table: SlotTable | None = None
    _n_kv: int = field(default=0, init=False)
    _n_sampled: int = field(default=0, init=False)
    block_tables: BlockTables = field(init=False)  # its blocks, there while it has a slot
    completion: tuple[np.ndarray, np.ndarray, np.ndarray] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.enter("queued")

    def enter(self, phase: str) -> None:
        """Note that a phase of the sample begins, for the trace. Does nothing unless the run is traced.

        Args:
            phase: "queued", "prefill", "decode", "preempted" or "end".
        """
        if trace.active:
            self.phases.append((phase, trace.now()))

    def join(self, table: SlotTable, slot: int) -> None:
        """Enter the batch.

        Args:
            table: The numbers of all slots.
            slot: A free slot, which the sequence gets.
        """
        table.take(slot, self.stop_ids)
        table.n_kv[slot], table.n_sampled[slot], table.n_new[slot] = self._n_kv, self._n_sampled, len(self.logprobs)
        table.n_prompt[slot], table.max_new[slot], table.min_new[slot] = self.n_prompt, self.max_new, self.min_new
        table.is_filtered[slot], table.is_penalized[slot] = self.is_filtered, self.is_penalized
        table.has_grammar[slot], table.needs_edits[slot] = self.grammar is not None, self.needs_edits
        request = self.request
        table.needs_host[slot] = bool(
            self.grammar is not None or self.stop_strings is not None or request.wants_scores or request.stream
        )
        table.in_pieces[slot] = request.pieces
        self.table, self.slot = table, slot

    def join_like(self, leader: Sequence, slot: int, block_tables: BlockTables) -> None:
        """Enter the batch together with the leader of a shared prefill. `SlotTable.take_like` then fills the slot.

        Args:
            leader: The leader, which is in the batch.
            slot: The slot.
            block_tables: KV blocks of the sequence.
        """
        self.table, self.slot, self.block_tables = leader.table, slot, block_tables

    def settle(self) -> None:
        """Append the arrived tokens that are not in the lists of the sequence."""
        new = self.completion
        if new is not None:
            self.completion = None
        elif self.table is not None and self.table.n_staged[self.slot]:
            [new] = self.table.unstage([self.slot])
        if new is not None:
            tokens, logprobs, versions = new
            self.tokens += tokens.tolist()
            self.logprobs += logprobs.tolist()
            self.versions += versions.tolist()

    def tokens_from(self, start: int) -> np.ndarray:
        """Return the tokens of prompt and completion from index `start` on, (n,) int64, for a sequence in the batch.

        Unlike `settle`, this does not move arrived tokens from the slot table to the lists of the sequence, because
        lists of many tokens take time.

        Args:
            start: Index of the first token, at least 0.
        """
        assert self.table is not None
        n_settled = len(self.tokens)
        staged = self.table.tokens[self.slot, max(0, start - n_settled) : self.table.n_staged[self.slot]]
        return np.concatenate((np.array(self.tokens[start:], dtype=np.int64), staged))

    def completion_tokens(self) -> np.ndarray:
        """Return all completion tokens of a finished sample, (n,) int64."""
        if self.completion is not None:
            return self.completion[0]
        return np.array(self.tokens[self.n_prompt :], dtype=np.int64)

    def go_on(self, begun: Begun) -> None:
        """Take over the completion tokens that the sample has from an earlier rollout.

        The sequence is then like one that was preempted: its first prefill computes prompt and completion.

        Args:
            begun: The tokens.
        """
        self.tokens += begun.tokens
        self.logprobs += begun.logprobs
        self.versions += begun.versions
        self._n_sampled = len(begun.tokens)
        if self.grammar is not None:
            for token in begun.tokens:
                self.grammar.accept(token)

    @property
    def n_kv(self) -> int:
        """Number of positions whose keys and values are in the cache after the planned step."""
        return self._n_kv if self.table is None else int(self.table.n_kv[self.slot])

    @n_kv.setter
    def n_kv(self, value: int) -> None:
        if self.table is None:
            self._n_kv = value
        else:
            self.table.n_kv[self.slot] = value

    @property
    def n_sampled(self) -> int:
        """Number of completion tokens sampled on the device, including tokens that have not arrived."""
        return self._n_sampled if self.table is None else int(self.table.n_sampled[self.slot])

    @n_sampled.setter
    def n_sampled(self, value: int) -> None:
        if self.table is None:
            self._n_sampled = value
        else:
            self.table.n_sampled[self.slot] = value

    @property
    def n_new(self) -> int:
        """Number of completion tokens that have arrived."""
        return len(self.logprobs) if self.table is None else int(self.table.n_new[self.slot])

    @property
    def blocks(self) -> list[int]:
        """For every `block_size` positions, the first KV block in the first group of layers.

        The first group has full attention, or else the longest sliding window.
        """
        return self.block_tables.group_blocks[0]

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt)

    @property
    def is_fresh(self) -> bool:
        """Whether no completion token has arrived. Such a sample can share the prefill of another sample."""
        return self.completion is None and len(self.tokens) == len(self.request.prompt)

    @property
    def is_filtered(self) -> bool:
        """Whether top-k or top-p restricts the sampled tokens."""
        params = self.request.params
        return not params.is_greedy and (params.top_k > 0 or params.top_p < 1)

    @property
    def needs_edits(self) -> bool:
        """Whether sampling needs LogitEdits, as for a logit bias, min-p or top log-probabilities."""
        return self.request.edits_logits or self.request.wants_scores

    @property
    def is_penalized(self) -> bool:
        """Whether a frequency or presence penalty changes the logits."""
        return self.request.params.frequency_penalty != 0 or self.request.params.presence_penalty != 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not yet computed."""
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.n_prompt - 1

    @property
    def min_new(self) -> int:
        """Number of completion tokens that must be sampled before a token in `stop_ids` is allowed."""
        return min(self.request.params.min_new_tokens, self.max_new) if self.stop_ids else 0

    def accept(self, token: int, logprob: float, version: int, top: TokenScores | None = None, raw: float = 0) -> bool:
        """Append a token that has arrived from the device.

        Args:
            token: Token id.
            logprob: Log-probability of the token.
            version: Version of the weights that sampled the token.
            top: Most likely tokens with their log-probabilities. None if not computed.
            raw: Log-probability without the temperature, if it is requested.

        Returns:
            Whether the sequence ends with this token. `finish_reason` is set then.
        """
        self.settle()
        if self.grammar is not None:
            self.grammar.accept(token)
            if self.grammar.error:  # nothing was allowed, so the token that was drawn is no part of the sample
                logger.warning("a sample of request %d ends early: %s", self.request.request_id, self.grammar.error)
                self.finish_reason = "abort"
                return True
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.table is not None:
            self.table.n_new[self.slot] += 1
        if self.request.top_logprobs and top is not None:
            self.top_logprobs.append(top[: self.request.top_logprobs])
        if self.request.raw_logprobs:
            self.raw_logprobs.append(raw)
        n_new = len(self.logprobs)
        ends_grammar = self.grammar is not None and self.grammar.finished  # with `ignore_eos`, too: nothing can follow
        has_stopped = token in self.stop_ids or ends_grammar
        if has_stopped or (self.stop_strings is not None and self._has_stop_string(self.stop_strings)):
            self.finish_reason = "stop"
        elif n_new >= self.max_new:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _has_stop_string(self, stop_strings: StopStrings) -> bool:
        """Return whether the completion, including the newest token, contains a stop string.

        False until the completion has `min_new_tokens` tokens.
        """
        n_new, least = len(self.logprobs), self.request.params.min_new_tokens
        if n_new < least or (n_new > least and not stop_strings.can_end_with(self.tokens[-1])):
            return False
        return stop_strings.are_in(self.tokens[self.n_prompt :])

    def leave_cache(self, n_sampled: int) -> BlockTables:
        """Leave the batch: forget the slot and the KV blocks. For a sequence that finishes or is preempted.

        Arrived tokens stay.

        Args:
            n_sampled: The number of sampled tokens in the slot table.

        Returns:
            The KV blocks, which the caller releases.
        """
        if self.completion is None:
            self.settle()
        self.table, self.slot, self._n_kv, self._n_sampled = None, -1, 0, n_sampled
        if self.is_fresh:  # its prompt will be scored again from the first token on, maybe for other samples, too
            self.prompt_logprobs = []
        block_tables = self.block_tables
        del self.block_tables
        return block_tables

    def output(self) -> GenerationOutput:
        """Return the output of the sample, and note how many completion tokens have been returned.

        Returns:
            The whole completion if the sample is finished. Otherwise the completion tokens since the previous call.
        """
        if self.completion is None:
            self.settle()
        if self.finish_reason is not None:
            self.enter("end")
        start = self.n_streamed if self.finish_reason is None else 0
        self.n_streamed = len(self.logprobs)
        return self._output(start, tuple(self.phases) if self.finish_reason is not None else ())

    def whole_output(self) -> GenerationOutput:
        """Return the output of a sample that is parked, with the whole completion so far."""
        self.enter("end")
        return self._output(0, tuple(self.phases))

    def _output(self, start: int, phases: trace.Phases) -> GenerationOutput:
        """Return an output with the completion tokens from index `start` on, and the given phases."""
        numbers: Any = self.completion
        if numbers is None:
            numbers = self.tokens[self.n_prompt + start :], self.logprobs[start:], self.versions[start:]
        return GenerationOutput.of_fields(
            {
                "request_id": self.request.request_id,
                "sample": self.sample,
                "tokens": numbers[0],
                "logprobs": numbers[1],
                "versions": numbers[2],
                "finish_reason": self.finish_reason,
                "cached_tokens": self.n_cached,
                "top_logprobs": self.top_logprobs[start:],
                "prompt_logprobs": [] if start else self.prompt_logprobs,
                "raw_logprobs": self.raw_logprobs[start:],
                "routes": None,
                "phases": phases,
            }
        )
