"""What a user gets for bad input: one clear line that names the key, an exit code other than 0, nothing half-written.

Every case goes through the command line, in this process. Slow are the cases that other files hold the same code to.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areno.api import get_algorithm
from areno.errors import ConfigError
from areno.launch.compose import load
from areno.plan.plan import check_rows_per_replica
from areno.recipes import gspo, sft
from areno.specs.engine import EngineSpec
from areno.specs.role import RoleSpec
from areno.tracking.reader import list_runs
from tests.helpers.command_runs import MODEL, fails, files, run, write

ADDITIONS = [{"prompt": f"{a}+9=", "solutions": str(a + 9)} for a in range(10, 30)]
REWARD = "def reward_fn(record):\n    return float(record.completion == record.solutions)\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, and leave areno's log as it was."""
    monkeypatch.chdir(tmp_path)


def slow(*case, name: str):
    """A case that runs with -m slow."""
    return pytest.param(*case, id=name, marks=pytest.mark.slow)


# Settings ------------------------------------------------------------------------------------------------------------


def test_everything_wrong_with_the_settings_in_one_report(capsys):
    wrong = {
        "+foo.bar=1": "foo: unknown key",
        "actor.optimzer.lr=1": "actor.optimzer: unknown key; did you mean actor.optimizer?",
        "gconfig.temprature=2": "gconfig.temprature: unknown key; did you mean gconfig.temperature?",
        "gconfig.n_samples=many": "gconfig.n_samples: is 'many'; an integer is expected",
        "gconfig.temperature=0": "gconfig.temperature: is 0.0; it must be at least 1e-05",
        "eval_gconfig.top_p=2": "eval_gconfig.top_p: has no effect with valid_dataset=null",
        "engine.device=tpu": "engine.device: is 'tpu'; expected one of 'auto', 'cpu', 'cuda'",
        "reward.fn=null": "reward.fn: missing (file.py[:function] or the built-in math)",
        "~experiment_name": "experiment_name: missing",
        "ref=big": "ref: has no choice 'big'; there are default, null",
        "valid_dataset=default": "valid_dataset: is chosen more than once",
    }
    assert run(*wrong) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {len(wrong)} problems in the configuration:\n")
    assert [message for message in wrong.values() if f"\n  {message}" not in error] == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("engine.tp_size=3", r"tp_size: is 3, which does not divide the model's 4 \(attention heads\), 2 \(key-value"),
        ("engine.tp_size=4 engine.world_size=6", "tp_size: is 4, which does not divide the number of devices, 6"),
        ("engine.world_size=2 engine.workers=inline", "workers: is inline, which runs one device"),
        (
            "gconfig.max_new_tokens=128 eval_gconfig=null",
            "max_new_tokens: is 128; the model's context of 128 tokens must",
        ),
        ("gconfig.max_tokens=200", "max_tokens: is 200, the model's context is 128 tokens"),
        ("gconfig.stop_token_ids=[99]", "stop_token_ids: holds 99; the vocabulary has 16 tokens"),
        ("gconfig.n_samples=1", "n_samples: is 1; a group advantage needs at least 2"),
        ("actor.ppo_n_minibatches=3", "ppo_n_minibatches: is 3, which does not divide the 4 rows"),
        ("actor.kl_ctl=0.1", "kl_ctl: is 0.1, but there is no reference model; add ref=default"),
        ("engine.attn_backend=flash", "attn_backend: is flash, but"),
    ],
)
def test_settings_that_do_not_fit_together(capsys, overrides, message):
    section = overrides.partition(".")[0]
    fails(capsys, f"{section}.{message}", 2, *overrides.split())


def test_unusual_settings_that_are_fine():
    single = ["gconfig.n_samples=1", "actor.adv_norm.mean_level=null", "actor.adv_norm.std_level=null"]
    assert run(*single, "total_train_n_seqs=3", "total_train_steps=null", "rollout.max_kv_tokens=40") == 0
    [made] = list_runs("out")
    assert max(made.steps()) == 2


def test_more_devices_than_there_are(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    fails(capsys, "engine.device: is cuda, but torch sees no CUDA device", 2, "engine.device=cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fails(capsys, "engine.world_size: is 4, but only 2 CUDA devices", 2, "engine.device=cuda", "engine.world_size=4")


@pytest.mark.parametrize(
    ("recipe", "task", "overrides", "message"),
    [
        ("sft", "quickstart_base", "train_dataset.batch_size=1", "an update of the actor has 1 rows for 2 copies"),
        ("sft", "quickstart_base", "train_dataset.batch_size=1 engine.cp_size=2", None),
        ("sft", "quickstart_base", "train_dataset.batch_size=1 engine.tp_size=2", None),
        ("dpo", "quickstart_dpo", "train_dataset.batch_size=1", "an update of the actor has 1 pairs for 2 copies"),
        ("dpo", "quickstart_dpo", "train_dataset.batch_size=3", None),
        (
            "ppo",
            "quickstart_ppo",
            "train_dataset.batch_size=4 critic.ppo_n_minibatches=16",
            "an update of the critic has 1 rows for 2 copies of the model, and each needs one; raise it, "
            "lower critic.ppo_n_minibatches, or lower engine.world_size",
        ),
        ("gspo", "quickstart", "train_dataset.batch_size=1 gconfig.n_samples=2", None),
    ],
)
def test_fewer_rows_than_copies_of_the_model(recipe, task, overrides, message):
    words = overrides.split()
    config = load(get_algorithm(recipe).config, task, [*words, "gconfig.n_samples=4"] if recipe == "ppo" else words)
    spec = EngineSpec(actor=RoleSpec(path=""), devices=["cpu"] * 2, engine=config.engine)
    if message is None:
        check_rows_per_replica(config, spec)
        return
    with pytest.raises(ConfigError, match=rf"^train_dataset.batch_size: is \d, so {message}"):
        check_rows_per_replica(config, spec)


@pytest.mark.slow
def test_a_name_that_is_taken(capsys):
    assert run("trial_name=one", "total_train_steps=1") == 0
    before = files()
    refused = {"seed=7": "cannot be resumed with another value", "recover.mode=off": "holds an earlier run"}
    for more, text in refused.items():
        assert run("trial_name=one", "total_train_steps=1", more) == 2
        assert text in capsys.readouterr().err
        assert files() == before


# Models --------------------------------------------------------------------------------------------------------------


def damage(how: str) -> None:
    """Put a copy of the quickstart's model into the folder `model`, and break it."""
    model = Path(shutil.copytree(MODEL, "model"))
    weights, config = model / "model.safetensors", model / "config.json"
    if how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:300_000])
    elif how == "no header":
        weights.write_bytes(b"")
    elif how == "architecture":
        config.write_text(config.read_text().replace("Qwen3ForCausalLM", "MambaForCausalLM"))
    elif how == "other shape":
        config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 128'))
    elif how == "no config":
        config.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "brackets":
        config.write_text("[" * 100_000)
    elif how == "negative":
        config.write_text(config.read_text().replace('"hidden_size": 96', '"hidden_size": -4'))
    elif how == "layers":
        config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 5'))
    elif how == "layers only":  # of both places that say it
        fields = json.loads(config.read_text())
        config.write_text(json.dumps({**fields, "num_hidden_layers": 5, "layer_types": None}))
    elif how == "token":
        config.write_text(config.read_text().replace('"pad_token_id": 0', '"pad_token_id": "x"'))
    elif how == "nan":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
        save_file(tensors, weights)
    elif how == "no tokenizer":
        (model / "tokenizer.json").unlink()
        (model / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no weights", "actor.path: .*model has no weights.*actor.init_from_scratch=true"),
        ("truncated", "actor.path: .*model.safetensors is truncated or not a safetensors file"),
        slow("no header", "actor.path: .*model.safetensors is truncated or not a safetensors file", name="no header"),
        ("architecture", "actor.path: .*architectures is .*MambaForCausalLM.*expected one of .*Qwen3ForCausalLM"),
        ("other shape", "actor.path: .*has shape .96, 256., expected .96, 128. from config.json"),
        slow("no config", "no config.json.*actor.path", name="no config"),
        ("no JSON", "actor.path: .*config.json cannot be read as JSON"),
        ("brackets", "actor.path: .*config.json cannot be read as JSON: maximum recursion depth"),
        ("negative", "actor.path: .*config.json: hidden_size is -4, expected int, at least 1"),
        ("layers", "actor.path: .*config.json: layer_types has 3 entries, expected .* num_hidden_layers=5"),
        ("layers only", "actor.path: .*config.json says num_hidden_layers=5, the weight files have 3 layers"),
        ("token", "actor.path: .*config.json is refused by transformers: .*pad_token_id"),
        ("nan", "actor.path: .*model: model.layers.1.mlp.down_proj.weight: numbers that are nan.*expected finite"),
        ("no tokenizer", "tokenizer_path: no tokenizer can be loaded"),
    ],
)
def test_model_folders(capsys, how, message):
    damage(how)
    fails(capsys, message, 2 if how == "no tokenizer" else 1, "actor.path=model", recipe=sft if "JSON" in how else gspo)


def test_reference_model(capsys):
    damage("truncated")
    fails(capsys, "ref.path: .*truncated", 1, "ref=default", "ref.path=model", "actor.kl_ctl=0.1")


@pytest.mark.parametrize("key", ["actor.path", "tokenizer_path"])
def test_model_names_without_network(capsys, monkeypatch, key):
    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    fails(capsys, f"nobody/nothing.*cannot be reached.*name a local model folder in {key}$", 1, f"{key}=nobody/nothing")
    fails(capsys, f"/no/where does not exist.*{key}", 1, f"{key}=/no/where")


# Data ----------------------------------------------------------------------------------------------------------------

LONG = [{"prompt": "1+" * 200}] * 4
MESSAGES = [{"prompt": [{"role": "user", "content": "1+1="}]}] * 4


@pytest.mark.parametrize(
    ("section", "rows", "message"),
    [
        ("valid_dataset", "", "path: rows.jsonl has no rows"),
        ("train_dataset", '{"prompt": "1+1="}\n{"prompt": \n', "path: rows.jsonl line 2: not JSON"),
        (
            "train_dataset",
            [*ADDITIONS, {"question": "1+1="}],
            "path: rows.jsonl row 20: field prompt is missing.*the row has question; name your columns, as in ",
        ),
        ("valid_dataset", [*ADDITIONS, {"prompt": 2}], "path: rows.jsonl row 20: field prompt is int 2, not text"),
        (
            "train_dataset",
            LONG,
            r"path: every row of rows.jsonl has more than 64 tokens \(train_dataset.max_length\), the shortest 400",
        ),
        (
            "valid_dataset",
            LONG,
            r"path: every row of rows.jsonl has more than 64 tokens \(valid_dataset.max_length\), the shortest 400",
        ),
        ("train_dataset", MESSAGES, "path: rows.jsonl row 0: messages need a tokenizer with a chat template; set tok"),
    ],
    ids=["empty", "not JSON", "other fields", "other type", "too long", "too long to evaluate", "messages"],
)
def test_data_files(capsys, section, rows, message):
    write("rows.jsonl", rows)
    settings = [f"{section}.path=rows.jsonl", f"{section}.loader=null"]
    fails(capsys, f"{section}.{message}", 1, *settings, evaluate=section == "valid_dataset")


def test_data_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("areno.data.sources.is_hub_reachable", lambda: False)
    for path, message in {
        "rows.jsonl": "there is no file or folder rows.jsonl",
        "nobody/nothing": "hub cannot be reached .*to use local data, set train_dataset.path to a file or folder",
    }.items():
        settings = [f"train_dataset.path={path}", "train_dataset.loader=null"]
        fails(capsys, f"train_dataset.path: .*{message}", 1, *settings)


def test_fewer_rows_than_a_batch(capsys):
    write("rows.jsonl", ADDITIONS[:3])
    settings = ["train_dataset.path=rows.jsonl", "train_dataset.loader=null", "train_dataset.batch_size=4"]
    fails(
        capsys, "train_dataset.batch_size: is 4, but rows.jsonl has only 3 usable rows; lower it or set", 1, *settings
    )
    assert run(*settings, "train_dataset.drop_last=false", "total_train_epochs=1") == 0


def test_an_evaluation_smaller_than_its_batch(capsys):
    write("rows.jsonl", ADDITIONS[:3])
    assert run("valid_dataset.path=rows.jsonl", "valid_dataset.loader=null", "total_train_steps=1", evaluate=True) == 0
    [made] = list_runs("out")
    assert made.series("eval/num_sequences").values[-1] == 3.0


def test_rows_longer_than_the_context_are_skipped_and_counted():
    write("rows.jsonl", [LONG[0], *ADDITIONS])
    settings = ["train_dataset.path=rows.jsonl", "train_dataset.loader=null", "train_dataset.max_length=1000"]
    assert run(*settings, "train_dataset.batch_size=20", "total_train_steps=1") == 0
    [made] = list_runs("out")
    assert made.series("rollout/num_sequences").values == [40.0]


def test_sft_skips_rows_longer_than_the_context_too(capsys):
    """The model has a context of 128 tokens, and the length that a task sets may be above it."""
    write("rows.jsonl", [{"prompt": "2+", "response": "2" * 400}, *({"prompt": "2+3=", "response": "5"},) * 20])
    settings = ["train_dataset.path=rows.jsonl", "train_dataset.loader=null", "train_dataset.max_length=4096"]
    settings += ["train_dataset.batch_size=20", "total_train_steps=1", "train_dataset.shuffle=false"]
    assert run(*settings, recipe=sft) == 0
    assert "rows.jsonl row 0 has 4" in capsys.readouterr().err
    [made] = list_runs("out")
    assert made.series("rollout/skipped_long").values == [1.0]


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("import nowhere_to_be_found", 2, "loader.py does not import: ModuleNotFoundError: No module named"),
        ("def rows(path, split): return []", 2, "loader.py has no function load_dataset; it has rows"),
        ("def load_dataset(path, split): return None", 1, "load_dataset in loader.py returned null; expected a list"),
        ("def load_dataset(path, split): return [{'q': 1}]", 1, "row 0: field prompt is missing.*the row has q"),
        ("import sys; sys.exit(3)", 2, r"loader.py does not import: SystemExit: 3 \(loader.py:1\)"),
        (
            "def load_dataset(path, split): exit(3)",
            1,
            r"load_dataset in loader.py failed: SystemExit: 3 \(loader.py:1\)",
        ),
        ("def load_dataset(path, split): return 1 / 0", 1, r"failed: ZeroDivisionError: .*\(loader.py:1\)"),
    ],
    ids=["import", "function", "none", "fields", "exits on import", "exits", "raises"],
)
def test_loaders(capsys, source, code, message):
    fails(
        capsys,
        f"train_dataset.loader: .*{message}",
        code,
        f"train_dataset.loader={write('loader.py', source)}",
        "train_dataset.path=x",
    )


def test_model_and_data_that_are_missing_in_one_report(capsys):
    overrides = ["actor.path=./none", "tokenizer_path=./no", "train_dataset.path=no.jsonl", "train_dataset.loader=null"]
    overrides += ["reward.fn=no.py", "ref=default", "ref.path=./nor", "actor.kl_ctl=0.1", "valid_dataset.loader=no.py"]
    assert run(*overrides, evaluate=True) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 6 problems in the configuration:\n")
    lines = [
        "  reward.fn: there is no",
        "(actor.path)",
        "(tokenizer_path)",
        "(ref.path)",
        "  train_dataset.path: there is no",
    ]
    assert [line for line in [*lines, "  valid_dataset.loader: there is no"] if line not in error] == []
    assert not Path("out").exists()


def test_a_path_that_the_loader_of_the_task_does_not_read(capsys):
    settings = [f"train_dataset.path={write('rows.jsonl', ADDITIONS)}", f"reward.fn={write('mine.py', REWARD)}"]
    fails(
        capsys,
        r"train_dataset.path: is 'rows.jsonl', but .* to read the path, set train_dataset.loader=null",
        2,
        *settings,
    )
    assert run(*settings, "train_dataset.loader=null", "total_train_steps=1") == 0


# Rewards -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        pytest.param(None, 2, "there is no 'reward.py'", id="missing"),
        ("import nowhere_to_be_found", 2, "reward.py does not import: ModuleNotFoundError"),
        slow("import os; os._exit(3)", 2, r"importing it ended its process \(exit code 3\)", name="exits"),
        ("def score(record): return 1.0", 2, "reward.py has no function reward_fn; it has score"),
        slow("def reward_fn(): return 1.0", 2, r"reward_fn\(record\) cannot be called", name="signature"),
        ("def reward_fn(r): return None", 1, "any sample of all steps.*returned None .*a reward is a number$"),
        slow("def reward_fn(r): return float('nan')", 1, "returned nan; a reward is a finite number$", name="nan"),
        slow("def reward_fn(r): return 'good'", 1, "returned 'good' .*a reward is a number$", name="text"),
        ("def reward_fn(r): return 1 / 0", 1, r"any sample of all steps.*ZeroDivisionError: .*\(reward.py:1\)"),
        ("import os\ndef reward_fn(r): os.kill(os.getpid(), 9)", 1, "any sample of all steps.*its process.*SIGKILL"),
        ("import time\ndef reward_fn(r): time.sleep(99)", 1, r"no answer within 0.5 s \(reward.timeout_s\)"),
    ],
)
def test_rewards(capsys, source, code, message):
    if source is not None:
        write("reward.py", source)
    timeout_s = 0.5 if "sleep" in (source or "") else 60  # nobody else must be late
    if message.endswith("$"):
        message = message.removesuffix("$") + r"\. Where it fails: areno reward reward\.py --data \S+$"
    settings = ["reward.fn=reward.py", f"reward.timeout_s={timeout_s}"]
    fails(capsys, f"reward.fn: .*{message}", code, *settings, begins=code == 1)


@pytest.mark.slow
def test_a_reward_that_fails_now_and_then_costs_those_samples_only(capsys):
    write(
        "reward.py",
        "import os, time\n"
        "FAILURES = {'10': lambda: None, '11': lambda: float('nan'), '12': lambda: 'good', '13': lambda: 1 / 0,\n"
        "            '14': lambda: os.kill(os.getpid(), 9), '15': lambda: time.sleep(99)}\n"
        "def reward_fn(record):\n"
        "    return FAILURES.get(record.prompt[:2], lambda: 1.0)()\n",
    )
    write("rows.jsonl", ADDITIONS)
    settings = ["train_dataset.path=rows.jsonl", "train_dataset.loader=null", "train_dataset.batch_size=20"]
    assert run(*settings, "reward.fn=reward.py", "reward.timeout_s=1.5", "total_train_steps=1", "reward.workers=2") == 0
    [made] = list_runs("out")
    metrics = made.steps()[1]
    assert metrics["rollout/reward_errors"] == 10
    assert metrics["rollout/reward_timeouts"] == 2
    assert metrics["rollout/rewards_mean"] == 1.0
    assert metrics["rollout/num_sequences"] == 40
    assert "warning: reward error: " in capsys.readouterr().err
