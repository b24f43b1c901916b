"""Short runs with a teacher, on rows that have all that a teacher may need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areno.api import get_algorithm
from areno.launch.compose import load
from areno.tracking.reader import RunReader

SHORT = ["total_train_steps=2", "train_dataset.batch_size=8", "gconfig.n_samples=2", "valid_dataset=null"]
SHORT += ["gconfig.temperature=1.5", "engine.device=cpu", "saver.freq_steps=null"]
ROWS = [
    {"prompt": f"{a}+9=", "solutions": str(a + 9), "response": str(a + 9), "solved": f"{a}+9={a + 9} {a}+9="}
    for a in range(11, 31)
]
NO_PATH = "teacher.path=null"


def run(recipe: str, folder: Path, *settings: str, task: str | None = None, rows: Any = None) -> RunReader:
    algorithm = get_algorithm(recipe)
    config = load(algorithm.config, task or algorithm.default, [*SHORT, *settings])
    with algorithm.trainer(config, folder, train_dataset=ROWS if rows is None else rows) as trainer:
        trainer.fit()
    return RunReader(folder)


DISTILL = ["reward.fn=null"]
