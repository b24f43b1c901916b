"""Dictionaries to dataclasses: every kind of problem, at every depth, in one report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pytest

from areno.config.datasets import ValidDatasetConfig
from areno.config.models import OptimizerConfig
from areno.config.rollout import GenerationConfig
from areno.config.run import EngineConfig
from areno.errors import ConfigError, Problem, keys_renamed
from areno.recipes.dpo import DPOConfig
from areno.recipes.grpo import GRPOActorConfig, GRPOConfig
from areno.recipes.gspo import GSPOConfig
from areno.recipes.ppo import PPOConfig
from areno.recipes.sft import SFTConfig
from areno.run.resume import changed_settings
from areno.schema.build import build, with_defaults
from areno.schema.fields import Section, check, setting, setting_rows
from areno.schema.values import InvalidValue, convert, type_in_words


def smallest(**more) -> dict:
    return {
        "experiment_name": "test",
        "actor": {"path": "model"},
        "train_dataset": {"path": "rows.jsonl"},
        "reward": {"fn": "math"},
    } | more


def problems_of(cls, data) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(cls, data)
    found = {problem.key: problem.message for problem in caught.value.problems}
    assert len(found) == len(caught.value.problems), "a key is reported twice"
    return found


def test_smallest_configuration_takes_defaults():
    config = build(GSPOConfig, smallest())
    assert config.actor.eps_clip == 3e-4
    assert config.ref is None
    assert config.valid_dataset is None
    assert config.gconfig == GenerationConfig()
    assert build(GRPOConfig, smallest()).actor.eps_clip == 0.2


@pytest.mark.parametrize("cls", [SFTConfig, DPOConfig, GRPOConfig, GSPOConfig])
def test_round_trip(cls):
    data = smallest(valid_dataset={"path": "test.jsonl", "batch_size": 4})
    if cls in (SFTConfig, DPOConfig):
        del data["reward"]
    config = build(cls, data)
    assert build(cls, asdict(config)) == config
    assert asdict(config)["valid_dataset"]["batch_size"] == 4


def test_everything_wrong_is_reported_together():
    found = problems_of(
        GSPOConfig,
        {
            "trial_name": "a/b",
            "seed": True,
            "lr": 1e-6,
            "actor": {
                "dtype": "float16",
                "optimzer": {"lr": 1.0},
                "optimizer": {"lr": "fast", "beta1": 1.5, "lrr": 1},
                "mb_spec": 3,
                "kl_ctl": 0.1,
            },
            "train_dataset": None,
            "gconfig": {"n_samples": "x", "stop": "a", "stop_token_ids": [1, None], "top_k": 0, "max_tokens": 5},
            "engine": {"world_size": 4, "tp_size": 3},
        },
    )
    assert found == {
        "lr": "unknown key; did you mean actor.optimizer.lr?",
        "experiment_name": "missing (Name of the experiment, and of the folder that holds its runs)",
        "trial_name": "is 'a/b'; a printable folder name without '/' is expected",
        "seed": "is true; an integer is expected",
        "engine.tp_size": "is 3, which does not divide the number of devices, 4 (engine.world_size)",
        "train_dataset": found["train_dataset"],
        "actor.optimzer": "unknown key; did you mean actor.optimizer?",
        "actor.path": "missing (Hugging Face model folder or hub id)",
        "actor.dtype": "is 'float16'; expected one of 'auto', 'bfloat16', 'float32'; did you mean bfloat16 or float32?",
        "actor.mb_spec": "is 3; a section is expected, with keys mini_bs, max_tokens_per_mb",
        "actor.optimizer.lrr": "unknown key; did you mean actor.optimizer.lr?",
        "actor.optimizer.lr": "is 'fast'; a number is expected",
        "actor.optimizer.beta1": "is 1.5; it must be less than 1",
        "gconfig.n_samples": "is 'x'; an integer is expected",
        "gconfig.stop": "is 'a'; a list is expected: ['a'], or null",
        "gconfig.stop_token_ids": "[1] is null; an integer is expected, or null",
        "gconfig.top_k": "is 0, which keeps no token; use -1 for all or a positive number",
        "gconfig.max_tokens": "is 5, which leaves no room for a prompt beside max_new_tokens=3071",
        "actor.kl_ctl": "is 0.1, but there is no reference model; add ref=default",
    }
    assert found["train_dataset"].startswith("is null; a section is expected")


@pytest.mark.parametrize("empty", ["", " ", "\t\n"])
def test_an_empty_text_is_no_text(empty):
    """Above all it is no path, which would be the current folder."""
    texts = [row.key for row in setting_rows(PPOConfig) if row.setting.hint in (str, str | None)]
    assert {"actor.path", "train_dataset.path", "valid_dataset.loader", "cluster.fileroot", "saver.path"} <= {*texts}
    data: dict[str, Any] = {}
    for key in texts:
        section = data
        for name in key.split(".")[:-1]:
            section = section.setdefault(name, {})
        section[key.split(".")[-1]] = empty
    found = problems_of(PPOConfig, data)
    told = {key for key, text in found.items() if "; a text that is not empty is expected" in text}
    assert {*texts} - told == ({"reward.step_separator"} if empty else set())  # a line break may separate steps


def test_a_text_that_no_file_can_have():
    found = problems_of(GSPOConfig, smallest(trial_name="a\0", tokenizer_path="b\ud800"))
    assert found["trial_name"] == "is 'a\\x00'; text without null characters is expected, or null"
    assert found["tokenizer_path"].startswith("holds '\\ud800' at character 1, half of a surrogate pair; whole")


def test_nothing_more_is_said_of_a_key_that_has_a_problem():
    known = [Problem("gconfig.n_samples", "is broken"), Problem("actor.path", "is broken")]
    with pytest.raises(ConfigError) as caught:
        build(GSPOConfig, smallest(actor={"ppo_n_minibatches": 3}), known)
    assert list(caught.value.problems) == known


def test_message_of_one_problem_is_one_line():
    with pytest.raises(ConfigError) as caught:
        build(GSPOConfig, smallest(sed=1))
    assert str(caught.value) == "sed: unknown key; did you mean seed?"


def test_key_of_another_recipe_is_unknown():
    data = smallest(actor={"path": "model", "reduction": "token_mean"})
    assert build(GRPOConfig, data).actor.reduction == "token_mean"
    assert list(problems_of(GSPOConfig, data)) == ["actor.reduction"]


def test_missing_keys_of_an_optional_section_count_once_it_is_there():
    assert list(problems_of(GSPOConfig, smallest(valid_dataset={}))) == ["valid_dataset.path"]


def test_checks_that_do_not_need_the_wrong_value_still_report():
    @dataclass(kw_only=True)
    class Pair(Section):
        a: int = setting(1, help="a")
        b: int = setting(1, help="b")

        @check
        def first(self) -> Iterator[Problem]:
            if self.a > 0:
                yield Problem("a", "first")

        @check
        def second(self) -> Iterator[Problem]:
            if self.double_b() > 0:
                yield Problem("b", "second")

        def double_b(self) -> int:
            return 2 * self.b

    with pytest.raises(ConfigError) as caught:
        build(Pair, {"a": "x"}, [Problem("c", "found before")])
    assert [str(problem) for problem in caught.value.problems] == [
        "c: found before",
        "a: is 'x'; an integer is expected",
        "b: second",
    ]


SHORT = {"engine.world_size": "world_size"}.get


def test_dataclasses_check_themselves():
    with pytest.raises(ConfigError) as caught:
        GenerationConfig(n_samples=0, temperature="hot", top_k=0)  # type: ignore[arg-type]
    assert {problem.key for problem in caught.value.problems} == {"n_samples", "temperature", "top_k"}
    assert OptimizerConfig(lr=1).lr == 1.0
    assert isinstance(OptimizerConfig(lr=1).lr, float)
    with pytest.raises(ConfigError, match=r"train_dataset: is 'rows'"):
        SFTConfig(experiment_name="x", actor=None, train_dataset="rows")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers: is inline, which runs one device"):
        EngineConfig(workers="inline", world_size=2)
    with (
        pytest.raises(ConfigError, match=r"divide the number of devices, 3 \(world_size\)") as caught,
        keys_renamed(SHORT),
    ):
        EngineConfig(tp_size=2, world_size=3)
    assert caught.value.problems[0].mentions() == {"tp_size", "world_size"}


IDLE = [  # settings that would do nothing beside the others: (actor, more, the key that says so)
    ({"use_kl_in_reward": True, "kl_ctl": 0.0}, {"ref": None}, "actor.use_kl_in_reward"),
    ({"reward_norm": {"mean_level": None, "mean_leave1out": True}}, {}, "actor.reward_norm.mean_leave1out"),
    ({"adv_norm": {"std_level": None, "std_unbiased": True}}, {}, "actor.adv_norm.std_unbiased"),
    (
        {"use_kl_in_reward": True, "kl_ctl": 0.1, "adv_norm": {"mean_level": "batch", "mean_leave1out": True}},
        {"ref": {}},
        "actor.adv_norm.mean_leave1out",
    ),
    ({}, {"gconfig": {"greedy": True}}, "gconfig.greedy"),
    ({}, {"rollout": {"max_sampling_rounds": 3}}, "rollout.max_sampling_rounds"),
    (
        {},
        {"rollout": {"max_sampling_rounds": 3, "dynamic_sampling": True}, "dynamic_bs": True},
        "rollout.max_sampling_rounds",
    ),
    ({"use_decoupled_loss": True, "rejection_sampling": {"agg": "max"}}, {}, "actor.rejection_sampling.agg"),
    (
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k2", "lower": -1.0}},
        {},
        "actor.rejection_sampling.lower",
    ),
    (
        {"use_decoupled_loss": True, "rejection_sampling": {"metric": "kl_k1", "lower": 0.1}},
        {},
        "actor.rejection_sampling.lower",
    ),
]
IDLE_OF_TOKENS = [
    ({"surrogate": "sapo", "eps_clip_higher": 0.3}, {}, "actor.eps_clip_higher"),
    ({"use_sapo_loss": True, "c_clip": 2.0}, {}, "actor.c_clip"),
    ({"surrogate": "cispo", "c_clip": 2.0}, {}, "actor.c_clip"),
    ({"sapo_tau_pos": 2.0}, {}, "actor.sapo_tau_pos"),
    ({"use_cispo_loss": True, "sapo_tau_neg": 2.0}, {}, "actor.sapo_tau_neg"),
    ({"use_cispo_loss": True, "use_sapo_loss": True}, {}, "actor.use_sapo_loss"),
]


@pytest.mark.parametrize(
    ("cls", "actor", "more", "key"),
    [(cls, *case) for cls in (GRPOConfig, GSPOConfig, PPOConfig) for case in IDLE if cls is GRPOConfig or case[0]]
    + [(cls, *case) for cls in (GRPOConfig, PPOConfig) for case in IDLE_OF_TOKENS],
)
def test_settings_that_would_do_nothing(cls, actor, more, key):
    found = problems_of(cls, smallest(**more) | {"actor": {"path": "model", **actor}})
    assert key in found


def test_what_a_recipe_brings_is_nobodys_wish():
    """PPO's dual clip gives way to another surrogate; the settings that are refused above have their uses."""
    actor = {"path": "model", "use_sapo_loss": True, "sapo_tau_pos": 2.0}
    assert build(PPOConfig, smallest() | {"actor": actor}).actor.c_clip == 3.0
    limits = {"metric": "kl_k1", "lower": -0.1, "level": "sequence", "agg": "max"}
    actor = {"path": "model", "use_decoupled_loss": True, "rejection_sampling": limits}
    greedy = {"gconfig": {"greedy": True, "n_samples": 1}, "actor": actor}
    assert build(PPOConfig, smallest() | greedy).actor.rejection_sampling.agg == "max"


@pytest.mark.parametrize("name", ["cispo", "sapo"])
def test_the_switch_of_a_surrogate_is_another_name_of_its_choice(name):
    chosen = build(GRPOConfig, smallest() | {"actor": {"path": "model", "surrogate": name}})
    switched = build(GRPOConfig, smallest() | {"actor": {"path": "model", f"use_{name}_loss": True}})
    assert switched == chosen == build(GRPOConfig, asdict(switched))
    assert switched.actor.surrogate == name
    of_an_older_run = {"path": "model", "use_cispo_loss": False, "use_sapo_loss": False} | {f"use_{name}_loss": True}
    assert build(GRPOConfig, smallest() | {"actor": of_an_older_run}) == chosen
    assert not changed_settings(GRPOConfig, smallest() | {"actor": of_an_older_run}, asdict(chosen))
    own = GRPOActorConfig(path="model", use_sapo_loss=True, sapo_tau_pos=2.0)
    assert own.surrogate_settings() == {"surrogate": "sapo", "sapo_tau_pos": 2.0, "sapo_tau_neg": 1.05}


def test_the_attention_of_a_critic_is_frozen_for_the_whole_run():
    now = smallest(critic={"freeze_attention": True})
    [change] = changed_settings(PPOConfig, smallest(), now)
    assert (change.key, change.on_resume.kind) == ("critic.freeze_attention", "never")


@pytest.mark.parametrize(("name", "other"), [("cispo", "sapo"), ("sapo", "cispo")])
def test_the_switch_of_a_surrogate_can_be_turned_off_and_assigned(name, other):
    switch = f"use_{name}_loss"
    chosen = GRPOActorConfig(path="model", surrogate=name)
    assert GRPOActorConfig(path="model", surrogate=name, **{switch: False}).surrogate == "clip"
    assert GRPOActorConfig(path="model", surrogate=other, **{switch: False}).surrogate == other
    assert replace(chosen, **{switch: False}).surrogate == "clip"
    assert replace(chosen, surrogate=other).surrogate == other
    setattr(chosen, switch, False)
    assert chosen == GRPOActorConfig(path="model")
    setattr(chosen, switch, True)
    assert chosen == GRPOActorConfig(path="model", surrogate=name)


def test_an_actor_of_ones_own_may_have_a_switch_turned_on():
    @dataclass(kw_only=True)
    class OwnActor(GRPOActorConfig):
        use_cispo_loss: bool = setting(True, help="On, unless it is turned off")

    assert OwnActor(path="model").surrogate == "cispo"
    assert OwnActor(path="model", use_cispo_loss=False).surrogate == "clip"
    assert replace(OwnActor(path="model"), path="other").surrogate == "cispo"


def test_an_empty_stop_string_would_end_every_completion():
    with pytest.raises(ConfigError, match="stop: contains an empty string"):
        GenerationConfig(stop=["a", ""])


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (1, float, 1.0),
        ("1e-6", float, 1e-6),
        (5, str, "5"),
        (None, int | None, None),
        ((1, 2), list[int], [1, 2]),
        ("b", Literal["a", "b"], "b"),
        (3, str | int, 3),
        (["a"], str | list[str], ["a"]),
    ],
)
def test_convert(value, hint, result):
    assert convert(value, hint) == result
    assert type(convert(value, hint)) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "is true; an integer is expected"),
        (1.0, int, "is 1.0; an integer is expected"),
        ("1", int, "is '1'; an integer is expected"),
        (1, bool, "is 1; true or false is expected"),
        (True, float, "is true; a number is expected"),
        ("nan", float, "is 'nan'; a finite number is expected"),
        (float("inf"), float, "is inf; a finite number is expected"),
        (None, str, r"is null; text is expected \(put it in quotes\)"),
        (True, str, "is true; text is expected"),
        (1, Literal[True], "is 1; expected one of true"),
        (0.5, str | list[str], "is 0.5; expected str or list of str"),
    ],
)
def test_convert_refuses(value, hint, message):
    with pytest.raises(InvalidValue, match=message):
        convert(value, hint)


def test_spelling():
    assert type_in_words(int | None) == "int or null"
    assert type_in_words(list[str] | None) == "list of str or null"
    assert type_in_words(Literal["a", "b"] | None) == "a | b or null"
    assert type_in_words(dict[str, str | None] | None) == "mapping of names to (str or null) or null"


def test_with_defaults():
    blank = with_defaults(SFTConfig, {})
    assert blank["actor"]["path"] == "???"
    assert blank["valid_dataset"] is None
    filled = with_defaults(SFTConfig, {"odd": 1, "valid_dataset": {"batch_size": 2}, "seed": 3})
    assert filled["valid_dataset"] == {**with_defaults(ValidDatasetConfig, {}), "batch_size": 2}
    assert filled["seed"] == 3
    assert list(filled)[-1] == "odd"


def valid() -> dict:
    data = smallest(valid_dataset={"path": "test.jsonl"})
    del data["reward"]
    return data


@pytest.mark.parametrize("cls", [SFTConfig, DPOConfig, GRPOConfig, GSPOConfig])
def test_every_default_is_a_valid_value(cls):
    found = problems_of(cls, {})
    assert all(message.startswith("missing") for message in found.values()), found
    assert set(found) <= {row.key for row in setting_rows(cls)}


def test_help_shows_the_defaults_of_the_section_that_its_parent_makes():
    defaults = {row.key: row.default for row in setting_rows(PPOConfig)}
    assert defaults["actor.adv_norm.mean_level"] == "'batch'"
    assert defaults["actor.adv_norm.std_level"] == "'batch'"
    assert defaults["critic.optimizer.lr"] == "1e-05"
    assert defaults["actor.optimizer.lr"] == "1e-06"
    assert defaults["eval_gconfig"] == "null"
    assert defaults["eval_gconfig.n_samples"] == "8", "a section that is null by default shows those of its class"
    assert (defaults["actor.path"], defaults["train_dataset.path"]) == ("required", "null")
    grpo = {row.key: row.default for row in setting_rows(GRPOConfig)}
    assert grpo["actor.adv_norm.mean_level"] == "'group'"


def test_a_partial_section_keeps_the_defaults_that_its_parent_gives_it():
    config = build(PPOConfig, smallest(critic={"optimizer": {"beta1": 0.8}}))
    assert (config.critic.optimizer.beta1, config.critic.optimizer.lr) == (0.8, 1e-5)
    config = build(PPOConfig, smallest(actor={"path": "model", "adv_norm": {"std_unbiased": True}}))
    assert (config.actor.adv_norm.mean_level, config.actor.adv_norm.std_level) == ("batch", "batch")
    filled = with_defaults(PPOConfig, smallest(critic={"optimizer": {"beta1": 0.8}}))
    assert build(PPOConfig, filled).critic.optimizer.lr == filled["critic"]["optimizer"]["lr"] == 1e-5


def test_int8_is_for_frozen_weights_and_has_no_gradients_in_fp8():
    def actor(**given):
        return smallest(actor={"path": "model", **given})

    int8 = {"mode": "int8"}
    assert not build(GSPOConfig, actor(fp8_config=int8, use_lora=True)).actor.fp8.rounds_inputs
    found = problems_of(GSPOConfig, actor(fp8_config=int8))
    assert "the weights are trained; set use_lora=true" in found["actor.fp8_config.mode"]
    assert [*problems_of(GSPOConfig, actor(fp8_config=int8 | {"wgrad": True}, use_lora=True))] == [
        "actor.fp8_config.wgrad"
    ]
