"""Whatever lies in the folder of a run or in a configuration file, a command ends with a result or one clear error."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.launch import command
from areno.recipes.gspo import ALGORITHM, GSPOConfig
from areno.report import page, replayed_tokens
from tests.helpers.played import TASK, Main, Played, task_folder


def bounded(n: int) -> Any:
    """Decorate a test with n examples, the same in each run, each of which ends within a minute on a loaded machine."""
    return settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=60_000,
        report_multiple_bugs=False,  # a group of errors hides what they are from the summary
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
        ],
    )


NAMES = [
    *("step", "time", "train/loss", "rollout/rewards_mean", "time/step", "reward", "prompt", "completion", "tokens"),
    *("token_ids", "prompt_token_ids", "logprobs", "train_logprobs", "token_advantages", "advantage", "group", "row"),
    *("rows", "sources", "trained", "trajectory", "turns", "response_tokens", "finish_reason", "versions", "loss_mask"),
    *("actor", "path", "saver", "hydra", "overrides", "task", "defaults", "areno", "gconfig", "experiment_name"),
    *("trial_name", "cluster", "recover", "stats_logger", "run", "sweep", "mode", "launcher", "searchpath", "engine"),
]
ODD = [10**400, -(10**5), 1e308, 2**70, "${x}", "${actor}", "???", "\ud800", "\0", "1e-6", "/", "<b>"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=6), st.sampled_from(ODD)
)
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=4))
values = st.recursive(
    scalars, lambda one: st.lists(one, max_size=4) | st.dictionaries(names, one, max_size=5), max_leaves=10
)
mappings = st.dictionaries(names, values, max_size=6)


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=str).encode("utf-8", "replace")


def as_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False).encode("utf-8", "replace")


contents = st.one_of(
    st.binary(max_size=40),
    values.map(as_json),
    values.map(as_yaml),
    mappings.map(as_yaml),
    st.lists(mappings, max_size=3).map(lambda lines: b"".join(as_json(line) + b"\n" for line in lines)),
)
"""Of a file, whatever it should hold."""
changes = st.one_of(
    contents.map(lambda new: ("replace", 0.0, new)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(max_size=6) | st.sampled_from([b"[" * 50, b"{" * 2000])),
    st.tuples(st.just("update"), st.just(0.0), mappings),
)
"""Of a file that is fine."""


def changed(content: bytes, change: tuple[str, float, Any]) -> bytes:
    how, where, new = change
    place = int(where * len(content))
    if how == "replace":
        return new
    if how == "update":  # some fields of each line, or of the settings
        try:
            lines = [json.loads(line) for line in content.splitlines()]
        except ValueError:
            found = yaml.safe_load(content) if b"epoch=" not in content else {}
            return as_yaml({**found, **new} if isinstance(found, dict) else [*found, new])
        return b"".join(as_json({**line, **new}) + b"\n" for line in lines)
    return content[:place] + (new + content[place:] if how == "insert" else b"")


def ends(capture: Any) -> None:
    """Call it, and hold it to the rule: no exception, and one clear error where it fails."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # as strict as a pipe
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = capture()
        except SystemExit as end:
            code = end.code
    text = err.getvalue()
    assert "Traceback" not in text, text
    assert code in (0, 1, 2), code
    assert code == 0 or any(line.startswith("error: ") for line in text.splitlines()), text


SAMPLE = {
    "row": 0,
    "group": 0,
    "prompt": "1+1=",
    "completion": "2",
    "reward": 1.0,
    "status": "ok",
    "message": "",
    "solutions": "2",
    "prompt_tokens": 4,
    "response_tokens": 2,
    "finish_reason": "stop",
    "advantage": 0.5,
    "prompt_token_ids": [1, 2, 3, 4],
    "token_ids": [5, 0],
    "tokens": ["2", ""],
    "logprobs": [-0.1, -0.2],
    "versions": [[1, 2]],
}
TURN = {
    "tokens": [1, 2, 5, 0],
    "sources": [[2, 2], [4, 2]],
    "trained": [[0, 2], [1, 2]],
    "logprobs": [-0.1, -0.2],
    "versions": [[1, 2]],
}
AGENTS = {
    **{
        name: SAMPLE[name]
        for name in ("row", "group", "prompt", "completion", "reward", "advantage", "status", "response_tokens")
    },
    "trajectory": {"turns": 1, "rows": [TURN]},
}
FILES = {
    "config.yaml": b"# Recipes: gspo\n" + TASK.partition("\n")[2].encode() + b"trial_name: t\n",
    "overrides.yaml": b'- "seed=1"\n',
    "versions.json": b'{"areno": "1", "git": null}\n',
    "multirun.yaml": b"hydra: {overrides: {task: [seed=1]}}\n",
    "logs/metrics.jsonl": b"".join(
        as_json({"step": step, "time": 10.0 * step, "train/loss": 1.0 / step, "time/step": 2.0}) + b"\n"
        for step in (1, 2)
    ),
    "logs/run.log": b"12:00:00 epoch=0 stage=epoch_start\n12:00:09 done: 2 steps in 9 s\n",
    "rollouts/000002.jsonl": as_json(SAMPLE) + b"\n" + as_json(AGENTS) + b"\n",
    "state/finished.json": b'{"step": 2, "result": 0.5}',
    "state/step-000002/index.json": b"{}",
    "eval/000002.jsonl": as_json(SAMPLE) + b"\n",
}
OF_SWEEP = {"multirun.yaml"}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder `my` for --config-dir, and commands that load no model and draw no curve."""
    task_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(page, "_plotly_source", lambda: "")
    monkeypatch.setattr(replayed_tokens, "plan_of_experiment", lambda config: SimpleNamespace(tokenizer=Tokenizer()))
    monkeypatch.setattr(
        replayed_tokens, "_logprobs", lambda plan, config, roles, tokens: (np.zeros(len(tokens)), None, None)
    )
    return tmp_path


class Tokenizer:
    chat_template, eos_token_id = None, 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(sign) % 50 for sign in text]

    def decode(self, tokens: list[int]) -> str:
        return str(tokens)


def odd_run(name: str, change: tuple[str, float, Any]) -> None:
    """A run in the folder `t`, one file of which is changed."""
    shutil.rmtree("t", ignore_errors=True)
    for path, content in FILES.items():
        if path not in OF_SWEEP or name == path:
            file = Path("t", path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(changed(content, change) if path == name else content)


@pytest.mark.slow
@given(name=st.sampled_from(list(FILES)), change=changes)
@bounded(60)
def test_commands_that_read_a_run(work, name, change):
    odd_run(name, change)
    shutil.rmtree("other", ignore_errors=True)
    shutil.copytree("t", "other")
    ends(lambda: main(["runs", "."]))
    ends(lambda: main(["compare", "t", "other"]))
    ends(lambda: main(["report", "t", "other", "-o", "page.html"]))


@pytest.mark.slow
@given(
    name=st.sampled_from(["config.yaml", "rollouts/000002.jsonl", "rollouts/000002.jsonl", "versions.json"]),
    change=changes,
    number=st.integers(0, 2),
)
@bounded(30)
def test_replay(work, name, change, number):
    odd_run(name, change)
    Path("model").mkdir(exist_ok=True)
    ends(lambda: main(["replay", "t", "--step", "2", "--sample", str(number), "--checkpoint", "model", "--json"]))
    ends(lambda: main(["replay", "t", "--step", "2", "--sample", str(number)]))


@pytest.mark.slow
@given(name=st.sampled_from([name for name in FILES if not name.startswith(("rollouts", "eval"))]), change=changes)
@bounded(15)
def test_resume(work, name, change):
    odd_run(name, change)
    played = Played(name="gspo", config=GSPOConfig, loop=ALGORITHM.loop, default="small", main=Main())
    ends(lambda: command.run(played, "gspo", ["--resume", "t"]))
    ends(
        lambda: command.run(
            played,
            "gspo",
            ["--config-dir=my", "--config-name=small", "trial_name=t", "cluster.fileroot=.", "experiment_name=."],
        )
    )


@pytest.mark.slow
@given(change=changes, override=st.none() | st.text(max_size=8) | st.builds("{}={}".format, names, values))
@bounded(30)
def test_configuration_files(work, change, override):
    Path("my/odd.yaml").write_bytes(changed(TASK.encode(), change))
    words = [] if override is None or override.startswith("-") else [override]
    ends(
        lambda: command.run(
            get_algorithm("gspo"), "gspo", ["--config-dir=my", "--config-name=odd", "--cfg=job", *words]
        )
    )
