"""Runs that train a tiny model with the agents of tests/agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import Played, play

AGENTS = Path(__file__).parents[1] / "agents"


REWARD = AGENTS / "reward.py"


DATA = [{"prompt": f"hello {number}", "solutions": number} for number in range(8)]


def run(folder: Path, agent: str, *overrides: str, recipe: str = "gspo", rows: Any = DATA, **given: Any) -> Played:
    file = AGENTS / agent
    settings = [
        f"actor.path={model_folder()}",
        "engine.dummy_load=true",
        f"agent.fn={file}",
        f"reward.fn={REWARD}",
        "reward.workers=1",
        "agent.workers=1",
        "train_dataset.max_length=50",
        "gconfig.max_tokens=400",
        "gconfig.temperature=1",
        "saver.freq_steps=null",
    ]
    return play(recipe, folder, *settings, *overrides, train_dataset=rows, **given)
