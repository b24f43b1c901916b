"""The base class of packages of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from areno.errors import ConfigError, Problem, did_you_mean

T = TypeVar("T")
RunAgent = Callable[[Any, Any], Awaitable[Any]]
RewardFn = Callable[[Any], Any]
TRAIN, TEST = "train", "test"
SIZES = {TRAIN: 1000, TEST: 100}
"""Default numbers of rows of packages that make as many as asked for."""


class LazyRows:
    """Base class of rows that are made when they are read. They have areno's form, so only the first is checked."""

    fingerprint: str
    """Text that changes if the rows change."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Make a row. It depends on nothing but the index and what the fingerprint holds."""
        raise NotImplementedError


Rows = Sequence[Any] | LazyRows


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine. The caller may be in an event loop, as code of a notebook is."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class EnvironmentPackage:
    """An environment of a package, which settings name as SCHEME:NAME. A subclass describes the package.

    `train_dataset.path` takes rows from it, `agent.fn` an agent and `reward.fn` a reward. The class is used in the
    driver, in agent processes and in reward processes. So its module imports the package only in methods.

    Attributes:
        scheme: The text before the colon.
        distribution: Name of the package on the index. "": none is needed.
        versions: The supported versions, such as ">=0.1.25,<0.2".
        extra: The extra of areno that installs the package.
        excludes: Schemes whose packages cannot be installed beside this one, with the reason.
        has_agent: Whether `agent` returns an agent. It is the default of agent.fn for rows of this package.
        needs_agent: Whether its rows are for an agent or a program that the user names.
        takes_groups: Whether the agent can take all samples of a prompt in one call (agent.whole_group).
        gives_reward: Whether `reward` returns a reward. It is the default of reward.fn for rows of this package.
        name: The text after the colon.
        key: The setting that names the environment, for errors.
    """

    scheme: ClassVar[str]
    distribution: ClassVar[str] = ""
    versions: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    excludes: Mapping[str, str] = MappingProxyType({})
    has_agent: ClassVar[bool] = False
    needs_agent: ClassVar[bool] = False
    takes_groups: ClassVar[bool] = False
    gives_reward: ClassVar[bool] = False

    def __init__(self, name: str, key: str):
        self.name, self.key = name, key

    @property
    def spec(self) -> str:
        """SCHEME:NAME, as in the setting."""
        return f"{self.scheme}:{self.name}"

    def check(self) -> None:
        """Check that the package is installed and has the environment. The driver calls this before anything starts.

        Raises:
            ConfigError: The package is missing or of another version, or the environment cannot be used.
        """
        self.check_installed()

    def rows(self, split: str, options: Mapping[str, Any]) -> Rows:
        """Return the rows of a split.

        Args:
            split: The setting `split`, such as "train".
            options: The entries of dataset_kwargs.

        Returns:
            Rows in areno's form, or LazyRows.

        Raises:
            ConfigError: There is no such split or option, or the package has no rows.
        """
        raise ConfigError(Problem(self.key, "{} has no rows", self.spec))

    def agent(self) -> RunAgent:
        """Return an async function run_agent(ctx, batch) for a batch of one sample. Agent processes call this once.

        It sends its requests to the session of the sample, which records them, and returns the reward: None, a number,
        or a dictionary with the key "reward" and further numbers to log. If only some requests are to be trained, the
        dictionary has the key "turns": a tuple (messages, response) for each.
        """
        raise ConfigError(Problem(self.key, "{} has no agent", self.spec))

    def reward(self) -> RewardFn:
        """Return a function reward_fn(record). Reward processes call this once."""
        raise ConfigError(Problem(self.key, "{} has no reward; its agent or program gives it", self.spec))

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def problem(self, text: str, *args: Any) -> ConfigError:
        """Return an error about the setting that names the environment. Its text follows SCHEME:NAME."""
        return ConfigError(Problem(self.key, f"{{}} {text}", self.spec, *args))

    def check_installed(self) -> None:
        """Raise ConfigError if the package is missing or of another version."""
        if not self.distribution:
            return
        install = f"pip install 'areno[{self.extra}]'"
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            raise self.problem("needs the package {}: {}", self.distribution, install) from None
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            text = "needs {}{}, but version {} is installed: {}"
            raise self.problem(text, self.distribution, self.versions, found, install)

    def check_name(self, names: Sequence[str]) -> None:
        """Raise ConfigError if the environment is not among the names of the package."""
        if self.name not in names:
            hint = did_you_mean(self.name, names, otherwise=f"; it has {len(names)} others")
            raise self.problem("does not exist{}", hint)

    def check_split(self, split: str, splits: Sequence[str] = (TRAIN, TEST)) -> None:
        """Raise ConfigError if there is no such split."""
        if split not in splits:
            problem = Problem(f"{self._section}split", "is {!r}; {} has {}", split, self.spec, " and ".join(splits))
            raise ConfigError(problem)

    def check_options(self, options: Mapping[str, Any], known: Sequence[str]) -> None:
        """Raise ConfigError for each option that is not known."""
        if unknown := [name for name in options if name not in known]:
            has = f"; it has {', '.join(known)}" if known else "; it has none"
            raise self.option_errors(
                {name: f"is no option of {self.spec}{did_you_mean(name, known, otherwise=has)}" for name in unknown}
            )

    def check_counts(self, options: Mapping[str, Any], **least: int) -> None:
        """Raise ConfigError for each option that is no whole number of at least the given one."""
        wrong = [name for name, low in least.items() if type(options[name]) is not int or options[name] < low]
        if wrong:
            text = "is {!r}; a whole number of at least {} is expected"
            raise self.option_errors({name: text.format(options[name], least[name]) for name in wrong})

    def option_errors(self, texts: Mapping[str, str]) -> ConfigError:
        """Return an error with a problem for each option, as name -> text."""
        section = f"{self._section}dataset_kwargs"
        return ConfigError([Problem(f"{section}.{name}" if name else section, text) for name, text in texts.items()])

    @property
    def _section(self) -> str:
        """The section of the dataset with a dot: "train_dataset." for the key train_dataset.path."""
        section, dot, _ = self.key.rpartition(".")
        return section + dot
