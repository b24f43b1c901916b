"""A setting that another one makes useless is an error that names both, and not silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from areno.api import get_algorithm
from areno.api.algorithms import built_in_algorithms
from areno.config.models import MicroBatchSpec
from areno.config.optimizers import OPTIMIZERS
from areno.errors import ConfigError, keys_renamed
from areno.launch.compose import load
from areno.launch.hints import NOT_HERE, setting_hint
from areno.schema.build import build
from areno.schema.fields import Needs, Section, setting, setting_rows


def problems(recipe: str, *overrides: str, name: str = "quickstart") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm(recipe).config, name, list(overrides), sources=True)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "gspo",
            "actor.mb_spec.mini_bs=4 actor.mb_spec.max_tokens_per_mb=8192",
            "actor.mb_spec.mini_bs: is 4, but actor.mb_spec.max_tokens_per_mb is 8192, so",
        ),
        ("gspo", "actor.optimizer.min_lr_ratio=0.5", "actor.optimizer.min_lr_ratio: is 0.5, but actor.optimizer.lr_"),
        ("gspo", "actor.kl_estimator=k1", "actor.kl_estimator: is k1, but actor.kl_ctl is 0, so there is no KL"),
        ("gspo", "actor.adv_norm.std_level=null actor.adv_norm.eps=1", "actor.adv_norm.eps: is 1, but actor.adv_no"),
        (
            "gspo",
            "actor.recompute_logprob=false actor.use_decoupled_loss=true",
            "actor.recompute_logprob: is false, but use_decoupled_loss compares with the policy before the update",
        ),
        (
            "grpo",
            "actor.surrogate=sapo actor.eps_clip=0.1",
            "actor.eps_clip: is 0.1, but actor.surrogate is sapo; set actor.surrogate to clip or cispo, or",
        ),
        (
            "ppo",
            "actor.surrogate=cispo actor.c_clip=2",
            "actor.c_clip: is 2, but actor.surrogate is cispo; set actor.surrogate to clip, or leave this out",
        ),
        (
            "gspo",
            "perf_tracer.save_interval=2",
            "perf_tracer.save_interval: is 2, but perf_tracer.enabled is false, so no",
        ),
        (
            "gspo",
            "perf_tracer.session_tracer.enabled=true",
            "perf_tracer.session_tracer.enabled: is true, but agent.fn is null, so there are no agent sessions; set",
        ),
        ("grpo", "actor.sapo_tau_pos=2", "actor.sapo_tau_pos: is 2, but actor.surrogate is clip; set"),
        (
            "grpo",
            "actor.surrogate=cispo actor.use_sapo_loss=true",
            "actor.use_sapo_loss: is true, but surrogate is cispo; leave one of them out",
        ),
        (
            "gspo",
            "eval_gconfig.top_p=0.5",
            "eval_gconfig.top_p: is 0.5, but eval_gconfig.greedy is true, so the most likely",
        ),
        (
            "gspo",
            "eval_gconfig.top_k=5",
            "eval_gconfig.top_k: is 5, but eval_gconfig.greedy is true, so the most likely",
        ),
        ("gspo", "eval_gconfig.temperature=0.5", "eval_gconfig.temperature: is 0.5, but eval_gconfig.greedy takes"),
        ("gspo", "reward.fn=null reward.path=x reward.timeout_s=5", "reward.timeout_s: is 5, but reward.fn is null"),
        ("gspo", "reward.fn=null reward.path=x reward.workers=5", "reward.workers: is 5, but reward.fn is null"),
        (
            "gspo",
            "valid_dataset=null evaluator.freq_steps=5",
            "evaluator.freq_steps: has no effect with valid_dataset=",
        ),
        (
            "gspo",
            "valid_dataset=null saver.best_metric=eval/accuracy",
            "saver.best_metric: is eval/accuracy, but valid_dataset is null, so nothing is evaluated",
        ),
        (
            "gspo",
            "saver.best_metric=eval/acuracy",
            "saver.best_metric: is eval/acuracy, which is not measured",
        ),
        (
            "gspo",
            "saver.keep=2 saver.keep_best=2",
            "saver.keep_best: is 2, but saver.best_metric is null, so checkpoints are not",
        ),
        (
            "gspo",
            "valid_dataset=null eval_gconfig.top_k=5",
            "eval_gconfig.top_k: has no effect with valid_dataset=null",
        ),
        ("gspo", "valid_dataset=null eval_gconfig=greedy", "eval_gconfig: has no effect with valid_dataset=null"),
        (
            "gspo",
            "valid_dataset=null valid_dataset.path=x",
            "valid_dataset.path: has no effect with valid_dataset=null",
        ),
        (
            "gspo",
            "actor.optimizer.type=sgd actor.optimizer.beta1=0.8",
            "actor.optimizer.beta1: is 0.8, but actor.optimizer.type is sgd",
        ),
        (
            "gspo",
            "actor.optimizer.muon.ns_steps=6",
            "actor.optimizer.muon.ns_steps: is 6, but actor.optimizer.type is adam, so no matrix is orthogonalised; "
            "set actor.optimizer.type to muon, or leave this out",
        ),
        (
            "gspo",
            "actor.optimizer.type=sgd recover.no_save_optim=true",
            "recover.no_save_optim: is true, but actor.optimizer.type is sgd, which has no moments",
        ),
        (
            "gspo",
            "recover.mode=disabled recover.no_load_optim=true",
            "recover.no_load_optim: is true, but recover.mode is off, so no states are written",
        ),
        (
            "gspo",
            "gconfig.greedy=true",
            "gconfig.greedy: is true, so the 8 samples of a prompt (gconfig.n_samples) would be equal, and only agents",
        ),
        ("gspo", "recover.mode=off recover.keep=5", "recover.keep: is 5, but recover.mode is off"),
        ("grpo", "ref=null ref.path=x", "ref.path: has no effect with ref=null; leave one of the two out"),
    ],
)
def test_a_setting_that_is_not_used(recipe, overrides, message):
    [found] = problems(recipe, *overrides.split())
    assert found.startswith(message)


def test_sessions_of_an_algorithm_without_agents():
    text = "perf_tracer.session_tracer.enabled: is true, but this algorithm has no agents; leave it out"
    assert text in problems("sft", "perf_tracer.session_tracer.enabled=true")


def test_turns_of_an_algorithm_without_conversations():
    text = "train_dataset.changed_turns: is error, but this algorithm does not train on the turns of conversations; "
    for recipe in ("grpo", "dpo", "kto"):
        assert text + "leave it out" in problems(recipe, "train_dataset.changed_turns=error")
    assert not any("changed_turns" in each for each in problems("sft", "train_dataset.changed_turns=error"))


def test_evaluation_settings_of_a_task_without_evaluation(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\nvalid_dataset: null\n")
    with pytest.raises(ConfigError) as caught:
        load(get_algorithm("gspo").config, "mine", config_dir=tmp_path)
    assert [problem.key for problem in caught.value.problems] == ["evaluator.eval_before_train", "eval_gconfig"]


def test_no_evaluation_takes_its_settings_along():
    config = load(get_algorithm("gspo").config, "quickstart", ["valid_dataset=null"])
    assert (config.valid_dataset, config.eval_gconfig, config.evaluator.eval_before_train) == (None, None, False)


@pytest.mark.parametrize("more", [["agent.fn=agent.py"], ["gconfig.n_samples=1", "actor.adv_norm=null"]])
def test_greedy_where_samples_are_not_equal(more):
    assert load(get_algorithm("grpo").config, "quickstart", ["gconfig.greedy=true", *more]).gconfig.greedy


def test_moments_of_one_of_two_optimizers_can_be_left_out():
    config = load(
        get_algorithm("ppo").config, "quickstart", ["critic.optimizer.type=sgd", "recover.no_save_optim=true"]
    )
    assert config.recover.no_save_optim


def test_a_size_in_tokens_can_be_swapped_for_one_in_rows():
    sizes = ["actor.mb_spec.max_tokens_per_mb=null", "actor.mb_spec.mini_bs=4"]
    assert load(get_algorithm("gspo").config, "quickstart", sizes).actor.mb_spec == MicroBatchSpec(mini_bs=4)


# What is not there at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "key", "message"),
    [
        ("gspo", "critic.warmup_steps=1", "critic: unknown key; it is a setting of ppo"),
        ("gspo", "actor.beta=1", "actor.beta: unknown key; here it is actor.kl_ctl"),
        (
            "dpo",
            "gconfig.n_samples=1",
            "gconfig: unknown key; it is a setting of distill, grpo, gspo, online_dpo and ppo",
        ),
        (
            "gspo",
            "stats_logger.wandb.wandb_api_key=x",
            "stats_logger.wandb.wandb_api_key: unknown key; it would be kept",
        ),
        ("ppo", "critic.use_lora=true", "critic.use_lora: unknown key; adapters are for the actor"),
        (
            "gspo",
            "variant=m2po",
            "actor.reduction: unknown key; it is a setting of grpo and ppo; variant=m2po sets it",
        ),
        ("gspo", "actor.fsdp.offload_params=true", "actor.fsdp.offload_params: unknown key; here it is actor.offload"),
        ("ppo", "critic.megatron.ddp.x=1", "critic.megatron: unknown key; areno has an engine of its own"),
        (
            "gspo",
            "actor.dtype=float16",
            "actor.dtype: is 'float16'; expected one of 'auto', 'bfloat16', 'float32'; did you mean bfloat16 or "
            "float32?; float16 needs a loss scale",
        ),
        (
            "gspo",
            "scheduler.type=slurm",
            "scheduler.type: is 'slurm'; expected one of 'local', 'ray'; start Ray on the nodes",
        ),
        ("gspo", "rollout.queue_size=4", "rollout.queue_size: unknown key; unfinished samples wait in the run"),
        ("ppo", "critic.dtype=bfloat16", "critic.dtype: unknown key; critic has none of its own, see actor.dtype"),
        (
            "gspo",
            "actor.optimizer.type=adam_16bit",
            f"actor.optimizer.type: is 'adam_16bit'; expected one of {', '.join(map(repr, OPTIMIZERS))}; did you mean",
        ),
        ("gspo", "actor.lr=1", "actor.lr: unknown key; did you mean actor.optimizer.lr?"),
    ],
)
def test_an_unknown_key_that_something_is_known_of(recipe, key, message):
    [found] = problems(recipe, key, name="quickstart_dpo" if recipe == "dpo" else "quickstart")
    assert found.startswith(message)


def test_a_variant_is_named_for_the_keys_that_it_sets(tmp_path):
    (file := tmp_path / "mine.yaml").write_text("actor:\n  reduction: token\n")
    assert setting_hint("actor.reduction", ("mine", file)).endswith("; variant=mine sets it")
    for key in ("actor.beta", "actor.reduction.mean", "critic"):
        assert "mine" not in setting_hint(key, ("mine", file))


def test_what_is_said_not_to_be_there_is_not_there():
    keys = {row.key for name in built_in_algorithms() for row in setting_rows(get_algorithm(name).config)}
    assert not keys & set(NOT_HERE)
    assert setting_hint("never.heard.of") == ""


# The declaration of what a setting needs ------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Inner(Section):
    mode: Literal["draw", "copy", "off"] = setting("draw", help="mode")
    width: int = setting(4, help="width", only_with=Needs("mode", "draw", "copy", so="nothing is drawn"))
    colour: float = setting(
        1.0, help="colour", only_with=(Needs("mode", "draw"), Needs("models.use_ink", so="all is grey"))
    )
    depth: int = setting(1, help="depth", only_with=Needs("mode", "draw", in_build=True))


@dataclass(kw_only=True)
class Models(Section):
    use_ink: bool = setting(False, help="ink")
    ref: Inner | None = setting(None, help="ref", only_with=Needs("path", do="set path to a folder"))
    path: str | None = setting(None, help="path")


@dataclass(kw_only=True)
class Outer(Section):
    inner: Inner = setting(factory=Inner, help="inner")
    models: Models = setting(factory=Models, help="models")
    left: int | None = setting(None, help="left", gt=0)
    page: Inner = setting(factory=Inner, help="page", only_with=Needs("left"))


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        ({"inner": {"mode": "off"}, "models": {"path": "x", "ref": {"mode": "copy"}}, "left": 1}, []),
        ({"inner": {"colour": 2.0}, "models": {"use_ink": True}}, []),
        ({"inner": {"width": 4, "mode": "off"}}, []),  # its default
        (
            {"inner": {"width": 2, "mode": "off"}},
            [
                "inner.width: is 2, but inner.mode is off, so nothing is drawn; set inner.mode to draw or copy, or "
                "leave this out"
            ],
        ),
        (
            {"inner": {"colour": 2.0}},
            [
                "inner.colour: is 2, but models.use_ink is false, so all is grey; set models.use_ink to true, or "
                "leave this out"
            ],
        ),
        (
            {"inner": {"depth": 2, "mode": "off"}},
            ["inner.depth: is 2, but inner.mode is off; set inner.mode to draw, "],
        ),
        ({"models": {"ref": {}}}, ["models.ref: is set, but models.path is null; set path to a folder, or leave this"]),
        (
            {"page": {"width": 2, "mode": "copy"}},
            ["page.mode: is copy, but left is null; set left, or leave this", "page.width: is 2, but left is null;"],
        ),
        ({"page": {"width": 2}, "left": 0}, ["left: is 0; it must be more than 0"]),  # that may be meant for it
        ({"page": {"width": 2}, "left": 1, "models": None}, ["models: is null; a section is expected"]),
    ],
)
def test_a_setting_that_needs_another(data, messages):
    found = []
    try:
        build(Outer, data)
    except ConfigError as error:
        found = [str(problem) for problem in error.problems]
    assert len(found) == len(messages)
    assert all(text.startswith(message) for text, message in zip(found, messages, strict=True))


def test_a_script_is_refused_a_setting_without_effect_too():
    with pytest.raises(ConfigError, match=r"^width: is 2, but mode is off"):
        Inner(mode="off", width=2)
    assert Inner(mode="off", depth=2).depth == 2  # declared with in_build


def test_the_setting_that_is_needed_has_the_name_that_the_user_knows():
    with pytest.raises(ConfigError) as caught, keys_renamed({"inner.mode": "--mode", "inner.width": "--width"}.get):
        build(Outer, {"inner": {"width": 2, "mode": "off"}})
    assert str(caught.value).startswith("--width: is 2, but --mode is off, so nothing is drawn; set --mode to draw")


@pytest.mark.parametrize("recipe", built_in_algorithms())
def test_every_setting_that_is_needed_exists(recipe):
    """A need that names no setting would never be reported. A need may name a setting of the whole run."""
    cls = get_algorithm(recipe).config
    keys = {row.key for row in setting_rows(cls)}
    for row in setting_rows(cls):
        section = row.key.rpartition(".")[0]
        for need in row.setting.only_with:
            assert need.key in keys or f"{section}.{need.key}" in keys, (row.key, need.key)


def test_what_a_script_passes_to_a_trainer_need_not_be_named(tmp_path):
    """Rows and the reward. Everything else is checked as for a command."""
    given = ["actor.path=model", "reward.weights=[1.0,0.5]", "valid_dataset=default", "evaluator.freq_steps=2"]
    for recipe in ("grpo", "ppo", "sft"):
        words = given if recipe != "sft" else ["actor.path=model", "valid_dataset=default"]
        task = "prompts" if recipe != "sft" else "chat"
        config = load(get_algorithm(recipe).config, task, words)
        assert (config.train_dataset.path, config.valid_dataset.path) == (None, None)
        with pytest.raises(ConfigError) as caught:
            load(get_algorithm(recipe).config, task, words, sources=True)
        keys = {problem.key for problem in caught.value.problems}
        assert keys == {"train_dataset.path", "valid_dataset.path"} | ({"reward.fn"} if recipe != "sft" else set())
    with pytest.raises(ConfigError, match=r"recover.keep: is 5, but recover.mode is off"):
        load(get_algorithm("grpo").config, "prompts", [*given, "recover.mode=off", "recover.keep=5"])
