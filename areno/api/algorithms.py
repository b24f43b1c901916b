"""The registry of algorithms: the five that come with areno, and those that users bring.

An algorithm is a configuration class, a loop, and what the loop calls: a loss, advantages, and the models it needs.
A file of one's own registers one and runs it, as examples/algorithms does:

    ALGORITHM = register_algorithm(Algorithm(name="mine", config=MyConfig, loop="policy_only", loss_fn=my_loss))
    if __name__ == "__main__":
        run_algorithm(ALGORITHM)

Nothing here imports torch: `--help` and `--cfg job` of such a file answer at once, as long as it does not either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

from areno.config.experiments import DPOConfig, ExperimentConfig, PolicyExperimentConfig, PPOConfig, SFTConfig
from areno.errors import ConfigError, Problem

BUILT_IN = ("sft", "dpo", "grpo", "gspo", "ppo")  # each a module of areno.recipes, with its ALGORITHM
_LOOPS: dict[str, tuple[str, str, type[ExperimentConfig]]] = {  # module, class, and what that has to be told
    "sft": ("areno.api.trainers.sft", "SFTTrainer", SFTConfig),
    "dpo": ("areno.api.trainers.dpo", "DPOTrainer", DPOConfig),
    "policy_only": ("areno.api.trainers.policy_only", "PolicyOnlyTrainer", PolicyExperimentConfig),
    "ppo": ("areno.api.trainers.ppo", "PPOTrainer", PPOConfig),
}
_registered: dict[str, Algorithm] = {}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a policy is trained.

    config: its experiment dataclass, that of the loop or a subclass of it. default: the --config-name it falls back to.
    loop: which loop of areno.api.trainers runs it: "policy_only" samples groups and needs no critic, "ppo" adds one;
    "sft" and "dpo" train on rows as they are and have a loss of their own.
    loss_fn: configuration -> loss function (pack, logprobs) -> (loss, stats), see areno.loss_fns.
    advantage_fn: see AdvantageFn in areno.api.policy_run; None is the loop's own.
    roles: models beside the actor that must be configured, such as "ref", whose log-probabilities the rows then carry.
    """

    name: str
    config: type[ExperimentConfig]
    loop: Literal["sft", "dpo", "policy_only", "ppo"]
    default: str = "quickstart"
    loss_fn: Callable[[Any], Callable[..., Any]] | None = None
    advantage_fn: Callable[..., Any] | None = None
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.loop not in _LOOPS:
            raise ValueError(f"loop is {self.loop!r}; expected one of {', '.join(_LOOPS)}")
        if (self.loss_fn is None) != (self.loop in ("sft", "dpo")):
            raise ValueError(f"loop {self.loop} {'needs a loss' if self.loss_fn is None else 'has a loss of its own'}")
        needed = _LOOPS[self.loop][2]
        if not issubclass(self.config, needed):
            raise ValueError(
                f"config is {self.config.__name__}; loop {self.loop} needs {needed.__name__} or a subclass of it"
            )

    def trainer(self, config: Any, run_dir: str | Path | None = None, **given: Any) -> Any:
        """The loop, ready for `fit()`. `given`: what a script holds, such as train_dataset= and reward_fn=."""
        missing = [role for role in self.roles if getattr(config, role, None) is None]
        if missing:
            raise ConfigError(
                [Problem(role, f"is null, but {self.name} needs it; add {role}=default") for role in missing]
            )
        module, name, _ = _LOOPS[self.loop]
        loop = getattr(import_module(module), name)
        if self.loss_fn is None:
            return loop(config, run_dir=run_dir, **given)
        return loop(config, self.make_loss(config), run_dir=run_dir, advantage_fn=self.advantage_fn, **given)

    def make_loss(self, config: Any) -> Callable[..., Any]:
        """The loss function that the configuration describes. ConfigError for a loop with a loss of its own."""
        if self.loss_fn is None:
            raise ConfigError(f"the loss of {self.name} is part of its loop and not for others")
        return self.loss_fn(config)

    def run(self, config: Any, run_dir: Path) -> float:
        """Run one experiment; its objective."""
        with self.trainer(config, run_dir) as trainer:
            return trainer.fit()


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known by its name, and return it. ValueError for the name of one that comes with areno."""
    if algorithm.name in BUILT_IN:
        raise ValueError(f"{algorithm.name} comes with areno; give the algorithm another name")
    _registered[algorithm.name] = algorithm
    return algorithm


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of a name. ConfigError where there is none."""
    if name in BUILT_IN:
        return import_module(f"areno.recipes.{name}").ALGORITHM
    if name not in _registered:
        raise ConfigError(f"there is no algorithm {name!r}; there are {', '.join(algorithm_names())}")
    return _registered[name]


def algorithm_names() -> list[str]:
    """All that get_algorithm knows."""
    return [*BUILT_IN, *sorted(_registered)]


def algorithm_of(config: ExperimentConfig) -> Algorithm:
    """The algorithm whose configuration this is, a recipe before one that borrows its class. ConfigError for none."""
    for name in algorithm_names():
        algorithm = get_algorithm(name)
        if algorithm.config is type(config):
            return algorithm
    raise ConfigError(f"no registered algorithm is configured by {type(config).__name__}; give the trainer a loss_fn")


def check_config(config: Any, loop: str) -> None:
    """ConfigError for a configuration that the loop cannot read."""
    _, name, needed = _LOOPS[loop]
    if not isinstance(config, needed):
        raise ConfigError(f"config is a {type(config).__name__}; {name} needs a {needed.__name__}")
    if loop == "policy_only" and hasattr(config, "critic"):
        raise ConfigError(f"{type(config).__name__} is for PPOTrainer, not for {name}, which would not use its critic")


def loss_of(config: ExperimentConfig, loop: str) -> Callable[..., Any]:
    """The loss function that a configuration describes, for a trainer of this loop. ConfigError where there is none."""
    algorithm = algorithm_of(config)
    if algorithm.loop != loop:
        wanted, given = _LOOPS[algorithm.loop][1], _LOOPS[loop][1]
        raise ConfigError(f"{type(config).__name__} is for {wanted}, not for {given}")
    return algorithm.make_loss(config)


def run_algorithm(algorithm: Algorithm) -> NoReturn:
    """The command line of a recipe, for the algorithm of a file that is run as a script; ends the process."""
    from areno.config.command import Recipe, run

    sys.exit(run(Recipe.of(algorithm, f"python {sys.argv[0]}"), sys.argv[1:]))
