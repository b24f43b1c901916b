"""LoRA: adapters in the layers, trained alone, decoded with, saved as peft has them. peft is the oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areno.cost import memory
from areno.engine.engine import Engine
from areno.errors import CheckpointError
from areno.layers.config import AdapterSpec
from areno.layers.rotary import permute_heads
from areno.models import parameters
from areno.models.adapter_shapes import EXPERTS, linear_shapes, n_adapter_parameters
from areno.models.adapters import add_adapters, is_adapter_folder, load_adapters, read_adapter_config, stored_adapters
from areno.models.registry import load_config
from areno.specs.role import LoraSpec, RoleSpec
from tests.helpers.family_cases import CASES, SHAPE, random_model
from tests.helpers.in_float64 import InFloat64
from tests.helpers.lora_models import ALL, REQUESTS, ROWS, SOME, apart, engine_of, lora, of_peft, train
from tests.helpers.processes import worker_of
from tests.helpers.tiny_engine import (
    folder_with_weights,
    rollout,
    saved_tensors,
    scored,
    tokens_of,
    wait_saved,
)
from tests.helpers.two_ranks import load, packed, random_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with_weights(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module", params=[(ALL, False), (SOME, True)], ids=["all", "some, rsLoRA"])
def trained(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    targets, use_rslora = request.param
    with engine_of(folder, lora(folder, targets, use_rslora=use_rslora)) as engine:
        train(engine)
        yield engine


def times_apart(stats: dict[str, float]) -> dict[str, float]:
    """Without what depends on the machine."""
    return {name: value for name, value in stats.items() if "memory" not in name}


def test_peft_loads_what_is_saved(trained: Engine, folder: Path, tmp_path: Path) -> None:
    trained.save(str(tmp_path / "a"))
    assert is_adapter_folder(tmp_path / "a")
    expected = of_peft(folder, tmp_path / "a")
    assert apart(scored(trained, "actor", ROWS), expected) < 1e-5
    with engine_of(folder, None) as plain:
        assert apart(scored(plain, "actor", ROWS), expected) > 0.01
    trained.save(str(tmp_path / "b"), background=True)
    wait_saved(trained)
    ours, later = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert all(torch.equal(ours[name], later[name]) for name in {**ours, **later})


def test_merged_it_is_a_whole_model(trained: Engine, folder: Path, tmp_path: Path) -> None:
    trained.save(str(tmp_path), merge=True)
    assert saved_tensors(tmp_path).keys() == saved_tensors(folder).keys()
    with engine_of(tmp_path, None) as merged:
        assert apart(scored(merged, "actor", ROWS), scored(trained, "actor", ROWS)) < 1e-5


def test_rollout_and_training_agree(trained: Engine) -> None:
    assert train(trained, 1)["logp_abs_diff_max"] < 1e-4


@pytest.mark.parametrize("rank", [1, 4, 24])
def test_exact(folder: Path, rank: int) -> None:
    with engine_of(folder, lora(folder, SOME, rank), exact=True) as engine:
        train(engine)
        assert train(engine, 1)["logp_abs_diff_max"] == 0.0


def test_new_adapters_change_nothing(folder: Path) -> None:
    with engine_of(folder, None) as plain, engine_of(folder, lora(folder)) as engine:
        assert scored(engine, "actor", ROWS) == scored(plain, "actor", ROWS)
        assert tokens_of(rollout(engine, REQUESTS)) == tokens_of(rollout(plain, REQUESTS))


def test_the_reference_is_the_base(trained: Engine, folder: Path) -> None:
    """Without a second model: what it scores is the actor with its adapters off, however long that was trained."""
    trained.ensure_roles({"ref": RoleSpec(path=str(folder), head="lm", key="ref.path")})
    before = scored(trained, "actor", ROWS)
    with engine_of(folder, None) as plain:
        assert scored(trained, "ref", ROWS) == scored(plain, "actor", ROWS)
    assert scored(trained, "actor", ROWS) == before
    roles = worker_of(trained).roles
    assert roles["ref"].backend is roles["actor"].backend
    assert list(roles.trained_roles()) == ["actor"]
    assert "ref" not in trained.memory_table()[1]
    trained.release_role("ref")
    train(trained, 1)


def test_a_value_role_of_the_same_folder_has_the_base(trained: Engine, folder: Path) -> None:
    critic = RoleSpec(path=str(folder), head="value", key="critic.path", optimizer=trained.spec.actor.optimizer)
    trained.ensure_roles({"critic": critic})
    theirs = dict(worker_of(trained).roles["critic"].backend.model.named_parameters())
    assert not any("adapter" in name for name in theirs)
    weight = load_file(folder / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(theirs["layers.1.attention.out.weight"], weight)
    trained.release_role("critic")


def test_only_adapters_have_gradients_masters_and_moments(trained: Engine, folder: Path) -> None:
    backend = worker_of(trained).roles["actor"].backend
    adapters, config = trained.spec.actor.lora.adapters, load_config(folder)  # type: ignore[union-attr]
    n = n_adapter_parameters(config, adapters)
    shapes = linear_shapes(config)
    assert n == sum(2 * adapters.rank * sum(shapes[name]) for name in adapters.targets)  # of two layers
    assert n == trained.info.n_adapter_params
    assert sum(p.numel() for p in backend.model.parameters() if p.requires_grad) == n
    held = memory.model_bytes(config, 4, "adam", adapters=adapters)
    assert (held.gradients, held.masters, held.moments) == (4 * n, 0, 8 * n)
    assert held.weights == 4 * (parameters.n_parameters(config) + n)
    flat, moments = backend.flat, backend.optimizer.moments
    assert flat.grads.numel() == flat.params.numel() == pytest.approx(n, abs=16 * len(flat.ranges))
    assert sum(buffer.nbytes for buffer in moments.values()) == pytest.approx(held.moments, rel=0.01)
    in_bf16 = memory.model_bytes(config, 2, "adam", adapters=adapters)
    assert (in_bf16.gradients, in_bf16.masters, in_bf16.moments) == (4 * n, 4 * n, 8 * n)


def test_the_base_stays_as_it_is(trained: Engine, folder: Path) -> None:
    model = worker_of(trained).actor
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"])
    assert torch.equal(model.layers[1].mlp.down.weight, stored["model.layers.1.mlp.down_proj.weight"])


def test_a_folder_of_peft_is_started_from(folder: Path, tmp_path: Path) -> None:
    """Of peft's own making, with another rank, a pattern as target_modules and dropout."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=10,
        target_modules=r".*\.(k|down)_proj",
        use_rslora=True,
        lora_dropout=0.1,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    read = read_adapter_config(tmp_path, load_config(folder))
    assert read.adapters == AdapterSpec(3, 10.0, ("k_proj", "down_proj"), True)
    assert read.base == str(folder)
    with engine_of(folder, LoraSpec(adapters=read.adapters, init_from=str(tmp_path), base=str(folder))) as engine:
        assert apart(scored(engine, "actor", ROWS), of_peft(folder, tmp_path)) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        *("gemma3-tied", "phi3", "qwen3.5"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("glm4", "mistral", "olmo2-tied", "qwen3.5-experts", "smollm3")
        ),
    ],
)
def test_other_families(case: str, tmp_path: Path) -> None:
    """Adapters on all that the family has, as peft has them: rows of heads in the order of the file, norms behind.

    One on what the files keep as one, also on the projections of the gated delta rule.
    """
    random_model(case, tmp_path)
    with engine_of(tmp_path, None) as plain:
        before = scored(plain, "actor", ROWS)
    adapters = lora(tmp_path, tuple(linear_shapes(load_config(tmp_path))), alpha=8.0)
    with engine_of(tmp_path, adapters) as engine:
        assert engine.info.n_adapter_params == n_adapter_parameters(load_config(tmp_path), adapters.adapters)
        train(engine)
        assert train(engine, 1)["logp_abs_diff_max"] < 1e-4
        engine.save(str(tmp_path / "a"))
        engine.save(str(tmp_path / "merged"), merge=True)
        found = scored(engine, "actor", ROWS)
        engine.ensure_roles({"ref": RoleSpec(path=str(tmp_path), head="lm", key="ref.path")})
        assert scored(engine, "ref", ROWS) == before
    # With recurrent states transformers' own float32 is too far off; see test_delta_rounding.py.
    dtype, within = (torch.float32, 1e-5) if load_config(tmp_path).delta is None else (torch.float64, 5e-5)
    assert apart(found, of_peft(tmp_path, tmp_path / "a", dtype=dtype)) < within
    assert apart(found, before) > 0.1
    assert saved_tensors(tmp_path / "merged").keys() == saved_tensors(tmp_path).keys()
    with engine_of(tmp_path / "merged", None) as merged:
        assert apart(scored(merged, "actor", ROWS), found) < within
    with engine_of(tmp_path, replace(adapters, init_from=str(tmp_path / "a"))) as again:
        assert scored(again, "actor", ROWS) == found


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("-window")])
def test_all_linear_is_what_peft_makes_of_it(case: str, tmp_path: Path) -> None:
    import peft
    import transformers

    kind, extra = CASES[case]
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SHAPE, **extra}))
    model.config.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    found = peft.get_peft_model(
        model, peft.LoraConfig(r=3, target_modules="all-linear", exclude_modules=r".*\.shared_expert_gate")
    )
    layers = {name.rsplit(".", 1)[-1]: each for name, each in found.named_modules() if hasattr(each, "lora_A")}
    shapes = {name: (each.out_features, each.in_features) for name, each in layers.items()}
    of_experts = set(EXPERTS.values())  # which peft has in target_parameters
    assert {name: shape for name, shape in linear_shapes(config).items() if name not in of_experts} == shapes
    n_trained, _ = found.get_nb_trainable_parameters()
    assert n_adapter_parameters(config, AdapterSpec(3, 1.0, tuple(shapes))) == n_trained


def test_the_guide_names_the_layers(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/adapters.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.endswith("_proj` |")]
    guide = [(model.partition(",")[0].strip(), re.findall(r"`(\w+)`", names)) for model, names in rows]
    for model, case in (("Phi-3", "phi3"), ("GLM-4", "glm4"), ("Qwen3.5", "qwen3.5"), ("all other models", "olmo2")):
        kind, extra = CASES[case]
        kind(**{**SHAPE, **extra}).save_pretrained(tmp_path)
        named = {name for label, names in guide if label == model for name in names}
        assert named == linear_shapes(load_config(tmp_path)).keys(), model


@pytest.mark.parametrize("case", ["gemma3-tied", "glm4", "olmo3", "phi3-partial-tied", "qwen2-window", "qwen3.5"])
def test_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """Of a folder that peft made, in float64."""
    import peft
    import transformers

    random_model(case, tmp_path)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        peft.LoraConfig(r=3, lora_alpha=10, target_modules="all-linear", init_lora_weights=False),
    ).eval()
    theirs.save_pretrained(str(tmp_path / "a"))
    ours = load(tmp_path)
    read = read_adapter_config(tmp_path / "a", ours.config).adapters
    assert read == AdapterSpec(3, 10.0, tuple(linear_shapes(ours.config)))
    add_adapters(ours, read)
    load_adapters(ours, tmp_path / "a")
    ours.double()
    theirs.double()
    rows = random_rows(101, (7, 33, 1))
    with InFloat64():
        logits = ours.logits(ours(*packed(rows)))
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) / 10
        (logits * weights).sum().backward()
        (torch.cat([theirs(row[None]).logits[0] for row in rows]) * weights).sum().backward()
    grads = {name.replace(".default", ""): each.grad for name, each in theirs.named_parameters()}
    expected = {name: grad for name, grad in grads.items() if grad is not None}
    found = stored_adapters(ours)
    assert found.keys() == expected.keys()
    for name, stored in found.items():
        rows = stored.split(expected[name])
        for entry, order, wanted in zip(stored.entries, stored.orders, rows, strict=True):
            assert entry.parameter.grad is not None
            ordered = wanted if order is None else permute_heads(wanted, order)
            scale, grad = max(1.0, wanted.abs().max().item()), entry.part.region(entry.parameter.grad)
            torch.testing.assert_close(grad.double(), ordered, atol=1e-6 * scale, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "phi3", "qwen3.5"])
def test_a_state_goes_on_exactly(folder: Path, tmp_path: Path, model: str) -> None:
    if model != "qwen3":
        random_model(model, folder := tmp_path / "model")
    adapters, tmp_path = lora(folder, tuple(linear_shapes(load_config(folder)))), tmp_path / "state"
    with engine_of(folder, adapters) as engine:
        train(engine, 1)
        engine.save_state(tmp_path)
        assert engine.is_state_written(wait=True)
        stats, expected = train(engine), scored(engine, "actor", ROWS)
    n_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert n_bytes < 3 * 4 * engine.info.n_adapter_params + 60_000  # none of the base
    with engine_of(folder, adapters) as other:
        other.load_state(tmp_path)
        assert other.weights_version == 1
        assert times_apart(train(other)) == times_apart(stats)
        assert scored(other, "actor", ROWS) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform is [0]"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"target_modules": ["q_proj", "0.self_attn.k_proj"]}, "layers.0.mlp.down_proj.lora_A.weight"),
        ({"target_modules": "("}, "which target_modules of adapter_config.json does not name"),
        ({"r": 0}, "r is 0"),
        ({"r": None, "lora_alpha": "x"}, "r is missing"),
    ],
)
def test_fields_that_are_not_supported_are_named(
    trained: Engine, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    trained.save(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(tmp_path, load_config(folder))
    assert named in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


def spoiled(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    if how == "lack":
        del tensors[first]
    elif how == "hold":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(1)
    elif how == "shape":
        tensors[first] = torch.zeros(4, 7)
    else:
        tensors[first] = torch.full_like(tensors[first], float("nan"))
    return tensors


@pytest.mark.parametrize(
    ("how", "named"),
    [("lack", "lack base_model"), ("hold", "hold base_model.model.lm_head"), ("shape", "(4, 7)"), ("nan", "nan")],
)
def test_weights_that_do_not_fit_are_refused(
    trained: Engine, folder: Path, tmp_path: Path, how: str, named: str
) -> None:
    trained.save(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = spoiled(load_file(file), how)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as caught:
        read_and_load(folder, tmp_path)
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def read_and_load(folder: Path, adapters: Path) -> None:
    read = read_adapter_config(adapters, load_config(folder)).adapters
    engine_of(folder, LoraSpec(adapters=read, init_from=str(adapters)))
