"""Runs that train adapters: recipes, going on, evaluating, serving, the SDK, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from openai import OpenAI
from safetensors.torch import load_file

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer
from areno.api import get_algorithm
from areno.cli.__main__ import main
from areno.config.models import ModelConfig
from areno.errors import CheckpointError, ConfigError
from areno.launch.command import run
from areno.launch.compose import load
from areno.models.registry import load_config
from areno.plan.lora import lora_spec
from areno.plan.plan import plan_of_experiment
from areno.plan.roles import experiment_roles, script_roles
from areno.tracking.reader import RunReader
from tests import kill_runs
from tests.helpers.resumed import folder_of, go, killed_after, whole
from tests.helpers.served import Served

MODEL = str(Path(__file__).parents[2] / "examples/quickstart/model")
LORA = ("actor.use_lora=true", "actor.lora_rank=4", "actor.optimizer.lr=2e-3")
LEARNS = ("actor.use_lora=true", "actor.lora_rank=8", "actor.optimizer.lr=1e-3")  # as in docs/adapters.md
SHORT = ["total_train_steps=2", "train_dataset.batch_size=8", "gconfig.n_samples=4", "engine.device=cpu"]
MORE = {"gspo": ("ref=default", "actor.kl_ctl=0.01"), "sft": ("actor.init_from_scratch=false", f"actor.path={MODEL}")}


@pytest.fixture(scope="module")
def of_gspo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of adapters, beside one that merges them."""
    root = tmp_path_factory.mktemp("lora")
    for trial, *settings in (("t",), ("merged", "saver.merge_adapters=true", "saver.mode=async")):
        words = ["--config-name=quickstart", *SHORT, *LORA, *MORE["gspo"], "valid_dataset.max_rows=30"]
        words += [f"cluster.fileroot={root}", f"trial_name={trial}", *settings]
        assert run(get_algorithm("gspo"), "areno", words) == 0
    return root / "quickstart"


@pytest.mark.parametrize("recipe", ["sft", *(pytest.param(r, marks=pytest.mark.slow) for r in ("dpo", "gspo", "ppo"))])
def test_a_run_goes_on_exactly(
    recipe: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*LORA, *MORE.get(recipe, ()), "recover.freq_steps=1")
    expected = whole(recipe, tmp_path_factory, *settings)
    assert any(name.endswith("adapter_model.safetensors") for name in expected)
    assert any(name.startswith("checkpoints/step-") and "/critic/model" in name for name in expected) == (
        recipe == "ppo"
    )
    monkeypatch.chdir(tmp_path)
    kill_runs.write_rows(recipe, tmp_path)
    with killed_after(4):
        go(recipe, *settings)
    assert go(recipe, resume=folder_of(recipe)) == 0
    assert kill_runs.differences(expected, kill_runs.left_by(folder_of(recipe))) == []


@pytest.mark.slow
def test_a_run_is_evaluated_with_its_adapters(
    of_gspo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it has evaluated itself; so is a checkpoint by its folder, and so are merged weights."""
    capsys.readouterr()
    for number, named in enumerate(("t", "t/checkpoints/latest", "merged")):
        assert main(["evaluate", str(of_gspo / named), "-o", str(tmp_path / str(number)), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        of_run = of_gspo / named.partition("/")[0] / "logs/metrics.jsonl"
        lines = [json.loads(line) for line in of_run.read_text().splitlines()]
        [accuracy] = [line["eval/accuracy"] for line in lines if line.get("step") == 2 and "eval/accuracy" in line]
        assert found["accuracy"] == accuracy


def test_a_replay_has_the_adapters_and_their_base(of_gspo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(of_gspo / "t"), "--step", "1", "--sample", "0", "--checkpoint", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_served(of_gspo: Path) -> None:
    texts = []
    for named in ("t/checkpoints/latest", "merged"):
        served = Served(folder=str(of_gspo / named))
        try:
            client = OpenAI(base_url=served.url, api_key="x", max_retries=0)
            model = client.models.list().data[0].id
            answers = [
                client.completions.create(model=model, prompt=f"{n}+35=", max_tokens=8, temperature=0) for n in (27, 64)
            ]
            texts.append([answer.choices[0].text for answer in answers])
        finally:
            served.close()
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_adapters_learn_what_the_whole_model_learns(tmp_path: Path) -> None:
    """The rewards of its step n by step 1.5 n, within 0.05."""
    rewards: dict[str, list[float]] = {}
    for trial, *settings in (("whole", "total_train_steps=40"), ("lora", "total_train_steps=60", *LEARNS)):
        words = ["--config-name=quickstart", "valid_dataset=null", "engine.device=cpu", f"cluster.fileroot={tmp_path}"]
        assert run(get_algorithm("gspo"), "areno", [*words, f"trial_name={trial}", *settings]) == 0
        rewards[trial] = RunReader(tmp_path / "quickstart" / trial).series("rollout/rewards_mean").values
    for n in (20, 30, 40):
        whole, later = sum(rewards["whole"][n - 5 : n]) / 5, sum(rewards["lora"][n * 3 // 2 - 5 : n * 3 // 2]) / 5
        assert later > whole - 0.05, n
    assert later > 0.85


def test_a_script_trains_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = {"device": "cpu", "use_lora": True, "lora_rank": 2, "target_modules": ["q_proj", "down_proj"]}
    params = SamplingParams(max_new_tokens=4, greedy=True)
    with Trainer(1, MODEL, custom_config=ArenoConfig(runtime=runtime)) as trainer:
        trainer.init()
        assert trainer.info.n_adapter_params < 0.1 * trainer.info.n_params
        with trainer.rollout_session(sampling_params=params, proxy=False):
            trainer.rollout_batch(["27+35="], 1, params)
        trainer.save_checkpoint(tmp_path / "a")
        trainer.save_checkpoint(tmp_path / "a")  # replaced
        trainer.save_checkpoint(tmp_path / "b", merge_adapters=True)
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "down_proj"])
    assert config["base_model_name_or_path"] == MODEL
    before = load_file(Path(MODEL) / "model.safetensors")
    assert all(tensor.equal(before[name]) for name, tensor in load_file(tmp_path / "b/model.safetensors").items())
    runtime = {"device": "cpu", "use_lora": True, "init_lora_from": str(tmp_path / "a"), "lora_rank": 32}
    config = ArenoConfig(runtime=runtime)
    with caplog.at_level("INFO", "areno"), Trainer(1, MODEL, custom_config=config) as trainer:
        trainer.init()  # the default, if it is given or not: the log says that the folder's counts
    told = f"LoRA of rank 2 on q_proj, down_proj, from {tmp_path / 'a'} (whose rank, alpha and modules count, not the"
    assert told in caplog.text
    runtime["lora_rank"] = 8
    with pytest.raises(ConfigError, match=r"custom_config\.runtime\.lora_rank: is 8, but the adapters of "):
        Trainer(1, MODEL, custom_config=ArenoConfig(runtime=runtime)).init()
    with pytest.raises(ConfigError, match=r"custom_config\.runtime\.lora_rank: is 0"):
        Trainer(1, MODEL, custom_config=ArenoConfig(runtime={"lora_rank": 0, "use_lora": True}))


def trainer_of(**actor: object) -> Trainer:
    config = load(get_algorithm("sft").config, "quickstart_base", ["engine.device=cpu"])
    config.actor = ModelConfig(**{"path": MODEL, "use_lora": True, **actor})  # type: ignore[arg-type]
    trainer = Trainer.from_config(config)
    trainer.close()
    return trainer


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("actor.lora_rank=8", "actor.lora_rank: is 8, but actor.use_lora is false"),
        ("actor.target_modules=[q_proj]", "actor.target_modules: is ['q_proj'], but actor.use_lora is false"),
        ("actor.use_lora=true actor.lora_rank=0", "actor.lora_rank: is 0"),
        ("actor.use_lora=true actor.lora_alpha=-1", "actor.lora_alpha: is -1"),
        ("actor.use_lora=true actor.target_modules=[]", "actor.target_modules: is empty"),
        ("actor.use_lora=true actor.target_modules=[all-linear,q_proj]", "actor.target_modules: has all-linear beside"),
        ("actor.use_lora=true actor.peft_type=ia3", "actor.peft_type: is 'ia3'"),
        ("actor.use_lora=true actor.init_from_scratch=true", "actor.use_lora: is true, and so is init_from_scratch"),
        ("saver.merge_adapters=true", "saver.merge_adapters: is true, but actor.use_lora is false"),
        (
            "actor.use_lora=true ref=default actor.kl_ctl=0.1 ref.offload=true",
            "ref.offload: is true, but with actor.use_lora the reference is the actor",
        ),
    ],
)
def test_settings_that_do_not_fit(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("gspo").config, "quickstart", overrides.split())
    [found] = caught.value.problems
    assert str(found).startswith(message)


def test_modules_that_the_model_has_not() -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(target_modules=["q_proj", "query", "down_prj", "model.layers.0.self_attn.k_proj"])
    query, down, long = map(str, caught.value.problems)
    assert "; did you mean k_proj?" in long
    assert query.startswith("actor.target_modules: has query, which is no linear layer of the model")
    assert "did you mean down_proj or o_proj?" in down
    assert "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or all-linear" in down
    with pytest.raises(ConfigError, match=r"actor\.lora_rank: is 97, but none of the layers .* wider than 96"):
        trainer_of(lora_rank=97)
    with pytest.raises(ConfigError, match=r"actor\.lora_rank: is 49, but none of the layers .* wider than 48"):
        trainer_of(lora_rank=49, target_modules=["k_proj", "v_proj"])
    phi = replace(load_config(MODEL), family="phi3")
    with pytest.raises(ConfigError) as caught:
        lora_spec(ModelConfig(path=MODEL, use_lora=True, target_modules=["k_proj", "o_proj"]), phi)
    [found] = map(str, caught.value.problems)
    assert "has k_proj, which is a part of qkv_proj in the model's files, and that has one adapter" in found
    assert "there are qkv_proj, o_proj, gate_up_proj, down_proj, or all-linear" in found


def test_adapters_in_the_place_of_a_model(of_gspo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = of_gspo / "t/checkpoints/latest"
    with pytest.raises(ConfigError, match=r"actor\.path: .* holds adapters and no model; name the model"):
        trainer_of(path=str(folder))
    with pytest.raises(ConfigError, match=r"ref\.path: .* holds adapters and no model; expected a whole model"):
        experiment_roles(load(get_algorithm("dpo").config, "quickstart_dpo", [f"ref.path={folder}"]))
    engine = plan_of_experiment(load(get_algorithm("gspo").config, "quickstart", ["engine.device=cpu"])).spec
    with pytest.raises(ConfigError, match=r"roles\['judge'\]\.path: .* holds adapters"):
        script_roles({"judge": ModelRole("judge", str(folder), False)}, engine.actor)
    with pytest.raises(CheckpointError, match=r"actor\.init_lora_from: .* has no adapter_config\.json"):
        trainer_of(init_lora_from=MODEL)
    expected = r"/no/where does not exist; expected a local adapter folder or a hub id .*\(actor\.init_lora_from\)"
    with pytest.raises(CheckpointError, match=expected):
        trainer_of(init_lora_from="/no/where")
    with pytest.raises(ConfigError, match=r"actor\.use_rslora: is true, but the adapters"):
        trainer_of(init_lora_from=str(folder), use_rslora=True)
    lora = lora_spec(
        ModelConfig(path=MODEL, use_lora=True, init_lora_from=str(folder), lora_rank=4), load_config(MODEL)
    )
    assert lora is not None
    assert (lora.init_from, lora.trained_on) == (str(folder), MODEL)
    moved = shutil.copytree(folder.resolve(), tmp_path / "moved")
    assert main(["check", str(moved)]) == 1
    assert f"{moved} holds adapters and no model; check the one they are for: {MODEL}" in capsys.readouterr().out
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/nowhere/at/all"}))
    assert main(["evaluate", str(moved), "--run", str(of_gspo / "t"), "-o", str(tmp_path / "e")]) == 1
    assert "belongs to the model /nowhere/at/all, which is not there" in capsys.readouterr().err
