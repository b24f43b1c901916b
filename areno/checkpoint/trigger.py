"""When a checkpoint or an evaluation is due: every so many steps, epochs or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from areno.config.run import FrequencyConfig


class Trigger:
    """Says when something with a FrequencyConfig is due. Steps count from 1. clock: gives the time in seconds."""

    def __init__(self, config: FrequencyConfig, clock: Callable[[], float] = time.monotonic):
        self.config, self._clock = config, clock
        self.epochs_ended = 0
        self._last = clock()

    def due(self, step: int, epoch_ended: bool = False) -> bool:
        """Whether it is due after this step. Ask once per step. epoch_ended: the step was the last of an epoch."""
        now, config = self._clock(), self.config
        self.epochs_ended += epoch_ended
        is_due = (
            (config.freq_steps is not None and step % config.freq_steps == 0)
            or (config.freq_epochs is not None and epoch_ended and self.epochs_ended % config.freq_epochs == 0)
            or (config.freq_secs is not None and now - self._last >= config.freq_secs)
        )
        if is_due:
            self._last = now
        return is_due

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to keep the rhythm. The time between the two runs does not count."""
        return {"epochs_ended": self.epochs_ended, "seconds_since_last": self._clock() - self._last}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a `state_dict`."""
        self.epochs_ended = int(state["epochs_ended"])
        self._last = self._clock() - state["seconds_since_last"]
