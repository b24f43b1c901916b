"""Which checkpoints are the best and which of them stay: their values of saver.best_metric, by step."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from areno.config.run import SaverConfig
from areno.errors import did_you_mean

logger = logging.getLogger("areno.saver")


class Ranking:
    """The value of the metric at each step that was saved; None where there is none, or it was not finite."""

    def __init__(self, config: SaverConfig):
        self.config = config
        self.mode = config.best_mode or ("min" if (config.best_metric or "").endswith("loss") else "max")
        self.values: dict[int, float | None] = {}
        self._last: tuple[int, float | None] = (-1, None)  # the last step that had a value, saved or not
        self._names: set[str] = set()  # of all scalars so far
        self._told = False

    def note(self, step: int, scalars: Mapping[str, float]) -> bool:
        """Take the metric from scalars of a step. Whether a checkpoint got a value."""
        self._names |= scalars.keys()
        metric = self.config.best_metric
        if metric is None or metric not in scalars:
            return False
        value = float(scalars[metric])
        self._last = (step, value if math.isfinite(value) else None)
        if step in self.values:
            self.values[step] = self._last[1]
        return step in self.values

    def add(self, step: int) -> None:
        """A checkpoint of this step is being saved. Its value may be there already, or come later in the step."""
        self.warn_of_wrong_name()
        self.values[step] = self._last[1] if self._last[0] == step else None

    def warn_of_wrong_name(self) -> None:
        """Say once that a checkpoint is there without the metric. To be called when its step is over."""
        metric = self.config.best_metric
        if metric is not None and self.values and metric not in self._names and not self._told:
            self._told = True
            hint = did_you_mean(metric, self._names, "; there are " + ", ".join(sorted(self._names)))
            logger.warning("saver.best_metric: no step has recorded %s, so no checkpoint is the best%s", metric, hint)

    def best(self, steps: Iterable[int]) -> list[int]:
        """Those of `steps` that have a value, the best first; of equal ones the earliest."""
        sign = -1 if self.mode == "max" else 1
        valued = [(sign * value, step) for step in steps if (value := self.values.get(step)) is not None]
        return [step for _, step in sorted(valued)]

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Those of the saved `steps` that stay. All of them as long as none has a value, though there is a metric."""
        known = sorted(step for step in steps if step in self.values)
        best = self.best(known)
        if self.config.keep is None or (self.config.best_metric is not None and not best):
            return set(known)
        return {*known[-self.config.keep :], *best[: self.config.keep_best]}

    def text(self, best: int | None) -> str:
        """The content of metrics.json."""
        record = {
            "best_metric": self.config.best_metric,
            "best_mode": self.mode,
            "best_step": best,
            "values": {str(step): value for step, value in sorted(self.values.items())},
        }
        return json.dumps(record, indent=2) + "\n"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to rank as this one would have."""
        return {"values": [[step, value] for step, value in self.values.items()], "last": list(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.values = dict(state["values"])
        self._last = (state["last"][0], state["last"][1])
