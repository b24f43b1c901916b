"""areno reward: the command that tries reward functions on recorded samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from areno.cli.__main__ import main
from areno.files.paths import find_file
from tests.helpers.endpoints import endpoint

NEAR = """
def near(record):
    if record.completion == "bad":
        raise KeyError("no such thing")
    return {"reward": float(record.completion == record.solutions), "length": len(record.completion)}

def level(record):
    return record.record["level"] + record.step / 10

def roles(record):
    return len(record.messages) + (record.prompt == "1+1=") + 10 * (record.completion == "2")
"""
ROWS = [
    {"prompt": "1+1=", "completion": "2", "solutions": "2", "level": 3, "step": 5, "reward": 1.0},
    {"prompt": "1+2=", "completion": "[b]4", "solutions": "3", "level": 4, "reward": 1.0},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(NEAR)
    return tmp_path


def data(*rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--data", "rows.jsonl", "--workers", "1"]


def lines(text):
    return [line.split() for line in text.splitlines() if line.strip()]


def test_a_table_of_rewards_and_parts(folder, capsys):
    assert main(["reward", "mine.py:near", *data(*ROWS)]) == 0
    out, err = capsys.readouterr()
    found = lines(out)
    assert found[0] == ["sample", "reward", "length", "recorded", "completion"]
    assert found[2:4] == [["0", "1", "1", "1", "2"], ["1", "0", "4", "1", "[b]4"]]
    assert ["reward", "0.5", "0.5", "0", "1", "2"] in found
    assert ["length", "2.5", "1.5", "1", "4", "2"] in found
    assert "1 of 2 rewards are at least 1" in out
    assert "1 of 2 rewards differ from those that were recorded" in out
    assert "2 samples in " in out
    assert not err


def test_several_functions_with_weights_and_settings(folder, capsys):
    functions = ["mine.py:near", "mine.py:level", "format", r"reward.format.pattern='\d'"]
    assert main(["reward", *functions, *data(*ROWS), "--weights", "1", "2", "0.5", "--show", "1"]) == 0
    found = lines(capsys.readouterr().out)
    assert found[0] == ["sample", "reward", "near", "near/length", "level", "format", "recorded", "completion"]
    assert found[2] == ["0", "8.5", "1", "1", "3.5", "1", "1", "2"]
    assert found[3][:3] == ["and", "1", "samples"]


def test_errors_with_their_traceback(folder, capsys):
    bad = {**ROWS[0], "completion": "bad"}
    assert main(["reward", "mine.py:near", *data(ROWS[0], *[bad] * 5)]) == 1
    out, err = capsys.readouterr()
    assert ["1", "error", "1", "bad"] in lines(out)
    assert err.count("Traceback (most recent call last):") == 3
    assert err.count("KeyError: 'no such thing'") == 3
    assert "mine.py" in err
    assert "process.py" not in err
    assert "5 of 6 samples have no reward: 5 error" in err
    assert main(["reward", "mine.py:near", *data(bad)]) == 1, "also where all samples fail"


def test_messages_of_trl(folder, capsys):
    row = {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    assert main(["reward", "mine.py:roles", *data(row)]) == 0
    assert ["0", "14", "2"] in lines(capsys.readouterr().out)


def test_tokens_are_counted(folder, capsys):
    model = str(find_file("examples/quickstart/model"))
    words = ["reward", "length", "reward.length.max_tokens=1", *data({"prompt": "", "completion": "12"})]
    assert main(words) == 1
    assert main([*words, "--tokenizer", model]) == 0
    assert ["0", "0", "12"] in lines(capsys.readouterr().out)


@pytest.mark.slow
def test_samples_of_a_run(folder, capsys):
    (folder / "run/logs").mkdir(parents=True)
    (folder / "run/logs/metrics.jsonl").touch()
    words = ["reward", "exact_match", "--data", "run"]
    assert main(words) == 1
    assert "has no samples; it was started with rollout.dump_n_samples=0" in capsys.readouterr().err
    (folder / "run/rollouts").mkdir()
    for step, answer in ((1, "a"), (2, "b")):
        line = {"prompt": "p", "completion": answer, "solutions": "a", "reward": 0.0}
        (folder / f"run/rollouts/{step:06d}.jsonl").write_text(json.dumps(line) + "\n")
    for more, reward in (([], "0"), (["--step", "1"], "1")):
        assert main([*words, *more]) == 0
        assert lines(capsys.readouterr().out)[2][:2] == ["0", reward]
    (folder / "run/rollouts/000003.jsonl").touch()  # a disk that was full, perhaps
    assert main(words) == 0
    assert lines(capsys.readouterr().out)[2][:2] == ["0", "0"], "of step 2, the last one that has any"
    assert main([*words, "--step", "3"]) == 1
    assert "--data: run has no samples of step 3" in capsys.readouterr().err


def test_recorded_rewards_that_are_no_numbers(folder, capsys):
    assert main(["reward", "mine.py:near", *data({**ROWS[0], "reward": "high", "step": "x"})]) == 0
    assert "1 of 1 rewards are at least 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["maths"], "FUNCTION: is 'maths'; .*did you mean math"),
        (["none.py"], "FUNCTION: there is no 'none.py'"),
        (["reward.timeout=3", "math"], "reward.timeout: unknown.*did you mean"),
        (["math", "--weights", "1", "2"], "weights: has 2 numbers for 1 function;"),
        (["reward.workers=3"], "FUNCTION: is missing"),
        (["math", "--step", "1"], "--step: is 1, but rows.jsonl is not the folder of a run"),
        (["math", "--data", "none.jsonl"], "--data: there is no"),
        (["math", "--limit", "0"], "--limit: is 0; at least 1 is expected"),
    ],
)
def test_a_wrong_command_line(folder, capsys, words, message):
    assert main(["reward", *data(*ROWS), *words] if "--data" not in words else ["reward", *words]) != 0
    assert re.search(message, capsys.readouterr().err)


def test_rows_without_a_completion(folder, capsys):
    assert main(["reward", "math", *data(ROWS[0], {"prompt": "1"})]) == 1
    assert "sample 1: needs prompt and completion; it has prompt" in capsys.readouterr().err
    assert main(["reward", "math", *data({"prompt": 5, "completion": ["a"]})]) == 1
    assert "sample 0: prompt is 5; text or a list of messages is expected" in capsys.readouterr().err


def test_an_endpoint_judges_samples_alone_and_beside_functions(folder, capsys):
    def say(request):
        return "yes" if "[Answer]\n2" in request["messages"][0]["content"] else "no"

    with endpoint(say) as (url, _):
        words = [f"reward.judge.base_url={url}", "reward.judge.model=m", "reward.judge.weight=0.5"]
        assert main(["reward", *words, *data(*ROWS)[:2]]) == 0
        found = lines(capsys.readouterr().out)
        assert found[0][:4] == ["sample", "reward", "judge", "judge/blank"]
        assert [row[1:3] for row in found[2:4]] == [["0.5", "1"], ["0", "0"]]
        assert main(["reward", "mine.py:near", *words, *data(*ROWS)]) == 0
        found = lines(capsys.readouterr().out)
        assert [row[1] for row in found[2:4]] == ["1.5", "0"]


def test_an_endpoint_compares_samples_of_equal_prompts(folder, capsys):
    with endpoint(lambda _: "A") as (url, requests):
        words = [f"reward.judge.base_url={url}", "reward.judge.model=m", "reward.judge.compare=true"]
        rows = [{**ROWS[0], "completion": text} for text in ("1", "2", "3")]
        assert main(["reward", *words, *data(*rows, ROWS[1])[:2]]) == 1
    assert len(requests) == 1 + 6
    said = capsys.readouterr()
    assert [row[1] for row in lines(said.out)[2:6]] == ["0.5"] * 3 + ["error"]
    assert "there is no other answer to this prompt" in said.err


@pytest.mark.slow
def test_opponents_are_the_next_answers_to_the_same_prompt_as_in_a_run(folder, capsys):
    """Three answers are a ring, so that each meets both of the others, though another prompt lies between them."""
    with endpoint(lambda _: "A") as (url, requests):
        words = [f"reward.judge.base_url={url}", "reward.judge.model=m", "reward.judge.compare=true"]
        rows = [{**ROWS[0], "completion": text} for text in ("1", "2", "3")]
        others = [{**ROWS[1], "completion": text} for text in ("4", "5")]
        rows = [rows[0], others[0], rows[1], others[1], rows[2]]
        assert main(["reward", *words, "reward.judge.opponents=1", *data(*rows)[:2]]) == 0
    assert len(requests) == 1 + 6 + 2


def test_a_judge_of_a_run_is_refused_before_functions_run(folder, capsys):
    assert main(["reward", "mine.py:near", "reward.judge.path=m", *data(*ROWS)[:2]]) == 2
    said = capsys.readouterr()
    assert "reward.judge.path: is m, which only a run loads" in said.err
    assert "reward process" not in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reward.judge.retries=2"], "FUNCTION: is missing"),
        (["reward.judge.base_url=null"], "FUNCTION: is missing"),
        (["reward.judge=3"], "FUNCTION: is missing"),
        (["reward.judge.base_url=http://h", "reward.judge.model=m", "--workers", "3"], "--workers: is 3, but"),
        (["reward.judge.base_url=http://h", "reward.judge.model=m", "--timeout-s", "3"], "--timeout-s: is 3"),
    ],
)
def test_arguments_without_a_function_are_refused(folder, capsys, words, message):
    assert main(["reward", *words, *data(*ROWS)[:2]]) == 2
    assert message in capsys.readouterr().err
