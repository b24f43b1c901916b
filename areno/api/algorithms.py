"""The registry of algorithms: those of installed packages, areno included, and those that a user's script registers.

An Algorithm consists of a configuration class and a training loop. The configuration class defines the loss and the
advantages. An Algorithm can replace either with a function of its own. A script registers its algorithm and runs it, as
examples/algorithms does:

    ALGORITHM = register_algorithm(
        Algorithm(name="mine", config=MyConfig, loop=lambda: areno.PolicyOnlyTrainer, loss_fn=my_loss)
    )
    if __name__ == "__main__":
        run_algorithm(ALGORITHM)  # imported from areno.launch

A package declares its algorithms as entry points of the group "areno.algorithms", in the form `name =
"module:ALGORITHM"`. In a checkout of areno that is not installed, the entry points are read from pyproject.toml.

This module does not import torch, so that `--help` and `--cfg job` respond fast. A user's script should not import
torch at its top level either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.experiments import ExperimentConfig, LossFn, RowExperimentConfig
from areno.errors import ArenoError, ConfigError, Problem
from areno.files.paths import data_root, read_if_exists

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_GROUP = "areno.algorithms"
_PACKAGE = f"{__name__.partition('.')[0]}."
registered: dict[str, Algorithm] = {}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A training algorithm: a configuration class, a training loop and a loss.

    Attributes:
        name: The name of the algorithm for `--algo` and get_algorithm.
        config: The configuration class. It must be the class that the training loop expects, or a subclass of that
            class.
        loop: Imports and returns the class of the training loop. It is a function so that `--help` need not load torch.
            PolicyOnlyTrainer samples groups of completions and needs no critic, PPOTrainer adds a critic, the others
            train on rows of a dataset.
        default: The name of the configuration file that is used if --config-name is not given.
        loss_fn: Function (config) -> loss function, where the loss function is `(pack, logprobs) -> (loss, stats)`, see
            areno.loss_fns. None uses the loss of the configuration, `config.loss_fn()`.
        advantage_fn: Function (rows, group id of each row, actor settings) that computes advantages, see AdvantageFn in
            areno.trainers.rows. None uses `config.advantages()`.
        roles: Models other than the actor that must be configured, such as "ref", the reference model whose
            log-probabilities the loss uses.
        file: The script that defines the algorithm. None for an installed algorithm. run_algorithm sets this field, and
            a run records it, so that `areno evaluate` and `areno replay` find the algorithm.
    """

    name: str
    config: type[ExperimentConfig]
    loop: Callable[[], type[Any]]
    default: str = "quickstart"
    loss_fn: Callable[[Any], LossFn] | None = None
    advantage_fn: Callable[..., Any] | None = None
    roles: tuple[str, ...] = ()
    file: Path | None = None

    def __post_init__(self) -> None:
        if not callable(self.loop) or isinstance(self.loop, type):
            example = "a function that returns the class of a loop is expected, such as lambda: areno.PolicyOnlyTrainer"
            raise ValueError(f"loop is {self.loop!r}; {example}")
        if not issubclass(self.config, ExperimentConfig):
            raise ValueError(f"config is {self.config.__name__}; a subclass of ExperimentConfig is expected")
        if self._trains_on_rows and (self.loss_fn or self.advantage_fn):
            name = self.config.__name__
            raise ValueError(f"config is {name}, which brings its own loss; define loss_fn in the class instead")
        if self.loss_fn is None and self.config.loss_fn is ExperimentConfig.loss_fn:
            raise ValueError(f"{self.config.__name__} describes no loss; define loss_fn in the class, or give loss_fn")

    @property
    def _trains_on_rows(self) -> bool:
        return issubclass(self.config, RowExperimentConfig)

    def trainer(self, config: Any, run_dir: str | Path | None = None, **given: Any) -> Any:
        """Construct the training loop, ready for `fit()`. Close it, or use it as a context manager.

        Args:
            run_dir: The folder of logs, rollouts and checkpoints. None resumes or makes a folder under
                cluster.fileroot.
            given: Keyword arguments that a script passes to the loop: train_dataset, valid_dataset and trackers. Loops
                that use rewards also take reward_fn.

        Raises:
            ConfigError: A model in `roles` is null in the configuration, or `config` is not an instance of the class
                that the loop expects.
        """
        missing = [role for role in self.roles if vars(config).get(role) is None]
        if missing:
            said = "is null, but {} needs it; add {}=default"
            raise ConfigError(Problem(role, said, self.name, role) for role in missing)
        loop = self.loop()
        if self._trains_on_rows:
            return loop(config, run_dir=run_dir, **given)
        return loop(config, self.make_loss(config), run_dir=run_dir, advantage_fn=self.advantage_fn, **given)

    def make_loss(self, config: Any) -> LossFn:
        """Return the loss function for a run, from `loss_fn` if it is set, otherwise from `config.loss_fn()`."""
        return config.loss_fn() if self.loss_fn is None else self.loss_fn(config)

    def run(self, config: Any, run_dir: Path) -> float:
        """Train once from start to end, and return the objective that `fit()` returns."""
        with self.trainer(config, run_dir) as trainer:
            return trainer.fit()


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Add an algorithm to the registry of this process, and return it. It replaces an earlier one of the same name.

    Raises ValueError if areno or another installed package already has an algorithm with this name.
    """
    if algorithm.name in algorithm_entry_points():
        raise ValueError(f"{algorithm.name} comes with areno or another package; give the algorithm another name")
    registered[algorithm.name] = algorithm
    return algorithm


def get_algorithm(name: str) -> Algorithm:
    """Return a registered algorithm, or import an installed one, such as "grpo".

    Raises ConfigError for an unknown name.
    """
    if name in registered:
        return registered[name]
    found = algorithm_entry_points()
    if not found:
        message = f"there is no algorithm {name!r}: areno is on Python's path, but it is not installed"
        raise ConfigError(f"{message}; run `pip install -e .` in its folder")
    if name not in found:
        raise ConfigError(f"there is no algorithm {name!r}; there are {', '.join(algorithm_names())}")
    return found[name].load()


def algorithm_of(folder: Path) -> Algorithm:
    """Return the algorithm with which a run was made.

    If the algorithm is not installed, it is imported from the user's file that the run recorded.
    """
    from areno.files.user_code import load_module
    from areno.tracking.run_folder import recipe_of, script_of

    name, script = recipe_of(folder), script_of(folder)
    if name in algorithm_names():
        return get_algorithm(name)
    if not name:
        raise ArenoError("{} does not say which algorithm it is a run of", folder)
    if script:
        defined = vars(load_module(script, f"the algorithm {name} of {folder}")).values()
        for found in defined:
            if isinstance(found, Algorithm) and found.name == name:
                return replace(found, file=Path(script))
    where = f"which is not in {script}" if script else "which is not installed"
    raise ArenoError("{} is a run of {}, {}", folder, name, where)


def algorithm_names() -> list[str]:
    """Return the names that get_algorithm accepts: first installed algorithms, then registered ones, each sorted."""
    return [*algorithm_entry_points(), *sorted(registered)]


def built_in_algorithms() -> list[str]:
    """Return the names of the algorithms that are part of areno, in alphabetical order."""
    return [name for name, entry in algorithm_entry_points().items() if entry.value.startswith(_PACKAGE)]


@cache
def algorithm_entry_points() -> dict[str, EntryPoint]:
    """Return {name: entry point} of the algorithms of all installed packages, areno included.

    The result is cached, since the search takes 25 ms.
    """
    from importlib.metadata import entry_points  # this import takes as long as all settings of a run

    found = [*entry_points(group=_GROUP)]
    if not any(entry.value.startswith(_PACKAGE) for entry in found):
        found += _entry_points_of_checkout()
    return {entry.name: entry for entry in sorted(found)}


def _entry_points_of_checkout() -> list[EntryPoint]:
    """Return the entry points that pyproject.toml declares, if areno is used from a source checkout. Otherwise []."""
    from importlib.metadata import EntryPoint

    text = (read_if_exists(data_root() / "pyproject.toml") or b"").decode()
    # Python 3.10 has no TOML parser. This section has only lines of the form `name = "module:ALGORITHM"`.
    _, _, rest = text.partition(f'[project.entry-points."{_GROUP}"]\n')
    pairs = [line.partition("=") for line in rest.partition("\n[")[0].splitlines() if "=" in line]
    return [EntryPoint(name.strip(), value.strip().strip('"'), _GROUP) for name, _, value in pairs]
