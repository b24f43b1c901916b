"""Engines over a tiny model, in this process and in a worker. Modules override the folder where they need another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areno.engine.engine import Engine
from tests.helpers.tiny_engine import folder_with_weights, spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_weights(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, Engine]]:
    """One engine of each form. Tests do to both what changes the weights."""
    with Engine(spec(folder), "inline") as inline, Engine(spec(folder), "spawn") as spawned:
        yield {"inline": inline, "spawned": spawned}


@pytest.fixture(params=["inline", "spawned"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> Engine:
    return engines[request.param]
