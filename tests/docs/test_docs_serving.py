"""The page about serving: its run, its server and its scripts work, and it names the fields that the server reads."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areno.server.requests import read_chat, read_completion
from areno.types import SamplingParams
from tests.helpers import warm_python
from tests.helpers.pages import ROOT, blocks

PAGE = ROOT / "docs" / "serving.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    """The first run makes the checkpoint; it is served while the scripts run; the other commands follow."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    runs = [text for info, text in blocks(PAGE) if info == "bash run"]
    script = "\n".join(text for info, text in blocks(PAGE) if info == "python")
    pairs = itertools.pairwise(blocks(PAGE))
    shown = [text for (before, _), (info, text) in pairs if (before, info) == ("python", "text")]

    def run(words: list[str]) -> str:
        done = warm_python.commands().run(words, tmp_path, environment, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run(shlex.split(runs[0])[1:])
    [command] = [text for info, text in blocks(PAGE) if info == "bash serve"]
    words = [*shlex.split(command.replace("8000", "0"))[1:], "--device", "cpu"]
    server = subprocess.Popen(
        [sys.executable, "-m", "areno.cli", *words], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        url = next(line.partition(" at ")[2].split()[0] for line in server.stderr if "serving" in line)
        (tmp_path / "script.py").write_text(script.replace("http://127.0.0.1:8000/v1", url))
        assert run(["script.py"]) == "".join(shown)
    finally:
        server.kill()
        server.wait()
    for line in runs[1:]:
        run(shlex.split(line)[1:])


def test_the_fields_of_requests_are_those_that_are_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    said = text.partition("Requests may have")[2].partition("An unknown field")[0]
    fields = set(re.findall(r"`(\w+)`", said))
    values = {
        "n": 1,
        "stop": "a",
        "seed": 1,
        "temperature": 1,
        "top_p": 1,
        "max_tokens": 3,
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 1,
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "reasoning_effort": "none",
        "best_of": 1,
        "stream": False,
        "top_k": 1,
        "min_p": 0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "chat_template_kwargs": {},
        "return_token_ids": True,
    }
    assert fields == {*values, "echo"}
    read_chat({"model": "m", "messages": [{"role": "user", "content": "a"}], **values}, SamplingParams())
    read_completion({"model": "m", "prompt": "a", "echo": True}, SamplingParams())
