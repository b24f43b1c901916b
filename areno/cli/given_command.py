"""The command of a run that follows the options of `areno plan` and `areno check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from areno.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from areno.api.algorithms import Algorithm
    from areno.launch.compose import Composition


@dataclass(frozen=True)
class GivenCommand:
    algorithm: Algorithm
    config_name: str
    config_dir: Path | None
    settings: list[str]  # as key=value
    names: dict[str, str] = field(default_factory=dict)  # setting -> flag that the user gave it by

    def compose(self) -> Composition:
        from areno.launch.compose import HydraSession

        how = {"config_dir": self.config_dir, "names": self.names}
        with HydraSession(self.algorithm.config, self.config_name, self.settings, **how) as session:
            return session.compose()


def split_command(words: Sequence[str], own: str, complete: bool = False) -> GivenCommand:
    """Read the command of a run as it reads its own arguments. `own` is the subcommand of areno, for messages.

    Accepts `areno train ...`, `python -m areno.recipes.NAME ...`, `NAME ...` and the flags of `areno train` alone.
    With `complete`, flags that leave out the data or the reward are an error.
    """
    from areno.api.algorithms import algorithm_names, get_algorithm
    from areno.cli import train, train_flags
    from areno.files.paths import absolute_or_none
    from areno.launch.command import options_of

    left = [word for word in words if word != "--"]
    left = left[1:] if left[:1] == ["areno"] else left
    if left[:1] and Path(left[0]).name.startswith("python") and left[1:2] == ["-m"]:
        left = [left[2].removeprefix("areno.recipes."), *left[3:]] if len(left) > 2 else []
    if left and not left[0].startswith("-") and "=" not in left[0] and left[0] != "train":
        names = algorithm_names()
        if left[0] not in names:
            is_model = "/" in left[0] and not did_you_mean(left[0], names)
            meant = f"; did you mean --ckpt {left[0]}?" if is_model else did_you_mean(left[0], [*names, "train"])
            text = f"there is no {left[0]!r}{meant}; expected `areno train ...`, "
            raise ConfigError(
                Problem("COMMAND", text + "`python -m areno.recipes.gspo ...` or the flags of areno train")
            )
        algorithm = get_algorithm(left[0])
        return GivenCommand(algorithm, *options_of(f"areno {own} {left[0]}", left[1:], algorithm))
    parser = argparse.ArgumentParser(prog=f"areno {own}", allow_abbrev=False)
    train.add_arguments(parser)
    parsed, others = parser.parse_known_intermixed_args(left[1:] if left[:1] == ["train"] else left)
    if others:
        raise ConfigError(train_flags.unknown_flags(parser, others))
    algorithm, settings, names_of = train.settings_of(parsed, complete)
    return GivenCommand(algorithm, parsed.config_name, absolute_or_none(parsed.config_dir), settings, names_of)
