"""The command line of a recipe: composition by Hydra, reports, folders, sweeps, exit codes."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from areno.api import get_algorithm
from areno.errors import ConfigError, DataError
from areno.files import paths
from areno.launch import command, compose
from areno.recipes.grpo import GRPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.ppo import PPOConfig
from areno.schema.build import build
from areno.tracking.reader import RunReader
from tests.helpers.played import TASK, Main, load, problems_of, run, task_folder

REPO = Path(__file__).parents[2]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """An empty working directory with a folder `my` for --config-dir that holds the task `small`."""
    return task_folder(tmp_path, monkeypatch)


def test_values_of_every_kind(work):
    config = load(
        "actor.optimizer.lr=2e-6",
        "+gconfig.top_k=5",
        "++seed=3",
        "gconfig.stop=['a','b,c']",
        "trial_name='x y'",
        "valid_dataset={path: test.jsonl, batch_size: 4}",
        "ref.path=other",
        "actor.kl_ctl=.1",
        "cluster.fileroot=${experiment_name}s",
    )
    assert config.actor.optimizer.lr == 2e-6
    assert config.gconfig.top_k == 5
    assert config.seed == 3
    assert config.gconfig.stop == ["a", "b,c"]
    assert config.trial_name == "x y"
    assert config.valid_dataset.batch_size == 4
    assert config.valid_dataset.shuffle is False
    assert config.ref.path == "other"
    assert config.cluster.fileroot == "tests"


def test_everything_wrong_on_the_command_line_in_one_report(work):
    assert problems_of(
        "actr.lr=1",
        "actor.optimzer.lr=1",
        "+oddity=1",
        "~nothing.x",
        "actor.dtype=float16",
        "seed=abc",
        "engine=fast",
        "ref=defaul",
        "gconfig.n_samples=1,2",
        "x=[1",
        "word",
        "experiment_name=${nowhere}",
    ) == [
        "ref: has no choice 'defaul'; there are default, null; did you mean default?",
        "gconfig.n_samples: has several values in 'gconfig.n_samples=1,2'; add -m to try each, or write a list as "
        "[a,b] and text that holds a comma in quotes",
        """cannot read 'x=[1'; key=value is expected, or 'key="value"' where the value has one of ,:=()[]{}'""",
        "cannot read 'word'; key=value is expected",
        "experiment_name: Interpolation key 'nowhere' not found",
        "nothing.x: cannot be deleted: there is no such key",
        "actr: unknown key; did you mean actor?",
        "oddity: unknown key",
        "seed: is 'abc'; an integer is expected",
        "actor.optimzer: unknown key; did you mean actor.optimizer?",
        "actor.dtype: is 'float16'; expected one of 'auto', 'bfloat16', 'float32'; did you mean bfloat16 or float32?; "
        "float16 needs a loss scale, which areno does not have",
        "engine: is 'fast'; a section is expected, with keys device, world_size, tp_size, cp_size, zero_stage, "
        "sequence_parallel, workers, attn_backend, exact, deterministic, dummy_load, stall_timeout_s",
    ]


@pytest.mark.slow
def test_optional_sections_are_groups(work):
    assert load().ref is None
    assert load("ref=default", "actor.kl_ctl=0.1").ref.path is None
    assert load("ref=null").ref is None
    (work / "my/with_ref.yaml").write_text(TASK.replace("- recipe", "- recipe\n  - ref: default") + "ref: {path: x}\n")
    assert load("actor.kl_ctl=0.1", name="with_ref").ref.path == "x"
    assert load("ref=null", name="with_ref").ref is None
    assert problems_of("valid_dataset=default", sources=True)[0].startswith("valid_dataset.path: missing")
    assert "ref: is chosen more than once" in problems_of("ref=default", "ref=null")[0]
    greedy = ["eval_gconfig=greedy", "+valid_dataset.path=x", "gconfig.n_samples=4", "gconfig.max_new_tokens=7"]
    sampled = load(*greedy).eval_gconfig
    assert (sampled.n_samples, sampled.greedy, sampled.max_new_tokens) == (1, True, 7)
    assert load(*greedy, "eval_gconfig.max_new_tokens=9").eval_gconfig.max_new_tokens == 9
    assert load("actor/adv_norm=dr_grpo").actor.adv_norm.std_level is None


def test_deleting_a_key_restores_its_default(work):
    (work / "my/lr.yaml").write_text(TASK.replace("path: model", "path: model, optimizer: {lr: 1.0}"))
    assert load(name="lr").actor.optimizer.lr == 1.0
    assert load("~actor.optimizer.lr", name="lr").actor.optimizer.lr == 1e-6
    assert problems_of("~actor.path", name="lr") == ["actor.path: missing (Hugging Face model folder or hub id)"]


def test_a_deleted_key_restores_the_default_of_its_recipe(work, capsys):
    (work / "my/critic.yaml").write_text(TASK + "critic: {optimizer: {lr: 1.0, beta1: 0.8}}\n")
    config = load("~critic.optimizer.lr", name="critic", cls=PPOConfig)
    assert (config.critic.optimizer.beta1, config.critic.optimizer.lr) == (0.8, 1e-5)
    arguments = ["--config-dir=my", "--config-name=critic", "--cfg", "job", "--resolve", "~critic.optimizer.lr"]
    assert command.run(get_algorithm("ppo"), "ppo", arguments) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert build(PPOConfig, shown) == config


def test_own_folder_comes_first_and_brings_groups(work):
    (work / "my/gsm8k.yaml").write_text(TASK.replace("experiment_name: test", "experiment_name: mine"))
    (work / "my/actor").mkdir()
    (work / "my/actor/tiny.yaml").write_text("path: tiny\n")
    assert load(name="gsm8k").experiment_name == "mine"
    assert load("actor=tiny").actor.path == "tiny"
    assert "there are llama3.2-1b" in problems_of("actor=tini")[0]
    assert problems_of("actor=tini")[0].endswith("did you mean tiny?")


def test_an_experiment_builds_on_a_task(work):
    (work / "my/experiment.yaml").write_text(
        "defaults:\n  - gsm8k\n  - override actor: qwen3-1.7b\n  - _self_\nseed: 5\ngconfig: {n_samples: 16}\n"
    )
    config = load("gconfig.max_new_tokens=64", name="experiment")
    assert (config.seed, config.gconfig.n_samples, config.experiment_name) == (5, 16, "gsm8k")
    assert config.actor.path == "Qwen/Qwen3-1.7B"
    assert config.eval_gconfig.max_new_tokens == 64
    assert load("actor=qwen3-0.6b", name="experiment").actor.path == "Qwen/Qwen3-0.6B"


def test_errors_of_files_are_one_line(work):
    (work / "my/broken.yaml").write_text("a: [1\nb: 2\n")
    (work / "my/group.yaml").write_text(TASK.replace("- recipe", "- recipe\n  - actor: qwen3-0.6c"))
    (work / "my/bare.yaml").write_text("defaults: [_self_]\nexperiment_name: x\n")
    (work / "my/parent.yaml").write_text(TASK.replace("- recipe", "- recipe\n  - nosuch"))
    (work / "my/misspelt.yaml").write_text(TASK.replace("- recipe", "- recipe\n  - actr: qwen3-0.6b"))
    for name, expected in {
        "smal": "--config-name: there is no 'smal'; there are .*did you mean small",
        "broken": r"my/broken\.yaml: line 2: ",
        "group": "actor/qwen3-0.6c.*there are llama3.2-1b.*did you mean qwen3-0.6b",
        "bare": "bare: its defaults must begin with `- recipe`",
        "parent": "nosuch",
        "misspelt": "actr/qwen3-0.6b'; did you mean actor",
    }.items():
        with pytest.raises(ConfigError, match=expected) as caught:
            load(name=name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--config-dir: there is no folder"):
        compose.load(GSPOConfig, "gsm8k", config_dir=Path("nowhere"))


def test_run_gets_its_folder_and_a_record_of_itself(work):
    main = Main()
    assert run(main, "seed=2", "trial_name=one", "ref=default", "actor.kl_ctl=0.1") == 0
    [(config, run_dir)] = main.calls
    assert run_dir == work / "outputs/test/one"
    written = RunReader(run_dir)
    assert written.config["seed"] == config.seed == 2
    assert written.overrides[:2] == ["seed=2", "trial_name=one"]
    assert written.versions["areno"]
    assert written.versions["torch"]
    # The record is itself a configuration.
    again = compose.load(GSPOConfig, "config", ["trial_name=one"], run_dir)
    assert again == config


@pytest.mark.slow
def test_an_earlier_run_is_not_overwritten(work, capsys, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    main = Main(steps=True)
    assert [run(main, "trial_name=one"), run(main, "trial_name=one", "seed=5")] == [0, 2]
    assert "trial_name" in capsys.readouterr().err
    assert len(main.calls) == 1
    assert [run(main), run(main), run(main, "-m", "seed=1,2")] == [0, 0, 0]
    folders = [run_dir.relative_to(work / "outputs/test").as_posix() for _, run_dir in main.calls]
    assert folders == ["one", "now", "now-2", "now-3/0", "now-3/1"]


def test_a_wrong_configuration_leaves_nothing(work, capsys):
    main = Main()
    assert run(main, "oddity=1", "seed=x") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 2 problems in the configuration:\n")
    assert "Traceback" not in error
    assert run(main, "-m", "oddity=1", "seed=1,2") == 2
    assert not main.calls
    assert not (work / "outputs").exists()


@pytest.mark.slow
def test_failures_of_main(work, capsys, monkeypatch):
    main = Main(
        {1: DataError("row 3 is bad"), 2: ConfigError("x: wrong"), 3: KeyboardInterrupt(), 4: ValueError("bug")}
    )
    assert run(main, "seed=1") == 1
    assert capsys.readouterr().err == "error: row 3 is bad\n"
    assert run(main, "seed=2") == 2
    assert not (work / "outputs").exists(), "a run that came to nothing leaves no folder"
    assert run(main, "seed=3") == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert run(main, "seed=4") == 1
    assert "ValueError: bug" in capsys.readouterr().err
    monkeypatch.setenv("ARENO_DEBUG", "1")
    assert run(main, "seed=1") == 1
    assert "Traceback" in capsys.readouterr().err


def test_unwritable_output_folder(work, capsys):
    (work / "file").write_text("")
    assert run(Main(), "cluster.fileroot=file") == 2
    assert capsys.readouterr().err.startswith("error: cluster.fileroot: cannot make")


@pytest.mark.slow
def test_multirun_tries_every_combination(work, capsys):
    main = Main()
    assert run(main, "-m", "actor.optimizer.lr=1e-6,2e-6", "seed=1,2", "trial_name=s", "gconfig.n_samples=2") == 0
    assert [(config.actor.optimizer.lr, config.seed) for config, _ in main.calls] == [
        (lr, seed) for lr in (1e-6, 2e-6) for seed in (1, 2)
    ]
    assert [run_dir for _, run_dir in main.calls] == [work / f"outputs/test/s/{i}" for i in range(4)]
    assert all(config.gconfig.n_samples == 2 for config, _ in main.calls)
    assert "4e-06" in capsys.readouterr().out
    assert run(main, "-m", "seed=1,2", "trial_name=s") == 2, "the sweep's folder is taken"


@pytest.mark.slow
def test_multirun_over_group_choices(work):
    main = Main()
    assert run(main, "-m", "eval_gconfig=null,greedy", "valid_dataset.path=x", "actor=qwen3-0.6b,llama3.2-1b") == 0
    assert [config.eval_gconfig is None for config, _ in main.calls] == [True, True, False, False]
    assert len({config.actor.path for config, _ in main.calls}) == 2


@pytest.mark.slow
def test_a_failing_run_of_a_sweep_ends_alone(work, capsys):
    main = Main({2: DataError("bad row"), 3: SystemExit("enough"), 4: ValueError("bug")})
    assert run(main, "-m", "seed=1,2,3,4,5") == 1
    assert [config.seed for config, _ in main.calls] == [1, 2, 3, 4, 5]
    output = capsys.readouterr()
    assert "error: bad row" in output.err
    assert "enough" in output.err
    assert output.out.count("failed") == 3
    interrupted = Main({1: KeyboardInterrupt()})
    assert run(interrupted, "-m", "seed=1,2") == 130
    assert len(interrupted.calls) == 1


def test_sweepers_see_the_objective(work, monkeypatch):
    from hydra.core.plugins import Plugins

    seen = []
    launcher = Plugins.instance().class_name_to_class["hydra._internal.core_plugins.basic_launcher.BasicLauncher"]
    launch = launcher.launch

    def recorded(self, *args, **kwargs):
        results = launch(self, *args, **kwargs)
        seen.extend(result.return_value for result in results)
        return results

    monkeypatch.setattr(launcher, "launch", recorded)
    # A sweep that a file describes, as it does for an optimizer's search space.
    (work / "my/search.yaml").write_text(TASK + "hydra: {sweeper: {params: {seed: '2,3'}}}\n")
    assert run(Main(), "-m", "actor.optimizer.lr=0.5", name="search") == 0
    assert seen == [1.0, 1.5]


def test_cfg_job_shows_yaml(work, capsys):
    assert run(Main(), "--cfg", "job", "~actor.path", "ref.path=x", "actor.kl_ctl=1") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["actor"]["path"] == "???"
    assert shown["ref"]["path"] == "x"
    assert shown["gconfig"]["n_samples"] == 8
    assert run(Main(), "--cfg", "job", "-p", "actor.optimizer") == 0
    assert yaml.safe_load(capsys.readouterr().out)["beta2"] == 0.999
    assert run(Main(), "--cfg", "job", "oddity=1") == 2
    output = capsys.readouterr()
    assert "oddity: 1" in output.out
    assert "oddity: unknown key" in output.err
    assert not (work / "outputs").exists()


def test_info_and_hydras_own_configuration(work, capsys):
    assert run(Main(), "--info", "searchpath") == 0
    output = capsys.readouterr()
    shown = output.out + output.err
    assert shown.index(str(work / "my")) < shown.index(str(REPO / "conf")) < shown.index(str(REPO / "recipes"))
    assert run(Main(), "--cfg", "hydra") == 0
    assert "sweep:" in capsys.readouterr().out


def test_help_lists_files_groups_and_settings(work, capsys):
    assert run(Main(), "--help") == 0
    text = capsys.readouterr().out
    for part in ("gsm8k", "A task for tests", "dr_grpo", "actor.optimizer.lr\n", "default 1e-06", "auto | cpu | cuda"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 140


def test_find_file_looks_here_and_beside_areno(work):
    (work / "examples").mkdir()
    (work / "examples/mine.py").write_text("")
    assert paths.find_file("examples/mine.py") == work / "examples/mine.py"
    assert paths.find_file("examples/math/dataset_loader.py") == REPO / "examples/math/dataset_loader.py"
    assert paths.existing_path("openai/gsm8k") is None
    with pytest.raises(ConfigError, match=r"reward.fn: there is no 'reward.py', neither in"):
        paths.find_file("reward.py", "reward.fn")


def test_sessions_do_not_see_each_other(work):
    assert load().actor.eps_clip == 3e-4
    assert load(cls=GRPOConfig).actor.eps_clip == 0.2
    assert load().actor.eps_clip == 3e-4


def python(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_answers_without_importing_torch(tmp_path):
    program = """
import runpy, sys, warnings
warnings.simplefilter("ignore")  # runpy does not like to run a module twice
for arguments in (["--config-name=gsm8k", "--cfg", "job"], ["--help"], ["--config-name=gsm8k", "oddity=1"]):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("areno.recipes.gspo", run_name="__main__")
    except SystemExit as end:
        print("code", end.code)
import areno
heavy = {"torch", "transformers", "datasets", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 0", "code 0", "code 2"]
    assert done.stderr == "error: oddity: unknown key\n"


@pytest.mark.slow
def test_recipe_runs_under_its_own_name(tmp_path):
    (tmp_path / "custom.py").write_text(
        "import pickle\n"
        "from types import SimpleNamespace\n"
        "from areno.recipes.gspo import GSPOConfig\n"
        "class Own: pass\n"
        "def run(config, run_dir):\n"
        "    (run_dir / 'own.pkl').write_bytes(pickle.dumps(Own()))\n"
        "    return 1.0\n"
        "ALGORITHM = SimpleNamespace(name='custom', config=GSPOConfig, default='gsm8k', run=run, file=None)\n"
        "if __name__ == '__main__':\n"
        "    from areno.launch.command import run_recipe\n"
        "    run_recipe('custom')\n"
    )
    done = python("-m", "custom", "trial_name=t", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"custom" in (tmp_path / "outputs/gsm8k/t/own.pkl").read_bytes()
    with pytest.raises(ModuleNotFoundError):
        pickle.loads((tmp_path / "outputs/gsm8k/t/own.pkl").read_bytes())


@pytest.mark.slow
def test_installed_wheel_works_anywhere(tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(REPO),
    ]
    subprocess.run(build, check=True, timeout=300, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = python(
        "-m",
        "areno.recipes.gspo",
        "--config-name=gsm8k",
        "--cfg",
        "job",
        cwd=elsewhere,
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["experiment_name"] == "gsm8k"
    program = "from areno.files.paths import *; print(data_root()); print(find_file('examples/math/dataset_loader.py'))"
    done = python("-c", program, cwd=elsewhere, PYTHONPATH=str(tmp_path / "site"))
    data = tmp_path / "site/areno/_data"
    assert done.stdout.split() == [str(data), str(data / "examples/math/dataset_loader.py")]
    # An algorithm of one's own is a file that needs nothing beside it.
    shutil.copy(data / "examples/algorithms/dro.py", elsewhere / "mine.py")
    small = ["total_train_steps=1", "valid_dataset=null", "trial_name=t"]
    done = python("mine.py", *small, cwd=elsewhere, PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "outputs/quickstart/t/checkpoints/latest/model.safetensors").is_file()


@pytest.mark.slow
def test_editable_install_works_anywhere(tmp_path):
    pytest.importorskip("hatchling", reason="building needs hatchling")
    environment = tmp_path / "venv"
    venv.create(environment, system_site_packages=False, with_pip=False)
    # The packages of this interpreter, so that only areno itself is installed.
    [site] = environment.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(here) + "\n")
    interpreter = str(environment / "bin/python")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(REPO)]
    subprocess.run([interpreter, *install], check=True, timeout=300, capture_output=True)
    done = subprocess.run(
        [interpreter, "-m", "areno.recipes.grpo", "--config-name=gsm8k", "--cfg", "job"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["actor"]["eps_clip"] == 0.2
