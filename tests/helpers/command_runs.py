"""Runs of a recipe's command: in this process, or in one of their own that is ended in the middle of a phase."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from areno.launch import command
from areno.recipes import gspo, sft
from tests.helpers.processes import children, until_ended
from tests.helpers.warm_python import said_by

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/quickstart/model"
TINY = [
    "total_train_steps=2",
    "train_dataset.batch_size=2",
    "gconfig.n_samples=2",
    "reward.workers=1",
    "saver.freq_steps=null",
    "engine.device=cpu",
]


def run(*overrides: str, recipe=gspo, evaluate: bool = False) -> int:
    """The exit code of `python -m areno.recipes.<recipe> *overrides`, with the quickstart cut down to two steps."""
    arguments = [*TINY, "cluster.fileroot=out", *([] if evaluate else ["valid_dataset=null"]), *overrides]
    if recipe is sft:
        arguments = [a for a in arguments if not a.startswith(("gconfig", "reward"))]
    try:
        return command.run(recipe.ALGORITHM, f"python -m {recipe.__name__}", arguments)
    except SystemExit as end:
        return int(end.code or 0)


def files(folder: str | Path = "out") -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def fails(
    capsys: pytest.CaptureFixture[str], message: str, code: int, *overrides: str, begins: bool = False, **how
) -> str:
    """Run it and hold it to the rule: the message is one line, nothing is left of the run, no process either."""
    before = children()
    assert run(*overrides, **how) == code
    error = capsys.readouterr().err
    last = error.rstrip("\n").rpartition("\n")[2]
    assert last.startswith("error: "), error
    assert re.search(message, last), last
    assert "Traceback" not in error
    if begins:  # a run that has begun a step keeps its log
        assert [name for name in files() if name.endswith("/logs/run.log")], files()
    else:
        assert not Path("out").exists(), files()
    assert set(children()) <= set(before)
    return error


def write(name: str, content: str | list) -> str:
    """A file in the working folder, JSON lines from a list; its name."""
    text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
    Path(name).write_text(text, encoding="utf-8")
    return name


# A rollout and an optimizer step that last until somebody ends them, with a model that loads at once.
ENDLESS = {
    "rollout": ["gconfig.max_new_tokens=100000", "gconfig.ignore_eos=true", "actor.path=model"],
    "train": [
        "train_dataset.batch_size=8",
        "gconfig.n_samples=256",
        "gconfig.max_new_tokens=4",
        "actor.mb_spec.max_tokens_per_mb=8",
    ],
}


class Driver:
    """A run in a process of its own, from the moment it is in the middle of a phase; it ends with the block."""

    def __init__(self, phase: str, *overrides: str):
        model = Path(shutil.copytree(MODEL, "model"))
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(
            config.replace('"max_position_embeddings": 128', '"max_position_embeddings": 200000')
        )
        arguments = [
            *TINY,
            "cluster.fileroot=out",
            "valid_dataset=null",
            "trial_name=t",
            "stats_logger.console=full",
            *ENDLESS[phase],
            *overrides,
        ]
        self.lines: list[str] = []
        with contextlib.ExitStack() as stack:
            self.process, self._said = stack.enter_context(said_by(["-m", "areno.recipes.gspo", *arguments]))
            in_phase = threading.Event()
            self.reader = threading.Thread(target=self._read, args=(f"stage={phase}_start", in_phase), daemon=True)
            self.reader.start()
            assert in_phase.wait(200), "".join(self.lines)
            time.sleep(0.3)
            self.children = children(self.process.pid)
            self._stack = stack.pop_all()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _read(self, awaited: str, found: threading.Event) -> None:
        for line in self._said:
            self.lines.append(line)
            if awaited in line:
                found.set()

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit code and last line, which must come within this time; its processes must be gone then, too."""
        deadline = time.monotonic() + seconds
        code = self.process.wait(seconds)
        until_ended(self.children, deadline - time.monotonic())
        self.reader.join(60)
        assert "Traceback" not in "".join(self.lines), "".join(self.lines)
        return code, self.lines[-1]

    def worker(self) -> int:
        """The process of the only spawned worker."""
        [pid] = [pid for pid in self.children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid
