"""The pages about agents: their files and commands run, with a small random model in place of the one named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem
from areno.files.user_code import load_function
from areno.sandbox.box import network_problem
from areno.server.token_sources import TokenSource
from tests.helpers import warm_python
from tests.helpers.agent_model import made
from tests.helpers.endpoints import endpoint
from tests.helpers.pages import ROOT, blocks

PAGE, ENVIRONMENTS = ROOT / "docs" / "agents.md", ROOT / "docs" / "environments.md"
NAMED = "Qwen/Qwen3-0.6B"
SMALL = ["engine.device=cpu", "total_train_epochs=1", "gconfig.n_samples=2", "agent.workers=1"]
RUNS = {  # experiment: (page, packages of its agent)
    "products": (PAGE, []),
    "counter": (ENVIRONMENTS, []),
    "arithmetic": (ENVIRONMENTS, ["reasoning_gym"]),
    "guessing": (ENVIRONMENTS, ["textarena"]),
    "sums": (ENVIRONMENTS, ["verifiers.v1"]),
    "guess": (ENVIRONMENTS, ["openenv"]),
    "weather": (ENVIRONMENTS, ["agents"]),
    "forecast": (ENVIRONMENTS, ["langchain", "langchain_openai"]),
}
WITHOUT_AGENT = {"arithmetic"}
ALWAYS: Any = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "areno": {"choices": [{}]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    with made() as trainer:
        return trainer.save_checkpoint(tmp_path_factory.mktemp("model") / "model")


def files_of(page: Path) -> dict[str, str]:
    return {info.partition(" file=")[2]: text for info, text in blocks(page) if " file=" in info}


def commands_of(page: Path) -> dict[str, list[str]]:
    """Experiment -> words of its command."""
    lines = [line for info, text in blocks(page) if info == "bash run" for line in text.splitlines()]
    return {line.partition("experiment_name=")[2].split()[0]: shlex.split(line)[1:] for line in lines}


def test_each_command_of_the_pages_is_run() -> None:
    found = [(page, name) for page in (PAGE, ENVIRONMENTS) for name in commands_of(page)]
    assert found == [(page, name) for name, (page, _) in RUNS.items()]


def run(command: list[str], page: Path, folder: Path, model: str) -> None:
    for file, text in files_of(page).items():
        (folder / file).write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(folder), *sys.path])  # an environment of the page is as if installed
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [word.replace(NAMED, model) for word in command]
    done = warm_python.commands().run(words, folder, environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_commands_run(name: str, tmp_path: Path, model: str) -> None:
    page, packages = RUNS[name]
    for package in packages:
        pytest.importorskip(package)
    has_agent = name not in WITHOUT_AGENT
    small = [setting for setting in SMALL if has_agent or not setting.startswith("agent.")]
    run([*commands_of(page)[name], *small], page, tmp_path, model)
    [log] = tmp_path.glob(f"outputs/{name}/*/logs/run.log")
    lines = (
        ("agentic rollout batch prompts=4", "agentic train batch built samples=8") if has_agent else ("done: 2 steps",)
    )
    for line in lines:
        assert line in log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(bool(network_problem()), reason=network_problem() or "a box can be made")
def test_the_commands_of_a_program_run(tmp_path: Path) -> None:
    [lines] = [text.splitlines() for info, text in blocks(PAGE) if info == "bash tasks"]
    shorter = {"=tasks_base": ["total_train_steps=2"], "=tasks": ["total_train_steps=1", "train_dataset.batch_size=2"]}
    for line in lines:
        words = [word.replace("examples/", f"{ROOT}/examples/") for word in shlex.split(line)[1:]]
        more = [
            setting
            for name, settings in shorter.items()
            if line.partition("--config-name")[2].split()[:1] == [name]
            for setting in settings
        ]
        run([*words, *more], PAGE, tmp_path, "")
    [log] = tmp_path.glob("outputs/tasks/*/logs/run.log")
    assert "agentic train batch built samples=16" in log.read_text()


@pytest.mark.slow
def test_a_program_outside_of_the_run_trains_it(tmp_path: Path, model: str) -> None:
    [lines] = [text.splitlines() for info, text in blocks(PAGE) if info == "bash online"]
    train, play = (shlex.split(line)[1:] for line in lines)
    for file, text in files_of(PAGE).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    player = subprocess.Popen([sys.executable, *play], cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        small = [setting for setting in SMALL if "workers" not in setting]
        run([*train, *small], PAGE, tmp_path, model)
        _, said = player.communicate(timeout=30)
    finally:
        player.kill()
    assert player.returncode == 0, said
    log = (tmp_path / "outputs/played/first/logs/run.log").read_text()
    assert "agentic train batch built samples=8" in log
    assert "programs start sessions at http://127.0.0.1:" in log


@pytest.mark.slow
def test_the_loop_runs(tmp_path: Path, model: str) -> None:
    script = "\n".join(text for info, text in blocks(PAGE) if info == "python")
    (tmp_path / "loop.py").write_text(script.replace(NAMED, model).replace("backend_type", CPU), encoding="utf-8")
    run(["loop.py"], PAGE, tmp_path, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "package", "n_turns"), [("weather.py", "agents", 4), ("forecast.py", "langchain_openai", 4)]
)
@pytest.mark.parametrize("tool", ["temperature", "unknown"])
def test_a_policy_that_never_answers_is_no_failure(
    file: str, package: str, n_turns: int, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    (tmp_path / file).write_text(files_of(ENVIRONMENTS)[file], encoding="utf-8")
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {**ALWAYS, "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]}
    run_agent = load_function(str(tmp_path / file), "run_agent", "agent.fn")
    item = AgentItem("How warm is it in Oslo?", {}, [1])
    with endpoint(lambda request: json.dumps(body).encode()) as (url, requests):
        asyncio.run(run_agent(AgentContext(url, "key", "s", 60.0), AgentBatch.of_items([item])))
    assert len(requests) == (1 if (tool, package) == ("unknown", "agents") else n_turns)


CPU = 'custom_config=areno.ArenoConfig(runtime={"device": "cpu", "gradient_checkpointing": False}), backend_type'


def test_the_sources_are_those_of_the_code() -> None:
    said = re.search(r"The sources are (.*?)\.", PAGE.read_text(encoding="utf-8"), re.S)
    assert said is not None
    found = {word: int(number) for number, word in re.findall(r"(\d) (\w+)", said[1])}
    assert found == {source.name.lower(): int(source) for source in TokenSource}
