"""Packages for environments, unmodified, against areno's server: what OpenEnv finds out, and the traces of verifiers.

`install` gives each package an environment of its own; the tests of packages that are not there are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.programs import HERE, INSTALLED
from tests.helpers.scripted_engine import ScriptedEngine, scripted_server
from tests.helpers.served import Served

pytestmark = [pytest.mark.slow]

STORIES = Path(__file__).parents[3] / "shared/data/models/stories260K-hf"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello"}}\n</tool_call>'
# verifiers starts its programs by uv, which would download their packages. Its own environment has all of them.
UV = """#!/bin/sh
case "$*" in
    *--help) echo --script ;;
    "python find "*) echo {python} ;;
esac
"""


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not in {INSTALLED}; run tests/harnesses/install"
    return pytest.mark.skipif(not (INSTALLED / package / "installed").exists(), reason=reason)


def run(package: str, home: Path, *arguments: str) -> Any:
    """Run the script of a package in the environment of the package, and return what it prints."""
    python = INSTALLED / package / "bin" / "python"
    uv = home / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    done = subprocess.run(
        [python, HERE / "scripts" / f"run_{package}.py", *arguments],
        env={"HOME": str(home), "PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs("openenv")
def test_openenv_can_train_on_answers(tmp_path: Path) -> None:
    with scripted_server(lambda prompt: CALL if "# Tools" in prompt else "ok", session=None) as (server, engine):
        found = run("openenv", tmp_path, server.url, "secret", "policy")
    assert (found["ok"], found["capture_level"], found["tool_support"]) == (True, "tokens", "ok")
    assert found["param_fixes"] == [], "no field was refused"
    assert found["n_prompt_ids"] == len(engine.requests[0].prompt)
    assert found["n_completion_ids"] == len(engine.tokenizer.encode("ok")) + 1


@needs("openenv")
@pytest.mark.parametrize(("mode", "level"), [("processed", "tokens"), ("raw", "logprobs")])
def test_openenv_trains_only_on_log_probabilities_at_the_temperature(mode: str, level: str, tmp_path: Path) -> None:
    if not STORIES.is_dir():
        pytest.skip(f"the model is not at {STORIES}")
    folder = tmp_path / "model"
    folder.mkdir()
    for file in STORIES.iterdir():  # the copies are writable
        shutil.copyfile(file, folder / file.name)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}\nOnce upon a time")
    options = ["--api-key", "secret", "--served-model-name", "policy", "--logprobs-mode", f"{mode}_logprobs"]
    served = Served(*options, folder=str(folder))
    try:
        found = run("openenv", tmp_path, served.url.removesuffix("/v1"), "secret", "policy")
    finally:
        served.close()
    assert (found["logprobs_mode"], found["capture_level"], found["ok"]) == (mode, level, level == "tokens")


def say(prompt: str) -> str:
    if "<tool_response>" not in prompt:
        return f"<think>\nI ask the shell.\n</think>\n\nI ask.\n{CALL}"
    result = prompt.rsplit("<tool_response>", 1)[1].split("</tool_response>")[0].strip()
    return f"<think>\nThat is it.\n</think>\n\nThe shell says {result}."


def play(kind: str, home: Path) -> tuple[Any, ScriptedEngine]:
    with scripted_server(say, session=None) as (server, engine):
        trace = run("verifiers", home, kind, server.url, "secret", "policy", engine.tokenizer.name_or_path)
    assert trace["errors"] == []
    assert trace["reward"] == 1.0
    assert trace["roles"] == ["system", "user", "assistant", "tool", "assistant"]
    assert [request.params.temperature for request in engine.requests] == [0.7, 0.7]
    return trace, engine


@needs("verifiers")
def test_verifiers_evaluates(tmp_path: Path) -> None:
    trace, _ = play("eval", tmp_path)
    assert trace["branches"] == [[[], [], []]], "its client for evaluations asks for no tokens"


@needs("verifiers")
def test_verifiers_gets_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    trace, engine = play("train", tmp_path)
    expected: list[int] = []
    mask: list[bool] = []
    for request, prompt in zip(engine.requests, engine.prompts, strict=True):
        assert request.prompt[: len(expected)] == expected, "a turn repeats the tokens before it"
        sampled = [*engine.tokenizer.encode(say(prompt)), engine.tokenizer.eos_token_id]
        mask += [False] * (len(request.prompt) - len(expected)) + [True] * len(sampled)
        expected = [*request.prompt, *sampled]
    assert trace["branches"] == [[expected, mask, [-0.25 if is_sampled else 0.0 for is_sampled in mask]]]
