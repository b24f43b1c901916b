"""How far each worker is, in memory that workers share with the process that started them.

To count takes no message and no system call. Counters of another machine are copied to the driver about once a second.
"""

from __future__ import annotations

from typing import Any

from areno import heartbeat

# For each rank: parts of its work, commands that it has done, whether it decodes.
_BEATS, _DONE, _DECODES = range(3)
FIELDS = 3


class Pulses:
    """The driver's view. It counts the commands that it sends, and looks at what each rank counts.

    counters: FIELDS numbers for each rank. together: the driver waits for an answer of every rank, so they may wait for
    each other.
    """

    def __init__(self, counters: Any, world_size: int, tp_size: int):
        self.counters = counters
        self.world_size, self._tp_size = world_size, tp_size
        self._sent = [1] * world_size  # to the leader of each rank; the start is a command, too
        self._commands = ["start"] * world_size  # the last one
        self.together = True

    def sent(self, leader: int, command: str) -> None:
        """The leader of a tensor-parallel group gets a command, which it passes on."""
        for rank in range(leader, leader + self._tp_size):
            self._sent[rank] += 1
            self._commands[rank] = command

    def is_due(self, rank: int) -> bool:
        """Whether it has something to do."""
        leader = rank - rank % self._tp_size  # it alone knows: others wait for it between two steps
        return self._is_asked(rank) or bool(self.counters[FIELDS * leader + _DECODES])

    def _is_asked(self, rank: int) -> bool:
        return self.counters[FIELDS * rank + _DONE] < self._sent[rank]

    def progress(self, rank: int) -> list[int]:
        """Changes whenever the rank gets on."""
        return self.counters[FIELDS * rank : FIELDS * (rank + 1)]

    def command(self, rank: int) -> str:
        """What it does, or should be doing."""
        return self._commands[rank] if self._is_asked(rank) else "decoding"


class Pulse:
    """The view of one worker, whose beats count there from now on."""

    def __init__(self, counters: Any, rank: int):
        self._counters, self._at = counters, FIELDS * rank
        heartbeat.count_in(counters, self._at + _BEATS)

    def has_done(self, decodes: bool) -> None:
        """One more command is done. decodes: there is something to decode now."""
        self.decodes(decodes)
        self._counters[self._at + _DONE] += 1

    def decodes(self, decodes: bool) -> None:
        """Whether there is something left to decode, and nobody else holds it up."""
        self._counters[self._at + _DECODES] = decodes
