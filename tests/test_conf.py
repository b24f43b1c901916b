"""Every YAML file that is shipped composes with every recipe it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.config import library
from areno.config.compose import load
from areno.config.experiments import DPOConfig, GRPOConfig, GSPOConfig, PPOConfig, SFTConfig
from areno.config.paths import find_file

RECIPES = {"sft": SFTConfig, "dpo": DPOConfig, "grpo": GRPOConfig, "gspo": GSPOConfig, "ppo": PPOConfig}
# The recipes a task is for, and what the user has to say.
TASKS: dict[str, tuple[list[str], list[str]]] = {
    "chat": (["sft"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "gsm8k": (["grpo", "gspo", "ppo"], []),
    "preferences": (["dpo"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "quickstart": (["grpo", "gspo", "ppo"], []),
    "quickstart_base": (["sft"], ["actor.path=folder"]),
    "quickstart_dpo": (["dpo"], []),
    "quickstart_ppo": (["ppo"], []),
    "stories": (["grpo", "gspo", "ppo"], ["actor.path=folder"]),
}
# What experiments leave to the user.
EXPERIMENT_NEEDS = {"grpo-stories-stories260k-cpu": ["actor.path=folder"]}
GROUPS = [(group, choice) for group, choices in library.groups().items() for choice in choices]
# What a choice needs beside it to make sense.
COMPANIONS = {"ref=default": ["actor.kl_ctl=0.1"], "valid_dataset=default": ["valid_dataset.path=rows.jsonl"]}


def test_every_task_is_listed_here():
    assert set(library.tasks()) == set(TASKS)


@pytest.mark.parametrize(("task", "recipe"), [(task, recipe) for task, (names, _) in TASKS.items() for recipe in names])
def test_task(task, recipe):
    config = load(RECIPES[recipe], task, TASKS[task][1])
    assert config.experiment_name
    for key in ("train_dataset.loader", "valid_dataset.loader", "reward.fn"):
        section = getattr(config, key.split(".")[0], None)
        value = getattr(section, key.split(".")[1]) if section else None
        if value and value.startswith("examples/"):
            assert find_file(value.split(":")[0], key).is_file()


@pytest.mark.parametrize("name", library.experiments())
def test_experiment(name):
    """A file of recipes/ is named for its recipe: gspo-gsm8k-qwen3-0.6b-1gpu. Its header says what to expect."""
    assert load(RECIPES[name.split("-")[0]], name, EXPERIMENT_NEEDS.get(name)).experiment_name
    header = library.experiments()[name].read_text(encoding="utf-8").split("defaults:")[0]
    assert all(f"# {word} " in header for word in ("Hardware", "Time", "Memory", "Curve"))
    assert f"--config-name={name}" in header
    assert name in Path(find_file("recipes/README.md")).read_text(encoding="utf-8")


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_group_choice(group, choice):
    override = f"{group}={choice}"
    base = load(GSPOConfig, "gsm8k", COMPANIONS.get(override, []) if override.endswith("null") else [])
    config = load(GSPOConfig, "gsm8k", [override, *COMPANIONS.get(override, [])])
    section, reference = config, base
    for name in group.split("/"):
        section, reference = getattr(section, name), getattr(reference, name)
    assert (section is None) == (choice == "null")
    # A choice that changes nothing would be decoration; these are what gsm8k has already.
    same = {"actor=qwen3-0.6b", "actor/adv_norm=group", "ref=null", "eval_gconfig=greedy", "saver=epoch"}
    assert section != reference or override in same


@pytest.mark.parametrize("recipe", RECIPES)
def test_default_of_a_recipe_exists(recipe):
    algorithm = get_algorithm(recipe)
    assert algorithm.default in {**library.tasks(), **library.experiments()}
    assert algorithm.config is RECIPES[recipe]


def test_every_file_says_what_it_is_for():
    conf = Path(find_file("conf"))
    for file in [*conf.rglob("*.yaml"), *library.experiments().values()]:
        assert library.headline(file), f"{file} begins with no comment"
