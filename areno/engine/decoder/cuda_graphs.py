"""CUDA graphs for the forward passes of a decoder. Decode steps are padded to the next of a list of batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from areno.engine.decoder.attention_split import AttentionSplit
from areno.engine.device_memory import is_out_of_memory
from areno.kernels.sampling import SamplingFlags

DecodeBody = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], SamplingFlags], Tensor]
"""(rows (I, B), split_lens (2,), prefix groups (G, R) or None, splits, flags) -> (2, B) float64. Inputs are int64."""

GraphKey = tuple[int, "tuple[int, ...] | None", "tuple[int, int]", SamplingFlags]
"""Properties of a batch that a graph is captured for: batch size, shape of the prefix groups, splits, flags."""

_POWERS_UP_TO = 32


def capture_sizes(max_running: int) -> list[int]:
    """Return the batch sizes of the CUDA graphs: 1, 2, 4, ..., 32, then multiples of 32, and last `max_running`."""
    sizes = [1 << i for i in range(_POWERS_UP_TO.bit_length()) if 1 << i < max_running]
    sizes += range(2 * _POWERS_UP_TO, max_running, _POWERS_UP_TO)
    return [*sizes, max_running]


def draft_capture_sizes(max_running: int) -> list[int]:
    """Return the batch sizes of CUDA graphs for steps with drafts. Each draft length has graphs of these sizes."""
    return [*(1 << i for i in range((max_running - 1).bit_length())), max_running]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which all CUDA graphs of a device are captured.

    PyTorch keeps a workspace of cuBLAS (32 MiB on an H100) for each stream that has run a matrix product. If each
    decoder had a stream, each would add a workspace. Two threads of a process must not capture on one device at the
    same time.
    """
    return torch.cuda.Stream(device)


class GraphCapturer:
    """Captures functions as CUDA graphs, which share one memory pool.

    Graphs can share memory because they are replayed one after the other. Only their outputs must outlive a replay, and
    these stay referenced. With `may_fail`, a capture that runs out of memory raises no error. Set it only if no other
    rank takes part in the function, since other ranks would wait for this rank.
    """

    def __init__(self, device: torch.device, *, may_fail: bool):
        self.device, self._may_fail = device, may_fail
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    def capture(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor] | None:
        """Run `body`, then capture it. Returns its replay and its output, or None if memory ran out and `may_fail`."""
        try:
            return self._capture_graph(body)
        except RuntimeError as error:
            if not self._may_fail or not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # here, where no traceback refers to the tensors of the body
        return None

    def _capture_graph(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        # Begin and end by hand: torch.cuda.graph would give the allocator's memory back each time, which takes longer
        # than the capture.
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                body()  # outside the capture first: kernels are compiled, workspaces allocated
                self._stream.synchronize()
                # Other threads of the process (NCCL's watchdog, say) may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = body()
                except BaseException:
                    with suppress(RuntimeError):  # an error of the end would hide that of the body
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            current.wait_stream(self._stream)
        return graph.replay, out


Key = TypeVar("Key", bound=Hashable)


class GraphCache(Generic[Key]):
    """Runs passes as CUDA graphs, one for each key.

    With `at_once`, the first pass with a key is captured, otherwise the second. A capture takes as long as many passes.
    """

    def __init__(self, captures: GraphCapturer, *, at_once: bool):
        self._captures, self._at_once = captures, at_once
        self._graphs: dict[Key, tuple[Callable[[], None], Tensor, Tensor] | None] = {}  # replay, inputs, output
        self._seen: set[Key] = set()
        self.n_replays = 0

    def pinned_memory(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int64, pin_memory=self._captures.device.type == "cuda")

    def run(
        self, key: Key, packed: Tensor, body: Callable[[Tensor], Tensor], idle: Callable[[], np.ndarray] | None = None
    ) -> Tensor:
        """Run `body` on the inputs, as a CUDA graph if possible. The next call overwrites the result.

        `packed` has all inputs, in memory from `pinned_memory`. A capture runs `body` on the result of
        `padding_inputs`: inputs with which `body` changes no state. If `padding_inputs` is None, a capture runs `body`
        several times on the real inputs.
        """
        device = self._captures.device
        if key not in self._graphs and (self._at_once or key in self._seen):
            inputs = (packed if idle is None else torch.from_numpy(idle())).to(device, copy=True)
            graph = self._captures.capture(lambda: body(inputs))
            self._graphs[key] = None if graph is None else (graph[0], inputs, graph[1])
        self._seen.add(key)
        found = self._graphs.get(key)
        if found is None:  # the first one, or there was no memory for a graph
            return body(packed.to(device, non_blocking=True))
        replay, inputs, out = found
        inputs.copy_(packed, non_blocking=True)
        replay()
        self.n_replays += 1
        return out


class DecodeGraphs:
    """Runs decode steps as CUDA graphs, one for each kind of batch.

    Batches are of the same kind if they agree in padded batch size, shape of the shared-prefix groups, numbers of
    splits and sampling flags. The decode step may read only its arguments, and tensors whose memory never moves. The
    weights are such tensors, because training updates them in place. So a graph stays valid for the whole run.
    `padding` has the inputs of a padding row, which uses the scratch slot.
    """

    def __init__(self, body: DecodeBody, sizes: Sequence[int], padding: Sequence[int], captures: GraphCapturer):
        self._body, self._sizes, self.most = body, sizes, sizes[-1]
        self._padding = np.array(padding, dtype=np.int64)[:, None]
        self.graphs = GraphCache[GraphKey](captures, at_once=True)

    def captured_size_for(self, n_rows: int) -> int:
        return next(size for size in self._sizes if size >= n_rows)

    def run(self, rows: np.ndarray, split: AttentionSplit, flags: SamplingFlags) -> Tensor:
        """Pad the batch to the next of `sizes`, and run the decode step. The next call overwrites the result."""
        (n_inputs, n_rows), groups = rows.shape, split.prefix_groups_GR
        size = self.captured_size_for(n_rows)
        end, group_shape, splits = 2 + n_inputs * size, None if groups is None else groups.shape, split.splits
        host = self.graphs.pinned_memory(end + (0 if groups is None else groups.size))
        packed = host.numpy()
        packed[:2] = split.split_lens
        columns = packed[2:end].reshape(n_inputs, size)
        columns[:, :n_rows] = rows
        columns[:, n_rows:] = self._padding
        if groups is not None:
            packed[end:] = groups.ravel()

        def body(inputs: Tensor) -> Tensor:
            prefix_groups_GR = None if group_shape is None else inputs[end:].view(group_shape)
            return self._body(inputs[2:end].view(n_inputs, size), inputs[:2], prefix_groups_GR, splits, flags)

        def padding_inputs() -> np.ndarray:
            of_rows = self._padding.repeat(size, 1).ravel()
            return np.concatenate((np.ones(2, np.int64), of_rows, np.full(len(packed) - end, -1, dtype=np.int64)))

        return self.graphs.run((size, group_shape, splits, flags), host, body, padding_inputs)[:, :n_rows]
