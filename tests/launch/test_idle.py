"""Files of other tools: what asks for nothing is left out, and the rest is named with our setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areno.api.algorithms import built_in_algorithms, get_algorithm
from areno.cli.__main__ import main
from areno.errors import ConfigError
from areno.launch import command
from areno.launch.compose import load
from areno.launch.hints import all_setting_keys, setting_hint
from areno.launch.other_tools import COUNTERPARTS, EQUAL, HOLDS, PARTS
from areno.schema.fields import setting_rows

OURS = """
experiment_name: questions
trial_name: first
cluster: {fileroot: out}
gconfig: {n_samples: 4, max_new_tokens: 64, temperature: 0.9}
rollout: {max_head_offpolicyness: 2, dump_to_file: true}
actor:
  path: examples/quickstart/model
  dtype: float32
  mb_spec: {max_tokens_per_mb: 1024}
  optimizer: {lr: 1.0e-5, lr_scheduler_type: constant}
  use_decoupled_loss: true
  kl_ctl: 0.0
train_dataset: {path: rows.jsonl, batch_size: 8}
reward: {fn: math}
saver: {freq_epochs: 1}
recover: {mode: disabled}
"""
THEIRS = """
seed: 1
enable_offload: false
tokenizer_path: ""
allocation_mode: ""
cluster: {n_nodes: 1}
scheduler: {type: null}
gconfig: {use_beam_search: false}
critic: null
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  fileroot: ${cluster.fileroot}
  tokenizer_path: ${tokenizer_path}
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  enable_rollout_tracing: false
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  disable_dropout: true
  temperature: ${gconfig.temperature}
  max_new_tokens: ${gconfig.max_new_tokens}
  kl_estimator: k1
  use_lora: false
  target_modules: []
  grad_reduce_dtype: float32
  optimizer: {min_lr_ratio: 0.0}
  reward_norm: null
  adv_norm: {group_size: 1}
ref:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: ${actor.path}
  dtype: ${actor.dtype}
  init_from_scratch: false
  mb_spec: {max_tokens_per_mb: 1024}
  optimizer: null
sglang: {model_path: "${actor.path}", dtype: "${actor.dtype}", random_seed: "${seed}", max_running_requests: null}
vllm: {model: "${actor.path}", seed: "${seed}", skip_tokenizer_init: false}
saver: {experiment_name: "${experiment_name}", trial_name: "${trial_name}", fileroot: "${cluster.fileroot}"}
evaluator: {experiment_name: "${experiment_name}", trial_name: "${trial_name}", fileroot: "${cluster.fileroot}"}
recover: {experiment_name: "${experiment_name}", freq_epochs: 1, freq_steps: null, freq_secs: 3600}
stats_logger: {fileroot: "${cluster.fileroot}", wandb: {mode: disabled}}
perf_tracer: {experiment_name: "${experiment_name}", enabled: false, save_interval: 0, session_tracer: null}
"""
MACHINERY = """
cluster: {name_resolve: {type: nfs, nfs_record_root: /tmp/names}}
actor: {scheduling_spec: [{task_type: worker, gpu: 1}]}
ref: {scheduling_strategy: {type: colocation, target: actor}}
rollout: {scheduling_spec: "${actor.scheduling_spec}"}
train_dataset: {type: rl, num_workers: 4, pin_memory: true}
"""
DECIDED = {
    "actor": {"backend": "fsdp:d4t2", "behave_imp_weight_cap": 5.0, "fsdp": {"offload_params": True}},
    "rollout": {"backend": "sglang:d4"},
    "sglang": {
        "mem_fraction_static": 0.8,
        "context_length": 99,
        "max_running_requests": 64,
        "lora_backend": "triton",
    },
    "vllm": {"gpu_memory_utilization": 0.9, "enforce_eager": True},
}


def file_of(folder: Path, name: str, *parts: str | dict) -> Path:
    """A file of all parts, the values of later ones last."""
    from omegaconf import OmegaConf

    whole = OmegaConf.merge(*map(OmegaConf.create, parts))
    (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(whole), encoding="utf-8")
    return folder / f"{name}.yaml"


def test_a_file_with_all_that_is_off_is_the_run_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = get_algorithm("grpo").config
    for name, parts in {"ours": [OURS], "theirs": [OURS, THEIRS], "all": [OURS, THEIRS, MACHINERY]}.items():
        file_of(tmp_path, name, *parts)
    expected = load(config, "ours", config_dir=tmp_path)
    assert load(config, "theirs", config_dir=tmp_path) == expected
    assert not caplog.messages
    assert load(config, "all", config_dir=tmp_path) == expected
    [said] = caplog.messages
    assert said.startswith("left out, since areno has no such parts: ")
    assert set(said.partition(": ")[2].split(", ")) == {
        "cluster.name_resolve",
        *("actor.scheduling_spec", "rollout.scheduling_spec", "ref.scheduling_strategy"),
        *("train_dataset.type", "train_dataset.num_workers", "train_dataset.pin_memory"),
    }


def test_what_must_be_decided_is_named_with_our_setting(tmp_path: Path) -> None:
    file_of(tmp_path, "file", OURS, THEIRS, MACHINERY, DECIDED)
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("grpo").config, "file", config_dir=tmp_path)
    found = {problem.key: problem.message.partition("; ")[2] for problem in caught.value.problems}
    own = "areno has an engine of its own"
    assert found == {
        "actor.backend": f"{own}, which does the same with engine.world_size=8 engine.tp_size=2",
        "actor.behave_imp_weight_cap": "here it is actor.rejection_sampling.upper",
        "actor.fsdp.offload_params": "here it is actor.offload",
        "rollout.backend": f"{own}, which does the same with engine.world_size=4",
        "sglang": f"{own}; see the settings of engine and rollout",
        "sglang.mem_fraction_static": "here it is rollout.mem_fraction",
        "sglang.context_length": "here it is gconfig.max_tokens",
        "sglang.max_running_requests": "here it is rollout.max_concurrent_rollouts",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor": {"kl_estimator": "k1"}}, None),
        ({"actor": {"kl_ctl": 0.1}, "ref": {"path": "other"}}, None),
        ({"saver": {"trial_name": "another"}}, "saver.trial_name: unknown key; a run has one for all of its parts"),
        ({"actor": {"temperature": 0.5}}, "actor.temperature: unknown key; here it is gconfig.temperature"),
        ({"actor": {"optimizer": {"min_lr_ratio": 0.2}}}, "actor.optimizer.min_lr_ratio: is 0.2, but"),
        (
            {"actor": {"kl_ctl": 0.1}, "ref": {"dtype": "bfloat16"}},
            "ref.dtype: unknown key; ref has none of its own",
        ),
        ({"rollout": {"queue_size": 4}}, "rollout.queue_size: unknown key; unfinished samples wait"),
        ({"rollout": {"never_heard_of": None}}, "rollout.never_heard_of: unknown key"),
    ],
)
def test_what_differs_is_not_left_out(change: dict, message: str | None, tmp_path: Path) -> None:
    file_of(tmp_path, "file", OURS, change)
    config = get_algorithm("grpo").config
    if message is None:
        load(config, "file", config_dir=tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        load(config, "file", config_dir=tmp_path)
    assert any(str(problem).startswith(message) for problem in caught.value.problems), caught.value


@pytest.mark.parametrize(
    "words",
    [
        "teacher=null perf_tracer=null scheduler.type=null",
        "perf_tracer.session_tracer=null session_tracer=null tokenizer_path='' actor.target_modules=[]",
        "recover.mode=disabled recover.freq_epochs=null recover.freq_secs=null",
        "actor.optimizer.min_lr_ratio=0.0 perf_tracer.save_interval=0 actor.importance_sampling_level=sequence",
    ],
)
def test_on_the_command_line(words: str) -> None:
    config = get_algorithm("gspo").config
    settings: list[str] = ["valid_dataset=null", "seed=3"]
    plain = load(config, "quickstart", [*settings, *(["recover.mode=off"] if "recover" in words else [])])
    assert load(config, "quickstart", [*settings, *words.split()]) == plain


def test_a_contradiction_on_the_command_line_is_an_error() -> None:
    for words in ("recover.mode=off recover.freq_steps=5", "actor.kl_ctl=0 actor.kl_estimator=k1"):
        with pytest.raises(ConfigError, match="or leave this out"):
            load(get_algorithm("gspo").config, "quickstart", words.split())


@pytest.mark.parametrize(
    ("key", "words", "told"),
    [
        ("critic.fp8_config", "critic.fp8_config.mode=e4m3", "only the actor and its reference compute in FP8"),
        ("critic.megatron.fp8_config.mode", "critic.megatron.fp8_config.mode=e4m3", "only the actor and its reference"),
        ("critic.use_lora", "critic.use_lora=true", "adapters are for the actor"),
        ("reward.fp8_config", "reward.fp8_config.mode=e4m3", "only the actor and its reference compute in FP8"),
        ("", "ref.fp8_config.mode=e4m3", ""),
        ("", "critic.fp8_config.mode=disabled critic.use_lora=false", ""),
    ],
)
def test_what_the_actor_alone_can_do_is_not_left_out_of_other_sections(key: str, words: str, told: str) -> None:
    config, actor = get_algorithm("ppo").config, ["actor.fp8_config.mode=e4m3", "actor.use_lora=true"]
    if not key:
        assert load(config, "quickstart", [*actor, *words.split()]) == load(config, "quickstart", actor)
        return
    with pytest.raises(ConfigError) as caught:
        load(config, "quickstart", [*actor, *words.split()])
    assert [(problem.key, told in problem.message) for problem in caught.value.problems] == [(key, True)]


def test_no_limit_of_rows_is_the_context(tmp_path: Path) -> None:
    config = load(get_algorithm("sft").config, "quickstart_base", ["train_dataset.max_length=null"])
    assert config.train_dataset.max_length_or_unlimited > 10**9


@pytest.mark.parametrize("recipe", built_in_algorithms())
def test_hints_name_settings_that_the_algorithm_has(recipe: str) -> None:
    cls = get_algorithm(recipe).config
    here = {row.key for row in setting_rows(cls)}
    for key in (*COUNTERPARTS, *EQUAL, *HOLDS, *PARTS, "actor.max_new_tokens", "critic.temperature"):
        named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", setting_hint(key, cls=cls))) & all_setting_keys()
        assert named <= here, (key, setting_hint(key, cls=cls))
    assert all(set(ours) <= all_setting_keys() for ours in COUNTERPARTS.values())


@pytest.mark.parametrize(
    ("recipe", "key", "told"),
    [
        ("grpo", "beta", "here it is actor.kl_ctl"),
        ("grpo", "actor.beta", "here it is actor.kl_ctl"),
        ("dpo", "beta", "here it is actor.beta"),
        ("sft", "beta", "this algorithm has nothing like it"),
        ("dpo", "actor.temperature", "this algorithm has nothing like it"),
        ("gspo", "actor.importance_sampling_level", "gspo always takes the ratio of a sequence"),
        ("grpo", "num_generations", "here it is gconfig.n_samples"),
        ("grpo", "per_device_train_batch_size", "here it is train_dataset.batch_size and actor.mb_spec.mini_bs"),
        ("sft", "actor.optimizer.learning_rate", "here it is actor.optimizer.lr"),
        ("ppo", "actor_rollout_ref.actor.clip_ratio_c", "here it is actor.c_clip"),
        ("ppo", "critic.megatron.recompute_granularity", "here it is actor.gradient_checkpointing"),
    ],
)
def test_names_of_other_tools(recipe: str, key: str, told: str) -> None:
    assert setting_hint(key, cls=get_algorithm(recipe).config).startswith(f"; {told}")


def test_keys_of_unknown_sections_are_told_apart() -> None:
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("grpo").config, "quickstart", ["data.train_batch_size=4", "data.foo=1", "never.heard=2"])
    assert {str(problem) for problem in caught.value.problems} == {
        "data.train_batch_size: unknown key; here it is train_dataset.batch_size",
        "data: unknown key",
        "never: unknown key; did you mean recover or saver?",
    }


def test_a_file_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, "file", OURS)
    (tmp_path / "folder.yaml").mkdir()
    algorithm = get_algorithm("grpo")
    assert command.run(algorithm, "grpo", ["--config", str(file), "--cfg", "job", "seed=7"]) == 0
    shown = capsys.readouterr().out
    assert (
        command.run(algorithm, "grpo", [f"--config-dir={tmp_path}", "--config-name=file", "--cfg=job", "seed=7"]) == 0
    )
    assert capsys.readouterr().out == shown
    assert main(["train", "--algo", "grpo", "--config", str(file), "--cfg", "job", "seed=7"]) == 0
    assert capsys.readouterr().out == shown
    for words, message in {
        "nothing.yaml": "--config: is nothing.yaml, which does not exist",
        "nothing.yml": "--config: is nothing.yml; a file that ends in .yaml is expected",
        f"{tmp_path}/folder.yaml": "folder.yaml, which is a folder; a file is expected",
        f"{file} --config-name=file": "--config: stands for --config-dir",
    }.items():
        with pytest.raises(SystemExit) as ended:
            command.run(algorithm, "grpo", ["--config", *words.split()])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
