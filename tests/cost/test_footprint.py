"""What a layout takes of each device, for devices of any size: computed, told, and refused where it cannot fit."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areno.config.layout import Layout
from areno.config.models import OptimizerConfig
from areno.cost.footprint import GIB, RESERVE, Footprint, ModelFootprint, footprint_of
from areno.cost.remedies import check_device_memory, check_host_memory, fitting_remedies
from areno.engine.engine import Engine
from areno.errors import EngineError
from areno.layers.config import AdapterSpec
from areno.models.adapter_shapes import linear_shapes
from areno.models.config import LayerKind
from areno.models.parameters import n_parameters
from areno.specs.engine import EngineSpec
from areno.specs.role import LoraSpec, RoleSpec
from tests.helpers.critics import critic, reference
from tests.helpers.large_shapes import ACTOR, CRITIC, QWEN3_8B, REF, REWARD
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import model_folder, spec

QWEN3_32B = replace(QWEN3_8B, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64)
ADAPTERS = AdapterSpec(rank=32, alpha=16.0, targets=("q_proj", "o_proj", "down_proj"))


def of(*models: ModelFootprint, world_size: int = 1, tp_size: int = 1, cp_size: int = 1, **more: Any) -> Footprint:
    layout = Layout(world_size, tp_size, cp_size)
    return Footprint(models=models or (ACTOR,), itemsize=2, layout=layout, **more)


def test_bytes_worked_by_hand() -> None:
    n = n_parameters(QWEN3_8B)
    assert of().total_resident_bytes == (2 + 4 + 4 + 8) * n
    assert of(world_size=2, zero_stage=0).total_resident_bytes == 18 * n
    assert of(world_size=2, zero_stage=1).total_resident_bytes == (2 + 4 + 2 + 4) * n
    assert of(ACTOR, REF, world_size=4, zero_stage=1).total_resident_bytes == (2 + 4 + 1 + 2) * n + 2 * n
    assert of(ACTOR, replace(REF, offload=True), world_size=4).total_resident_bytes == 18 * n
    layers, once = 36 * (n - 2 * 151936 * 4096 - 4096) // 36, (n - 2 * 151936 * 4096 - 4096) // 36
    assert of(world_size=4, zero_stage=2).total_resident_bytes == 5 * n + 4 * (n - layers + layers // 4 + 2 * once)
    in_codes = replace(ACTOR, optimizer=OptimizerConfig(type="adam_8bit"))
    assert of(in_codes).total_resident_bytes == pytest.approx((2 + 4 + 4 + 2 * (1 + 4 / 256)) * n)
    assert of(world_size=2, tp_size=2).total_resident_bytes == pytest.approx(18 * n / 2, rel=1e-3)  # norms are on both


def test_a_teacher_is_on_the_device_while_the_actor_trains() -> None:
    """Whole, and its logits beside those of the actor. A reference model is not, and neither counts while scoring."""
    n = n_parameters(QWEN3_8B)
    teacher = replace(REF, name="teacher", key="teacher.path", offload=True, in_training=True)
    ref = replace(REF, offload=True)
    assert of(ACTOR, teacher).extra_bytes_in_use(ACTOR, training=True) == 2 * n
    assert of(ACTOR, teacher).extra_bytes_in_use(ACTOR, training=False) == 0
    assert of(ACTOR, ref).extra_bytes_in_use(ACTOR, training=True) == 0
    assert of(ACTOR, teacher).max_extra_bytes_in_use == 2 * n
    alone, beside = (of(*models).training_pass_bytes(ACTOR) for models in ((ACTOR, ref), (ACTOR, teacher)))
    assert beside.logits_of_token == 2 * alone.logits_of_token > 0
    assert beside.of_token == alone.of_token


def test_offloaded_bytes_worked_by_hand() -> None:
    """An actor keeps its weights on the device. While it is trained, gradients and three windows are added."""
    n, critic = n_parameters(QWEN3_8B), n_parameters(CRITIC.config)
    windows = 3 * 2**24
    away = replace(ACTOR, offload=True)
    assert of(away).total_resident_bytes == 2 * n
    assert of(away).extra_bytes_in_use(away, training=True) == pytest.approx(4 * n + (4 + 8) * windows, abs=99)
    assert of(away).extra_bytes_in_use(away, training=False) == 0
    assert of(away).offloaded_bytes == 12 * n
    assert of(away).min_device_bytes == of(away).total_resident_bytes + of(
        away
    ).max_extra_bytes_in_use + of().training_bytes(ACTOR, 256)
    assert of(away).fits(80 * GIB)
    assert of(away, world_size=2, zero_stage=1).offloaded_bytes == 6 * n
    in_codes = replace(away, optimizer=OptimizerConfig(type="adam_8bit"))
    assert of(in_codes).offloaded_bytes == pytest.approx((4 + 2 * (1 + 4 / 256)) * n)
    assert of(in_codes).max_extra_bytes_in_use < of(away).max_extra_bytes_in_use
    in_sgd = replace(away, optimizer=OptimizerConfig(type="sgd"))
    assert (of(in_sgd).offloaded_bytes, of(in_sgd).max_extra_bytes_in_use - 4 * n) == (
        4 * n,
        pytest.approx(4 * windows, abs=99),
    )
    frozen = replace(away, optimizer=None)
    assert (of(frozen).total_resident_bytes, of(frozen).offloaded_bytes, of(frozen).max_extra_bytes_in_use) == (
        2 * n,
        0,
        0,
    )
    resting = replace(CRITIC, offload=True)
    both = of(ACTOR, resting)
    assert both.total_resident_bytes == 18 * n
    assert both.extra_bytes_in_use(resting, training=False) == 2 * critic
    assert both.extra_bytes_in_use(resting, training=True) == pytest.approx(6 * critic + 12 * windows, abs=99)
    assert both.offloaded_bytes == 14 * critic
    in_float32 = replace(of(away), itemsize=4)  # the weights are the masters
    assert (in_float32.total_resident_bytes, in_float32.offloaded_bytes) == (4 * n, 8 * n)
    small = replace(away, config=replace(QWEN3_8B, num_layers=1, vocab_size=8, hidden_size=8, intermediate_size=8))
    assert of(small).max_extra_bytes_in_use == (4 + 12) * n_parameters(small.config)  # less than three windows


def test_adapters_worked_by_hand() -> None:
    """What is trained is the adapters; a 32B model of 61 GiB then fits one device of 80."""
    n, adapters = n_parameters(QWEN3_8B), 36 * 32 * ((4096 + 4096) + (4096 + 4096) + (12288 + 4096))
    actor = replace(ACTOR, lora=LoraSpec(adapters=ADAPTERS))
    assert of(actor).total_resident_bytes == 2 * (n + adapters) + (4 + 4 + 8) * adapters
    assert of(actor, world_size=2, zero_stage=1).total_resident_bytes == 2 * (n + adapters) + (4 + 2 + 4) * adapters
    assert of(replace(actor, optimizer=None)).total_resident_bytes == 2 * (n + adapters)
    copies = 2 * 36 * 32 * (4096 + 4096 + 12288)  # of each A, below the weights
    assert of(actor, copies_a=True).total_resident_bytes == of(actor).total_resident_bytes + copies
    assert of(copies_a=True).total_resident_bytes == of().total_resident_bytes
    on_two = 36 * 32 * ((4096 + 2048) + (2048 + 4096) + (6144 + 4096))
    assert (
        of(actor, world_size=2, tp_size=2).total_resident_bytes
        == 2 * n_parameters(QWEN3_8B, Layout.single_replica(2)) + 18 * on_two
    )
    large = replace(actor, config=QWEN3_32B)
    assert of(large).fits(80 * GIB)
    assert not of(replace(large, lora=None)).fits(139 * GIB)


def test_activations_are_divided_by_tokens() -> None:
    """Over copies that share a row, and what lies between products over tensor-parallel ranks."""
    products, q_size = 6144 + 2 * 12288, 4096  # outputs of qkv and gate-up; one layer keeps q_size of attention
    whole = of(world_size=2, tp_size=2).training_bytes(ACTOR, 8192)
    logits = 2048 * 151936 // 2 * (4 + 2) + 8192 * 151936 // 2 * 2  # computed at once, and stored
    layers = 36 * (2 * 4096 * 4 + q_size // 2 * 2) + (3 * products // 2 + 12 * 4096) * 2
    assert whole == 8192 * layers + logits
    split = 36 * (4096 * 4 + q_size // 2 * 2) + (3 * products // 2 + 8 * 4096) * 2
    assert of(world_size=2, tp_size=2, split=True).training_bytes(ACTOR, 8192) == 8192 * split + logits
    alone = of().training_bytes(ACTOR, 8192)
    assert of(split=True).training_bytes(ACTOR, 8192) == alone
    shared = of(world_size=2, cp_size=2, budget=4096)
    assert shared.training_bytes(ACTOR, 8192) == of().training_bytes(ACTOR, 4096) < alone
    assert shared.batch_tokens == 8192  # the budget is that of one device
    assert shared.layout_in_words() == "tp_size=1, 2 copies, zero_stage=0, 2 of them to a row"


def test_copies_of_a_are_where_triton_runs(tmp_path: Path) -> None:
    """Sampling reads them. With exact it computes each product by itself, as it does without Triton."""
    for exact, uses_triton in ((False, False), (False, True), (True, True)):
        built = footprint_of(spec(model_folder(tmp_path), exact=exact), {}, {}, 4, uses_triton)
        assert built.copies_a == (uses_triton and not exact)


def refused(footprint: Footprint, gib: float) -> str:
    with pytest.raises(EngineError) as caught:
        check_device_memory(footprint, int(gib * GIB / (1 - RESERVE)))
    return str(caught.value)


def test_a_layout_that_cannot_fit_is_refused_with_those_that_can() -> None:
    """The fewest changes first; every one that is named does fit."""
    whole = of(world_size=4, zero_stage=0)
    check_device_memory(whole, 200 * GIB)
    text = refused(whole, 130)
    assert text.startswith("actor cannot fit: each device needs 138.0 GiB at least (tp_size=1, 4 copies, zero_stage=0)")
    assert ", and has 130.0; what fits is engine.zero_stage=1 (" in text
    assert "or engine.tp_size=2 (" in text
    assert "or actor.optimizer.type=adam_8bit (" in text
    assert refused(of(world_size=4, zero_stage=1), 60).endswith(" GiB)")
    for gib in (130, 100, 60, 40, 30, 20, 17):
        device = int(gib * GIB / (1 - RESERVE))
        for way, found in fitting_remedies(of(ACTOR, REF, CRITIC, world_size=4, zero_stage=0), device):
            assert found.fits(device)
            assert ("engine.zero_stage" in way) == (found.zero_stage > 0)
            assert found.layout.tp_size == way.get("engine.tp_size", 1)
            assert all(
                way.get(f"{model.own_section}.optimizer.type") != "adam_8bit" or not model.smaller_optimizer
                for model in found.models
            )


def test_roles_that_rest_in_host_memory_are_a_way_out() -> None:
    reward = replace(REF, name="reward", key="reward.path")
    text = refused(of(ACTOR, REF, reward), 160)
    assert "what fits is ref.offload=true with reward.offload=true (" in text
    assert "engine.zero_stage" not in text  # one copy has nothing to divide
    assert "engine.tp_size" not in text


def test_where_no_change_helps_more_devices_are_named() -> None:
    actor, device = replace(ACTOR, config=QWEN3_32B), int(130 * GIB / (1 - RESERVE))
    named = dict(re.findall(r"engine\.(\w+)=(\d+)", refused(of(actor), 130)))
    world_size, tp_size, zero_stage = (int(named.get(name, 0)) for name in ("world_size", "tp_size", "zero_stage"))
    assert of(actor, world_size=world_size, tp_size=tp_size, zero_stage=zero_stage).fits(device)
    assert not of(actor, world_size=world_size // 2, tp_size=world_size // 2).fits(device)
    assert refused(of(actor), 0.5).endswith("choose a smaller model (actor.path)")


def test_adapters_are_a_way_out_of_full_training() -> None:
    """With the reference of the same folder, which is then the actor without them."""
    actor, ref = replace(ACTOR, path="/m"), replace(REF, path="/m")
    alone = of(replace(actor, optimizer=OptimizerConfig(type="adam_8bit")), may_adapt=True)
    assert re.search(r"; what fits is actor\.offload=true \(46\.\d GiB\)$", refused(alone, 60))
    text = refused(replace(alone, host_bytes=40 * GIB), 60)  # masters and moments take 46 GiB of host memory
    assert re.search(r"; what fits is actor\.use_lora=true \(\d\d\.\d GiB\) or engine\.world_size=2 ", text)
    assert "adam_8bit" not in text
    assert "offload" not in text
    both = of(actor, ref, may_adapt=True)
    assert "what fits is actor.use_lora=true (" in refused(both, 25)
    other = of(actor, replace(ref, path="/other"), may_adapt=True)
    assert "use_lora" not in refused(other, 25)
    assert "what fits is actor.use_lora=true (" in refused(other, 40)
    assert "use_lora" not in refused(replace(both, may_adapt=False), 25)
    assert "use_lora" not in refused(of(replace(actor, lora=LoraSpec(adapters=ADAPTERS)), may_adapt=False), 12)
    assert "use_lora" not in refused(of(actor, world_size=4, zero_stage=0, may_adapt=True), 130)  # the rest suffices


def applied(footprint: Footprint, text: str) -> Footprint:
    """The footprint with the settings of a way that a message names."""
    models = list(footprint.models)
    for key, value in re.findall(r"([\w.]+)=(\w+)", text):
        section, _, name = key.partition(".")
        if section == "engine":
            record = footprint if name == "zero_stage" else footprint.layout
            assert str(vars(record)[name]) != value, f"{key} is {value} already"
            changed = replace(record, **{name: int(value)})
            footprint = changed if record is footprint else replace(footprint, layout=changed)
        for index, model in enumerate(models):
            if model.own_section != section:
                continue
            if name == "offload":
                assert not model.offload, f"{key} is set already"
                models[index] = replace(model, offload=True)
            elif name == "optimizer.type":
                assert model.optimizer is not None
                assert model.optimizer.type == "adam", f"{key} is set already, or means nothing"
                models[index] = replace(model, optimizer=replace(model.optimizer, type=value))
            elif name == "use_lora":
                assert model.adapters is None, f"{key} is set already"
                spec = AdapterSpec(32, 16.0, tuple(linear_shapes(model.config)))
                models[index] = replace(model, lora=LoraSpec(adapters=spec))
                models = [each for each in models if each.name != "ref"]
            else:
                raise AssertionError(key)
    return replace(footprint, models=tuple(models))


LAYOUTS: list[dict[str, int]] = [
    {},
    {"world_size": 4},
    {"world_size": 4, "tp_size": 4},
    {"world_size": 4, "zero_stage": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("on_cuda", [False, True])
def test_advice_is_never_what_is_set_and_always_helps(on_cuda: bool, layout: dict[str, int]) -> None:
    told: set[str] = set()
    beside: list[list[ModelFootprint]] = [[], [REF], [CRITIC], [REF, CRITIC], [REF, REWARD]]
    sizes = [1, 8, 12, 17, 25, 40, 60, 100, 130, 160]
    choices = ["adam", "adam_8bit", "sgd"], [False, True], [False, True], beside, sizes
    for optimizer, adapters, offload, roles, gib in itertools.product(*choices):
        actor = replace(
            ACTOR, optimizer=OptimizerConfig(type=optimizer), lora=LoraSpec(adapters=ADAPTERS) if adapters else None
        )
        others = [replace(each, offload=offload and on_cuda) for each in roles if not (adapters and each is REF)]
        footprint = of(actor, *others, on_cuda=on_cuda, may_adapt=not adapters, **layout)
        device = int(gib * GIB / (1 - RESERVE))
        if footprint.fits(device):
            continue
        _, _, found = refused(footprint, gib).partition("what fits is ")
        ways, _, more = found.partition("; ")
        for way in ways.split(" or ") if ways else ():
            assert applied(footprint, way).fits(device), way
        told.update(re.findall(r"[\w.]+(?==)", ways))
        assert bool(more) == ("world_size" in ways and any(model.smaller_optimizer for model in footprint.models))
    assert {"actor.optimizer.type", "actor.use_lora"} <= told
    on_gpus = {"engine.world_size", "ref.offload", "reward.offload", "actor.offload"}
    assert on_cuda or not on_gpus & told
    assert not on_cuda or layout or on_gpus <= told


def test_the_table_says_it_all() -> None:
    table = of(ACTOR, replace(REF, offload=True), world_size=4, tp_size=2, zero_stage=1, budget=8192).memory_table_text(
        80 * GIB
    )
    first, head, actor, ref, work, left, away = table.splitlines()
    assert first == "memory of each device in GiB, with tp_size=2, 2 copies, zero_stage=1:"
    assert head.split() == ["weights", "gradients", "masters", "moments", "sum"]
    assert actor.split() == ["actor", "7.63", "15.3", "7.63", "15.3", "45.8"]
    assert ref.split() == ["ref", "(in", "host", "memory)", "7.63", "0.00", "0.00", "0.00", "7.63"]
    assert work.startswith("KV cache: 0.07 for 1,000 tokens; activations of a micro-batch of 8,192 tokens: ")
    assert left == "45.8 of 80.0 are taken, which leaves 29.4 for these"
    assert away == "offload keeps 7.63 in host memory; a model in use takes up to 7.63 more of its device"
    alone = of(replace(ACTOR, offload=True)).memory_table_text(80 * GIB).splitlines()
    assert alone[2].startswith("actor (masters, moments in host memory) ")
    assert alone[-1] == "offload keeps 91.5 in host memory; a model in use takes up to 31.1 more of its device"
    small = replace(ACTOR, config=replace(QWEN3_8B, num_layers=1, vocab_size=8, hidden_size=8, intermediate_size=8))
    assert of(small).memory_summary(80 * GIB).startswith("memory of each device: less than 0.01 of 80.0 GiB for ")
    short = of(ACTOR, REF).memory_summary(80 * GIB)
    assert short == "memory of each device: 152.6 of 80.0 GiB for actor, ref"


def test_the_table_tells_what_layers_with_windows_keep() -> None:
    near, far, all_ = (LayerKind(QWEN3_8B.rope, window) for window in (128, 4096, None))
    token = 2 * 8 * 128 * 2  # bytes of keys and values in one layer

    def told(*kinds: LayerKind) -> str:
        actor = replace(ACTOR, config=replace(QWEN3_8B, kinds=kinds), optimizer=None)
        *_, work, _ = of(actor).memory_table_text(80 * GIB).splitlines()
        return work

    whole = f"KV cache: {36 * 1000 * token / GIB:.2f} for 1,000 tokens"
    assert told() == told(*[all_] * 36) == whole
    assert told(*[near] * 18, *[all_] * 18) == f"{whole}, and 0.07 for each 1,000 of a sequence beyond 128"
    assert (
        told(*[near] * 12, *[far] * 12, *[all_] * 12) == f"{whole}, and 0.05 for each 1,000 of a sequence beyond 4,096"
    )
    assert told(*[near] * 18, *[far] * 18) == f"{whole}, and 0.00 for each 1,000 of a sequence beyond 4,096"


def test_too_little_host_memory_is_refused_with_what_to_set() -> None:
    away, resting = replace(ACTOR, offload=True), replace(CRITIC, offload=True)
    check_host_memory(of(away, host_bytes=98 * GIB), 1)
    check_host_memory(of(ACTOR, host_bytes=0), 1)  # nothing is in host memory
    with pytest.raises(EngineError) as caught:
        check_host_memory(of(away, host_bytes=int(50 * GIB / 0.94)), 1)
    assert str(caught.value) == (
        "the host memory is too small for actor: what offload keeps there takes 91.5 GiB for the ranks of a machine "
        "(1), and 50.0 GiB are free; use a machine with more memory, set actor.optimizer.type=adam_8bit or turn off "
        "actor.offload"
    )
    with pytest.raises(EngineError, match=r"for actor and critic: .* takes \d+\.\d GiB .*\(2\)") as caught:
        check_host_memory(
            of(replace(away, optimizer=OptimizerConfig(type="sgd")), resting, world_size=2, host_bytes=GIB), 2
        )
    assert str(caught.value).endswith(
        "set critic.optimizer.type=adam_8bit, set engine.zero_stage=1, turn off actor.offload or turn off "
        "critic.offload"
    )
    frozen = replace(REF, offload=True)
    with pytest.raises(EngineError, match=r"use a machine with more memory or turn off ref\.offload$"):
        check_host_memory(of(ACTOR, frozen, host_bytes=GIB), 1)


def no_room(*_: Any) -> int:
    return 2**16


def built(folder: Path, **settings: Any) -> EngineSpec:
    return spec(folder, random_init=False, **settings)  # a folder without weights


def test_an_engine_that_cannot_fit_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path)
    monkeypatch.setattr("areno.engine.roles.available_memory_bytes", no_room)
    with pytest.raises(
        EngineError,
        match=r"^actor cannot fit: each device needs 0.00 GiB at least \(tp_size=1, one copy\), and has 0.00; ",
    ):
        Engine(built(folder), "inline")
    planned: dict[str, RoleSpec] = {"ref": reference(folder), "critic": critic(folder)}
    with pytest.raises(EngineError, match=r"^actor and ref and critic cannot fit"):
        Engine(built(folder, planned=planned), "inline")


def test_a_role_that_finds_no_room_is_refused_and_the_rest_stays(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with Engine(spec(folder), "inline") as engine:
        worker: Any = worker_of(engine)
        short, _ = engine.memory_table()
        assert short.endswith("GiB for actor")
        worker.roles._device_bytes = int(worker.roles.footprint.min_device_bytes / (1 - RESERVE)) + 2
        with pytest.raises(EngineError, match="actor and critic cannot fit"):
            engine.ensure_roles({"critic": critic(folder)})
        assert engine.memory_table()[0].endswith("GiB for actor")
        worker.roles._device_bytes = GIB
        engine.ensure_roles({"critic": critic(folder)})
        assert engine.memory_table()[0].endswith("GiB for actor, critic")
