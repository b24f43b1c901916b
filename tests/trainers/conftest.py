"""Models that a run can have beside the quickstart's actor, and short runs of GRPO and GSPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.policy_runs import classifier, other_actor
from tests.helpers.variant_runs import player


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a reward model, a critic and another language model."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "reward": classifier(folder / "reward", seed=1),
        "critic": classifier(folder / "critic", seed=2),
        "lm": other_actor(folder / "lm"),
    }


@pytest.fixture
def grpo(tmp_path: Path, models: dict[str, Path]) -> Any:
    """Runs GRPO with settings, 16 rows a step, a reward model: nearly any two completions differ in reward."""
    return player("grpo", tmp_path, models["reward"])


@pytest.fixture
def gspo(tmp_path: Path, models: dict[str, Path]) -> Any:
    """The same with GSPO."""
    return player("gspo", tmp_path, models["reward"])
