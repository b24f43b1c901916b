"""Settings of going on with a run that was interrupted. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areno.config.run import FrequencyConfig
from areno.config.schema.fields import build_check, setting
from areno.errors import Key, Problem


@dataclass(kw_only=True)
class RecoverConfig(FrequencyConfig):
    """When the state of a run is written, and whether a run goes on from one. A run always writes one at its end."""

    mode: Literal["auto", "resume", "off"] = setting(
        "auto",
        help="auto goes on with the unfinished run of this trial_name, if there is one. resume is an error if there is "
        "none. off writes no states and never goes on. on is another word for auto, and disabled for off",
        aliases={"on": "auto", "disabled": "off"},
    )
    freq_epochs: int | None = setting(1, help="Every this many epochs", gt=0)
    freq_secs: float | None = setting(600.0, help="At the next step once this many seconds have passed", gt=0)
    keep: int = setting(2, help="How many of the newest states stay. While one is written, there is one more", gt=0)
    retries: int = setting(
        3,
        help="How often a run may start its workers again, after one was lost, and go on from the last state without "
        "an end of its process",
        ge=0,
    )

    no_save_optim: bool = setting(
        False,
        help="Leave the moments of the optimizers out of states, which then take 4 bytes per parameter. A run that "
        "goes on from one begins with moments of zero; its learning-rate schedule goes on",
    )
    no_load_optim: bool = setting(
        False,
        help="When a run goes on from a state, begin with moments of zero, whatever the state holds. The learning-rate "
        "schedule goes on",
    )

    @build_check
    def states_that_are_not_written(self) -> Iterator[Problem]:
        for name in vars(self) if self.mode == "off" else ():
            if name != "mode" and not self.is_default(name):
                yield Problem(name, "is {}, but {} is off", vars(self)[name], Key("recover.mode"))
