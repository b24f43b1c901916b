"""The specifications of the models that a configuration or a script asks for."""

from __future__ import annotations

from areno import ModelRole
from areno.api.algorithms import get_algorithm
from areno.files.paths import find_file
from areno.launch.compose import load
from areno.plan.forecast import forecast
from areno.plan.hardware import local_cpu
from areno.plan.plan import plan_of_experiment
from areno.plan.roles import experiment_roles, script_roles
from areno.plan.sdk_arguments import ArenoConfig, plan_of_arguments, read_arguments

MODEL = str(find_file("examples/quickstart/model"))


def test_actor_and_reference_round_keys_and_values() -> None:
    words = ["ref=default", "actor.kl_ctl=0.1", "rollout.kv_cache_dtype=fp8"]
    config = load(get_algorithm("ppo").config, "quickstart_ppo", words)
    plan = plan_of_experiment(config)
    rounded = {name: role.fp8_kv for name, role in experiment_roles(config).items()}
    assert plan.spec.actor.fp8_kv
    assert rounded == {"ref": True, "critic": False}
    assert {model.name: model.config.fp8_kv for model in forecast(config, local_cpu(), 1).footprint.models} == {
        "actor": True,
        **rounded,
    }


def test_a_script_rounds_them_likewise() -> None:
    given = read_arguments(1, MODEL, None, ArenoConfig(runtime={"kv_cache_dtype": "fp8"}), None)
    plan = plan_of_arguments(given)
    assert plan.spec.actor.fp8_kv
    assert plan.rollout.kv_cache_dtype == "fp8"
    roles = {name: ModelRole(name, MODEL, trainable=False) for name in ("ref", "judge")}
    assert {name: role.fp8_kv for name, role in script_roles(roles, plan.spec.actor).items()} == {
        "ref": True,
        "judge": False,
    }
