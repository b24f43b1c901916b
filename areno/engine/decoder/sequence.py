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
from areno.types import TOKEN_SCORE, BegunCompletion, FinishReason, GenerationOutput, GenerationRequest, TokenScores

Detokenize = Callable[[list[int]], str]

# Tokens to decode beyond the bytes of the longest stop string, because special tokens may add no text.
_EXTRA_TAIL = 16
_PART_OF_A_CHARACTER = "\ufffd"


class StopStrings:
    """Finds stop strings in completions without decoding the text after every token.

    Only a token whose text contains the end of a stop string can complete it, and most tokens cannot. `can_end_with`
    checks this once for each token id. Only after tokens that can end a stop string is the text decoded and searched.
    """

    def __init__(self, strings: tuple[str, ...], detokenize: Detokenize):
        self._strings = strings
        self._detokenize = detokenize
        self._n_tail = max(len(string.encode()) for string in strings) + _EXTRA_TAIL
        self._can_end: dict[int, bool] = {}

    def are_in(self, tokens: list[int]) -> bool:
        """Return whether the end of a completion contains a stop string."""
        text = self._detokenize(tokens[-self._n_tail :])
        return any(string in text for string in self._strings)

    def can_end_with(self, token: int) -> bool:
        can_end = self._can_end.get(token)
        if can_end is None:
            # A token whose text depends on the text before it may always end a stop string. A leading space does not
            # count as dependence, because many tokenizers drop it before a first token.
            first, text = self._detokenize([token]), self._detokenize([token, token])
            depends = text not in (first + first, f"{first} {first}")
            can_end = self._can_end[token] = depends or self._may_end(first) or self._may_end(text[len(first) :])
        return can_end

    def _may_end(self, text: str) -> bool:
        """Return whether a token's text may end a stop string. True for an incomplete UTF-8 character."""
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
    counts are in a SlotTable, and so are its newest tokens until `append_staged` appends them to the lists here.
    """

    request: GenerationRequest
    sample: int
    key: int
    max_new: int
    stop_ids: frozenset[int]
    tokens: list[int]
    stop_strings: StopStrings | None = None
    grammar: GrammarState | None = None
    # of each completion token, like the next lists; the last three are empty unless requested
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, TokenScores]] = field(default_factory=list)
    n_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    n_streamed: int = 0  # completion tokens already returned in partial outputs
    finish_reason: FinishReason | None = None
    phases: list[tuple[str, int]] = field(default_factory=list)  # (name, start); empty unless the run is traced

    slot: int = -1  # its row in the device's tables, -1 while waiting
    table: SlotTable | None = None
    block_tables: BlockTables = field(init=False)  # its blocks, there while it has a slot
    # set when a sample finishes with all its tokens in the slot table, until `append_staged`
    completion: tuple[np.ndarray, np.ndarray, np.ndarray] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.enter_phase("queued")

    def enter_phase(self, phase: str) -> None:
        if trace.active:
            self.phases.append((phase, trace.now()))

    def enter_batch(self, table: SlotTable, slot: int) -> None:
        table.occupy(slot, self.stop_ids)
        table.n_kv[slot], table.n_sampled[slot], table.n_new[slot] = 0, len(self.logprobs), len(self.logprobs)
        table.n_prompt[slot], table.max_new[slot], table.min_new[slot] = self.n_prompt, self.max_new, self.min_new
        table.is_filtered[slot], table.is_penalized[slot] = self.uses_top_k_or_top_p, self.is_penalized
        table.has_grammar[slot], table.needs_edits[slot] = self.grammar is not None, self.needs_edits
        request = self.request
        table.needs_host[slot] = bool(
            self.grammar is not None or self.stop_strings is not None or request.wants_scores or request.stream
        )
        table.in_pieces[slot] = request.pieces
        self.table, self.slot = table, slot

    def enter_batch_like(self, leader: Sequence, slot: int, block_tables: BlockTables) -> None:
        """Enter the batch with the leader of a shared prefill. `SlotTable.occupy_like` then fills the slot."""
        self.table, self.slot, self.block_tables = leader.table, slot, block_tables

    def append_staged(self) -> None:
        """Append arrived tokens from the slot table, or from `completion`, to the lists of the sequence."""
        new = self.completion
        if new is not None:
            self.completion = None
        elif self.table is not None and self.table.n_staged[self.slot]:
            [new] = self.table.take_staged([self.slot])
        if new is not None:
            tokens, logprobs, versions = new
            self.tokens += tokens.tolist()
            self.logprobs += logprobs.tolist()
            self.versions += versions.tolist()

    def tokens_from(self, start: int) -> np.ndarray:
        """Return the tokens of prompt and completion from index `start` on, for a sequence in the batch.

        Unlike `append_staged`, this moves nothing from the slot table to lists, because lists of many tokens take time.
        """
        assert self.table is not None
        n_settled = len(self.tokens)
        staged = self.table.tokens[self.slot, max(0, start - n_settled) : self.table.n_staged[self.slot]]
        return np.concatenate((np.array(self.tokens[start:], dtype=np.int64), staged))

    def completion_tokens(self) -> np.ndarray:
        if self.completion is not None:
            return self.completion[0]
        return np.array(self.tokens[self.n_prompt :], dtype=np.int64)

    def resume_from(self, begun: BegunCompletion) -> None:
        """Append completion tokens of an earlier rollout. The sequence continues as if it had been preempted."""
        self.tokens += begun.tokens
        self.logprobs += begun.logprobs
        self.versions += begun.versions
        self.top_logprobs += [np.asarray(top, TOKEN_SCORE) for top in begun.top_logprobs]
        if self.grammar is not None:
            for token in begun.tokens:
                self.grammar.accept(token)

    @property
    def n_kv(self) -> int:
        """Number of positions whose keys and values are in the cache after the planned step."""
        return 0 if self.table is None else int(self.table.n_kv[self.slot])

    @n_kv.setter
    def n_kv(self, value: int) -> None:
        assert self.table is not None
        self.table.n_kv[self.slot] = value

    @property
    def n_new(self) -> int:
        """Number of completion tokens that have arrived."""
        return len(self.logprobs) if self.table is None else int(self.table.n_new[self.slot])

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def has_only_prompt(self) -> bool:
        """Return whether `tokens` has only the prompt. If so, a waiting sample can share the prefill of another."""
        return self.completion is None and len(self.tokens) == len(self.request.prompt)

    @property
    def uses_top_k_or_top_p(self) -> bool:
        params = self.request.params
        return not params.is_greedy and (params.top_k > 0 or params.top_p < 1)

    @property
    def needs_edits(self) -> bool:
        return self.request.edits_logits or self.request.wants_scores

    @property
    def is_penalized(self) -> bool:
        return self.request.params.frequency_penalty != 0 or self.request.params.presence_penalty != 0

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs and len(self.prompt_logprobs) < self.n_prompt - 1

    @property
    def min_new(self) -> int:
        """Number of completion tokens that must be sampled before a token in `stop_ids` is allowed."""
        return min(self.request.params.min_new_tokens, self.max_new) if self.stop_ids else 0

    def accept(self, token: int, logprob: float, version: int, top: np.ndarray | None = None, raw: float = 0) -> bool:
        """Append a token that has arrived, and return whether the sequence ends with it."""
        self.append_staged()
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
            self.top_logprobs.append(top[: self.request.top_logprobs].copy())
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
        n_new, least = len(self.logprobs), self.request.params.min_new_tokens
        if n_new < least or (n_new > least and not stop_strings.can_end_with(self.tokens[-1])):
            return False
        return stop_strings.are_in(self.tokens[self.n_prompt :])

    def leave_batch(self) -> BlockTables:
        """Leave the batch, and return the KV blocks, which the caller releases. Tokens still on the device are lost."""
        if self.completion is None:
            self.append_staged()
        self.table, self.slot = None, -1
        if (
            self.has_only_prompt
        ):  # its prompt will be scored again from the first token on, maybe for other samples, too
            self.prompt_logprobs = []
        block_tables = self.block_tables
        del self.block_tables
        return block_tables

    def take_output(self, whole: bool = False) -> GenerationOutput:
        """Return the completion if the sample has finished or `whole` is True, else the tokens since the last call."""
        if self.completion is None:
            self.append_staged()
        whole = whole or self.finish_reason is not None
        if whole:
            self.enter_phase("end")
        start = 0 if whole else self.n_streamed
        self.n_streamed = len(self.logprobs)
        numbers: Any = self.completion
        if numbers is None:
            numbers = self.tokens[self.n_prompt + start :], self.logprobs[start:], self.versions[start:]
        return GenerationOutput.from_fields(
            {
                "request_id": self.request.request_id,
                "sample": self.sample,
                "tokens": numbers[0],
                "logprobs": numbers[1],
                "versions": numbers[2],
                "finish_reason": self.finish_reason,
                "cached_tokens": self.n_cached,
                "top_logprobs": np.stack(tops) if (tops := self.top_logprobs[start:]) else (),
                "prompt_logprobs": [] if start else self.prompt_logprobs,
                "raw_logprobs": self.raw_logprobs[start:],
                "routes": None,
                "phases": tuple(self.phases) if whole else (),
            }
        )
