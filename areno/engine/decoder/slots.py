"""The state of the sequences in the batch as numpy arrays, with one entry for each slot. Contains no tensors.

A decoding step touches every sequence, so a Python object for each sequence would make its cost grow with the batch.
The scheduler, the runner and the decoder therefore read and write these arrays. They use a `Sequence` object only when
the sequence enters or leaves the batch, gets a new KV block, ends, or needs the host for each token.
"""

from __future__ import annotations

import numpy as np

STAGED = 256  # arrived tokens of a slot that are kept here, before the sequence takes them over
NEVER = 1 << 62


class SlotTable:
    """Lengths, limits and flags of the sequences in the batch, and their newest tokens.

    `owner` is 0 for a free slot, and otherwise a number that is new for each sequence that gets the slot. A token in
    flight is dropped if the owner has changed. `n_kv` (positions in the KV cache) and `n_sampled` (tokens sampled on
    the device) include the planned step. `n_new` counts the completion tokens that have arrived on the host. `capacity`
    is the number of positions that have KV blocks. `register_at` is the number of tokens at which the next full block
    enters the prefix cache, or NEVER. `in_pieces` marks sequences that report new tokens every 64 steps. Rows of
    `stop_ids` are padded with -1. The first `n_staged` entries of a row of `tokens`, `logprobs` and `versions` are
    arrived tokens that are not yet in the lists of the `Sequence`.
    """

    def __init__(self, n_slots: int):
        self._n_admitted = 0

        self._numbers, self._flags = np.zeros((10, n_slots), dtype=np.int64), np.zeros((6, n_slots), dtype=bool)
        self.owner, self.n_kv, self.n_sampled, self.n_new, self.n_prompt = self._numbers[:5]
        self.max_new, self.min_new, self.capacity, self.register_at, self.n_staged = self._numbers[5:]
        self.needs_host, self.in_pieces, self.has_grammar = self._flags[:3]
        self.is_filtered, self.is_penalized, self.needs_edits = self._flags[3:]
        self.stop_ids = np.full((n_slots, 1), -1, dtype=np.int64)
        self.tokens, self.versions = (np.empty((n_slots, STAGED), dtype=np.int64) for _ in range(2))
        self.logprobs = np.empty((n_slots, STAGED), dtype=np.float64)

    def occupy(self, slot: int, stop_ids: frozenset[int]) -> None:
        """Assign a free slot to a new sequence. The caller sets all entries other than owner and stop tokens."""
        self._n_admitted += 1
        self.owner[slot], self.n_staged[slot] = self._n_admitted, 0
        if (more := len(stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = list(stop_ids)

    def occupy_like(self, slots: list[int], like: list[int]) -> None:
        """Assign free slots to followers of a prefill, with the entries of their leaders' slots (`like`)."""
        self._numbers[:, slots] = self._numbers[:, like]
        self._flags[:, slots] = self._flags[:, like]
        self.n_kv[slots] = 0
        self.stop_ids[slots] = self.stop_ids[like]
        self.owner[slots] = self._n_admitted + 1 + np.arange(len(slots))
        self._n_admitted += len(slots)

    def is_done(self, slots_B: np.ndarray) -> np.ndarray:
        """Return (B,) bool: whether `max_new` tokens have been sampled, even if some have not arrived on the host."""
        return self.n_sampled[slots_B] >= self.max_new[slots_B]

    def needs_block(self, slots_B: np.ndarray) -> np.ndarray:
        """Return (B,) bool: whether a sequence is not done and its blocks have no room for the next position."""
        return (self.n_kv[slots_B] == self.capacity[slots_B]) & ~self.is_done(slots_B)

    def awaits_token(self, slots_B: np.ndarray) -> np.ndarray:
        """Return (B,) bool: whether the next grammar mask needs a token that has not arrived on the host."""
        return self.has_grammar[slots_B] & (self.n_sampled[slots_B] > self.n_new[slots_B])

    def stage(self, slots_B: np.ndarray, tokens_B: np.ndarray, logprobs_B: np.ndarray, version: int) -> None:
        """Append one arrived token to each slot, which must have room. A slot occurs at most once."""
        staged_B = self.n_staged[slots_B]
        self.tokens[slots_B, staged_B] = tokens_B
        self.logprobs[slots_B, staged_B] = logprobs_B
        self.versions[slots_B, staged_B] = version
        self.n_staged[slots_B] = staged_B + 1
        self.n_new[slots_B] += 1

    def stage_several(
        self, slots_B: np.ndarray, tokens_BR: np.ndarray, logprobs_BR: np.ndarray, counts_B: np.ndarray, version: int
    ) -> None:
        """Append the first `counts_B` of R arrived tokens to each slot, as `stage` does."""
        rows, columns = np.nonzero(np.arange(tokens_BR.shape[1]) < counts_B[:, None])
        slots, places = slots_B[rows], (self.n_staged[slots_B])[rows] + columns
        self.tokens[slots, places] = tokens_BR[rows, columns]
        self.logprobs[slots, places] = logprobs_BR[rows, columns]
        self.versions[slots, places] = version
        self.n_staged[slots_B] += counts_B
        self.n_new[slots_B] += counts_B

    def rewind(self, slots_B: np.ndarray, n_in_flight_B: np.ndarray | int = 0) -> None:
        """After a verification, reduce `n_sampled` and `n_kv` to the arrived tokens plus `n_in_flight_B` tokens."""
        n_sampled_B = self.n_new[slots_B] + n_in_flight_B
        self.n_sampled[slots_B] = n_sampled_B
        self.n_kv[slots_B] = self.n_prompt[slots_B] + n_sampled_B - 1

    def needs_host_drafts(self, slots_B: np.ndarray) -> bool:
        return bool((self.has_grammar[slots_B] | self.is_penalized[slots_B] | self.needs_edits[slots_B]).any())

    def has_stopped(self, slots_B: np.ndarray, tokens_B: np.ndarray) -> np.ndarray:
        return (self.stop_ids[slots_B] == tokens_B[:, None]).any(1)

    def take_staged(self, slots: list[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        lengths = self.n_staged[slots]
        n_most = int(lengths.max())
        self.n_staged[slots] = 0
        arrays = self.tokens[slots, :n_most], self.logprobs[slots, :n_most], self.versions[slots, :n_most]
        return [
            (tokens[:n], logprobs[:n], versions[:n])
            for tokens, logprobs, versions, n in zip(*arrays, lengths.tolist(), strict=True)
        ]
