"""Compositions of Hydra that do not repeat what an earlier one of this process has done.

A composition takes a fifth of a second, and the tests make about a thousand. What is left out has no effect: a text of
YAML or of an interpolation is parsed once, and a list of sources that is replaced at once is not copied deeply.
"""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest


def quicken(patch: pytest.MonkeyPatch) -> None:
    import yaml
    from hydra._internal.config_repository import CachingConfigRepository
    from omegaconf import base, omegaconf

    def keep(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}

    known: dict[str, Any] = {}

    def load(stream: Any, Loader: Any) -> Any:  # the name is PyYAML's
        start = 0 if isinstance(stream, str) else stream.tell()
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            if not isinstance(stream, str):
                stream.seek(start)  # errors name the file
            known[text] = yaml.load(stream, Loader=Loader)
        return copy.deepcopy(known[text])

    patch.setattr(CachingConfigRepository, "__init__", keep)
    patch.setattr(base, "parse", cache(base.parse))
    patch.setattr(omegaconf, "yaml", SimpleNamespace(**{**vars(yaml), "load": load}))
