"""Every YAML file that is shipped composes with every recipe it is for."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from areno.api import get_algorithm
from areno.files.paths import find_file
from areno.launch import help, yaml_files
from areno.launch.compose import load
from areno.recipes.distill import DistillConfig
from areno.recipes.dpo import DPOConfig
from areno.recipes.grpo import GRPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.kto import KTOConfig
from areno.recipes.online_dpo import OnlineDPOConfig
from areno.recipes.ppo import PPOConfig
from areno.recipes.prm import ProcessRewardConfig
from areno.recipes.rw import RewardModelConfig
from areno.recipes.sft import SFTConfig

ROOT = Path(__file__).parents[2]
RECIPES = {
    "sft": SFTConfig,
    "distill": DistillConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "rw": RewardModelConfig,
    "prm": ProcessRewardConfig,
    "grpo": GRPOConfig,
    "gspo": GSPOConfig,
    "online_dpo": OnlineDPOConfig,
    "ppo": PPOConfig,
}
# The recipes a task is for, and what the user has to say.
TASKS: dict[str, tuple[list[str], list[str]]] = {
    "agents_base": (["sft"], []),
    "arithmetic": (["grpo", "gspo", "ppo", "online_dpo"], ["actor.path=folder"]),
    "arithmetic_base": (["sft"], []),
    "arithmetic_base_cpu": (["sft"], []),
    "arithmetic_cpu": (["grpo", "gspo", "online_dpo"], ["actor.path=folder"]),
    "arithmetic_ppo": (["ppo"], ["actor.path=folder"]),
    "chat": (["sft"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "countdown": (["grpo", "gspo", "ppo", "online_dpo"], ["actor.path=folder"]),
    "countdown_base": (["sft"], []),
    "countdown_base_cpu": (["sft"], []),
    "countdown_cpu": (["grpo", "gspo", "online_dpo"], ["actor.path=folder"]),
    "countdown_distill": (["distill"], ["actor.path=folder", "teacher.path=other"]),
    "countdown_distill_cpu": (["distill"], ["actor.path=folder", "teacher.path=other"]),
    "countdown_ppo": (["ppo"], ["actor.path=folder"]),
    "environment": (["grpo", "gspo", "ppo"], ["actor.path=folder", "train_dataset.path=verifiers:wordle"]),
    "gsm8k": (["grpo", "gspo", "ppo", "online_dpo"], []),
    "mixture": (["grpo", "gspo"], []),
    "mixture_base": (["sft"], []),
    "preferences": (["dpo"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "prompts": (
        ["grpo", "gspo", "ppo", "online_dpo"],
        ["actor.path=folder", "train_dataset.path=rows.jsonl", "reward.fn=math"],
    ),
    "quickstart": (["grpo", "gspo", "ppo", "online_dpo"], []),
    "quickstart_base": (["sft"], ["actor.path=folder"]),
    "quickstart_distill": (["distill"], []),
    "quickstart_dpo": (["dpo"], []),
    "quickstart_kto": (["kto"], []),
    "quickstart_online_dpo": (["online_dpo"], []),
    "quickstart_ppo": (["ppo"], []),
    "quickstart_rlhf": (["ppo"], []),
    "quickstart_prm": (["prm"], []),
    "quickstart_rw": (["rw"], []),
    "ratings": (["rw"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "steps": (["prm"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "labels": (["kto"], ["actor.path=folder", "train_dataset.path=rows.jsonl"]),
    "stories": (["grpo", "gspo", "ppo"], ["actor.path=folder"]),
    "tictactoe": (["grpo", "gspo"], []),
    "tasks": (["grpo", "gspo"], []),
    "tasks_base": (["sft"], []),
    "tools": (["grpo", "gspo"], []),
}
# What experiments leave to the user.
EXPERIMENT_NEEDS = {name: ["actor.path=folder"] for name in yaml_files.experiment_files() if "stories260k" in name}
GROUPS = [
    (group, choice) for group, choices in yaml_files.config_groups().items() for choice in choices if group != "variant"
]
# The recipes a variant is for, and its section in docs/algorithms.md.
VARIANTS = {
    "adaptive_entropy": (["grpo", "ppo"], "Entropy bonus"),
    "cispo": (["grpo", "ppo"], "CISPO"),
    "clip_cov": (["grpo", "ppo"], "Clip-Cov and KL-Cov"),
    "dapo": (["grpo"], "DAPO"),
    "decoupled": (["grpo", "gspo", "ppo"], "Decoupled PPO"),
    "dppo_kl": (["grpo", "ppo"], "DPPO"),
    "dppo_topk_kl": (["grpo", "ppo"], "DPPO"),
    "dppo_topk_tv": (["grpo", "ppo"], "DPPO"),
    "dppo_tv": (["grpo", "ppo"], "DPPO"),
    "dr_grpo": (["grpo"], "Dr.GRPO"),
    "entropy_bonus": (["grpo", "ppo"], "Entropy bonus"),
    "fipo": (["grpo", "ppo"], "FIPO"),
    "gdpo": (["grpo", "gspo"], "GDPO"),
    "gmpo": (["grpo", "ppo"], "GMPO"),
    "gspo_token": (["grpo", "ppo"], "GSPO-token"),
    "icepop": (["grpo", "gspo", "ppo"], "IcePop and KPop"),
    "iw_opd": (["distill"], "IW-OPD"),
    "kl_cov": (["grpo", "ppo"], "Clip-Cov and KL-Cov"),
    "kpop": (["grpo", "gspo", "ppo"], "IcePop and KPop"),
    "luspo": (["grpo", "ppo"], "LUSPO"),
    "m2po": (["grpo", "ppo"], "M2PO"),
    "maxrl": (["grpo", "gspo"], "MaxRL"),
    "otb": (["grpo"], "OTB"),
    "prime_ipo": (["grpo", "ppo"], "IPO of prime-rl"),
    "real": (["grpo"], "REAL"),
    "reinforce_pp": (["grpo"], "REINFORCE++"),
    "rloo": (["grpo", "gspo"], "RLOO"),
    "rlsd": (["grpo", "ppo"], "RLSD and SDAR"),
    "sao": (["ppo"], "SAO"),
    "sao_mask": (["grpo", "ppo"], "Mask of SAO"),
    "sapo": (["grpo", "ppo"], "SAPO"),
    "sdar": (["grpo", "ppo"], "RLSD and SDAR"),
    "sdpg": (["grpo", "gspo", "ppo"], "SDPG"),
    "tis": (["grpo", "gspo", "ppo"], "Truncated importance sampling"),
    "top_entropy": (["grpo", "ppo"], "Forking tokens"),
    "vespo": (["grpo", "ppo"], "VESPO"),
}
# What a choice needs beside it to make sense.
REQUIRED_WITH = {"ref=default": ["actor.kl_ctl=0.1"], "valid_dataset=default": ["valid_dataset.path=rows.jsonl"]}


plain = functools.cache(load)  # without overrides, for comparisons
help_of = functools.cache(help.recipe_help)


def test_every_task_is_listed_here():
    found = {name: yaml_files.recipes_of(file) for name, file in yaml_files.task_files().items()}
    assert found.pop("train") == sorted(RECIPES)  # of `areno train`, see test_cli_train.py
    assert found == {name: recipes for name, (recipes, _) in TASKS.items()}


@pytest.mark.parametrize(("task", "recipe"), [(task, recipe) for task, (names, _) in TASKS.items() for recipe in names])
def test_task(task, recipe):
    config = load(RECIPES[recipe], task, TASKS[task][1])
    assert config.experiment_name
    for key in ("train_dataset.loader", "valid_dataset.loader", "reward.fn"):
        section = getattr(config, key.split(".")[0], None)
        value = getattr(section, key.split(".")[1]) if section else None
        for each in value if isinstance(value, list) else [value or ""]:
            assert not each.startswith("examples/") or find_file(each.split(":")[0], key).is_file()


@pytest.mark.parametrize("name", yaml_files.experiment_files())
def test_experiment(name):
    """A file of recipes/ is named for its recipe: gspo-gsm8k-qwen3-0.6b-1gpu. Its header says what to expect."""
    assert yaml_files.recipes_of(yaml_files.experiment_files()[name]) == [name.split("-")[0]]
    assert load(RECIPES[name.split("-")[0]], name, EXPERIMENT_NEEDS.get(name)).experiment_name
    header = yaml_files.experiment_files()[name].read_text(encoding="utf-8").split("defaults:")[0]
    assert all(f"# {word} " in header for word in ("Hardware", "Time", "Memory", "Curve"))
    assert f"--config-name={name}" in header
    assert name in Path(find_file("recipes/README.md")).read_text(encoding="utf-8")


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_group_choice(group, choice):
    override = f"{group}={choice}"
    base = plain(GSPOConfig, "gsm8k")
    config = load(GSPOConfig, "gsm8k", [override, *REQUIRED_WITH.get(override, [])])
    section, reference = config, base
    for name in group.split("/"):
        section, reference = getattr(section, name), getattr(reference, name)
    assert (section is None) == (choice == "null")
    # A choice that changes nothing would be decoration; these are what gsm8k has already.
    same = {"actor=qwen3-0.6b", "actor/adv_norm=group", "eval_gconfig=greedy", "saver=epoch"}
    assert section != reference or override in {*same, "ref=null", "teacher=null"}


def test_every_variant_is_listed_here():
    assert set(yaml_files.variant_files()) == set(VARIANTS)


@pytest.mark.parametrize(
    ("name", "recipe"), [(name, recipe) for name, (names, _) in VARIANTS.items() for recipe in names]
)
def test_variant(name, recipe):
    default = get_algorithm(recipe).default
    assert load(RECIPES[recipe], default, [f"variant={name}"]) != plain(RECIPES[recipe], default)
    in_help = help_of("", RECIPES[recipe], default)
    assert f"  {name} " in in_help


def test_variant_of_ones_own(tmp_path):
    (tmp_path / "variant").mkdir()
    (tmp_path / "variant/mine.yaml").write_text("# @package _global_\n# Mine\nactor: {eps_clip: 0.1}\n")
    (tmp_path / "variant/broken.yaml").write_text("actor: [")
    assert load(GRPOConfig, "quickstart", ["variant=mine"], tmp_path).actor.eps_clip == 0.1
    assert load(GRPOConfig, "quickstart", ["variant=mine", "actor.eps_clip=0.3"], tmp_path).actor.eps_clip == 0.3
    assert re.search(r"^  mine +Mine$", help.recipe_help("", GRPOConfig, "quickstart", tmp_path), re.M)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_what_the_algorithms_page_says(name):
    """Its settings are those of a command of its section, the first by default, which may have more."""
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {VARIANTS[name][1]}\n")[1]
    commands = re.findall(r"^python -m areno.recipes.\S+ (.*)$", section, re.M)
    own = {"adaptive_entropy": "bonus.target", "kpop": "binary_kl"}.get(
        name, f"={name} "
    )  # in the command of a variant that is not first
    words = shlex.split(next((command for command in commands if own in command), commands[0]))
    recipe = PPOConfig if VARIANTS[name][0] == ["ppo"] else GRPOConfig
    shown = load(recipe, "gsm8k", [word for word in words if "--" not in word])
    variant = load(recipe, "gsm8k", [f"variant={name}"])

    def compare(values, one, other):
        for key, value in values.items():
            if isinstance(value, dict):
                compare(value, getattr(one, key), getattr(other, key))
            else:
                assert getattr(one, key) == getattr(other, key), key

    compare(yaml.safe_load(yaml_files.variant_files()[name].read_text(encoding="utf-8")), shown, variant)


@pytest.mark.parametrize("recipe", RECIPES)
def test_default_of_a_recipe_exists(recipe):
    algorithm = get_algorithm(recipe)
    assert algorithm.default in {**yaml_files.task_files(), **yaml_files.experiment_files()}
    assert algorithm.config is RECIPES[recipe]


def test_every_file_says_what_it_is_for():
    conf = Path(find_file("conf"))
    for file in [*conf.rglob("*.yaml"), *yaml_files.experiment_files().values()]:
        assert yaml_files.headline(file), f"{file} begins with no comment"
