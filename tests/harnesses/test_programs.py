"""Real agent programs against a policy that is scripted: they do the task, and each conversation is one row.

`install` puts the programs into a folder; the tests of programs that are not there are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from areno.agents.program import APP, program_agent
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.server.sample_sessions import SampleSession
from areno.types import SamplingParams
from tests.harnesses.programs import INSTALLED, PROGRAMS, is_installed, path_of, settings_of
from tests.helpers.scripted_engine import ScriptedEngine, scripted_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "Write the word hello into the file hello.txt."
CALLS: dict[str, list[list[tuple[str, dict[str, str]]]]] = {  # of each turn
    "claude": [
        [("Write", {"file_path": "{work}/hello.txt", "content": "hello"})],
        [("Read", {"file_path": "{work}/hello.txt"}), ("Bash", {"command": "cat hello.txt", "description": "Show it"})],
    ],
    "codex": [
        [("exec_command", {"cmd": "printf hello > hello.txt"})],
        [("exec_command", {"cmd": "cat hello.txt"}), ("exec_command", {"cmd": "ls"})],
    ],
    "opencode": [
        [("write", {"filePath": "{work}/hello.txt", "content": "hello"})],
        [("read", {"filePath": "{work}/hello.txt"}), ("bash", {"command": "ls", "description": "List them"})],
    ],
    "mini-swe-agent": [
        [("bash", {"command": "printf hello > hello.txt"})],
        [("bash", {"command": "cat hello.txt"}), ("bash", {"command": "ls"})],
        [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})],
    ],
    "other": [
        [("write_file", {"path": "hello.txt", "text": "hello"})],
        [("read_file", {"path": "hello.txt"}), ("read_file", {"path": "hello.txt"})],
    ],
}
PATCH = "I write it.\n\nhello.txt\n```\n<<<<<<< SEARCH\n=======\nhello\n>>>>>>> REPLACE\n```\n"
# Why a program's conversation is more than one row. Its page of the documentation says so, too.
SEVERAL_ROWS = {"smolagents": "it sends its calls back as text"}


def called(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script_of(name: str, work: Path) -> Any:
    turns = [list(turn) for turn in CALLS.get(name, CALLS["other"])]
    if name == "smolagents":
        turns.append([("final_answer", {"answer": "Done."})])

    def say(prompt: str) -> str:
        if name == "aider":
            return "Done." if PATCH.strip() in prompt else PATCH
        if name not in ("smolagents",) and "# Tools" not in prompt:
            return "A title"
        number = min(len(engine.requests) - 1 - engine.n_asides, len(turns))
        if number == len(turns):
            return "<think>\nI am done.\n</think>\n\nThe file is there."
        calls = "\n".join(called(tool, arguments) for tool, arguments in turns[number])
        return f"<think>\nThought {number}.\n</think>\n\nI go on.\n{calls}".replace("{work}", str(work))

    engine: Any = None

    def attach(found: ScriptedEngine) -> None:
        nonlocal engine
        engine = found
        engine.n_asides = 0

    return say, attach


def attempt(name: str, say: Any, attach: Any = lambda engine: None, prompt: str = PROMPT, **more: Any) -> Any:
    """Run a program in a box, and return (what it returns, its session, the engine, its trajectory)."""
    with scripted_server(say, params=SamplingParams(max_new_tokens=2000), **more) as (server, engine):
        attach(engine)
        session = SampleSession(max_requests=30, uses_run_sampling=True, returns_tokens=False)
        ctx = AgentContext(server.open_sample(session), session.id, "session", 120.0, server.open_socket(session))
        batch = AgentBatch.of_items([AgentItem(prompt, {}, [1])])
        returned = asyncio.run(program_agent(settings_of(name))(ctx, batch))
        server.end_sample(session)
        prompts = server.server.chat.prompts
        found = RowBuilder(prompts, LossMaskPolicy(), len(prompts.tokenizer)).build_trajectory(session.turns)
        return returned.program, session, engine, found


@pytest.fixture
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a program that is installed. The test is skipped without it."""
    name = getattr(request, "param", None) or request.getfixturevalue("name")
    if not is_installed(name):
        pytest.skip(f"{name} is not in {INSTALLED}; run tests/harnesses/install")
    monkeypatch.setenv("PATH", path_of(name))
    return name


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_its_task_and_each_conversation_is_one_row(name: str, installed: str) -> None:
    program, session, _, found = attempt(name, *script_of(name, Path(APP)))
    code, output = program.exit_code, program.output
    assert code == 0, output
    assert len(session.turns) == session.counts["requests"]
    assert program.after["hello.txt"].strip() == "hello", output
    assert found.conversations["main"] == (1 if name not in SEVERAL_ROWS else found.conversations["main"])
    assert len(found.rows) == found.conversations["main"]
    turns = [turn["tokens"] for turn in session.turns if turn["tools"] or name in ("aider", "smolagents")]
    if name not in SEVERAL_ROWS:
        for before, after in itertools.pairwise(turns):
            seen = before.prompt + before.sampled
            assert after.prompt[: len(seen)] == seen
    if os.environ.get("ARENO_SHOW"):
        print(name, dict(session.counts), dict(found.conversations), [len(turn.prompt) for turn in turns])
