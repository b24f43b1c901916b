"""`areno check` on every task of conf/: nothing is red, and no check fails itself. A new task is covered, too."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.checked import data_file, failed, findings, red
from tests.helpers.pages import ROOT

pytestmark = pytest.mark.slow

TASKS = sorted(file.stem for file in (ROOT / "conf").glob("*.yaml"))
NOT_RUN = {
    "train": "has no task: the flags of `areno train` give model, data and reward",
    "environment": "needs a package of environments; tests/environments has runs with such packages",
}
CHAT = "examples/agentic/small_model/model"  # a model with a chat template
SUMS = [(f"What is {a} plus {b}?", str(a + b), str(a + b + 1)) for a in range(3, 11) for b in range(2, 8)]

Inputs = Callable[[Path], list[str]]


def of_rows(
    row: Callable[[str, str, str], dict], *settings: str, valid: bool = False, is_random: bool = False
) -> Inputs:
    """Write rows of sums as the data, and use the small model with a chat template."""

    def make(folder: Path) -> list[str]:
        rows = [row(*each) for each in SUMS]
        model = random_model_like(CHAT, folder / "model") if is_random else CHAT
        given = [f"train_dataset.path={data_file(folder / 'train.jsonl', rows[8:])}", f"actor.path={model}", *settings]
        return given + [f"valid_dataset.path={data_file(folder / 'valid.jsonl', rows[:8])}"] * valid

    return make


def settings(*given: str) -> Inputs:
    return lambda folder: list(given)


def random_model_like(path: str, folder: Path, **changes: object) -> Path:
    """Return a folder with the shape and the tokenizer of a model. The check makes random weights for it."""
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def model_without_template(folder: Path) -> Path:
    """Return a random model for texts that are continued, whose prompts begin with <s>."""
    model = random_model_like(CHAT, folder)
    (model / "chat_template.jinja").unlink()
    return model


def script(file: str, *arguments: str) -> None:
    before = sys.argv
    sys.argv = [file, *arguments]
    try:
        runpy.run_path(file, run_name="__main__")
    finally:
        sys.argv = before


def tasks_model(folder: Path) -> str:
    script("examples/agentic/small_model/make_shape.py", str(folder / "m"), "examples/agentic/tasks/demonstrations.py")
    return f"actor.path={folder / 'm'}"


def mixture_model(folder: Path) -> str:
    script("examples/agentic/small_model/make_shape.py", str(folder / "m"), "examples/mixture/demonstrations.py")
    return f"actor.path={folder / 'm'}"


def tasks(folder: Path) -> list[str]:
    script("examples/agentic/tasks/make_tasks.py", str(folder / "tasks"))
    return [tasks_model(folder), f"train_dataset.path={folder / 'tasks'}"]


def quickstart_teacher(folder: Path) -> list[str]:
    return [f"teacher.path={random_model_like('examples/quickstart/model', folder / 'teacher')}"]


def quickstart_reward_model(folder: Path) -> list[str]:
    kind = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    return [f"reward.path={random_model_like('examples/quickstart/model', folder / 'reward', **kind)}"]


SHORT = ("gconfig.max_new_tokens=64", "train_dataset.max_length=256")  # the context of the model is short
BATCH = "train_dataset.batch_size=16"
FEWER = "train_dataset.dataset_kwargs.count=2000"  # rows, which take time to make
ARITHMETIC, COUNTDOWN = "actor.path=examples/arithmetic/model_cpu", "actor.path=examples/countdown/model_cpu"
STUDENT, TEACHER = "actor.path=examples/countdown/model_student_cpu", "teacher.path=examples/countdown/model_cpu"
INPUTS: dict[str, Inputs] = {
    **dict.fromkeys(("arithmetic", "arithmetic_cpu", "arithmetic_ppo"), settings(ARITHMETIC, FEWER)),
    **dict.fromkeys(("countdown", "countdown_cpu", "countdown_ppo"), settings(COUNTDOWN, FEWER)),
    **dict.fromkeys(("countdown_distill", "countdown_distill_cpu"), settings(STUDENT, TEACHER, FEWER)),
    **dict.fromkeys(("arithmetic_base", "arithmetic_base_cpu"), settings(FEWER)),
    **dict.fromkeys(("countdown_base", "countdown_base_cpu"), settings(FEWER)),
    "chat": of_rows(lambda asked, right, wrong: {"prompt": asked, "response": right}),
    "labels": of_rows(lambda asked, right, wrong: {"prompt": asked, "response": right, "label": int(right) % 2 == 0}),
    "preferences": of_rows(lambda asked, right, wrong: {"prompt": asked, "chosen": right, "rejected": wrong}),
    "ratings": of_rows(lambda asked, right, wrong: {"prompt": asked, "chosen": right, "rejected": wrong}, BATCH),
    "prompts": of_rows(lambda asked, right, wrong: {"prompt": asked, "solutions": right}, *SHORT, "reward.fn=math"),
    "steps": of_rows(
        lambda asked, right, wrong: {
            "prompt": asked,
            "completions": [f"I add and get {right}.", f"So it is {wrong}."],
            "labels": [True, False],
        },
        BATCH,
    ),
    "gsm8k": of_rows(
        lambda asked, right, wrong: {"question": asked, "answer": f"I add both numbers.\n#### {right}"},
        *SHORT,
        valid=True,
        is_random=True,
    ),
    "stories": lambda folder: [f"actor.path={model_without_template(folder / 'model')}"],
    "mixture_base": lambda folder: [mixture_model(folder), FEWER],
    "mixture": lambda folder: [mixture_model(folder)],
    "tasks_base": lambda folder: [tasks_model(folder)],
    "tasks": tasks,
    "quickstart_distill": quickstart_teacher,
    "quickstart_rlhf": quickstart_reward_model,
}


def recipe_of(task: str) -> str:
    """Return the first recipe that the file of a task names."""
    text = (ROOT / "conf" / f"{task}.yaml").read_text(encoding="utf-8")
    return text.partition("# Recipes: ")[2].split("\n")[0].split(",")[0].strip()


@pytest.mark.parametrize("task", [task for task in TASKS if task not in NOT_RUN])
def test_nothing_is_red_in_a_task_that_comes_with_areno(task, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = INPUTS.get(task, settings())(tmp_path)
    found = findings(
        f"{recipe_of(task)} {task}",
        *given,
        only="data,reward,settings,gradient,algorithm,plan,resume",
        device="h200",
        most_rows=2000,
    )
    assert not red(found), [each for each in found if each.verdict == "red"]
    assert not failed(found), failed(found)
