"""From a plan to tensors, through the model, to drawn tokens on their way to the host.

On CUDA nothing in here waits for the device: what goes there starts from pinned memory, what comes back is copied to
pinned memory behind an event, and the token that the next step needs stays on the device.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.cut import cut_attention
from areno.engine.decoder.graphs import DecodeGraphs
from areno.engine.decoder.kv_cache import DecodeAttend, KVCache, PrefillAttend
from areno.engine.decoder.sampler import Sampler
from areno.engine.decoder.scheduler import Chunk, Plan
from areno.engine.decoder.sequence import Sequence
from areno.kernels.paged import TEAM_SIZE, Batch, triton_kernel
from areno.models.transformer import Transformer

logger = logging.getLogger("areno")


@dataclass(slots=True)
class Drawn:
    """The tokens of one forward pass: (2, len(sequences)) float64 on the host, valid once `ready` has happened."""

    sequences: list[Sequence]
    tokens_and_logprobs: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> tuple[list[int], list[float]]:
        """The tokens and their log-probabilities, in the order of `sequences`."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logprobs = self.tokens_and_logprobs.numpy()
        return tokens.astype(np.int64).tolist(), logprobs.tolist()


class Runner:
    """Holds everything of the decoder that lives on the device.

    A sequence has a slot while it is in the batch. For each slot the device keeps the blocks (`table`), the sampling
    settings and the last drawn token; one more slot, the last, is for rows that only fill up a batch.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        n_blocks: int,
        block_size: int,
        max_running: int,
        max_blocks: int,
        use_graphs: bool,
        attn_backend: str,
    ):
        self.model = model
        self.device = model.head_weight.device
        self.attn_backend = attn_backend
        self.cache = KVCache(model, n_blocks, block_size)
        n_slots = max_running + 1
        self.table = torch.full((n_slots, max_blocks), n_blocks, dtype=torch.int32, device=self.device)
        self.sampler = Sampler(n_slots, self.device)
        on_cuda = self.device.type == "cuda"
        # The torch form of the attention reads every row by itself anyway.
        self.uses_teams = triton_kernel(self.table) is not None
        self.n_processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_cuda else 1
        self.graphs: DecodeGraphs | None = None
        if use_graphs and on_cuda:
            if not self.uses_teams:  # the torch form of paged attention needs the longest length on the host
                logger.warning("decode without CUDA graphs, since triton is not installed; pip install triton")
            else:
                self.graphs = DecodeGraphs(self._decode, max_running, max_running, self.device)

    @torch.no_grad()
    def launch(self, plan: Plan) -> list[Drawn]:
        """Start the forward passes of a plan; their results arrive later."""
        drawn: list[Drawn] = []
        finished = [sequence for chunk in plan.chunks if chunk.is_last for sequence in chunk.prefill.sequences]
        self._upload_slots(finished + plan.decode)
        if plan.chunks:
            out = self._prefill(plan.chunks, finished)
            if finished:
                drawn.append(self._download(finished, out))
        if plan.decode:
            drawn.append(self._download(plan.decode, self._launch_decode(plan.decode)))
        return drawn

    def _upload(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _download(self, sequences: list[Sequence], out: Tensor) -> Drawn:
        if self.device.type != "cuda":
            return Drawn(sequences, out, None)
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        host.copy_(out, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Drawn(sequences, host, ready)

    def _upload_slots(self, sequences: list[Sequence]) -> None:
        """Tell the device of blocks that sequences got since the last step, and of the settings of new ones."""
        new = [sequence for sequence in sequences if sequence.n_uploaded == 0]
        entries: list[tuple[int, int, int]] = []
        for sequence in sequences:
            for column in range(sequence.n_uploaded, len(sequence.blocks)):
                entries.append((sequence.slot, column, sequence.blocks[column]))
            sequence.n_uploaded = len(sequence.blocks)
        if entries:
            slots, columns, blocks = self._upload(np.array(entries, dtype=np.int64).T.copy())
            self.table[slots, columns] = blocks.int()
        if new:
            self.sampler.assign(self._upload(Sampler.pack(new)))

    def _prefill(self, chunks: list[Chunk], finished: list[Sequence]) -> Tensor:
        """One forward pass over the chunks; draws a token for each sequence whose prompt is complete with it."""
        size = self.cache.block_size
        tokens: list[int] = []
        positions, places, key_places = [], [], []
        for chunk in chunks:
            leader = chunk.prefill.leader
            tokens += leader.tokens[chunk.start : chunk.end]
            position = np.arange(chunk.end)
            place = np.array(leader.blocks, dtype=np.int64)[position // size] * size + position % size
            positions.append(position[chunk.start :])
            places.append(place[chunk.start :])
            key_places.append(place)
        lengths_q = [chunk.end - chunk.start for chunk in chunks]
        lengths_k = [chunk.end for chunk in chunks]
        cu_q, cu_k = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (lengths_q, lengths_k))
        attend = PrefillAttend(
            cache=self.cache,
            backend=self.attn_backend,
            places_N=self._upload(np.concatenate(places)),
            key_places_M=self._upload(np.concatenate(key_places)) if lengths_q != lengths_k else None,
            cu_seqlens_q=self._upload(cu_q),
            cu_seqlens_k=self._upload(cu_k),
            max_q=max(lengths_q),
            max_k=max(lengths_k),
        )
        hidden_ND = self.model(
            self._upload(np.array(tokens, dtype=np.int64)), self._upload(np.concatenate(positions)), attend
        )
        copies = [pair for chunk in chunks if chunk.is_last for pair in chunk.prefill.copies(size)]
        if copies:
            self.cache.copy_blocks(self._upload(np.array(copies, dtype=np.int64).T.copy()))
        if not finished:
            return hidden_ND
        last = [row for row, chunk in enumerate(chunks) if chunk.is_last]
        logits_KV = self.model.logits(hidden_ND[self._upload(cu_q[1:].astype(np.int64)[last] - 1)])
        prompt_of_row = np.repeat(np.arange(len(last)), [len(chunks[row].prefill.sequences) for row in last])
        rows = self._upload(
            np.array([[s.slot for s in finished], [s.n_drawn - 1 for s in finished], prompt_of_row], dtype=np.int64)
        )
        return self.sampler.draw(
            logits_KV[rows[2]], rows[0], rows[1], filtered=_is_filtered(finished), banned=self._banned(finished)
        )

    def _launch_decode(self, sequences: list[Sequence]) -> Tensor:
        n_rows = len(sequences)
        rows = np.zeros((4, n_rows), dtype=np.int64)
        rows[0] = [sequence.slot for sequence in sequences]
        rows[1] = [sequence.n_kv - 1 for sequence in sequences]
        rows[2] = [sequence.n_drawn - 1 for sequence in sequences]
        size = n_rows if self.graphs is None else self.graphs.size_for(n_rows)
        cut = cut_attention(
            sequences,
            self.cache.block_size,
            team_size=TEAM_SIZE,
            max_teams=max(1, size // 4) if self.uses_teams else 0,
            n_heads=self.cache.pages.shape[4],
            n_processors=self.n_processors,
        )
        rows[3] = cut.shared_B
        filtered, banned = _is_filtered(sequences), self._banned(sequences)
        # Bans come with lists of any length, which a graph cannot take; they concern the first few tokens only.
        if self.graphs is not None and banned is None:
            return self.graphs.run(rows, cut, filtered)
        teams = None if cut.teams_MR is None else self._upload(cut.teams_MR)
        max_len = int(rows[1].max()) + 1
        return self._decode(self._upload(rows), self._upload(cut.spans), teams, cut.splits, filtered, max_len, banned)

    def _decode(
        self,
        rows: Tensor,
        spans: Tensor,
        teams: Tensor | None,
        splits: tuple[int, int],
        filtered: bool,
        max_len: int | None = None,
        banned: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One token for each row. rows: (4, B) slots, positions of the input token, numbers of the token drawn, shared
        positions. The last, spans, teams and splits: see `Batch`."""
        slots_B, positions_B, draws_B, shared_B = rows
        batch = Batch(
            table_TW=self.table,
            slots_B=slots_B,
            lengths_B=positions_B + 1,
            shared_B=shared_B,
            spans=spans,
            teams_MR=teams,
            splits=splits,
            max_len=max_len,
        )
        last_token = self.sampler.settings.last_token
        hidden_BD = self.model(last_token[slots_B], positions_B, DecodeAttend(self.cache, batch))
        logits_BV = self.model.logits(hidden_BD)
        return self.sampler.draw(logits_BV, slots_B, draws_B, filtered=filtered, banned=banned)

    def _banned(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor] | None:
        """(rows, token ids) of the stop tokens that sequences below their minimum length must not draw."""
        pairs = [(row, token) for row, seq in enumerate(sequences) if seq.bans_stop for token in seq.stop_ids]
        if not pairs:
            return None
        rows, tokens = self._upload(np.array(pairs, dtype=np.int64).T.copy())
        return rows, tokens


def _is_filtered(sequences: list[Sequence]) -> bool:
    return any(sequence.is_filtered for sequence in sequences)
