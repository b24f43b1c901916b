"""Where Hydra finds YAML files, and the check of each file before Hydra reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from areno.config.schema.values import show
from areno.errors import ConfigError
from areno.files.durable import interrupts_held
from areno.files.paths import root
from areno.files.reading import beginning_of
from areno.files.small_yaml import MOST_BYTES, YamlFault, checked_text


class SearchPath(SearchPathPlugin):
    """The user's --config-dir, then conf/ (Hydra's main folder), then recipes/."""

    config_dir: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.config_dir:
            search_path.prepend("--config-dir", f"file://{self.config_dir}", anchor="main")
        search_path.append("recipes", f"file://{root() / 'recipes'}")


@contextmanager
def checked_files() -> Iterator[None]:
    """Within this block, let Hydra read only files that are small. Others are a ConfigError.

    Hydra has no setting for it, and its registry keeps the first class of a scheme, so the class is replaced there.
    """
    types = SourcesRegistry.instance().types
    hydras: Any = types["file"]

    class CheckedFiles(hydras):
        def load_config(self, config_path: str) -> Any:
            path = Path(os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path))))
            try:
                checked_text(beginning_of(path, MOST_BYTES + 1))
            except YamlFault as error:
                raise ConfigError("{}: {}", path, error) from error
            # OmegaConf turns any exception in its midst into one of its own, and a signal would be lost.
            with interrupts_held():
                found = super().load_config(config_path)
            section = found.config.get("hydra", {}) if isinstance(found.config, DictConfig) else {}
            if not isinstance(section, (dict, DictConfig)):  # Hydra takes for granted that it is one
                raise ConfigError("{}: hydra: is {}; a section is expected", path, show(section))
            return found

    types["file"] = CheckedFiles
    try:
        yield
    finally:
        types["file"] = hydras
