"""CUDA graphs on a CPU: a replay computes the function again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from areno.engine.decoder.cuda_graphs import GraphCapturer


class CpuCaptures(GraphCapturer):
    """Captures up to `room` graphs, then runs out of memory."""

    def __init__(self, room: int = 1000, *, may_fail: bool = True):
        self.device, self._may_fail, self.room, self.n_captured = torch.device("cpu"), may_fail, room, 0

    def _capture_graph(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        body()
        if self.n_captured >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.n_captured += 1
        out = body()

        def replay() -> None:
            out.copy_(body())

        return replay, out
