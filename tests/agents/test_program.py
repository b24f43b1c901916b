"""The program of agent.command: how it is found, what it sees, how it ends, and what its tests say."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areno.agents.program import check_program, find_program, program_agent
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, BadTrajectory, ProgramTrajectory
from areno.config.agent import AgentConfig
from areno.config.datasets import DatasetConfig
from areno.data.sources import load_rows
from areno.errors import ConfigError
from areno.sandbox import box
from areno.server.sample_sessions import SampleSession
from tests.helpers.processes import children
from tests.helpers.scripted_engine import scripted_server
from tests.helpers.waiting import until

needs_box = pytest.mark.skipif(bool(box.network_problem()), reason=box.network_problem() or "a box can be made")
LOOP = Path(__file__).parents[2] / "examples/agentic/tasks/loop.py"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo cat > answer; ls /"}}\n</tool_call>'


def say(prompt: str) -> str:
    return "Done." if "<tool_call>" in prompt else CALL


def start(
    settings: AgentConfig, prompt: str = "Write cat.", row: Any = None
) -> tuple[ProgramTrajectory, SampleSession]:
    with scripted_server(say, tokenizer="tiny") as (server, _):
        session = SampleSession(max_requests=20, uses_run_sampling=True, returns_tokens=False)
        url = f"{server.open_sample(session)}/v1"
        ctx = AgentContext(url, session.id, "s", 60.0, server.open_socket(session) if settings.box else None)
        batch = AgentBatch.of_items([AgentItem(prompt, row or {}, [1])])
        found = asyncio.run(program_agent(settings)(ctx, batch))
        server.end_sample(session)
    return found, session


def shell(script: str, **settings: Any) -> AgentConfig:
    return AgentConfig(command=f"sh -c {script!r}", **settings)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks/one"
    (folder / "tests").mkdir(parents=True)
    (folder / "environment/deep").mkdir(parents=True)
    (folder / "environment/deep/note.txt").write_text("first")
    (folder / "instruction.md").write_text("Write cat.\n")
    grade(folder, 'echo "$(cat answer)" | grep -q cat && echo 0.5 > /logs/verifier/reward.txt')
    return folder


def grade(folder: Path, script: str) -> None:
    (folder / "tests/test.sh").write_text(script + "\n")


@pytest.mark.parametrize("boxed", [pytest.param(True, marks=needs_box), False])
def test_a_program_samples_through_its_session(boxed: bool) -> None:
    settings = AgentConfig(
        command=f"{sys.executable} {LOOP} {{prompt}}",
        environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}"},
        box=boxed,
    )
    found, session = start(settings)
    assert found.program is not None
    assert (found.program.exit_code, found.program.output) == (0, "Done.\n")
    assert (found.program.before, found.program.after) == ({}, {"answer": "cat\n"})
    assert [turn["message"].get("content") for turn in session.turns] == [None, "Done."]
    assert (found.reward, found.turns) == (None, [])


@needs_box
def test_what_a_program_in_a_box_sees(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    grade(task, "echo 1 > /logs/verifier/reward.txt")
    script = (
        "pwd; echo $HOME; cat; env | grep -c SECRET; cat deep/note.txt ~/.conf/a; ls /tests; cat $0; echo {key} {url}"
    )
    found, session = start(shell(script, files={".conf/a": "{model} {home}"}), row={"task_folder": str(task)})
    assert found.program is not None
    lines = found.program.output.splitlines()
    assert lines[:3] == ["/app", "/home/agent", "Write cat.0"]
    assert "firstpolicy /home/agent" in found.program.output
    assert "areno http://127.0.0.1:8999" in lines[-1]
    assert "cannot access '/tests'" in found.program.output
    assert session.id not in found.program.output


@needs_box
def test_tests_give_the_reward(task: Path) -> None:
    found, _ = start(shell("echo cat > answer"), row={"task_folder": str(task)})
    assert (found.reward, found.parts) == (0.5, {})
    grade(task, 'echo \'{"reward": 1, "speed": 0.25}\' > /logs/verifier/reward.json')
    found, _ = start(shell("true"), row={"task_folder": str(task)})
    assert (found.reward, found.parts) == (1.0, {"speed": 0.25})
    grade(task, "cd /logs/verifier; echo 0 > reward.txt; echo '{\"passed\": 0.75}' > reward.json")
    found, _ = start(shell("true"), row={"task_folder": str(task)})
    assert (found.reward, found.parts) == (0.75, {})


@pytest.mark.parametrize("boxed", [pytest.param(True, marks=needs_box), False])
@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads task.toml")
def test_a_task_has_limits_and_variables(task: Path, boxed: bool) -> None:
    (task / "task.toml").write_text(
        "[agent]\ntimeout_sec = 0.5\n[environment]\nenv = {WORD = 'cat'}\n[verifier]\nenv = {PART = '0.25'}\n"
    )
    grade(task, "grep -q $WORD answer && echo $PART > /logs/verifier/reward.txt")
    found, _ = start(shell("echo $WORD > answer; sleep 60", box=boxed), row={"task_folder": str(task)})
    assert found.program is not None
    assert (found.program.ended_by, found.program.exit_code, found.program.after["answer"]) == ("time", None, "cat\n")
    assert boxed is False or found.reward == 0.25


@needs_box
@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads task.toml")
def test_the_time_of_tests_is_limited_by_the_task(task: Path) -> None:
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    grade(task, "sleep 60")
    with pytest.raises(BadTrajectory, match="its tests were ended for exceeding their limit of time"):
        start(shell("true"), row={"task_folder": str(task)})


@needs_box
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", r"its tests \(exit code 3\) wrote no reward.json and no reward.txt"),
        ("echo much > /logs/verifier/reward.txt", "wrote reward.txt, which holds no reward"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt"),
        ("ln -s /proc/self/environ /logs/verifier/reward.txt", "no reward.json and no reward.txt"),
        ("echo 1 > /logs/verifier/reward.txt; yes", "were ended for exceeding their limit of output"),
        ('echo \'{"speed": 1, "size": 2}\' > /logs/verifier/reward.json', "KeyError"),
        ("echo '{}' > /logs/verifier/reward.json", "reward.json, which holds no reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "wrote reward.json, which holds no reward"),
    ],
)
def test_tests_that_fail_give_no_reward(task: Path, script: str, message: str) -> None:
    grade(task, script)
    with pytest.raises((BadTrajectory, ValueError), match=message):
        start(shell("true"), row={"task_folder": str(task)})


@needs_box
def test_the_agent_cannot_reach_its_tests(task: Path) -> None:
    script = f"echo 'echo 1 > /logs/verifier/reward.txt' > {task}/tests/test.sh; mkdir -p /tests; echo dog > answer"
    grade(task, "if grep -q cat answer; then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt")
    found, _ = start(shell(script), row={"task_folder": str(task)})
    assert found.reward == 0.0


@needs_box
def test_an_exit_code_is_no_failure_and_limits_are_told() -> None:
    found, _ = start(shell("echo out; exit 7"))
    assert found.program is not None
    assert (found.program.exit_code, found.program.output, found.program.ended_by) == (7, "out\n", "")
    hungry = f"{sys.executable} -c 'x = bytearray(400 << 20); import time; time.sleep(20)'"
    found, _ = start(AgentConfig(command=hungry, memory_mb=200))
    assert found.program is not None
    assert (found.program.exit_code, found.program.ended_by) == (None, "memory")


@pytest.mark.parametrize("boxed", [pytest.param(True, marks=needs_box), False])
def test_a_cancelled_program_ends_with_all_its_processes(boxed: bool) -> None:
    async def cancel() -> float:
        ctx = AgentContext("http://127.0.0.1:1/v1", "key", "s", 60.0)
        run = program_agent(shell("sleep 1000 & sleep 1000", box=boxed))
        task = asyncio.ensure_future(run(ctx, AgentBatch.of_items([AgentItem("a", {}, [1])])))
        await asyncio.sleep(1.0)
        task.cancel()
        begun = time.monotonic()
        await asyncio.gather(task, return_exceptions=True)
        return time.monotonic() - begun

    def sleeping() -> list[int]:
        return [pid for pid in children() if b"sleep\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    assert asyncio.run(cancel()) < 5
    until(lambda: not sleeping(), found=sleeping)


@needs_box
def test_placeholders_in_a_prompt_stay() -> None:
    found, session = start(AgentConfig(command="echo {prompt} {model}"), "use {url}, {key} and {x")
    assert found.program is not None
    assert found.program.output == "use {url}, {key} and {x policy\n"
    assert session.turns == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": "sh -c 'x"}, "command: is .* which is no command"),
        ({"command": "a", "whole_batch": True}, "whole_batch: is true, but command runs one sample at a time"),
        ({"command": "a", "files": {"../x": ""}}, "files: has a path that leaves the home directory"),
        ({"command": "a", "fn": "b.py"}, "command: is 'a', but fn is b.py"),
        ({"fn": "command"}, "fn: is command, but command is null"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentConfig(**settings)


def test_what_a_program_needs_is_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"agent\.read: names paths that are not there: /no/such"):
        check_program(AgentConfig(command="sh", read=["/no/such"]))
    monkeypatch.setattr(box, "network_problem", lambda: "no namespaces")
    with pytest.raises(ConfigError, match=r"agent\.box: .* cannot run sh in a box: no namespaces; set it to false"):
        check_program(AgentConfig(command="sh"))
    check_program(AgentConfig(command="sh", box=False))


@needs_box
def test_more_programs_run_at_once_than_there_are_cores() -> None:
    async def run_all() -> float:
        run = program_agent(shell("sleep 1"))
        ctx = AgentContext("http://127.0.0.1:1/v1", "key", "s", 60.0)
        begun = time.monotonic()
        await asyncio.gather(*(run(ctx, AgentBatch.of_items([AgentItem("a", {}, [1])])) for _ in range(24)))
        return time.monotonic() - begun

    assert asyncio.run(run_all()) < 12  # one after the other, they would take 24 s


def test_programs_are_found_with_what_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "node_modules/tool"
    package.mkdir(parents=True)
    (package / "run.js").write_text("#!/usr/bin/env sh\necho")
    (tmp_path / "node_modules/.bin").mkdir()
    (tmp_path / "node_modules/.bin/tool").symlink_to("../tool/run.js")
    (package / "run.js").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/node_modules/.bin:{os.environ['PATH']}")
    found = find_program("tool")
    assert found[:2] == [f"{tmp_path}/node_modules/.bin/tool", f"{tmp_path}/node_modules"]
    assert any(path.endswith("/sh") for path in found)
    with pytest.raises(ConfigError, match=r"agent\.command: names 'no-such-tool', which is no program on the PATH"):
        find_program("no-such-tool")


def test_a_folder_of_tasks_is_a_dataset(task: Path) -> None:
    [row] = load_rows(DatasetConfig(path=str(task.parent)), "prompt")
    assert (row["prompt"], row["task_folder"]) == ("Write cat.", str(task.resolve()))
