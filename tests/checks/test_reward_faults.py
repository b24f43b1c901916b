"""Faults of rewards, each planted as a user's file and found by its name; nothing is red in the clean twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areno.checks import short_runs
from areno.checks.inputs.findings import Check, Finding
from areno.checks.rewards import reward_functions
from areno.checks.short_runs import groups_with_signal
from tests.helpers.checked import failed, findings, found_by, red
from tests.helpers.checked_rows import chat_model
from tests.helpers.endpoints import endpoint

RIGHT = "    return 1.0 if record.completion.strip() == record.solutions else 0.0\n"


def found_with(folder: Path, body: str, *settings: str, check: Check = reward_functions) -> list[Finding]:
    file = folder / "reward.py"
    file.write_text(
        f"import itertools\nimport os\nimport random\n\ncalls = itertools.count()\n\n\ndef reward_fn(record):\n{body}"
    )
    return found_by([check], "gspo", "--config-name=quickstart", f"reward.fn={file}", *settings)


def test_a_right_reward_is_green(tmp_path: Path) -> None:
    found = [*found_with(tmp_path, RIGHT), *found_with(tmp_path, RIGHT, check=groups_with_signal)]
    assert not red(found), found
    assert not failed(found)
    assert {each.name for each in found if each.verdict == "green"} >= {
        "reward-reference",
        "group-signal",
        "reward-reach",
    }


def test_groups_whose_samples_would_take_too_long_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "_SECONDS", 1e-9)
    monkeypatch.setattr(short_runs, "_TRIED_TOKENS", 1)
    [found] = found_with(tmp_path, "    return 0.0\n", check=groups_with_signal)
    assert found.verdict == "not checked"
    assert "0 of 4 groups" in found.line
    assert "cut at 1 tokens, as sampling 16 (gconfig.max_new_tokens) takes too long" in found.line
    body = "    return float(record.completion[:1] in '02468')\n"
    [found] = found_with(tmp_path, body, check=groups_with_signal)
    assert found.verdict == "green"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("    return 1.0\n", "reward-signal"),  # always says yes
        ("    return 0.0\n", "group-signal"),
        ("    return float(record.completion != record.solutions)\n", "reward-reference"),  # the wrong way round
        ("    return random.random()\n", "reward-repeatable"),
        ("    return float(os.getpid())\n", "reward-repeatable"),
        ("    return next(calls) % 7\n", "reward-repeatable"),  # depends on the order
        ("    return float(record.completion.split()[0] == record.solutions)\n", "reward-failures"),  # an empty answer
        ("    return float('nan') if not record.completion else 1.0\n", "reward-failures"),
        (RIGHT.replace("record.solutions", "record.record['answer_of_next']"), "reward-failures"),
    ],
)
def test_a_wrong_reward_is_found(body: str, name: str, tmp_path: Path) -> None:
    check = groups_with_signal if name == "group-signal" else reward_functions
    assert name in red(found_with(tmp_path, body, check=check))


@pytest.mark.slow
def test_the_reward_of_another_row_is_found(tmp_path: Path) -> None:
    loader = tmp_path / "loader.py"
    loader.write_text(
        "def load_dataset(split):\n"
        "    rows = [{'prompt': f'{n}+{n}=', 'solutions': str(2 * n), 'next': str(2 * n + 2)} for n in range(10, 49)]\n"
        "    return rows\n"
    )
    settings = (f"train_dataset.loader={loader}", "valid_dataset=null")
    assert red(found_with(tmp_path, RIGHT.replace("record.solutions", "record.record['next']"), *settings)) >= {
        "reward-row"
    }
    assert not red(found_with(tmp_path, RIGHT, *settings))


def test_prompts_that_end_with_their_answer_are_found(tmp_path: Path) -> None:
    loader = tmp_path / "loader.py"
    loader.write_text(
        "def load_dataset(split):\n"
        "    return [{'prompt': f'{n}+{n}={2 * n}=', 'solutions': str(2 * n)} for n in range(10, 49)]\n"
    )
    settings = (f"train_dataset.loader={loader}", "valid_dataset=null")
    assert "told-answers" in red(found_with(tmp_path, RIGHT, *settings))


@pytest.mark.slow
def test_answers_out_of_reach_are_found(tmp_path: Path) -> None:
    assert "reward-reach" in red(found_with(tmp_path, RIGHT, "gconfig.max_new_tokens=2"))


def test_async_functions_are_not_called_offline(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"async def reward_fn(record):\n{RIGHT}")
    found = findings("gspo quickstart", f"reward.fn={file}", only="reward", offline=True)
    assert next((each.name, each.verdict) for each in found) == ("reward-functions", "not checked")


@pytest.mark.parametrize(
    ("says", "names"),
    [
        (lambda request: ("Yes", {"Yes": 0.97, "No": 0.03}), {"judge-signal"}),  # always yes
        (lambda request: ("?", {}), {"judge-answers"}),
        (lambda request: ("Yes", {"Yes": 0.2, "No": 0.8} if "areno areno" in str(request) else {"Yes": 0.9}), set()),
    ],
)
def test_a_judge_without_judgement_is_found(says: Any, names: set[str]) -> None:
    with endpoint(says) as (url, requests):
        settings = ("reward.fn=null", f"reward.judge.base_url={url}", "reward.judge.model=m", "reward.judge.retries=0")
        found = findings("gspo quickstart", *settings, only="reward", n_calls=6)
        assert red(found) == names
        assert 0 < len(requests) <= 6
        requests.clear()
        found = findings("gspo quickstart", *settings, only="reward", offline=True)
        assert ("judge", "not checked") in [(each.name, each.verdict) for each in found]
        assert not requests


def reward_of_rows(folder: Path, body: str, row: str, *settings: str) -> list[Finding]:
    """Check a reward on rows of n = 460 .. 509, each written as a dictionary."""
    loader = folder / "loader.py"
    loader.write_text(f"def load_dataset(split):\n    return [{row} for n in range(460, 510)]\n")
    return found_with(folder, body, f"train_dataset.loader={loader}", "valid_dataset=null", *settings)


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("f'What is {n} plus {n}?'", {"reward-signal"}),
        ("f'Reach {2 * n} with these numbers: {n}, {n}.'", set()),  # a puzzle, whose answer has a form of its own
    ],
)
def test_a_reward_of_nothing_is_found(prompt: str, names: set[str], tmp_path: Path) -> None:
    row, model = f"{{'prompt': {prompt}, 'solutions': str(2 * n)}}", "examples/agentic/small_model/model"
    assert red(reward_of_rows(tmp_path, "    return 0.0\n", row, f"actor.path={model}")) == names


HASHED = "    return float(record.completion.split('####')[-1].strip() == record.solutions)\n"


@pytest.mark.slow
def test_stop_strings_that_cut_right_answers_are_found(tmp_path: Path) -> None:
    model = ("actor.path=examples/agentic/small_model/model", "gconfig.max_new_tokens=20")
    found = found_with(tmp_path, HASHED, *model, "gconfig.stop=['####']")
    assert red(found) == {"reward-stop"}
    assert "gconfig.stop" in next(each.line for each in found if each.name == "reward-stop")
    assert not red(found_with(tmp_path, HASHED, *model, "gconfig.stop=['\\n\\n']"))


LAST_WORD = "    said = record.completion.split()\n    right = record.solutions in said[-1:]\n"


@pytest.mark.slow
def test_a_reward_for_words_is_found(tmp_path: Path) -> None:
    row, room = "{'prompt': f'{n}+{n}=', 'solutions': str(2 * n)}", "gconfig.max_new_tokens=115"
    for words in ("- 0.1 * len(said)", "+ 0.1 * len(said)"):
        found = reward_of_rows(tmp_path, f"{LAST_WORD}    return right {words}\n", row, room)
        assert "reward-length" in red(found)
    assert not red(reward_of_rows(tmp_path, f"{LAST_WORD}    return right - 0.001 * len(said)\n", row, room))


def test_worked_solutions_of_the_rows_are_tried(tmp_path: Path) -> None:
    row = (
        "{'prompt': f'{n}+{n}=', 'solutions': str(2 * n), 'work': f'We add {n} ' + 'and then think ' * 9 + str(2 * n)}"
    )
    found = reward_of_rows(tmp_path, f"{LAST_WORD}    return right - 0.05 * len(said)\n", row)
    assert "'work'" in next(each.line for each in found if each.name == "reward-length")


@pytest.mark.slow
def test_a_wrong_number_with_the_right_one_inside_is_found(tmp_path: Path) -> None:
    row = "{'prompt': f'{n}+{n}=', 'solutions': str(2 * n)}"
    inside = "    return float(record.solutions in record.completion)\n"
    listed = "    return float(record.solutions in record.completion.replace(',', '').split())\n"
    assert red(reward_of_rows(tmp_path, inside, row)) == {"reward-wrong"}
    assert red(reward_of_rows(tmp_path, listed, row)) == {"reward-wrong"}
    assert not red(reward_of_rows(tmp_path, RIGHT, row, "reward.fn=math"))


@pytest.mark.slow
def test_rows_whose_answer_is_not_read_are_found(tmp_path: Path) -> None:
    row = "{'prompt': f'{n}+{n}=', 'solutions': f'{2 * n:,}'}"
    as_float = (
        "    try:\n        return float(float(record.completion) == float(record.solutions))\n"
        "    except ValueError:\n        return 0.0\n"
    )
    found = reward_of_rows(tmp_path, as_float, row)
    assert red(found) == {"reward-each-row"}
    assert "have a comma" in next(each.line for each in found if each.name == "reward-each-row")
    assert not red(reward_of_rows(tmp_path, RIGHT, row))


@pytest.mark.slow
def test_a_reward_that_wants_the_reasoning_opened_twice_is_found(tmp_path: Path) -> None:
    opened = ("{{- '<|im_start|>assistant\\n' -}}", "{{- '<|im_start|>assistant\\n<think>\\n' -}}")
    model = (f"actor.path={chat_model(tmp_path, opened)}", "gconfig.max_new_tokens=100")
    row = "{'prompt': f'What is {n} plus {n}? Answer in \\\\boxed{{}}.', 'solutions': str(2 * n)}"
    body = "    text = record.completion\n    right = text.endswith('{' + record.solutions + '}')\n"
    found = reward_of_rows(tmp_path, f"{body}    return float(right and text.startswith('<think>'))\n", row, *model)
    assert red(found) == {"reward-continuation"}
    assert "opens <think> again gets 1" in next(each.line for each in found if each.name == "reward-continuation")
    found = reward_of_rows(tmp_path, f"{body}    return float(right and '</think>' in text)\n", row, *model)
    assert not red(found)
    closed = ("actor.path=examples/agentic/small_model/model", *model[1:])
    body += "    return float(right and text.startswith('<think>') and '</think>' in text)\n"
    assert not red(reward_of_rows(tmp_path, body, row, *closed))


def test_a_reward_that_is_cached_by_prompt_is_found_once(tmp_path: Path) -> None:
    body = "    key = tuple(record.prompt_tokens)\n    right = record.completion == record.solutions\n"
    found = found_with(tmp_path, f"{body}    return cached.setdefault(key, float(right))\n\n\ncached = {{}}\n")
    assert red(found) == {"reward-repeatable"}
    assert "cached by prompt" in next(each.line for each in found if each.name == "reward-repeatable")
