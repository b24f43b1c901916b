"""The pages about agents: their files and commands run, with a small random model in place of the one named."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from areno.server.tokens import Source
from tests.helpers import warm_python
from tests.helpers.agent_model import made
from tests.helpers.pages import ROOT, blocks

PAGE, ENVIRONMENTS = ROOT / "docs" / "agents.md", ROOT / "docs" / "environments.md"
NAMED = "Qwen/Qwen3-0.6B"
SMALL = ["engine.device=cpu", "total_train_epochs=1", "gconfig.n_samples=2", "agent.workers=1"]
needs_packages = pytest.mark.skipif(
    None in map(find_spec, ("verifiers", "agents")), reason="needs the packages verifiers and openai-agents"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    with made() as trainer:
        return trainer.save_checkpoint(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "n_runs"), [(PAGE, 1), pytest.param(ENVIRONMENTS, 3, marks=needs_packages)])
def test_the_page_runs(page: Path, n_runs: int, tmp_path: Path, model: str) -> None:
    script, commands = [], []
    for info, text in blocks(page):
        kind, _, file = info.partition(" file=")
        text = text.replace(NAMED, model)
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif kind == "python":
            script.append(text)
        elif kind == "bash run":
            commands += [[*shlex.split(line)[1:], *SMALL] for line in text.splitlines()]
    assert len(commands) == n_runs
    if script:
        (tmp_path / "loop.py").write_text("\n".join(script).replace("backend_type", CPU), encoding="utf-8")
        commands.append(["loop.py"])
    path = os.pathsep.join([str(ROOT), str(tmp_path), *sys.path])  # an environment of the page is as if installed
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = warm_python.commands().run(command, tmp_path, environment, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        if "loop.py" not in command:
            [name] = [word.partition("=")[2] for word in command if word.startswith("experiment_name=")]
            [log] = tmp_path.glob(f"outputs/{name}/*/logs/run.log")
            for line in ("agentic rollout batch prompts=4", "agentic train batch built samples=8"):
                assert line in log.read_text()


CPU = 'custom_config=areno.ArenoConfig(runtime={"device": "cpu", "gradient_checkpointing": False}), backend_type'


def test_the_sources_are_those_of_the_code() -> None:
    said = re.search(r"The sources are (.*?)\.", PAGE.read_text(encoding="utf-8"), re.S)
    assert said is not None
    found = {word: int(number) for number, word in re.findall(r"(\d) (\w+)", said[1])}
    assert found == {source.name.lower(): int(source) for source in Source}
