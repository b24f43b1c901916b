"""Decode steps as CUDA graphs, captured for a list of batch sizes. A batch is padded to the next size in the list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.attention_split import AttentionSplit
from areno.engine.decoder.verification import MAX_ROWS
from areno.kernels.sampling import SamplingFlags

DecodeBody = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], SamplingFlags], Tensor]
"""(rows (I, B), split_lens (2,), prefix groups (G, R) or None: int64; splits; flags) -> (2, B) float64."""

GraphKey = tuple[int, "tuple[int, ...] | None", "tuple[int, int]", SamplingFlags]
"""Properties of a batch that a graph is captured for: batch size, shape of the prefix groups, splits, flags."""

_POWERS_UP_TO = 32


def bucket_sizes(max_running: int) -> list[int]:
    """Return the batch sizes of the CUDA graphs: 1, 2, 4, ..., 32, then multiples of 32, and last `max_running`."""
    sizes = [1 << i for i in range(_POWERS_UP_TO.bit_length()) if 1 << i < max_running]
    sizes += range(2 * _POWERS_UP_TO, max_running, _POWERS_UP_TO)
    return [*sizes, max_running]


def verification_sizes() -> list[int]:
    """Return the batch sizes of the CUDA graphs of steps with drafts, whose sizes change from step to step: few."""
    return [8, *(each for power in (16, 32, 64, 128, 256, 512) for each in (power, power * 3 // 2)), MAX_ROWS]


class DecodeGraphs:
    """Captures the decode step as CUDA graphs, one for each kind of batch, and replays them.

    Batches are of the same kind if they agree in padded batch size, shape of the shared-prefix groups, numbers of
    splits and sampling flags. A graph is captured when its kind of batch first occurs. The decode step may read only
    its arguments, and tensors whose memory never moves. The weights are such tensors, because training updates them in
    place. So a graph stays valid for the whole run.

    Args:
        body: Function that computes the decode step.
        sizes: The batch sizes, in ascending order.
        padding: The I inputs of a padding row: the scratch slot, which comes after all others, then position 0, the
            first token of a completion, and no shared prefix. More inputs may follow.
        device: The GPU.

    Attributes:
        n_replays: Number of replayed steps.
    """

    def __init__(self, body: DecodeBody, sizes: Sequence[int], padding: Sequence[int], device: torch.device):
        self._body, self._sizes, self._device = body, sizes, device
        self._padding = np.array(padding, dtype=np.int64)[:, None]
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}  # graph, inputs, output
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self.n_replays = 0

    def size_for(self, n_rows: int) -> int:
        """Return the smallest batch size in the list of graph sizes that has room for `n_rows` rows."""
        return next(size for size in self._sizes if size >= n_rows)

    def run(self, rows: np.ndarray, split: AttentionSplit, flags: SamplingFlags) -> Tensor:
        """Run the decode step for a batch, which is padded to the next batch size of the CUDA graphs.

        Args:
            rows: (I, B) int64. For each batch row: its slot, the position of its input token, the index of the sampled
                token in its completion, and the length of its shared prefix. More inputs may follow.
            split: Division of the attention.
            flags: Sampling operations that at least one row needs.

        Returns:
            (2, B) float64: sampled tokens and their log-probabilities. The next call overwrites this tensor.
        """
        n_rows = rows.shape[1]
        size = self.size_for(n_rows)
        groups = split.prefix_groups_GR
        key = (size, None if groups is None else groups.shape, split.splits, flags)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, inputs, out = self._graphs[key]
        # All inputs of a step go to the device in one copy.
        host = torch.empty(inputs.shape, dtype=torch.int64, pin_memory=True)
        packed = host.numpy()
        packed[:2] = split.split_lens
        end = 2 + len(rows) * size
        columns = packed[2:end].reshape(len(rows), size)
        columns[:, :n_rows] = rows
        columns[:, n_rows:] = self._padding
        if groups is not None:
            packed[end:] = groups.ravel()
        inputs.copy_(host, non_blocking=True)
        graph.replay()
        self.n_replays += 1
        return out[:, :n_rows]

    def _capture(
        self, size: int, group_shape: tuple[int, ...] | None, splits: tuple[int, int], flags: SamplingFlags
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Capture the decode step as a CUDA graph.

        Args:
            size: Batch size.
            group_shape: Shape of `AttentionSplit.prefix_groups_GR`. None without shared-prefix groups.
            splits: As in AttentionSplit: largest numbers of splits of a row, and of a shared-prefix group.
            flags: Sampling operations that at least one row needs.

        Returns:
            The graph, the int64 buffer that holds its inputs, and its output (2, size) float64.
        """
        split_lens, rows = np.ones(2, dtype=np.int64), self._padding.repeat(size, 1)
        groups = np.full(group_shape or 0, -1, dtype=np.int64)
        inputs = torch.from_numpy(np.concatenate((split_lens, rows.ravel(), groups.ravel()))).to(self._device)
        end = 2 + rows.size
        args = (
            inputs[2:end].view(rows.shape),
            inputs[:2],
            None if group_shape is None else inputs[end:].view(group_shape),
            splits,
            flags,
        )
        graph, out = captured(lambda: self._body(*args), self._pool, self._stream)
        return graph, inputs, out


def captured(body: Callable[[], Tensor], pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run a function once, then capture it as a CUDA graph.

    Args:
        body: The function.
        pool: Memory pool of the graphs of this kind.
        stream: Stream of all captures of this kind, on which they find each other's memory and workspaces.

    Returns:
        The graph, and the output of the function, which a replay of the graph overwrites.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(stream.device)
    # Begin and end by hand: torch.cuda.graph would give the allocator's memory back each time, which takes longer than
    # the capture.
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        body()  # outside the capture first: kernels are compiled, workspaces allocated
        stream.synchronize()
        # Other threads of the process (NCCL's watchdog, say) may call CUDA meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            out = body()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, out
