"""CUDA graphs: when a pass is captured, what a capture runs, and what happens if it runs out of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from areno.engine.decoder.attention_split import AttentionSplit, PrefixGroups
from areno.engine.decoder.cuda_graphs import DecodeGraphs, GraphCache, draft_capture_sizes
from areno.kernels.sampling import SamplingFlags
from tests.helpers.cpu_graphs import CpuCaptures

FLAGS = SamplingFlags()
SPLIT = AttentionSplit(np.zeros(3, np.int64), None, np.array([7, 9]), (1, 1), PrefixGroups([], 1, []))
SCRATCH = 100


class Steps:
    """Counts the passes of each slot, as a decode step changes what the next one reads."""

    def __init__(self, captures: CpuCaptures, *, at_once: bool):
        self.n_of_slot = torch.zeros(SCRATCH + 1, dtype=torch.int64)
        self.graphs = DecodeGraphs(self.body, [4, 8], (SCRATCH, 0, 0, 0), captures)
        self.graphs.graphs = GraphCache(captures, at_once=at_once)

    def body(self, rows: Tensor, split_lens: Tensor, groups: object, splits: object, flags: object) -> Tensor:
        assert rows.shape[1] in (4, 8)
        self.n_of_slot.index_add_(0, rows[0], torch.ones_like(rows[0]))
        return self.n_of_slot[rows[0]].double().repeat(2, 1)

    def run(self, *slots: int) -> list[float]:
        rows = np.zeros((4, len(slots)), np.int64)
        rows[0] = slots
        return self.graphs.run(rows, SPLIT, FLAGS)[0].tolist()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_capture_changes_no_row_and_waits_for_the_second_pass(at_once: bool) -> None:
    captures = CpuCaptures()
    steps, replays = Steps(captures, at_once=at_once), []
    for n in range(1, 4):
        assert steps.run(1, 5, 2) == [n, n, n]
        replays.append(steps.graphs.graphs.n_replays)
    assert replays == ([1, 2, 3] if at_once else [0, 1, 2])
    assert steps.run(*range(10, 17)) == [1] * 7  # of another size
    assert captures.n_captured == (2 if at_once else 1)


@pytest.mark.parametrize("at_once", [True, False])
def test_without_memory_for_a_graph_passes_go_on(at_once: bool) -> None:
    captures = CpuCaptures(room=1)
    steps = Steps(captures, at_once=at_once)
    for n in range(1, 4):
        assert steps.run(1, 5, 2) == [n, n, n]
    for n in range(1, 4):
        assert steps.run(*range(10, 17)) == [n] * 7
    assert captures.n_captured == 1
    captures.room = 10  # a size that had no memory is not tried again
    steps.run(*range(10, 17))
    assert captures.n_captured == 1


def test_other_errors_and_ranks_that_wait_for_this_one_end_the_run() -> None:
    def run(cache: GraphCache[int], body: object) -> None:
        cache.run(0, cache.pinned_memory(1), body)  # type: ignore[arg-type]

    with pytest.raises(torch.OutOfMemoryError):
        run(GraphCache(CpuCaptures(room=0, may_fail=False), at_once=True), lambda inputs: inputs)

    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="kernel image"):
        run(GraphCache(CpuCaptures(), at_once=True), fails)


def test_sizes() -> None:
    assert draft_capture_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert draft_capture_sizes(72) == [1, 2, 4, 8, 16, 32, 64, 72]
    assert draft_capture_sizes(1) == [1]
