"""Continuous batching: which sequences run in the next step, and which blocks they hold. No tensors.

Every step advances each running sequence by one token and, beside that, takes the next `max_prefill_tokens` prompt
tokens, so neither long prompts nor a busy batch make the other wait. Sequences are admitted first come, first served,
which keeps three lists in order of age: running, prefilling, waiting.

When blocks run out, the youngest sequence gives up its own and waits again; the oldest always goes on, so there is no
deadlock as long as each sequence alone fits (the decoder checks that at the door).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from areno.engine.decoder.blocks import BlockManager
from areno.engine.decoder.sequence import Sequence


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt on its way into the cache, with the samples of the same request that will share it.

    The followers hold the leader's full blocks from the start; the partial last one is copied for each, at the end.
    """

    leader: Sequence
    followers: list[Sequence] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return [self.leader, *self.followers]

    def copies(self, block_size: int) -> list[tuple[int, int]]:
        """(from, to) blocks to copy once the prompt is in the cache."""
        if len(self.leader.tokens) % block_size == 0:
            return []
        return [(self.leader.blocks[-1], follower.blocks[-1]) for follower in self.followers]


@dataclass(slots=True)
class Chunk:
    """The tokens [start, end) of a prefill; after the last chunk each of its sequences draws a token."""

    prefill: Prefill
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prefill.leader.tokens)


@dataclass(slots=True)
class Plan:
    """What one step runs: first the chunks in one forward pass, then one token of each of `decode` in another."""

    chunks: list[Chunk]
    decode: list[Sequence]


class Scheduler:
    """Holds every unfinished sequence."""

    def __init__(self, blocks: BlockManager, max_running: int, max_prefill_tokens: int):
        self.blocks = blocks
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self._slots = list(range(max_running))[::-1]
        self.n_preemptions = 0
        self.n_cached_tokens = 0

    @property
    def n_running(self) -> int:
        """Sequences that have a slot."""
        return len(self.running) + sum(len(prefill.sequences) for prefill in self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def is_short_of_blocks(self) -> bool:
        """Whether the running sequences need more blocks than there are.

        Tokens that have not arrived may show that some of them are finished: look at those before `schedule` preempts.
        """
        return sum(map(self._needs_block, self.running)) > self.blocks.n_available

    def schedule(self) -> Plan:
        """The next step. Its positions count as being in the cache from here on."""
        decode = self._grow_running()
        chunks = self._next_chunks()
        for sequence in decode:
            sequence.n_kv += 1
            sequence.n_drawn += 1
        return Plan(chunks, decode)

    def register(self, sequence: Sequence, n_tokens: int) -> None:
        """Make the sequence's full blocks among its first `n_tokens` (known, and in the cache) findable."""
        size = self.blocks.block_size
        for i in range(sequence.n_registered, n_tokens // size):
            content = tuple(sequence.tokens[i * size : (i + 1) * size])
            sequence.entry = self.blocks.register(sequence.blocks[i], sequence.entry, content)
            sequence.n_registered = i + 1

    def remove_finished(self) -> None:
        """Free what running sequences with a finish reason hold."""
        for sequence in self.running:
            if sequence.finish_reason is not None:
                self._evict(sequence)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]

    def abort(self, request_id: int) -> list[Sequence]:
        """Drop the unfinished sequences of a request, wherever they are; returns them, finished as "abort"."""
        dropped: list[Sequence] = []
        # The samples of one prefill are of one request, so it goes as a whole.
        for prefill in [prefill for prefill in self.prefilling if prefill.leader.request.request_id == request_id]:
            self.prefilling.remove(prefill)
            dropped += prefill.sequences
        for sequence in dropped:
            self._evict(sequence)
        for sequence in self.running:
            if sequence.request.request_id == request_id:
                sequence.finish_reason = "abort"
                dropped.append(sequence)
        self.remove_finished()
        dropped += [sequence for sequence in self.waiting if sequence.request.request_id == request_id]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request.request_id != request_id)
        for sequence in dropped:
            sequence.finish_reason = "abort"
        return dropped

    def preempt_all(self) -> None:
        """Send everything back to wait; it is recomputed from its tokens."""
        while self.prefilling or self.running:
            self._preempt_youngest()

    def _needs_block(self, sequence: Sequence) -> bool:
        return not sequence.is_drawn_out and sequence.n_kv == len(sequence.blocks) * self.blocks.block_size

    def _grow_running(self) -> list[Sequence]:
        """The running sequences that take a step, each with room for its next position; oldest first."""
        decode: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.is_drawn_out or sequence.slot < 0:  # slot < 0: preempted for an older one
                continue
            if self._needs_block(sequence):
                while self.blocks.n_available == 0 and sequence.slot >= 0:
                    self._preempt_youngest()
                if sequence.slot < 0:
                    continue
                sequence.blocks.append(self.blocks.allocate())
            decode.append(sequence)
        return decode

    def _next_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for prefill in self.prefilling:
            if budget:
                budget -= self._add_chunk(chunks, prefill, budget)
        while budget and (prefill := self._admit()) is not None:
            self.prefilling.append(prefill)
            budget -= self._add_chunk(chunks, prefill, budget)
        for chunk in chunks:
            if chunk.is_last:
                self.prefilling.remove(chunk.prefill)
                self._start_running(chunk.prefill)
        return chunks

    def _add_chunk(self, chunks: list[Chunk], prefill: Prefill, budget: int) -> int:
        leader = prefill.leader
        chunk = Chunk(prefill, leader.n_kv, min(len(leader.tokens), leader.n_kv + budget))
        leader.n_kv = chunk.end
        # Findable at once: a forward pass writes the keys and values of all its rows before it reads any.
        self.register(leader, chunk.end)
        chunks.append(chunk)
        return chunk.end - chunk.start

    def _start_running(self, prefill: Prefill) -> None:
        leader = prefill.leader
        for follower in prefill.followers:
            follower.n_kv, follower.n_registered, follower.entry = leader.n_kv, leader.n_registered, leader.entry
        for sequence in prefill.sequences:
            sequence.n_drawn += 1
            self.running.append(sequence)

    def _admit(self) -> Prefill | None:
        """The oldest waiting sequence with those of its siblings that can share its prompt, if there is room."""
        if not self.waiting or not self._slots:
            return None
        leader = self.waiting[0]
        n_tokens, size = len(leader.tokens), self.blocks.block_size
        # The last token is always computed: its hidden state gives the first draw.
        found, entry = self.blocks.match(leader.tokens, (n_tokens - 1) // size)
        n_new = self.blocks.blocks_for(n_tokens) - len(found)
        # A block left for each running sequence keeps the newcomer from being preempted right away.
        reserve = len(self.running)
        if not self.blocks.can_take(found, n_new, reserve):
            assert self.running or self.prefilling, "a sequence was admitted that can never fit"
            return None
        self.waiting.popleft()
        self.blocks.hold(found)
        leader.blocks = found + [self.blocks.allocate() for _ in range(n_new)]
        leader.n_kv = len(found) * size
        leader.n_registered, leader.entry = len(found), entry
        leader.slot = self._slots.pop()
        self.n_cached_tokens += leader.n_kv
        prefill = Prefill(leader)
        if leader.is_fresh:
            n_own = 1 if n_tokens % size else 0
            while self._slots and self._can_follow(leader) and self.blocks.can_take((), n_own, reserve):
                follower = self.waiting.popleft()
                shared = leader.blocks[: n_tokens // size]
                self.blocks.hold(shared)
                follower.blocks = shared + [self.blocks.allocate() for _ in range(n_own)]
                follower.slot = self._slots.pop()
                prefill.followers.append(follower)
        return prefill

    def _can_follow(self, leader: Sequence) -> bool:
        return bool(self.waiting) and self.waiting[0].request is leader.request and self.waiting[0].is_fresh

    def _preempt_youngest(self) -> None:
        victims = self.prefilling.pop().sequences if self.prefilling else [self.running.pop()]
        for sequence in reversed(victims):
            assert sequence.n_drawn == len(sequence.logprobs), "preempted with a token on its way"
            self._evict(sequence)
            self.waiting.appendleft(sequence)
        self.n_preemptions += len(victims)

    def _evict(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.leave_cache()
