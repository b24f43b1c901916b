"""The registry of algorithms: those of installed packages, areno's own five among them, and those that files register.

An algorithm is a configuration class and a loop. The class says which loss and which advantages its settings describe;
an Algorithm may bring others. A file of your own registers one and runs it, as examples/algorithms does:

    ALGORITHM = register_algorithm(Algorithm(name="mine", config=MyConfig, loop="policy_only", loss_fn=my_loss))
    if __name__ == "__main__":
        run_algorithm(ALGORITHM)  # of areno.launch

A package makes its algorithms known by entry points of the group "areno.algorithms", name = "module:ALGORITHM".
Nothing here imports torch: `--help` and `--cfg job` of such a file answer at once, as long as it does not either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from areno.config.experiments import (
    CriticExperimentConfig,
    ExperimentConfig,
    LossFn,
    PolicyExperimentConfig,
    PreferenceExperimentConfig,
    SupervisedExperimentConfig,
)
from areno.errors import ConfigError, Problem

_LOOPS: dict[str, tuple[str, str, type[ExperimentConfig]]] = {  # module, class, and the configuration that it reads
    "sft": ("areno.api.trainers.sft", "SFTTrainer", SupervisedExperimentConfig),
    "dpo": ("areno.api.trainers.dpo", "DPOTrainer", PreferenceExperimentConfig),
    "policy_only": ("areno.api.trainers.policy_only", "PolicyOnlyTrainer", PolicyExperimentConfig),
    "ppo": ("areno.api.trainers.ppo", "PPOTrainer", CriticExperimentConfig),
}
_registered: dict[str, Algorithm] = {}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a policy is trained.

    config: its experiment dataclass, a subclass of the one that the loop reads. default: its default --config-name.
    loop: which loop of areno.api.trainers runs it. "policy_only" samples groups and needs no critic, "ppo" adds one;
    "sft" and "dpo" train on rows as they are.
    loss_fn: configuration -> loss function (pack, logprobs) -> (loss, stats), see areno.loss_fns. None: the one that
    the configuration describes, config.loss_fn().
    advantage_fn: see AdvantageFn in areno.api.trainers.rows. None: the configuration's own, config.advantages().
    roles: models beside the actor that must be configured, such as "ref", whose log-probabilities the rows then carry.
    """

    name: str
    config: type[ExperimentConfig]
    loop: Literal["sft", "dpo", "policy_only", "ppo"]
    default: str = "quickstart"
    loss_fn: Callable[[Any], LossFn] | None = None
    advantage_fn: Callable[..., Any] | None = None
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.loop not in _LOOPS:
            raise ValueError(f"loop is {self.loop!r}; expected one of {', '.join(_LOOPS)}")
        needed = _LOOPS[self.loop][2]
        if not issubclass(self.config, needed):
            expected = f"loop {self.loop} needs {needed.__name__} or a subclass of it"
            raise ValueError(f"config is {self.config.__name__}; {expected}")
        if self._trains_on_rows and (self.loss_fn or self.advantage_fn):
            raise ValueError(f"loop {self.loop} takes the loss from its configuration; define loss_fn in the class")
        if self.loss_fn is None and self.config.loss_fn is ExperimentConfig.loss_fn:
            raise ValueError(f"{self.config.__name__} describes no loss; define loss_fn in the class, or give loss_fn")

    @property
    def _trains_on_rows(self) -> bool:
        return self.loop in ("sft", "dpo")

    def trainer(self, config: Any, run_dir: str | Path | None = None, **given: Any) -> Any:
        """The loop, ready for `fit()`. `given`: rows and functions of a script: train_dataset=, reward_fn=, ..."""
        missing = [role for role in self.roles if vars(config).get(role) is None]
        if missing:
            said = "is null, but {} needs it; add {}=default"
            raise ConfigError(Problem(role, said, self.name, role) for role in missing)
        module, name, _ = _LOOPS[self.loop]
        loop = vars(import_module(module))[name]
        if self._trains_on_rows:
            return loop(config, run_dir=run_dir, **given)
        return loop(config, self.make_loss(config), run_dir=run_dir, advantage_fn=self.advantage_fn, **given)

    def make_loss(self, config: Any) -> LossFn:
        """The loss function of a run with this configuration."""
        return config.loss_fn() if self.loss_fn is None else self.loss_fn(config)

    def run(self, config: Any, run_dir: Path) -> float:
        """Run one experiment; its objective."""
        with self.trainer(config, run_dir) as trainer:
            return trainer.fit()


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known by its name, and return it. ValueError for a name that an installed package has."""
    if algorithm.name in _installed():
        raise ValueError(f"{algorithm.name} comes with areno or another package; give the algorithm another name")
    _registered[algorithm.name] = algorithm
    return algorithm


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of a name. ConfigError where there is none."""
    if name in _registered:
        return _registered[name]
    found = _installed()
    if not found:
        message = f"there is no algorithm {name!r}: areno is on Python's path, but it is not installed"
        raise ConfigError(f"{message}; run `pip install -e .` in its folder")
    if name not in found:
        raise ConfigError(f"there is no algorithm {name!r}; there are {', '.join(algorithm_names())}")
    return found[name].load()


def algorithm_names() -> list[str]:
    """All that get_algorithm knows."""
    return [*_installed(), *sorted(_registered)]


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name. To look through all packages takes 25 ms."""
    return {entry.name: entry for entry in sorted(entry_points(group="areno.algorithms"))}
