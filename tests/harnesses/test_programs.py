"""Real agent programs against a policy that is scripted: they do the task, and each conversation is one row.

`install` puts the programs into a folder; the tests of programs that are not there are skipped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from areno.agents.program import APP, program_agent
from areno.agents.trajectories import AgentBatch, AgentContext, AgentItem, LossMaskPolicy
from areno.agents.turns_to_rows import RowBuilder
from areno.config.agent import AgentConfig
from areno.sandbox.box import network_problem
from areno.server.sample_sessions import SampleSession
from areno.types import SamplingParams
from tests.harnesses.programs import INSTALLED, PROGRAMS, is_installed, path_of, settings_of
from tests.helpers.agent_model import model_folder
from tests.helpers.policy_runs import play
from tests.helpers.scripted_engine import ScriptedEngine, scripted_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network_problem()), reason=network_problem() or "a box can be made"),
]

QWEN = Path(__file__).parents[3] / "shared/data/tokenizers/qwen3"
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


def attempt(
    name: str,
    say: Any,
    attach: Any = lambda engine: None,
    *,
    prompt: str = PROMPT,
    max_new_tokens: int = 2000,
    settings: AgentConfig | None = None,
    **more: Any,
) -> Any:
    """Run a program in a box, and return (its end, its session, the engine, its trajectory)."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    with scripted_server(say, params=params, **more) as (server, engine):
        attach(engine)
        session = SampleSession(max_requests=30, uses_run_sampling=True, returns_tokens=False)
        ctx = AgentContext(server.open_sample(session), session.id, "session", 120.0, server.open_socket(session))
        batch = AgentBatch.of_items([AgentItem(prompt, {}, [1])])
        returned = asyncio.run(program_agent(settings or settings_of(name))(ctx, batch))
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


def answers(*texts: str, aside: str = "A title") -> Any:
    """A policy that says these texts, one after the other, to requests with tools, and another one to others."""
    left = list(texts)
    return lambda prompt: aside if "# Tools" not in prompt else left.pop(0) if len(left) > 1 else left[0]


def changed(name: str, **changes: Any) -> AgentConfig:
    return dataclasses.replace(settings_of(name), **changes)


@pytest.mark.parametrize("installed", ["claude"], indirect=True)
def test_two_prompts_of_claude_code_share_their_prefix(installed: str) -> None:
    settings = changed("claude", command="claude -p --model {model} --dangerously-skip-permissions")
    prompts = []
    for prompt in (PROMPT, "What is the time?"):
        _, _, engine, _ = attempt("claude", answers("I do not know."), prompt=prompt, settings=settings)
        prompts.append(max((request.prompt for request in engine.requests), key=len))
    n_shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert n_shared > 15_000


@pytest.mark.parametrize("installed", ["claude"], indirect=True)
def test_a_sub_agent_of_claude_code_is_a_second_root(installed: str) -> None:
    task = {"description": "Look", "prompt": "Look for files.", "subagent_type": "general-purpose"}

    def say(prompt: str) -> str:
        if "Look for files." in prompt.rsplit("<|im_start|>user", 1)[-1] and "<tool_call>" not in prompt[-4000:]:
            return "There are none."
        return "All is done." if "<tool_response>" in prompt else called("Agent", task)

    settings = changed("claude", command="claude -p --model {model} --dangerously-skip-permissions")
    program, session, _, found = attempt("claude", say, settings=settings)
    assert program.exit_code == 0, program.output
    assert found.conversations == {"main": 1, "subagent": 1}, [turn["message"] for turn in session.turns]
    assert found.messages[-1]["content"] == "All is done."


@pytest.mark.parametrize("installed", ["claude"], indirect=True)
def test_an_answer_of_claude_code_that_is_cut_off_goes_on_in_the_same_row(installed: str) -> None:
    program, session, _, found = attempt("claude", answers("word " * 60, "The end."), max_new_tokens=40)
    assert program.exit_code == 0, program.output
    assert session.turns[0]["finish_reason"] == "length"
    assert (len(session.turns), len(found.rows)) == (2, 1)


def codex_with(*lines: str) -> AgentConfig:
    settings = settings_of("codex")
    [(path, text)] = settings.files.items()
    kept = [line for line in text.splitlines() if line.split(" ")[0] not in [one.split(" ")[0] for one in lines]]
    place = kept.index('wire_api = "responses"') + 1
    at_root = [line for line in lines if line.startswith("model_")]
    in_provider = [line for line in lines if not line.startswith("model_")]
    return changed("codex", files={path: "\n".join([*at_root, *kept[:place], *in_provider, *kept[place:]])})


@pytest.mark.parametrize("installed", ["codex"], indirect=True)
def test_codex_asks_again_after_a_silence_and_is_sampled_once(installed: str) -> None:
    def attach(engine: ScriptedEngine) -> None:
        engine.before_tokens = lambda: asyncio.sleep(4 if not engine.prompts[1:] else 0)

    settings = codex_with("stream_idle_timeout_ms = 1000")
    say = answers(called("exec_command", {"cmd": "printf hello > hello.txt"}), "Done.")
    program, session, engine, found = attempt("codex", say, attach, settings=settings)
    assert program.exit_code == 0, program.output
    assert program.after == {"hello.txt": "hello"}
    assert session.counts["repeated"] >= 1
    assert (len(engine.requests), len(session.turns), len(found.rows)) == (2, 2, 1)


@pytest.mark.parametrize("installed", ["codex"], indirect=True)
def test_codex_survives_a_full_queue(installed: str) -> None:
    def attach(engine: ScriptedEngine) -> None:
        sampler = engine.server.server.sampler
        held = sampler.reserve(1)
        held.__enter__()
        threading.Timer(3.0, lambda: held.__exit__(None, None, None)).start()

    program, session, _, found = attempt("codex", answers("Done."), attach, max_samples=1)
    assert program.exit_code == 0, program.output
    assert (len(session.turns), len(found.rows)) == (1, 1)


@pytest.mark.parametrize("installed", ["codex"], indirect=True)
def test_a_compaction_of_codex_is_a_new_root(installed: str) -> None:
    settings = codex_with("model_auto_compact_token_limit = 5200")
    call = called("exec_command", {"cmd": "seq 300"})
    summary = "So far the numbers from 1 to 300 were shown."
    program, session, _, found = attempt("codex", answers(call, call, "Done.", aside=summary), settings=settings)
    assert program.exit_code == 0, program.output
    assert found.conversations["main"] == 1, [turn["message"] for turn in session.turns]
    assert found.conversations["compaction"] >= 2
    assert "subagent" not in found.conversations


@pytest.mark.parametrize("installed", ["claude"], indirect=True)
def test_a_recipe_trains_through_claude_code(installed: str, tmp_path: Path) -> None:
    if not QWEN.is_dir():
        pytest.skip("needs the tokenizer qwen3")
    folder = model_folder(QWEN, 151_936, 151_645)
    reward = tmp_path / "reward.py"
    reward.write_text("def reward_fn(record):\n    return float(record.tokens[0] % 2) + len(record.program.after)\n")
    played = play(
        "gspo",
        tmp_path,
        "agent=claude_code",
        "agent.command='claude --bare -p --model {model} --dangerously-skip-permissions'",
        f"actor.path={folder}",
        "engine.dummy_load=true",
        f"reward.fn={reward}",
        "train_dataset.max_length=50",
        "gconfig.max_new_tokens=16",
        "gconfig.temperature=1",
        "agent.max_requests=3",
        "total_train_steps=3",
        "saver.freq_steps=null",
        train_dataset=[{"prompt": f"What is {number} plus {number}?"} for number in range(8)],
    )
    assert [len(rows) for rows in played.rows] == [16] * 3
    assert played.series("rollout/agent_errors") == [0.0] * 3
    assert max(played.series("train/logp_abs_diff_max")) < 1e-4
    assert max(played.series("train/grad_norm")) > 0
    written = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(re.search(rb"/s/[0-9a-f]{32}", text) for text in written), "no file shows the id of a session"
