"""The decode step as CUDA graphs, one for each batch size in a list of sizes; smaller batches are filled up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.cut import Cut

DecodeBody = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], bool], Tensor]
"""(rows (4, B), spans (2,), teams (M, R) or None: int64; splits; whether some row is filtered) -> (2, B) float64."""

Key = tuple[int, "tuple[int, ...] | None", "tuple[int, int]", bool]
"""Batch size, shape of teams, splits, whether some row is filtered: what a graph is captured for."""

_POWERS_UP_TO = 32


def bucket_sizes(max_running: int) -> list[int]:
    """1, 2, 4, .. 32, then every 32 up to max_running, which is the last one."""
    sizes = [1 << i for i in range(_POWERS_UP_TO.bit_length()) if 1 << i < max_running]
    sizes += range(2 * _POWERS_UP_TO, max_running, _POWERS_UP_TO)
    return [*sizes, max_running]


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    out: Tensor


class DecodeGraphs:
    """Captures the body for a batch size the first time it is needed, and replays it from then on.

    The body must read nothing but its arguments and tensors that stay where they are. Weights are such tensors:
    training updates them in place, so a graph stays valid over all steps of a run.
    """

    def __init__(self, body: DecodeBody, max_running: int, scratch_slot: int, device: torch.device):
        self._body = body
        self._sizes = bucket_sizes(max_running)
        self._device = device
        # What fills up a batch: the scratch slot, at position 0, drawing its first token, in no team.
        self._filler = np.array([[scratch_slot], [0], [0], [0]], dtype=np.int64)
        self._graphs: dict[Key, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.n_replays = 0

    def size_for(self, n_rows: int) -> int:
        """The batch size that so many rows run with."""
        return next(size for size in self._sizes if size >= n_rows)

    def run(self, rows: np.ndarray, cut: Cut, filtered: bool) -> Tensor:
        """The body's result for these rows, (4, B), valid until the next run."""
        n_rows = rows.shape[1]
        size = self.size_for(n_rows)
        teams = cut.teams_MR
        key = (size, None if teams is None else teams.shape, cut.splits, filtered)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(*key)
        # All that a step brings along goes to the device in one piece.
        host = torch.empty(captured.inputs.shape, dtype=torch.int64, pin_memory=True)
        packed = host.numpy()
        packed[:2] = cut.spans
        columns = packed[2 : 2 + 4 * size].reshape(4, size)
        columns[:, :n_rows] = rows
        columns[:, n_rows:] = self._filler
        if teams is not None:
            packed[2 + 4 * size :] = teams.ravel()
        captured.inputs.copy_(host, non_blocking=True)
        captured.graph.replay()
        self.n_replays += 1
        return captured.out[:, :n_rows]

    def _capture(
        self, size: int, team_shape: tuple[int, ...] | None, splits: tuple[int, int], filtered: bool
    ) -> _Graph:
        spans, rows = np.ones(2, dtype=np.int64), self._filler.repeat(size, 1)
        teams = np.full(team_shape or 0, -1, dtype=np.int64)
        inputs = torch.from_numpy(np.concatenate((spans, rows.ravel(), teams.ravel()))).to(self._device)
        args = (
            inputs[2 : 2 + 4 * size].view(4, size),
            inputs[:2],
            None if team_shape is None else inputs[2 + 4 * size :].view(team_shape),
            splits,
            filtered,
        )
        graph = torch.cuda.CUDAGraph()
        # One stream for all captures, so that they find each other's memory and workspaces. Begin and end by hand:
        # torch.cuda.graph would give the allocator's memory back each time, which takes longer than the capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._body(*args)  # outside the capture first: kernels are compiled, workspaces allocated
            self._stream.synchronize()
            # Other threads of the process (NCCL's watchdog, say) may call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = self._body(*args)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return _Graph(graph, inputs, out)
