"""What is said when memory has run out: a table of settings, and the settings that would help beside each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from areno.config.models import MicroBatchSpec, OptimizerConfig
from areno.config.rollout import DecoderConfig
from areno.cost import remedies
from areno.engine.device_memory import out_of_memory_hint
from areno.errors import EngineError
from areno.layers.config import AdapterSpec
from areno.specs.engine import EngineSpec
from areno.specs.role import LoraSpec, RoleSpec
from tests.helpers.tiny_engine import engine_spec

ADAM, IN_CODES = OptimizerConfig(), OptimizerConfig(type="adam_8bit")
LORA = LoraSpec(adapters=AdapterSpec(8, 16.0, ("q_proj",)))


def told(options: Iterable[remedies.Option]) -> str:
    """What a message says of these options, beginning with the first."""
    given = list(options)
    with pytest.raises(EngineError) as caught, out_of_memory_hint("here", lambda: given):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return str(caught.value).partition("): ")[2]


def spec(n_devices: int = 1, **settings: Any) -> EngineSpec:
    return engine_spec("/m", ["cuda:0"] * n_devices, dtype="bfloat16", **settings)


OVER_MORE = "divide the model over more devices with engine.world_size and engine.tp_size"
WIDER, AWAY = "raise engine.tp_size to divide the model over more devices", "set actor.offload=true"
IN_8_BITS, ADAPT = "set actor.optimizer.type=adam_8bit", "train adapters alone with actor.use_lora=true"
SMALLER = "choose a smaller model (actor.path)"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (spec(), f"{OVER_MORE}, {AWAY}, {IN_8_BITS}, {ADAPT} or {SMALLER}"),
        (
            spec(2),
            f"raise engine.tp_size to divide the model over more devices, {AWAY}, {IN_8_BITS}, {ADAPT} or {SMALLER}",
        ),
        (spec(2, tp_size=2), f"{OVER_MORE}, {AWAY}, {IN_8_BITS}, {ADAPT} or {SMALLER}"),
        (spec(offload=True), f"{OVER_MORE}, {IN_8_BITS}, {ADAPT} or {SMALLER}"),
        (spec(optimizer=IN_CODES), f"{OVER_MORE}, {AWAY}, {ADAPT} or {SMALLER}"),
        (spec(optimizer=OptimizerConfig(type="sgd")), f"{OVER_MORE}, {AWAY}, {ADAPT} or {SMALLER}"),
        (spec(lora=LORA), f"{OVER_MORE}, {IN_8_BITS} or {SMALLER}"),
        (spec(random_init=True, optimizer=IN_CODES), f"{OVER_MORE}, {AWAY} or {SMALLER}"),
        (spec(optimizer=None), f"{OVER_MORE} or {SMALLER}"),
    ],
    ids=["one", "two", "divided", "offloaded", "8 bits", "sgd", "adapters", "random", "frozen"],
)
def test_the_actor_does_not_fit(engine: EngineSpec, said: str) -> None:
    assert told(remedies.loading_remedies(engine, engine.actor, [], has_bf16=True, can_offload=True)) == said


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("has_bf16", [False, True])
def test_half_as_many_bytes(dtype: str, has_bf16: bool) -> None:
    engine = engine_spec("/m", ["cuda:0"], dtype=dtype)
    text = told(remedies.loading_remedies(engine, engine.actor, [], has_bf16=has_bf16, can_offload=True))
    assert ("set actor.dtype=bfloat16" in text) == (dtype == "float32" and has_bf16)


@pytest.mark.parametrize(
    ("can_offload", "offloaded", "keys"),
    [
        (True, (), {"actor", "ref", "critic"}),
        (True, ("ref",), {"actor", "critic"}),
        (True, ("ref", "critic"), {"actor"}),
        (False, (), set()),  # a CPU has no other memory
    ],
)
def test_a_role_does_not_fit_beside_others(can_offload: bool, offloaded: tuple[str, ...], keys: set[str]) -> None:
    engine = spec()
    ref = RoleSpec(path="/r", head="lm", key="ref.path", offload="ref" in offloaded)
    critic = RoleSpec(path="/c", head="value", key="critic.path", optimizer=ADAM, offload="critic" in offloaded)
    text = told(remedies.loading_remedies(engine, critic, [engine.actor, ref], has_bf16=True, can_offload=can_offload))
    assert set(re.findall(r"set (\w+)\.offload=true", text)) == keys
    assert "set critic.optimizer.type=adam_8bit" in text
    assert "use_lora" not in text
    assert text.endswith("or choose a smaller model (critic.path)")


CACHE = "free the KV cache between rollouts with rollout.drop_rollout_state=true, "
BUDGET, FRACTION = "lower actor.mb_spec.max_tokens_per_mb", "lower rollout.mem_fraction, set rollout.max_kv_tokens"
DIVIDE = "or divide the model over more devices (engine.tp_size)"


@pytest.mark.parametrize(
    ("section", "mb_spec", "recomputes", "decoder", "optimizer", "said"),
    [
        ("actor", {"max_tokens_per_mb": 8}, True, None, "adam", f"{BUDGET}, {IN_8_BITS} {DIVIDE}"),
        ("critic", {"mini_bs": 4}, True, None, "sgd", f"lower critic.mb_spec.mini_bs {DIVIDE}"),
        ("actor", {"mini_bs": 1}, False, None, "sgd", f"set actor.gradient_checkpointing=true {DIVIDE}"),
        ("actor", {"mini_bs": 1}, True, {}, "sgd", f"{CACHE}{FRACTION} {DIVIDE}"),
        ("actor", {"mini_bs": 1}, True, {"max_kv_tokens": 64}, "sgd", f"{CACHE}lower rollout.max_kv_tokens {DIVIDE}"),
    ],
    ids=["budget", "rows", "recompute", "cache", "given cache"],
)
def test_training_runs_out(
    section: str, mb_spec: Any, recomputes: bool, decoder: Any, optimizer: Any, said: str
) -> None:
    beside = [] if decoder is None else remedies.smaller_cache_in_training_options(DecoderConfig(**decoder))
    role = RoleSpec(path="/m", key=f"{section}.path", optimizer=OptimizerConfig(type=optimizer))
    options = remedies.training_remedies(
        role, MicroBatchSpec(**mb_spec), recomputes=recomputes, beside=beside, on_cuda=False
    )
    assert told(options) == said


def test_masters_and_moments_may_leave_the_device() -> None:
    whole = MicroBatchSpec(mini_bs=1)
    role = RoleSpec(path="/c", key="critic.path", optimizer=OptimizerConfig(type="sgd"))
    options = remedies.training_remedies(role, whole, recomputes=True, beside=[], on_cuda=True)
    assert told(options) == f"set critic.offload=true {DIVIDE}"
    away = remedies.training_remedies(replace(role, offload=True), whole, recomputes=True, beside=[], on_cuda=True)
    assert f"or {told(away)}" == DIVIDE


@pytest.mark.parametrize(
    ("decoder", "on_cuda", "first", "graphs"),
    [
        ({}, True, FRACTION, True),
        ({"max_kv_tokens": 64}, True, "lower rollout.max_kv_tokens", True),
        ({"eager_decode": True}, True, FRACTION, False),
        ({"speculation": "auto"}, True, FRACTION, True),
        ({"speculation": "auto"}, False, FRACTION, False),
        ({"speculation": "on"}, False, FRACTION, False),
        ({}, False, FRACTION, False),
    ],
)
def test_rollout_runs_out(decoder: Any, on_cuda: bool, first: str, graphs: bool) -> None:
    text = told(remedies.rollout_remedies(DecoderConfig(**decoder), on_cuda=on_cuda))
    assert text.startswith(f"{first}, lower rollout.max_prefill_tokens")
    assert text.endswith("set rollout.eager_decode=true to do without CUDA graphs") == graphs
    drafts = decoder.get("speculation") == "on" or (decoder.get("speculation") == "auto" and on_cuda)
    assert ("set rollout.speculation=off" in text) == drafts
