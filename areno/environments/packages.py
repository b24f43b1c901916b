"""The list of all packages of environments, and how settings name them."""

from __future__ import annotations

from collections.abc import Iterable

from areno.environments.harbor import HarborTasks
from areno.environments.openenv import OpenEnv
from areno.environments.package import EnvironmentPackage
from areno.environments.reasoning_gym import ReasoningGym
from areno.environments.textarena import TextArena
from areno.environments.verifiers import Verifiers
from areno.errors import ConfigError, Problem, all_of

_CLASSES: list[type[EnvironmentPackage]] = [HarborTasks, OpenEnv, ReasoningGym, TextArena, Verifiers]
PACKAGES = {package.scheme: package for package in _CLASSES}


def package_of(spec: str | None, key: str = "") -> EnvironmentPackage | None:
    """Return the environment that the text of a setting names as SCHEME:NAME. None if it names none.

    Args:
        spec: The text.
        key: The setting, for errors.
    """
    scheme, colon, name = (spec or "").partition(":")
    package = PACKAGES.get(scheme)
    return package(name, key) if package is not None and colon else None


def check_packages(named: Iterable[tuple[str, str | None]]) -> None:
    """Check all environments of a run before anything starts.

    Args:
        named: (setting, its text) of each setting that may name an environment. An environment that several settings
            name is checked once.

    Raises:
        ConfigError: An environment cannot be used, or packages exclude each other.
    """
    found: dict[str, EnvironmentPackage] = {}
    for key, spec in named:
        if (package := package_of(spec, key)) is not None:
            found.setdefault(package.spec, package)
    schemes = {package.scheme: package for package in found.values()}
    pairs = [
        Problem(package.key, "{} excludes {}: {}", package.spec, schemes[other].spec, why)
        for package in schemes.values()
        for other, why in package.excludes.items()
        if other in schemes
    ]
    if pairs:
        raise ConfigError(pairs)
    all_of(*(package.check for package in found.values()))
