"""Compositions of Hydra that do not repeat what an earlier one of this process has done.

A composition takes a tenth of a second, and the tests make about a thousand; this saves a third of it. What is left out
has no effect: a text of YAML or of an interpolation is parsed once, a list of sources that is replaced at once is not
copied deeply, and the settings in Hydra's store are made once and copied by pickle, which is eight times as fast as
OmegaConf's own copy.
"""

from __future__ import annotations

import copy
import pickle
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest


def quicken(patch: pytest.MonkeyPatch) -> None:
    import yaml
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra.core import config_store
    from omegaconf import OmegaConf, base, omegaconf

    def keep(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}

    known: dict[str, bytes] = {}

    def load(stream: Any, Loader: Any) -> Any:  # the name is PyYAML's
        start = 0 if isinstance(stream, str) else stream.tell()
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            if not isinstance(stream, str):
                stream.seek(start)  # errors name the file
            known[text] = pickle.dumps(yaml.load(stream, Loader=Loader))
        return pickle.loads(known[text])

    made: dict[bytes, Any] = {}

    def structured(node: Any) -> Any:
        """Of plain settings, one node for all that are equal: the store gives out copies."""
        if not isinstance(node, dict):  # classes of Hydra's plugins, which it may import again
            return OmegaConf.structured(node)
        key = pickle.dumps(node)
        if key not in made:
            made[key] = OmegaConf.structured(node)
        return made[key]

    kept: dict[int, tuple[Any, bytes]] = {}  # by the identity of the node
    load_slowly = config_store.ConfigStore.load

    def load_stored(self: Any, config_path: str) -> Any:
        found = copy.copy(self._load(config_path))
        if id(found.node) not in kept:
            try:
                kept[id(found.node)] = found.node, pickle.dumps(found.node)
            except pickle.PicklingError:
                return load_slowly(self, config_path)
        found.node = pickle.loads(kept[id(found.node)][1])
        return found

    patch.setattr(CachingConfigRepository, "__init__", keep)
    patch.setattr(base, "parse", cache(base.parse))
    patch.setattr(omegaconf, "yaml", SimpleNamespace(**{**vars(yaml), "load": load}))
    patch.setattr(config_store, "OmegaConf", SimpleNamespace(structured=structured))
    patch.setattr(config_store.ConfigStore, "load", load_stored)
