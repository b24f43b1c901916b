"""The layout of a run: which rank holds which shard of which copy of the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from areno.errors import Key, Problem


@dataclass(frozen=True)
class Layout:
    """How the ranks of an engine hold copies of a model: the sizes of tensor, data and context parallelism.

    Rank r holds shard r % tp_size of copy r // tp_size. So the ranks of a copy are consecutive. The first rank of a
    copy is the copy's leader.

    Attributes:
        world_size: Number of ranks. Each rank has one device.
        tp_size: Number of ranks that share one copy of the model (tensor parallel).
        cp_size: Number of consecutive copies that train each row together (context parallel).
    """

    world_size: int = 1
    tp_size: int = 1
    cp_size: int = 1

    @classmethod
    def single_replica(cls, n_ranks: int) -> Layout:
        """Return the layout of a single copy of a model, sharded over `n_ranks` ranks."""
        return cls(n_ranks, n_ranks)

    def samples_per_replica(self, n_samples: int) -> int:
        """Return the most samples that one copy of the model decodes if `n_samples` are divided among the copies."""
        return max(1, -(-n_samples // self.dp_size))

    @property
    def dp_size(self) -> int:
        """Number of copies of the model."""
        return self.world_size // self.tp_size

    @property
    def n_data_parallel_groups(self) -> int:
        """Number of groups of `cp_size` copies. Each group trains different rows (data parallel)."""
        return self.dp_size // self.cp_size

    @property
    def is_sharded(self) -> bool:
        """Whether each copy of the model is sharded over several ranks."""
        return self.tp_size > 1

    @property
    def leaders(self) -> range:
        """The first rank of each copy."""
        return range(0, self.world_size, self.tp_size)

    def replica_and_shard(self, rank: int) -> tuple[int, int]:
        """Return (index of the copy, index of the shard) that a rank holds."""
        return divmod(rank, self.tp_size)

    def replica_ranks(self, rank: int) -> range:
        """Return all ranks that hold the same copy of the model as `rank`, including `rank` itself."""
        leader = rank - rank % self.tp_size
        return range(leader, leader + self.tp_size)

    def share_rounded_down(self, total: int) -> int:
        """Return one rank's share, rounded down, if the ranks of a copy divide `total` heads, rows or bytes."""
        return total // self.tp_size

    def share_rounded_up(self, total: int) -> int:
        """Return one rank's share, rounded up, if the ranks of a copy divide `total` heads, rows or bytes."""
        return -(-total // self.tp_size)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if `tp_size` does not divide the ranks, or `cp_size` does not divide the copies."""
        world_size = Key("engine.world_size")
        if self.world_size % self.tp_size:
            text = "is {}, which does not divide the number of devices, {} ({})"
            yield Problem("tp_size", text, self.tp_size, self.world_size, world_size)
        elif self.dp_size % self.cp_size:
            text = "is {}, which does not divide the {} copies of the model on {} devices ({}, {})"
            args = (self.cp_size, self.dp_size, self.world_size, world_size, Key("engine.tp_size"))
            yield Problem("cp_size", text, *args)


ALONE = Layout()
"""The layout of an engine with one rank."""
