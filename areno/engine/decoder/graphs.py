"""The decode step as CUDA graphs, one for each batch size in a list of sizes; smaller batches are filled up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DecodeBody = Callable[[Tensor, bool], Tensor]
"""(rows (3, B) int64 on the device, whether some row is filtered) -> (2, B) float64."""

_POWERS_UP_TO = 32


def bucket_sizes(max_running: int) -> list[int]:
    """1, 2, 4, .. 32, then every 32 up to max_running, which is the last one."""
    sizes = [1 << i for i in range(_POWERS_UP_TO.bit_length()) if 1 << i < max_running]
    sizes += range(2 * _POWERS_UP_TO, max_running, _POWERS_UP_TO)
    return [*sizes, max_running]


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    rows: Tensor
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
        # What fills up a batch: the scratch slot, at position 0, drawing its first token.
        self._filler = torch.tensor([[scratch_slot], [0], [0]], dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.n_replays = 0

    def run(self, rows: Tensor, filtered: bool) -> Tensor:
        """The body's result for these rows, valid until the next run. rows: (3, B) int64 on the device."""
        n_rows = rows.shape[1]
        size = next(size for size in self._sizes if size >= n_rows)
        captured = self._graphs.get((size, filtered))
        if captured is None:
            captured = self._graphs[size, filtered] = self._capture(size, filtered)
        captured.rows[:, :n_rows].copy_(rows)
        captured.rows[:, n_rows:].copy_(self._filler.expand(-1, size - n_rows))
        captured.graph.replay()
        self.n_replays += 1
        return captured.out[:, :n_rows]

    def _capture(self, size: int, filtered: bool) -> _Graph:
        rows = self._filler.repeat(1, size)
        # Run it first outside the capture, so that kernels are compiled and workspaces allocated.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body(rows, filtered)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (NCCL's watchdog, say) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._body(rows, filtered)
        return _Graph(graph, rows, out)
