"""The registry of algorithms, and an algorithm in a user's own file, run as a script."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import areno
from areno.api import Algorithm, algorithms, get_algorithm, register_algorithm
from areno.api.algorithms import algorithm_names, built_in_algorithms
from areno.cli.__main__ import main
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.loss_fns import grpo_loss_fn
from areno.recipes.dpo import DPOConfig
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.ppo import PPOConfig
from areno.tracking.reader import RunReader
from areno.tracking.run_folder import script_of
from tests.helpers import warm_python
from tests.helpers.reward_functions import length

ROOT = Path(__file__).parents[2]
BUILT_IN = sorted(path.stem for path in (ROOT / "areno/recipes").glob("[a-z]*.py"))


@dataclass(kw_only=True)
class MyConfig(GRPOConfig):
    """An experiment of one's own."""


@pytest.fixture(autouse=True)
def _registry_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "registered", {})


def policy_only() -> type[areno.PolicyOnlyTrainer]:
    return areno.PolicyOnlyTrainer


def mine(**changes: Any) -> Algorithm:
    settings = {"name": "mine", "config": MyConfig, "loop": policy_only, "loss_fn": lambda config: grpo_loss_fn}
    return Algorithm(**{**settings, **changes})


@pytest.mark.slow
def test_those_that_come_with_areno() -> None:
    assert algorithm_names() == BUILT_IN
    for name in BUILT_IN:
        algorithm = get_algorithm(name)
        assert algorithm.name == name
        assert callable(load(algorithm.config, algorithm.default, ["actor.path=x"]).loss_fn())


def test_one_of_ones_own_is_found_by_name() -> None:
    made = mine()
    assert register_algorithm(made) is made
    assert get_algorithm("mine") is made
    assert algorithm_names() == [*BUILT_IN, "mine"]
    again = register_algorithm(mine(default="gsm8k"))  # a notebook's cell that is run twice
    assert get_algorithm("mine") is again


def test_a_configuration_says_which_loss_it_describes() -> None:
    config = load(GRPOConfig, "quickstart", ["actor.eps_clip=0.3"])
    assert config.loss_fn().func is grpo_loss_fn  # type: ignore[attr-defined]
    assert config.loss_fn().keywords["clip_eps"] == 0.3  # type: ignore[attr-defined]
    assert mine().make_loss(config) is grpo_loss_fn
    assert mine(loss_fn=None).make_loss(config).keywords["clip_eps"] == 0.3


def test_names_that_are_taken_or_unknown() -> None:
    for name in BUILT_IN:
        with pytest.raises(ValueError, match=f"{name} comes with areno or another package; give"):
            register_algorithm(mine(name=name))
    register_algorithm(mine())
    with pytest.raises(
        ConfigError,
        match=f"no algorithm 'gpro'; there are {', '.join(BUILT_IN)}, mine",
    ):
        get_algorithm("gpro")


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package has entry points, as in a checkout on Python's path."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    algorithms.algorithm_entry_points.cache_clear()
    yield
    algorithms.algorithm_entry_points.cache_clear()


@pytest.mark.usefixtures("not_installed")
def test_a_checkout_that_is_not_installed_has_the_algorithms_of_areno() -> None:
    assert tuple(algorithm_names()) == tuple(built_in_algorithms()) == tuple(BUILT_IN)
    assert get_algorithm("sft").name == "sft"
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("gspo").config, "quickstart", ["pairs_per_prompt=1"])
    assert str(caught.value) == "pairs_per_prompt: unknown key; it is a setting of online_dpo"


@pytest.mark.usefixtures("not_installed")
def test_a_copy_of_the_package_alone_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "data_root", lambda: tmp_path)
    with pytest.raises(ConfigError, match="it is not installed; run `pip install"):
        get_algorithm("gspo")
    with pytest.raises(ConfigError, match=r"^actor\.beta: unknown key"):  # the user's own mistake comes first
        load(GSPOConfig, "quickstart", ["actor.beta=1"])


def test_a_package_that_does_not_import_does_not_hide_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_module:ALGORITHM", "areno.algorithms")
    found = algorithms.algorithm_entry_points() | {"broken": broken}
    monkeypatch.setattr(algorithms, "algorithm_entry_points", lambda: found)
    with pytest.raises(ConfigError, match=r"^pairs_per_prompt: unknown key; it is a setting of online_dpo$"):
        load(GSPOConfig, "quickstart", ["pairs_per_prompt=1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": "polciy"}, "loop is 'polciy'; a function that returns the class of a loop is expected, such as"),
        ({"loss_fn": None, "config": PolicyExperimentConfig}, "PolicyExperimentConfig describes no loss"),
        ({"config": DPOConfig}, "config is DPOConfig, which brings its own loss; define loss_fn in the class instead"),
        ({"config": dict}, "config is dict; a subclass of ExperimentConfig is expected"),
    ],
)
def test_an_algorithm_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mine(**changes)


def test_a_loop_that_reads_another_configuration() -> None:
    algorithm = mine(loop=lambda: areno.PPOTrainer)
    with pytest.raises(ConfigError, match="config is a MyConfig; PPOTrainer needs a CriticExperimentConfig"):
        algorithm.trainer(load(MyConfig, "quickstart", []))


def test_a_role_that_is_needed_has_to_be_configured() -> None:
    with pytest.raises(ConfigError, match="ref: is null, but mine needs it; add ref=default"):
        mine(roles=("ref",)).trainer(load(MyConfig, "quickstart", []))


def test_a_configuration_without_a_loss_or_advantages_says_so() -> None:
    config = load(type("Bare", (PolicyExperimentConfig,), {}), "quickstart", [])
    with pytest.raises(ConfigError, match="Bare describes no loss; give the trainer a loss_fn"):
        areno.PolicyOnlyTrainer(config)
    with pytest.raises(ConfigError, match="Bare describes no advantages; give the trainer an advantage_fn"):
        config.advantages([], [])


def test_a_trainer_of_another_loop_does_not_take_the_configuration() -> None:
    with pytest.raises(ConfigError, match="PPOConfig is for PPOTrainer, not for PolicyOnlyTrainer"):
        areno.PolicyOnlyTrainer(load(PPOConfig, "quickstart_ppo", []))
    with pytest.raises(ConfigError, match="not for PolicyOnlyTrainer: its critic would not be used"):
        areno.PolicyOnlyTrainer(load(PPOConfig, "quickstart_ppo", []), lambda pack, logprobs: (logprobs.sum(), {}))
    with pytest.raises(ConfigError, match="config is a GRPOConfig; PPOTrainer needs a CriticExperimentConfig"):
        areno.PPOTrainer(load(GRPOConfig, "quickstart", []))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config is a GRPOConfig; PPOTrainer needs a CriticExperimentConfig"):
        areno.PPOTrainer(load(GRPOConfig, "quickstart", []), loss_fn=lambda pack, logprobs: None)  # type: ignore[arg-type]
    for trainer in (areno.SFTTrainer, areno.DPOTrainer, areno.PolicyOnlyTrainer):
        with pytest.raises(ConfigError, match=f"config is a dict; {trainer.__name__} needs a "):
            trainer({"experiment_name": "a dictionary"})  # type: ignore[arg-type]


# A file of one's own -------------------------------------------------------------------------------------------------

MINE = '''"""REINFORCE with a moving baseline."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from functools import partial

import areno
from areno.api import Algorithm, register_algorithm
from areno.launch import run_algorithm
from areno.config.policy_experiments import PolicyExperimentConfig
from areno.schema.fields import setting
from areno.config.models import PolicyConfig


@dataclass(kw_only=True)
class ActorConfig(PolicyConfig):
    """The actor."""

    punch: float = setting(1.0, help="factor on the loss", gt=0)


@dataclass(kw_only=True)
class Config(PolicyExperimentConfig):
    """Mine."""

    actor: ActorConfig = setting(help="the policy")


def advantages(rows, groups, actor):
    import numpy as np

    from areno.trainers.rows import trained

    return [np.full(len(old), row.reward - 0.25) for row, old in zip(rows, trained(rows, "logprobs"))]


def loss_fn(pack, logprobs, *, punch):
    loss = -punch * pack.token_mean(pack.trained(pack.need("advantages")) * pack.trained(logprobs))
    return loss, {"punched": loss.detach() / punch}


def make_loss(config):
    return partial(loss_fn, punch=config.actor.punch)


ALGORITHM = register_algorithm(
    Algorithm(
        name="mine",
        config=Config,
        loop=lambda: areno.PolicyOnlyTrainer,
        loss_fn=make_loss,
        advantage_fn=advantages,
    )
)
if __name__ == "__main__":
    run_algorithm(ALGORITHM)
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE, encoding="utf-8")
    return file


def start(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return warm_python.commands().run([script.name, *arguments], script.parent, environment, timeout=120)


def scalars(run_dir: Path) -> Iterator[dict[str, float]]:
    yield from RunReader(run_dir).records()


SMALL = [
    "total_train_steps=2",
    "train_dataset.batch_size=4",
    "gconfig.n_samples=4",
    "valid_dataset=null",
    "reward.workers=1",
    "engine.device=cpu",
]


@pytest.mark.slow
def test_a_file_runs_as_a_recipe_does(script: Path) -> None:
    done = start(script, *SMALL, "trial_name=t", "actor.punch=3")
    assert done.returncode == 0, done.stderr
    assert "step=2/2 reward_mean=" in done.stderr
    run_dir = script.parent / "outputs/quickstart/t"
    steps = [row for row in scalars(run_dir) if "train/loss" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["train/loss"] == pytest.approx(3 * row["train/punched"], rel=1e-5)
    assert (run_dir / "checkpoints/latest/model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_of_a_file_is_evaluated_and_replayed(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = script.parent / "outputs/quickstart/t"
    settings = [*SMALL, "trial_name=t", "saver.freq_steps=1", "rollout.dump_to_file=true"]
    done = start(script, *settings)
    assert done.returncode == 0, done.stderr
    rows = script.parent / "rows.jsonl"
    rows.write_text('{"prompt": "1+9=", "solutions": "10"}\n')
    assert main(["evaluate", str(run_dir), "--data", str(rows), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_sequences"] == 4
    assert main(["replay", str(run_dir), "--step", "2", "--sample", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] is not None
    script.rename(script.with_name("moved.py"))
    monkeypatch.setattr(algorithms, "registered", {})
    for command in (["evaluate", str(run_dir), "--data", str(rows)], ["replay", str(run_dir), "--step", "2"]):
        assert main(command) == 2
        assert f"the algorithm mine of {run_dir}: there is no file {script}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_a_file_is_resumed_by_areno_train(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = script.parent / "outputs/quickstart/t"
    done = start(script, *SMALL, "trial_name=t")
    assert done.returncode == 0, done.stderr
    folder = ["train", "--resume", str(run_dir)]
    for named in ([], ["--algo", "mine"]):
        monkeypatch.setattr(algorithms, "registered", {})
        assert main([*folder, *named, f"total_train_steps={3 + len(named)}"]) == 0
        told = f"the same run: python {script} --resume={run_dir} total_train_steps={3 + len(named)}\n"
        assert told in capsys.readouterr().err
    losses = [row["train/loss"] for row in scalars(run_dir) if "train/loss" in row]
    assert len(losses) == 5
    assert script_of(run_dir) == str(script)
    script.rename(script.with_name("moved.py"))
    monkeypatch.setattr(algorithms, "registered", {})
    assert main(folder) == 2
    gone = f"error: --resume: the algorithm mine of {run_dir}: there is no file {script} (looked for {script})\n"
    assert capsys.readouterr().err == gone


@pytest.mark.slow
def test_what_a_file_defines_reaches_spawned_workers(script: Path) -> None:
    found = []
    for trial in ("inline", "spawn"):
        done = start(script, *SMALL, f"trial_name={trial}", f"engine.workers={trial}")
        assert done.returncode == 0, done.stderr
        rows = scalars(script.parent / "outputs/quickstart" / trial)
        found.append([row["train/loss"] for row in rows if "train/loss" in row])
    run_dir = script.parent / "outputs/quickstart/spawn"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    resume = ["-m", "areno.cli", "train", "--resume", str(run_dir), "total_train_steps=3"]
    done = warm_python.commands().run(resume, script.parent, environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len([row for row in scalars(run_dir) if "train/loss" in row]) == 3
    assert len(found[0]) == 2
    assert found[0] == found[1]


@pytest.mark.slow
def test_help_and_configuration_of_a_file(script: Path) -> None:
    shown = start(script, "--help")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: python mine.py [--config-name NAME] [key=value ...]")
    assert "punch" in shown.stdout
    assert "factor on the loss" in shown.stdout
    shown = start(script, "--cfg", "job", "actor.punch=2.5")
    assert shown.returncode == 0, shown.stderr
    assert "\n  punch: 2.5\n" in shown.stdout
    assert "experiment_name: quickstart" in shown.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.puhcn=2", "error: actor.puhcn: unknown key; did you mean actor.punch?"),
        ("actor.punch=0", "error: actor.punch: is 0.0; it must be more than 0"),
        ("actor.eps_clip=0.1", "error: actor.eps_clip: unknown key; it is a setting of grpo, gspo and ppo"),
        ("actor.kl_ctl=0.1", "error: actor.kl_ctl: unknown key; it is a setting of grpo, gspo and ppo"),
    ],
)
def test_a_typo_in_a_knob_of_ones_own(script: Path, override: str, message: str) -> None:
    done = start(script, override)
    assert done.returncode == 2
    assert done.stderr.strip() == message
    assert not (script.parent / "outputs").exists()


@pytest.mark.slow
def test_a_loss_for_a_recipes_own_loop_in_memory(tmp_path: Path) -> None:
    """A registered algorithm makes its trainer for a script, with what the script holds."""
    from areno.files.paths import find_file

    made = register_algorithm(mine(loss_fn=lambda config: lambda pack, logprobs: (pack.token_mean(-logprobs), {})))
    actor = GRPOActorConfig(path=str(find_file("examples/quickstart/model")), gradient_checkpointing=False)
    config = load(MyConfig, "quickstart", [*SMALL, "total_train_steps=1", f"cluster.fileroot={tmp_path}"])
    config.actor = actor
    with made.trainer(config, tmp_path / "r", train_dataset=[{"prompt": "1+9="}] * 4, reward_fn=length) as trainer:
        assert trainer.fit() > 1
    [loss] = [row["train/loss"] for row in scalars(tmp_path / "r") if "train/loss" in row]
    assert loss > 0  # the likelihood of a sample is below 1
